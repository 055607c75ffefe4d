"""Whoever goes on from a plan knows the rates that it was made for, until it has measured its own."""

from __future__ import annotations

from typing import Any

import pytest

from fabric.ids import ModelId, NodeId, PeerId
from fabric.messages import Arrivals, Done, DrainAsked, ModelSet, PlanChange, RunBatch
from tests.unit.roles.scheduler.test_controller import FRONTEND, OPERATOR, Stage, add, model

NODES = ({"host": "left", "gpus": 2}, {"host": "right", "gpus": 2})
EVERY_MS = 25.0
MEASURED_MS = 27_000.0  # a plan for what was measured is made after 20 s
JUST_BEGUN_MS = 2_000.0
SOME, MANY = 1, 18  # requests every 25 ms
B = model("b")


def undeclared(name: str) -> dict[str, Any]:
    return {key: value for key, value in model(name).items() if key != "rate_rps"}


def staged(*models: dict[str, Any], ran: Stage | None = None, takes_over: bool = False) -> Stage:
    return Stage(*models, nodes=NODES, placement="gpulet", ran=ran, takes_over=takes_over)


def loaded(stage: Stage, count: int, for_ms: float) -> Stage:
    """So many requests for model a every 25 ms, and every batch comes back."""
    until_ms = stage.now_ms + for_ms
    seq = int(stage.now_ms) * MANY
    while stage.now_ms < until_ms:
        seq += count
        stage.hear(FRONTEND, Arrivals(ModelId("a"), seq, count, 100.0))
        stage.run(EVERY_MS)
        for batch in [one.message for one in stage.sent if isinstance(one.message, RunBatch)]:
            size = sum(run.count for part in batch.parts for run in part.runs)
            done = Done(batch.batch_id, batch.slice_id, batch.model_id, "ok", size, (), 0.0, 0.0, 5.0 + size)
            node = batch.slice_id.partition("/")[0]
            stage.hear(PeerId(f"worker-{node}-0/00000001"), done)
        stage.sent.clear()
    return stage


def placed_rps(stage: Stage) -> dict[str, float]:
    return dict(stage.asked[-1].rates_rps)


@pytest.mark.parametrize(
    "change",
    [ModelSet(1, ModelId("b"), slo_ms=90.0), DrainAsked(1, NodeId("left"), 1), add("c")],
    ids=["a model is set", "a GPU is drained", "a model is added"],
)
@pytest.mark.parametrize(("a", "count"), [(undeclared("a"), SOME), (model("a"), MANY)])
def test_one_that_takes_over_plans_for_what_the_former_had_measured(
    a: dict[str, Any], count: int, change: PlanChange
) -> None:
    former = loaded(staged(a, B), count, MEASURED_MS)
    (measured_rps,) = {one.rates_rps["a"] for one in former.asked}
    slices = sum("a" in models for models in former.hosted().values())
    heir = loaded(staged(a, B, ran=former, takes_over=True), count, JUST_BEGUN_MS)
    heir.hear(OPERATOR, change)
    heir.run(1_000)
    assert placed_rps(heir)["a"] == measured_rps
    assert sum("a" in models for models in heir.hosted().values()) == slices
    next_heir = staged(a, B, ran=heir, takes_over=True)
    next_heir.hear(OPERATOR, ModelSet(2, ModelId("b"), slo_ms=80.0))
    assert placed_rps(next_heir)["a"] == measured_rps, "who knew it from another one hands it on"


def test_a_load_that_comes_back_slowly_after_a_take_over_has_not_drifted() -> None:
    """A rate is the highest reading of 30 s, and those of the former scheduler are not older."""
    former = loaded(staged(model("a"), B), MANY, MEASURED_MS)
    heir = staged(model("a"), B, ran=former, takes_over=True)
    heir.run(4_000)
    loaded(heir, MANY, 4_000)
    heir.hear(OPERATOR, ModelSet(1, ModelId("b"), slo_ms=90.0))
    assert placed_rps(heir) == placed_rps(former)


@pytest.mark.parametrize(("a", "count"), [(undeclared("a"), SOME), (model("a"), MANY)])
def test_a_changed_file_is_planned_for_what_was_measured_before_it(a: dict[str, Any], count: int) -> None:
    former = loaded(staged(a, B), count, MEASURED_MS)
    (measured_rps,) = {one.rates_rps["a"] for one in former.asked}
    slices = sum("a" in models for models in former.hosted().values())
    heir = staged(a, B, model("c"), ran=former)
    heir.run(1_000)
    assert placed_rps(heir) == {"a": measured_rps, "b": 20.0, "c": 20.0}
    assert sum("a" in models for models in heir.hosted().values()) == slices
    assert heir.code_of("a") == ""


@pytest.mark.parametrize(
    ("before", "after", "expected_rps"),
    [
        (model("a", rate_rps=900), model("a", rate_rps=100), 100.0),
        (model("a", rate_rps=100), model("a", rate_rps=900), 900.0),
        (model("a", rate_rps=100), model("a", rate_rps=101), 101.0),
        (model("a", rate_rps=900), undeclared("a"), 900.0),
    ],
    ids=["less", "more", "hardly more", "nothing"],
)
def test_what_a_changed_file_declares_counts_and_not_what_the_former_one_did(
    before: dict[str, Any], after: dict[str, Any], expected_rps: float
) -> None:
    heir = staged(after, B, ran=staged(before, B))
    heir.run(1_000)
    assert placed_rps(heir) == {"a": expected_rps, "b": 20.0}


def test_a_declared_rate_that_is_set_lower_after_a_take_over_is_planned_for() -> None:
    heir = staged(model("a", rate_rps=900), B, ran=staged(model("a", rate_rps=900), B), takes_over=True)
    heir.hear(OPERATOR, ModelSet(1, ModelId("a"), rate_rps=100.0))
    assert placed_rps(heir) == {"a": 100.0, "b": 20.0}


def test_a_load_that_has_gone_is_followed_as_soon_as_that_is_measured() -> None:
    former = loaded(staged(model("a"), B), MANY, MEASURED_MS)
    heir = staged(model("a"), B, ran=former, takes_over=True)
    heir.run(60_000)
    assert placed_rps(heir) == {"a": 20.0, "b": 20.0}


def test_of_a_model_that_is_gone_nothing_is_remembered() -> None:
    former = loaded(staged(undeclared("a"), B), SOME, MEASURED_MS)
    heir = staged(B, ran=former)
    heir.run(1_000)
    assert placed_rps(heir) == {"b": 20.0}
    again = staged(undeclared("a"), B, ran=heir)
    again.run(1_000)
    assert placed_rps(again) == {"b": 20.0}


def test_a_model_that_nobody_asks_for_keeps_a_place_and_does_not_hold_up_the_others() -> None:
    former = staged(model("a"), B)
    stage = loaded(staged(undeclared("a"), undeclared("b"), ran=former), SOME, 65_000.0)
    assert 0 < placed_rps(stage)["b"] < 1
    stage.hear(OPERATOR, add("c"))
    stage.run(2_000)
    assert "b" in {name for names in stage.hosted().values() for name in names}
    loaded(stage, MANY, MEASURED_MS)
    assert placed_rps(stage)["a"] > 500
    plan = stage.status().plan
    assert plan is not None
    assert not any("given up" in one for one in plan.lately)
