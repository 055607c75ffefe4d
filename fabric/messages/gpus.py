"""GPUs, how slices share them, and what their sensors say."""

from __future__ import annotations

from fabric.ids import NodeId
from fabric.messages.base import Listed, Value


class GpuInfo(Value, frozen=True):
    """One device of a node, in the node's own order. What follows `memory_bytes` is known of NVIDIA GPUs only.

    `gpu_type` is the configuration's word, which profiles go by; `name` is what the driver calls it.
    """

    gpu: int
    gpu_type: str
    device: str
    memory_bytes: int = 0
    uid: str = ""  # of the physical GPU, as in CUDA_VISIBLE_DEVICES
    name: str = ""
    sm_count: int = 0  # 0: not known
    compute_capability: str = ""  # such as "8.0"
    is_mig: bool = False
    driver: str = ""


class GpuSharing(Value, frozen=True):
    """How the slices of a GPU share it. `reason`: why not by MPS, or what else a person should know."""

    gpu: int
    mode: str  # mps | time-sharing | mig | starting
    reason: str = ""


class GpuSample(Value, frozen=True):
    """What a GPU's own sensors say; None where it has no such sensor."""

    gpu: int
    busy_percent: float | None = None  # of the last sampling period some kernel ran
    memory_used_bytes: int | None = None
    power_w: float | None = None
    sm_mhz: int | None = None
    memory_mhz: int | None = None
    temperature_c: int | None = None
    throttle: Listed[str] = ()  # why the clocks are lower than they could be, such as sw_power_cap


class GpuReport(Value, frozen=True):
    """One GPU as the scheduler knows it. `sampled_ago_ms` None: nothing was ever measured."""

    node_id: NodeId
    info: GpuInfo
    sharing: GpuSharing | None = None
    sample: GpuSample | None = None
    sampled_ago_ms: float | None = None


class GpuRef(Value, frozen=True):
    """One GPU of a node, in the node's own order."""

    node_id: NodeId
    gpu: int

    @property
    def name(self) -> str:
        """As commands take it and status shows it: ``node-0/gpu1``."""
        return f"{self.node_id}/gpu{self.gpu}"
