"""The partition problem: which models form a sub-cluster, and how good an answer is (Symphony appendix A).

Every GPU of a sub-cluster loads all of its models, so their memory is bounded; each sub-cluster has a dispatcher
of its own, so its load may be bounded too; and a model that changes its sub-cluster is unloaded here and
loaded there, so the change as a whole may be bounded. Within these bounds load and memory are to be even.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fabric.ids import ModelId
from policies.rounding import ROUNDING


@dataclass(frozen=True, slots=True)
class PartitionModel:
    """One model. `load` adds up over models: requests per second in the paper, GPUs kept busy in a placement.

    `static_bytes` are taken as long as the model is loaded. `dynamic_bytes` while it runs: one model of a
    GPU runs at a time, so only the largest counts. `move_cost` is the price of loading it once, or of
    unloading it: for all sub-clusters the same.
    """

    model_id: ModelId
    load: float
    static_bytes: float = 0.0
    dynamic_bytes: float = 0.0
    move_cost: float = 1.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """What no partition may exceed: per sub-cluster memory (5) and load (4), over all the cost of change (10).

    The numbers are the paper's constraints. A model that is new to the cluster costs one load, one that
    moves costs an unload and a load, one that left costs nothing here.
    """

    memory_bytes: float = math.inf
    load: float = math.inf
    disruption: float = math.inf


NO_BOUNDS = Bounds()


@dataclass(frozen=True, slots=True)
class Partition:
    """Which sub-cluster (from 0) each model belongs to, and how good that is. All percents are of the average.

    `objective_percent` is the paper's (3) with both halves relative: largest deviation of a sub-cluster's
    load from the average load, plus the same of static memory. No partition can be better than
    `bound_percent`. The imbalances are the paper's factor, (max - min) / average. `unplaced`: no
    sub-cluster could take them within the bounds.
    """

    subcluster_of: Mapping[ModelId, int]
    method: str
    objective_percent: float
    load_imbalance_percent: float
    memory_imbalance_percent: float
    disruption: float
    bound_percent: float = 0.0
    unplaced: tuple[ModelId, ...] = ()

    @property
    def gap_percent(self) -> float:
        """By how much of the average the best possible partition may be better; 0 where this one is proven.

        Not relative to the objective as solvers have it: the bound is nearly always 0, and x - 0 is 100 % of x.
        """
        return max(0.0, self.objective_percent - self.bound_percent)


@dataclass(frozen=True, slots=True)
class Problem:
    """What both methods work on: models in a fixed order, and where each is now (None: nowhere)."""

    models: tuple[PartitionModel, ...]
    subclusters: int
    home: tuple[int | None, ...]
    bounds: Bounds

    @classmethod
    def of(
        cls,
        models: Sequence[PartitionModel],
        subclusters: int,
        current: Mapping[ModelId, int] | None,
        bounds: Bounds,
    ) -> Problem:
        """Sub-clusters of `current` that will exist no longer count as nowhere."""
        now = current or {}
        home = (now.get(model.model_id) for model in models)
        within = tuple(j if j is not None and 0 <= j < subclusters else None for j in home)
        return cls(tuple(models), subclusters, within, bounds)

    def cost(self, i: int, subcluster: int) -> float:
        """What it costs to have model i there: c y summed over the sub-clusters."""
        if self.home[i] is None:
            return self.models[i].move_cost
        return 0.0 if self.home[i] == subcluster else 2 * self.models[i].move_cost

    @property
    def mean_load(self) -> float:
        """Per sub-cluster."""
        return sum(model.load for model in self.models) / self.subclusters

    @property
    def mean_static_bytes(self) -> float:
        """Per sub-cluster."""
        return sum(model.static_bytes for model in self.models) / self.subclusters

    def judge(self, places: Sequence[int | None], method: str, bound_percent: float = 0.0) -> Partition:
        """Measure an assignment; None stands for a model that is left out."""
        load, static_bytes = [0.0] * self.subclusters, [0.0] * self.subclusters
        for model, j in zip(self.models, places, strict=True):
            if j is not None:
                load[j] += model.load
                static_bytes[j] += model.static_bytes
        return Partition(
            {m.model_id: j for m, j in zip(self.models, places, strict=True) if j is not None},
            method,
            _deviation_percent(load, self.mean_load)
            + _deviation_percent(static_bytes, self.mean_static_bytes),
            _imbalance_percent(load),
            _imbalance_percent(static_bytes),
            sum(self.cost(i, j) for i, j in enumerate(places) if j is not None),
            bound_percent,
            tuple(m.model_id for m, j in zip(self.models, places, strict=True) if j is None),
        )

    def excess(self, members: Sequence[int]) -> tuple[float, float]:
        """By how much one sub-cluster with these models would be over its bounds: load, memory."""
        models = [self.models[i] for i in members]
        load = sum(model.load for model in models)
        running = max((model.dynamic_bytes for model in models), default=0.0)
        memory = sum(model.static_bytes for model in models) + running
        return (
            0.0 if fits(load, self.bounds.load) else load - self.bounds.load,
            0.0 if fits(memory, self.bounds.memory_bytes) else memory - self.bounds.memory_bytes,
        )

    def affords(self, places: Sequence[int | None]) -> bool:
        """The change is within its bound."""
        return fits(
            sum(self.cost(i, j) for i, j in enumerate(places) if j is not None), self.bounds.disruption
        )

    def is_within_bounds(self, places: Sequence[int | None]) -> bool:
        """No bound is exceeded by more than a rounding."""
        members: list[list[int]] = [[] for _ in range(self.subclusters)]
        for i, j in enumerate(places):
            if j is not None:
                members[j].append(i)
        return self.affords(places) and not any(any(self.excess(inside)) for inside in members)


def fits(total: float, bound: float) -> bool:
    """At most the bound, but for the rounding of a sum of floats."""
    return total <= bound + ROUNDING * max(1.0, abs(bound))


def _deviation_percent(totals: Sequence[float], mean: float) -> float:
    return 100 * max(abs(total - mean) for total in totals) / mean if mean else 0.0


def _imbalance_percent(totals: Sequence[float]) -> float:
    mean = sum(totals) / len(totals)
    return 100 * (max(totals) - min(totals)) / mean if mean else 0.0
