"""The worker tells its device what comes next, and the scheduler what it can no longer do."""

from __future__ import annotations

from fabric.ids import BatchId, ModelId
from fabric.messages import SliceReady
from roles.gpu_worker.core import WorkerCore
from roles.gpu_worker.events import Execute, StageInputs
from roles.gpu_worker.executors.base import RunAborted, Shrunk
from roles.runtime.core import SCHEDULER, Send, Tick
from tests.worker_builders import (
    MODEL,
    SLICE,
    actions_of,
    inputs,
    model_spec,
    run_batch,
    sent,
    serving_core,
    slice_spec,
)


def cpu_core() -> WorkerCore:
    return serving_core(slice_spec(models=[model_spec()], device="cpu"))


def grant(
    core: WorkerCore, batch_id: int, at_ms: float, start_in_ms: float = 0.0
) -> list[StageInputs | Execute]:
    actions = [
        *core.handle(run_batch(batch_id=batch_id, start_in_ms=start_in_ms, latest_in_ms=50.0), at_ms),
        *core.handle(inputs(0, 1, batch_id=batch_id), at_ms),
    ]
    return [action for action in actions if isinstance(action, StageInputs | Execute)]


def test_the_next_complete_batch_is_staged_once_while_another_runs() -> None:
    core = cpu_core()
    assert [type(action) for action in grant(core, 1, 0.0)] == [Execute]
    (staged,) = grant(core, 2, 1.0)
    assert isinstance(staged, StageInputs)
    assert staged.run.batch_id == 2
    assert [part.live_seqs for part in staged.parts] == [(0, 1)]
    assert grant(core, 3, 2.0) == []  # second in line: its turn comes
    actions = core.handle(RunAborted(SLICE, BatchId(1)), 5.0)
    assert [action.run.batch_id for action in actions_of(Execute, actions)] == [2]
    assert [action.run.batch_id for action in actions_of(StageInputs, actions)] == [3]


def test_nothing_is_staged_while_the_device_is_free_or_only_emulated() -> None:
    core = cpu_core()
    core.handle(run_batch(batch_id=1, start_in_ms=1.0, latest_in_ms=50.0), 0.0)
    core.handle(run_batch(batch_id=2, start_in_ms=10.0, latest_in_ms=50.0), 0.0)
    assert core.handle(inputs(0, batch_id=2), 0.0) == []  # the device waits for the first in line
    assert len(actions_of(Execute, core.handle(Tick(), 10.0))) == 1
    emulated = serving_core()
    assert [type(action) for action in [*grant(emulated, 1, 0.0), *grant(emulated, 2, 0.0)]] == [Execute]


def test_a_batch_that_lacks_inputs_is_not_staged() -> None:
    core = cpu_core()
    grant(core, 1, 0.0)
    assert actions_of(StageInputs, core.handle(run_batch(batch_id=2, latest_in_ms=50.0), 1.0)) == []


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
