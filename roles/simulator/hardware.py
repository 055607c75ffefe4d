"""What a simulated cluster is made of besides the scheduler: hosts with their GPUs, and a network."""

from __future__ import annotations

from msgspec import Struct

from fabric.ids import NodeId, PeerId
from fabric.messages import GpuInfo
from profiles.device_model import DeviceModel
from roles.simulator.network import Network


class SimulatedNode(Struct, frozen=True):
    """A host: what its agent reports, the device model of each GPU, in the node's own order, and whose shard has it."""

    node_id: NodeId
    gpus: tuple[GpuInfo, ...]
    devices: tuple[DeviceModel, ...]
    shard: int = 0


class SimulatedHardware(Struct, frozen=True):
    """What the world is made of besides the scheduler.

    A slice that is wanted after the beginning is ready `start_ms` later, a plan is made within `plan_ms`.
    """

    nodes: tuple[SimulatedNode, ...]
    network: Network
    frontends: int = 1
    start_ms: float = 0.0
    plan_ms: float = 0.0


def scheduler_peer(shard: int) -> PeerId:
    """The name of a shard's scheduler in a simulated network."""
    return PeerId(f"scheduler-{shard}")
