"""Which replicas share a GPU, as variables: a count of each feasible pattern, or one 0/1 per replica and GPU.

GPUs of one class are interchangeable, so the plain variables x[model, batch, gpu] leave the solver G! copies of
every answer. A *pattern* is a set of (model, batch) that fits one GPU; counting how many GPUs carry each
pattern has no such copies and a tight relaxation, and does not grow with the number of GPUs. Where models are
so small that there are too many patterns, x is used after all, with the GPUs of a class ordered by the compute
they carry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from policies.placement.common.demands import WHOLE_UNITS, ResourceDemand
from policies.placement.common.gpu_kinds import GpuClass

PATTERNS_MAX = 4000
Item = tuple[int, int]
"""(model, option): places in the program's lists."""

Pattern = tuple[Item, ...]
Offers = Mapping[int, Sequence[ResourceDemand]]
"""By model, what it may run as on a class of GPUs."""


class ReplicaPacking(ABC):
    """The replicas on one class of GPUs, as expressions of a program."""

    @abstractmethod
    def replicas(self, item: Item) -> Any:
        """How many replicas of that model run with that batch size."""

    @abstractmethod
    def gpus_used(self) -> Any:
        """How many GPUs of the class carry a replica."""

    @abstractmethod
    def patterns(self) -> list[Pattern]:
        """The solution: what each used GPU carries, most compute first."""


def packing_of(pulp: Any, program: Any, gpus: GpuClass, offers: Offers, name: str) -> ReplicaPacking:
    """The variables and constraints of a class of GPUs, added to `program`."""
    patterns = feasible_patterns(offers, PATTERNS_MAX)
    if patterns is not None:
        return _Counted(pulp, program, gpus, offers, patterns, name)
    return _Ordered(pulp, program, gpus, offers, name)


def feasible_patterns(offers: Offers, limit: int) -> list[Pattern] | None:
    """Every non-empty set of options, one a model at most, that fits a GPU; None where there are over `limit`."""
    models = sorted(offers)
    found: list[Pattern] = []
    stack: list[tuple[int, Pattern, int, int]] = [(0, (), WHOLE_UNITS, WHOLE_UNITS)]
    while stack:
        start, pattern, compute, memory = stack.pop()
        if pattern:
            found.append(pattern)
            if len(found) > limit:
                return None
        for place in range(start, len(models)):
            model = models[place]
            for option, demand in enumerate(offers[model]):
                if demand.compute_units <= compute and demand.memory_units <= memory:
                    stack.append(
                        (
                            place + 1,
                            (*pattern, (model, option)),
                            compute - demand.compute_units,
                            memory - demand.memory_units,
                        )
                    )
    return sorted(found)


class _Counted(ReplicaPacking):
    """z[pattern]: how many GPUs carry it."""

    def __init__(
        self, pulp: Any, program: Any, gpus: GpuClass, offers: Offers, patterns: Sequence[Pattern], name: str
    ) -> None:
        self._pulp = pulp
        self._patterns = sorted(patterns, key=lambda pattern: (-_compute(pattern, offers), pattern))
        self._counts = [
            pulp.LpVariable(f"z_{name}_{place}", lowBound=0, upBound=len(gpus.gpus), cat=pulp.LpInteger)
            for place in range(len(self._patterns))
        ]
        self._with: dict[Item, list[Any]] = {}
        for pattern, count in zip(self._patterns, self._counts, strict=True):
            for item in pattern:
                self._with.setdefault(item, []).append(count)
        program += self.gpus_used() <= len(gpus.gpus)

    def replicas(self, item: Item) -> Any:
        return self._pulp.lpSum(self._with.get(item, ()))

    def gpus_used(self) -> Any:
        return self._pulp.lpSum(self._counts)

    def patterns(self) -> list[Pattern]:
        return [
            pattern
            for pattern, count in zip(self._patterns, self._counts, strict=True)
            for _ in range(round(count.varValue or 0.0))
        ]


class _Ordered(ReplicaPacking):
    """x[model, batch, gpu] as the thesis has it (section 5.4.3), a GPU carries no more compute than the one before."""

    def __init__(self, pulp: Any, program: Any, gpus: GpuClass, offers: Offers, name: str) -> None:
        self._pulp = pulp
        self._offers = offers
        self._items = [(model, option) for model in sorted(offers) for option in range(len(offers[model]))]
        places = range(len(gpus.gpus))
        self._chosen = [
            {
                item: pulp.LpVariable(f"x_{name}_{g}_{item[0]}_{item[1]}", cat=pulp.LpBinary)
                for item in self._items
            }
            for g in places
        ]
        self._used = [pulp.LpVariable(f"used_{name}_{g}", cat=pulp.LpBinary) for g in places]
        for g in places:
            program += self._sum(g, "compute_units") <= self._used[g]
            program += self._sum(g, "memory_units") <= 1
            for model in offers:
                mine = (self._chosen[g][item] for item in self._items if item[0] == model)
                program += pulp.lpSum(mine) <= self._used[g]
            if g:
                program += self._sum(g, "compute_units") <= self._sum(g - 1, "compute_units")

    def replicas(self, item: Item) -> Any:
        return self._pulp.lpSum(chosen[item] for chosen in self._chosen)

    def gpus_used(self) -> Any:
        return self._pulp.lpSum(self._used)

    def patterns(self) -> list[Pattern]:
        taken = [
            tuple(item for item in self._items if (chosen[item].varValue or 0.0) > 0.5)
            for chosen in self._chosen
        ]
        return sorted(filter(None, taken), key=lambda pattern: (-_compute(pattern, self._offers), pattern))

    def _sum(self, g: int, what: str) -> Any:
        """The compute or memory on that GPU, of 1."""
        return self._pulp.LpAffineExpression(
            [
                (self._chosen[g][(model, option)], getattr(self._offers[model][option], what) / WHOLE_UNITS)
                for model, option in self._items
            ]
        )


def _compute(pattern: Pattern, offers: Offers) -> int:
    return sum(offers[model][option].compute_units for model, option in pattern)
