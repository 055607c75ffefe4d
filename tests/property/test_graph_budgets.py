"""Budgets of stages on any graph: Nexus' program finds what trying every cut finds, and no rule gives a way more than the SLO."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.ids import ModelId
from policies.graphs import GRAPH_DEADLINES, ApplicationPlan
from policies.graphs.graph import Graph, Stage, graph_of
from policies.graphs.nexus_program import divide

STEPS = 9


@st.composite
def graphs(draw: st.DrawFn, stages_max: int = 5, *, are_trees: bool = True) -> Graph:
    """Trees with one or several roots, or any graph without circles."""
    count = draw(st.integers(1, stages_max))
    stages = []
    for place in range(count):
        earlier = [f"s{one}" for one in range(place)]
        after = (
            draw(st.lists(st.sampled_from(earlier), unique=True, max_size=1 if are_trees else 3))
            if earlier
            else []
        )
        fan_out = draw(st.sampled_from((0.25, 1.0, 2.0)))
        stages.append(Stage(f"s{place}", ModelId(f"m{place}"), tuple(after), fan_out))
    return graph_of(stages)


def cost_of(graph: Graph, own: dict[str, list[float]], cut: dict[str, int]) -> float:
    return sum(own[stage.name][cut[stage.name]] for stage in graph.stages)


def is_within(graph: Graph, cut: dict[str, int], *, gives_last_step: bool) -> bool:
    """Nexus' rule: every way of stages takes less than all steps (or no more than them, with the last step)."""
    longest = graph.longest_ms({name: float(steps) for name, steps in cut.items()})
    return longest <= STEPS if gives_last_step else longest < STEPS


@given(st.data(), graphs(), st.booleans())
def test_the_program_finds_what_trying_every_cut_finds(
    data: st.DataObject, graph: Graph, gives_last_step: bool
) -> None:
    own = {}
    for stage in graph.stages:
        costs = data.draw(st.lists(st.integers(1, 30), min_size=STEPS + 1, max_size=STEPS + 1))
        cannot = data.draw(st.integers(1, 4))  # steps with which the stage cannot be served
        own[stage.name] = [float("inf")] * cannot + sorted(map(float, costs), reverse=True)[cannot:]
    found = divide(
        graph, {name: np.array(costs) for name, costs in own.items()}, gives_last_step=gives_last_step
    )
    names = [stage.name for stage in graph.stages]
    best = float("inf")
    for steps in itertools.product(range(1, STEPS + 1), repeat=len(names)):
        cut = dict(zip(names, steps, strict=True))
        cost = cost_of(graph, own, cut)
        if cost < best and is_within(graph, cut, gives_last_step=gives_last_step):
            best = cost
    if found is None:
        assert best == float("inf")
        return
    cost, cut = found
    assert cost == pytest.approx(best)
    assert cost_of(graph, own, cut) == pytest.approx(best)
    assert is_within(graph, cut, gives_last_step=gives_last_step)


@given(st.data(), graphs(8, are_trees=False), st.floats(1.0, 20.0), st.integers(1, 16))
def test_no_way_through_the_graph_has_more_than_the_slo(
    data: st.DataObject, graph: Graph, loose: float, gpus: int
) -> None:
    run_ms = {}
    for stage in graph.stages:
        alpha_ms, beta_ms = data.draw(st.tuples(st.floats(0.01, 20.0), st.floats(0.0, 50.0)))
        run_ms[stage.name] = [alpha_ms * size + beta_ms for size in range(1, 17)]
    alone_ms = graph.longest_ms({name: times[0] for name, times in run_ms.items()})
    plan = ApplicationPlan("any", graph, alone_ms * loose, run_ms, gpus)
    for rule in GRAPH_DEADLINES:
        if rule == "nexus" and not graph.is_tree:
            continue
        budgets_ms = plan.budgets(rule)
        assert set(budgets_ms) == set(run_ms)
        assert all(budget_ms > 0 for budget_ms in budgets_ms.values())
        assert graph.longest_ms(budgets_ms) <= plan.slo_ms * (1 + 1e-9)
