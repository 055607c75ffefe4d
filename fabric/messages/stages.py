"""The worker of a slice over several GPUs <-> the processes of its later stages, or other ranks; nobody else hears any of it.

For a rank its number is the `stage`; `Activations` have a step's inputs, whose number is the batch's, and without tensors say that it has ended.
"""

from __future__ import annotations

from fabric.ids import BatchId, ModelId, SliceId
from fabric.messages.base import Listed, Message
from fabric.messages.models import SliceSpec
from fabric.messages.tensors import TensorInfo


class LoadStage(Message, frozen=True, tag=24):
    """Worker -> stage: load part `stage` of the one model of `spec`; parts begin at `first_layers` and, the first one, at 0.

    `digest`: of the model, as the worker has loaded it.
    """

    spec: SliceSpec
    number: int
    stage: int
    first_layers: Listed[int]
    digest: str


class UnloadStage(Message, frozen=True, tag=25):
    """Worker -> stage: forget the model; nothing of it is under way."""

    slice_id: SliceId
    model_id: ModelId


class StageLoaded(Message, frozen=True, tag=26):
    """Stage -> worker: what came of that load; `reason` why it failed, empty where it is warm.

    `exec_ms[b - 1]` is the stage's own l(b); `limit` says why its batches are no larger than that.
    """

    number: int
    stage: int
    exec_ms: Listed[float]
    outputs: Listed[TensorInfo] = ()
    memory_bytes: int = 0
    limit: str = ""
    reason: str = ""


class Activations(Message, frozen=True, tag=27):
    """Worker -> stage -> stage -> worker: what the next stage of a batch takes, or, back at the worker, its outputs.

    `stage` is the one that gave them, `exec_ms` what all so far have taken. After `expires_in_ms` the next stage need not begin.
    """

    batch_id: BatchId
    slice_id: SliceId
    model_id: ModelId
    stage: int
    exec_ms: float
    expires_in_ms: float


class StageFailed(Message, frozen=True, tag=28):
    """Stage -> worker: the batch ends there. `is_expired`: it came too late, else the stage raised.

    `shrunk_to`, unless 0: batches larger than that are not worth granting any more.
    """

    batch_id: BatchId
    slice_id: SliceId
    model_id: ModelId
    stage: int
    reason: str
    is_expired: bool = False
    shrunk_to: int = 0
