"""What the estimator knows of a type of GPU: peak rates for the roofline, limits of an SM for occupancy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from fabric.errors import ProfileError
from profiles.estimator.work import Work
from profiles.gpu import GIB
from profiles.occupancy import DeviceLimits


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """Peak rates of float32 and of memory, as the maker states them. `records`: the file with its kernels.

    `copy_gbps` is what a pinned copy over its host's bus reaches.
    """

    gpu_type: str
    name: str
    memory_bytes: int
    bandwidth_gbps: float
    gflops: float
    limits: DeviceLimits
    records: str | None = None
    copy_gbps: float = 12.0

    def roofline_ms(self, work: Work) -> float:
        """The least time by arithmetic and by memory, whichever is more."""
        return max(work.flops / (self.gflops * 1e6), work.size_bytes / (self.bandwidth_gbps * 1e6))


def _limits(sm_count: int, threads: int, blocks: int, shared_kib: int) -> DeviceLimits:
    return DeviceLimits(sm_count, threads, blocks, 65_536, shared_kib * 1024)


_SPECS: Final = (
    GpuSpec("v100", "Tesla V100-PCIE-32GB", 32 * GIB, 900, 14_029, _limits(80, 2048, 32, 96), "v100"),
    GpuSpec("v100-sxm2", "Tesla V100-SXM2-16GB", 16 * GIB, 900, 15_667, _limits(80, 2048, 32, 96), "v100"),
    GpuSpec("a100", "A100-PCIE-40GB", 40 * GIB, 1555, 19_492, _limits(108, 2048, 32, 164), "a100", 22.0),
    GpuSpec("p100", "Tesla P100-PCIE-16GB", 16 * GIB, 732, 9_519, _limits(56, 2048, 32, 64), "p100"),
    GpuSpec("t4", "Tesla T4", 16 * GIB, 320, 8_141, _limits(40, 1024, 16, 64)),
    GpuSpec("l4", "L4", 24 * GIB, 300, 31_334, _limits(60, 1536, 24, 100), None, 22.0),
    GpuSpec("h100", "H100 80GB HBM3", 80 * GIB, 3430, 66_908, _limits(132, 2048, 32, 228), None, 45.0),
)
GPU_SPECS: Final[Mapping[str, GpuSpec]] = {spec.gpu_type: spec for spec in _SPECS}
RECORDED: Final = ("v100", "a100", "p100")


def gpu_spec(gpu_type: str) -> GpuSpec:
    """Raises ProfileError for a type whose peak rates are not known here."""
    found = GPU_SPECS.get(gpu_type.lower())
    if found is None:
        raise ProfileError(
            f"the estimator knows no GPU {gpu_type[:40]!r}; it knows: {', '.join(GPU_SPECS)} "
            f"(kernel records of {', '.join(RECORDED)})"
        )
    return found
