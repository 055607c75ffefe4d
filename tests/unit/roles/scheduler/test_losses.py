"""Who is lost takes along what is theirs and nothing else, at once and however much it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from fabric.ids import BatchId, FrontendId, Incarnation, ModelId, PeerId
from fabric.messages import (
    Arrivals,
    Directory,
    Done,
    Dropped,
    FrontendHello,
    Grant,
    ModelSpec,
    NodeHello,
    Part,
    Ping,
    Pong,
    PreemptBatch,
    ReplicaInfo,
    Returned,
    RunBatch,
    SeqRun,
    SliceReady,
    SliceSpec,
)
from policies.batching.base import Delay
from policies.batching.registry import make_discipline
from roles.runtime.core import Lost, Send, Tick
from roles.scheduler.core import SchedulerCore
from roles.scheduler.dispatch.run_time_watch import RunTimeWatch
from roles.scheduler.fleet import Hosting, SliceRecord
from roles.scheduler.settings import SchedulerSettings
from tests.unit.roles.scheduler.test_core import (
    AGENT,
    EXEC_MS,
    FIRST,
    FRONTEND,
    MODEL,
    NODE,
    WORKER,
    hear,
    of_type,
    run_until,
    slice_id,
)

OTHER_MODEL = ModelId("bert")
OTHER = PeerId(f"frontend-1/{FIRST}")
AGENT_AGAIN = PeerId(f"node-{NODE}/2")
DAY_MS = 86_400_000.0
DISCIPLINES = ("tenuto", "deferred", "eager", "fixed", "nexus", "clockwork", "shepherd")


def core_with(
    batching: str,
    slices: int = 1,
    models: Sequence[ModelId] = (MODEL,),
    delay: Delay | None = None,
    *,
    device: str = "emulated",
    once: Sequence[ModelId] = (),
) -> SchedulerCore:
    """Ready slices that host all models, and two frontends. `once`: models that must not run a request twice."""
    specs = tuple(
        ModelSpec(model_id, DAY_MS, 8, None, EXEC_MS, is_idempotent=model_id not in once)
        for model_id in models
    )
    planned = tuple((NODE, SliceSpec(slice_id(k), k, device, None, specs)) for k in range(slices))
    settings = SchedulerSettings(specs, planned, delay=delay or Delay())
    core = SchedulerCore(settings, make_discipline(batching, {}))
    hear(core, FRONTEND, FrontendHello(FrontendId("frontend-0"), FIRST, ()))
    hear(core, OTHER, FrontendHello(FrontendId("frontend-1"), FIRST, ()))
    hear(core, AGENT, NodeHello(NODE, FIRST, (), ()))
    replicas = tuple(ReplicaInfo(model_id, 8, EXEC_MS) for model_id in models)
    for k in range(slices):
        hear(core, WORKER, SliceReady(slice_id(k), FIRST, NODE, k, (), replicas))
    core.handle(Tick(), 2.0)
    return core


def queued(core: SchedulerCore, model_id: ModelId = MODEL) -> int:
    return core._discipline.queued(model_id)


@pytest.mark.parametrize("batching", DISCIPLINES)
def test_slices_that_go_together_are_gone_before_the_discipline_decides_anything(batching: str) -> None:
    """An agent started anew hosts none of its slices: what waited for one must not go to the next."""
    for count in (1, 2, 3, 5, 8, 13, 21, 34, 55, 200):
        core = core_with(batching, slices=4, models=(MODEL, OTHER_MODEL))
        for seq in range(count):
            model_id = (MODEL, OTHER_MODEL)[seq % 2]
            hear(core, FRONTEND, Arrivals(model_id, seq, 1 + seq % 4, 200.0), 10.0 + seq / 8)
        sends = hear(core, AGENT_AGAIN, NodeHello(NODE, Incarnation("2"), (), ()), 36.0)
        assert not of_type(sends, RunBatch)
        assert queued(core) == queued(core, OTHER_MODEL) == 0, "nothing hosts them any more"


@pytest.mark.parametrize("batching", DISCIPLINES)
@pytest.mark.parametrize("how", ["silent", "next incarnation"])
def test_all_a_frontend_has_queued_goes_with_it_at_once(batching: str, how: str) -> None:
    core = core_with(batching)
    sends: list[Send] = []
    for seq in range(5_000):
        sends += hear(core, FRONTEND, Arrivals(MODEL, seq, 1, DAY_MS), 10.0)
    for seq in range(8):
        sends += hear(core, OTHER, Arrivals(MODEL, seq, 1, DAY_MS), 11.0)
    if how == "next incarnation":
        hello = FrontendHello(FrontendId("frontend-0"), Incarnation("2"), ())
        sends += hear(core, PeerId("frontend-0/2"), hello, 12.0)
    else:
        sends += core.handle(Lost(FRONTEND, how), 12.0)
    stopped = {one.batch_id for one in of_type(sends, PreemptBatch)}
    running = [batch for batch in of_type(sends, RunBatch) if batch.batch_id not in stopped]
    assert queued(core) == 8 - sum(batch_size(batch, "frontend-1") for batch in running)
    sends = [send for _, send in run_until(core, 1_000.0)]
    for batch in of_type(sends, RunBatch):
        assert {part.frontend_id for part in batch.parts} == {"frontend-1"}


@pytest.mark.parametrize("batching", DISCIPLINES)
def test_requests_of_a_frontend_that_is_not_known_wait_nowhere(batching: str) -> None:
    """We are new here, or had lost it: it sees once that it is not listed, and announces all of them again."""
    core = core_with(batching)
    core.handle(Lost(FRONTEND, "silent"), 3.0)
    sends: list[Send] = []
    for seq in range(0, 16, 8):  # the slice has as many batches as it may have
        sends += hear(core, OTHER, Arrivals(MODEL, seq, 8, DAY_MS), 10.0)
    sends += [send for _, send in run_until(core, 30.0)]
    batches = of_type(sends, RunBatch)
    assert len(batches) == 2
    told = [
        send for seq in range(5_000) for send in hear(core, FRONTEND, Arrivals(MODEL, seq, 1, DAY_MS), 31.0)
    ]
    assert [send.peer for send in told] == [FRONTEND]
    assert isinstance(told[0].message, Directory)
    assert queued(core) == 0
    for batch in batches:
        hear(core, WORKER, done(batch), 40.0)
    hear(core, FRONTEND, FrontendHello(FrontendId("frontend-0"), FIRST, ()), 41.0)
    sends = list(hear(core, FRONTEND, Arrivals(MODEL, 0, 8, DAY_MS), 42.0))
    sends += [send for _, send in run_until(core, 100.0)]
    (batch,) = of_type(sends, RunBatch)
    assert batch.parts == (Part(FrontendId("frontend-0"), (SeqRun(0, 8),)),)


def test_a_frontend_that_takes_itself_for_listed_hears_first_that_it_is_not() -> None:
    core = core_with("tenuto")
    hello = FrontendHello(FrontendId("frontend-0"), FIRST, (), is_linked=True)

    def listed(sends: Sequence[Send]) -> list[bool]:
        told = [send.message for send in sends if send.peer == FRONTEND]
        assert all(isinstance(one, Directory) for one in told)
        return [any(f.frontend_id == "frontend-0" for f in one.frontends) for one in told]  # type: ignore[union-attr]

    assert listed(hear(core, FRONTEND, hello, 3.0)) == [True], "it is right"
    core.handle(Lost(FRONTEND, "silent"), 4.0)
    assert listed(hear(core, FRONTEND, hello, 5.0)) == [False, True]
    core.handle(Lost(FRONTEND, "silent"), 6.0)
    assert listed(hear(core, FRONTEND, replace(hello, is_linked=False), 7.0)) == [True], (
        "it begins anew by itself"
    )


def test_what_a_stopped_batch_had_is_granted_again() -> None:
    core = core_with("shepherd", models=(MODEL, OTHER_MODEL))
    sends = list(hear(core, FRONTEND, Arrivals(MODEL, 0, 1, 100.0), 10.0))
    (small,) = of_type(sends, RunBatch)
    sends = list(hear(core, OTHER, Arrivals(OTHER_MODEL, 0, 8, 30.0), 11.0))
    (stopped,), (large,) = of_type(sends, PreemptBatch), of_type(sends, RunBatch)
    assert (stopped.batch_id, large.model_id) == (small.batch_id, OTHER_MODEL)
    assert queued(core) == 1
    assert not hear(core, WORKER, done(small, "preempted"), 12.0)
    sends = [*hear(core, WORKER, done(large), 24.0), *(send for _, send in run_until(core, 60.0))]
    (again,) = of_type(sends, RunBatch)
    assert again.parts == small.parts
    assert [send.message.runs for send in sends if isinstance(send.message, Grant)] == [(SeqRun(0, 1),)]


@pytest.mark.parametrize(("device", "once"), [("cpu", ()), ("cuda", ()), ("emulated", (MODEL, OTHER_MODEL))])
def test_what_cannot_or_must_not_be_stopped_is_granted_once(device: str, once: Sequence[ModelId]) -> None:
    core = core_with("shepherd", models=(MODEL, OTHER_MODEL), device=device, once=once)
    sends = list(hear(core, FRONTEND, Arrivals(MODEL, 0, 1, 100.0), 10.0))
    (small,) = of_type(sends, RunBatch)
    sends = list(hear(core, OTHER, Arrivals(OTHER_MODEL, 0, 8, 30.0), 11.0))
    sends += hear(core, WORKER, done(small), 16.0)
    sends += [send for _, send in run_until(core, 60.0)]
    assert not of_type(sends, PreemptBatch)
    (large,) = of_type(sends, RunBatch)
    assert large.model_id == OTHER_MODEL


def test_only_what_was_sent_last_is_stopped() -> None:
    """The batch before it is late and will end; nobody would queue its requests again."""
    core = core_with("shepherd", models=(MODEL, OTHER_MODEL))
    (first,) = of_type(hear(core, FRONTEND, Arrivals(MODEL, 0, 1, 200.0), 10.0), RunBatch)  # until 16
    hear(core, FRONTEND, Arrivals(MODEL, 1, 1, 200.0), 11.0)
    (second,) = of_type([send for _, send in run_until(core, 16.5)], RunBatch)
    sends = hear(core, OTHER, Arrivals(OTHER_MODEL, 0, 8, 40.0), 17.0)
    assert [one.batch_id for one in of_type(sends, PreemptBatch)] == [second.batch_id]
    assert queued(core) == 1
    assert first.batch_id in core._batches.flights


def test_where_the_one_sent_last_has_ended_the_late_one_before_it_is_not_stopped() -> None:
    """Its requests must not run twice."""
    core = core_with("shepherd", slices=2, models=(MODEL, OTHER_MODEL), once=(MODEL,))
    (late,) = of_type(hear(core, FRONTEND, Arrivals(MODEL, 0, 1, 500.0), 10.0), RunBatch)  # until 16
    hear(core, FRONTEND, Arrivals(MODEL, 1, 8, 500.0), 10.0)  # until 23, on the other slice
    hear(core, OTHER, Arrivals(OTHER_MODEL, 0, 1, 500.0), 15.0)
    (behind,) = of_type([send for _, send in run_until(core, 16.2)], RunBatch)
    assert behind.slice_id == late.slice_id
    cancelled = Done(behind.batch_id, behind.slice_id, OTHER_MODEL, "ok", 0, (), 0.0, 0.0, 0.0)
    hear(core, WORKER, cancelled, 16.5)
    sends = hear(core, OTHER, Arrivals(OTHER_MODEL, 1, 8, 60.0), 17.0)
    (large,) = of_type(sends, RunBatch)
    assert large.slice_id == late.slice_id, "in the place of the one that was to be stopped"
    assert not of_type(sends, PreemptBatch)
    assert late.batch_id in core._batches.flights
    assert queued(core) == 0


@pytest.mark.parametrize("batching", DISCIPLINES)
def test_a_slice_has_two_batches_however_long_inputs_take(batching: str) -> None:
    """A large batch's inputs take so long that it fits behind a small one that has not been sent yet, and both wait."""
    core = core_with(batching, models=(MODEL, OTHER_MODEL), delay=Delay(0.0, 50.0))
    sends: list[Send] = []
    for seq in range(2):
        sends += hear(core, FRONTEND, Arrivals(MODEL, seq, 1, 60.0 + seq), 10.0)
        sends += [send for _, send in run_until(core, 11.0)]
    sends += hear(core, FRONTEND, Arrivals(MODEL, 2, 1, 500.0), 12.0)
    sends += hear(core, OTHER, Arrivals(OTHER_MODEL, 0, 4, 600.0), 12.0)
    running = core._fleet.slices[slice_id()].flights
    ended = 0
    now_ms = 13.0
    while now_ms < 1_000.0:
        batches = of_type(sends, RunBatch)
        stopped = {one.batch_id for one in of_type(sends, PreemptBatch)}
        assert len(running) <= 2
        if ended < len(batches) and now_ms % 20.0 == 0.0:
            if batches[ended].batch_id not in stopped:
                sends += hear(core, WORKER, done(batches[ended]), now_ms)
            ended += 1
        now_ms += 1.0
        sends += [send for _, send in run_until(core, now_ms)]
    fates = Counter(
        (send.peer, one)
        for send in sends
        if isinstance(send.message, Grant | Dropped)
        for run in send.message.runs
        for one in range(run.first_seq, run.first_seq + run.count)
    )
    stopped_count = sum(batch_size(batch) for batch in of_type(sends, RunBatch) if batch.batch_id in stopped)
    assert fates.total() == 7 + stopped_count
    assert len(fates) == 7


def test_what_is_returned_of_a_former_incarnation_is_not_told_to_its_next() -> None:
    """It numbers its requests anew: it would take back others."""
    core = core_with("eager")
    (batch,) = of_type(hear(core, FRONTEND, Arrivals(MODEL, 0, 1, 100.0), 10.0), RunBatch)
    hear(core, PeerId("frontend-0/2"), FrontendHello(FrontendId("frontend-0"), Incarnation("2"), ()), 11.0)
    missing = (Part(FrontendId("frontend-0"), (SeqRun(0, 1),)),)
    expired = Done(batch.batch_id, slice_id(), MODEL, "expired", 0, missing, 5.0, 0.0, 0.0)
    assert not of_type(hear(core, WORKER, expired, 20.0), Returned)


@pytest.mark.parametrize("batching", DISCIPLINES)
def test_a_model_may_go_while_others_wait(batching: str) -> None:
    """Its going may let a batch of another one go."""
    core = core_with(batching, slices=2, models=(MODEL, OTHER_MODEL))
    for seq in range(40):
        for model_id in (MODEL, OTHER_MODEL):
            hear(core, FRONTEND, Arrivals(model_id, seq, 1, 300.0), 10.0)
    refused = core._batches.retire(MODEL, "ModelNotFound", "it was removed", 11.0)
    assert queued(core) == 0
    assert {send.message.model_id for send in refused if hasattr(send.message, "model_id")} <= {
        MODEL,
        OTHER_MODEL,
    }


def test_a_batch_larger_than_those_a_slice_runs_now_says_nothing_of_its_promise() -> None:
    """It was sent before the slice ran out of memory."""
    hosting = Hosting((), {MODEL: EXEC_MS[:2]})
    record = SliceRecord(SliceSpec(slice_id(), 0, "emulated", 40.0, ()), NODE, 0, hosting=hosting)
    watch = RunTimeWatch()
    for _ in range(20):
        watch.note(record, MODEL, 8, 1_000.0)
        watch.note(record, OTHER_MODEL, 1, 1_000.0)
    for at_ms in (0.0, 1_000.0, 2_000.0):
        assert watch.broken(at_ms) == {}


def test_a_worker_of_which_its_agents_hello_did_not_know_yet_is_told_that_it_was_given_up() -> None:
    """The two come by different links: a hello that was under way for long is older than the slice that is ready."""
    core = core_with("tenuto")
    sent = hear(core, AGENT_AGAIN, NodeHello(NODE, Incarnation("2"), (), ()))
    (told,) = [send.message for send in sent if send.peer == WORKER]
    assert isinstance(told, Directory)
    assert told.slices == ()


@pytest.mark.parametrize("message", [Ping(3), Pong(3)])
def test_who_speaks_as_if_it_were_known_is_shown_the_directory(message: Ping | Pong) -> None:
    """A scheduler that was started again so quickly that nobody noticed."""
    core = SchedulerCore(SchedulerSettings((ModelSpec(MODEL, DAY_MS, 8),), ()), make_discipline("tenuto", {}))
    for peer in (FRONTEND, AGENT, WORKER):
        (sent,) = hear(core, peer, message)
        assert (sent.peer, type(sent.message)) == (peer, Directory)
    ended = Done(BatchId(7), slice_id(), MODEL, "ok", 1, (), 0.0, 0.0, 1.0)
    (sent,) = hear(core, PeerId(f"worker-{NODE}-2/{FIRST}"), ended)
    assert isinstance(sent.message, Directory)


def test_a_stranger_that_pings_is_no_role_of_ours() -> None:
    core = SchedulerCore(SchedulerSettings((ModelSpec(MODEL, DAY_MS, 8),), ()), make_discipline("tenuto", {}))
    (sent,) = hear(core, PeerId("operator/1"), Ping(3))
    assert sent.message == Pong(3)


def done(batch: RunBatch, status: str = "ok") -> Done:
    size = batch_size(batch)
    ran, exec_ms = (size, EXEC_MS[size - 1]) if status == "ok" else (0, 0.0)
    return Done(BatchId(batch.batch_id), batch.slice_id, batch.model_id, status, ran, (), 0.0, 0.0, exec_ms)


def batch_size(batch: RunBatch, frontend_id: str | None = None) -> int:
    parts = [part for part in batch.parts if frontend_id in (None, part.frontend_id)]
    return sum(run.count for part in parts for run in part.runs)
