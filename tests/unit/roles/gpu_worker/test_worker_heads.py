"""The worker's core with a model that has heads: who each row is for, and what of its outputs goes to whom."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from fabric.ids import BatchId, ModelId, SliceId
from fabric.link import NamedTensor
from fabric.messages import HeadOutputs, Outputs, TensorInfo
from roles.gpu_worker.answers import rows_of
from roles.gpu_worker.core import WorkerCore
from roles.gpu_worker.events import BatchRan, Execute, InputsCame, PushOutputs
from roles.gpu_worker.executors.base import RejectedRow, RunFailed
from roles.runtime.core import Handle
from tests.worker_builders import actions_of, inputs, loaded, part, run_batch, serving_core

CATS, DOGS = ModelId("cats"), ModelId("dogs")
OUTPUTS = Handle(7)


def came(*seqs: int, heads: tuple[ModelId, ...]) -> InputsCame:
    plain = inputs(*seqs)
    return InputsCame(replace(plain.inputs, heads=heads), plain.payload, plain.size_bytes)


def with_heads(core: WorkerCore, cats: tuple[int, ...], dogs: tuple[int, ...]) -> None:
    """As a real device says when it is warm."""
    heads = tuple(
        HeadOutputs(name, (TensorInfo("y", "float32", shape),))
        for name, shape in ((CATS, cats), (DOGS, dogs))
    )
    (slice_,) = core._slices.values()
    slice_.replicas = {key: replace(one, heads=heads) for key, one in slice_.replicas.items()}


def ran(rejected: tuple[RejectedRow, ...] = ()) -> BatchRan:
    return BatchRan(SliceId(loaded().slice_id), BatchId(1), OUTPUTS, rejected, 7.0, 0.0)


def started(*heads: ModelId) -> tuple[WorkerCore, Execute]:
    core = serving_core()
    core.handle(came(*range(len(heads)), heads=heads), 0.0)
    (execute,) = actions_of(Execute, core.handle(run_batch(part((0, len(heads)))), 0.0))
    return core, execute


def pushed(core: WorkerCore, event: BatchRan) -> list[tuple[tuple[int, ...], list[list[float]]]]:
    """Seqs and rows of each message, of outputs whose rows bear their own number."""
    kept = NamedTensor("y", np.repeat(np.arange(4, dtype=np.float32)[:, None], 5, axis=1))
    return [
        (push.message.seqs, rows_of(kept, push).tolist())
        for push in actions_of(PushOutputs, core.handle(event, 7.0))
        if isinstance(push.message, Outputs)
    ]


def test_the_device_is_told_which_head_each_row_is_for() -> None:
    _, execute = started(CATS, DOGS, CATS)
    assert [one.heads for one in execute.parts] == [(CATS, DOGS, CATS)]


def test_heads_with_outputs_of_one_shape_are_answered_in_one_message() -> None:
    core, _ = started(CATS, DOGS)
    with_heads(core, (5,), (5,))
    ((seqs, rows),) = pushed(core, ran())
    assert (seqs, rows) == ((0, 1), [[0] * 5, [1] * 5])


def test_heads_with_outputs_of_several_shapes_get_their_own_rows_cut_to_their_own_shapes() -> None:
    core, _ = started(CATS, DOGS, CATS, DOGS)
    with_heads(core, (2,), (5,))
    # Row 1 was refused, so the outputs have the rows 0, 2 and 3.
    (cats_seqs, cats), (dogs_seqs, dogs) = pushed(core, ran((RejectedRow(1, "it does not fit"),)))
    assert (cats_seqs, cats) == ((0, 2), [[0, 0], [1, 1]])
    assert (dogs_seqs, dogs) == ((3,), [[2] * 5])


def test_what_is_run_apart_keeps_its_heads() -> None:
    core, _ = started(CATS, DOGS, CATS, DOGS)
    again = actions_of(Execute, core.handle(RunFailed(ran().slice_id, BatchId(1), "a bad row"), 1.0))
    assert [[one.heads for one in execute.parts] for execute in again] == [[(CATS, DOGS)]]


def test_inputs_that_name_too_few_heads_are_dropped_and_counted() -> None:
    core = serving_core()
    core.handle(run_batch(part((0, 2))), 0.0)
    assert not actions_of(Execute, core.handle(came(0, 1, heads=(CATS,)), 0.0))
    assert core.counters["inputs_unfit"] == 1
