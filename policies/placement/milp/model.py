"""The thesis' placement program (section 5.4.3), and the stages in which it is solved.

Maximise Σ w[m] with w[m] ≤ rate[m] and w[m] ≤ Σ throughput[m, b] · replicas[m, b]; one batch size per model;
what shares a GPU has Σ Creq ≤ 100 % and Σ Mreq ≤ 100 %; a model is at most once on a GPU. The thesis prints
the second bound as Σ throughput[m, b], without the replicas; its stated optima need them.

Many plans reach the same goodput, and the one a solver stumbles on may have batches of 64 where 8 would do
(thesis section 6.2.1, observation 3). The second stage therefore fixes what was reached and minimises, one
after the other: Σ run time over the replicas, GPUs used, replicas. It is an extension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fabric.errors import ConfigError
from policies.placement.common.demands import ResourceDemand
from policies.placement.common.gpu_kinds import GpuClass
from policies.placement.milp.packing import Pattern, ReplicaPacking, packing_of
from policies.solver import Solved, prove, quiet_pulp, solve

# In requests per second, ms, GPUs and replicas: below what any of them can differ by in earnest.
_GAP = 1e-6
# What a fixed stage may give back to the next one: solvers keep each constraint to 1e-6, and there are many.
_SLACK = 1e-4


@dataclass(frozen=True, slots=True)
class MilpProblem:
    """What to solve. `rates_rps` by model; `offers[k][m]` is what model m may run as on GPUs of class k.

    `replicas_max[m][batch]` bounds the replicas of a model with that batch size, over all classes. Where `nodes_max` is
    given, each stage has so many nodes of the search tree and no time limit, and only a proven optimum counts.
    """

    rates_rps: Sequence[float]
    classes: Sequence[GpuClass]
    offers: Sequence[Mapping[int, Sequence[ResourceDemand]]]
    replicas_max: Sequence[Mapping[int, int]]
    time_limit_s: float
    has_second_stage: bool
    nodes_max: int | None = None


@dataclass(frozen=True, slots=True)
class MilpSolution:
    """What each used GPU of each class carries. `bound_rps` is over the goodput where it is not proven best."""

    patterns: tuple[tuple[Pattern, ...], ...]
    goodput_rps: float
    bound_rps: float
    solver: str
    is_proven: bool
    is_tidied: bool

    @property
    def gap_rps(self) -> float:
        """How much more there might be."""
        return self.bound_rps - self.goodput_rps


def solve_task(task: MilpProblem) -> MilpSolution | None:
    """Solve; None where the time was too short for any solution.

    Raises ConfigError where PuLP or its solvers are not installed.
    """
    with quiet_pulp() as pulp:
        if pulp is None:
            raise ConfigError("placement: the MILP policies need pulp (the extra `plan`)")
        if not (pulp.HiGHS().available() or pulp.PULP_CBC_CMD().available()):
            raise ConfigError("placement: the MILP policies need highspy (the extra `plan`), or CBC")
        return _Program(pulp, task).run()


class _Program:
    """The variables of a task in PuLP's words."""

    def __init__(self, pulp: Any, task: MilpProblem) -> None:
        self._pulp = pulp
        self._task = task
        self._program = pulp.LpProblem("placement", pulp.LpMaximize)
        self._packings: list[ReplicaPacking] = [
            packing_of(pulp, self._program, gpus, offers, f"c{k}")
            for k, (gpus, offers) in enumerate(zip(task.classes, task.offers, strict=True))
        ]
        self._served = [
            pulp.LpVariable(f"w_{m}", lowBound=0, upBound=rate_rps)
            for m, rate_rps in enumerate(task.rates_rps)
        ]
        self._items = [
            (k, (m, option), demand)
            for k, offers in enumerate(task.offers)
            for m in sorted(offers)
            for option, demand in enumerate(offers[m])
        ]
        for m in range(len(task.rates_rps)):
            self._constrain(m)

    def run(self) -> MilpSolution | None:
        """Goodput first, then the rest in what time is left."""
        self._program.setObjective(self._pulp.lpSum(self._served))
        solved = self._solve(self._task.time_limit_s)
        if solved is None:
            return None
        patterns = self._patterns()
        goodput_rps = self._goodput_rps(patterns)
        if not solved.is_proven and not _fits(patterns, self._task):
            return None
        is_tidied = False
        if self._task.has_second_stage and solved.is_proven:
            left_s = self._task.time_limit_s - solved.time_s
            patterns, is_tidied = self._tidied(patterns, goodput_rps, left_s)
        return MilpSolution(
            patterns,
            self._goodput_rps(patterns),
            self._bound_rps(solved, goodput_rps),
            solved.solver,
            solved.is_proven,
            is_tidied,
        )

    def _solve(self, left_s: float) -> Solved | None:
        if self._task.nodes_max is not None:
            return prove(self._pulp, self._program, self._task.nodes_max, _GAP)
        return solve(self._pulp, self._program, left_s, _GAP) if left_s > 0 else None

    def _constrain(self, m: int) -> None:
        pulp, task = self._pulp, self._task
        mine = [(k, item, demand) for k, item, demand in self._items if item[0] == m]
        self._program += self._served[m] <= pulp.lpSum(
            demand.throughput_rps * self._packings[k].replicas(item) for k, item, demand in mine
        )
        batches = sorted({demand.batch for _, _, demand in mine})
        is_chosen = {batch: pulp.LpVariable(f"y_{m}_{batch}", cat=pulp.LpBinary) for batch in batches}
        self._program += pulp.lpSum(is_chosen.values()) <= 1
        for batch in batches:
            replicas = pulp.lpSum(
                self._packings[k].replicas(item) for k, item, demand in mine if demand.batch == batch
            )
            self._program += replicas <= task.replicas_max[m][batch] * is_chosen[batch]

    def _tidied(
        self, patterns: tuple[tuple[Pattern, ...], ...], goodput_rps: float, left_s: float
    ) -> tuple[tuple[tuple[Pattern, ...], ...], bool]:
        """The second stage. A part that is not proven in the time left leaves what was before."""
        pulp, program = self._pulp, self._program
        program += pulp.lpSum(self._served) >= goodput_rps - _SLACK
        parts = (
            pulp.lpSum(d.exec_ms * self._packings[k].replicas(item) for k, item, d in self._items),
            pulp.lpSum(packing.gpus_used() for packing in self._packings),
            pulp.lpSum(self._packings[k].replicas(item) for k, item, _ in self._items),
        )
        program.sense = pulp.LpMinimize
        for part in parts:
            program.setObjective(part)
            solved = self._solve(left_s)
            if solved is None or not solved.is_proven:
                return patterns, False
            left_s -= solved.time_s
            found = self._patterns()
            if self._goodput_rps(found) < goodput_rps - 2 * _SLACK:
                return patterns, False
            patterns = found
            program += part <= float(pulp.value(part)) + _SLACK
        return patterns, True

    def _patterns(self) -> tuple[tuple[Pattern, ...], ...]:
        return tuple(tuple(packing.patterns()) for packing in self._packings)

    def _goodput_rps(self, patterns: Sequence[Sequence[Pattern]]) -> float:
        """Counted from the replicas, not read from the solver's rounded w."""
        carried = [0.0] * len(self._task.rates_rps)
        for offers, taken in zip(self._task.offers, patterns, strict=True):
            for pattern in taken:
                for m, option in pattern:
                    carried[m] += offers[m][option].throughput_rps
        return math.fsum(map(min, self._task.rates_rps, carried))

    def _bound_rps(self, solved: Solved, goodput_rps: float) -> float:
        if solved.is_proven:
            return goodput_rps
        ideal_rps = math.fsum(self._task.rates_rps)
        return ideal_rps if solved.bound is None else max(goodput_rps, min(ideal_rps, abs(solved.bound)))


def _fits(patterns: Sequence[Sequence[Pattern]], task: MilpProblem) -> bool:
    """Whether what a clock stopped is a placement at all: GPUs enough, one batch size a model."""
    batches: dict[int, set[int]] = {}
    for offers, gpus, taken in zip(task.offers, task.classes, patterns, strict=True):
        if len(taken) > len(gpus.gpus):
            return False
        for pattern in taken:
            for m, option in pattern:
                batches.setdefault(m, set()).add(offers[m][option].batch)
    return all(len(sizes) == 1 for sizes in batches.values())
