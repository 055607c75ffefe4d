"""iGniter's start values (theorem 1): the batch that just meets the rate, and the least share that runs it in time.

The objective is half the SLO: the other half is for the batch to form and to wait (equation 14). With
R the rate, S the objective, B the PCIe bandwidth and d the bytes of a request:

    b_appr  = ceil(S R B / (B + R d_load))                                  (17)
    r_lower = ceil((work / left - k4) / unit) unit                          (18)
              or the smallest share that was profiled
    work    = k1 b² + k2 b + k3
    left    = S - (d_load + d_feedback) b / B - k5 - k_sch n_k

Shares are whole numbers of units (2.5 % on a V100): sums of them are exact. Three cases that the paper leaves
open: a batch over the largest one profiled is that one, with the objective tightened until the throughput meets
the rate; a workload that needs more than a whole GPU takes dedicated ones at nine tenths of what they carry,
and its remainder is placed like any other; no time left at every batch is a refusal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from policies.placement.common.base import WHOLE_PERCENT, GpuSlot, PlacedModelInput
from policies.rounding import ROUNDING
from profiles.igniter.performance_model import (
    Coefficients,
    Hardware,
    IgniterProfile,
    Resident,
    predict_ms,
)

_DEDICATED_LOAD = 0.9  # of a whole GPU's throughput, as the authors' code has it


@dataclass(frozen=True, slots=True, eq=False)
class IgniterGpuKind:
    """GPUs that are planned alike: type, device, what iGniter knows of them, and the slots in file order.

    Coarser than `GpuKind` on purpose, as iGniter plans on a type: what they differ in besides is memory,
    of which `memory_bytes` is what every one has, and the price, where the first one's counts.
    `units_max`: units of a whole GPU.
    """

    gpu_type: str
    device: str
    hardware: Hardware
    slots: tuple[GpuSlot, ...]
    units_max: int = field(init=False)
    memory_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        units_max = int(WHOLE_PERCENT / self.hardware.share_step_percent + ROUNDING)
        object.__setattr__(self, "units_max", units_max)
        object.__setattr__(self, "memory_bytes", min(slot.memory_bytes for slot in self.slots))

    def percent(self, units: int) -> float:
        """Units as a share."""
        return min(WHOLE_PERCENT, units * self.hardware.share_step_percent)

    def name(self, place: int) -> str:
        """The GPU at that place of a plan, for people; a plan may want more than there are."""
        if place < len(self.slots):
            return f"GPU {self.slots[place].index}"
        return f"a further {self.gpu_type} ({place + 1 - len(self.slots)})"


@dataclass(frozen=True, slots=True)
class Curves:
    """A model at one batch size.

    `rows[u]` is what u units of share make of it: active time in ms, use of the cache in percent, power in W;
    index 0 stands for nothing.
    """

    rows: tuple[tuple[float, float, float], ...]
    pcie_ms: float
    kernels: float
    sched_ms: float
    cache_slowdown: float


@dataclass(frozen=True, slots=True)
class IgniterWorkload:
    """A model, or one replica's part of its rate, ready to be packed. `units` is r_lower.

    `alone_units`: what it takes on a GPU of its own, the drop of the frequency included.
    """

    model: PlacedModelInput
    coefficients: Coefficients
    curves: Curves
    rate_rps: float
    batch_size: int
    objective_ms: float
    units: int
    alone_units: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class GpuDemand:
    """What a model wants of a kind of GPU; `missing_rps` is more than all of them could carry."""

    workloads: tuple[IgniterWorkload, ...]
    missing_rps: float = 0.0


def demand_of(model: PlacedModelInput, profile: IgniterProfile, kind: IgniterGpuKind) -> GpuDemand | str:
    """Theorem 1 for a model with a rate over 0, or why no share of such a GPU serves it."""
    rate_rps = model.rate_rps or 0.0
    one = _workload(model, profile, kind, rate_rps, profile.batch_size_max)
    if one is not None:
        return GpuDemand((one,))
    batch_size = _largest_batch(profile, model.slo_ms / 2)
    if batch_size == 0:
        return (
            f"half its SLO, {model.slo_ms / 2:g} ms, is not over the {modelled_ms(profile, 1):.2f} ms "
            f"of a single request on a whole {kind.gpu_type}"
        )
    most_rps = throughput_rps(profile, batch_size, modelled_ms(profile, batch_size))
    capacity_rps = min(most_rps, math.ceil(_DEDICATED_LOAD * most_rps))
    wanted = math.ceil(rate_rps / capacity_rps - ROUNDING) - 1
    count = min(wanted, len(kind.slots))
    whole = _whole(model, profile, kind, capacity_rps, batch_size)
    if count < wanted:
        return GpuDemand((whole,) * count, rate_rps - count * capacity_rps)
    rest_rps = rate_rps - count * capacity_rps
    rest = _workload(model, profile, kind, rest_rps, profile.batch_size_max) or _workload(
        model, profile, kind, rest_rps, batch_size
    )
    return GpuDemand((whole,) * count + ((rest,) if rest is not None else ()))


def throughput_rps(profile: IgniterProfile, batch_size: int, latency_ms: float) -> float:
    """Requests per second while the next batch loads as this one runs (equation 2)."""
    load_ms = profile.coefficients.load_bytes * batch_size / profile.hardware.pcie_bytes_per_ms
    return 1000 * batch_size / (latency_ms - load_ms)


def memory_of(model: PlacedModelInput, profile: IgniterProfile, batch_size: int) -> int:
    """What a replica with batches of that size takes of a GPU's memory."""
    return profile.memory_bytes(batch_size) if model.memory_bytes is None else model.memory_bytes


def modelled_ms(profile: IgniterProfile, batch_size: int, share_percent: float = WHOLE_PERCENT) -> float:
    """Latency alone by the performance model, which need not be what the profile's own table measured."""
    return predict_ms(profile.hardware, [Resident(profile.coefficients, batch_size, share_percent)])[0]


def by_need(workloads: Sequence[IgniterWorkload]) -> list[IgniterWorkload]:
    """The order in which they are placed: r_lower descending, equals as they came (algorithm 1, line 3)."""
    return sorted(workloads, key=lambda workload: -workload.units)


def _workload(
    model: PlacedModelInput,
    profile: IgniterProfile,
    kind: IgniterGpuKind,
    rate_rps: float,
    batch_size_max: int,
) -> IgniterWorkload | None:
    """Theorem 1 with batches up to that size; None where a whole GPU is not enough."""
    own, hardware = profile.coefficients, profile.hardware
    objective_ms, rate_per_ms, pcie = model.slo_ms / 2, rate_rps / 1000, hardware.pcie_bytes_per_ms
    wanted = objective_ms * rate_per_ms * pcie / (pcie + rate_per_ms * own.load_bytes)
    batch_size = max(1, math.ceil(wanted - ROUNDING))
    if batch_size > batch_size_max:
        batch_size = batch_size_max
        objective_ms = min(objective_ms, batch_size / rate_per_ms + batch_size * own.load_bytes / pcie)
    _, _, _, k4, k5 = own.active
    curves = curves_of(hardware, own, batch_size, kind.units_max)
    left_ms = objective_ms - curves.pcie_ms - k5 - curves.sched_ms
    if left_ms <= 0:
        return None
    percent = max(own.work(batch_size) / left_ms - k4, profile.share_percent_min)
    units = max(1, math.ceil(percent / hardware.share_step_percent - ROUNDING))
    alone = next(
        (u for u in range(units, kind.units_max + 1) if alone_ms(hardware, curves, u) <= objective_ms), None
    )
    if alone is None:
        return None
    memory_bytes = memory_of(model, profile, batch_size)
    return IgniterWorkload(model, own, curves, rate_rps, batch_size, objective_ms, units, alone, memory_bytes)


def _whole(
    model: PlacedModelInput, profile: IgniterProfile, kind: IgniterGpuKind, rate_rps: float, batch_size: int
) -> IgniterWorkload:
    """A dedicated GPU."""
    curves = curves_of(profile.hardware, profile.coefficients, batch_size, kind.units_max)
    memory_bytes = memory_of(model, profile, batch_size)
    return IgniterWorkload(
        model,
        profile.coefficients,
        curves,
        rate_rps,
        batch_size,
        model.slo_ms / 2,
        kind.units_max,
        kind.units_max,
        memory_bytes,
    )


def _largest_batch(profile: IgniterProfile, objective_ms: float) -> int:
    """The largest batch that a whole GPU ends before the objective, 0 for none."""
    sizes = range(profile.batch_size_max, 0, -1)
    return next((b for b in sizes if modelled_ms(profile, b) < objective_ms), 0)


def alone_ms(hardware: Hardware, curves: Curves, units: int) -> float:
    """Latency without neighbours."""
    active_ms, _, power_w = curves.rows[units]
    return curves.pcie_ms + (curves.sched_ms + active_ms) * hardware.slowness(power_w)


@lru_cache(maxsize=4096)
def curves_of(hardware: Hardware, own: Coefficients, batch_size: int, units_max: int) -> Curves:
    """What equations 3, 5 and 11 say for every share; the same for all workloads of a model and batch."""
    shares = (min(WHOLE_PERCENT, u * hardware.share_step_percent) for u in range(1, units_max + 1))
    at = [Resident(own, batch_size, share) for share in shares]
    rows = [(r.active_ms, r.cache_percent, r.power_w) for r in at]
    return Curves(
        rows=((math.inf, 0.0, 0.0), *rows),
        pcie_ms=own.pcie_ms(batch_size, hardware),
        kernels=own.kernels,
        sched_ms=own.sched_ms(),
        cache_slowdown=own.cache_slowdown_per_percent,
    )
