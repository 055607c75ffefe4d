"""Mixed integer programs: PuLP writes them, HiGHS solves them, CBC where HiGHS is not installed.

All of it belongs to the extra `plan`. Solvers run on one thread: the same path each time, and the other cores
serve requests. What a clock stopped may differ from run to run and from machine to machine; whoever limits time says so
in its result. What a number of nodes stopped is the same in every run and on every machine that rounds alike, however
slow it is.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

TIME_LIMIT_S = 10.0  # of all programs of one plan, by default; Symphony's own (appendix A)


@dataclass(slots=True)
class SolverTime:
    """What is left of the time that the programs of one plan have together, in s."""

    left_s: float = TIME_LIMIT_S

    def spend(self, time_s: float) -> None:
        """One of them took so long."""
        self.left_s = max(0.0, self.left_s - time_s)


@dataclass(frozen=True, slots=True)
class Solved:
    """A program has a solution, in its variables, found in `time_s`. `bound` is the solver's on the objective.

    `is_proven`: nothing better exists, within the gap asked for. `bound` is None where it is proven, or where
    the solver keeps it to itself (CBC).
    """

    solver: Literal["highs", "cbc"]
    is_proven: bool
    time_s: float
    bound: float | None = None


@contextmanager
def quiet_pulp() -> Iterator[Any]:
    """PuLP, to write and solve programs with; None where it is not installed.

    PuLP 3.3 warns of all that 4.0 will do otherwise; we hold to 3, and also work with 2.7.
    """
    try:
        import pulp  # noqa: PLC0415  an extra
    except ImportError:
        pulp = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield pulp


def solve(pulp: Any, program: Any, time_limit_s: float, gap: float) -> Solved | None:
    """Solve to within `gap` of the objective (absolute), or as far as the time goes.

    None: no solver is installed, there is no solution, or the time was too short for any. The caller still
    has to check the variables: stopped by the clock, HiGHS may call feasible what is not.
    """
    return _solved(pulp, program, gap, {"timeLimit": time_limit_s}, {"timeLimit": time_limit_s})


def prove(pulp: Any, program: Any, nodes_max: int, gap: float) -> Solved | None:
    """The optimum, to within `gap`, if so many nodes of the search tree prove it; no clock is looked at.

    None: no solver is installed, there is no solution, or the nodes did not suffice.
    """
    try:
        solved = _solved(pulp, program, gap, {"mip_max_nodes": nodes_max}, {"maxNodes": nodes_max})
    except KeyError as error:
        # PuLP 3.3 has no word for what HiGHS says when the nodes are used up.
        if error.args and getattr(error.args[0], "name", "") == "kSolutionLimit":
            return None
        raise
    return solved if solved is not None and solved.is_proven else None


def _solved(
    pulp: Any, program: Any, gap: float, for_highs: Mapping[str, Any], for_cbc: Mapping[str, Any]
) -> Solved | None:
    highs = pulp.HiGHS(msg=False, threads=1, gapAbs=gap, gapRel=0.0, **for_highs)
    solver = (
        highs
        if highs.available()
        else pulp.PULP_CBC_CMD(msg=False, threads=1, gapAbs=gap, gapRel=0.0, **for_cbc)
    )
    if not solver.available():
        return None
    try:
        program.solve(solver)
    except pulp.PulpSolverError:
        program.stopClock()
        return None  # CBC says so when the clock stopped it before its first solution
    # `status` calls whatever a clock stopped optimal; only `sol_status` tells the two apart.
    if program.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return None
    name: Literal["highs", "cbc"] = "highs" if solver is highs else "cbc"
    if program.sol_status == pulp.LpSolutionOptimal:
        return Solved(name, is_proven=True, time_s=program.solutionTime)
    bound = _dual_bound(program) if solver is highs else None
    return Solved(name, is_proven=False, time_s=program.solutionTime, bound=bound)


def _dual_bound(program: Any) -> float | None:
    bound = float(program.solverModel.getInfo().mip_dual_bound)
    return bound if math.isfinite(bound) else None
