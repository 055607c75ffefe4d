"""The worker hands its device what comes next, and tells the scheduler what it can no longer do."""

from __future__ import annotations

from collections.abc import Sequence

from fabric.ids import BatchId, ModelId
from fabric.messages import BatchFailed, Done, PreemptBatch, SliceFailed, SliceReady, Stop
from roles.gpu_worker.batch_start_rules import LATE_TOLERANCE_MS
from roles.gpu_worker.core import WorkerCore
from roles.gpu_worker.events import Abort, BatchRan, End, Execute, PushOutputs, Recall, WorkerAction
from roles.gpu_worker.executors.base import DeviceBroken, RunAborted, RunFailed, Shrunk
from roles.gpu_worker.peer_checks import AGENT
from roles.runtime.core import SCHEDULER, Handle, Heard, Send, Tick
from tests.worker_builders import (
    MODEL,
    SLICE,
    actions_of,
    inputs,
    model_spec,
    part,
    run_batch,
    sent,
    serving_core,
    slice_spec,
)


def cpu_core() -> WorkerCore:
    return serving_core(slice_spec(models=[model_spec()], device="cpu"))


def grant(
    core: WorkerCore,
    batch_id: int,
    at_ms: float,
    start_in_ms: float = 0.0,
    expires_in_ms: float = 50.0,
) -> list[Execute | Recall]:
    """A batch with its inputs."""
    run = run_batch(
        batch_id=batch_id, start_in_ms=start_in_ms, latest_in_ms=expires_in_ms, expires_in_ms=expires_in_ms
    )
    actions = [*core.handle(run, at_ms), *core.handle(inputs(0, 1, batch_id=batch_id), at_ms)]
    return of_device(actions)


def of_device(actions: Sequence[WorkerAction]) -> list[Execute | Recall]:
    return [action for action in actions if isinstance(action, Execute | Recall)]


def numbers(actions: Sequence[WorkerAction]) -> list[int]:
    """The batches that go to the device."""
    return [int(action.run.batch_id) for action in actions_of(Execute, actions)]


def ran(batch_id: int, began_at_ms: float) -> BatchRan:
    return BatchRan(SLICE, BatchId(batch_id), Handle(77), (), 7.0, began_at_ms)


def test_the_next_batch_is_handed_over_while_another_one_runs_and_begins_unheard() -> None:
    core = serving_core()
    assert numbers(grant(core, 1, 0.0)) == [1]
    (ahead,) = grant(core, 2, 1.0)
    assert isinstance(ahead, Execute)
    assert (ahead.run.batch_id, ahead.expires_at_ms) == (2, 51.0 + LATE_TOLERANCE_MS)
    assert grant(core, 3, 2.0) == []  # one is enough
    actions = core.handle(ran(1, 0.0), 7.5)
    assert numbers(actions) == [3]
    actions = core.handle(ran(2, 7.0), 14.4)
    (done,) = sent(Done, actions)
    assert (done.batch_id, done.queue_ms, done.exec_ms) == (2, 6.0, 7.0)  # complete at 1, begun at 7


def test_a_batch_that_lacks_inputs_is_not_handed_over() -> None:
    core = serving_core()
    grant(core, 1, 0.0)
    two = run_batch(part((0, 1)), part((0, 1), frontend_id="frontend-1"), batch_id=2, latest_in_ms=1.0)
    core.handle(two, 1.0)
    assert of_device(core.handle(inputs(0, batch_id=2), 1.0)) == []
    assert of_device(core.handle(Tick(), 2.0)) == []  # its latest start has come, but the device is busy
    assert core.wake_at_ms == 2.0 + LATE_TOLERANCE_MS
    (execute,) = of_device(core.handle(inputs(0, batch_id=2, number=1, frontend_id="frontend-1"), 2.5))
    assert isinstance(execute, Execute)
    assert len(execute.parts) == 2


def test_one_that_comes_before_it_takes_its_place() -> None:
    core = serving_core()
    grant(core, 1, 0.0)
    assert numbers(grant(core, 2, 1.0, start_in_ms=20.0)) == [2]
    assert grant(core, 3, 2.0, start_in_ms=10.0) == [Recall(SLICE, BatchId(2))]
    assert of_device(core.handle(Tick(), 2.5)) == [], "it was asked once"
    actions = core.handle(RunAborted(SLICE, BatchId(2)), 3.0)
    assert numbers(actions) == [3]
    assert numbers(core.handle(ran(1, 0.0), 7.0)) == [2], "it is the first in line again"


def test_a_recall_that_comes_too_late_changes_nothing() -> None:
    core = serving_core()
    grant(core, 1, 0.0)
    grant(core, 2, 1.0, start_in_ms=20.0)
    assert grant(core, 3, 6.99, start_in_ms=10.0) == [Recall(SLICE, BatchId(2))]
    actions = core.handle(ran(1, 0.0), 7.1)
    assert numbers(actions) == [3]
    (done,) = sent(Done, core.handle(ran(2, 7.0), 14.0))
    assert (done.batch_id, done.status) == (2, "ok")
    (done,) = sent(Done, core.handle(ran(3, 14.0), 21.0))
    assert (done.batch_id, done.status) == (3, "ok")


def test_what_expires_before_it_begins_goes_back_whole() -> None:
    core = serving_core()
    grant(core, 1, 0.0)
    grant(core, 2, 0.0, expires_in_ms=4.0)
    expires_at_ms = 4.0 + LATE_TOLERANCE_MS
    assert core.wake_at_ms == expires_at_ms
    assert of_device(core.handle(Tick(), expires_at_ms)) == [Recall(SLICE, BatchId(2))]
    assert core.wake_at_ms is not None
    assert core.wake_at_ms > expires_at_ms
    (done,) = sent(Done, core.handle(RunAborted(SLICE, BatchId(2)), expires_at_ms))
    assert (done.status, done.ran, done.missing) == ("expired", 0, (part((0, 2)),))


def test_what_the_device_found_too_late_goes_back_whole() -> None:
    core = serving_core()
    grant(core, 1, 0.0)
    grant(core, 2, 0.0, expires_in_ms=4.0)
    core.handle(ran(1, 0.0), 7.0)  # the loop has slept
    (done,) = sent(Done, core.handle(RunAborted(SLICE, BatchId(2)), 7.0))
    assert (done.batch_id, done.status, done.missing) == (2, "expired", (part((0, 2)),))
    assert numbers(grant(core, 3, 8.0)) == [3]


def test_the_scheduler_stops_what_was_handed_over_whether_it_has_begun_or_not() -> None:
    for heard_first in ([], [ran(1, 0.0)]):
        core = serving_core()
        grant(core, 1, 0.0)
        grant(core, 2, 1.0)
        for event in heard_first:
            core.handle(event, 7.0)
        assert core.handle(Heard(SCHEDULER, PreemptBatch(BatchId(2), SLICE)), 7.5) == [
            Abort(SLICE, BatchId(2))
        ]
        (done,) = sent(Done, core.handle(RunAborted(SLICE, BatchId(2)), 7.5))
        assert (done.batch_id, done.status, done.missing) == (2, "preempted", ())


def test_one_that_is_called_back_and_then_stopped_is_not_run_again() -> None:
    core = serving_core()
    grant(core, 1, 0.0)
    grant(core, 2, 1.0, start_in_ms=20.0)
    grant(core, 3, 2.0, start_in_ms=10.0)
    core.handle(Heard(SCHEDULER, PreemptBatch(BatchId(2), SLICE)), 2.0)
    actions = core.handle(RunAborted(SLICE, BatchId(2)), 2.0)
    assert [done.status for done in sent(Done, actions)] == ["preempted"]
    assert numbers(actions) == [3]


def test_a_worker_that_stops_takes_back_what_has_not_begun() -> None:
    core = serving_core()
    grant(core, 1, 0.0)
    grant(core, 2, 1.0)
    actions = core.handle(Heard(AGENT, Stop(100.0)), 2.0)
    assert of_device(actions) == [Recall(SLICE, BatchId(2))]
    (done,) = sent(Done, core.handle(RunAborted(SLICE, BatchId(2)), 2.0))
    assert (done.batch_id, done.status) == (2, "expired")
    assert actions_of(End, core.handle(ran(1, 0.0), 7.0)) == [End(0, "stopped")]


def test_what_the_device_does_not_give_back_before_a_stop_is_over_may_have_run() -> None:
    core = serving_core()
    grant(core, 1, 0.0)
    grant(core, 2, 1.0)
    core.handle(Heard(AGENT, Stop(5.0)), 2.0)
    actions = core.handle(Tick(), 7.0)
    assert [(done.batch_id, done.status, done.missing) for done in sent(Done, actions)] == [
        (1, "failed", ()),
        (2, "failed", ()),
    ]
    assert actions_of(End, actions)


def test_a_device_that_breaks_has_failed_what_ran_and_what_it_had_may_have_begun() -> None:
    core = serving_core()
    grant(core, 1, 0.0)
    grant(core, 2, 1.0)
    grant(core, 3, 1.0)
    actions = core.handle(DeviceBroken("poisoned"), 2.0)
    assert [(done.batch_id, done.status, len(done.missing)) for done in sent(Done, actions)] == [
        (1, "failed", 0),
        (3, "expired", 1),
        (2, "failed", 0),
    ]
    failed = [push.message for push in actions_of(PushOutputs, actions)]
    assert [one.batch_id for one in failed if isinstance(one, BatchFailed)] == [1], (
        "of the other one its frontends see the slice go"
    )


def test_a_batch_that_failed_is_run_apart_behind_the_one_that_has_begun() -> None:
    core = serving_core()
    grant(core, 1, 0.0)
    grant(core, 2, 1.0)
    (apart,) = actions_of(Execute, core.handle(RunFailed(SLICE, BatchId(1), "it raised"), 7.0))
    assert (apart.run.batch_id, [one.live_seqs for one in apart.parts]) == (1, [(0,)])
    (done,) = sent(Done, core.handle(ran(2, 7.0), 14.0))
    assert (done.batch_id, done.status, done.queue_ms) == (2, "ok", 6.0)
    (apart,) = actions_of(Execute, core.handle(ran(1, 14.0), 21.0))
    assert [one.live_seqs for one in apart.parts] == [(1,)]
    (done,) = sent(Done, core.handle(ran(1, 21.0), 28.0))
    assert (done.batch_id, done.status, done.ran) == (1, "failed", 2)


def test_a_part_of_a_failed_batch_that_the_device_found_too_late_is_answered_so() -> None:
    core = serving_core()
    grant(core, 1, 0.0, expires_in_ms=20.0)
    core.handle(RunFailed(SLICE, BatchId(1), "it raised"), 7.0)
    actions = core.handle(RunAborted(SLICE, BatchId(1)), 40.0)
    failures = [push.message for push in actions_of(PushOutputs, actions)]
    assert [(one.seqs, one.code) for one in failures if isinstance(one, BatchFailed)] == [
        ((0,), "DeadlineExceeded"),
        ((1,), "DeadlineExceeded"),
    ]
    assert [done.status for done in sent(Done, actions)] == ["failed"]


def test_the_scheduler_hears_of_a_smaller_largest_batch_at_once() -> None:
    core = cpu_core()
    actions = core.handle(Shrunk(SLICE, MODEL, 2), 1.0)
    assert [action.peer for action in actions if isinstance(action, Send)] == [SCHEDULER]
    (ready,) = sent(SliceReady, actions)
    (replica,) = ready.replicas
    assert (replica.batch_size_max, replica.exec_ms) == (2, (6.0, 7.0))
    assert replica.reason == "the device had no memory for a larger one"
    assert core.counters["batch_sizes_shrunk"] == 1


def test_only_the_model_that_had_no_memory_shrinks() -> None:
    other = model_spec("other")
    core = serving_core(slice_spec(models=[model_spec(), other], device="cpu"))
    (ready,) = sent(SliceReady, core.handle(Shrunk(SLICE, ModelId("other"), 1), 1.0))
    assert [replica.batch_size_max for replica in ready.replicas] == [4, 1]


def test_one_whose_part_comes_after_its_latest_start_takes_the_place_of_what_was_handed_over() -> None:
    core = serving_core()
    grant(core, 1, 0.0)
    two = run_batch(
        part((0, 1)),
        part((0, 1), frontend_id="frontend-1"),
        batch_id=2,
        start_in_ms=1.0,
        latest_in_ms=2.0,
        expires_in_ms=40.0,
    )
    core.handle(two, 1.0)
    assert numbers(grant(core, 3, 1.0, start_in_ms=3.0)) == []
    assert numbers(core.handle(Tick(), 4.0)) == [3]
    # Past its latest start the first in line may go with the parts that came, once one has (ADR 0020).
    (recall,) = of_device(core.handle(inputs(0, batch_id=2), 6.0))
    assert recall == Recall(SLICE, BatchId(3))


def test_a_hang_is_blamed_on_what_the_device_has_begun_behind_a_batch_that_failed() -> None:
    core = serving_core(slice_spec(models=[model_spec("raises"), model_spec("hangs")]))
    for batch_id, model_id in ((1, "raises"), (2, "hangs")):
        run = run_batch(
            part((0, 2)), batch_id=batch_id, model_id=model_id, latest_in_ms=60_000.0, expires_in_ms=60_000.0
        )
        core.handle(run, 0.0)
        core.handle(inputs(0, 1, batch_id=batch_id, model_id=model_id), 0.0)
    assert numbers(core.handle(RunFailed(SLICE, BatchId(1), "boom"), 5.0)) == [1]
    failed: list[SliceFailed] = []
    while not failed:
        assert core.wake_at_ms is not None
        failed = sent(SliceFailed, core.handle(Tick(), core.wake_at_ms))
    assert failed[0].model_id == "hangs"


def test_what_is_run_apart_has_its_own_limit_once_the_device_is_at_it() -> None:
    core = serving_core(slice_spec(models=[model_spec("raises"), model_spec("other")]))
    for batch_id, model_id in ((1, "raises"), (2, "other")):
        run = run_batch(
            part((0, 2)), batch_id=batch_id, model_id=model_id, latest_in_ms=60_000.0, expires_in_ms=60_000.0
        )
        core.handle(run, 0.0)
        core.handle(inputs(0, 1, batch_id=batch_id, model_id=model_id), 0.0)
    core.handle(RunFailed(SLICE, BatchId(1), "boom"), 5.0)
    assert core.wake_at_ms is not None
    core.handle(ran(2, 5.0), core.wake_at_ms - 1.0)
    failed: list[SliceFailed] = []
    while not failed:
        failed = sent(SliceFailed, core.handle(Tick(), core.wake_at_ms))
    assert failed[0].model_id == "raises"


def two_models(*names: str) -> WorkerCore:
    """Each of them has a batch of two with long deadlines on the device, in this order."""
    core = serving_core(slice_spec(models=[model_spec(name) for name in names]))
    for batch_id, model_id in enumerate(names, 1):
        run = run_batch(
            part((0, 2)), batch_id=batch_id, model_id=model_id, latest_in_ms=60_000.0, expires_in_ms=60_000.0
        )
        core.handle(run, 0.0)
        core.handle(inputs(0, 1, batch_id=batch_id, model_id=model_id), 0.0)
    return core


def hung(core: WorkerCore) -> tuple[ModelId, float]:
    """Which model the worker says has hung, and when, if nothing ends any more."""
    while True:
        at_ms = core.wake_at_ms
        assert at_ms is not None
        failed = sent(SliceFailed, core.handle(Tick(), at_ms))
        if failed:
            return failed[0].model_id, at_ms


def test_of_two_batches_that_fail_in_a_row_the_part_that_the_device_is_at_is_watched() -> None:
    core = two_models("first", "second")
    assert numbers(core.handle(RunFailed(SLICE, BatchId(1), "boom"), 5.0)) == [1]
    assert numbers(core.handle(RunFailed(SLICE, BatchId(2), "boom"), 10.0)) == [2]
    assert hung(core) == ("first", 10.0 + 2_000.0)
    core = two_models("first", "second")
    core.handle(RunFailed(SLICE, BatchId(1), "boom"), 5.0)
    core.handle(RunFailed(SLICE, BatchId(2), "boom"), 10.0)
    assert numbers(core.handle(ran(1, 10.0), 20.0)) == [1]
    assert hung(core) == ("second", 20.0 + 2_000.0)


def test_a_part_that_the_device_found_too_late_leaves_it_to_the_next_batch() -> None:
    core = two_models("first", "second")
    core.handle(RunFailed(SLICE, BatchId(1), "boom"), 5.0)
    core.handle(RunFailed(SLICE, BatchId(2), "boom"), 10.0)
    core.handle(RunAborted(SLICE, BatchId(1)), 20.0)
    assert hung(core) == ("second", 20.0 + 2_000.0)


def test_a_batch_that_was_granted_before_its_model_shrank_has_the_time_of_all_its_pieces() -> None:
    core = serving_core(slice_spec(models=[model_spec(exec_ms=(400.0, 500.0, 600.0, 700.0))], device="cpu"))
    core.handle(Shrunk(SLICE, MODEL, 1), 0.0)
    run = run_batch(part((0, 4)), latest_in_ms=60_000.0)
    core.handle(run, 0.0)
    core.handle(inputs(0, 1, 2, 3), 0.0)
    assert hung(core) == (MODEL, 20 * 4 * 400.0)


def test_a_batch_that_is_stopped_and_then_fails_is_over_at_once() -> None:
    """Its requests are granted again: in parts of it they would run twice."""
    for seqs in ((0, 1), (0,)):
        core = serving_core()
        core.handle(run_batch(part((0, len(seqs))), latest_in_ms=60_000.0), 0.0)
        core.handle(inputs(*seqs), 0.0)
        core.handle(Heard(SCHEDULER, PreemptBatch(BatchId(1), SLICE)), 1.0)
        actions = core.handle(RunFailed(SLICE, BatchId(1), "boom"), 5.0)
        assert numbers(actions) == []
        assert [(done.status, done.missing) for done in sent(Done, actions)] == [("preempted", ())]
        assert not [
            push for push in actions_of(PushOutputs, actions) if isinstance(push.message, BatchFailed)
        ]


def test_a_batch_that_is_stopped_between_its_parts_runs_no_further() -> None:
    core = serving_core()
    core.handle(run_batch(part((0, 2)), latest_in_ms=60_000.0), 0.0)
    core.handle(inputs(0, 1), 0.0)
    core.handle(RunFailed(SLICE, BatchId(1), "boom"), 5.0)
    core.handle(Heard(SCHEDULER, PreemptBatch(BatchId(1), SLICE)), 6.0)
    actions = core.handle(ran(1, 5.0), 12.0)
    assert numbers(actions) == []
    assert [done.status for done in sent(Done, actions)] == ["preempted"]
