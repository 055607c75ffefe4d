"""One GPU under iGniter's plan, and algorithm 2: how its shares grow when a workload joins."""

from __future__ import annotations

from dataclasses import dataclass

from policies.placement.igniter_workload import GpuKind, Workload, power_slowness


@dataclass(frozen=True, slots=True)
class Joined:
    """Shares with the newcomer, in units, in the order of the residents; `growth` is their sum's."""

    units: tuple[int, ...]
    growth: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The trial ended when the shares had grown by so much: over 100 %, or as much as another GPU's."""

    growth: int
    is_full: bool


class SharedGpu:
    """Workloads and their shares in units. Sums of shares, power and cache use are kept with them."""

    __slots__ = ("cache_percent", "kind", "memory_bytes", "place", "power_w", "units", "used", "workloads")

    def __init__(self, kind: GpuKind, place: int) -> None:
        self.kind = kind
        self.place = place
        self.workloads: list[Workload] = []
        self.units: list[int] = []
        self.used = 0
        self.memory_bytes = 0
        self.power_w = 0.0
        self.cache_percent = 0.0

    @property
    def name(self) -> str:
        """For people."""
        return self.kind.name(self.place)

    def has_room(self, newcomer: Workload) -> bool:
        """Whether its memory and the newcomer's r_lower fit beside what is there."""
        return (
            self.used + newcomer.units <= self.kind.units_max
            and self.memory_bytes + newcomer.memory_bytes <= self.kind.memory_bytes
        )

    def trial(self, newcomer: Workload, growth_limit: int) -> Joined | Refused:
        """Algorithm 2: one prediction, one unit more for everybody who is late, until nobody is.

        All late ones grow together, as in the authors' code (the pseudo-code can be read as one after the
        other, which gives other plans). Stops as soon as the growth reaches `growth_limit`.
        """
        hardware = self.kind.hardware
        everybody = [workload.curves for workload in self.workloads]
        everybody.append(newcomer.curves)
        objectives_ms = [workload.objective_ms for workload in self.workloads]
        objectives_ms.append(newcomer.objective_ms)
        units = [*self.units, newcomer.units]
        growth, left = newcomer.units, self.kind.units_max - self.used
        power_w = self.power_w + newcomer.curves.power_w[newcomer.units]
        cache = self.cache_percent + newcomer.curves.cache_percent[newcomer.units]
        count = len(units)
        crowd_ms = 0.0
        if count > 1:
            crowd_ms = hardware.sched_ms_per_workload * count + hardware.sched_ms_offset
        while growth < growth_limit:
            slowness = power_slowness(hardware, power_w)
            late = []
            for place, curves in enumerate(everybody):
                own = units[place]
                others = cache - curves.cache_percent[own]
                gpu_ms = curves.sched_ms + curves.kernels * crowd_ms
                gpu_ms += curves.active_ms[own] * (1 + curves.cache_slowdown * others)
                if curves.pcie_ms + gpu_ms * slowness > objectives_ms[place]:
                    late.append(place)
            if not late:
                return Joined(tuple(units), growth)
            growth += len(late)
            if growth > left:
                return Refused(growth, is_full=True)
            for place in late:
                curves, own = everybody[place], units[place]
                power_w += curves.power_w[own + 1] - curves.power_w[own]
                cache += curves.cache_percent[own + 1] - curves.cache_percent[own]
                units[place] = own + 1
        return Refused(growth, is_full=False)

    def take(self, newcomer: Workload, units: tuple[int, ...]) -> None:
        """Host the newcomer with these shares; the sums are made anew, so that nothing drifts."""
        self.workloads.append(newcomer)
        self.units = list(units)
        self.used = sum(units)
        self.memory_bytes += newcomer.memory_bytes
        pairs = list(zip(self.workloads, units, strict=True))
        self.power_w = sum(workload.curves.power_w[own] for workload, own in pairs)
        self.cache_percent = sum(workload.curves.cache_percent[own] for workload, own in pairs)
