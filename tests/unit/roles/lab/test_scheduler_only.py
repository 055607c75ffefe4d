from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from roles.lab.scheduler_only import Case, Model, Moments, is_good, made
from roles.workload.outcomes import Window


@dataclass(frozen=True)
class Burst(Case):
    """A hundred requests at once, far more than a GPU does in their SLO."""

    at_ms: float = 0.0

    def arrivals(self, seed: int, rate_rps: float, until_ms: float) -> list[Moments]:
        del seed, rate_rps, until_ms
        return [np.full(100, self.at_ms)]


@pytest.mark.parametrize(("at_ms", "expected"), [(10.0, True), (1_010.0, False), (2_010.0, True)])
def test_only_what_arrives_in_the_window_makes_a_rate_bad(at_ms: float, *, expected: bool) -> None:
    """Where nothing arrived in it, one drop anywhere did."""
    case = Burst("a burst", (Model("a", 1.0, 5.0, 20.0),), 1, at_ms=at_ms)
    window = Window(1_000.0, 2_000.0)
    assert is_good(case, made(case, "eager", {}), 1, 1.0, window) is expected
