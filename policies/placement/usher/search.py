"""The configuration of a group: the first of the best among all, without simulating all.

A group of four models has up to 36 options each, 1.7 million configurations. The rule is plain: enumerate
them with the last model's options changing fastest, place each, keep the first with the highest value. The
search gets the same answer with fewer placements:

- Each configuration has an upper bound. It is the smaller of what its degrees could serve and of what the
  free compute could serve if replicas could be cut into pieces (a fractional knapsack, filled by goodput per
  Creq; a replica that can share no GPU with anything counts as a whole one).
- Configurations are placed by falling bound, in chunks. The search stops when no bound left is above the best
  value, or none that equals it comes earlier in the enumeration: so when all rates are met, early.

Values are whole millionths of a request per second, and the two halves of the bound never round below them:
what is skipped could not have won, and ties are the same with and without the search. Dropping an option that
another one dominates (more goodput for less of both) would not be exact, although it looks so: a larger
requirement places a model earlier, and that can be worth more (figure 5.5 lives from it).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from policies.placement.common.demands import WHOLE_UNITS
from policies.placement.usher.configurations import ModelOptions, ReplicaOption
from policies.placement.usher.interleaving import Placed, Room, Rows, Units, place_rows

CONFIGURATIONS_MAX = 36**4
_CHUNK = 4096
_BOUND_CHUNK = 65_536
_VALUES_PER_RPS = 1_000_000
_ALL_MET = 10**15  # above any goodput: a growing cluster first meets all rates, then adds little
_RUNNERS_UP = 3

Values = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Tried:
    """A configuration and what it came to. `goodput_rps` is the group's; `added_gpus` were not used before."""

    options: tuple[ReplicaOption, ...]
    goodput_rps: float
    added_gpus: int


@dataclass(frozen=True, slots=True)
class FoundConfiguration:
    """The configuration chosen, where its replicas go (one set of GPU places per model), and the next best."""

    tried: Tried
    hosts: tuple[tuple[int, ...], ...]
    room: Room
    runners_up: tuple[Tried, ...]
    configurations: int
    placed: int


def best_configuration(
    candidates: Sequence[ModelOptions], room: Room, *, is_growing: bool
) -> FoundConfiguration:
    """The first of the best. Every candidate has an option; their product is at most CONFIGURATIONS_MAX.

    In a fixed cluster the best is the highest expected goodput, in a growing one the fewest added GPUs
    among those that meet all rates, and the highest goodput where none does.
    """
    table = _Table(candidates, room, is_growing=is_growing)
    bounds = table.bounds()
    order = np.argsort(-bounds, kind="stable")
    earliest_left = np.minimum.accumulate(order[::-1])[::-1]
    leaders: list[tuple[int, int]] = []  # (-value, configuration), the best first
    done = 0
    while done < len(order):
        if leaders:
            value, first = -leaders[0][0], leaders[0][1]
            bound = bounds[order[done]]
            if bound < value or (bound == value and first < earliest_left[done]):
                break
        chosen = order[done : done + _CHUNK]
        values = table.values(chosen)
        best = np.lexsort((chosen, -values))[: _RUNNERS_UP + 1]
        leaders += [(-int(values[place]), int(chosen[place])) for place in best]
        leaders = sorted(leaders)[: _RUNNERS_UP + 1]
        done += len(chosen)
    return table.found([configuration for _, configuration in leaders], done)


class _Table:
    """A group's configurations as numbers: configuration → options → arrays."""

    def __init__(self, candidates: Sequence[ModelOptions], room: Room, *, is_growing: bool) -> None:
        self._candidates = candidates
        self._room = room
        self._is_growing = is_growing
        self._shape = tuple(len(candidate.options) for candidate in candidates)
        assert math.prod(self._shape) <= CONFIGURATIONS_MAX, "groups have at most four models"
        self._rates = np.array([candidate.rate_rps for candidate in candidates])
        self._degrees = [np.array([o.degree for o in c.options], dtype=np.int64) for c in candidates]
        self._compute = [
            np.array([o.demand.compute_units for o in c.options], dtype=np.int64) for c in candidates
        ]
        self._memory = [
            np.array([o.demand.memory_units for o in c.options], dtype=np.int64) for c in candidates
        ]
        self._rps = [np.array([o.demand.throughput_rps for o in c.options]) for c in candidates]

    def bounds(self) -> Values:
        """An upper bound on each configuration's value."""
        total = math.prod(self._shape)
        chunks = (
            self._bounds(np.arange(start, min(start + _BOUND_CHUNK, total)))
            for start in range(0, total, _BOUND_CHUNK)
        )
        return np.concatenate(list(chunks))

    def values(self, configurations: Units) -> Values:
        """What each is worth, placed."""
        rows, rps = self._rows(configurations)
        placed = place_rows(rows, self._room)
        goodput = self._goodput(placed.replicas, rps)
        if not self._is_growing:
            return goodput
        is_met = self._is_met(placed.replicas, rps)
        return np.where(is_met, _ALL_MET - self._added(placed), goodput)

    def found(self, configurations: Sequence[int], placed_count: int) -> FoundConfiguration:
        """The first of `configurations` with its places, the others beside it."""
        chosen = np.array(configurations, dtype=np.int64)
        rows, rps = self._rows(chosen)
        placed = place_rows(rows, self._room)
        goodput, added = self._goodput(placed.replicas, rps), self._added(placed)
        tried = [
            Tried(self._options(configuration), int(goodput[place]) / _VALUES_PER_RPS, int(added[place]))
            for place, configuration in enumerate(configurations)
        ]
        hosts = placed.hosts[0]
        room = Room(
            self._room.compute - (hosts * rows.compute[0][:, None]).sum(axis=0),
            self._room.memory - (hosts * rows.memory[0][:, None]).sum(axis=0),
            self._room.is_used | hosts.any(axis=0),
        )
        places = tuple(tuple(int(gpu) for gpu in np.flatnonzero(row)) for row in hosts)
        return FoundConfiguration(
            tried[0], places, room, tuple(tried[1:]), math.prod(self._shape), placed_count
        )

    def _rows(self, configurations: Units) -> tuple[Rows, npt.NDArray[np.float64]]:
        chosen = np.unravel_index(configurations, self._shape)
        rows = Rows(_pick(self._degrees, chosen), _pick(self._compute, chosen), _pick(self._memory, chosen))
        return rows, np.stack(
            [values[places] for values, places in zip(self._rps, chosen, strict=True)], axis=1
        )

    def _options(self, configuration: int) -> tuple[ReplicaOption, ...]:
        chosen = np.unravel_index(configuration, self._shape)
        return tuple(c.options[int(place)] for c, place in zip(self._candidates, chosen, strict=True))

    def _goodput(self, replicas: Units, rps: npt.NDArray[np.float64]) -> Values:
        served: npt.NDArray[np.float64] = np.minimum(self._rates, replicas * rps).sum(axis=1)
        return np.rint(served * _VALUES_PER_RPS).astype(np.int64)

    def _is_met(self, replicas: Units, rps: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
        missing = np.maximum(0.0, self._rates - replicas * rps)
        return np.asarray((missing * _VALUES_PER_RPS < 0.5).all(axis=1))

    def _added(self, placed: Placed) -> Values:
        is_taken = placed.hosts.any(axis=1) & ~self._room.is_used
        count: Values = is_taken.sum(axis=1, dtype=np.int64)
        return count

    def _bounds(self, configurations: Units) -> Values:
        rows, rps = self._rows(configurations)
        by_degree = self._goodput(rows.degrees, rps)
        by_compute = self._by_compute(rows, rps)
        bounds = np.minimum(by_degree, by_compute)
        if not self._is_growing:
            return bounds
        is_met = self._is_met(rows.degrees, rps)
        whole = self._whole(rows)
        free = int(self._room.compute[self._room.is_used].sum())
        needed = np.maximum(0, (rows.degrees * whole).sum(axis=1) - free)
        added = -(-needed // WHOLE_UNITS)
        return np.where(is_met, _ALL_MET - added, bounds)

    def _by_compute(self, rows: Rows, rps: npt.NDArray[np.float64]) -> Values:
        """The fractional knapsack over all free compute, rounded up."""
        each = self._whole(rows) / WHOLE_UNITS
        most = np.minimum(rows.degrees, self._rates / rps)
        with np.errstate(divide="ignore"):
            order = np.argsort(-rps / each, axis=1)
        each, most, rps = (np.take_along_axis(a, order, axis=1) for a in (each, most, rps))
        left = np.full(len(rps), self._room.compute.sum() / WHOLE_UNITS)
        served = np.zeros(len(rps))
        for place in range(rps.shape[1]):
            with np.errstate(divide="ignore", invalid="ignore"):
                fitting = np.where(each[:, place] > 0, left / each[:, place], np.inf)
            taken = np.minimum(most[:, place], fitting)
            served += taken * rps[:, place]
            left = np.maximum(0.0, left - taken * each[:, place])
        return np.ceil(served * _VALUES_PER_RPS * (1 + 1e-12)).astype(np.int64) + 1

    def _whole(self, rows: Rows) -> Units:
        """Compute that a replica takes at least: a whole GPU where it shares one with nothing."""
        used = self._room.is_used
        fits_used = (
            (self._room.compute[used] >= rows.compute[..., None])
            & (self._room.memory[used] >= rows.memory[..., None])
        ).any(axis=2)
        is_alone: npt.NDArray[np.bool_] = np.logical_not(fits_used)
        models = rows.compute.shape[1]
        for i in range(models):
            for j in range(models):
                if i != j:
                    is_alone[:, i] &= (rows.compute[:, i] + rows.compute[:, j] > WHOLE_UNITS) | (
                        rows.memory[:, i] + rows.memory[:, j] > WHOLE_UNITS
                    )
        return np.where(is_alone, WHOLE_UNITS, rows.compute)


def _pick(columns: Sequence[Units], chosen: tuple[npt.NDArray[np.intp], ...]) -> Units:
    return np.stack([values[places] for values, places in zip(columns, chosen, strict=True)], axis=1)
