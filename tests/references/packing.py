"""Nexus' squishy bin packing, read from Symphony section 2.2 and ADR 0013: plain lists and linear searches.

A model that fills slices gets them for itself, each with the largest batch B of 2·l(B) <= SLO. What is left of a model
runs the largest batch b with l(b) + b/r <= SLO once per b/r. Left-overs share a slice while, at the shortest of their
cycles, all their batches fit into the cycle and each finishes within its SLO; the fullest slice that takes one gets it.
A left-over is more than a slower slice carries: then it fills that one and goes on with the rest.
Of free slices a model takes none on which one request is late, the only slice of another model last, and before that the
ones that can serve the fewest models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Demand:
    model: str
    slo_ms: float
    rate: float  # a millisecond


@dataclass
class Shared:
    """A slice and the left-overs on it."""

    name: str
    demands: list[Demand] = field(default_factory=list)


def fits(demands: Sequence[Demand], slices: Mapping[str, Mapping[str, Sequence[float]]]) -> bool:
    """Whether the packing finds room for all of them."""
    serves = {
        name: {
            demand.model
            for demand in demands
            if runs.get(demand.model, [demand.slo_ms * 2])[0] <= demand.slo_ms
        }
        for name, runs in slices.items()
    }
    wanted = {
        name: (any(sum(model in other for other in serves.values()) == 1 for model in own), len(own))
        for name, own in serves.items()
    }
    free = sorted(slices, key=lambda name: wanted[name])
    left: list[tuple[float, Demand]] = []
    for demand in demands:
        rate = demand.rate
        while rate > 1e-12:
            name = next((name for name in free if demand.model in serves[name]), None)
            if name is None:
                if any(demand.model in own for own in serves.values()):
                    return False
                break
            run_ms = slices[name][demand.model]
            most = most_per_ms(run_ms, demand.slo_ms)
            if rate < most:
                rest = Demand(demand.model, demand.slo_ms, rate)
                left.append((alone(rest, run_ms)[1] / alone(rest, run_ms)[0], rest))
                break
            rate -= most
            free.remove(name)
    left.sort(key=lambda pair: (-pair[0], pair[1].model))
    shared: list[Shared] = []
    for _, demand in left:
        filled = [
            (full, one)
            for one in shared
            if demand.model in slices[one.name]
            and (full := fullness([*one.demands, demand], slices[one.name])) is not None
        ]
        if filled:
            best = max(filled, key=lambda pair: pair[0])[1]
            best.demands.append(demand)
            continue
        over = demand.rate
        for name in [name for name in free if demand.model in serves[name]]:
            free.remove(name)
            most = most_per_ms(slices[name][demand.model], demand.slo_ms)
            if over <= most:
                shared.append(Shared(name, [Demand(demand.model, demand.slo_ms, over)]))
                break
            over -= most
        else:
            return False
    return True


def most_per_ms(run_ms: Sequence[float], slo_ms: float) -> float:
    """What a slice carries that has a model to itself."""
    size = sum(2 * ms <= slo_ms for ms in run_ms) or 1
    return size / run_ms[size - 1]


def alone(demand: Demand, run_ms: Sequence[float]) -> tuple[float, float]:
    """Cycle and run of a left-over that has a slice for itself."""
    sizes = [size for size, ms in enumerate(run_ms, start=1) if ms + size / demand.rate <= demand.slo_ms]
    if not sizes:
        return max(demand.slo_ms - run_ms[0], run_ms[0]), run_ms[0]
    return max(sizes) / demand.rate, run_ms[max(sizes) - 1]


def fullness(demands: Sequence[Demand], tables: Mapping[str, Sequence[float]]) -> float | None:
    """The part of the shortest cycle in which a slice runs; None: they do not fit together."""
    cycle_ms = min(alone(demand, tables[demand.model])[0] for demand in demands)
    total_ms = 0.0
    for demand in demands:
        size = max(1, math.ceil(cycle_ms * demand.rate - 1e-9))
        run_ms = tables[demand.model]
        if size > len(run_ms) or cycle_ms + run_ms[size - 1] > demand.slo_ms + 1e-9:
            return None
        total_ms += run_ms[size - 1]
    return total_ms / cycle_ms if total_ms <= cycle_ms else None
