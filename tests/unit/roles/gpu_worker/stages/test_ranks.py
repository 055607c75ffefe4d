"""The devices of a worker with a gang, on virtual time: a first rank and others that do as the test says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from fabric.errors import PayloadTooLarge
from fabric.ids import BatchId
from fabric.link import NamedTensor
from fabric.messages import (
    Activations,
    AnyMessage,
    LoadStage,
    SliceSpec,
    StageFailed,
    StageLoaded,
)
from roles.gpu_worker.executors.base import DeviceBroken, ExecutorEvent, Loaded
from roles.gpu_worker.executors.gang import FAILED_LOAD_MS, FAILED_STEP_MS, Gang
from roles.gpu_worker.stages.executor import PipelineExecutor
from roles.gpu_worker.stages.later_stages import EXPIRES_MS_MAX, StageGone, StageSaid
from tests.unit.roles.gpu_worker.stages.test_executor import First, Later, job, replica
from tests.worker_builders import MODEL, SLICE, model_spec, slice_spec

BATCH = (NamedTensor("x", np.zeros((3, 4), np.float32)),)


@dataclass
class Ranks:
    now_ms: float = 0.0
    first: First = field(default_factory=First)
    later: Later = field(default_factory=Later)

    def __post_init__(self) -> None:
        self.gang = Gang(lambda: self.now_ms)
        self.executor = PipelineExecutor(self.first, self.later, {}, lambda: self.now_ms, self.gang)
        self.executor.load(spec())

    def hear(self, *said: AnyMessage) -> list[ExecutorEvent]:
        self.later.said += [StageSaid(message) for message in said]
        return [*self.executor.take(9, self.now_ms)]

    def begin(self) -> list[ExecutorEvent]:
        """The first rank's thread begins to infer."""
        self.gang.begin(SLICE, MODEL, BATCH)
        return self.hear()


def spec() -> SliceSpec:
    return replace(slice_spec(models=[model_spec(MODEL)], device="cpu"), following=(1, 2), is_gang=True)


def serving() -> Ranks:
    ranks = Ranks()
    ranks.hear(StageLoaded(0, 1, ()), StageLoaded(0, 2, ()))
    ranks.later.sent.clear()
    return ranks


def ended(rank: int, number: int = 1) -> Activations:
    return Activations(BatchId(number), SLICE, MODEL, rank, 1.0, 0.0)


def failed(rank: int, number: int = 1) -> StageFailed:
    return StageFailed(BatchId(number), SLICE, MODEL, rank, "ValueError: x")


def test_all_ranks_load_at_once_and_what_the_first_one_says_is_the_slices() -> None:
    ranks = Ranks()
    assert ranks.later.started == 3
    assert [
        (rank, message.stage) for rank, message in ranks.later.sent if isinstance(message, LoadStage)
    ] == [
        (1, 1),
        (2, 2),
    ]
    assert ("load", SLICE) in ranks.first.asked
    event = Loaded(SLICE, (replica(),))
    ranks.first.events.append(event)
    assert ranks.hear() == [event]


def test_every_rank_gets_the_inputs_of_a_step_and_no_deadline() -> None:
    ranks = serving()
    assert ranks.begin() == []
    message = Activations(BatchId(1), SLICE, MODEL, 0, 0.0, EXPIRES_MS_MAX)
    assert ranks.later.sent == [(1, message), (2, message)]
    ranks.gang.end("")
    ranks.hear(ended(1), ended(2))
    ranks.begin()
    assert ranks.later.sent[-1][1] == replace(message, batch_id=BatchId(2))


def test_a_batch_runs_as_on_one_device_and_is_stopped_as_there() -> None:
    ranks = serving()
    ranks.executor.run(job(), 0.0)
    ranks.executor.abort(SLICE, BatchId(1), 0.0)
    assert ranks.first.asked[-2:] == [("run", 1), ("abort", 1)]
    assert ranks.later.sent == []


def test_a_lost_rank_takes_the_slice_along() -> None:
    ranks = serving()
    ranks.later.said.append(StageGone(2, "killed by signal 9"))
    assert ranks.hear() == [DeviceBroken("rank 2 of 3 is gone: killed by signal 9")]


def test_a_rank_that_raises_alone_breaks_the_device_when_the_first_one_has_waited_for_it() -> None:
    ranks = serving()
    ranks.begin()
    assert ranks.hear(failed(2)) == []
    assert ranks.executor.wake_at_ms == FAILED_STEP_MS
    ranks.now_ms = FAILED_STEP_MS
    assert ranks.hear() == [DeviceBroken("rank 2 of 3: ValueError: x")]
    assert ranks.hear() == [], "once only"
    assert ranks.executor.wake_at_ms is None


def test_what_all_ranks_raise_on_is_one_failed_batch() -> None:
    ranks = serving()
    ranks.begin()
    ranks.hear(failed(1), failed(2))
    ranks.gang.end("ValueError: x")
    ranks.now_ms = 2 * FAILED_STEP_MS
    assert ranks.hear() == []
    assert ranks.begin() == []


def test_a_rank_that_cannot_load_ends_the_first_ones_wait() -> None:
    ranks = Ranks()
    assert ranks.hear(StageLoaded(0, 2, (), reason="no file")) == []
    ranks.now_ms = FAILED_LOAD_MS
    assert ranks.hear() == [DeviceBroken("rank 2 of 3: no file")]


@pytest.mark.parametrize("error", [None, PayloadTooLarge("300 MB")])
def test_inputs_that_cannot_be_sent_are_a_rank_that_failed(error: Exception | None) -> None:
    ranks = serving()
    ranks.later.is_full, ranks.later.error = True, error
    assert ranks.begin() == []
    ranks.now_ms = FAILED_STEP_MS
    (broken,) = ranks.hear()
    assert isinstance(broken, DeviceBroken)
    assert ("300 MB" if error else "takes no more") in broken.reason


def test_an_unloaded_slice_ends_its_processes_and_the_next_one_begins_anew() -> None:
    ranks = serving()
    ranks.begin()
    ranks.gang.end("")
    ranks.hear(ended(1), ended(2))
    ranks.gang.begin(SLICE, MODEL, BATCH)
    ranks.executor.unload(SLICE)
    assert ranks.hear() == []
    assert not ranks.executor.has_more, "nothing wakes the worker for ever"
    assert ranks.later.started == 0
    assert ranks.first.asked[-1] == ("unload", SLICE)
    assert ranks.gang.fails_at_ms is None
    ranks.executor.load(spec())
    ranks.hear(StageLoaded(0, 1, ()), StageLoaded(0, 2, ()))
    assert ranks.begin() == []


def test_without_its_model_a_gang_has_nothing_to_load() -> None:
    ranks = Ranks()
    ranks.executor.unload(SLICE)
    ranks.later.sent.clear()
    ranks.executor.load(replace(spec(), models=()))
    assert ranks.later.sent == []


@pytest.mark.parametrize("change", [{"run_limit_ms": 9.0}, {"batch_size_max": 2}, {"slo_ms": 99.0}])
def test_whatever_changes_of_its_model_makes_a_gang_another_slice(change: dict[str, Any]) -> None:
    """Its worker could not load the model anew beside the one that runs."""
    other = replace(spec(), models=(replace(spec().models[0], **change),))
    assert spec().is_same_but_models(spec())
    assert not spec().is_same_but_models(other)
    assert replace(spec(), is_gang=False).is_same_but_models(replace(other, is_gang=False))
