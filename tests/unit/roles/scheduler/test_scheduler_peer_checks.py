"""What the scheduler's peers may say of whom, and what becomes of those who say more."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from fabric.ids import BatchId, FrontendId, Incarnation, ModelId, NodeId, PeerId, SliceId
from fabric.limits import DURATION_MAX_MS, SMALLEST_MS
from fabric.messages import (
    AnyMessage,
    Arrivals,
    Directory,
    Done,
    FrontendHello,
    GpuSample,
    Host,
    ModelSpec,
    ModelsRemove,
    NodeHello,
    Part,
    PlanMade,
    ReplicaInfo,
    RunBatch,
    SeqRun,
    SliceChanged,
    SliceReady,
    SliceSpec,
    SliceStatus,
    StatusAsked,
    StatusListed,
    Telemetry,
)
from policies.batching.registry import make_discipline
from roles.runtime.core import Lost
from roles.runtime.peer_checks import OFFENCES_MAX
from roles.scheduler.core import SchedulerCore
from roles.scheduler.settings import SchedulerSettings
from tests.unit.roles.scheduler.test_core import (
    AGENT,
    EXEC_MS,
    FIRST,
    FRONTEND,
    MODEL,
    NODE,
    WORKER,
    dispatched,
    hear,
    of_type,
    ready,
    run_until,
    serving_core,
    slice_id,
)

STRANGER = PeerId("stranger/1")
OTHER_WORKER = PeerId("worker-local-1/00000002")


def refused(core: SchedulerCore, peer: PeerId, message: AnyMessage, reason: str) -> None:
    """It is counted, and answered with nothing."""
    before = core.offences.counters[f"offences_{reason}"]
    assert hear(core, peer, message, 105.0) == ()
    assert core.offences.counters[f"offences_{reason}"] == before + 1


def a_done(core: SchedulerCore) -> Done:
    batch = dispatched(core, 100.0)
    return Done(batch.batch_id, slice_id(), MODEL, "ok", 8, (), 0.1, 0.0, 13.0)


@pytest.mark.parametrize("peer", [STRANGER, OTHER_WORKER, FRONTEND, AGENT])
def test_a_batch_is_ended_by_its_worker_alone(peer: PeerId) -> None:
    core = serving_core()
    done = a_done(core)
    refused(core, peer, done, "not_owner")
    hear(core, WORKER, done, 113.0)
    assert dispatched(core, 120.0, first_seq=8).slice_id == slice_id(), "its slice is free for the next"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda done: replace(done, slice_id=slice_id(1)), "not_owner"),
        (lambda done: replace(done, model_id=ModelId("vgg")), "not_owner"),
        (lambda done: replace(done, ran=9), "out_of_range"),
        (
            lambda done: replace(done, missing=(Part(FrontendId("frontend-0"), (SeqRun(8, 1),)),)),
            "not_owner",
        ),
        (
            lambda done: replace(done, missing=(Part(FrontendId("frontend-1"), (SeqRun(0, 8),)),)),
            "not_owner",
        ),
    ],
)
def test_a_worker_speaks_of_what_it_was_given(change: Callable[[Done], Done], reason: str) -> None:
    core = serving_core(slices=2)
    refused(core, WORKER, change(a_done(core)), reason)


def test_the_end_of_a_batch_that_nobody_waits_for_is_no_offence() -> None:
    core = serving_core()
    assert hear(core, WORKER, Done(BatchId(77), slice_id(), MODEL, "ok", 8, (), 0.1, 0.0, 13.0)) == ()
    assert not core.offences.counters


def test_a_frontend_calls_itself_what_it_is() -> None:
    core = serving_core()
    refused(core, FRONTEND, FrontendHello(FrontendId("frontend-1"), FIRST, ()), "wrong_identity")
    refused(core, STRANGER, FrontendHello(FrontendId("frontend-0"), FIRST, ()), "wrong_identity")
    assert hear(core, FRONTEND, FrontendHello(FrontendId("frontend-0"), FIRST, ()), now_ms=1.0)
    core.handle(Lost(FRONTEND, "silent"), 106.0)


def test_an_agent_calls_itself_what_it_is_and_its_node_is_known() -> None:
    core = serving_core()
    refused(core, AGENT, NodeHello(NODE, Incarnation("2"), (), ()), "wrong_identity")
    refused(core, AGENT, NodeHello(NodeId("elsewhere"), FIRST, (), ()), "wrong_identity")


@pytest.mark.parametrize(
    "peer", [STRANGER, FRONTEND, PeerId("worker-elsewhere-0/00000001"), PeerId("worker-local-0/00000002")]
)
def test_a_slice_is_made_ready_by_a_worker_of_its_node(peer: PeerId) -> None:
    core = serving_core()
    refused(core, peer, ready(), "wrong_identity")
    assert dispatched(core, 120.0).slice_id == slice_id()


def test_a_worker_of_another_node_has_no_slice_here() -> None:
    message = replace(ready(incarnation=Incarnation("00000002")), node_id=NodeId("elsewhere"))
    refused(serving_core(), PeerId("worker-elsewhere-0/00000002"), message, "not_owner")


@pytest.mark.parametrize(
    ("replicas", "reason"),
    [
        ((ReplicaInfo(MODEL, 8, EXEC_MS[:4]),), "out_of_range"),
        ((ReplicaInfo(MODEL, 8, ()),), "out_of_range"),
        ((ReplicaInfo(MODEL, 8, (6.0, 5.999, *EXEC_MS[2:])),), "out_of_range"),
        ((ReplicaInfo(MODEL, 8, (*EXEC_MS[:7], 1.0)),), "out_of_range"),
        ((ReplicaInfo(MODEL, 8, EXEC_MS),) * 2, "out_of_range"),
        ((ReplicaInfo(MODEL, 9, (*EXEC_MS, 20.0)),), "other_plan"),
        ((ReplicaInfo(ModelId("vgg"), 8, EXEC_MS),), "other_plan"),
    ],
)
def test_a_slice_hosts_what_was_planned(replicas: tuple[ReplicaInfo, ...], reason: str) -> None:
    refused(serving_core(), WORKER, replace(ready(), replicas=replicas), reason)


def interval(*of_each: float) -> SliceReady:
    return replace(
        ready(), replicas=(ReplicaInfo(MODEL, len(of_each), EXEC_MS[: len(of_each)], interval_ms=of_each),)
    )


def pipeline_core() -> SchedulerCore:
    """With the default discipline; its one slice has two stages."""
    model = ModelSpec(MODEL, 20.0, 8, None, EXEC_MS)
    spec = SliceSpec(slice_id(), 0, "emulated", None, (model,), following=(1,))
    core = SchedulerCore(SchedulerSettings((model,), ((NODE, spec),)), make_discipline("tenuto", {}))
    hear(core, FRONTEND, FrontendHello(FrontendId("frontend-0"), FIRST, ()))
    return core


def test_only_a_pipeline_starts_a_batch_before_the_last_one_has_ended() -> None:
    refused(serving_core(), WORKER, interval(4.0), "out_of_range")


@pytest.mark.parametrize(
    "of_each",
    [(SMALLEST_MS,), (2.9,), (6.1,), (DURATION_MAX_MS,), (4.0, SMALLEST_MS), (4.0, DURATION_MAX_MS)],
)
def test_a_pipeline_starts_batches_as_often_as_its_slowest_stage_can_run_them(
    of_each: tuple[float, ...],
) -> None:
    core = pipeline_core()
    refused(core, WORKER, interval(*of_each), "out_of_range")
    assert hear(core, WORKER, interval(3.0, 7.0), 110.0) == []
    for number in range(40):
        at_ms = 200.0 + 20.0 * number
        sends = [*hear(core, FRONTEND, Arrivals(MODEL, number, 1, 20.0), at_ms)]
        (batch,) = of_type(sends + [send for _, send in run_until(core, at_ms + 12.0)], RunBatch)
        done = Done(batch.batch_id, slice_id(), MODEL, "ok", 1, (), 0.1, 0.0, 6.0)
        hear(core, WORKER, done, at_ms + 19.0)


def test_a_frontends_name_is_short_enough_for_a_batch_of_many_frontends() -> None:
    for name in ("f" * 65, "ä" * 33):
        peer = PeerId(f"{name}/00000002")
        refused(
            serving_core(), peer, FrontendHello(FrontendId(name), Incarnation("00000002"), ()), "out_of_range"
        )


def test_nobody_is_cut_off_for_what_was_right_under_another_plan() -> None:
    core = serving_core()
    for _ in range(2 * OFFENCES_MAX):
        hear(core, WORKER, replace(ready(), replicas=(ReplicaInfo(ModelId("vgg"), 8, EXEC_MS),)))
    assert not core.offences.counters["peers_cut_off"]


@pytest.mark.parametrize("peer", [STRANGER, WORKER, PeerId("node-elsewhere/00000001")])
def test_an_agent_alone_speaks_of_its_node(peer: PeerId) -> None:
    core = serving_core()
    lost = SliceChanged(NODE, SliceStatus(slice_id(), FIRST, "lost", "killed"))
    refused(core, peer, lost, "not_owner")
    refused(core, peer, Telemetry(NODE, (GpuSample(0),), ()), "not_owner")
    assert dispatched(core, 106.0).slice_id == slice_id()


def test_an_agent_speaks_of_the_slices_of_its_node() -> None:
    core = serving_core()
    elsewhere = NodeId("elsewhere")
    hear(core, PeerId("node-elsewhere/1"), NodeHello(elsewhere, Incarnation("1"), (), ()))
    lost = SliceChanged(elsewhere, SliceStatus(slice_id(), FIRST, "lost", "killed"))
    refused(core, PeerId("node-elsewhere/1"), lost, "not_owner")


@pytest.mark.parametrize("message", [Host(NODE, (), ()), PlanMade(1), ModelsRemove(1, (MODEL,))])
def test_what_is_said_to_others_is_not_for_a_scheduler(message: AnyMessage) -> None:
    refused(serving_core(), FRONTEND, message, "wrong_type")


def test_requests_of_nobody_are_not_queued() -> None:
    core = serving_core()
    (told,) = of_type(hear(core, STRANGER, Arrivals(MODEL, 0, 8, 20.0), 100.0), Directory)
    assert told.frontends
    assert hear(core, STRANGER, Arrivals(MODEL, 8, 8, 20.0), 101.0) == (), "told once a second"
    assert of_type(hear(core, STRANGER, Arrivals(MODEL, 8, 8, 20.0), 1_101.0), Directory)
    assert core.counters.requests_announced == 0
    assert core.offences.counters == {"messages_unlisted": 3}


def test_who_offends_too_often_is_taken_for_lost() -> None:
    core = serving_core()
    batch = dispatched(core, 100.0)
    for _ in range(OFFENCES_MAX - 1):
        assert hear(core, WORKER, Host(NODE, (), ()), 101.0) == ()
    (directory, *_) = of_type(hear(core, WORKER, Host(NODE, (), ()), 101.0), Directory)
    assert directory.slices == ()
    assert hear(core, WORKER, ready(), 102.0) == ()
    assert (
        hear(core, WORKER, Done(batch.batch_id, slice_id(), MODEL, "ok", 8, (), 0.1, 0.0, 13.0), 113.0) == ()
    )
    successor = Incarnation("00000002")
    hear(core, OTHER_WORKER, ready(incarnation=successor), 120.0)
    core_again = of_type(hear(core, FRONTEND, Arrivals(MODEL, 8, 8, 20.0), 130.0), RunBatch)
    assert [one.incarnation for one in core_again] == [successor]


def test_a_frontend_that_is_cut_off_is_not_heard() -> None:
    core = serving_core()
    for _ in range(OFFENCES_MAX):
        hear(core, FRONTEND, Host(NODE, (), ()), 101.0)
    assert hear(core, FRONTEND, Arrivals(MODEL, 0, 8, 20.0), 102.0) == ()
    assert hear(core, FRONTEND, FrontendHello(FrontendId("frontend-0"), FIRST, ()), 103.0) == ()


def test_the_status_tells_of_offences() -> None:
    core = serving_core()
    refused(core, STRANGER, ready(), "wrong_identity")
    (status,) = of_type(hear(core, PeerId("operator/1"), StatusAsked(), 106.0), StatusListed)
    assert status.counters["offences_wrong_identity"] == 1
    assert core.offences.lines[0].startswith("message_refused peer=stranger/1 reason=wrong_identity times=1")


def test_a_slice_that_is_unknown_is_answered_with_the_directory() -> None:
    message = replace(ready(), slice_id=SliceId("local/gpu7/0"))
    assert of_type(hear(serving_core(), WORKER, message, 105.0), Directory)
