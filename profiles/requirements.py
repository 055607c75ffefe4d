"""What a batch asks of a GPU beside time: Usher's requirements and gpulet's bandwidths."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a batch of one size needs of a whole GPU, in percent (Usher section 3.2, thesis section 5.3).

    None where the source does not say. Memory is the largest amount reserved over the GPU's memory.
    """

    achieved_occupancy_percent: float | None = None
    weighted_occupancy_percent: float | None = None
    weighted_sm_percent: float | None = None
    memory_percent: float | None = None


@dataclass(frozen=True, slots=True)
class Bandwidths:
    """What a model uses of the GPU's second-level cache and memory, in percent (gpulet section 4.2)."""

    l2_percent: float
    dram_percent: float
