"""What a batch's end means for everyone concerned: rows to frontends, a `Done` to the scheduler."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fabric.errors import LocalProtocolError, PayloadTooLarge, code_of_unsendable
from fabric.frames import ANSWER_BYTES_MAX
from fabric.ids import ModelId
from fabric.link import NamedTensor, Tensor
from fabric.messages import BatchFailed, Done, HeadOutputs, Inputs, InputsReturned, Outputs, RunBatch
from roles.gpu_worker.batches import Batch
from roles.gpu_worker.events import BatchRan, HeadRows, PushOutputs, Release, WorkerAction
from roles.runtime.core import NO_PAYLOAD, Handle


def answer_rows(
    batch: Batch, event: BatchRan, heads: Sequence[HeadOutputs] = ()
) -> tuple[list[WorkerAction], int]:
    """Each frontend's share of the running rows' outputs, or why a row was refused; and how many rows ran.

    The outputs hold the rows that were not rejected, part after part, so a part's own ones are a slice of them. Of `heads`
    with outputs of several shapes each gets its own rows, cut to its shapes.
    """
    shapes = _shapes_of(heads)
    reasons = {rejected.row: rejected.reason for rejected in event.rejected}
    ran = len(batch.rows) - len(reasons)
    actions: list[WorkerAction] = []
    row = first_row = 0
    for frontend_id, part in batch.running():
        served: list[int] = []
        served_heads: list[ModelId] = []
        refused: dict[str, list[int]] = {}
        for place, seq in enumerate(part.live_seqs):
            if row in reasons:
                refused.setdefault(reasons[row], []).append(seq)
            else:
                served.append(seq)
                served_heads.extend(part.heads[place : place + 1])
            row += 1
        for head in dict.fromkeys(served_heads if shapes else ()):
            places = [place for place, one in enumerate(served_heads) if one == head]
            message = _outputs(batch, [served[place] for place in places], ran, event.exec_ms)
            own = HeadRows(tuple(first_row + place for place in places), shapes[head])
            actions.append(PushOutputs(frontend_id, message, event.outputs, head=own))
        if served and not shapes:
            message = _outputs(batch, served, ran, event.exec_ms)
            actions.append(PushOutputs(frontend_id, message, event.outputs, first_row))
        first_row += len(served)
        for reason, seqs in refused.items():
            actions.append(PushOutputs(frontend_id, _failed(batch, seqs, "InvalidInput", reason)))
    return actions, ran


def rows_of(tensor: NamedTensor, push: PushOutputs) -> Tensor:
    """What of an output goes with that push. Raises LocalProtocolError where it lacks a request's row."""
    end = push.first_row + len(push.message.seqs) if push.head is None else 1 + max(push.head.rows)
    if not tensor.array.ndim or len(tensor.array) < end:
        raise LocalProtocolError(f"output {tensor.name!r} has not one row for each request")
    if push.head is None:
        return tensor.array[push.first_row : end]
    own = tensor.array[list(push.head.rows)]
    within = tuple(slice(length) for length in push.head.shapes[tensor.name])
    return np.ascontiguousarray(own[(slice(None), *within)])


def answer_failure(batch: Batch, code: str, reason: str) -> list[WorkerAction]:
    """The running rows get no outputs: the model raised, or the device broke."""
    return [
        PushOutputs(frontend_id, _failed(batch, part.live_seqs, code, reason))
        for frontend_id, part in batch.running()
    ]


def return_inputs(inputs: Inputs, reason: str) -> list[WorkerAction]:
    """What came will not be run: the scheduler, which would say so to whose it is, may be gone."""
    if not inputs.live_seqs:
        return []
    message = InputsReturned(inputs.batch_id, inputs.slice_id, inputs.model_id, inputs.live_seqs, reason)
    return [PushOutputs(inputs.frontend_id, message)]


def return_batch(batch: Batch, reason: str, *, is_stopped: bool = False) -> list[WorkerAction]:
    """The same, of all that came for a batch; its tensors are let go."""
    run = batch.run
    returned = [
        PushOutputs(
            frontend_id,
            InputsReturned(run.batch_id, run.slice_id, run.model_id, part.live_seqs, reason, is_stopped),
        )
        for frontend_id, part in batch.live()
    ]
    return [*release(*batch.payloads()), *returned]


def check_rows(outputs: Sequence[NamedTensor]) -> None:
    """Raises PayloadTooLarge where a request's outputs are more than its frontend may send to its client."""
    row_bytes = sum([tensor.array[0].nbytes for tensor in outputs])
    if row_bytes > ANSWER_BYTES_MAX:
        raise PayloadTooLarge(f"{row_bytes} bytes for one request, at most {ANSWER_BYTES_MAX} are allowed")


def answer_unsendable(
    message: Outputs | BatchFailed | InputsReturned, error: LocalProtocolError
) -> BatchFailed:
    """The model gave what the wire does not allow: nobody of these gets outputs."""
    reason = f"outputs of model {message.model_id!r} cannot be sent: {error}"
    code = code_of_unsendable(error)
    return BatchFailed(message.batch_id, message.slice_id, message.model_id, message.seqs, code, reason)


def done_of(batch: Batch, status: str, ran: int = 0, exec_ms: float = 0.0) -> Done:
    """The end of a batch of which some inputs may be missing: from its latest start on it did not wait for those, but for the device."""
    transfer_ms, queue_ms = batch.awaited_ms
    return Done(
        batch_id=batch.run.batch_id,
        slice_id=batch.run.slice_id,
        model_id=batch.run.model_id,
        status=status,
        ran=ran,
        missing=batch.missing(),
        transfer_ms=transfer_ms,
        queue_ms=queue_ms,
        exec_ms=exec_ms,
    )


def unlaunched(run: RunBatch) -> Done:
    """Nothing of the batch ran: every request comes back."""
    return Done(run.batch_id, run.slice_id, run.model_id, "expired", 0, run.parts, 0.0, 0.0, 0.0)


def preempted(run: RunBatch) -> Done:
    """Stopped because the scheduler asked; it has granted the requests again already, so none is missing."""
    return Done(run.batch_id, run.slice_id, run.model_id, "preempted", 0, (), 0.0, 0.0, 0.0)


def release(*payloads: Handle) -> list[WorkerAction]:
    """Let go of what was kept, if anything was."""
    kept = tuple(payload for payload in payloads if payload != NO_PAYLOAD)
    return [Release(kept)] if kept else []


def _outputs(batch: Batch, seqs: Sequence[int], batch_size: int, exec_ms: float) -> Outputs:
    return Outputs(
        batch_id=batch.run.batch_id,
        slice_id=batch.run.slice_id,
        model_id=batch.run.model_id,
        seqs=tuple(seqs),
        batch_size=batch_size,
        transfer_ms=batch.transfer_ms,
        queue_ms=batch.queue_ms,
        gpu_ms=exec_ms,
    )


def _shapes_of(heads: Sequence[HeadOutputs]) -> dict[ModelId, dict[str, tuple[int, ...]]]:
    """Of each head's outputs; empty where all have the same."""
    shapes = {head.model_id: {info.name: info.shape for info in head.outputs} for head in heads}
    first, *others = [*shapes.values()] or [{}]
    return shapes if any(other != first for other in others) else {}


def _failed(batch: Batch, seqs: Sequence[int], code: str, reason: str) -> BatchFailed:
    run = batch.run
    return BatchFailed(run.batch_id, run.slice_id, run.model_id, tuple(seqs), code, reason)
