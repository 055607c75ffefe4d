"""The devices of a worker with a pipeline, on virtual time: a first stage and others that do as the test says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from msgspec.structs import replace

from fabric.errors import PayloadTooLarge
from fabric.ids import BatchId, ModelId, SliceId
from fabric.link import NamedTensor
from fabric.messages import (
    Activations,
    AnyMessage,
    LeftOut,
    LoadStage,
    ReplicaInfo,
    SliceSpec,
    StageFailed,
    StageLoaded,
    TensorInfo,
    UnloadStage,
)
from roles.gpu_worker.executors.base import (
    DeviceBroken,
    ExecutorEvent,
    Job,
    JobPart,
    JobRan,
    LeftFirstStage,
    LoadBegins,
    Loaded,
    LoadFailed,
    ModelLoaded,
    Part,
    RejectedRow,
    RunExpired,
    RunFailed,
    Shrunk,
)
from roles.gpu_worker.stages.executor import PipelineExecutor
from roles.gpu_worker.stages.later_stages import StageGone, StageSaid
from tests.worker_builders import MODEL, SLICE, model_spec, slice_spec

OTHER = ModelId("other")
OUT = (NamedTensor("logits", np.zeros((1, 2), np.float32)),)
BETWEEN = (NamedTensor("add_7", np.zeros((1, 4), np.float32)),)


@dataclass
class First:
    """The first stage: it does nothing, and says what the test wants."""

    events: list[ExecutorEvent] = field(default_factory=list)
    asked: list[tuple[str, object]] = field(default_factory=list)

    def load(self, spec: SliceSpec) -> None:
        self.asked.append(("load", spec.slice_id))

    def unload(self, slice_id: SliceId) -> None:
        self.asked.append(("unload", slice_id))

    def load_model(self, spec: SliceSpec, number: int) -> None:
        self.asked.append(("load_model", number))

    def unload_model(self, slice_id: SliceId, model_id: ModelId) -> None:
        self.asked.append(("unload_model", model_id))

    def run(self, job: Job, now_ms: float) -> None:
        self.asked.append(("run", job.batch_id))

    def recall(self, slice_id: SliceId, batch_id: BatchId, now_ms: float) -> None:
        self.asked.append(("recall", batch_id))

    def abort(self, slice_id: SliceId, batch_id: BatchId, now_ms: float) -> None:
        self.asked.append(("abort", batch_id))

    def close(self) -> None:
        self.asked.append(("close", None))

    def fileno(self) -> int:
        return -1

    @property
    def has_more(self) -> bool:
        return bool(self.events)

    @property
    def wake_at_ms(self) -> float | None:
        return None

    def take(self, limit: int, now_ms: float) -> Sequence[ExecutorEvent]:
        taken, self.events = self.events, []
        return taken


@dataclass
class Later:
    """The later stages' processes: none."""

    started: int = 0
    said: list[StageSaid | StageGone] = field(default_factory=list)
    sent: list[tuple[int, AnyMessage]] = field(default_factory=list)
    is_full: bool = False
    error: Exception | None = None

    def start(self, stages: int, *, is_gang: bool = False) -> None:
        self.started = stages

    def send(self, stage: int, message: AnyMessage, tensors: Sequence[NamedTensor] = ()) -> bool:
        if self.error is not None:
            raise self.error
        self.sent.append((stage, message))
        return not self.is_full

    def stop(self) -> None:
        self.started = 0

    def filenos(self) -> Sequence[int]:
        return ()

    @property
    def has_more(self) -> bool:
        return bool(self.said)

    def take(self, limit: int, now_ms: float) -> Sequence[StageSaid | StageGone]:
        taken, self.said = self.said, []
        return taken


@dataclass
class Stage:
    first: First = field(default_factory=First)
    later: Later = field(default_factory=Later)
    parts: dict[tuple[SliceId, ModelId], Part] = field(default_factory=dict)
    now_ms: float = 0.0

    def __post_init__(self) -> None:
        self.executor = PipelineExecutor(self.first, self.later, self.parts, lambda: self.now_ms)

    def hear(self, *events: ExecutorEvent) -> list[ExecutorEvent]:
        """From the first stage."""
        for event in events:
            loaded = [event.replica] if isinstance(event, ModelLoaded) else getattr(event, "replicas", ())
            for one in loaded:
                if one is not None:
                    self.parts[SLICE, one.model_id] = Part(0, (3, 5), "digest")
        self.first.events += events
        return [*self.executor.take(9, self.now_ms)]

    def say(self, *messages: AnyMessage, tensors: Sequence[NamedTensor] = ()) -> list[ExecutorEvent]:
        """From the later stages."""
        self.later.said += [StageSaid(message, tensors) for message in messages]
        return [*self.executor.take(9, self.now_ms)]


def pipeline(*models: ModelId) -> SliceSpec:
    specs = [model_spec(model, slo_ms=30.0) for model in models or (MODEL,)]
    return replace(slice_spec(models=specs, device="cpu"), following=(1, 2))


def replica(model_id: ModelId = MODEL, exec_ms: tuple[float, ...] = (4.0, 5.0, 6.0, 7.0)) -> ReplicaInfo:
    return ReplicaInfo(model_id, len(exec_ms), exec_ms, (TensorInfo("x", "float32", (4,)),), memory_bytes=10)


def stage_loaded(number: int, stage: int, exec_ms: tuple[float, ...] = (6.0, 8.0, 9.0)) -> StageLoaded:
    return StageLoaded(number, stage, exec_ms, (TensorInfo(f"out{stage}", "float32", (2,)),), 20 * stage)


def serving() -> Stage:
    stage = Stage()
    stage.executor.load(pipeline())
    stage.hear(Loaded(SLICE, (replica(),)))
    stage.say(stage_loaded(1, 1), stage_loaded(1, 2))
    stage.later.sent.clear()
    return stage


def job(batch_id: int = 1, expires_at_ms: float = 50.0) -> Job:
    return Job(SLICE, BatchId(batch_id), MODEL, [JobPart(1, ())], expires_at_ms)


def test_a_slice_of_one_gpu_passes_through() -> None:
    stage = Stage()
    stage.executor.load(slice_spec(device="cpu"))
    events: list[ExecutorEvent] = [
        Loaded(SLICE, (replica(),)),
        JobRan(SLICE, BatchId(1), OUT, (), 3.0, 42.0),
    ]
    assert stage.hear(*events) == events
    stage.executor.abort(SLICE, BatchId(1), 0.0)
    assert ("abort", 1) in stage.first.asked
    assert stage.later.started == 0


def test_a_model_is_loaded_when_every_stage_has_it_and_runs_as_long_as_all_of_them() -> None:
    stage = Stage()
    stage.executor.load(pipeline())
    assert stage.later.started == 3
    assert stage.hear(Loaded(SLICE, (replica(),))) == [LoadBegins(SLICE, MODEL)]
    (one, first), (two, second) = stage.later.sent
    assert isinstance(first, LoadStage)
    assert isinstance(second, LoadStage)
    assert (one, two, first.stage, second.stage) == (1, 2, 1, 2)
    assert (first.first_layers, first.digest) == ((3, 5), "digest")
    assert stage.say(stage_loaded(1, 2)) == []
    (loaded,) = stage.say(stage_loaded(1, 1, (10.0, 18.0, 20.0)))
    assert isinstance(loaded, Loaded)
    (found,) = loaded.replicas
    # Of three, the sizes that all stages have, the third is over the SLO of 30 ms.
    assert (found.exec_ms, found.interval_ms, found.batch_size_max) == ((20.0,), (10.0,), 1)
    assert [one.name for one in found.inputs] == ["x"]
    assert [one.name for one in found.outputs] == ["out2"]
    assert found.memory_bytes == 40


def test_the_others_load_one_model_after_the_other_and_say_which() -> None:
    """A stage that is lost meanwhile is the doing of that one."""
    stage = Stage()
    stage.executor.load(pipeline(MODEL, OTHER))
    assert stage.hear(Loaded(SLICE, (replica(), replica(OTHER)))) == [LoadBegins(SLICE, MODEL)]
    assert [message.number for _, message in stage.later.sent if isinstance(message, LoadStage)] == [1, 1]
    assert stage.say(stage_loaded(1, 1)) == []
    assert stage.say(stage_loaded(1, 2)) == [LoadBegins(SLICE, OTHER)]
    assert [message.number for _, message in stage.later.sent if isinstance(message, LoadStage)] == [
        1,
        1,
        2,
        2,
    ]
    (loaded,) = stage.say(stage_loaded(2, 1), stage_loaded(2, 2))
    assert isinstance(loaded, Loaded)
    assert [one.model_id for one in loaded.replicas] == [MODEL, OTHER]


def test_a_stage_that_cannot_load_a_model_leaves_that_out_everywhere_and_the_others_serve() -> None:
    stage = Stage()
    stage.executor.load(pipeline(MODEL, OTHER))
    stage.hear(Loaded(SLICE, (replica(), replica(OTHER))))
    failed = replace(stage_loaded(1, 1), reason="no file")
    assert stage.say(failed, stage_loaded(1, 2)) == [LoadBegins(SLICE, OTHER)]
    (loaded,) = stage.say(stage_loaded(2, 1), stage_loaded(2, 2))
    assert isinstance(loaded, Loaded)
    assert [one.model_id for one in loaded.replicas] == [OTHER]
    assert loaded.left_out == (LeftOut(SLICE, MODEL, "stage 1: no file"),)
    assert ("unload_model", MODEL) in stage.first.asked
    assert [one for one in stage.later.sent if isinstance(one[1], UnloadStage)] == [
        (1, UnloadStage(SLICE, MODEL)),
        (2, UnloadStage(SLICE, MODEL)),
    ]


def test_a_stage_that_takes_no_more_loads_leaves_those_models_out() -> None:
    """Else the slice would load for ever."""
    stage = Stage()
    stage.executor.load(pipeline(MODEL, OTHER))
    stage.later.is_full = True
    *_, event = stage.hear(Loaded(SLICE, (replica(), replica(OTHER))))
    assert isinstance(event, LoadFailed)
    assert "stage 1 takes no more" in event.reason
    stage = serving()
    stage.executor.load_model(pipeline(OTHER), 7)
    stage.later.is_full = True
    reason = "stage 1 takes no more"
    assert stage.hear(ModelLoaded(SLICE, 7, replica(OTHER))) == [ModelLoaded(SLICE, 7, None, reason)]
    assert ("unload_model", OTHER) in stage.first.asked


def test_a_slice_none_of_whose_models_loads_fails() -> None:
    stage = Stage()
    stage.executor.load(pipeline())
    stage.hear(Loaded(SLICE, (replica(),)))
    (event,) = stage.say(stage_loaded(1, 1), replace(stage_loaded(1, 2), reason="no file"))
    assert event == LoadFailed(SLICE, "stage 2: no file")


def test_a_model_that_comes_later_is_loaded_beside_and_one_that_was_given_up_is_heard_of_no_more() -> None:
    stage = serving()
    stage.executor.load_model(pipeline(OTHER), 7)
    assert stage.hear(ModelLoaded(SLICE, 7, replica(OTHER))) == []
    (event,) = stage.say(stage_loaded(2, 1), stage_loaded(2, 2))
    assert isinstance(event, ModelLoaded)
    assert (event.number, event.replica is not None) == (7, True)
    stage.executor.load_model(pipeline(OTHER), 8)
    stage.hear(ModelLoaded(SLICE, 8, replica(OTHER)))
    stage.executor.unload_model(SLICE, OTHER)
    assert stage.say(stage_loaded(3, 1), stage_loaded(3, 2)) == []


def test_a_model_that_gets_another_bound_is_loaded_anew_in_all_stages() -> None:
    stage = serving()
    (model,) = pipeline().models
    changed = replace(pipeline(), models=(replace(model, run_limit_ms=9_000.0),))
    stage.later.sent.clear()
    stage.executor.unload_model(SLICE, MODEL)
    stage.executor.load_model(changed, 7)
    assert stage.hear(ModelLoaded(SLICE, 7, replica())) == []
    messages = [message for _, message in stage.later.sent]
    assert messages[:2] == [UnloadStage(SLICE, MODEL)] * 2
    assert [one.spec.models[0].run_limit_ms for one in messages if isinstance(one, LoadStage)] == [
        9_000.0
    ] * 2
    (event,) = stage.say(stage_loaded(2, 1), stage_loaded(2, 2))
    assert isinstance(event, ModelLoaded)
    assert event.replica is not None


@pytest.mark.parametrize("is_asked_again", [False, True])
def test_a_model_that_the_first_stage_had_loaded_when_it_was_given_up_is_loaded_nowhere(
    *, is_asked_again: bool
) -> None:
    """The last step of a load may have been done when nobody wanted it any more."""
    stage = serving()
    stage.executor.load_model(pipeline(OTHER), 7)
    stage.executor.unload_model(SLICE, OTHER)
    if is_asked_again:
        stage.executor.load_model(pipeline(OTHER), 8)
    stage.later.sent.clear()
    assert stage.hear(ModelLoaded(SLICE, 7, replica(OTHER))) == []
    assert stage.later.sent == []
    if is_asked_again:
        stage.hear(ModelLoaded(SLICE, 8, replica(OTHER)))
        assert len(stage.later.sent) == 2


def test_the_first_stage_is_free_when_it_has_run_and_the_batch_ends_with_the_last() -> None:
    stage = serving()
    stage.executor.run(job(), 0.0)
    stage.now_ms = 46.0
    assert stage.hear(JobRan(SLICE, BatchId(1), BETWEEN, (), 4.0, 42.0)) == [
        LeftFirstStage(SLICE, BatchId(1))
    ]
    # The first stage could have begun until 50, so the second can until 54.
    assert stage.later.sent == [(1, Activations(BatchId(1), SLICE, MODEL, 0, 4.0, 8.0))]
    (ran,) = stage.say(Activations(BatchId(1), SLICE, MODEL, 2, 21.0, 0.0), tensors=OUT)
    assert ran == JobRan(SLICE, BatchId(1), OUT, (), 21.0, 42.0)
    assert stage.say(Activations(BatchId(1), SLICE, MODEL, 2, 21.0, 0.0), tensors=OUT) == [], "once only"


def test_rows_that_the_first_stage_rejects_are_told_with_the_outputs_and_at_once_where_nothing_is_left() -> (
    None
):
    stage = serving()
    rejected = (RejectedRow(0, "bad"),)
    stage.executor.run(job(), 0.0)
    stage.hear(JobRan(SLICE, BatchId(1), BETWEEN, rejected, 4.0, 42.0))
    (ran,) = stage.say(Activations(BatchId(1), SLICE, MODEL, 2, 21.0, 0.0), tensors=OUT)
    assert isinstance(ran, JobRan)
    assert ran.rejected == rejected
    stage.executor.run(job(2), 0.0)
    none_left = JobRan(SLICE, BatchId(2), (), rejected, 1.0, 42.0)
    assert stage.hear(none_left) == [none_left]


@pytest.mark.parametrize("error", [None, PayloadTooLarge("300 MB")])
def test_what_cannot_go_on_fails_and_the_first_stage_is_free(error: Exception | None) -> None:
    stage = serving()
    stage.later.is_full, stage.later.error = True, error
    stage.executor.run(job(), 0.0)
    left, failed = stage.hear(JobRan(SLICE, BatchId(1), BETWEEN, (), 4.0, 42.0))
    assert left == LeftFirstStage(SLICE, BatchId(1))
    assert isinstance(failed, RunFailed)
    assert ("300 MB" if error else "takes no more") in failed.reason


def test_a_batch_ends_in_the_stage_that_fails_it_or_gets_it_too_late() -> None:
    stage = serving()
    for number in (1, 2):
        stage.executor.run(job(number), 0.0)
        stage.hear(JobRan(SLICE, BatchId(number), BETWEEN, (), 4.0, 42.0))
    failed = StageFailed(BatchId(1), SLICE, MODEL, 2, "it raised", shrunk_to=3)
    assert stage.say(failed) == [Shrunk(SLICE, MODEL, 3), RunFailed(SLICE, BatchId(1), "stage 2: it raised")]
    late = StageFailed(BatchId(2), SLICE, MODEL, 1, "too late", is_expired=True)
    assert stage.say(late) == [RunExpired(SLICE, BatchId(2), "too late")]
    assert stage.say(failed, late) == [], "once only"


def test_a_lost_stage_takes_the_slice_along() -> None:
    stage = serving()
    stage.later.said.append(StageGone(2, "killed by signal 9"))
    assert stage.hear() == [DeviceBroken("stage 2 of its pipeline is gone: killed by signal 9")]


def test_what_has_begun_is_not_stopped_and_an_unloaded_slice_ends_its_processes() -> None:
    stage = serving()
    stage.executor.abort(SLICE, BatchId(1), 0.0)
    assert not [one for one in stage.first.asked if one[0] == "abort"]
    stage.executor.unload(SLICE)
    assert stage.later.started == 0
    assert stage.first.asked[-1] == ("unload", SLICE)
