"""Node agent <-> worker."""

from __future__ import annotations

from fabric.ids import Incarnation, ModelId, NodeId, SliceId
from fabric.messages.base import Addresses, Listed, Message
from fabric.messages.models import LeftOut, SliceSpec


class WorkerHello(Message, frozen=True, tag=50):
    """Worker -> agent: the process named `worker_id` is up and asks what to host.

    With `slices` it hosts them already, for an agent that is gone, and asks this one to adopt it.
    """

    worker_id: str
    incarnation: Incarnation
    pid: int
    slices: Listed[SliceSpec] = ()


class Host(Message, frozen=True, tag=51):
    """Agent -> worker: host these slices; introduce yourself to the scheduler at `scheduler_addresses`.

    `agent_pid` is the process that a worker which may outlive its agent watches; 0: not said. Models `left_out` are
    not even loaded. `epoch`: of the scheduler whose commands count; 0: of one that has none yet.
    """

    node_id: NodeId
    slices: Listed[SliceSpec]
    scheduler_addresses: Addresses
    agent_pid: int = 0
    left_out: Listed[LeftOut] = ()
    epoch: int = 0
    heartbeat_interval_ms: float = 250.0
    heartbeat_patience_ms: float = 1_500.0


class SliceFailed(Message, frozen=True, tag=52):
    """Worker -> agent: this slice cannot be served; its reason in words.

    `model_id`: it ends because of that model, whose run hung or whose load broke the device; empty: for another reason.
    `is_unloadable`: no model of it loads, and in a new process hardly one would now. Else its device broke: the process ends, and a new one may serve it.
    """

    slice_id: SliceId
    incarnation: Incarnation
    reason: str
    model_id: ModelId = ModelId("")
    is_unloadable: bool = False


class Loading(Message, frozen=True, tag=54):
    """Worker -> agent: begins to load that model; should the process end or hang now, it is the model's doing."""

    slice_id: SliceId
    model_id: ModelId


class Stop(Message, frozen=True, tag=53):
    """Agent -> worker: finish what runs within `grace_ms`, then end."""

    grace_ms: float
