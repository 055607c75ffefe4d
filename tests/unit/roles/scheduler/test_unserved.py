"""While a slice that will serve a model is on its way, requests whose budgets outlast its start wait for it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from fabric.errors import nothing_ready
from fabric.ids import FrontendId, Incarnation, ModelId, PeerId
from fabric.messages import (
    Arrivals,
    Directory,
    Dropped,
    FrontendHello,
    Grant,
    LeftOut,
    ModelSpec,
    NodeHello,
    ReplicaInfo,
    Returned,
    SeqRun,
    SliceChanged,
    SliceReady,
    SliceSpec,
    SliceState,
    SliceStatus,
    Withdraw,
)
from policies.batching.base import RequestRun
from policies.batching.registry import make_discipline
from roles.runtime.core import Lost, Send, Tick
from roles.scheduler.core import SchedulerCore
from roles.scheduler.dispatch.start_times import THERE_MS
from roles.scheduler.dispatch.unserved import LOOK_EVERY_MS, WAITING_MAX
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

DISCIPLINES = ("tenuto", "deferred", "eager", "fixed", "nexus", "clockwork", "shepherd", "timeout")
OTHER_MODEL = ModelId("bert")
SECOND = Incarnation("2")
START_MS = 400.0
DAY_MS = 86_400_000.0
REPLICAS = (ReplicaInfo(MODEL, 8, EXEC_MS),)
OPTIONS = {"timeout": {"timeout_ms": 5.0}}


def told(
    core: SchedulerCore, state: SliceState, now_ms: float, incarnation: str = "", reason: str = ""
) -> Sequence[Send]:
    status = SliceStatus(slice_id(0), Incarnation(incarnation), state, reason)
    return hear(core, AGENT, SliceChanged(NODE, status), now_ms)


def ready(core: SchedulerCore, incarnation: Incarnation, now_ms: float) -> list[Send]:
    worker = PeerId(f"{WORKER.rpartition('/')[0]}/{incarnation}")
    sends = list(hear(core, worker, SliceReady(slice_id(0), incarnation, NODE, 0, (), REPLICAS), now_ms))
    return sends + [send for _, send in run_until(core, now_ms + 50.0)]


def core_that_lost_its_slice(batching: str = "eager", *, has_started: bool = True) -> SchedulerCore:
    """At 1,000 ms; its start took 400 ms."""
    spec = SliceSpec(slice_id(0), 0, "emulated", None, (ModelSpec(MODEL, DAY_MS, 8, None, EXEC_MS),))
    discipline = make_discipline(batching, OPTIONS.get(batching, {}))
    core = SchedulerCore(SchedulerSettings(spec.models, ((NODE, spec),)), discipline)
    hear(core, FRONTEND, FrontendHello(FrontendId("frontend-0"), FIRST, ()))
    hear(core, AGENT, NodeHello(NODE, FIRST, (), ()))
    if has_started:
        told(core, SliceState.STARTING, 100.0)
    ready(core, FIRST, 100.0 + START_MS)
    told(core, SliceState.LOST, 1_000.0, FIRST, "killed")
    return core


def dropped(sends: Sequence[Send]) -> list[Dropped]:
    return of_type(sends, Dropped)


@pytest.mark.parametrize("batching", DISCIPLINES)
def test_a_request_waits_for_the_slice_that_starts_again_and_runs_there(batching: str) -> None:
    core = core_that_lost_its_slice(batching)
    assert not dropped(hear(core, FRONTEND, Arrivals(MODEL, 0, 2, 1_000.0), 1_010.0))
    told(core, SliceState.STARTING, 1_011.0)
    waited = [send for _, send in run_until(core, 1_390.0)]
    assert not of_type(waited, Grant)
    assert not dropped(waited)
    sends = ready(core, SECOND, 1_400.0) + [send for _, send in run_until(core, 2_050.0)]
    granted = [run for grant in of_type(sends, Grant) for run in grant.runs]
    assert granted == [SeqRun(0, 2)]
    assert not dropped(sends)


def test_what_waits_is_what_was_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """In all that the discipline goes by."""
    core = core_that_lost_its_slice()
    arrived: list[RequestRun] = []

    def arrive(model_id: object, run: RequestRun, now_ms: float) -> Sequence[object]:
        del model_id, now_ms
        arrived.append(run)
        return ()

    monkeypatch.setattr(core._discipline, "arrive", arrive)
    said = Arrivals(MODEL, 3, 2, 5_000.0, 0.5, 7.0, 2.0, priority=4)
    hear(core, FRONTEND, said, 1_100.0)
    ready(core, SECOND, 1_200.0)
    assert arrived == [RequestRun(FrontendId(FRONTEND), 3, 2, 6_100.0, 1_100.0, 0.5, 1_107.0, 2.0, 4)]


def test_what_is_withdrawn_while_it_waits_is_not_granted() -> None:
    core = core_that_lost_its_slice()
    hear(core, FRONTEND, Arrivals(MODEL, 0, 5, 1_000.0), 1_010.0)
    hear(core, FRONTEND, Withdraw(MODEL, (SeqRun(1, 3),)), 1_100.0)
    granted = of_type(ready(core, SECOND, 1_400.0), Grant)
    assert [run for grant in granted for run in grant.runs] == [SeqRun(0, 1), SeqRun(4, 1)]


def test_one_whose_budget_ends_before_is_refused_at_once() -> None:
    core = core_that_lost_its_slice()
    (refused,) = dropped(hear(core, FRONTEND, Arrivals(MODEL, 0, 1, 300.0), 1_010.0))
    assert (refused.code, refused.reason) == ("NoReplica", nothing_ready(MODEL))
    assert refused.retry_after_ms == START_MS - 10.0, "a slice is there then"


def test_without_a_measured_start_nothing_is_expected() -> None:
    core = core_that_lost_its_slice(has_started=False)
    (refused,) = dropped(hear(core, FRONTEND, Arrivals(MODEL, 0, 1, 10_000.0), 1_010.0))
    assert (refused.code, refused.retry_after_ms) == ("NoReplica", None)


@pytest.mark.parametrize("batching", DISCIPLINES)
def test_what_was_queued_when_the_slice_was_lost_waits_too(batching: str) -> None:
    core = core_that_lost_its_slice(batching)
    ready(core, SECOND, 1_400.0)
    for seq in range(6):  # more than it may have at a time
        hear(core, FRONTEND, Arrivals(MODEL, seq * 8, 8, 2_000.0), 1_500.0)
    run_until(core, 1_501.0)
    queued = core._discipline.queued(MODEL)
    told(core, SliceState.LOST, 1_502.0, SECOND, "killed")
    assert core._discipline.queued(MODEL) == 0
    sends = ready(core, Incarnation("3"), 1_900.0)
    waiting = core._discipline.queued(MODEL)
    granted = sum(run.count for grant in of_type(sends, Grant) for run in grant.runs)
    assert waiting + granted + sum(run.count for drop in dropped(sends) for run in drop.runs) == queued
    assert queued > 0


def test_what_was_queued_and_cannot_wait_so_long_hears_when_a_slice_is_there() -> None:
    core = core_that_lost_its_slice()
    ready(core, SECOND, 1_400.0)
    for seq in range(6):
        hear(core, FRONTEND, Arrivals(MODEL, seq * 8, 8, 300.0), 1_500.0)
    sends = told(core, SliceState.LOST, 1_501.0, SECOND, "killed")
    assert {(one.code, one.reason, one.retry_after_ms) for one in dropped(sends)} == {
        ("NoReplica", nothing_ready(MODEL), START_MS)
    }


@pytest.mark.parametrize("state", [SliceState.FAILED, SliceState.STOPPED])
def test_all_are_refused_once_no_slice_is_expected_any_more(state: SliceState) -> None:
    core = core_that_lost_its_slice()
    hear(core, FRONTEND, Arrivals(MODEL, 0, 3, 5_000.0), 1_010.0)
    told(core, state, 1_020.0, reason="given up")
    (refused,) = dropped([send for _, send in run_until(core, 1_020.0 + LOOK_EVERY_MS)])
    assert (refused.code, refused.runs) == ("NoReplica", (SeqRun(0, 3),))
    assert refused.retry_after_ms is None


def test_the_longer_a_start_takes_the_fewer_wait_for_it() -> None:
    """A busy host is slow without being dead: it may need as long again as it has taken."""
    core = core_that_lost_its_slice()
    for seq, budget_ms in enumerate((1_500.0, 10_000.0, 60_000.0)):
        hear(core, FRONTEND, Arrivals(MODEL, seq, 1, budget_ms), 1_010.0)
    assert not dropped([send for _, send in run_until(core, 1_000.0 + 2 * START_MS)])
    (refused,) = dropped([send for _, send in run_until(core, 2_000.0)])
    assert (refused.code, refused.runs) == ("NoReplica", (SeqRun(0, 1),)), "it needs until 3,000 by now"
    assert refused.retry_after_ms is None, "it is late, and may be ready the next moment"
    assert not dropped([send for _, send in run_until(core, 5_900.0)])
    (refused,) = dropped([send for _, send in run_until(core, 6_100.0)])
    assert refused.runs == (SeqRun(1, 1),), "half its budget is gone"
    granted = of_type(ready(core, SECOND, 9_000.0), Grant)
    assert [run for grant in granted for run in grant.runs] == [SeqRun(2, 1)]
    assert not dropped([send for _, send in run_until(core, 9_100.0)])


def test_a_start_that_hangs_is_given_up_within_the_budget() -> None:
    core = core_that_lost_its_slice()
    hear(core, FRONTEND, Arrivals(MODEL, 0, 1, 10_000.0), 1_010.0)
    (refused,) = dropped([send for _, send in run_until(core, 7_000.0)])
    assert refused.code == "NoReplica"
    assert core.wake_at_ms is None, "nothing is left to look after"


def test_the_loss_of_the_agent_ends_the_wait() -> None:
    core = core_that_lost_its_slice()
    hear(core, FRONTEND, Arrivals(MODEL, 0, 3, 60_000.0), 1_010.0)
    core.handle(Lost(AGENT, "closed"), 1_020.0)
    (refused,) = dropped([send for _, send in run_until(core, 1_100.0)])
    assert refused.code == "NoReplica"


def test_what_waits_goes_with_its_frontend() -> None:
    core = core_that_lost_its_slice()
    hear(core, FRONTEND, Arrivals(MODEL, 0, 3, 60_000.0), 1_010.0)
    core.handle(Lost(FRONTEND, "closed"), 1_020.0)
    sends = ready(core, SECOND, 1_400.0)
    assert not of_type(sends, Grant)


def test_no_more_wait_than_there_is_room_for() -> None:
    core = core_that_lost_its_slice()
    refused = 0
    for seq in range(WAITING_MAX // 8 + 10):
        refused += len(dropped(hear(core, FRONTEND, Arrivals(MODEL, 8 * seq, 8, 60_000.0), 1_010.0)))
    assert refused == 10


def test_frontends_are_told_when_the_model_will_be_served_again() -> None:
    core = core_that_lost_its_slice()
    sends = hear(core, FRONTEND, FrontendHello(FrontendId("frontend-0"), FIRST, ()), 1_100.0)
    (model,) = of_type(sends, Directory)[-1].models
    assert (model.replicas, model.coming_in_ms) == (0, START_MS - 100.0)
    sends = ready(core, SECOND, 1_400.0)
    (model,) = of_type(sends, Directory)[-1].models
    assert (model.replicas, model.coming_in_ms) == (1, None)


@pytest.mark.parametrize("is_agent_lost", [False, True])
def test_frontends_hear_that_a_start_came_to_nothing(is_agent_lost: bool) -> None:
    core = core_that_lost_its_slice()
    hear(core, FRONTEND, FrontendHello(FrontendId("frontend-0"), FIRST, ()), 1_100.0)
    if is_agent_lost:
        sends = list(core.handle(Lost(AGENT, "closed"), 1_200.0))
    else:
        sends = [*told(core, SliceState.FAILED, 1_200.0, reason="given up")]
    sends += [send for _, send in run_until(core, 1_300.0)]
    (model,) = of_type([send for send in sends if send.peer == FRONTEND], Directory)[-1].models
    assert (model.replicas, model.coming_in_ms) == (0, None)


def test_a_slice_that_failed_and_is_started_again_starts() -> None:
    core = core_that_lost_its_slice()
    told(core, SliceState.FAILED, 1_200.0, reason="given up")
    told(core, SliceState.STARTING, 61_200.0)
    record = core._fleet.slices[slice_id(0)]
    assert (record.state, record.reason) == (SliceState.STARTING, "")


@pytest.mark.parametrize("taken_ms", [START_MS, 1.5 * START_MS, 3 * START_MS, 1e5])
def test_of_a_start_that_is_due_or_late_nobody_is_told_when_it_will_be_over(taken_ms: float) -> None:
    core = core_that_lost_its_slice()
    sends = hear(core, FRONTEND, FrontendHello(FrontendId("frontend-0"), FIRST, ()), 1_000.0 + taken_ms)
    (model,) = of_type(sends, Directory)[-1].models
    assert (model.replicas, model.coming_in_ms) == (0, 0.0), "a frontend asks the scheduler, who knows best"
    assert not dropped(hear(core, FRONTEND, Arrivals(MODEL, 0, 1, 2e5), 1_001.0 + taken_ms)), "it waits"
    told(core, SliceState.FAILED, 1_002.0 + taken_ms)
    told(core, SliceState.STARTING, 1_003.0 + taken_ms)
    (refused,) = dropped(hear(core, FRONTEND, Arrivals(MODEL, 1, 1, 1.0), 1_003.0 + taken_ms))
    assert refused.retry_after_ms == START_MS
    late_ms = 1_003.0 + START_MS + taken_ms
    (refused,) = dropped(hear(core, FRONTEND, Arrivals(MODEL, 2, 1, 0.0), late_ms))
    assert refused.retry_after_ms is None


def test_a_slice_that_drains_gets_nothing_more_and_stays_listed_until_it_ends() -> None:
    core = core_that_lost_its_slice()
    ready(core, SECOND, 1_400.0)
    sends = told(core, SliceState.DRAINING, 2_000.0, SECOND, "its node agent stops")
    listed = of_type(sends, Directory)[-1]
    assert [one.slice_id for one in listed.slices] == [slice_id(0)], "what was granted still runs there"
    assert listed.models[0].replicas == 0
    (refused,) = dropped(hear(core, FRONTEND, Arrivals(MODEL, 0, 1, 10_000.0), 2_010.0))
    assert refused.code == "NoReplica"
    told(core, SliceState.STOPPED, 2_200.0, SECOND, "its node agent stops")
    hear(core, AGENT, NodeHello(NODE, FIRST, (), ()), 2_300.0)
    told(core, SliceState.STARTING, 2_310.0)
    assert not dropped(hear(core, FRONTEND, Arrivals(MODEL, 1, 1, 10_000.0), 2_320.0))
    sends = ready(core, Incarnation("3"), 2_700.0)
    assert of_type(sends, Grant)
    core.handle(Tick(), 2_800.0)


@pytest.mark.parametrize("does_say_hello", [False, True])
def test_a_slice_whose_worker_the_next_agent_has_adopted_takes_batches_again(does_say_hello: bool) -> None:
    """Its agent was killed while it stopped, and its worker has outlived it."""
    core = core_that_lost_its_slice()
    ready(core, SECOND, 1_400.0)
    told(core, SliceState.DRAINING, 2_000.0, SECOND, "its node agent stops")
    there = SliceStatus(slice_id(0), SECOND, SliceState.READY)
    starting = SliceStatus(slice_id(0), SECOND, SliceState.STARTING)
    next_agent = PeerId("node-local/1")
    hello = NodeHello(NODE, Incarnation("1"), (), (there if does_say_hello else starting,))
    sends = list(hear(core, next_agent, hello, 2_100.0))
    if not does_say_hello:
        assert dropped(hear(core, FRONTEND, Arrivals(MODEL, 0, 1, 10_000.0), 2_110.0)), "it may end yet"
        sends = list(hear(core, next_agent, SliceChanged(NODE, there), 2_120.0))
    sends += [send for _, send in run_until(core, 2_200.0)]
    assert of_type(sends, Directory)[-1].models[0].replicas == 1
    assert of_type(hear(core, FRONTEND, Arrivals(MODEL, 1, 1, 10_000.0), 2_210.0), Grant)


def test_an_agent_that_drains_and_begins_anew_loses_nothing_that_runs() -> None:
    """Its connection broke meanwhile; or it was told nothing of the drain before."""
    core = core_that_lost_its_slice()
    ready(core, SECOND, 1_400.0)
    granted = of_type(hear(core, FRONTEND, Arrivals(MODEL, 0, 1, 10_000.0), 1_900.0), Grant)
    assert granted
    draining = SliceStatus(slice_id(0), SECOND, SliceState.DRAINING, "its node agent stops")
    for at_ms in (2_000.0, 2_010.0):
        sends = hear(core, AGENT, NodeHello(NODE, FIRST, (), (draining,)), at_ms)
        assert not of_type(sends, Returned), "it runs"
    assert dropped(hear(core, FRONTEND, Arrivals(MODEL, 1, 1, 10_000.0), 2_020.0)), "nothing new goes there"
    listed = of_type(
        hear(core, FRONTEND, FrontendHello(FrontendId("frontend-0"), FIRST, ()), 2_030.0), Directory
    )
    assert [one.slice_id for one in listed[-1].slices] == [slice_id(0)]


def core_that_took_over() -> SchedulerCore:
    """At 10 ms; an agent said that its slice is ready, and the slice's worker has not said so yet."""
    spec = SliceSpec(slice_id(0), 0, "emulated", None, (ModelSpec(MODEL, DAY_MS, 8, None, EXEC_MS),))
    core = SchedulerCore(SchedulerSettings(spec.models, ((NODE, spec),)), make_discipline("eager", {}))
    there = SliceStatus(slice_id(0), FIRST, SliceState.READY)
    hear(core, AGENT, NodeHello(NODE, FIRST, (), (there,)), 10.0)
    return core


def test_requests_wait_for_a_worker_that_is_late_to_say_what_its_agent_said() -> None:
    core = core_that_took_over()
    sends = hear(core, FRONTEND, FrontendHello(FrontendId("frontend-0"), FIRST, ()), 20.0)
    (model,) = of_type(sends, Directory)[-1].models
    assert (model.replicas, model.coming_in_ms) == (0, 0.0), "a frontend turns nobody away at its door"
    assert not dropped(hear(core, FRONTEND, Arrivals(MODEL, 0, 2, 4_000.0), 30.0))
    assert not dropped([send for _, send in run_until(core, 3_000.0)])
    granted = [run for grant in of_type(ready(core, FIRST, 3_000.0), Grant) for run in grant.runs]
    assert granted == [SeqRun(0, 2)]


def test_they_do_not_wait_for_ever_however_often_the_agent_says_so() -> None:
    core = core_that_took_over()
    hear(core, FRONTEND, FrontendHello(FrontendId("frontend-0"), FIRST, ()), 20.0)
    hear(core, FRONTEND, Arrivals(MODEL, 0, 2, 60_000.0), 30.0)
    there = SliceStatus(slice_id(0), FIRST, SliceState.READY)
    hear(core, AGENT, NodeHello(NODE, FIRST, (), (there,)), 4_000.0)
    (refused,) = dropped([send for _, send in run_until(core, 10.0 + THERE_MS + 2 * LOOK_EVERY_MS)])
    assert refused.code == "NoReplica"
    assert core.wake_at_ms is None, "nothing is left to look after"


@pytest.mark.parametrize("batching", DISCIPLINES)
def test_what_waits_for_a_model_that_its_slice_has_let_go_is_refused_at_once(batching: str) -> None:
    """Its worker says so itself: it could not load the model again."""
    models = tuple(ModelSpec(model_id, DAY_MS, 8, None, EXEC_MS) for model_id in (MODEL, OTHER_MODEL))
    spec = SliceSpec(slice_id(0), 0, "emulated", None, models)
    discipline = make_discipline(batching, OPTIONS.get(batching, {}))
    core = SchedulerCore(SchedulerSettings(models, ((NODE, spec),)), discipline)
    hear(core, FRONTEND, FrontendHello(FrontendId("frontend-0"), FIRST, ()))
    both = SliceReady(slice_id(0), FIRST, NODE, 0, (), (*REPLICAS, ReplicaInfo(OTHER_MODEL, 8, EXEC_MS)))
    hear(core, WORKER, both, 10.0)
    for seq in range(6):  # more than it may have at a time
        hear(core, FRONTEND, Arrivals(OTHER_MODEL, seq * 8, 8, 10_000.0), 20.0)
    run_until(core, 21.0)
    queued = core._discipline.queued(OTHER_MODEL)
    left_out = (LeftOut(slice_id(0), OTHER_MODEL, "no memory"),)
    sends = hear(core, WORKER, replace(both, replicas=REPLICAS, left_out=left_out), 22.0)
    refused = [(one.code, run.count) for one in dropped(sends) for run in one.runs]
    assert {code for code, _ in refused} == {"NoReplica"}
    assert sum(count for _, count in refused) == queued > 0
    assert core._discipline.queued(OTHER_MODEL) == 0
