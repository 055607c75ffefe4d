"""A later stage of a pipeline, on virtual time."""

from __future__ import annotations

from collections.abc import Sequence

from fabric.ids import BatchId, ModelId, SliceId
from fabric.messages import Activations, LoadStage, ReplicaInfo, StageFailed, StageLoaded, UnloadStage
from roles.gpu_worker.events import BatchRan, End
from roles.gpu_worker.executors.base import (
    DeviceBroken,
    Loaded,
    LoadFailed,
    ModelLoaded,
    RejectedRow,
    RunFailed,
    Shrunk,
)
from roles.gpu_worker.stages.core import (
    WAITING_MAX,
    ActivationsCame,
    ForgetModel,
    LoadPart,
    PassOn,
    ReleaseInputs,
    RunStage,
    StageAction,
    StageAsked,
    StageCore,
    TellWorker,
)
from roles.runtime.core import Handle
from tests.worker_builders import SLICE, model_spec, slice_spec

MODEL, OTHER = ModelId("m"), ModelId("other")


def load(model_id: str = MODEL, number: int = 1) -> LoadStage:
    spec = slice_spec(models=[model_spec(model_id)], device="cpu")
    return LoadStage(spec, number, 1, (3,), "digest")


def replica(model_id: str = MODEL) -> ReplicaInfo:
    return ReplicaInfo(ModelId(model_id), 2, (5.0, 8.0), memory_bytes=7)


def serving() -> StageCore:
    core = StageCore(1)
    core.handle(StageAsked(load()), 0.0)
    core.handle(Loaded(SLICE, (replica(),)), 0.0)
    return core


def came(
    batch_id: int, expires_in_ms: float = 100.0, model_id: str = MODEL, late_ms: float = 0.0
) -> ActivationsCame:
    message = Activations(BatchId(batch_id), SLICE, ModelId(model_id), 0, 4.0, expires_in_ms)
    return ActivationsCame(message, Handle(batch_id), late_ms)


def ran(batch_id: int, exec_ms: float = 5.0) -> BatchRan:
    return BatchRan(SLICE, BatchId(batch_id), Handle(100 + batch_id), (), exec_ms, 0.0)


def begun(actions: Sequence[StageAction]) -> list[int]:
    return [int(one.message.batch_id) for one in actions if isinstance(one, RunStage)]


def failures(actions: Sequence[StageAction]) -> list[StageFailed]:
    return [
        one.message for one in actions if isinstance(one, TellWorker) and isinstance(one.message, StageFailed)
    ]


def released(actions: Sequence[StageAction]) -> list[int]:
    return [int(one.payload) for one in actions if isinstance(one, ReleaseInputs)]


def test_batches_run_one_at_a_time_in_the_order_in_which_they_came() -> None:
    core = serving()
    assert begun(core.handle(came(1), 0.0)) == [1]
    assert begun(core.handle(came(3), 1.0)) == []
    assert begun(core.handle(came(2), 2.0)) == []
    assert begun(core.handle(ran(1), 5.0)) == [3]
    assert begun(core.handle(ran(3), 10.0)) == [2]


def test_what_comes_of_a_batch_is_passed_on_with_all_it_took_and_the_time_it_has_left() -> None:
    core = serving()
    core.handle(came(1, expires_in_ms=20.0, late_ms=2.0), 10.0)
    actions = core.handle(ran(1), 17.0)
    (passed,) = [one for one in actions if isinstance(one, PassOn)]
    # This stage could have begun until 28, so the next one can until 33.
    assert passed.message == Activations(BatchId(1), SLICE, MODEL, 1, 9.0, 16.0)
    assert passed.payload == 101
    assert released(actions) == [1]


def test_what_comes_too_late_is_not_begun_and_those_behind_it_are() -> None:
    core = serving()
    core.handle(came(1), 0.0)
    core.handle(came(2, expires_in_ms=10.0), 0.0)
    core.handle(came(3, expires_in_ms=30.0), 0.0)
    actions = core.handle(ran(1), 20.0)
    assert begun(actions) == [3]
    (failed,) = failures(actions)
    assert (failed.batch_id, failed.is_expired, failed.reason) == (2, True, "stage 1 got it too late")
    assert sorted(released(actions)) == [1, 2]


def test_a_batch_that_raises_ends_here_and_the_next_one_runs() -> None:
    core = serving()
    core.handle(came(1), 0.0)
    core.handle(came(2), 0.0)
    actions = core.handle(RunFailed(SLICE, BatchId(1), "it raised"), 5.0)
    assert begun(actions) == [2]
    assert failures(actions) == [StageFailed(BatchId(1), SLICE, MODEL, 1, "it raised")]
    rejected = BatchRan(SLICE, BatchId(2), Handle(9), (RejectedRow(0, "shape"),), 1.0, 0.0)
    actions = core.handle(rejected, 9.0)
    assert [one.reason for one in failures(actions)] == ["shape"]
    assert sorted(released(actions)) == [2, 9]


def test_a_device_without_memory_says_what_it_can_still_do() -> None:
    core = serving()
    core.handle(came(1), 0.0)
    core.handle(Shrunk(SLICE, MODEL, 1), 1.0)
    (failed,) = failures(core.handle(RunFailed(SLICE, BatchId(1), "no memory"), 1.0))
    assert failed.shrunk_to == 1


def test_a_batch_of_a_model_that_is_not_here_is_given_back_at_once() -> None:
    core = serving()
    actions = core.handle(came(1, model_id=OTHER), 0.0)
    assert [one.reason for one in failures(actions)] == ["its stage does not have the model"]
    assert released(actions) == [1]


def test_the_queue_has_an_end() -> None:
    core = serving()
    for number in range(WAITING_MAX + 1):
        assert not failures(core.handle(came(number), 0.0))
    assert failures(core.handle(came(WAITING_MAX + 1), 0.0))


def test_models_are_loaded_one_after_the_other_and_those_behind_the_first_beside_it() -> None:
    core = StageCore(1)
    first, second = load(MODEL, 1), load(OTHER, 2)
    assert core.handle(StageAsked(first), 0.0) == [LoadPart(first, is_beside=False)]
    assert core.handle(StageAsked(second), 0.0) == []
    told, then = core.handle(Loaded(SLICE, (replica(),)), 9.0)
    assert told == TellWorker(StageLoaded(1, 1, (5.0, 8.0), (), 7))
    assert then == LoadPart(second, is_beside=True)
    (told,) = core.handle(ModelLoaded(SLICE, 2, None, "no file"), 12.0)
    assert told == TellWorker(StageLoaded(2, 1, (), reason="no file"))


def test_after_a_first_load_that_failed_the_next_one_is_the_first() -> None:
    core = StageCore(1)
    core.handle(StageAsked(load(MODEL, 1)), 0.0)
    (told,) = core.handle(LoadFailed(SLICE, "no file"), 5.0)
    assert told == TellWorker(StageLoaded(1, 1, (), reason="no file"))
    assert core.handle(StageAsked(load(OTHER, 2)), 6.0) == [LoadPart(load(OTHER, 2), is_beside=False)]


def test_a_model_that_nobody_wants_any_more_is_forgotten_loaded_or_not() -> None:
    core = serving()
    core.handle(StageAsked(load(OTHER, 2)), 0.0)
    assert core.handle(StageAsked(UnloadStage(SLICE, OTHER)), 1.0) == [ForgetModel(SliceId(SLICE), OTHER)]
    assert core.handle(ModelLoaded(SLICE, 2, replica(OTHER)), 2.0) == []
    core.handle(StageAsked(UnloadStage(SLICE, MODEL)), 3.0)
    assert failures(core.handle(came(1), 4.0))


def test_a_broken_device_ends_the_process() -> None:
    assert serving().handle(DeviceBroken("poisoned"), 0.0) == [End(1, "poisoned")]


def test_a_model_that_is_forgotten_while_its_batch_runs_out_of_memory_is_not_missed() -> None:
    core = serving()
    core.handle(came(1), 0.0)
    core.handle(StageAsked(UnloadStage(SLICE, MODEL)), 1.0)
    assert core.handle(Shrunk(SLICE, MODEL, 1), 2.0) == []
    (failed,) = failures(core.handle(RunFailed(SLICE, BatchId(1), "no memory"), 2.0))
    assert failed.reason == "no memory"
    assert failures(core.handle(came(2), 3.0)), "it is still forgotten"
