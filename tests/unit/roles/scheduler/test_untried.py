"""What a bad moment taught is forgotten, also where it leaves nothing to run that could teach anything better."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fabric.ids import BatchId, FrontendId, Incarnation, ModelId, NodeId, PeerId, SliceId
from fabric.messages import (
    Arrivals,
    Done,
    FrontendHello,
    ModelSpec,
    NodeHello,
    ReplicaInfo,
    RunBatch,
    SliceReady,
    SliceSpec,
)
from policies.batching.base import Drop, RequestRun
from policies.batching.registry import DISCIPLINES, make_discipline
from roles.runtime.core import Heard, Tick
from roles.scheduler.core import SchedulerCore
from roles.scheduler.dispatch.untried import FORGET_EVERY_MS
from roles.scheduler.settings import SchedulerSettings

MODEL = ModelId("m")
NODE, SLICE, FIRST = NodeId("a"), SliceId("a/gpu0/0"), Incarnation("00000001")
FRONTEND, WORKER, AGENT = (
    PeerId("frontend-0/00000001"),
    PeerId("worker-a-1/00000001"),
    PeerId("node-a/00000001"),
)
EXEC_MS = tuple(1.0 * b + 6.0 for b in range(1, 9))
SLO_MS = 100.0
OPTIONS: dict[str, dict[str, float]] = {"timeout": {"slo_percent": 20}}
BATCHINGS = sorted(set(DISCIPLINES) - {"fixed"})
"""`fixed` runs the batch sizes of a plan, and there is none here."""


class Cluster:
    """A core, and a worker whose runs take what `times_ms` says: the way there, and the run."""

    def __init__(self, batching: str, times_ms: Callable[[int], tuple[float, float]]) -> None:
        models = (ModelSpec(MODEL, SLO_MS, 8, None, EXEC_MS),)
        spec = SliceSpec(SLICE, 0, "emulated", None, models)
        self.core = SchedulerCore(
            SchedulerSettings(models=models, slices=((NODE, spec),)),
            make_discipline(batching, OPTIONS.get(batching, {})),
        )
        self.runs: list[float] = []
        """When each batch was sent."""
        self._times_ms = times_ms
        self._due: list[tuple[float, Done]] = []
        self._seq = 0
        replicas = (ReplicaInfo(MODEL, 8, EXEC_MS),)
        self._hear(FRONTEND, FrontendHello(FrontendId("frontend-0"), FIRST, ("ipc:///f",)), 0.0)
        self._hear(AGENT, NodeHello(NODE, FIRST, (), ()), 0.0)
        self._hear(WORKER, SliceReady(SLICE, FIRST, NODE, 0, ("ipc:///w",), replicas), 0.0)

    def ask(self, at_ms: float, budget_ms: float) -> None:
        self.play(at_ms)
        self._hear(FRONTEND, Arrivals(MODEL, self._seq, 1, budget_ms=budget_ms), at_ms)
        self._seq += 1

    def play(self, until_ms: float) -> None:
        """Ticks and ends of batches, in their order."""
        for _ in range(100_000):
            tick_ms = self.core.wake_at_ms
            done_ms = min((at_ms for at_ms, _ in self._due), default=None)
            at_ms = min((one for one in (tick_ms, done_ms) if one is not None), default=until_ms)
            if at_ms >= until_ms:
                return
            if at_ms == done_ms:
                ended = min(self._due, key=lambda one: one[0])
                self._due.remove(ended)
                self._hear(WORKER, ended[1], at_ms)
            else:
                self._act(self.core.handle(Tick(), at_ms), at_ms)

    def _hear(self, peer: PeerId, message: object, at_ms: float) -> None:
        self._act(self.core.handle(Heard(peer, message, 0.0), at_ms), at_ms)  # type: ignore[arg-type]

    def _act(self, sends: object, at_ms: float) -> None:
        for send in sends:  # type: ignore[attr-defined]
            if isinstance(send.message, RunBatch):
                way_ms, run_ms = self._times_ms(len(self.runs))
                self.runs.append(at_ms)
                count = sum(run.count for part in send.message.parts for run in part.runs)
                done = Done(
                    BatchId(send.message.batch_id), SLICE, MODEL, "ok", count, (), way_ms, 0.0, run_ms
                )
                self._due.append((at_ms + way_ms + run_ms, done))


def usual(_: int) -> tuple[float, float]:
    return 0.1, EXEC_MS[0]


@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize(("way_ms", "run_ms"), [(1_900.0, 7.0), (0.1, 1_900.0)])
@pytest.mark.parametrize("budget_ms", [0.5 * SLO_MS, SLO_MS])
def test_after_one_stall_the_next_requests_are_tried_again(
    batching: str, way_ms: float, run_ms: float, budget_ms: float
) -> None:
    cluster = Cluster(batching, lambda number: (way_ms, run_ms) if number == 10 else usual(number))
    for number in range(40):
        cluster.ask(100.0 + 100.0 * number, budget_ms)
    served = len(cluster.runs)
    for number in range(60):
        cluster.ask(6_000.0 + 100.0 * number, budget_ms)
    cluster.play(13_000.0)
    late = [at_ms for at_ms in cluster.runs if at_ms >= 9_000.0]
    assert len(late) >= 28, f"{served} before, {len(cluster.runs)} in all, {len(late)} of the last 30"


@pytest.mark.parametrize("batching", BATCHINGS)
def test_a_slice_that_stays_too_slow_is_not_given_hopeless_batches_all_the_time(batching: str) -> None:
    cluster = Cluster(batching, lambda number: usual(number) if number < 10 else (0.1, 300.0))
    for number in range(240):
        cluster.ask(100.0 + 100.0 * number, SLO_MS)
    cluster.play(30_000.0)
    late = [at_ms for at_ms in cluster.runs if at_ms >= 14_000.0]
    assert len(late) <= 3, "of 100 requests, which are 3 % of the device's time"


@pytest.mark.parametrize(
    ("is_expired", "retry_after_ms"),
    [(True, None), (False, None), (False, 100.0)],
    ids=["late", "for a batch", "over its share"],
)
def test_whatever_the_reason_a_drop_makes_us_doubt_what_keeps_slices_idle(
    is_expired: bool, retry_after_ms: float | None
) -> None:
    """Where the other slices nearly carry the load, requests are given up for a batch before any expires."""
    batches = Cluster("deferred", lambda _: (0.0, 7.0)).core._batches
    run = RequestRun(FrontendId("frontend-0"), 0, 1, 100.0, 0.0, 0.0)
    batches._drop(Drop(MODEL, [run], is_expired=is_expired, retry_after_ms=retry_after_ms), 50.0, [])
    assert batches.untried.due_at_ms == 50.0 + FORGET_EVERY_MS
    assert batches.untried.take() == {MODEL}
