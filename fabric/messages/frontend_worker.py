"""Frontend <-> worker (PUSH and PULL, with tensors)."""

from __future__ import annotations

from fabric.ids import BatchId, FrontendId, Incarnation, ModelId, SliceId
from fabric.messages.base import Listed, Message


class Inputs(Message, frozen=True, tag=30):
    """Frontend -> worker: the inputs of one part, request after request in `live_seqs` order.

    Every request brings the same number of tensors: frames are grouped by request. Seqs of the part that are
    not live were cancelled or have expired. `heads`: of a model that has heads, the one that each live request is for.
    """

    batch_id: BatchId
    slice_id: SliceId
    incarnation: Incarnation
    model_id: ModelId
    frontend_id: FrontendId
    part: int
    live_seqs: Listed[int]
    heads: Listed[ModelId] = ()


class Outputs(Message, frozen=True, tag=31):
    """Worker -> frontend: one frame per output, the rows in `seqs` order. Of a part with several heads there is one for each."""

    batch_id: BatchId
    slice_id: SliceId
    model_id: ModelId
    seqs: Listed[int]
    batch_size: int
    transfer_ms: float
    queue_ms: float
    gpu_ms: float


class BatchFailed(Message, frozen=True, tag=32):
    """Worker -> frontend: these ran into an error; `code` is a request error's wire code."""

    batch_id: BatchId
    slice_id: SliceId
    model_id: ModelId
    seqs: Listed[int]
    code: str
    reason: str


class InputsReturned(Message, frozen=True, tag=33):
    """Worker -> frontend: these came, and have no outputs. What becomes of them the scheduler says that granted them, unless it is gone.

    `is_stopped`: their batch was stopped for a larger one, and that scheduler has them queued again, for however long. Else they were not run.
    """

    batch_id: BatchId
    slice_id: SliceId
    model_id: ModelId
    seqs: Listed[int]
    reason: str
    is_stopped: bool = False
