"""A change whose moves fail has changed nothing: the same change again does what it would have done at first."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from fabric.ids import ModelId, NodeId
from fabric.messages import DrainAsked, ModelsAdd, ModelSet, PlanAsked, PlanChange, PlanMade
from roles.scheduler.planning.make_plan import make_plan
from tests.unit.roles.scheduler.test_controller import OPERATOR, Stage, model

NODES = ({"host": "left", "gpus": 2}, {"host": "right", "gpus": 2})
SOME, MORE, TOO_MUCH = 10, 700, 2_000  # r/s of a model: `TOO_MUCH` does not fit on these GPUs
FASTEST = {"alpha_ms": 1.0, "beta_ms": 200.0}  # one that no SLO of 100 ms allows


def staged() -> Stage:
    stage = Stage(model("a"), nodes=NODES, placement="gpulet")
    stage.run(2_000)
    return stage


def add(*models: dict[str, Any]) -> ModelsAdd:
    return ModelsAdd(1, json.dumps(models))


def answered(stage: Stage, change: PlanChange) -> str:
    stage.sent.clear()
    stage.hear(OPERATOR, change)
    stage.run(5_000)
    return stage.answer().status


def planned(stage: Stage) -> Mapping[str, object]:
    """What people are told of the plan, and what the next scheduler goes on from."""
    assert stage.scheduler.controller is not None
    settings, plan = stage.scheduler.controller.settings(), stage.status().plan
    assert plan is not None
    return {
        "models": {one.model_id: one.slo_ms for one in stage.status().models},
        "rates": {one.model_id: one.planned_rps for one in plan.models},
        "unplaced": plan.unplaced,
        "drained": plan.drained,
        "hosted": sorted(map(tuple, stage.hosted().values())),
        "next": (settings.desired, settings.rates, settings.unplaced),
    }


FAILING: dict[str, PlanChange] = {
    "some of a model": add(model("c", rate_rps=SOME)),
    "more of a model": add(model("c", rate_rps=MORE)),
    "too much of a model": add(model("c", rate_rps=TOO_MUCH)),
    "one beside another that has no place": add(
        model("c", rate_rps=MORE), model("d", profile=FASTEST, rate_rps=SOME)
    ),
    "a rate that is set": ModelSet(1, ModelId("a"), rate_rps=float(MORE)),
    "too much that is set": ModelSet(1, ModelId("a"), rate_rps=float(TOO_MUCH)),
    "an SLO that is set": ModelSet(1, ModelId("a"), slo_ms=40.0, rate_rps=float(MORE)),
    "a drain": DrainAsked(1, NodeId("left")),
}


@pytest.mark.parametrize("change", FAILING.values(), ids=FAILING)
def test_of_a_change_that_was_rolled_back_nothing_is_left(change: PlanChange) -> None:
    stage = staged()
    before = planned(stage)
    stage.failing = {"a", "c"}
    assert answered(stage, change) == "failed"
    assert planned(stage) == before


@pytest.mark.parametrize("name", ["some of a model", "too much that is set"])
@pytest.mark.parametrize("failed", FAILING.values(), ids=FAILING)
def test_what_is_asked_for_next_is_planned_as_if_it_were_the_first(failed: PlanChange, name: str) -> None:
    stage, fresh, change = staged(), staged(), FAILING[name]
    stage.failing = {"a", "c"}
    assert answered(stage, failed) == "failed"
    stage.failing = set()
    assert answered(stage, change) == answered(fresh, change)
    assert stage.asked[-1].rates_rps == fresh.asked[-1].rates_rps
    assert planned(stage) == planned(fresh)


def test_of_models_that_were_added_together_what_serves_stays_as_it_was_planned() -> None:
    """A move of a later wave fails."""

    def in_two_waves(asked: PlanAsked) -> PlanMade:
        made = make_plan(asked)
        moves = sorted(made.moves, key=lambda move: "d" in str(move.starts))
        assert len(moves) == 2
        return replace(made, moves=tuple(replace(move, wave=wave) for wave, move in enumerate(moves)))

    stage = Stage(model("a"), nodes=NODES, placement="exclusive")
    stage.run(2_000)
    fresh = Stage(model("a"), nodes=NODES, placement="exclusive")
    fresh.run(2_000)
    stage.make_plan = in_two_waves
    stage.failing = {"d"}
    assert answered(stage, add(model("c", rate_rps=MORE), model("d", rate_rps=MORE))) == "failed"
    assert answered(fresh, add(model("c", rate_rps=MORE))) in ("ok", "partial")
    assert planned(stage) == planned(fresh)
