"""The worker's core on virtual time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from fabric.ids import BatchId, FrontendId, ModelId, NodeId, PeerId, SliceId
from fabric.messages import (
    BatchFailed,
    Done,
    Host,
    InputsReturned,
    LeftOut,
    Loading,
    Outputs,
    PreemptBatch,
    RunBatch,
    SliceFailed,
    SliceReady,
    StatusAsked,
    StatusListed,
    Stop,
    WorkerHello,
)
from roles.gpu_worker.adoption import HELLO_EVERY_MS, HELLO_FOR_MS
from roles.gpu_worker.batch_start_rules import LATE_TOLERANCE_MS
from roles.gpu_worker.core import GRANTED_MAX, TELL_AGAIN_MS
from roles.gpu_worker.early_inputs import BYTES_MAX, WAIT_MS
from roles.gpu_worker.events import (
    Abort,
    AgentUntold,
    BatchRan,
    End,
    Execute,
    InputsCame,
    JoinScheduler,
    KnowFrontends,
    LoadSlice,
    NoRoom,
    PushOutputs,
    Release,
    SchedulerAnswers,
    UnloadSlice,
    WorkerAction,
    WorkerEvent,
)
from roles.gpu_worker.executors.base import (
    DeviceBroken,
    LoadBegins,
    Loaded,
    LoadFailed,
    RejectedRow,
    RunAborted,
    RunFailed,
)
from roles.gpu_worker.peer_checks import A_FRONTEND, AGENT
from roles.runtime.core import SCHEDULER, Handle, Heard, Lost, Send, Tick
from roles.runtime.exit_codes import EXIT_HUNG
from roles.runtime.process_events import StopAsked
from tests.worker_builders import (
    BOOT,
    FRONTEND,
    MODEL,
    OTHER_FRONTEND,
    SCHEDULER_AT,
    SLICE,
    actions_of,
    host,
    inputs,
    loaded,
    model_spec,
    part,
    run_batch,
    sent,
    serving_core,
    slice_spec,
    worker_core,
    worker_directory,
)

OUTPUTS = Handle(77)


def ran(
    batch_id: int = 1,
    rejected: tuple[RejectedRow, ...] = (),
    exec_ms: float = 7.0,
    began_at_ms: float = 0.0,
) -> BatchRan:
    return BatchRan(SLICE, BatchId(batch_id), OUTPUTS, rejected, exec_ms, began_at_ms)


def done_of(run: Heard, status: str, requests_ran: int = 0, **times_ms: float) -> Done:
    assert isinstance(run.message, RunBatch)
    return Done(
        run.message.batch_id,
        run.message.slice_id,
        run.message.model_id,
        status,
        requests_ran,
        (),
        times_ms.get("transfer_ms", 0.0),
        times_ms.get("queue_ms", 0.0),
        times_ms.get("exec_ms", 0.0),
    )


# ---------------------------------------------------------------- start


def test_a_worker_greets_its_agent_until_it_is_told_what_to_host() -> None:
    core = worker_core()
    assert core.wake_at_ms == -math.inf, "at once"
    hello = Send(AGENT, WorkerHello("worker-0", BOOT, 4242))
    assert core.handle(Tick(), 5.0) == [hello]
    assert core.wake_at_ms == 5.0 + HELLO_EVERY_MS
    assert core.handle(Tick(), 5.0 + HELLO_EVERY_MS) == [hello]
    core.handle(host(), 40.0)
    assert core.wake_at_ms is None


def test_a_worker_whose_agent_never_answers_ends() -> None:
    core = worker_core()
    core.handle(Tick(), 5.0)
    (end,) = core.handle(Tick(), 5.0 + HELLO_FOR_MS)
    assert isinstance(end, End)
    assert end.exit_code == 1
    assert core.wake_at_ms is None


def test_a_worker_that_was_stopped_itself_waits_for_its_agent_anew() -> None:
    core = worker_core()
    core.handle(Tick(), 5.0)
    late_ms = 1_000.0 + HELLO_FOR_MS
    assert sent(WorkerHello, core.handle(Tick(), late_ms))
    assert sent(WorkerHello, core.handle(Tick(), late_ms + HELLO_EVERY_MS))
    (end,) = core.handle(Tick(), late_ms + HELLO_FOR_MS)
    assert isinstance(end, End)


def test_a_slice_is_announced_to_both_when_it_is_warm() -> None:
    core = worker_core()
    spec = slice_spec()
    assert core.handle(host(spec), 0.0) == [JoinScheduler(("tcp://127.0.0.1:1",)), LoadSlice(spec)]
    assert core.handle(SchedulerAnswers(), 1.0) == []
    actions = core.handle(loaded(spec), 2_000.0)
    assert [action.peer for action in actions_of(Send, actions)] == [AGENT, SCHEDULER]
    ready = sent(SliceReady, actions)[0]
    assert ready == sent(SliceReady, actions)[1]
    assert (ready.slice_id, ready.incarnation, ready.addresses) == (SLICE, BOOT, ("tcp://127.0.0.1:2",))
    assert ready.replicas[0].exec_ms == (6.0, 7.0, 8.0, 9.0)


def test_a_slice_that_is_warm_before_the_scheduler_answers_is_announced_when_it_does() -> None:
    core = worker_core()
    core.handle(host(), 0.0)
    assert [action.peer for action in actions_of(Send, core.handle(loaded(), 1.0))] == [AGENT]
    assert [action.peer for action in actions_of(Send, core.handle(SchedulerAnswers(), 2.0))] == [SCHEDULER]


def test_a_loader_that_raises_fails_its_slice_and_no_other() -> None:
    good, bad = slice_spec("n/gpu0/0"), slice_spec("n/gpu1/0")
    core = worker_core()
    core.handle(host(good, bad), 0.0)
    actions = core.handle(LoadFailed(bad.slice_id, "no such file"), 1.0)
    assert actions == [Send(AGENT, SliceFailed(bad.slice_id, BOOT, "no such file", is_unloadable=True))]
    assert len(sent(SliceReady, core.handle(loaded(good), 2.0))) == 1


def test_a_slice_no_longer_wanted_is_unloaded_and_a_changed_one_loaded_anew() -> None:
    first, second = slice_spec("n/gpu0/0"), slice_spec("n/gpu1/0")
    core = serving_core(first, second)
    changed = replace(slice_spec("n/gpu1/0"), share_percent=50.0)
    assert core.handle(host(changed), 1.0) == [
        UnloadSlice(first.slice_id),
        UnloadSlice(second.slice_id),
        LoadSlice(changed),
    ]


def test_a_slice_no_longer_wanted_first_finishes_what_was_granted() -> None:
    core = serving_core(slice_spec(), slice_spec("n/gpu1/0"))
    core.handle(run_batch(), 0.0)
    core.handle(inputs(0, 1), 1.0)
    core.handle(run_batch(part((2, 1)), batch_id=2, latest_in_ms=50.0), 1.0)
    assert core.handle(host(slice_spec("n/gpu1/0")), 2.0) == []
    refused = run_batch(batch_id=3)
    assert sent(Done, core.handle(refused, 3.0))[0].status == "expired"
    assert len(actions_of(Execute, core.handle(inputs(2, batch_id=2), 4.0))) == 1
    core.handle(ran(began_at_ms=1.0), 8.0)
    actions = core.handle(ran(batch_id=2, began_at_ms=8.0), 15.0)
    assert sent(Done, actions)[0].status == "ok"
    assert actions[-1] == UnloadSlice(SLICE)


def test_a_slice_unwanted_while_it_loads_is_unloaded_when_that_has_ended() -> None:
    core = worker_core()
    core.handle(host(slice_spec(), slice_spec("n/gpu1/0")), 0.0)
    assert core.handle(host(slice_spec("n/gpu1/0")), 1.0) == []
    assert core.handle(loaded(), 2.0) == [UnloadSlice(SLICE)]


# ---------------------------------------------------------------- batches


def test_the_first_batch_in_line_starts_when_all_parts_are_in_although_they_were_expected_later() -> None:
    core = serving_core()
    run = run_batch(part((0, 2)), part((7, 1), frontend_id=OTHER_FRONTEND), start_in_ms=3.0)
    assert core.handle(run, 100.0) == []
    assert core.handle(inputs(0, 1), 101.0) == []
    assert core.wake_at_ms == 110.0  # the latest start, as a part is missing
    (execute,) = core.handle(inputs(7, number=1, frontend_id=OTHER_FRONTEND), 102.0)
    assert isinstance(execute, Execute)
    assert [piece.live_seqs for piece in execute.parts] == [(0, 1), (7,)]


def test_a_batch_behind_one_without_inputs_starts_when_its_own_start_has_come() -> None:
    core = serving_core()
    core.handle(run_batch(batch_id=1, start_in_ms=1.0, latest_in_ms=20.0), 100.0)
    core.handle(run_batch(batch_id=2, start_in_ms=5.0, latest_in_ms=20.0), 100.0)
    assert core.handle(inputs(0, 1, batch_id=2), 101.0) == []
    assert core.wake_at_ms == 105.0
    (execute,) = core.handle(Tick(), 105.0)
    assert isinstance(execute, Execute)
    assert execute.run.batch_id == 2


def test_time_on_the_way_is_taken_off_start_and_latest() -> None:
    core = serving_core()
    two_parts = part((0, 2)), part((7, 1), frontend_id=OTHER_FRONTEND)
    core.handle(run_batch(*two_parts, batch_id=1, latest_in_ms=10.0, late_ms=2.0), 100.0)
    core.handle(inputs(0, 1, batch_id=1), 100.0)
    assert core.wake_at_ms == 108.0
    core.handle(run_batch(batch_id=2, start_in_ms=5.0, latest_in_ms=10.0, late_ms=2.0), 100.0)
    core.handle(inputs(0, 1, batch_id=2), 101.0)
    assert core.wake_at_ms == 103.0


def test_inputs_may_come_before_their_batch() -> None:
    core = serving_core()
    assert core.handle(inputs(0, 1), 0.0) == []
    assert core.wake_at_ms == WAIT_MS
    assert len(actions_of(Execute, core.handle(run_batch(), 20.0))) == 1
    done = sent(Done, core.handle(ran(began_at_ms=20.0), 27.0))[0]
    assert (done.transfer_ms, done.queue_ms, done.exec_ms) == (0.0, 0.0, 7.0)


def inputs_returned(
    actions: Sequence[WorkerAction],
) -> list[tuple[FrontendId, BatchId, tuple[int, ...]]]:
    return [
        (push.frontend_id, push.message.batch_id, tuple(push.message.seqs))
        for push in actions_of(PushOutputs, actions)
        if isinstance(push.message, InputsReturned)
    ]


def test_inputs_whose_batch_never_comes_are_dropped_and_counted() -> None:
    core = serving_core()
    early = inputs(0, 1)
    core.handle(early, 0.0)
    actions = core.handle(Tick(), WAIT_MS)
    assert actions_of(Release, actions) == [Release((early.payload,))]
    assert inputs_returned(actions) == [(FRONTEND, 1, (0, 1))], "who granted them may be gone"
    assert core.counters["inputs_without_batch"] == 1


def test_early_inputs_are_bounded_in_bytes() -> None:
    core = serving_core()
    core.handle(inputs(0, 1, size_bytes=BYTES_MAX), 0.0)
    over = inputs(5, batch_id=2, size_bytes=1)
    actions = core.handle(over, 1.0)
    assert actions_of(Release, actions) == [Release((over.payload,))]
    assert inputs_returned(actions) == [(FRONTEND, 2, (5,))]
    assert core.counters["inputs_over_pool"] == 1


def test_nobody_hears_that_inputs_were_not_run_which_are_in_a_batch() -> None:
    """Whoever pushes may write another frontend's name: what a batch has under that name is not given back."""
    forged = [inputs(0, 1, number=7), inputs(0, 1, slice_id="slice-of-another-worker"), inputs(0, 1)]
    for is_early in (False, True):
        for end in (Tick(), DeviceBroken("it fell off the bus")):
            core = serving_core()
            said = [*core.handle(inputs(0, 1), 0.0)]
            if is_early:
                said += [action for event in forged for action in core.handle(event, 0.0)]
            said += core.handle(NoRoom(forged[-1].inputs), 0.0)
            said += core.handle(run_batch(part((0, 2))), 0.0)
            assert actions_of(Execute, said)
            for event in forged:
                said += core.handle(event, 1.0)
                said += core.handle(NoRoom(event.inputs), 1.0)
            said += core.handle(end, 1.0 + WAIT_MS)
            assert inputs_returned(said) == []


def test_early_inputs_take_the_place_of_no_other_frontend() -> None:
    core = serving_core()
    core.handle(inputs(9, frontend_id=OTHER_FRONTEND), 0.0)
    core.handle(inputs(0, 1), 1.0)
    assert len(actions_of(Execute, core.handle(run_batch(), 20.0))) == 1


def test_early_inputs_of_no_live_request_are_given_back_to_nobody() -> None:
    core = serving_core()
    core.handle(inputs(), 0.0)
    assert actions_of(PushOutputs, core.handle(Tick(), WAIT_MS)) == []


@pytest.mark.parametrize("end", [StopAsked(), DeviceBroken("it fell off the bus")])
def test_early_inputs_are_given_back_before_their_worker_ends(end: WorkerEvent) -> None:
    core = serving_core()
    early = inputs(0, 1)
    core.handle(early, 0.0)
    actions = core.handle(end, 1.0)
    assert inputs_returned(actions) == [(FRONTEND, 1, (0, 1))]
    assert isinstance(actions[-1], End)


def test_inputs_that_the_process_has_no_memory_for_are_returned() -> None:
    assert inputs_returned(serving_core().handle(NoRoom(inputs(0, 1).inputs), 0.0)) == [(FRONTEND, 1, (0, 1))]


def test_inputs_of_a_batch_that_never_begins_are_returned_to_those_whose_they_are() -> None:
    core = serving_core()
    core.handle(run_batch(), 0.0)
    core.handle(inputs(0, 1), 0.0)
    second = [part((7, 3), frontend_id=OTHER_FRONTEND), part((2, 1))]
    core.handle(run_batch(*second, batch_id=2, latest_in_ms=20.0, expires_in_ms=30.0), 0.0)
    core.handle(inputs(7, 9, batch_id=2, frontend_id=OTHER_FRONTEND), 0.0)
    actions = core.handle(ran(began_at_ms=0.0, exec_ms=60.0), 60.0)
    assert inputs_returned(actions) == [(OTHER_FRONTEND, 2, (7, 9))]


def test_inputs_of_a_batch_that_is_stopped_are_returned() -> None:
    core = serving_core()
    core.handle(run_batch(part((0, 2)), part((7, 3), frontend_id=OTHER_FRONTEND), batch_id=2), 0.0)
    core.handle(inputs(0, batch_id=2), 1.0)
    actions = core.handle(Heard(SCHEDULER, PreemptBatch(BatchId(2), SLICE)), 2.0)
    assert inputs_returned(actions) == [(FRONTEND, 2, (0,))]


def test_frames_for_another_incarnation_are_dropped_and_counted() -> None:
    core = serving_core()
    stale = inputs(0, 1, incarnation="dead")
    assert core.handle(stale, 0.0) == [Release((stale.payload,))]
    assert core.handle(run_batch(incarnation="dead"), 0.0) == []
    assert core.counters["inputs_for_another_incarnation"] == 1
    assert core.counters["batches_for_another_incarnation"] == 1


@pytest.mark.parametrize(
    "wrong",
    [
        inputs(0, 9),  # seq 9 is not in the part
        inputs(0, 0),
        inputs(0, 1, number=3),
        inputs(0, 1, frontend_id=OTHER_FRONTEND),
        inputs(0, 1, model_id="bert"),
    ],
)
def test_inputs_that_are_no_part_of_the_batch_are_dropped_and_counted(wrong: InputsCame) -> None:
    core = serving_core()
    core.handle(run_batch(), 0.0)
    assert core.handle(wrong, 1.0) == [Release((wrong.payload,))]
    assert core.counters["inputs_unfit"] == 1


def test_a_part_that_comes_twice_counts_once() -> None:
    core = serving_core()
    core.handle(run_batch(part((0, 2)), part((5, 1), frontend_id=OTHER_FRONTEND)), 0.0)
    core.handle(inputs(0, 1), 1.0)
    again = inputs(0, 1)
    assert core.handle(again, 2.0) == [Release((again.payload,))]


def test_at_its_latest_start_a_batch_goes_with_what_came() -> None:
    core = serving_core()
    late = part((7, 3), frontend_id=OTHER_FRONTEND)
    core.handle(run_batch(part((0, 2)), late), 0.0)
    core.handle(inputs(0, 1), 1.0)
    (execute,) = actions_of(Execute, core.handle(Tick(), 10.0))
    assert [piece.live_seqs for piece in execute.parts] == [(0, 1)]
    too_late = inputs(7, number=1, frontend_id=OTHER_FRONTEND)
    actions = core.handle(too_late, 11.0)
    assert actions_of(Release, actions) == [Release((too_late.payload,))]
    assert inputs_returned(actions) == [(OTHER_FRONTEND, 1, (7,))]
    done = sent(Done, core.handle(ran(), 17.0))[0]
    assert (done.status, done.ran, done.missing) == ("ok", 2, (late,))


def test_a_batch_of_which_nothing_came_is_missing_as_a_whole() -> None:
    core = serving_core()
    core.handle(run_batch(), 0.0)
    expires_at_ms = 10.0 + LATE_TOLERANCE_MS
    (done,) = sent(Done, core.handle(Tick(), expires_at_ms))
    assert (done.status, done.ran, done.missing) == ("expired", 0, (part((0, 2)),))
    assert done.transfer_ms == expires_at_ms, "for so long they had not come"
    assert core.wake_at_ms is None


def test_a_batch_without_any_inputs_is_waited_for_while_it_may_be_of_use() -> None:
    core = serving_core()
    core.handle(run_batch(latest_in_ms=10.0, expires_in_ms=14.0), 0.0)
    assert core.wake_at_ms == 14.0 + LATE_TOLERANCE_MS
    (execute,) = actions_of(Execute, core.handle(inputs(0, 1), 12.0))
    assert [piece.live_seqs for piece in execute.parts] == [(0, 1)]
    (done,) = sent(Done, core.handle(ran(), 18.0))
    assert (done.status, done.transfer_ms) == ("ok", 12.0)


def test_what_comes_first_after_the_latest_start_goes_without_the_rest() -> None:
    core = serving_core()
    late = part((7, 3), frontend_id=OTHER_FRONTEND)
    core.handle(run_batch(part((0, 2)), late, latest_in_ms=10.0, expires_in_ms=14.0), 0.0)
    assert actions_of(Execute, core.handle(inputs(0, 1), 12.0)) == [], "the rest may have come with it"
    assert core.wake_at_ms == 10.0, "so the timer that is fed next says go"
    (execute,) = actions_of(Execute, core.handle(Tick(), 12.0))
    assert [piece.live_seqs for piece in execute.parts] == [(0, 1)]
    assert sent(Done, core.handle(ran(), 18.0))[0].missing == (late,)


def test_the_scheduler_hears_for_how_long_a_missing_part_was_waited_for() -> None:
    core = serving_core()
    core.handle(run_batch(part((0, 2)), part((7, 3), frontend_id=OTHER_FRONTEND)), 0.0)
    core.handle(inputs(0, 1), 1.0)
    core.handle(Tick(), 10.0)
    actions = core.handle(ran(began_at_ms=10.0), 17.0)
    (done,) = sent(Done, actions)
    assert done.transfer_ms == 10.0
    (outputs,) = [push.message for push in actions_of(PushOutputs, actions)]
    assert isinstance(outputs, Outputs)
    assert outputs.transfer_ms == 1.0, "those that ran did not wait for it on the way"


@pytest.mark.parametrize(("came_at_ms", "until_ms"), [(1.0, 5.0), (20.0, 20.0)])
def test_what_the_device_took_is_not_counted_as_the_way_of_a_missing_part(
    came_at_ms: float, until_ms: float
) -> None:
    """The batch could have gone without it from its latest start on, or as soon as there was something to run."""
    core = serving_core()
    core.handle(run_batch(expires_in_ms=90.0), 0.0)
    core.handle(inputs(0, 1), 0.0)
    lacks = run_batch(
        part((2, 1)),
        part((7, 1), frontend_id=OTHER_FRONTEND),
        batch_id=2,
        latest_in_ms=5.0,
        expires_in_ms=90.0,
    )
    core.handle(lacks, 0.0)
    core.handle(inputs(2, batch_id=2), came_at_ms)
    core.handle(ran(began_at_ms=0.0), 60.0)
    (done,) = sent(Done, core.handle(ran(batch_id=2, began_at_ms=60.0), 67.0))
    assert (done.ran, len(done.missing)) == (1, 1)
    assert (done.transfer_ms, done.queue_ms) == (until_ms, 60.0 - until_ms)


def test_a_part_without_requests_is_nothing_to_go_with() -> None:
    """Its requests were cancelled: the other part is waited for as if this one had not come either."""
    late = part((7, 2), frontend_id=OTHER_FRONTEND)
    for comes in (True, False):
        core = serving_core()
        core.handle(run_batch(part((0, 2)), late, latest_in_ms=10.0, expires_in_ms=20.0), 0.0)
        empty = inputs()
        core.handle(empty, 1.0)
        assert core.wake_at_ms == 20.0 + LATE_TOLERANCE_MS
        if comes:
            came = inputs(7, 8, number=1, frontend_id=OTHER_FRONTEND)
            (execute,) = actions_of(Execute, core.handle(came, 14.0))
            assert [piece.live_seqs for piece in execute.parts] == [(7, 8)]
        else:
            actions = core.handle(Tick(), 20.0 + LATE_TOLERANCE_MS)
            assert [release.payloads for release in actions_of(Release, actions)] == [(empty.payload,)]
            (done,) = sent(Done, actions)
            assert (done.status, done.missing) == ("expired", (late,)), (
                "the cancelled ones have their answers"
            )
            assert done.transfer_ms == 20.0 + LATE_TOLERANCE_MS


def test_a_batch_of_which_all_is_dead_is_done_at_once() -> None:
    core = serving_core()
    core.handle(run_batch(start_in_ms=5.0), 0.0)
    (done,) = sent(Done, core.handle(inputs(), 1.0))
    assert (done.status, done.ran, done.missing) == ("ok", 0, ())


def test_a_batch_that_finds_the_device_busy_until_all_is_lost_has_expired() -> None:
    core = serving_core()
    core.handle(inputs(0, 1), 0.0)
    core.handle(run_batch(), 0.0)
    core.handle(run_batch(part((2, 2)), part((9, 1)), batch_id=2, latest_in_ms=4.0), 0.0)
    core.handle(inputs(2, 3, batch_id=2), 0.0)
    assert core.wake_at_ms == 4.0 + LATE_TOLERANCE_MS
    (done,) = sent(Done, core.handle(Tick(), 4.0 + LATE_TOLERANCE_MS))
    assert (done.batch_id, done.status, done.missing) == (2, "expired", (part((2, 2)), part((9, 1))))
    actions = core.handle(ran(), 7.0)
    assert actions_of(Execute, actions) == []
    assert sent(Done, actions)[0].status == "ok"


def test_a_batch_late_for_its_tightest_request_still_runs_for_the_others() -> None:
    core = serving_core()
    core.handle(inputs(0, 1), 0.0)
    core.handle(run_batch(), 0.0)
    two_parts = part((2, 2)), part((9, 1))
    core.handle(run_batch(*two_parts, batch_id=2, latest_in_ms=4.0, expires_in_ms=8.0), 0.0)
    core.handle(inputs(2, 3, batch_id=2), 0.0)
    assert core.wake_at_ms == 8.0 + LATE_TOLERANCE_MS
    assert len(actions_of(Execute, core.handle(ran(), 7.0))) == 1


def test_a_timer_that_is_a_little_late_does_not_expire_its_batch() -> None:
    core = serving_core()
    core.handle(run_batch(part((0, 1)), part((9, 1), frontend_id=OTHER_FRONTEND)), 0.0)
    core.handle(inputs(0), 0.0)
    assert len(actions_of(Execute, core.handle(Tick(), 10.0 + LATE_TOLERANCE_MS / 2))) == 1


def test_batches_run_one_at_a_time_in_order_of_start() -> None:
    core = serving_core()
    core.handle(inputs(0, 1), 0.0)
    core.handle(run_batch(), 0.0)
    for batch_id, start_in_ms in ((3, 5.0), (2, 6.0)):
        core.handle(inputs(batch_id, batch_id=batch_id), 0.0)
        core.handle(
            run_batch(part((batch_id, 1)), batch_id=batch_id, start_in_ms=start_in_ms, latest_in_ms=50.0), 0.0
        )
    actions = core.handle(ran(), 7.0)  # the device has the third one already
    (execute,) = actions_of(Execute, actions)
    assert execute.run.batch_id == 2
    assert actions[0] is execute, (
        "the device may have nothing to do until then, so it goes before the answers"
    )


def test_a_batch_whose_inputs_are_late_does_not_hold_up_the_next() -> None:
    core = serving_core()
    core.handle(run_batch(latest_in_ms=30.0), 0.0)
    core.handle(inputs(5, batch_id=2), 0.0)
    assert len(actions_of(Execute, core.handle(run_batch(part((5, 1)), batch_id=2), 0.0))) == 1


def test_slices_of_one_process_run_side_by_side() -> None:
    core = serving_core(slice_spec("n/gpu0/0"), slice_spec("n/gpu1/0"))
    for slice_id in ("n/gpu0/0", "n/gpu1/0"):
        core.handle(inputs(0, 1, slice_id=slice_id), 0.0)
        assert len(actions_of(Execute, core.handle(run_batch(slice_id=slice_id), 0.0))) == 1


def test_a_repeated_batch_is_counted_and_not_run_again() -> None:
    core = serving_core()
    core.handle(run_batch(), 0.0)
    assert core.handle(run_batch(), 1.0) == []
    assert core.counters["batches_repeated"] == 1


def test_a_batch_for_a_model_or_slice_that_is_not_here_comes_back() -> None:
    core = serving_core()
    for stranger in (run_batch(model_id="bert"), run_batch(slice_id="n/gpu9/0")):
        (done,) = sent(Done, core.handle(stranger, 0.0))
        assert (done.status, done.missing) == ("expired", (part((0, 2)),))


def test_granted_batches_are_limited() -> None:
    core = serving_core()
    for batch_id in range(GRANTED_MAX):
        assert core.handle(run_batch(batch_id=batch_id, latest_in_ms=1e6), 0.0) == []
    assert len(sent(Done, core.handle(run_batch(batch_id=GRANTED_MAX), 0.0))) == 1


# ---------------------------------------------------------------- answers


def test_each_frontend_gets_its_rows_and_the_scheduler_the_times() -> None:
    core = serving_core()
    early = inputs(4, 6)
    core.handle(early, 0.0)
    run = run_batch(part((4, 3)), part((1, 1), frontend_id=OTHER_FRONTEND))
    core.handle(run, 0.0)
    other = inputs(1, number=1, frontend_id=OTHER_FRONTEND)
    core.handle(other, 3.0)
    actions = core.handle(ran(began_at_ms=3.0), 10.0)
    first, second = actions_of(PushOutputs, actions)
    assert (first.frontend_id, first.outputs, first.first_row) == (FRONTEND, OUTPUTS, 0)
    assert first.message == Outputs(run.message.batch_id, SLICE, MODEL, (4, 6), 3, 3.0, 0.0, 7.0)  # type: ignore[union-attr]
    assert (second.frontend_id, second.first_row) == (OTHER_FRONTEND, 2)
    assert sent(Done, actions) == [done_of(run, "ok", 3, transfer_ms=3.0, exec_ms=7.0)]
    released = {handle for action in actions_of(Release, actions) for handle in action.payloads}
    assert released == {early.payload, other.payload, OUTPUTS}


def test_a_request_that_does_not_fit_is_refused_and_the_others_answered() -> None:
    core = serving_core()
    core.handle(inputs(4, 5, 6), 0.0)
    core.handle(run_batch(part((4, 3)), part((1, 1), frontend_id=OTHER_FRONTEND)), 0.0)
    core.handle(inputs(1, number=1, frontend_id=OTHER_FRONTEND), 0.0)
    actions = core.handle(ran(rejected=(RejectedRow(1, "wrong shape"),)), 7.0)
    messages = [push.message for push in actions_of(PushOutputs, actions)]
    assert [type(message) for message in messages] == [Outputs, BatchFailed, Outputs]
    assert [message.seqs for message in messages] == [(4, 6), (5,), (1,)]
    assert [push.first_row for push in actions_of(PushOutputs, actions)] == [0, 0, 2]
    assert isinstance(messages[1], BatchFailed)
    assert (messages[1].code, messages[1].reason) == ("InvalidInput", "wrong shape")
    assert sent(Done, actions)[0].ran == 3


def test_a_model_that_raises_on_a_request_fails_it_and_the_slice_serves_on() -> None:
    core = serving_core()
    core.handle(inputs(0), 0.0)
    run = run_batch(part((0, 1)))
    core.handle(run, 0.0)
    core.handle(inputs(2, batch_id=2), 0.0)
    core.handle(run_batch(part((2, 1)), batch_id=2, latest_in_ms=50.0), 0.0)
    actions = core.handle(failed(), 5.0)
    assert told(actions) == [((0,), "Internal", "ValueError: no")]
    assert sent(Done, actions) == [done_of(run, "failed")]
    assert sent(Done, core.handle(ran(2, began_at_ms=5.0), 12.0))[0].status == "ok"


def test_only_the_request_that_the_model_raises_on_fails() -> None:
    """A batch of 32 over two frontends, poisoned at any one place: 31 answers, each run apart in time."""
    for guilty in range(32):
        core = serving_core(slice_spec(models=[model_spec(exec_ms=[6.0] * 32)]))
        core.handle(inputs(*range(20)), 0.0)
        core.handle(inputs(*range(20, 32), number=1, frontend_id=OTHER_FRONTEND), 0.0)
        parts = (part((0, 20)), part((20, 12), frontend_id=OTHER_FRONTEND))
        actions = core.handle(run_batch(*parts, latest_in_ms=10.0, expires_in_ms=500.0), 0.0)
        fates: list[tuple[tuple[int, ...], str]] = []
        for run_no in range(1, 100):
            running = actions_of(Execute, actions)
            if not running:
                break
            seqs = [seq for piece in running[0].parts for seq in piece.live_seqs]
            actions = core.handle(failed() if guilty in seqs else ran(), 6.0 * run_no)
            fates += [
                (push.message.seqs, getattr(push.message, "code", "ok"))
                for push in actions_of(PushOutputs, actions)
            ]
        assert [seqs for seqs, code in fates if code == "Internal"] == [(guilty,)]
        served = [seq for seqs, code in fates if code == "ok" for seq in seqs]
        assert sorted(served) == [seq for seq in range(32) if seq != guilty]
        (done,) = sent(Done, actions)
        assert (done.status, done.ran, done.missing) == ("failed", 31, ())
        assert run_no <= 2 * 5 + 2, "two runs a halving"


def test_what_has_no_time_for_a_run_apart_expires() -> None:
    core = serving_core()
    core.handle(inputs(0, 1), 0.0)
    core.handle(run_batch(latest_in_ms=10.0), 0.0)
    assert (
        len(actions_of(Execute, core.handle(failed(), 9.0))) == 1
    )  # l(1) = 6, and l(2) = 7 from 10 on was in time
    actions = core.handle(failed(), 13.0)
    assert [(seqs, code) for seqs, code, _ in told(actions)] == [
        ((0,), "Internal"),
        ((1,), "DeadlineExceeded"),
    ]
    assert [done.status for done in sent(Done, actions)] == ["failed"]


def test_a_device_that_breaks_in_a_run_apart_answers_for_all_that_is_left() -> None:
    core = serving_core()
    core.handle(inputs(0, 1, 2, 3), 0.0)
    core.handle(run_batch(part((0, 4)), latest_in_ms=100.0), 0.0)
    core.handle(failed(), 1.0)
    actions = core.handle(DeviceBroken("gone"), 2.0)
    assert [(seqs, code) for seqs, code, _ in told(actions)] == [
        ((0, 1), "WorkerLost"),
        ((2, 3), "WorkerLost"),
    ]


@pytest.mark.parametrize("is_hung", [False, True])
def test_nobody_is_told_not_to_try_again_for_what_another_request_may_have_done(is_hung: bool) -> None:
    for seqs, codes in (((0,), ["Internal"]), ((0, 1), ["WorkerLost"])):
        core = serving_core()
        core.handle(inputs(*seqs), 0.0)
        core.handle(run_batch(part((0, len(seqs)))), 0.0)
        actions = core.handle(Tick() if is_hung else DeviceBroken("gone"), 2_000.0)
        assert [code for _, code, _ in told(actions)] == codes


def test_a_broken_device_answers_for_everything_and_ends_the_process() -> None:
    core = serving_core()
    core.handle(inputs(0, 1), 0.0)
    core.handle(run_batch(), 0.0)
    core.handle(run_batch(part((9, 1)), batch_id=2), 0.0)
    actions = core.handle(DeviceBroken("CUDA error: illegal address"), 5.0)
    assert [done.status for done in sent(Done, actions)] == ["failed", "expired"]
    assert len(actions_of(PushOutputs, actions)) == 1
    assert sent(SliceFailed, actions) == [SliceFailed(SLICE, BOOT, "CUDA error: illegal address")]
    assert actions[-1] == End(1, "CUDA error: illegal address")


@pytest.mark.parametrize(
    ("exec_ms", "said_ms", "limit_ms"), [(7.0, None, 2_000.0), (500.0, None, 10_000.0), (500.0, 800.0, 800.0)]
)
def test_a_run_of_many_times_its_promise_has_hung_and_ends_the_process(
    exec_ms: float, said_ms: float | None, limit_ms: float
) -> None:
    model = replace(model_spec(exec_ms=(exec_ms,)), run_limit_ms=said_ms)
    core = serving_core(slice_spec(models=[model]), slice_spec("node-0/gpu0/1"))
    core.handle(inputs(0), 0.0)
    run = run_batch(part((0, 1)))
    core.handle(run, 0.0)
    core.handle(run_batch(part((9, 1)), batch_id=2, latest_in_ms=1e6), 0.0)
    assert core.handle(Tick(), limit_ms - 1.0) == []
    assert core.wake_at_ms == limit_ms
    actions = core.handle(Tick(), limit_ms)
    reason = f"model 'resnet50' hung: a batch of 1 did not end within {limit_ms:.0f} ms"
    assert told(actions) == [((0,), "Internal", reason)]
    assert [done.status for done in sent(Done, actions)] == ["failed", "expired"]
    assert sent(SliceFailed, actions) == [
        SliceFailed(SLICE, BOOT, reason, MODEL),
        SliceFailed(SliceId("node-0/gpu0/1"), BOOT, reason),  # its neighbour in this process has hung nobody
    ]
    assert actions[-1] == End(EXIT_HUNG, reason)


def test_a_process_that_was_stopped_itself_takes_no_run_for_hung() -> None:
    core = serving_core()
    core.handle(inputs(0), 0.0)
    core.handle(run_batch(part((0, 1))), 0.0)
    assert core.handle(Tick(), 60_000.0) == []
    assert core.wake_at_ms == 62_000.0
    assert actions_of(End, core.handle(Tick(), 62_000.0))


def test_each_run_apart_has_its_own_limit() -> None:
    core = serving_core()
    core.handle(inputs(0, 1), 0.0)
    core.handle(run_batch(latest_in_ms=5_000.0), 0.0)
    core.handle(failed(), 1_500.0)
    assert core.handle(Tick(), 2_000.0) == []
    assert actions_of(End, core.handle(Tick(), 3_500.0))


def test_a_load_that_breaks_the_device_names_its_model() -> None:
    core = worker_core()
    core.handle(Tick(), 0.0)
    core.handle(host(slice_spec(models=[model_spec(), model_spec("bad")])), 0.0)
    core.handle(LoadBegins(SLICE, MODEL), 0.0)
    core.handle(LoadBegins(SLICE, ModelId("bad")), 0.0)
    actions = core.handle(DeviceBroken("CUDA error"), 1.0)
    assert sent(SliceFailed, actions) == [SliceFailed(SLICE, BOOT, "CUDA error", ModelId("bad"))]


def test_models_that_are_left_out_are_not_loaded_and_reported_with_their_reasons() -> None:
    core = worker_core()
    good, bad, worse = model_spec(), model_spec("bad"), model_spec("worse")
    spec = slice_spec(models=[bad, good, worse])
    out = LeftOut(SLICE, bad.model_id, "hung 3 times")
    core.handle(Tick(), 0.0)
    actions = core.handle(Heard(AGENT, Host(NodeId("node-0"), (spec,), SCHEDULER_AT, left_out=(out,))), 0.0)
    assert actions_of(LoadSlice, actions) == [LoadSlice(replace(spec, models=(good, worse)))]
    assert core.handle(LoadBegins(SLICE, good.model_id), 0.0) == [Send(AGENT, Loading(SLICE, good.model_id))]
    raised = LeftOut(SLICE, worse.model_id, "it raised")
    replicas = loaded(slice_spec(models=[good])).replicas
    (ready,) = sent(SliceReady, core.handle(Loaded(SLICE, replicas, (raised,)), 1.0))
    assert ready.left_out == (out, raised)
    assert [replica.model_id for replica in ready.replicas] == [MODEL]


def test_a_slice_of_which_every_model_is_left_out_fails() -> None:
    core = worker_core()
    core.handle(Tick(), 0.0)
    out = LeftOut(SLICE, MODEL, "hung 3 times")
    host_it = Host(NodeId("node-0"), (slice_spec(),), SCHEDULER_AT, left_out=(out,))
    core.handle(Heard(AGENT, host_it), 0.0)
    actions = core.handle(Loaded(SLICE, ()), 0.0)
    assert sent(SliceFailed, actions) == [
        SliceFailed(SLICE, BOOT, "resnet50: hung 3 times", is_unloadable=True)
    ]


def failed() -> RunFailed:
    return RunFailed(SLICE, BatchId(1), "ValueError: no")


def told(actions: Sequence[WorkerAction]) -> list[tuple[tuple[int, ...], str, str]]:
    messages = [push.message for push in actions_of(PushOutputs, actions)]
    return [(one.seqs, one.code, one.reason) for one in messages if isinstance(one, BatchFailed)]


# ---------------------------------------------------------------- preemption, stop, scheduler


def test_a_waiting_batch_is_preempted_at_once_and_a_running_one_if_the_device_can() -> None:
    core = serving_core()
    core.handle(inputs(0, 1), 0.0)
    run = run_batch()
    core.handle(run, 0.0)
    waiting = run_batch(part((5, 1)), batch_id=2)
    core.handle(waiting, 0.0)
    assert isinstance(run.message, RunBatch)
    assert isinstance(waiting.message, RunBatch)
    actions = core.handle(Heard(SCHEDULER, PreemptBatch(waiting.message.batch_id, SLICE)), 1.0)
    assert sent(Done, actions) == [done_of(waiting, "preempted")]
    assert core.handle(Heard(SCHEDULER, PreemptBatch(run.message.batch_id, SLICE)), 1.0) == [
        Abort(SLICE, run.message.batch_id)
    ]
    actions = core.handle(RunAborted(SLICE, run.message.batch_id), 1.0)
    assert sent(Done, actions) == [done_of(run, "preempted")]
    assert core.handle(Heard(SCHEDULER, PreemptBatch(run.message.batch_id, SLICE)), 2.0) == []


def test_a_stop_lets_the_running_batch_finish_and_gives_back_the_others() -> None:
    core = serving_core()
    core.handle(inputs(0, 1), 0.0)
    core.handle(run_batch(), 0.0)
    core.handle(run_batch(part((9, 1)), batch_id=2), 0.0)
    actions = core.handle(Heard(AGENT, Stop(100.0)), 1.0)
    assert [done.batch_id for done in sent(Done, actions)] == [2]
    assert actions_of(End, actions) == []
    actions = core.handle(ran(), 7.0)
    assert sent(Done, actions)[0].status == "ok"
    assert actions[-1] == End(0, "stopped")


def test_a_stop_without_work_ends_at_once() -> None:
    assert actions_of(End, serving_core().handle(Heard(AGENT, Stop(100.0)), 1.0)) == [End(0, "stopped")]


def test_a_stop_does_not_wait_longer_than_its_grace() -> None:
    core = serving_core()
    core.handle(inputs(0, 1), 0.0)
    core.handle(run_batch(), 0.0)
    core.handle(Heard(AGENT, Stop(5.0)), 1.0)
    assert core.wake_at_ms == 6.0
    actions = core.handle(Tick(), 6.0)
    assert sent(Done, actions) == [done_of(run_batch(), "failed")], "it may have run: nothing is missing"
    assert actions_of(PushOutputs, actions) == [], "nor failed: its frontends see the slice go"
    assert isinstance(actions[-1], End)


def test_of_a_batch_that_a_stop_gives_up_only_the_parts_that_had_not_come_are_missing() -> None:
    core = serving_core()
    core.handle(inputs(0, 1), 0.0)
    core.handle(run_batch(part((0, 2)), part((9, 1)), latest_in_ms=10.0), 0.0)
    assert actions_of(Execute, core.handle(Tick(), 10.0))
    core.handle(Heard(AGENT, Stop(5.0)), 11.0)
    (done,) = sent(Done, core.handle(Tick(), 16.0))
    assert (done.status, done.missing) == ("failed", (part((9, 1)),))


def test_what_was_granted_is_served_without_a_scheduler_and_readiness_said_again_when_it_is_back() -> None:
    core = serving_core()
    core.handle(run_batch(), 0.0)
    assert core.handle(Lost(SCHEDULER, "silent"), 1.0) == []
    assert len(actions_of(Execute, core.handle(inputs(0, 1), 2.0))) == 1
    assert [ready.slice_id for ready in sent(SliceReady, core.handle(SchedulerAnswers(), 3.0))] == [SLICE]


def test_a_directory_without_us_makes_us_say_again_that_we_are_ready() -> None:
    core = serving_core()
    assert sent(SliceReady, core.handle(worker_directory(), 10.0)) == []  # our word may be on its way
    assert sent(SliceReady, core.handle(worker_directory(SLICE), 5_000.0)) == []
    assert len(sent(SliceReady, core.handle(worker_directory(SLICE, incarnation="dead"), 5_000.0))) == 1
    assert sent(SliceReady, core.handle(worker_directory(), 5_001.0)) == []


def test_readiness_is_said_every_second_until_a_directory_lists_the_slice() -> None:
    heard, unheard = slice_spec("n/gpu0/0"), slice_spec("n/gpu1/0")
    core = worker_core()
    core.handle(host(heard, unheard), 0.0)
    core.handle(SchedulerAnswers(), 1.0)
    core.handle(loaded(heard), 2.0)
    core.handle(loaded(unheard), 2.0)
    core.handle(worker_directory(heard.slice_id), 3.0)
    for moment_ms in (1_002.0, 2_002.0):
        assert core.wake_at_ms == moment_ms
        again = sent(SliceReady, core.handle(Tick(), moment_ms))
        assert [ready.slice_id for ready in again] == [unheard.slice_id]
    core.handle(worker_directory(heard.slice_id, unheard.slice_id), 2_003.0)
    assert core.wake_at_ms is None


def test_readiness_is_not_said_while_the_scheduler_is_away() -> None:
    core = worker_core()
    core.handle(host(), 0.0)
    core.handle(SchedulerAnswers(), 1.0)
    core.handle(loaded(), 2.0)
    core.handle(Lost(SCHEDULER, "silent"), 3.0)
    assert core.wake_at_ms is None
    assert sent(SliceReady, core.handle(SchedulerAnswers(), 5_000.0))
    assert core.wake_at_ms == 6_000.0


def test_a_directory_says_where_outputs_go() -> None:
    (action,) = serving_core().handle(worker_directory(SLICE), 1.0)
    assert isinstance(action, KnowFrontends)
    assert action.frontends[0].frontend_id == FrontendId(FRONTEND)


def test_a_frontend_that_is_listed_no_more_gets_the_outputs_of_its_batches() -> None:
    """Its connection to the scheduler broke, or it is dead: one that lives is listed again in a moment."""
    core = serving_core()
    core.handle(worker_directory(SLICE), 0.0)
    core.handle(inputs(0, 1), 1.0)
    core.handle(run_batch(), 1.0)
    nobody = Heard(SCHEDULER, replace(worker_directory(SLICE).message, frontends=()))
    (known,) = actions_of(KnowFrontends, core.handle(nobody, 2.0))
    assert [one.frontend_id for one in known.frontends] == [FRONTEND]
    core.handle(ran(), 7.0)
    (known,) = actions_of(KnowFrontends, core.handle(nobody, 8.0))
    assert known.frontends == ()


def test_a_frontend_that_is_listed_no_more_hears_of_inputs_whose_batch_never_comes() -> None:
    """The scheduler that granted them is gone, and the one after it does not know the frontend yet."""
    core = serving_core()
    core.handle(worker_directory(SLICE), 0.0)
    core.handle(inputs(0, 1), 1.0)
    nobody = Heard(SCHEDULER, replace(worker_directory(SLICE).message, frontends=()))
    (known,) = actions_of(KnowFrontends, core.handle(nobody, 2.0))
    assert [one.frontend_id for one in known.frontends] == [FRONTEND]
    assert inputs_returned(core.handle(Tick(), 1.0 + WAIT_MS)) == [(FRONTEND, 1, (0, 1))]


def test_the_agent_can_ask_how_it_goes() -> None:
    core = serving_core()
    core.handle(inputs(0, 1), 0.0)
    core.handle(run_batch(), 0.0)
    core.handle(ran(), 7.0)
    (status,) = sent(StatusListed, core.handle(Heard(AGENT, StatusAsked()), 8.0))
    assert (status.role_id, status.pid) == ("worker-0", 4242)
    assert (status.slices[0].state, status.slices[0].batches, status.slices[0].requests) == ("ready", 1, 2)
    assert status.counters["requests_ran"] == 2


def test_an_unexpected_message_is_counted() -> None:
    core = serving_core()
    assert core.handle(Heard(AGENT, PreemptBatch(0, SLICE)), 1.0) == []  # type: ignore[arg-type]
    assert core.handle(Heard(PeerId("scheduler"), Stop(1.0)), 1.0) == []
    assert core.handle(Heard(A_FRONTEND, Stop(1.0)), 1.0) == []
    assert core.offences.counters["offences_wrong_type"] == 3
    (status,) = sent(StatusListed, core.handle(Heard(AGENT, StatusAsked()), 8.0))
    assert status.counters["offences_wrong_type"] == 3


@pytest.mark.parametrize("word", [Loading, SliceReady, SliceFailed])
def test_whatever_its_agent_did_not_take_is_said_again_until_it_does(word: type) -> None:
    core = worker_core()
    core.handle(Tick(), 0.0)
    one = slice_spec()
    core.handle(host(one), 0.0)
    event: dict[type, WorkerEvent] = {
        Loading: LoadBegins(one.slice_id, one.models[0].model_id),
        SliceReady: loaded(one),
        SliceFailed: LoadFailed(one.slice_id, "no such file"),
    }
    first: Any = sent(word, core.handle(event[word], 1.0))[0]
    for now_ms in (1.0, 1.0 + TELL_AGAIN_MS):
        core.handle(AgentUntold(), now_ms)
        again = core.handle(Tick(), now_ms + TELL_AGAIN_MS)
        assert [one for one in again if one == Send(AGENT, first)], "as it was"
    assert sent(word, core.handle(Tick(), 5 * TELL_AGAIN_MS)) == [], "and no more"
