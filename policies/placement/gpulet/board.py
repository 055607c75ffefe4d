"""The board that gpulet plans on: GPUs cut into at most two gpulets, and what each of them carries.

Values throughout: a gpulet is replaced, never changed, so an attempt is undone by going back to the old board.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from policies.placement.common.gpu_kinds import GpuKind
from policies.placement.gpulet.quantities import (
    IGNORED_RPS,
    KEPT_FRACTION,
    NO_PRESSURE,
    PARTITION_BYTES,
    USABLE_MEMORY,
    WHOLE,
    SizeCosts,
    knee,
    saturated,
)

_ROUNDING = 1e-6  # requests per second

CostKind = tuple[str, str]
"""GPU type and device. Coarser than `GpuKind` on purpose: a model costs the same whatever else a GPU has."""


def cost_kind(kind: GpuKind) -> CostKind:
    """What tells two GPUs apart for the costs of a model."""
    return kind.gpu_type, kind.device


@dataclass(frozen=True, eq=False, slots=True)
class ModelDemand:
    """A model to place: `rps` is its inflated rate, `stated_rps` its own; costs by GPU kind and size."""

    place: int
    slo_ms: float
    rps: float
    stated_rps: float
    costs: Mapping[CostKind, Mapping[int, SizeCosts]]
    memory_bytes: Mapping[CostKind, int]
    p_eff: Mapping[CostKind, int] = field(init=False)

    def __post_init__(self) -> None:
        sizes = {
            kind: knee({size: saturated(costs, self.slo_ms).rps for size, costs in by_size.items()})
            for kind, by_size in self.costs.items()
        }
        object.__setattr__(self, "p_eff", sizes)

    @property
    def ignored_rps(self) -> float:
        """What may stay unserved: 15 requests per second, but never of those that were stated."""
        return min(IGNORED_RPS, self.rps - self.stated_rps)


class GpuletLoad(NamedTuple):
    """A model on a gpulet: the batch that runs once per duty cycle, its L', and the rate it carries."""

    demand: ModelDemand
    costs: SizeCosts
    batch: int
    exec_ms: float
    rps: float


class Gpulet(NamedTuple):
    """A share of one GPU, in percent; saturated: batches back to back, its duty cycle is one batch."""

    size: int
    duty_ms: float = 0.0
    loads: tuple[GpuletLoad, ...] = ()
    is_saturated: bool = False

    @property
    def occupancy(self) -> float:
        """The part of its time in which it computes."""
        return sum(load.exec_ms for load in self.loads) / self.duty_ms if self.loads else 0.0

    @property
    def pressure(self) -> float:
        """The most that one of its models adds to the neighbour's interference factor."""
        return max((load.costs.pressure(load.batch) for load in self.loads), default=NO_PRESSURE)


class Spot(NamedTuple):
    """A gpulet's place on the board."""

    gpu: int
    part: int


@dataclass(slots=True)
class Board:
    """The gpulets of each GPU; a GPU that is not cut has one of 100 %."""

    kinds: Sequence[GpuKind]
    has_interference: bool
    gpulets: list[tuple[Gpulet, ...]]
    _carried: dict[ModelDemand, float] = field(default_factory=dict)

    @classmethod
    def of(cls, kinds: Sequence[GpuKind], *, has_interference: bool = False) -> Board:
        """An empty board, no GPU cut."""
        return cls(kinds, has_interference, [(Gpulet(WHOLE),)] * len(kinds))

    def copy(self) -> Board:
        """A board to try something on."""
        gpulets, carried = list(self.gpulets), dict(self._carried)
        return Board(self.kinds, self.has_interference, gpulets, carried)

    def adopt(self, other: Board) -> None:
        """What was tried on a copy holds."""
        self.gpulets, self._carried = other.gpulets, other._carried

    def set(self, gpu: int, gpulets: tuple[Gpulet, ...]) -> None:
        """Replace the gpulets of a GPU."""
        for gpulet in self.gpulets[gpu]:
            for load in gpulet.loads:
                self._carried[load.demand] -= load.rps
        for gpulet in gpulets:
            for load in gpulet.loads:
                self._carried[load.demand] = self._carried.get(load.demand, 0.0) + load.rps
        self.gpulets[gpu] = gpulets

    def spots(self) -> Iterator[tuple[Spot, Gpulet]]:
        """Every gpulet, by GPU."""
        for gpu, gpulets in enumerate(self.gpulets):
            for index, gpulet in enumerate(gpulets):
                yield Spot(gpu, index), gpulet

    def empty_spots(self) -> list[tuple[Spot, Gpulet]]:
        """The gpulets that carry nothing, the largest first, of equals the first GPU's."""
        empty = [(spot, gpulet) for spot, gpulet in self.spots() if not gpulet.loads]
        empty.sort(key=lambda entry: -entry[1].size)
        return empty

    def neighbour(self, spot: Spot) -> Gpulet | None:
        """The other gpulet of the GPU, where it carries something."""
        for index, gpulet in enumerate(self.gpulets[spot.gpu]):
            if index != spot.part and gpulet.loads:
                return gpulet
        return None

    def pressure_on(self, spot: Spot) -> float:
        """What the neighbour adds to the interference factor there."""
        neighbour = self.neighbour(spot) if self.has_interference else None
        return NO_PRESSURE if neighbour is None else neighbour.pressure

    def cost_kind(self, gpu: int) -> CostKind:
        """What models' costs on that GPU are listed under."""
        return cost_kind(self.kinds[gpu])

    def costs(self, demand: ModelDemand, gpu: int) -> Mapping[int, SizeCosts]:
        """The model's costs by size on that GPU; empty where it cannot run there."""
        return demand.costs.get(self.cost_kind(gpu), {})

    def has_room(self, demand: ModelDemand, spot: Spot) -> bool:
        """The model's memory, and a context's where the gpulet is not in use yet, still fit."""
        kind = self.cost_kind(spot.gpu)
        needed = demand.memory_bytes[kind]
        for index, gpulet in enumerate(self.gpulets[spot.gpu]):
            if gpulet.loads or index == spot.part:
                needed += PARTITION_BYTES
            needed += sum(load.demand.memory_bytes[kind] for load in gpulet.loads)
        return needed <= USABLE_MEMORY * self.kinds[spot.gpu].memory_bytes

    def cut(self, spot: Spot, size: int) -> None:
        """Cut a whole GPU into `size` and the rest; the spot is then the first part."""
        if size < WHOLE:
            self.set(spot.gpu, (Gpulet(size), Gpulet(WHOLE - size)))

    def put(self, spot: Spot, gpulet: Gpulet, neighbour: Gpulet | None = None) -> None:
        """Replace what is there, and what is beside it."""
        changed = [
            neighbour if neighbour is not None and other.loads else other for other in self.gpulets[spot.gpu]
        ]
        changed[spot.part] = gpulet
        self.set(spot.gpu, tuple(changed))

    def rejoin_empty(self) -> None:
        """A GPU whose gpulets are all empty is whole again."""
        for gpu, gpulets in enumerate(self.gpulets):
            if len(gpulets) > 1 and not any(gpulet.loads for gpulet in gpulets):
                self.set(gpu, (Gpulet(WHOLE),))

    def carried_rps(self, demand: ModelDemand) -> float:
        """What all gpulets carry of the model's rate."""
        return self._carried.get(demand, 0.0)

    def missing_rps(self, demand: ModelDemand) -> float:
        """What still has no place; 0 where the rest is small enough to be ignored."""
        carried = self.carried_rps(demand)
        missing = demand.rps - carried
        return missing if carried < _ROUNDING or missing > demand.ignored_rps + _ROUNDING else 0.0

    def is_served(self, demand: ModelDemand) -> bool:
        """The final verdict: with interference 85 % of the inflated rate are enough, if the stated one is in."""
        if self.missing_rps(demand) == 0:
            return True
        wanted = max(KEPT_FRACTION * demand.rps, demand.stated_rps)
        return self.has_interference and self.carried_rps(demand) >= wanted - _ROUNDING
