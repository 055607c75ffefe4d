"""However many requests go at once, in however many messages: the scheduler looks at a long queue once in a while."""

from __future__ import annotations

from typing import Self

from fabric.ids import FrontendId, ModelId
from fabric.messages import Arrivals, SeqRun, Withdraw
from policies.batching.run_queue import RunQueue
from roles.config.cluster import PolicyChoice
from roles.runtime.core import Heard, Tick
from roles.scheduler.dispatch.withdrawals import AT_ONCE_MAX, GATHERED_MAX
from tests.scheduler_stage import NODES, Cluster

A, B = ModelId("a"), ModelId("b")


class Looks:
    """Counts the looks at queues while it is entered."""

    def __init__(self) -> None:
        self.runs = 0

    def __enter__(self) -> Self:
        self._inner = inner = RunQueue.withdraw

        def counted(queue: RunQueue, *arguments: object) -> int:
            self.runs += len(queue.runs)
            return inner(queue, *arguments)  # type: ignore[arg-type]  # as they came

        RunQueue.withdraw = counted  # type: ignore[method-assign,assignment]  # put back below
        return self

    def __exit__(self, *_: object) -> None:
        RunQueue.withdraw = self._inner  # type: ignore[method-assign]


def waiting(count: int) -> Cluster:
    """So many requests of `a` and of `b` wait, each a run of its own."""
    on = Cluster(PolicyChoice("tenuto", {}), {A: "line", B: "line"}, (3_600_000.0,) * 2)
    on.frontend_comes("f")
    on.frontend_comes("g")
    for node in NODES:
        on.agent_comes(node, knows_slices=True)
    for slice_id in sorted(on.wanted):
        on.slice_comes(slice_id)
    peer = on.frontends[FrontendId("f")]
    for seq in range(-100, 0):  # some of these occupy the slices
        for model_id in (A, B):
            on.core.handle(Heard(peer, Arrivals(model_id, seq + 1_000_000, 1, 1_000_000.0)), on.now_ms)
            on.core._discipline.withdraw(model_id, FrontendId(peer), [(seq + 1_000_000, 1)], on.now_ms)
    for seq in range(count):
        for model_id in (A, B):
            on.core.handle(Heard(peer, Arrivals(model_id, seq, 1, 3_000_000.0)), on.now_ms)
    return on


def withdraw(on: Cluster, model_id: ModelId, seq: int, frontend: str = "f") -> None:
    peer = on.frontends[FrontendId(frontend)]
    assert not on.core.handle(Heard(peer, Withdraw(model_id, (SeqRun(seq, 1),))), on.now_ms)


def queued(on: Cluster, model_id: ModelId) -> int:
    return on.core._discipline.queued(model_id)


def test_a_short_queue_is_looked_at_for_every_message() -> None:
    on = waiting(10)
    withdraw(on, A, 3)
    assert (queued(on, A), queued(on, B)) == (9, 10)


def test_a_long_queue_is_looked_at_once_for_many_messages() -> None:
    on = waiting(5_000)
    with Looks() as looks:
        for seq in range(4_000):
            withdraw(on, A, seq)
            withdraw(on, B, seq)
        assert looks.runs == 0
        assert on.core._withdrawals.due_at_ms == on.now_ms + 10.0, "5,000 requests by 500 a ms"
        on.now_ms += 10.0
        on.core.handle(Tick(), on.now_ms)
        assert looks.runs == 5_000, "of one model in a turn"
        on.core.handle(Tick(), on.now_ms)
    assert 9_900 < looks.runs <= 10_000, "a slice may have taken some meanwhile"
    assert 900 < queued(on, A) <= 1_000
    assert 900 < queued(on, B) <= 1_000


def test_what_is_gathered_is_bounded() -> None:
    on = waiting(2_000)
    spans = tuple(SeqRun(2 * seq, 1) for seq in range(4_096))
    peer = on.frontends[FrontendId("f")]
    for _ in range(GATHERED_MAX // 4_096 + 1):
        on.core.handle(Heard(peer, Withdraw(A, spans)), on.now_ms)
    assert on.core._withdrawals.due_at_ms == on.now_ms
    on.core.handle(Tick(), on.now_ms)
    assert queued(on, A) == 1_000
    assert on.core._withdrawals._count == 0


def test_of_a_frontend_or_a_model_that_is_gone_nothing_stays() -> None:
    on = waiting(2 * AT_ONCE_MAX)
    withdraw(on, A, 1)
    withdraw(on, B, 1)
    on.frontend_goes("f")
    assert on.core._withdrawals._count == 0
    on.wait(100.0)
    on = waiting(2 * AT_ONCE_MAX)
    withdraw(on, A, 1)
    on.core._batches.retire(A, "ModelNotFound", "it was removed", on.now_ms)
    assert on.core._withdrawals._count == 0
    on.core.handle(Tick(), on.now_ms + 100.0)


def test_another_frontends_requests_of_the_same_numbers_stay() -> None:
    on = waiting(2 * AT_ONCE_MAX)
    for seq in range(100):
        withdraw(on, A, seq, frontend="g")
    on.core.handle(Tick(), on.now_ms + 100.0)
    assert queued(on, A) > 2 * AT_ONCE_MAX - 50, "a slice may have taken some meanwhile"
