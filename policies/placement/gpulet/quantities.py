"""gpulet's quantities: what a batch takes on a gpulet, and which batch and duty cycle a rate gives.

With solo run time L(b, p), batching overhead o(b) and interference factor f (1 or more), a batch of b on a
gpulet of p percent is planned to take (the authors' code, `src/scheduler/latency_model.cpp`)

    L'(b, p) = 1.1 (L(b, p) + o(b) + L(b, p) (f - 1))

A gpulet is *saturated* by batches of the largest b with 2 L' ≤ SLO: a request may just miss one batch and wait
for it. A *residue* of R requests per second takes the largest b with L' + 1000 b / R ≤ SLO, once per duty cycle
of 1000 b / R. Where a single request takes too long to arrive, b = 1 is served at a duty cycle shortened to
SLO - L'(1): the low-rate rule.

The factor is linear in both sides' use of L2 cache and memory (slides, "Modeling Interference"), so it falls
apart into the gpulet's own part and the *pressure* of its neighbour: f = max(1, own(b) + pressure).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from policies.rounding import ROUNDING
from profiles.gpu import MIB
from profiles.model import ModelProfile

# The authors' constants (casys-kaist/glet, src/scheduler; `scheduler_constants` in profiles/data/gpulet_2080ti.json).
LATENCY_RATIO: Final = 1.1
IGNORED_RPS: Final = 15.0  # a rest of the inflated rate that counts as served
KNEE_MIN_GAIN: Final = 1.05
RESIDUE_SLACK: Final = 1.05  # of the SLO, for residues that a neighbour came to disturb
KEPT_FRACTION: Final = 0.85  # of the inflated rate, enough where neighbours took some
MODELS_MAX: Final = 3  # on one gpulet
USABLE_MEMORY: Final = 0.9  # of a GPU's
PARTITION_BYTES: Final = 1230 * MIB  # a process with its CUDA context
BATCH_MAX: Final = 32
SIZES: Final = (20, 40, 50, 60, 80, 100)
PAIRS: Final = ((20, 80), (40, 60), (50, 50), (100,))
WHOLE: Final = 100

INFLATION_LIMIT_RPS: Final = 550.0  # above it the authors' code takes 1.1 R
INFLATION_ABOVE: Final = 1.1
INFLATION_QUANTILE: Final = 0.99

NO_PRESSURE: Final = -math.inf


@lru_cache(maxsize=4096)
def inflated_rps(rate_rps: float) -> float:
    """The rate that is planned for: Poisson's 99th percentile plus one, above 550 a whole 1.1 R."""
    if rate_rps > INFLATION_LIMIT_RPS:
        return math.floor(INFLATION_ABOVE * rate_rps + ROUNDING)
    count, mass = 0, math.exp(-rate_rps)
    total = mass
    while total < INFLATION_QUANTILE:
        count += 1
        mass *= rate_rps / count
        total += mass
    return count + 1


@dataclass(frozen=True, eq=False, slots=True)
class SizeCosts:
    """L' of a model on gpulets of one size, every list at index b - 1.

    `alone_ms` is L' without neighbours, `solo_ms` 1.1 L; `own` and `other` the two halves of the factor, empty
    where the profile says nothing about bandwidths.
    """

    size: int
    alone_ms: Sequence[float]
    solo_ms: Sequence[float]
    own: Sequence[float]
    other: Sequence[float]

    @property
    def batch_max(self) -> int:
        """The largest batch that is planned."""
        return len(self.alone_ms)

    def exec_ms(self, batch: int, pressure: float = NO_PRESSURE) -> float:
        """L' of that batch beside that pressure."""
        alone = self.alone_ms[batch - 1]
        if pressure == NO_PRESSURE or not self.own:
            return alone
        return alone + self.solo_ms[batch - 1] * max(0.0, self.own[batch - 1] + pressure - 1)

    def pressure(self, batch: int) -> float:
        """What that batch adds to a neighbour's factor."""
        return self.other[batch - 1] if self.other else NO_PRESSURE


@lru_cache(maxsize=1024)
def size_costs(profile: ModelProfile, size: int) -> SizeCosts | None:
    """The costs on gpulets of that size, None where the profile does not know them.

    A profile that was never measured by share knows the whole GPU only: what it would take on less is no
    number that a plan should rest on.
    """
    if size < WHOLE and (profile.share_percent_min == 0 or size < profile.share_percent_min):
        return None
    table = profile.exec_table(float(size))[:BATCH_MAX]
    overhead = profile.usage.batching_overhead_ms
    solo = [LATENCY_RATIO * exec_ms for exec_ms in table]
    alone = [ms + LATENCY_RATIO * overhead[place] for place, ms in enumerate(solo)] if overhead else solo
    own, other = _factor_halves(profile, size, len(table))
    return SizeCosts(size, alone, solo, own, other)


class Saturated(NamedTuple):
    """Batches back to back. `is_in_time` False: even two of batch 1 take longer than the SLO."""

    batch: int
    exec_ms: float
    rps: float
    is_in_time: bool


def saturated(costs: SizeCosts, slo_ms: float, pressure: float = NO_PRESSURE) -> Saturated:
    """The largest b with 2 L' ≤ SLO; b = 1 where there is none (its rate then only serves to compare sizes)."""
    if pressure == NO_PRESSURE:
        return _saturated_alone(costs, slo_ms)
    return _saturated(costs, slo_ms, pressure)


@lru_cache(maxsize=65536)
def _saturated_alone(costs: SizeCosts, slo_ms: float) -> Saturated:
    return _saturated(costs, slo_ms, NO_PRESSURE)


def _saturated(costs: SizeCosts, slo_ms: float, pressure: float) -> Saturated:
    exec_ms = 0.0
    for batch in range(costs.batch_max, 0, -1):
        exec_ms = costs.exec_ms(batch, pressure)
        if 2 * exec_ms <= slo_ms:
            return Saturated(batch, exec_ms, 1000 * batch / exec_ms, is_in_time=True)
    return Saturated(1, exec_ms, 1000 / exec_ms, is_in_time=False)


class Residue(NamedTuple):
    """One batch per duty cycle."""

    batch: int
    duty_ms: float
    exec_ms: float


def residue(
    costs: SizeCosts,
    slo_ms: float,
    rps: float,
    pressure: float = NO_PRESSURE,
    batch_max: int = BATCH_MAX,
    slack: float = 1.0,
) -> Residue | None:
    """The largest b up to `batch_max` that carries `rps` within `slack` SLOs, None where none does.

    No batch takes longer than its duty cycle.
    """
    limit_ms = slo_ms * slack
    one_ms = 1000 / rps
    # Batches whose cycle alone is too long need not be looked at.
    first = min(batch_max, costs.batch_max, max(1, int(limit_ms / one_ms)))
    for batch in range(first, 0, -1):
        duty_ms = batch * one_ms
        exec_ms = costs.exec_ms(batch, pressure)
        if exec_ms <= duty_ms and exec_ms + duty_ms <= limit_ms:
            return Residue(batch, duty_ms, exec_ms)
    exec_ms = costs.exec_ms(1, pressure)
    duty_ms = slo_ms - exec_ms
    if exec_ms <= duty_ms <= one_ms:
        return Residue(1, duty_ms, exec_ms)
    return None


def knee(throughput_rps: Mapping[int, float]) -> int:
    """p_eff, the most efficient size ("MaxEfficientPartition", figure 9).

    Over consecutive sizes below the whole GPU, the upper end of the step that gains most per percent, steps of
    less than 5 % aside; the smallest size where no step gains. `throughput_rps` is by size, saturated.
    """
    sizes = sorted(size for size in throughput_rps if size < WHOLE)
    if not sizes:
        return WHOLE
    best, best_gain = sizes[0], 0.0
    for high, low in reversed(list(zip(sizes[1:], sizes, strict=False))):
        gain = (throughput_rps[high] - throughput_rps[low]) / (high - low)
        if throughput_rps[high] >= KNEE_MIN_GAIN * throughput_rps[low] and gain > best_gain:
            best, best_gain = high, gain
    return best


def _factor_halves(profile: ModelProfile, size: int, batches: int) -> tuple[Sequence[float], Sequence[float]]:
    """The halves of the factor by batch; the constant is in the first."""
    table = profile.usage.bandwidths
    if table is None:
        return (), ()
    linear = table.linear
    scale = size / 100 / 100 if linear.is_scaled_by_share else 1 / 100
    own, other = [], []
    for batch in range(1, batches + 1):
        used = table.at(batch, float(size))
        l2, dram = used.l2_percent * scale, used.dram_percent * scale
        own.append(linear.constant + linear.l2_self * l2 + linear.dram_self * dram)
        other.append(linear.l2_other * l2 + linear.dram_other * dram)
    return own, other
