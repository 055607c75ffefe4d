"""A pipeline over several GPUs in the worker, on virtual time: its core and its emulated stages."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from fabric.ids import BatchId, ModelId, SliceId
from fabric.messages import (
    BatchFailed,
    Done,
    ModelSpec,
    Outputs,
    PreemptBatch,
    SliceReady,
    SliceSpec,
)
from roles.gpu_worker.batch_start_rules import LATE_TOLERANCE_MS
from roles.gpu_worker.core import WorkerCore
from roles.gpu_worker.events import (
    Abort,
    BatchRan,
    End,
    Execute,
    LoadSlice,
    PushOutputs,
    Recall,
    SchedulerAnswers,
    WorkerAction,
    WorkerEvent,
)
from roles.gpu_worker.executors.base import (
    DeviceBroken,
    Job,
    JobPart,
    JobRan,
    LeftFirstStage,
    LoadFailed,
    RunExpired,
    RunFailed,
    Shrunk,
    Warming,
)
from roles.gpu_worker.executors.emulated import EmulatedExecutor
from roles.runtime.core import SCHEDULER, Handle, Heard, Send, Tick
from roles.runtime.process_events import StopAsked
from tests.worker_builders import (
    MODEL,
    SLICE,
    actions_of,
    host,
    inputs,
    model_spec,
    part,
    run_batch,
    sent,
    serving_core,
    slice_spec,
    worker_core,
    worker_directory,
)

STAGES_MS = ((4.0, 5.0), (12.0, 20.0), (6.0, 6.0))


def cut(stages_ms: tuple[tuple[float, ...], ...] = STAGES_MS) -> ModelSpec:
    exec_ms = tuple(sum(times) for times in zip(*stages_ms, strict=True))
    return replace(model_spec(exec_ms=exec_ms, slo_ms=200.0), stages_ms=stages_ms)


def pipeline(model: ModelSpec | None = None) -> SliceSpec:
    return replace(slice_spec(models=(model or cut(),)), following=(1, 2))


@dataclass
class Stage:
    """A worker with emulated GPUs; what it says, with the moment."""

    core: WorkerCore = field(default_factory=worker_core)
    device: EmulatedExecutor = field(default_factory=EmulatedExecutor)
    said: list[tuple[float, WorkerAction]] = field(default_factory=list)
    now_ms: float = 0.0
    began: dict[int, float] = field(default_factory=dict)

    def hear(self, event: WorkerEvent) -> None:
        for action in self.core.handle(event, self.now_ms):
            self.said.append((self.now_ms, action))
            match action:
                case LoadSlice(spec):
                    self.device.load(spec)
                case Execute(run, parts, expires_at_ms):
                    job = [JobPart(len(one.live_seqs), ()) for one in parts]
                    self.device.run(
                        Job(run.slice_id, run.batch_id, run.model_id, job, expires_at_ms), self.now_ms
                    )
                case Recall(slice_id, batch_id):
                    self.device.recall(slice_id, batch_id, self.now_ms)
                case Abort(slice_id, batch_id):
                    self.device.abort(slice_id, batch_id, self.now_ms)
                case _:
                    pass

    def play(self, until_ms: float) -> None:
        while True:
            at_ms = self.now_ms if self.device.has_more else self.device.wake_at_ms
            moments = [one for one in (at_ms, self.core.wake_at_ms) if one is not None]
            if not moments or min(moments) > until_ms:
                self.now_ms = until_ms
                return
            self.now_ms = max(self.now_ms, min(moments))
            for event in self.device.take(1, self.now_ms):
                if isinstance(event, JobRan):
                    times_ms = event.exec_ms, event.began_at_ms
                    self.began[event.batch_id] = event.began_at_ms
                    self.hear(BatchRan(event.slice_id, event.batch_id, Handle(9), (), *times_ms))
                else:
                    self.hear(event)
            self.hear(Tick())

    def grant(self, batch_id: int, size: int = 1, latest_in_ms: float = 500.0) -> None:
        self.hear(run_batch(part((0, size)), batch_id=batch_id, latest_in_ms=latest_in_ms))
        self.hear(inputs(*range(size), batch_id=batch_id))

    def messages(self, kind: type[Done | SliceReady]) -> list[tuple[float, Done | SliceReady]]:
        return [
            (at_ms, action.message)
            for at_ms, action in self.said
            if isinstance(action, Send) and isinstance(action.message, kind)
        ]

    def ends(self) -> list[tuple[float, int, str]]:
        return [
            (at_ms, int(one.batch_id), one.status)
            for at_ms, one in self.messages(Done)
            if isinstance(one, Done)
        ]


def serving(spec: SliceSpec | None = None) -> Stage:
    stage = Stage()
    stage.hear(Tick())
    stage.hear(host(spec or pipeline()))
    stage.hear(SchedulerAnswers())
    stage.play(0.0)
    stage.hear(worker_directory(SLICE))
    return stage


def test_a_pipeline_says_how_long_a_batch_takes_and_when_the_next_can_start() -> None:
    (_, ready), *_ = serving().messages(SliceReady)
    assert isinstance(ready, SliceReady)
    (replica,) = ready.replicas
    assert (replica.exec_ms, replica.interval_ms) == ((22.0, 31.0), (12.0, 20.0))


def test_the_next_batch_starts_when_the_first_stage_is_free_and_ends_behind_the_one_before() -> None:
    stage = serving()
    for number in (1, 2, 3):
        stage.grant(number)
    stage.play(100.0)
    handed_over = [at_ms for at_ms, action in stage.said if isinstance(action, Execute)]
    assert handed_over == [0.0, 0.0, 4.0]
    assert stage.began == {1: 0.0, 2: 4.0, 3: 8.0}
    assert stage.ends() == [(22.0, 1, "ok"), (34.0, 2, "ok"), (46.0, 3, "ok")]


def test_what_a_batch_waits_between_stages_is_its_queue_and_not_the_models_time() -> None:
    stage = serving()
    stage.grant(1)
    stage.grant(2)
    stage.play(100.0)
    (_, first), (_, second) = stage.messages(Done)
    assert isinstance(first, Done)
    assert isinstance(second, Done)
    assert (first.queue_ms, first.exec_ms) == (0.0, 22.0)
    assert (second.queue_ms, second.exec_ms) == (4.0 + 8.0, 22.0)  # for the first stage, then for the second
    answers = [action.message for _, action in stage.said if isinstance(action, PushOutputs)]
    assert [(one.queue_ms, one.gpu_ms) for one in answers if isinstance(one, Outputs)] == [
        (0.0, 22.0),
        (12.0, 22.0),
    ]


def test_batches_do_not_overtake_each_other() -> None:
    stage = serving()
    stage.grant(1, size=2)  # 5 + 20 + 6
    stage.grant(2)  # 4 + 12 + 6, behind it in the second stage
    stage.play(100.0)
    assert stage.ends() == [(31.0, 1, "ok"), (43.0, 2, "ok")]


def test_a_batch_that_has_begun_goes_through_and_one_that_waits_is_preempted() -> None:
    stage = serving()
    for number in (1, 2, 3):
        stage.grant(number)
    stage.play(5.0)  # 1 is in the second stage, 2 in the first
    for number in (1, 2, 3):
        stage.hear(Heard(SCHEDULER, PreemptBatch(BatchId(number), SLICE)))
    stage.play(100.0)
    assert stage.ends() == [(5.0, 3, "preempted"), (22.0, 1, "ok"), (34.0, 2, "ok")]


def test_cancelled_requests_take_no_stages_time() -> None:
    stage = serving()
    stage.grant(1)
    stage.hear(run_batch(part((0, 2)), batch_id=2, latest_in_ms=500.0))
    stage.hear(inputs(batch_id=2))  # none of them is live
    stage.grant(3)
    stage.play(100.0)
    assert stage.ends() == [(0.0, 2, "ok"), (22.0, 1, "ok"), (34.0, 3, "ok")]


def test_what_waits_for_the_first_stage_too_long_expires_and_those_behind_it_run() -> None:
    slow = cut(((30.0,), (1.0,), (1.0,)))
    stage = serving(pipeline(slow))
    stage.grant(1)
    stage.grant(2, latest_in_ms=10.0)
    stage.grant(3)
    stage.play(200.0)
    assert stage.ends() == [(11.0, 2, "expired"), (32.0, 1, "ok"), (62.0, 3, "ok")]


def test_a_stop_lets_all_stages_finish() -> None:
    stage = serving()
    for number in (1, 2, 3):
        stage.grant(number)
    stage.play(5.0)
    stage.hear(StopAsked())
    stage.play(1_000.0)
    assert stage.ends() == [(5.0, 3, "expired"), (22.0, 1, "ok"), (34.0, 2, "ok")]
    assert [at_ms for at_ms, action in stage.said if isinstance(action, End)] == [34.0]


def test_a_broken_gpu_answers_for_every_stage() -> None:
    stage = serving()
    for number in (1, 2, 3):
        stage.grant(number)
    stage.play(5.0)
    stage.hear(DeviceBroken("GPU 1 is gone"))
    failed = [action.message for _, action in stage.said if isinstance(action, PushOutputs)]
    assert [one.batch_id for one in failed if isinstance(one, BatchFailed)] == [1, 2]
    assert stage.ends() == [(5.0, 1, "failed"), (5.0, 2, "failed"), (5.0, 3, "failed")]


def test_a_stage_that_does_not_end_has_hung_though_the_first_one_goes_on() -> None:
    core = serving().core
    core.handle(inputs(0), 0.0)
    core.handle(run_batch(part((0, 1)), latest_in_ms=1e6), 0.0)
    core.handle(LeftFirstStage(SLICE, BatchId(1)), 4.0)
    assert core.wake_at_ms == 2_000.0
    (end,) = actions_of(End, core.handle(Tick(), 2_000.0))
    assert "hung" in end.reason


def test_a_hang_in_a_later_stage_is_not_of_the_model_that_the_first_one_warms_up() -> None:
    core = serving().core
    core.handle(inputs(0), 0.0)
    core.handle(run_batch(part((0, 1)), latest_in_ms=1e6), 0.0)
    core.handle(LeftFirstStage(SLICE, BatchId(1)), 4.0)
    core.handle(Warming(SLICE, ModelId("other"), is_over=False), 5.0)
    (end,) = actions_of(End, core.handle(Tick(), 2_000.0))
    assert end.reason.startswith(f"model {MODEL!r} hung")


def test_what_failed_in_a_later_stage_is_run_apart_while_the_first_has_another() -> None:
    core = serving().core
    core.handle(inputs(0, 1), 0.0)
    core.handle(run_batch(part((0, 2)), latest_in_ms=500.0), 0.0)
    core.handle(LeftFirstStage(SLICE, BatchId(1)), 5.0)
    core.handle(inputs(0, batch_id=2), 5.0)
    (second,) = actions_of(Execute, core.handle(run_batch(part((0, 1)), batch_id=2, latest_in_ms=500.0), 5.0))
    assert second.run.batch_id == 2
    actions = core.handle(RunFailed(SLICE, BatchId(1), "it raised"), 10.0)
    (apart,) = actions_of(Execute, actions)
    assert (apart.run.batch_id, [one.live_seqs for one in apart.parts]) == (1, [(0,)])
    core.handle(LeftFirstStage(SLICE, BatchId(2)), 11.0)
    core.handle(LeftFirstStage(SLICE, BatchId(1)), 15.0)  # again: nothing new can start for it
    actions = core.handle(BatchRan(SLICE, BatchId(1), Handle(5), (), 22.0, 15.0), 37.0)
    (apart,) = actions_of(Execute, actions)
    assert [one.live_seqs for one in apart.parts] == [(1,)]
    actions = core.handle(BatchRan(SLICE, BatchId(1), Handle(6), (), 22.0, 38.0), 60.0)
    assert [(one.status, one.ran) for one in sent(Done, actions)] == [("failed", 2)]


def test_the_stage_with_the_least_memory_says_how_large_batches_may_be() -> None:
    """Another one may say so at the same time, of a batch that was granted before."""
    core = serving_core(slice_spec(models=[model_spec(exec_ms=range(6, 14))]))
    told = []
    for size in (3, 5, 3, 2):
        told += sent(SliceReady, core.handle(Shrunk(SLICE, MODEL, size), 1.0))
    found = [ready.replicas[0] for ready in told]
    assert [one.batch_size_max for one in found] == [3, 2]
    assert all(len(one.exec_ms) == one.batch_size_max for one in found)


def test_what_comes_next_is_behind_what_is_run_apart_in_the_first_stage() -> None:
    core = serving().core
    core.handle(inputs(0, 1), 0.0)
    core.handle(run_batch(part((0, 2)), latest_in_ms=500.0), 0.0)
    core.handle(LeftFirstStage(SLICE, BatchId(1)), 5.0)
    (apart,) = actions_of(Execute, core.handle(RunFailed(SLICE, BatchId(1), "it raised"), 10.0))
    assert apart.run.batch_id == 1
    for number in (2, 3):
        core.handle(inputs(0, batch_id=number), 11.0)
    (second,) = actions_of(
        Execute, core.handle(run_batch(part((0, 1)), batch_id=2, latest_in_ms=500.0), 11.0)
    )
    assert second.run.batch_id == 2, "behind it"
    third = run_batch(part((0, 1)), batch_id=3, latest_in_ms=500.0)
    assert actions_of(Execute, core.handle(third, 11.0)) == []
    (execute,) = actions_of(Execute, core.handle(LeftFirstStage(SLICE, BatchId(1)), 14.0))
    assert execute.run.batch_id == 3


def test_stages_hear_until_when_a_batch_may_begin_and_what_came_too_late_is_answered_so() -> None:
    core = serving().core
    core.handle(inputs(0, 1), 0.0)
    run = run_batch(part((0, 2)), latest_in_ms=30.0, expires_in_ms=40.0)
    (execute,) = actions_of(Execute, core.handle(run, 0.0))
    assert execute.expires_at_ms == 40.0 + LATE_TOLERANCE_MS
    core.handle(LeftFirstStage(SLICE, BatchId(1)), 5.0)
    actions = core.handle(RunExpired(SLICE, BatchId(1), "stage 2 got it too late"), 60.0)
    (failed,) = actions_of(PushOutputs, actions)
    assert isinstance(failed.message, BatchFailed)
    assert (failed.message.code, failed.message.seqs) == ("DeadlineExceeded", (0, 1))
    (done,) = sent(Done, actions)
    assert (done.status, done.ran, done.missing) == ("expired", 0, ())
    assert core.wake_at_ms is None


@pytest.mark.parametrize("stages_ms", [(), ((1.0,), (1.0,))])
def test_a_cut_that_the_model_does_not_have_is_said(stages_ms: tuple[tuple[float, ...], ...]) -> None:
    device = EmulatedExecutor()
    device.load(pipeline(replace(model_spec(exec_ms=(2.0,)), stages_ms=stages_ms)))
    (event,) = device.take(9, 0.0)
    reason = f"model 'resnet50' gives the run times of {len(stages_ms)} stages, not of 3"
    assert event == LoadFailed(SliceId(SLICE), reason)
