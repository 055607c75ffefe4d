"""iGniter's coefficients from measurements, by its authors' own procedure (section 3.1, and their code).

Each model is measured in 11 configurations: batches 1, 16 and 32 at shares of 10, 50 and 100 percent; once traced, for
its kernels and the gaps between them; and once beside a copy of itself, both at batch 16 and 50 percent. A GPU is
measured once: idle, copying, and under one to five copies of a model at 20 percent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fabric.errors import ProfileError

BATCH_SIZES = (1, 16, 32)
SHARES_PERCENT = (10.0, 50.0, 100.0)
PAIR_BATCH_SIZE = 16
GROUP_SIZES = (1, 2, 3, 4, 5)
GROUP_SHARE_PERCENT = 20.0
THROTTLED = 0.999  # a clock below so much of the highest is throttled: what is left is rounding of means
_K4_TURNS = 80  # of the golden section: the interval shrinks by 10^16


@dataclass(frozen=True, slots=True)
class AlonePoint:
    """One configuration alone on the GPU, times in ms without the copies."""

    batch_size: int
    share_percent: float
    gpu_ms: float
    power_w: float
    frequency_mhz: float


@dataclass(frozen=True, slots=True)
class GroupPoint:
    """`count` copies of one model on one GPU."""

    count: int
    power_w: float
    frequency_mhz: float
    gap_ms_per_kernel: float


@dataclass(frozen=True, slots=True)
class FittedLine:
    """slope · x + offset."""

    slope: float
    offset: float


def fit_line(points: Sequence[tuple[float, float]]) -> FittedLine:
    """Least squares; ProfileError with fewer than two different x."""
    if len({x for x, _ in points}) < 2:
        raise ProfileError("a line needs measurements at two different places or more")
    slope, offset = np.polyfit([x for x, _ in points], [y for _, y in points], 1)
    return FittedLine(float(slope), float(offset))


def active_points(
    points: Sequence[AlonePoint], frequency_max_mhz: float, sched_ms: float
) -> list[tuple[int, float, float]]:
    """(batch, share, GPU active ms at full clock): gpu_ms · min(1, f/F) less the scheduling delay."""
    return [
        (p.batch_size, p.share_percent, p.gpu_ms * min(1.0, p.frequency_mhz / frequency_max_mhz) - sched_ms)
        for p in points
    ]


def fit_active(points: Sequence[tuple[int, float, float]]) -> tuple[float, float, float, float, float]:
    """k1 … k5 of equation 11, (k1 b² + k2 b + k3)/(r + k4) + k5, least squares over (b, r in percent, ms).

    For a given k4 the rest is linear; k4 is found by a scan and a golden section around its best. Raises
    ProfileError with fewer than five points, or all at one share.
    """
    if len(points) < 5 or len({share for _, share, _ in points}) < 2:
        raise ProfileError("the active time needs five configurations or more, at two shares or more")
    smallest = min(share for _, share, _ in points)
    grid = np.concatenate([np.linspace(-0.95 * smallest, smallest, 400), np.linspace(smallest, 200.0, 400)])
    place = int(np.argmin([_solved(points, k4)[1] for k4 in grid]))
    low, high = float(grid[max(0, place - 1)]), float(grid[min(len(grid) - 1, place + 1)])
    ratio = (np.sqrt(5.0) - 1) / 2
    for _ in range(_K4_TURNS):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        if _solved(points, left)[1] <= _solved(points, right)[1]:
            high = right
        else:
            low = left
    k4 = (low + high) / 2
    k1, k2, k3, k5 = _solved(points, k4)[0]
    return k1, k2, k3, k4, k5


def fit_by_ability(points: Sequence[tuple[AlonePoint, float]], sched_ms: float) -> FittedLine:
    """Power less idle, or L2 use, against the processing ability 1000 b / (gpu_ms - sched_ms)."""
    return fit_line([(1000 * p.batch_size / (p.gpu_ms - sched_ms), value) for p, value in points])


def fit_power(
    points: Sequence[AlonePoint], frequency_max_mhz: float, idle_w: float, sched_ms: float
) -> FittedLine:
    """W per request a second and W, over the configurations whose clock stayed at its highest."""
    free = [p for p in points if p.frequency_mhz >= THROTTLED * frequency_max_mhz]
    return fit_by_ability([(p, p.power_w - idle_w) for p in free], sched_ms)


def cache_slowdown(
    active_alone_ms: float, active_pair_ms: float, pair_frequency_ratio: float, l2_percent: float
) -> float:
    """alpha_cache: what one percent of the other's L2 use adds to the active time, as a fraction."""
    if l2_percent <= 0 or active_alone_ms <= 0:
        raise ProfileError("the L2 cache of the pair was not used, so nothing can be told from it")
    return (active_pair_ms * pair_frequency_ratio / active_alone_ms - 1) / l2_percent


def fit_sched(points: Sequence[GroupPoint], frequency_max_mhz: float) -> FittedLine:
    """alpha_sch, beta_sch: the added gap per kernel against the number of workloads, 2 and more."""
    alone = next((p for p in points if p.count == 1), None)
    if alone is None:
        raise ProfileError("the scheduling delay needs one workload alone to compare with")
    return fit_line(
        [
            (p.count, p.gap_ms_per_kernel * p.frequency_mhz / frequency_max_mhz - alone.gap_ms_per_kernel)
            for p in points
            if p.count > 1
        ]
    )


def fit_frequency(points: Sequence[GroupPoint], power_max_w: float, frequency_max_mhz: float) -> float:
    """alpha_f in MHz per W over the limit; 0 where nothing was throttled.

    A throttled GPU draws what it may, not what is asked of it: its demand is what the others' mean increment makes of it.
    """
    free = [p for p in points if p.frequency_mhz >= THROTTLED * frequency_max_mhz]
    throttled = [p for p in points if p.frequency_mhz < THROTTLED * frequency_max_mhz]
    if not throttled:
        return 0.0
    if len(free) < 2:
        raise ProfileError("the power demand of a throttled GPU needs two group sizes that are not throttled")
    first, last = free[0], free[-1]
    step_w = (last.power_w - first.power_w) / (last.count - first.count)
    over = [
        (last.power_w + step_w * (p.count - last.count) - power_max_w, p.frequency_mhz - frequency_max_mhz)
        for p in throttled
    ]
    weight = sum(excess_w**2 for excess_w, _ in over)
    return sum(excess_w * lost_mhz for excess_w, lost_mhz in over) / weight if weight else 0.0


def _solved(
    points: Sequence[tuple[int, float, float]], k4: float
) -> tuple[tuple[float, float, float, float], float]:
    """k1, k2, k3, k5 for a k4, and the squared error they leave."""
    rows = np.array([[b * b / (r + k4), b / (r + k4), 1 / (r + k4), 1.0] for b, r, _ in points])
    wanted = np.array([ms for _, _, ms in points])
    solution = np.linalg.lstsq(rows, wanted, rcond=None)[0]
    k1, k2, k3, k5 = (float(value) for value in solution)
    return (k1, k2, k3, k5), float(((rows @ solution - wanted) ** 2).sum())
