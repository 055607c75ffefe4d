"""iGniter's part of a measured profile, under the names its shipped files have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from profiles.igniter.fit import (
    AlonePoint,
    GroupPoint,
    active_points,
    cache_slowdown,
    fit_active,
    fit_by_ability,
    fit_frequency,
    fit_power,
    fit_sched,
)
from profiles.measured import Point
from profiles.occupancy import LaunchGaps


@dataclass(frozen=True, slots=True)
class GpuNumbers:
    """What is asked of the driver once, and the speed of copies."""

    power_max_w: float
    power_idle_w: float
    frequency_max_mhz: float
    pcie_bytes_per_ms: float
    share_step_percent: float


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What a tool with access to performance counters says; torch has none.

    `percent` at the configurations of `points`, and the active times alone and beside a copy.
    """

    points: Sequence[tuple[AlonePoint, float]]
    pair_percent: float
    active_alone_ms: float
    active_pair_ms: float
    pair_frequency_mhz: float


def igniter_points(points: Sequence[Point], gpu: GpuNumbers, bytes_per_request: int) -> list[AlonePoint]:
    """The configurations without their copies, where power and clock were measured."""
    return [
        AlonePoint(
            p.batch_size,
            p.share_percent,
            p.p50_ms - p.batch_size * bytes_per_request / gpu.pcie_bytes_per_ms,
            p.power_w,
            p.frequency_mhz,
        )
        for p in points
        if p.power_w is not None and p.frequency_mhz is not None
    ]


def igniter_sections(
    points: Sequence[AlonePoint],
    gpu: GpuNumbers,
    gaps: LaunchGaps,
    groups: Sequence[GroupPoint],
    transferred: tuple[int, int],
    cache: CacheUse | None = None,
) -> dict[str, dict[str, float]]:
    """`hardware` and `coefficients` (section 3.1); `transferred`: bytes in and out of one request.

    Without `cache` the L2 terms are 0: neighbours then slow each other down by launches and clock alone. Raises
    ProfileError where there is too little to fit.
    """
    sched_ms = gaps.kernels * gaps.gap_ms_per_kernel
    sched = fit_sched(groups, gpu.frequency_max_mhz)
    k1, k2, k3, k4, k5 = fit_active(active_points(points, gpu.frequency_max_mhz, sched_ms))
    power = fit_power(points, gpu.frequency_max_mhz, gpu.power_idle_w, sched_ms)
    use_slope = use_offset = sensitivity = 0.0
    if cache is not None:
        use = fit_by_ability(cache.points, sched_ms)
        use_slope, use_offset = use.slope, use.offset
        sensitivity = cache_slowdown(
            cache.active_alone_ms,
            cache.active_pair_ms,
            cache.pair_frequency_mhz / gpu.frequency_max_mhz,
            cache.pair_percent,
        )
    return {
        "hardware": {
            "P_max_power_w": gpu.power_max_w,
            "p_idle_w": gpu.power_idle_w,
            "F_max_frequency_mhz": gpu.frequency_max_mhz,
            "alpha_f_mhz_per_w": fit_frequency(groups, gpu.power_max_w, gpu.frequency_max_mhz),
            "B_pcie_bytes_per_ms": gpu.pcie_bytes_per_ms,
            "alpha_sch_ms": sched.slope,
            "beta_sch_ms": sched.offset,
            "r_unit_pct": gpu.share_step_percent,
        },
        "coefficients": {
            "d_load_bytes": float(transferred[0]),
            "d_feedback_bytes": float(transferred[1]),
            "n_k": float(gaps.kernels),
            "k_sch_ms_per_kernel": gaps.gap_ms_per_kernel,
            "k1_ms_pct": k1,
            "k2_ms_pct": k2,
            "k3_ms_pct": k3,
            "k4_pct": k4,
            "k5_ms": k5,
            "alpha_power_w_per_rps": power.slope,
            "beta_power_w": power.offset,
            "alpha_cacheutil_pct_per_rps": use_slope,
            "beta_cacheutil_pct": use_offset,
            "alpha_cache_per_pct": sensitivity,
        },
    }
