"""GpuProfile: what a type of GPU has, as far as planning needs it. A GB here is 2^30 bytes, as on the label."""

from __future__ import annotations

from msgspec import Struct

GIB = 2**30
MIB = 2**20


class GpuProfile(Struct, frozen=True):
    """A type of GPU. `mps_step_percent` is the smallest useful step of an MPS share.

    Shares act on pairs of SMs: the step is 100 / (SM count / 2), as in iGniter's `r_unit`.
    """

    gpu_type: str
    memory_bytes: int
    sm_count: int

    @property
    def mps_step_percent(self) -> float:
        """Steps finer than this give the same SMs."""
        return 100 / (self.sm_count // 2)


GENERIC = GpuProfile("generic", 16 * GIB, 80)
"""Where nothing is said, a GPU is the size of the V100 on which most shipped profiles were measured."""

GPU_PROFILES = {
    profile.gpu_type: profile
    for profile in (
        GENERIC,
        GpuProfile("v100", 16 * GIB, 80),
        GpuProfile("t4", 16 * GIB, 40),
        GpuProfile("a100", 40 * GIB, 108),
        GpuProfile("2080ti", 11 * GIB, 68),
        GpuProfile("1080ti", 11 * GIB, 28),
        GpuProfile("h200", 141 * GIB, 132),
    )
}


def gpu_profile(gpu_type: str) -> GpuProfile:
    """The profile of a type; one we do not know is planned like `generic` under its own name."""
    known = GPU_PROFILES.get(gpu_type.lower())
    return known or GpuProfile(gpu_type, GENERIC.memory_bytes, GENERIC.sm_count)
