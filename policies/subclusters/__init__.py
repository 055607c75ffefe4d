"""Which models form a sub-cluster: a search and a solver behind one function (docs/operate/subclusters.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fabric.ids import ModelId
from policies.solver import SolverTime
from policies.subclusters.base import NO_BOUNDS, Bounds, Partition, PartitionModel, Problem, fits
from policies.subclusters.milp import solve_partition

__all__ = ["NO_BOUNDS", "Bounds", "Partition", "PartitionModel", "partition"]

# A sub-cluster has whole GPUs, so with fewer than a hundred of them a percent decides nothing: not worth 10 s.
_CLOSE_ENOUGH_PERCENT = 1.0
# Models x sub-clusters up to which the solver has been seen to beat the search (benchmarks/subclusters.py).
_SOLVER_CELLS_MAX = 128


def partition(
    models: Sequence[PartitionModel],
    subclusters: int,
    current: Mapping[ModelId, int] | None = None,
    bounds: Bounds = NO_BOUNDS,
    time: SolverTime | None = None,
) -> Partition:
    """Partition `models` (each id once) into `subclusters` (1 or more) even ones, within `bounds`.

    The search always runs, within about a second. The solver runs, for what is left of `time` (10 s where it is not given), where
    it may do better by more than a percent of the average: on few models, or where the search found no place for some of them.
    The better answer is returned, and both always are within the bounds: what finds no place is `unplaced`.
    """
    from policies.subclusters.search import search_partition  # noqa: PLC0415  NumPy: few clusters have sub-clusters

    time = time or SolverTime()
    problem = Problem.of(models, subclusters, current, bounds)
    found = search_partition(problem)
    if found.unplaced:
        is_worth_solving = _may_be_possible(problem)
    else:
        is_small = len(problem.models) * subclusters <= _SOLVER_CELLS_MAX
        is_worth_solving = is_small and found.objective_percent > _CLOSE_ENOUGH_PERCENT
    solved = solve_partition(problem, time) if is_worth_solving and time.left_s > 0 else None
    if solved is None:
        return found
    if _badness(solved) < _badness(found):
        return solved
    return replace(found, bound_percent=min(solved.bound_percent, found.objective_percent))


def _badness(found: Partition) -> tuple[int, float]:
    return len(found.unplaced), found.objective_percent


def _may_be_possible(problem: Problem) -> bool:
    """Nothing shows at first sight that some model must be left out."""
    newcomers = sum(m.move_cost for m, home in zip(problem.models, problem.home, strict=True) if home is None)
    return (
        fits(problem.mean_load, problem.bounds.load)
        and fits(problem.mean_static_bytes, problem.bounds.memory_bytes)
        and not any(any(problem.excess([i])) for i in range(len(problem.models)))
        and fits(newcomers, problem.bounds.disruption)
    )
