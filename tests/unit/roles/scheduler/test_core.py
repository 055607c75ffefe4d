"""The scheduler core on virtual time: messages in, messages out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import TypeVar

import msgspec
import pytest

from fabric.ids import BatchId, FrontendId, Incarnation, ModelId, NodeId, PeerId, SliceId
from fabric.limits import DURATION_MAX_MS, check
from fabric.messages import (
    AnyMessage,
    Arrivals,
    DesiredSlices,
    Directory,
    Done,
    Dropped,
    FrontendHello,
    Grant,
    ModelSpec,
    NodeHello,
    Part,
    ReplicaInfo,
    Returned,
    RunBatch,
    SeqRun,
    SliceChanged,
    SliceReady,
    SliceSpec,
    SliceStatus,
    StatusAsked,
    StatusListed,
    Withdraw,
)
from policies.batching.registry import make_discipline
from roles.runtime.core import Heard, Lost, Send, Tick
from roles.scheduler.core import SchedulerCore
from roles.scheduler.dispatch.batches import LATE_AFTER_MS, LATE_MAX
from roles.scheduler.settings import SchedulerSettings

MODEL = ModelId("resnet50")
NODE = NodeId("local")
FRONTEND = PeerId("frontend-0/00000001")
WORKER = PeerId("worker-local-0/00000001")
AGENT = PeerId("node-local/00000001")
FIRST = Incarnation("00000001")
EXEC_MS = tuple(1.0 * b + 5.0 for b in range(1, 9))  # l(b) = b + 5


def slice_id(k: int = 0) -> SliceId:
    return SliceId(f"local/gpu{k}/0")


def settings(slices: int = 1) -> SchedulerSettings:
    model = ModelSpec(MODEL, 20.0, 8, None, EXEC_MS)
    return SchedulerSettings(
        models=(model,),
        slices=tuple((NODE, SliceSpec(slice_id(k), k, "emulated", None, (model,))) for k in range(slices)),
    )


def new_core(slices: int = 1) -> SchedulerCore:
    return SchedulerCore(settings(slices), make_discipline("deferred", {}))


def ready(k: int = 0, incarnation: Incarnation = FIRST) -> SliceReady:
    replica = ReplicaInfo(MODEL, 8, EXEC_MS)
    return SliceReady(slice_id(k), incarnation, NODE, k, ("ipc:///w",), (replica,))


def serving_core(slices: int = 1) -> SchedulerCore:
    """A core with one frontend and every slice ready; everybody has the directory."""
    return serving(new_core(slices), slices)


def serving(core: SchedulerCore, slices: int) -> SchedulerCore:
    """The same of any core."""
    hear(core, FRONTEND, FrontendHello(FrontendId("frontend-0"), FIRST, ("ipc:///f",)))
    hear(core, AGENT, NodeHello(NODE, FIRST, (), ()))
    for k in range(slices):
        hear(core, WORKER, ready(k))
    core.handle(Tick(), 2.0)
    return core


def hear(
    core: SchedulerCore, peer: PeerId, message: AnyMessage, now_ms: float = 0.0, late_ms: float = 0.0
) -> Sequence[Send]:
    return core.handle(Heard(peer, message, late_ms), now_ms)


def run_until(core: SchedulerCore, until_ms: float) -> list[tuple[float, Send]]:
    """Tick whenever the core asks for it."""
    sent: list[tuple[float, Send]] = []
    for _ in range(1_000):
        wake_at_ms = core.wake_at_ms
        if wake_at_ms is None or wake_at_ms > until_ms:
            return sent
        sent.extend((wake_at_ms, send) for send in core.handle(Tick(), wake_at_ms))
    raise AssertionError("the core asks for ticks for ever")


MessageT = TypeVar("MessageT")


def of_type(sends: Sequence[Send], kind: type[MessageT]) -> list[MessageT]:
    return [send.message for send in sends if isinstance(send.message, kind)]


def test_an_agent_hears_what_should_exist_on_its_node() -> None:
    core = new_core(slices=2)
    wants = of_type(hear(core, AGENT, NodeHello(NODE, FIRST, (), ())), DesiredSlices)
    assert [spec.slice_id for spec in wants[0].slices] == [slice_id(0), slice_id(1)]


def test_a_frontend_hears_the_directory_at_once_and_of_a_new_slice_soon() -> None:
    core = new_core()
    first = of_type(
        hear(core, FRONTEND, FrontendHello(FrontendId("frontend-0"), FIRST, ("ipc:///f",))), Directory
    )
    assert first[0].slices == ()
    assert hear(core, WORKER, ready(), now_ms=10.0) == []
    news = of_type([send for _, send in run_until(core, 20.0)], Directory)
    assert [info.slice_id for info in news[0].slices] == [slice_id()]
    assert news[0].models[0].replicas == 1


def test_a_batch_waits_until_the_frontrun_moment() -> None:
    core = serving_core()
    assert not hear(core, FRONTEND, Arrivals(MODEL, 0, 1, budget_ms=20.0), now_ms=100.0)
    assert core.wake_at_ms == pytest.approx(100.0 + 20.0 - (2 + 5), abs=1e-4)
    sends = core.handle(Tick(), 113.0)
    (batch,) = of_type(sends, RunBatch)
    (grant,) = of_type(sends, Grant)
    assert batch.parts == (Part(FrontendId("frontend-0"), (SeqRun(0, 1),)),)
    assert (batch.start_in_ms, batch.latest_in_ms) == (0.0, 1.0)
    assert (grant.runs, grant.batch_size, grant.part) == ((SeqRun(0, 1),), 1, 0)
    assert grant.batch_id == batch.batch_id


def test_a_budget_shrinks_by_what_the_message_was_late() -> None:
    core = serving_core()
    hear(core, FRONTEND, Arrivals(MODEL, 0, 1, budget_ms=20.0), now_ms=100.0, late_ms=3.0)
    assert core.wake_at_ms == pytest.approx(100.0 - 3.0 + 20.0 - (2 + 5), abs=1e-4)


def test_an_unknown_model_is_refused() -> None:
    core = serving_core()
    (dropped,) = of_type(hear(core, FRONTEND, Arrivals(ModelId("vgg"), 0, 3, 20.0), 5.0), Dropped)
    assert (dropped.code, dropped.runs) == ("ModelNotFound", (SeqRun(0, 3),))


def test_a_model_without_a_ready_slice_is_refused() -> None:
    core = new_core()
    hear(core, FRONTEND, FrontendHello(FrontendId("frontend-0"), FIRST, ()))
    (dropped,) = of_type(hear(core, FRONTEND, Arrivals(MODEL, 0, 3, 20.0), 5.0), Dropped)
    assert dropped.code == "NoReplica"


def test_what_can_no_longer_finish_is_dropped_as_expired() -> None:
    core = serving_core()
    sends = list(hear(core, FRONTEND, Arrivals(MODEL, 0, 1, budget_ms=5.0), now_ms=100.0))
    sends += [send for _, send in run_until(core, 106.0)]
    (dropped,) = of_type(sends, Dropped)
    assert dropped.code == "DeadlineExceeded"
    assert of_type(sends, RunBatch) == []


def test_requests_go_when_their_inputs_are_ready() -> None:
    core = serving_core()
    assert not hear(core, FRONTEND, Arrivals(MODEL, 0, 8, 20.0, ready_in_ms=5.0), 2.0)
    assert core.wake_at_ms == 7.0
    (batch,) = of_type(core.handle(Tick(), 7.0), RunBatch)
    assert (batch.start_in_ms, batch.latest_in_ms) == (0.0, 22.0 - 13.0 - 7.0)


def test_withdrawn_requests_never_run() -> None:
    core = serving_core()
    hear(core, FRONTEND, Arrivals(MODEL, 0, 4, budget_ms=20.0), now_ms=100.0)
    hear(core, FRONTEND, Withdraw(MODEL, (SeqRun(1, 2),)), now_ms=101.0)
    (grant,) = of_type([send for _, send in run_until(core, 130.0)], Grant)
    assert grant.runs == (SeqRun(0, 1), SeqRun(3, 1))


def test_a_batch_is_of_use_until_its_slack_is_gone_too() -> None:
    batches = []
    for slack_ms in (0.0, 3.0):
        sends = hear(serving_core(), FRONTEND, Arrivals(MODEL, 0, 8, 20.0, slack_ms=slack_ms), 1.0)
        batches += of_type(sends, RunBatch)
    plain, slack = batches
    assert (slack.start_in_ms, slack.latest_in_ms) == (plain.start_in_ms, plain.latest_in_ms)
    assert slack.expires_in_ms == plain.expires_in_ms + 3.0


def test_a_batch_is_of_use_as_long_as_its_loosest_request_is() -> None:
    """One that was asked with a long budget has much slack, and may be before one that has hardly any."""
    core = serving_core()
    hear(core, FRONTEND, Arrivals(MODEL, 0, 1, 400.0, slack_ms=40.0), 0.0)
    hear(core, FRONTEND, Arrivals(MODEL, 1, 1, 40.5, slack_ms=0.5), 360.0)
    ((sent_at_ms, batch),) = (
        (at_ms, send.message) for at_ms, send in run_until(core, 500.0) if isinstance(send.message, RunBatch)
    )
    assert batch.parts == (Part(FrontendId("frontend-0"), (SeqRun(0, 2),)),)
    assert sent_at_ms + batch.expires_in_ms == pytest.approx(400.0 + 40.0 - EXEC_MS[1])


def dispatched(core: SchedulerCore, now_ms: float, first_seq: int = 0) -> RunBatch:
    """Fill a batch of 8: it goes at once."""
    (batch,) = of_type(hear(core, FRONTEND, Arrivals(MODEL, first_seq, 8, 20.0), now_ms), RunBatch)
    return batch


def test_missing_inputs_go_back_to_their_frontend() -> None:
    core = serving_core()
    batch = dispatched(core, 100.0)
    done = Done(batch.batch_id, slice_id(), MODEL, "expired", 0, batch.parts, 0.1, 0.0, 0.0)
    (returned,) = of_type(hear(core, WORKER, done, 111.0), Returned)
    assert returned.runs == (SeqRun(0, 8),)


def test_a_scheduler_whose_batches_come_back_without_inputs_sends_them_earlier() -> None:
    core = serving_core()
    at_ms = 100.0
    sent_after_ms = []
    for seq in range(12):
        hear(core, FRONTEND, Arrivals(MODEL, seq, 1, budget_ms=20.0), at_ms)
        wake_at_ms = core.wake_at_ms
        assert wake_at_ms is not None
        (batch,) = of_type(core.handle(Tick(), wake_at_ms), RunBatch)
        sent_after_ms.append(round(wake_at_ms - at_ms, 6))
        waited_ms = batch.latest_in_ms
        done = Done(batch.batch_id, slice_id(), MODEL, "expired", 0, batch.parts, waited_ms, 0.0, 0.0)
        assert of_type(hear(core, WORKER, done, wake_at_ms + waited_ms), Returned)
        at_ms += 100.0
    assert sent_after_ms[0] == pytest.approx(13.0, abs=0.01)
    assert sent_after_ms == sorted(sent_after_ms, reverse=True)
    # Half of the SLO is the most that is kept for a lone request's inputs: later ones must be able to show better.
    assert sent_after_ms[-1] == pytest.approx(20.0 - 10.0 - 7.0, abs=0.5)


def test_a_slice_holds_two_batches_and_a_done_makes_room_for_the_third() -> None:
    core = serving_core()
    first = dispatched(core, 100.0)  # runs until 113 by its profile
    hear(core, FRONTEND, Arrivals(MODEL, 8, 1, 40.0), 101.0)
    second = of_type([send for _, send in run_until(core, 140.0)], RunBatch)
    assert len(second) == 1, "a prediction is enough for one batch more"
    hear(core, FRONTEND, Arrivals(MODEL, 9, 1, 100.0), 141.0)
    assert of_type([send for _, send in run_until(core, 200.0)], RunBatch) == []
    done = Done(first.batch_id, slice_id(), MODEL, "ok", 8, (), 0.1, 0.0, 13.0)
    sends = list(hear(core, WORKER, done, 200.0)) + [send for _, send in run_until(core, 240.0)]
    assert len(of_type(sends, RunBatch)) == 1


def test_a_slice_whose_batch_is_late_gets_no_other_one_and_nobody_is_held_for_it() -> None:
    """Half a slice's worth of work; the lowest of three slices hangs from a second on. What does not go there is sent at once, as if it were not there."""
    slo_ms, gap_ms, hangs_at_ms, until_ms = 500.0, 20.0, 1_000.0, 4_000.0
    model = ModelSpec(MODEL, slo_ms, 8, None, EXEC_MS)
    slices = tuple((NODE, SliceSpec(slice_id(k), k, "emulated", None, (model,))) for k in range(3))
    core = serving(SchedulerCore(SchedulerSettings((model,), slices), make_discipline("tenuto", {})), 3)
    ends: list[tuple[float, Done]] = []
    waited_ms: dict[int, float] = {}
    swallowed: list[int] = []

    def take(sends: Sequence[Send], now_ms: float) -> None:
        for batch in of_type(sends, RunBatch):
            seqs = [
                seq
                for part in batch.parts
                for run in part.runs
                for seq in range(run.first_seq, run.first_seq + run.count)
            ]
            if batch.slice_id == slice_id(0) and now_ms >= hangs_at_ms:
                swallowed.extend(seqs)
                continue
            waited_ms.update({seq: now_ms - gap_ms * seq for seq in seqs})
            exec_ms = EXEC_MS[len(seqs) - 1]
            done = Done(batch.batch_id, batch.slice_id, MODEL, "ok", len(seqs), (), 0.1, 0.0, exec_ms)
            heappush(ends, (now_ms + batch.start_in_ms + exec_ms, done))

    def play(until_ms: float) -> None:
        while True:
            wake_at_ms = math.inf if core.wake_at_ms is None else core.wake_at_ms
            at_ms = min(wake_at_ms, ends[0][0] if ends else math.inf)
            if at_ms > until_ms:
                return
            if at_ms == wake_at_ms:
                take(core.handle(Tick(), at_ms), at_ms)
            else:
                take(hear(core, WORKER, heappop(ends)[1], at_ms), at_ms)

    for seq in range(1, int(until_ms / gap_ms)):
        play(gap_ms * seq)
        take(hear(core, FRONTEND, Arrivals(MODEL, seq, 1, slo_ms), gap_ms * seq), gap_ms * seq)
    play(until_ms + slo_ms)
    assert len(swallowed) + len(waited_ms) == int(until_ms / gap_ms) - 1
    assert len(swallowed) <= 12, "a batch or two every two seconds, as its word may be lost only"
    found_ms = LATE_AFTER_MS + EXEC_MS[0]
    assert max(waited_ms.values()) <= found_ms + gap_ms
    assert sum(waited > gap_ms for waited in waited_ms.values()) <= 3 * found_ms / gap_ms


@pytest.mark.parametrize("heard_at_ms", [None, 150.0, 300.0])
@pytest.mark.parametrize("slices", [1, 2])
def test_a_slice_of_which_only_the_word_of_an_end_was_lost_goes_on(
    slices: int, heard_at_ms: float | None
) -> None:
    """Where no other can serve it is tried; where it was heard of since, it does not hang."""
    core = serving_core(slices)
    batch = dispatched(core, 100.0)  # ends at 113, of which nobody hears
    if heard_at_ms is not None:
        run_until(core, heard_at_ms)
        hear(core, WORKER, ready(), heard_at_ms)
    run_until(core, 400.0)
    assert core._fleet.slices[batch.slice_id].is_late == (slices == 2 and heard_at_ms is None)
    again = dispatched(core, 400.0, first_seq=8)
    assert (again.slice_id == batch.slice_id) == (slices == 1 or heard_at_ms is not None)
    done = Done(again.batch_id, again.slice_id, MODEL, "ok", 8, (), 0.1, 0.0, 13.0)
    hear(core, WORKER, done, 413.0)
    assert core.counters.batches_lost == 0


@pytest.mark.parametrize("told_at_ms", [130.0, 150.0, 300.0])
@pytest.mark.parametrize("status", ["expired", "ok"])
@pytest.mark.parametrize("slices", [1, 2])
def test_what_ends_behind_a_batch_that_hangs_and_never_ran_says_nothing_of_the_device(
    slices: int, status: str, told_at_ms: float
) -> None:
    """Its worker's loop lives and says that the second batch expired, or that its requests were cancelled: it gets no third one."""
    core = serving_core(slices)
    first = dispatched(core, 100.0)  # ends at 113, of which nobody hears
    hear(core, FRONTEND, Arrivals(MODEL, 8, 8, 200.0), 113.5)
    record = core._fleet.slices[first.slice_id]
    assert len(record.flights) == 2
    run_until(core, told_at_ms)
    missing = record.flights[1].parts if status == "expired" else ()
    behind = Done(record.flights[1].batch_id, first.slice_id, MODEL, status, 0, missing, 0.0, 0.0, 0.0)
    hear(core, WORKER, behind, told_at_ms)
    third = dispatched(core, told_at_ms + 1.0, first_seq=16)
    assert (third.slice_id == first.slice_id) == (slices == 1), "where no other can serve it is tried"
    run_until(core, 400.0)
    assert record.is_late == (slices == 2)
    done = Done(first.batch_id, first.slice_id, MODEL, "ok", 8, (), 0.1, 0.0, 300.0)
    hear(core, WORKER, done, 400.0)
    assert not record.is_late


def test_a_slice_stays_late_until_it_is_heard_of_or_given_up() -> None:
    """Also when its second batch is late too, and the other slice is gone by then: the discipline is told the same as the record says."""
    core = serving_core(2)
    batch = dispatched(core, 100.0)
    hear(core, FRONTEND, Arrivals(MODEL, 8, 8, 200.0), 113.5)
    record = core._fleet.slices[batch.slice_id]
    assert len(record.flights) == 2
    found = []
    for until_ms in (213.5, 300.0, 2_200.0):
        run_until(core, until_ms)
        found.append(record.is_late)
        if until_ms == 213.5:
            hear(core, AGENT, SliceChanged(NODE, SliceStatus(slice_id(1), FIRST, "lost", "")), 214.0)
    assert found == [True, True, False]
    assert dispatched(core, 2_201.0, first_seq=16).slice_id == batch.slice_id


def test_a_late_slice_that_is_replaced_is_used_at_once() -> None:
    core = serving_core(2)
    batch = dispatched(core, 100.0)
    run_until(core, 400.0)
    assert core._fleet.slices[batch.slice_id].is_late
    hear(core, PeerId("worker-local-0/00000002"), ready(0, Incarnation("00000002")), 400.0)
    assert dispatched(core, 401.0, first_seq=8).slice_id == batch.slice_id


def test_many_that_are_late_at_once_do_not_hang() -> None:
    """But the scheduler did, or the network: they are not left alone all of them."""
    core = serving_core(2 * LATE_MAX)
    for k in range(2 * LATE_MAX - 1):
        dispatched(core, 100.0, first_seq=8 * k)
    run_until(core, 400.0)
    assert sum(record.is_late for record in core._fleet.slices.values()) == LATE_MAX


def test_a_slice_whose_done_was_lost_is_used_again() -> None:
    core = serving_core()
    dispatched(core, 100.0)
    hear(core, FRONTEND, Arrivals(MODEL, 8, 1, 40.0), 101.0)
    run_until(core, 140.0)
    sent = run_until(core, 10_000.0)
    assert of_type([send for _, send in sent], RunBatch) == []
    assert core.counters.batches_lost == 2
    assert dispatched(core, 10_001.0, first_seq=9).slice_id == slice_id()


def test_nothing_is_in_flight_for_ever_though_the_only_done_was_lost() -> None:
    core = serving_core()
    dispatched(core, 100.0)
    run_until(core, 10_000.0)
    assert core.counters.batches_lost == 1
    assert not core._batches.flights


def test_a_lost_slice_is_out_of_the_directory_at_once_and_takes_no_more_batches() -> None:
    core = serving_core()
    dispatched(core, 100.0)
    lost = SliceChanged(NODE, SliceStatus(slice_id(), FIRST, "lost", "killed"))
    (directory, *_) = of_type(hear(core, AGENT, lost, 105.0), Directory)
    assert directory.slices == ()
    assert directory.models[0].replicas == 0
    (dropped,) = of_type(hear(core, FRONTEND, Arrivals(MODEL, 8, 1, 20.0), 106.0), Dropped)
    assert dropped.code == "NoReplica"


def test_what_waits_for_the_last_slice_is_refused_when_it_is_lost() -> None:
    core = serving_core()
    hear(core, FRONTEND, Arrivals(MODEL, 0, 3, 20.0), 100.0)
    lost = SliceChanged(NODE, SliceStatus(slice_id(), FIRST, "lost", "killed"))
    (dropped,) = of_type(hear(core, AGENT, lost, 105.0), Dropped)
    assert (dropped.code, dropped.runs) == ("NoReplica", (SeqRun(0, 3),))


def test_news_of_a_former_incarnation_change_nothing() -> None:
    core = serving_core()
    old = SliceChanged(NODE, SliceStatus(slice_id(), Incarnation("0000dead"), "lost", "killed"))
    assert not hear(core, AGENT, old, 105.0)
    assert dispatched(core, 106.0).incarnation == FIRST


def test_a_restarted_slice_serves_again() -> None:
    core = serving_core()
    lost = SliceChanged(NODE, SliceStatus(slice_id(), FIRST, "lost", "killed"))
    hear(core, AGENT, lost, 105.0)
    second = Incarnation("00000002")
    hear(core, PeerId(f"worker-local-1/{second}"), ready(incarnation=second), 110.0)
    run_until(core, 112.0)
    assert dispatched(core, 120.0).incarnation == second


def test_a_lost_agent_takes_its_slices_along() -> None:
    core = serving_core(slices=2)
    (directory, *_) = of_type(core.handle(Lost(AGENT, "silent"), 50.0), Directory)
    assert directory.slices == ()


@pytest.mark.parametrize("lost", [WORKER, AGENT])
def test_a_worker_that_was_only_silent_sees_that_it_is_not_listed_and_serves_again(lost: PeerId) -> None:
    core = serving_core()
    sends = core.handle(Lost(lost, "silent"), 50.0)
    told = [send.message for send in sends if send.peer == WORKER]
    assert [message.slices for message in told if isinstance(message, Directory)] == [()]
    hear(core, WORKER, ready(), 60.0)
    run_until(core, 62.0)
    assert dispatched(core, 70.0).slice_id == slice_id()


def test_an_agent_that_was_only_silent_is_told_and_its_hello_is_taken() -> None:
    core = serving_core()
    sends = core.handle(Lost(AGENT, "silent"), 50.0)
    assert of_type([send for send in sends if send.peer == AGENT], Directory)
    (want,) = of_type(hear(core, AGENT, NodeHello(NODE, FIRST, (), ()), 60.0), DesiredSlices)
    assert [spec.slice_id for spec in want.slices] == [slice_id()]


def test_requests_of_a_lost_frontend_do_not_run() -> None:
    core = serving_core()
    hear(core, FRONTEND, Arrivals(MODEL, 0, 3, 20.0), 100.0)
    core.handle(Lost(FRONTEND, "silent"), 101.0)
    assert of_type([send for _, send in run_until(core, 150.0)], RunBatch) == []
    other = PeerId("frontend-1/00000001")
    hear(core, other, FrontendHello(FrontendId("frontend-1"), FIRST, ()), 151.0)
    (batch,) = of_type(hear(core, other, Arrivals(MODEL, 0, 8, 20.0), 152.0), RunBatch)
    assert batch.parts == (Part(FrontendId("frontend-1"), (SeqRun(0, 8),)),)


def test_a_frontend_that_has_not_said_hello_sees_that_it_is_not_listed() -> None:
    core = serving_core()
    stranger = PeerId("frontend-7/dddddddd")
    sends = list(hear(core, stranger, Arrivals(MODEL, 0, 1, budget_ms=20.0), now_ms=100.0))
    sends += [send for _, send in run_until(core, 200.0)]
    told = [send for send in sends if send.peer == stranger]
    assert of_type(told, Directory)[0].frontends[0].frontend_id == "frontend-0"
    assert len(of_type(told, Directory)[0].frontends) == 1
    assert not of_type(told, Grant)


def test_a_slice_whose_batches_got_smaller_is_given_smaller_ones() -> None:
    core = serving_core()
    hear(core, FRONTEND, Arrivals(MODEL, 0, 8, budget_ms=20.0), now_ms=100.0)
    smaller = msgspec.structs.replace(ready(), replicas=(ReplicaInfo(MODEL, 2, EXEC_MS[:2]),))
    hear(core, WORKER, smaller, now_ms=101.0)
    hear(core, WORKER, Done(BatchId(1), slice_id(), MODEL, "ok", 8, (), 0.0, 0.0, 13.0), now_ms=113.0)
    hear(core, FRONTEND, Arrivals(MODEL, 8, 4, budget_ms=20.0), now_ms=120.0)
    batches = of_type([send for _, send in run_until(core, 300.0)], RunBatch)
    assert next(sum(run.count for part in batch.parts for run in part.runs) for batch in batches) == 2


def test_a_batch_of_two_frontends_has_two_parts() -> None:
    core = serving_core()
    other = PeerId("frontend-1/00000001")
    hear(core, other, FrontendHello(FrontendId("frontend-1"), FIRST, ()), 90.0)
    hear(core, FRONTEND, Arrivals(MODEL, 0, 5, 20.0), 100.0)
    sends = hear(core, other, Arrivals(MODEL, 0, 3, 20.0), 100.5)
    (batch,) = of_type(sends, RunBatch)
    assert [part.frontend_id for part in batch.parts] == ["frontend-0", "frontend-1"]
    grants = {send.peer: send.message for send in sends if isinstance(send.message, Grant)}
    assert grants[FRONTEND].part == 0
    assert grants[other].part == 1


def test_a_slow_slice_is_believed_slow() -> None:
    core = serving_core()
    for number in range(40):
        now_ms = 100.0 + 100.0 * number
        (batch,) = of_type(hear(core, FRONTEND, Arrivals(MODEL, 8 * number, 8, 60.0), now_ms), RunBatch)
        done = Done(batch.batch_id, slice_id(), MODEL, "ok", 8, (), 0.0, 0.0, 2.0 * EXEC_MS[7])
        hear(core, WORKER, done, now_ms + 26.0)
    hear(core, FRONTEND, Arrivals(MODEL, 1000, 1, budget_ms=40.0), now_ms=9_000.0)
    assert core.wake_at_ms is not None
    assert core.wake_at_ms < 9_000.0 + 40.0 - (2 + 5) * 1.7, "l(b) has grown to nearly twice the table"


def test_status_says_what_is_believed() -> None:
    core = serving_core()
    dispatched(core, 100.0)
    (status,) = of_type(hear(core, PeerId("operator/1"), StatusAsked(), 101.0), StatusListed)
    assert [(report.state, report.batches, report.requests) for report in status.slices] == [("ready", 1, 8)]
    assert status.counters["requests_announced"] == 8


def test_the_guard_of_the_status_is_the_one_in_use() -> None:
    started = msgspec.structs.replace(settings(), guard_ms=0.75)
    core = SchedulerCore(started, make_discipline("deferred", {}))
    (status,) = of_type(hear(core, PeerId("operator/1"), StatusAsked(), 1.0), StatusListed)
    assert status.counters["guard_ms"] == 0.75


@pytest.mark.parametrize("now_ms", [100.0, 2e11])
def test_a_batch_can_be_sent_however_long_its_requests_may_wait(now_ms: float) -> None:
    core = SchedulerCore(settings(), make_discipline("eager", {}))
    hear(core, FRONTEND, FrontendHello(FrontendId("frontend-0"), FIRST, ()), now_ms)
    hear(core, WORKER, ready(), now_ms)
    longest = Arrivals(MODEL, 0, 1, DURATION_MAX_MS, slack_ms=DURATION_MAX_MS)
    check(longest)
    sends = hear(core, FRONTEND, longest, now_ms)
    (batch,) = of_type(sends, RunBatch)
    assert batch.expires_in_ms == DURATION_MAX_MS
    for send in sends:
        check(send.message)
