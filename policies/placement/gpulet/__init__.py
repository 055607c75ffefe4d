"""gpulet: GPUs cut into gpulets, models in space and in time (Choi et al., USENIX ATC 2022)."""

from policies.placement.gpulet.policy import GpuletPolicy

__all__ = ["GpuletPolicy"]
