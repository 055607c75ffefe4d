"""Node agent <-> scheduler."""

from __future__ import annotations

from enum import StrEnum

from fabric.ids import Incarnation, NodeId, SliceId
from fabric.messages.base import Listed, Message, Value
from fabric.messages.gpus import GpuInfo, GpuSample, GpuSharing
from fabric.messages.models import SliceSpec


class SliceState(StrEnum):
    """What became of a slice that should exist."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    """It ends when what it has is done; nothing more is for it."""
    FAILED = "failed"
    LOST = "lost"
    STOPPED = "stopped"


class SliceStatus(Value, frozen=True):
    """`state`: a `SliceState`; `reason` says why for the last four."""

    slice_id: SliceId
    incarnation: Incarnation
    state: str
    reason: str = ""


class NodeHello(Message, frozen=True, tag=40):
    """Agent -> scheduler: first message, and again after a reconnect: what is there and what runs.

    `workers_outlive_agent`: when this agent is lost, its workers are not, until they are silent themselves. The last
    four fields are a `LeaseReport`'s: whose lease this agent has granted.
    """

    node_id: NodeId
    incarnation: Incarnation
    gpus: Listed[GpuInfo]
    slices: Listed[SliceStatus]
    workers_outlive_agent: bool = False
    epoch: int = 0
    holder_id: str = ""
    holder_incarnation: Incarnation = Incarnation("")
    is_lease_free: bool = True


class DesiredSlices(Message, frozen=True, tag=41):
    """Scheduler -> agent: these slices should exist on your node, and no others."""

    version: int
    slices: Listed[SliceSpec]


class SliceChanged(Message, frozen=True, tag=42):
    """Agent -> scheduler: a slice changed its state. A lost one is reported at once (process handle)."""

    node_id: NodeId
    status: SliceStatus


class Telemetry(Message, frozen=True, tag=43):
    """Agent -> scheduler: what its GPUs do, once a second, and when their sharing changes. NVIDIA GPUs only."""

    node_id: NodeId
    samples: Listed[GpuSample]
    sharing: Listed[GpuSharing]
