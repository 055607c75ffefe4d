"""One GPU under iGniter's plan, and algorithm 2: how its shares grow when a workload joins."""

from __future__ import annotations

from dataclasses import dataclass

from policies.placement.igniter.workload import IgniterGpuKind, IgniterWorkload

_Terms = tuple[tuple[tuple[float, float, float], ...], float, float, float, float]
"""Of a workload, what a prediction reads: rows, launch delay, kernels, slowdown by cache, time left on the GPU."""


@dataclass(frozen=True, slots=True)
class Joined:
    """Shares with the newcomer, in units, in the order of the residents; `growth` is their sum's."""

    units: tuple[int, ...]
    growth: int


@dataclass(frozen=True, slots=True)
class TrialFailed:
    """The trial ended when the shares had grown by so much: over 100 %, or as much as another GPU's."""

    growth: int
    is_full: bool


class SharedGpu:
    """Workloads and their shares in units. Sums of shares, power and cache use are kept with them."""

    __slots__ = (
        "_terms",
        "cache_percent",
        "kind",
        "memory_bytes",
        "place",
        "power_w",
        "units",
        "used",
        "workloads",
    )

    def __init__(self, kind: IgniterGpuKind, place: int) -> None:
        self.kind = kind
        self.place = place
        self.workloads: list[IgniterWorkload] = []
        self.units: list[int] = []
        self.used = 0
        self.memory_bytes = 0
        self.power_w = 0.0
        self.cache_percent = 0.0
        self._terms: list[_Terms] = []

    @property
    def name(self) -> str:
        """For people."""
        return self.kind.name(self.place)

    def has_room(self, newcomer: IgniterWorkload) -> bool:
        """Whether its memory and the newcomer's r_lower fit beside what is there."""
        return (
            self.used + newcomer.units <= self.kind.units_max
            and self.memory_bytes + newcomer.memory_bytes <= self.kind.memory_bytes
        )

    def trial(self, newcomer: IgniterWorkload, growth_limit: int) -> Joined | TrialFailed:
        """Algorithm 2: one prediction, one unit more for everybody who is late, until nobody is.

        All late ones grow together, as in the authors' code (the pseudo-code can be read as one after the
        other, which gives other plans). Stops as soon as the growth reaches `growth_limit`. Equations 4, 5 and 8 are
        written out over the tabulated rows: planning takes its time here.
        """
        hardware = self.kind.hardware
        everybody = [*self._terms, _terms(newcomer)]
        units = [*self.units, newcomer.units]
        growth, left = newcomer.units, self.kind.units_max - self.used
        crowd_ms = hardware.crowd_ms(len(units))
        _, cache_percent, power_w = newcomer.curves.rows[newcomer.units]
        cache_percent += self.cache_percent
        power_w += self.power_w
        while growth < growth_limit:
            slowness = hardware.slowness(power_w)
            late = []
            for place, (rows, sched_ms, kernels, cache_slowdown, budget_ms) in enumerate(everybody):
                active_ms, own_cache, _ = rows[units[place]]
                active_ms *= 1 + cache_slowdown * (cache_percent - own_cache)
                if (sched_ms + kernels * crowd_ms + active_ms) * slowness > budget_ms:
                    late.append(place)
            if not late:
                return Joined(tuple(units), growth)
            growth += len(late)
            if growth > left:
                return TrialFailed(growth, is_full=True)
            for place in late:
                rows, own = everybody[place][0], units[place]
                _, cache_before, power_before = rows[own]
                _, cache_after, power_after = rows[own + 1]
                cache_percent += cache_after - cache_before
                power_w += power_after - power_before
                units[place] = own + 1
        return TrialFailed(growth, is_full=False)

    def take(self, newcomer: IgniterWorkload, units: tuple[int, ...]) -> None:
        """Host the newcomer with these shares; the sums are made anew, so that nothing drifts."""
        self.workloads.append(newcomer)
        self.units = list(units)
        self.used = sum(units)
        self.memory_bytes += newcomer.memory_bytes
        self._terms.append(_terms(newcomer))
        rows = [workload.curves.rows[own] for workload, own in zip(self.workloads, units, strict=True)]
        self.cache_percent = sum(row[1] for row in rows)
        self.power_w = sum(row[2] for row in rows)


def _terms(workload: IgniterWorkload) -> _Terms:
    curves = workload.curves
    budget_ms = workload.objective_ms - curves.pcie_ms
    return curves.rows, curves.sched_ms, curves.kernels, curves.cache_slowdown, budget_ms
