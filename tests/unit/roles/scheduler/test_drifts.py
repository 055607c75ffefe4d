"""Plans for drifted rates: nobody who is served loses its place for one, nor do other reasons to plan wait for it. On virtual time."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from fabric.ids import ModelId
from fabric.messages import Arrivals, PlanAsked, PlanMade
from roles.scheduler.planning.make_plan import make_plan
from tests.unit.roles.scheduler.test_controller import FRONTEND, Stage, model
from tests.unit.roles.scheduler.test_rates_of_the_former import MANY, SOME, B, loaded, staged, undeclared

EVERY_MS = 500.0


def without_b(asked: PlanAsked) -> PlanMade:
    """A policy that has no place for `b`."""
    if asked.grown:
        return make_plan(asked)
    return make_plan(replace(asked, rates_rps={**asked.rates_rps, "b": 0.0}))


def asked_for(stage: Stage, rps: int, for_ms: float) -> None:
    """So many requests for `a`, most of which find no slice free: they count as asked for all the same."""
    until_ms = stage.now_ms + for_ms
    while stage.now_ms < until_ms:
        stage.hear(FRONTEND, Arrivals(ModelId("a"), int(stage.now_ms), int(rps * EVERY_MS / 1e3), 50.0))
        stage.run(EVERY_MS)


def drifting(**gpus: int) -> Stage:
    """Rates are known, and from here on no plan has a place for `b`."""
    nodes = [{"host": host, "gpus": count} for host, count in gpus.items()]
    stage = Stage(undeclared("a"), model("b"), nodes=nodes, placement="gpulet")
    asked_for(stage, 20, 26_000)
    stage.make_plan = without_b
    return stage


def hosts_b(stage: Stage) -> bool:
    return any("b" in models for models in stage.hosted().values())


@pytest.mark.parametrize("is_away", [False, True])
def test_a_drift_takes_no_models_place_also_while_a_gpu_is_away(*, is_away: bool) -> None:
    stage = drifting(left=2, right=1)
    if is_away:
        stage.make_plan = make_plan
        stage.node_goes("right")
        asked_for(stage, 20, 15_000)
        stage.make_plan = without_b
    assert hosts_b(stage)
    asked_for(stage, 60, 40_000)
    plan = stage.status().plan
    assert plan is not None
    assert any("no place for b: the old plan stays" in one for one in plan.lately)
    assert hosts_b(stage)


def test_where_gpus_have_gone_something_may_have_to_go() -> None:
    stage = drifting(left=2, right=1)
    stage.node_goes("right")
    stage.run(15_000)
    assert not hosts_b(stage)


def test_a_drift_that_is_refused_is_planned_ever_more_rarely_and_slow_slices_grow_meanwhile() -> None:
    resnet = {"slo_ms": 60, "profile": {"ref": "igniter-v100/resnet50"}}
    models = (
        {key: value for key, value in model("a", **resnet).items() if key != "rate_rps"},
        model("b", **resnet),
    )
    stage = Stage(*models, nodes=[{"host": "left", "type": "v100"}], placement="igniter")
    asked_for(stage, 20, 26_000)
    stage.make_plan = without_b
    controller = stage.scheduler.controller
    assert controller is not None
    before = len(stage.asked)
    until_ms = stage.now_ms + 250_000
    while stage.now_ms < until_ms:
        asked_for(stage, 60, EVERY_MS)
        for record in list(stage.scheduler._fleet.slices.values()):
            for spec in record.spec.models:
                for _ in range(5):
                    controller._run_time_watch.note(record, spec.model_id, 1, 1e4)
    asked = stage.asked[before:]
    assert sum(not one.grown for one in asked) <= 4, "after 30, 60 and 120 s"
    assert any(one.grown for one in asked)


def test_a_slice_that_cannot_grow_serves_on_and_other_plans_do_not_wait_for_it() -> None:
    """There is no memory for a larger one beside it."""
    given = {"given": {"slices": [{"gpu": 0, "share_percent": 25, "models": [{"model": "a", "batch": 4}]}]}}
    nodes = [{"host": host, "memory_gb": 10} for host in ("left", "right")]
    stage = Stage(model("a", memory_mb=6_000), nodes=nodes, placement=given)
    controller = stage.scheduler.controller
    assert controller is not None

    def slow(for_ms: float) -> None:
        until_ms = stage.now_ms + for_ms
        while stage.now_ms < until_ms:
            for record in list(stage.scheduler._fleet.slices.values()):
                controller._run_time_watch.note(record, ModelId("a"), 1, 11.0)
            stage.run(100)

    stage.run(1_000)
    stage.node_goes("right")
    stage.is_starting_slow = True
    slow(9_000)
    assert [bool(one.grown) for one in stage.asked] == [True]
    assert set(stage.hosted()) == {"left/gpu0/0"}
    assert stage.code_of("a") == ""
    slow(3_000)
    assert [bool(one.grown) for one in stage.asked] == [True, False], "of GPUs that have gone"
    slow(60_000)
    assert sum(bool(one.grown) for one in stage.asked) == 3, "every 30 s"


@pytest.mark.parametrize("a", [model("a", rate_rps=0), undeclared("a")], ids=["declared", "not declared"])
def test_a_model_whose_declared_rate_is_0_keeps_its_place_when_it_falls_silent(a: dict[str, object]) -> None:
    """The plan without it was refused, and so was each plan that followed another model's rate."""
    stage = loaded(staged(a, B), MANY, 30_000)
    assert any("a" in models for models in stage.hosted().values())
    stage.run(100_000)
    plan = stage.status().plan
    assert plan is not None
    assert not any("given up" in one for one in plan.lately)
    assert 0 < stage.asked[-1].rates_rps["a"] < 1
    assert any("a" in models for models in stage.hosted().values())
    loaded(stage, SOME, 30_000)
    assert stage.asked[-1].rates_rps["a"] > 1
