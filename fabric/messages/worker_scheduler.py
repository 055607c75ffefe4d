"""Worker <-> scheduler."""

from __future__ import annotations

from fabric.ids import BatchId, Incarnation, ModelId, NodeId, SliceId
from fabric.messages.base import Addresses, Listed, Message, Parts
from fabric.messages.models import LeftOut, ReplicaInfo


class SliceReady(Message, frozen=True, tag=20):
    """Worker -> scheduler and agent: this slice is loaded, warm and takes inputs at `addresses`.

    `left_out`: models it should host and does not. `epoch`: of the scheduler whose commands it obeys; 0: of one that has none.
    """

    slice_id: SliceId
    incarnation: Incarnation
    node_id: NodeId
    gpu: int
    addresses: Addresses
    replicas: Listed[ReplicaInfo]
    left_out: Listed[LeftOut] = ()
    epoch: int = 0


class RunBatch(Message, frozen=True, tag=21):
    """Scheduler -> worker: run this batch in `start_in_ms`, in `latest_in_ms` with the parts that came.

    After `latest_in_ms` the tightest deadline in the batch is lost, after `expires_in_ms` all of them are, with
    their slack: a batch that is late for its first requests still serves the others.
    """

    batch_id: BatchId
    slice_id: SliceId
    incarnation: Incarnation
    model_id: ModelId
    parts: Parts
    start_in_ms: float
    latest_in_ms: float
    expires_in_ms: float


class Done(Message, frozen=True, tag=22):
    """Worker -> scheduler: the batch ended. `status` is ok | failed | expired (not launched: too late) | preempted.

    `missing` are parts (with the seqs) whose inputs had not come. Times: `transfer_ms` from the receipt of RunBatch
    until the last input (where one is missing: or until the batch could go without it, if later), `queue_ms` until the start,
    `exec_ms` the run; 0 where it did not happen.
    """

    batch_id: BatchId
    slice_id: SliceId
    model_id: ModelId
    status: str
    ran: int
    missing: Parts
    transfer_ms: float
    queue_ms: float
    exec_ms: float


class PreemptBatch(Message, frozen=True, tag=23):
    """Scheduler -> worker: stop that batch if you can; its `Done` says whether it was `preempted`.

    The scheduler grants its requests again, so a frontend may be granted a request more than once; only the
    newest grant counts.
    """

    batch_id: BatchId
    slice_id: SliceId
