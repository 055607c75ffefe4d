"""What Usher may choose for a model: a replication degree and a batch size (thesis section 5.2.2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from policies.placement.common.base import PlacedModelInput
from policies.placement.common.demands import ResourceDemand, rate_of
from policies.rounding import ROUNDING

BATCH_SIZES = (4, 8, 16, 32, 64, 128)  # the Usher paper's
DEGREE_MULTIPLES = (1, 2, 3, 4, 5, 6)


@dataclass(frozen=True, slots=True)
class ReplicaOption:
    """So many replicas of that batch size."""

    degree: int
    demand: ResourceDemand

    def __str__(self) -> str:
        """As plans show it."""
        return f"{self.degree} of batch {self.demand.batch}"


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """A model of a group with all its options, degree first, then batch size, both ascending."""

    model: PlacedModelInput
    options: tuple[ReplicaOption, ...]

    @property
    def rate_rps(self) -> float:
        """The model's rate."""
        return rate_of(self.model)


def usher_batches(demands: Sequence[ResourceDemand]) -> tuple[ResourceDemand, ...]:
    """Those of the batch sizes that Usher considers."""
    return tuple(demand for demand in demands if demand.batch in BATCH_SIZES)


def smallest_degree(model: PlacedModelInput, demands: Sequence[ResourceDemand]) -> int:
    """c_min: GPUs for the whole rate at the largest batch within the SLO. `demands` has at least one."""
    largest = max(demands, key=lambda demand: demand.batch)
    return max(1, math.ceil(rate_of(model) / largest.throughput_rps * (1 - ROUNDING)))


def options_of(
    model: PlacedModelInput, demands: Sequence[ResourceDemand], gpu_count: int, *, is_capped: bool
) -> tuple[ReplicaOption, ...]:
    """All options, first the smallest degree; none where c_min is over the number of GPUs.

    `is_capped` then takes all the GPUs instead, which the Usher paper leaves open (thesis section 5.4.2).
    """
    smallest = smallest_degree(model, demands)
    if is_capped:
        smallest = min(smallest, gpu_count)
    degrees = [i * smallest for i in DEGREE_MULTIPLES if i * smallest <= gpu_count]
    return tuple(ReplicaOption(degree, demand) for degree in degrees for demand in demands)
