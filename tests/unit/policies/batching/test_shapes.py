"""Run times of every shape that a configuration admits: planning and grouping take them as they are."""

from __future__ import annotations

import math

import pytest

from fabric.ids import ModelId
from policies.batching.base import BatchModel
from policies.batching.batch_moments import cost_table, exec_table, lead_table
from policies.batching.holding import Demand, plan_holds, plan_reserves, prospect
from policies.batching.matchmaking.speed_classes import SpeedClasses
from tests.scheduler_stage import SHAPES

RATES_RPS = (0.2, 20.0, 2_000.0, 1e6)
SLOS_MS = (0.5, 50.0, 3_600_000.0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("other", [None, *SHAPES])
@pytest.mark.parametrize("slices", [1, 2, 100])
def test_every_shape_at_every_rate_has_a_plan(shape: str, other: str | None, slices: int) -> None:
    names = [shape] if other is None else [shape, other]
    for rate_rps in RATES_RPS:
        for slo_ms in SLOS_MS:
            prospects = []
            for name in names:
                model = BatchModel(ModelId(name), slo_ms)
                table = exec_table(SHAPES[name])
                cost = cost_table(table, lead_table(model.delay, len(table) - 2))
                prospects.append(prospect(model, table, cost, rate_rps))
            for mean in (0.0, 0.004, 1.0):
                for hold in plan_holds(Demand(prospects, slices), [mean] * len(names), mean):
                    assert 0.0 <= hold.hold_ms <= slo_ms
                    assert hold.target >= 1
            (reserve,) = plan_reserves(Demand(prospects, slices), [slices])
            assert 0 <= reserve <= slices


def test_what_saves_nothing_by_being_held_goes_at_once() -> None:
    """Its batches take as long as their requests one by one."""
    model, table = BatchModel(ModelId("a"), 50.0), exec_table(SHAPES["no intercept"])
    cost = cost_table(table, lead_table(model.delay, len(table) - 2))
    for rate_rps in (20.0, 900.0):
        (hold,) = plan_holds(Demand([prospect(model, table, cost, rate_rps)], 1), [0.0], 0.0)
        assert hold.hold_ms == 0.0


@pytest.mark.parametrize("first", SHAPES)
@pytest.mark.parametrize("second", SHAPES)
def test_tables_however_far_apart_have_classes(first: str, second: str) -> None:
    classes = SpeedClasses(ModelId("a"))
    size = min(len(SHAPES[first]), len(SHAPES[second]))
    for name in (first, second):
        class_, table = classes.classify(SHAPES[name][:size])
        classes.keep(class_)
        assert all(math.isfinite(bound_ms) for bound_ms in class_.table[:-1])
        assert all(ms <= bound_ms for ms, bound_ms in zip(table, class_.table, strict=True))
