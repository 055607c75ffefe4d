"""By when a stage should be done, under each rule; golden cases are worked out by hand."""

from __future__ import annotations

import pytest

from fabric.errors import ConfigError
from fabric.ids import ModelId
from policies.graphs import ApplicationPlan
from policies.graphs.budgets import equal, nexus, proportional
from policies.graphs.deadline_rules import Pard, Split
from policies.graphs.graph import Graph, Stage, graph_of
from policies.graphs.stage_times import WEIGHT, Measured


def stage(name: str, *after: str, fan_out: float = 1.0) -> Stage:
    return Stage(name, ModelId(name), after, fan_out)


def line(alpha_ms: float, beta_ms: float, size_max: int = 32) -> list[float]:
    return [alpha_ms * size + beta_ms for size in range(1, size_max + 1)]


def fork() -> Graph:
    return graph_of([stage("a"), stage("b", "a"), stage("c", "a"), stage("d", "c")])


def test_an_equal_split_counts_the_stages_of_the_longest_way_over_each() -> None:
    assert equal(fork(), 90.0) == {"a": 30.0, "b": 45.0, "c": 30.0, "d": 30.0}


def test_a_proportional_split_goes_by_the_run_time_of_one() -> None:
    run_ms = {"a": [10.0], "b": [5.0], "c": [20.0], "d": [20.0]}
    assert proportional(fork(), 100.0, run_ms) == pytest.approx(
        {"a": 20.0, "b": 100 * 5 / 15, "c": 40.0, "d": 40.0}
    )


def test_nexus_program_by_hand() -> None:
    """Two stages, ten steps of 1 ms, l(1) = 1 and l(2) = 1.5 of a, l(1) = 2 of b: a batch may take half of its budget.

    b needs 4 steps and, as a leaf, a fifth that it never gets. So a has 5: enough for a batch of two (3), which costs
    1.5 / 2 + 2. Three steps are the fewest that are as cheap.
    """
    graph = graph_of([stage("a"), stage("b", "a")])
    run_ms = {"a": [1.0, 1.5], "b": [2.0]}
    assert nexus(graph, 10.0, run_ms, graph.demand(), steps=10) == {"a": 3.0, "b": 6.0}
    assert nexus(graph, 7.0, run_ms, graph.demand(), steps=7) == {"a": 2.0, "b": 4.0}
    assert nexus(graph, 6.0, run_ms, graph.demand(), steps=6) is None


def test_more_requests_of_a_stage_give_it_more_of_the_slo() -> None:
    few, many = (graph_of([stage("a"), stage("b", "a", fan_out=fan_out)]) for fan_out in (0.2, 5.0))
    run_ms = {"a": line(1, 10, 128), "b": line(1, 10, 128)}
    for rule in ("nexus", "carried"):
        before, after = (
            ApplicationPlan("app", graph, 200.0, run_ms, 8).budgets(rule) for graph in (few, many)
        )
        assert before["b"] < before["a"]
        assert after["b"] > after["a"]


def test_a_join_is_planned_within_the_slo_and_nexus_refuses_it() -> None:
    graph = graph_of([stage("a"), stage("b"), stage("c", "a", "b")])
    plan = ApplicationPlan("app", graph, 100.0, {"a": line(1, 5), "b": line(3, 9), "c": line(1, 5)}, 4)
    budgets_ms = plan.budgets("carried")
    assert graph.longest_ms(budgets_ms) <= 100.0 * (1 + 1e-9)
    with pytest.raises(ConfigError, match="nexus divides trees only"):
        plan.budgets("nexus")


def test_nobody_undercuts_a_run_of_one_in_each_stage() -> None:
    plan = ApplicationPlan("app", fork(), 100.0, {"a": [3.0], "b": [5.0], "c": [2.0], "d": [7.0]}, 1)
    assert plan.least_ms == {"a": 12.0, "b": 5.0, "c": 9.0, "d": 7.0}


def test_what_may_never_run_takes_no_time_for_sure_and_a_join_behind_it_does() -> None:
    run_ms = {"a": [10.0], "b": [20.0], "c": [60.0], "d": [5.0]}
    for kind in ({"is_optional": True}, {"may_be_none": True}):
        b = Stage("b", ModelId("b"), ("a",), **kind)
        graph = graph_of([stage("a"), b, stage("c", "b"), stage("d", "a", "c")])
        plan = ApplicationPlan("app", graph, 100.0, run_ms, 1)
        assert plan.least_ms == {"a": 15.0, "b": 85.0, "c": 65.0, "d": 5.0}


def test_what_is_provably_too_late_goes_by_the_fastest_gpu() -> None:
    run_ms = {"a": line(4, 20), "b": line(4, 20)}
    graph = graph_of([stage("a"), stage("b", "a")])
    plan = ApplicationPlan("app", graph, 60.0, run_ms, 5, {"a": 6.0, "b": 6.0})
    assert plan.least_ms == {"a": 12.0, "b": 6.0}
    assert plan.longest_ms == 12.0


def test_a_split_starts_anew_in_each_stage() -> None:
    rule = Split({"a": 30.0, "b": 50.0})
    assert rule.due_at_ms("a", deadline_at_ms=100.0, now_ms=0.0) == 30.0
    assert rule.due_at_ms("b", deadline_at_ms=100.0, now_ms=10.0) == 60.0  # 20 ms that a left are lost
    assert rule.due_at_ms("b", deadline_at_ms=100.0, now_ms=70.0) == 100.0


def carried(graph: Graph, slo_ms: float) -> tuple[ApplicationPlan, dict[str, float]]:
    plan = ApplicationPlan("app", graph, slo_ms, {one.name: line(1, 10, 256) for one in graph.stages}, 8)
    return plan, graph.behind_ms(plan.budgets("carried"))


def test_a_carried_deadline_leaves_what_a_stage_did_not_use_to_those_behind_it() -> None:
    plan, behind_ms = carried(fork(), 200.0)
    rule, _ = plan.rule("carried")
    early, late = (rule.due_at_ms("c", deadline_at_ms=200.0, now_ms=now_ms) for now_ms in (10.0, 60.0))
    assert early == late == pytest.approx(200.0 - 0.7 * behind_ms["c"])
    assert rule.due_at_ms("d", deadline_at_ms=200.0, now_ms=60.0) == 200.0


@pytest.mark.parametrize("budget_ms", [44.0, 50.0, 60.0, 100.0, 199.0])
def test_a_request_with_a_short_budget_of_its_own_is_served_by_an_idle_cluster(budget_ms: float) -> None:
    """Each stage starts when the one before it has run alone, and has time to run alone, as have those behind it."""
    graph = graph_of([stage(name, *before) for name, before in zip("abcd", ("", "a", "b", "c"), strict=True)])
    plan, behind_ms = carried(graph, 200.0)
    rule, _ = plan.rule("carried")
    for place, name in enumerate("abcd"):
        now_ms = 11.0 * place
        due_at_ms = rule.due_at_ms(name, budget_ms, now_ms, budget_ms)
        assert due_at_ms - now_ms >= 11.0 - 1e-9
        assert budget_ms - due_at_ms >= plan.least_ms[name] - 11.0 - 1e-9
        assert budget_ms - due_at_ms <= 0.7 * behind_ms[name]
    assert rule.due_at_ms("a", 200.0, 0.0, 200.0) == pytest.approx(200.0 - 0.7 * behind_ms["a"])


def test_a_carried_deadline_follows_the_fan_outs_that_are_measured() -> None:
    graph = graph_of([stage("a"), stage("b", "a", fan_out=0.2)])
    plan, _ = carried(graph, 200.0)
    rule, measured = plan.rule("carried")
    before = rule.due_at_ms("a", deadline_at_ms=200.0, now_ms=0.0)
    for _ in range(1_000):
        measured.followed("b", 5)
    assert rule.due_at_ms("a", deadline_at_ms=700.0, now_ms=500.0) == 500.0 + before  # once a second
    assert rule.due_at_ms("a", deadline_at_ms=1_700.0, now_ms=1_500.0) < 1_500.0 + before - 20.0


def test_pard_expects_the_mean_waits_and_runs_of_the_longest_way_behind() -> None:
    measured = Measured(fork(), {"a": 10.0, "b": 10.0, "c": 10.0, "d": 10.0})
    rule = Pard(fork(), measured)
    assert rule.due_at_ms("a", deadline_at_ms=100.0, now_ms=0.0) == 80.0
    measured.ran("d", waited_ms=100.0, run_ms=10.0)
    assert (
        rule.due_at_ms("a", deadline_at_ms=100.0, now_ms=50.0) == 80.0
    )  # it hears of others' state now and then
    assert rule.due_at_ms("a", deadline_at_ms=100.0, now_ms=100.0) == pytest.approx(80.0 - WEIGHT * 100.0)
