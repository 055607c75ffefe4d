"""Partition by mixed integer linear programming, exactly as in Symphony appendix A, with a limit on the time.

Solvers and PuLP belong to the extra `plan` (`policies/solver.py`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from policies.solver import SolverTime, quiet_pulp, solve
from policies.subclusters.base import Partition, Problem

if TYPE_CHECKING:
    import pulp

# In fractions of the average: nobody needs a partition that is proven closer than that.
_GAP = 1e-5


def solve_partition(problem: Problem, time: SolverTime | None = None) -> Partition | None:
    """The best partition that the solver finds in what is left of `time`, 10 s where it is not given, or None.

    None: no solver is installed, the bounds cannot be kept, or the time was too short for any solution. A
    solution places every model. Stopped by the clock, the answer may differ from run to run.
    """
    with quiet_pulp() as pulp:
        return None if pulp is None else _solve(pulp, problem, time or SolverTime())


def _solve(pulp: Any, problem: Problem, time: SolverTime) -> Partition | None:
    program, chosen = _program(pulp, problem)
    solved = solve(pulp, program, time.left_s, _GAP)
    time.spend(program.solutionTime)
    if solved is None:
        return None
    places = _places(problem, chosen)
    if places is None or not problem.is_within_bounds(places):
        return None  # HiGHS calls it feasible too when the clock stopped it before its first solution
    found = problem.judge(places, solved.solver)
    proven_percent = found.objective_percent - 100 * _GAP
    bound_percent = proven_percent if solved.is_proven else 100 * (solved.bound or 0.0)
    return problem.judge(places, solved.solver, min(found.objective_percent, max(0.0, bound_percent)))


def _program(pulp: Any, problem: Problem) -> tuple[pulp.LpProblem, list[list[pulp.LpVariable | None]]]:
    """The program, and x_ij (None where symmetry says 0). Load and memory are fractions of their averages."""
    models, subclusters, bounds = problem.models, range(problem.subclusters), problem.bounds
    program = pulp.LpProblem("subclusters", pulp.LpMinimize)
    # Without a partition to start from the numbers of sub-clusters mean nothing: model i goes to the first i + 1
    # of them, which leaves out most of the l! equal answers.
    is_symmetric = all(j is None for j in problem.home)
    chosen = [
        [
            None if is_symmetric and j > i else pulp.LpVariable(f"x_{i}_{j}", cat=pulp.LpBinary)
            for j in subclusters
        ]
        for i in range(len(models))
    ]
    for row in chosen:
        program += pulp.lpSum(x for x in row if x is not None) == 1  # (8)
    halves = (
        ("load", problem.mean_load, [model.load for model in models], bounds.load),
        ("static", problem.mean_static_bytes, [model.static_bytes for model in models], math.inf),
    )
    deviations = []
    for name, mean, amounts, bound in halves:
        if not mean:
            continue
        deviation = pulp.LpVariable(f"deviation_{name}", lowBound=0)
        deviations.append(deviation)
        for j in subclusters:
            total = _sum(pulp, ((amount / mean, row[j]) for amount, row in zip(amounts, chosen, strict=True)))
            program += total - deviation <= 1  # (6), (7)
            program += total + deviation >= 1
            if math.isfinite(bound):
                program += total <= bound / mean  # (4)
    program.setObjective(pulp.lpSum(deviations))  # (3)
    if math.isfinite(bounds.memory_bytes):
        _bound_memory(pulp, program, problem, chosen)
    if math.isfinite(bounds.disruption):
        _bound_disruption(pulp, program, problem, chosen)
    return program, chosen


def _bound_memory(pulp: Any, program: Any, problem: Problem, chosen: list[list[Any]]) -> None:
    """(5), in fractions of the bound. The largest dynamic part is a variable that none of them exceeds."""
    bound = problem.bounds.memory_bytes or 1.0
    for j in range(problem.subclusters):
        running = pulp.LpVariable(f"running_{j}", lowBound=0)
        for model, row in zip(problem.models, chosen, strict=True):
            if model.dynamic_bytes and row[j] is not None:
                program += running >= model.dynamic_bytes / bound * row[j]
        static = ((m.static_bytes / bound, row[j]) for m, row in zip(problem.models, chosen, strict=True))
        program += _sum(pulp, static) + running <= problem.bounds.memory_bytes / bound


def _bound_disruption(pulp: Any, program: Any, problem: Problem, chosen: list[list[Any]]) -> None:
    """(10). As x' is given, y is x where the model is not, and 1 - x where it is: no variable of its own."""
    costs = (
        (problem.cost(i, j), x) for i, row in enumerate(chosen) for j, x in enumerate(row) if x is not None
    )
    program += _sum(pulp, costs) <= problem.bounds.disruption


def _sum(pulp: Any, terms: Any) -> Any:
    return pulp.LpAffineExpression([(x, factor) for factor, x in terms if x is not None and factor])


def _places(problem: Problem, chosen: list[list[Any]]) -> list[int] | None:
    places = []
    for row in chosen:
        ones = [j for j, x in enumerate(row) if x is not None and (x.varValue or 0.0) > 0.5]
        if len(ones) != 1:
            return None
        places.append(ones[0])
    return places if len(places) == len(problem.models) else None
