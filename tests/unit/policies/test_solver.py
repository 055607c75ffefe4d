"""Programs that are limited by nodes say the same on every machine; a clock has no say in them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from policies.solver import prove, quiet_pulp

pulp = pytest.importorskip("pulp")


class OneSolver:
    """PuLP with one of its solvers, and what that solver was told."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.told: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name not in ("HiGHS", "PULP_CBC_CMD"):
            return getattr(pulp, name)

        def solver(**options: Any) -> Any:
            if name == self.name:
                self.told = options
            made = getattr(pulp, name)(**options)
            if name != self.name:
                made.available = lambda: False
            return made

        return solver


def knapsacks() -> Any:
    """Thirty knapsacks over sixty whole numbers: dozens of nodes for either solver."""
    draw = random.Random(3)
    program = pulp.LpProblem("knapsacks", pulp.LpMaximize)
    counts = [pulp.LpVariable(f"x{i}", 0, 3, cat="Integer") for i in range(60)]
    program.setObjective(pulp.lpSum(draw.uniform(1, 9) * count for count in counts))
    for _ in range(30):
        program += pulp.lpSum(draw.uniform(1, 9) * count for count in counts) <= draw.uniform(50, 200)
    return program


@pytest.mark.parametrize("name", ["HiGHS", "PULP_CBC_CMD"])
def test_too_few_nodes_are_no_proof_and_no_time_limit_is_given(name: str) -> None:
    solver = OneSolver(name)
    with quiet_pulp():
        assert prove(solver, knapsacks(), 1, 1e-3) is None
        assert prove(solver, knapsacks(), 1000, 1e-3) is not None
    assert "timeLimit" not in solver.told
    assert 1000 in solver.told.values()


def test_a_defect_of_ours_is_not_taken_for_used_up_nodes() -> None:
    class Broken(OneSolver):
        def __getattr__(self, name: str) -> Any:
            if name == "HiGHS":
                raise KeyError(name)
            return super().__getattr__(name)

    with quiet_pulp(), pytest.raises(KeyError):
        prove(Broken("HiGHS"), knapsacks(), 1, 1e-3)
