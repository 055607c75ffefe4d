"""A removal that comes to nothing changes nothing, and no slice serves another model under a name than is wanted: on virtual time."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from fabric.ids import FrontendId, ModelId, NodeId, SliceId
from fabric.messages import (
    CurrentSlice,
    Directory,
    FrontendHello,
    Left,
    ModelsAdd,
    ModelSpec,
    ModelsRemove,
    NewSlice,
    PlanAsked,
    PlanMade,
    SliceSpec,
)
from roles.scheduler.fleet import Fleet, SliceRecord
from roles.scheduler.planning.controller import REST_AFTER_FAILURE_MS
from roles.scheduler.planning.make_plan import make_plan
from tests.unit.roles.scheduler import test_controller
from tests.unit.roles.scheduler.test_controller import (
    FIRST,
    FRONTEND,
    OPERATOR,
    Stage,
    model,
    one_slice,
    two_nodes,
)
from tests.unit.roles.scheduler.test_plan_again import late

B = ModelId("b")
OTHER_LINE = {"alpha_ms": 1.0, "beta_ms": 50.0, "max_batch": 8}
BOTH = {"left/gpu0/0": ["a", "b"], "right/gpu0/0": ["a", "b"]}


def add(*sections: dict[str, Any]) -> ModelsAdd:
    return ModelsAdd(2, json.dumps(sections))


def exec_ms(stage: Stage, name: str) -> set[float]:
    """Of one request, on each slice that hosts it."""
    specs = (spec for hosted in stage.running.values() for spec in hosted.values())
    return {one.exec_ms[0] for spec in specs for one in spec.models if one.model_id == name}


# ------------------------------------------------------------ that fail


def test_a_model_whose_removal_has_no_plan_is_served_as_before_and_can_be_removed_again() -> None:
    stage = two_nodes(model("a"), model("b", idempotent=False), placement="symphony")
    stage.run(2_000)
    stage.make_plan = late
    before = stage.scheduler.settings()
    stage.hear(OPERATOR, ModelsRemove(1, (B,)))
    assert stage.answer().status == "failed"
    assert stage.scheduler.settings() == before
    assert stage.code_of("b") == ""
    stage.hear(OPERATOR, add(model("b")))
    assert stage.answer().code == "NameTaken"
    stage.make_plan = make_plan
    stage.run(2 * REST_AFTER_FAILURE_MS)
    assert stage.hosted() == BOTH
    stage.sent.clear()
    stage.hear(OPERATOR, ModelsRemove(3, (B,)))
    stage.run(1_000)
    assert stage.answer().status == "ok"
    assert set(map(tuple, stage.hosted().values())) == {("a",)}


def test_a_model_whose_removal_fails_on_the_way_is_served_throughout() -> None:
    stage = one_slice("a", "b")

    def with_a_start(asked: PlanAsked) -> PlanMade:
        made = make_plan(asked)
        (move,) = made.moves
        spec = stage.running[NodeId("left")][SliceId("left/gpu0/0")]
        models = tuple(one for one in spec.models if one.model_id == "a")
        start = NewSlice(NodeId("left"), replace(spec, slice_id=SliceId(""), models=models), ())
        return replace(made, moves=(replace(move, starts=(start,)),))

    stage.run(2_000)
    stage.make_plan = with_a_start
    stage.is_starting_slow = True
    stage.hear(OPERATOR, ModelsRemove(1, (B,)))
    stage.run(1_000)
    assert stage.code_of("b") == "", "it can still come to nothing"
    stage.failing = {"a"}
    ((slice_id, spec),) = [one for one in stage.running[NodeId("left")].items() if one[0] != "left/gpu0/0"]
    stage.start(NodeId("left"), spec)
    stage.run(1_000)
    assert (stage.answer().status, stage.answer().code) == ("failed", "MoveFailed")
    assert slice_id not in stage.hosted()
    assert stage.hosted() == {"left/gpu0/0": ["a", "b"]}
    assert stage.code_of("b") == ""


def test_a_model_that_every_frontend_has_left_is_not_planned_away_without_rest() -> None:
    nodes = [{"host": "left"}, {"host": "right"}]
    ran = Stage(model("a"), model("b"), nodes=nodes, placement="symphony")
    ran.run(1_000)
    stage = Stage(model("a"), nodes=nodes, placement="symphony", ran=ran, elsewhere=["b"])
    stage.hear(FRONTEND, FrontendHello(FrontendId("frontend-0"), FIRST, ("ipc:///f",)))
    stage.run(1_000)
    stage.make_plan = late
    asked_by_then = len(stage.asked)
    stage.hear(FRONTEND, Left(B))
    stage.run(0.5 * REST_AFTER_FAILURE_MS)
    assert len(stage.asked) == asked_by_then + 1
    assert B in stage.scheduler.settings().priorities
    stage.make_plan = make_plan
    stage.run(REST_AFTER_FAILURE_MS)
    assert set(map(tuple, stage.hosted().values())) == {("a",)}


# ------------------------------------------------------------ another model of that name


def test_a_model_of_a_name_that_slices_still_host_is_not_served_by_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The file lacks it now, and nothing has been planned for that file yet."""
    nodes = [{"host": "left"}, {"host": "right"}]
    ran = Stage(model("a"), model("b"), nodes=nodes, placement="symphony")
    ran.run(1_000)
    monkeypatch.setattr(test_controller, "make_plan", late)
    stage = Stage(model("a"), nodes=nodes, placement="symphony", ran=ran)
    stage.run(1_000)
    assert (stage.hosted(), exec_ms(stage, "b")) == (BOTH, {6.0})
    stage.make_plan = make_plan
    stage.hear(OPERATOR, add(model("b", profile=OTHER_LINE, idempotent=False)))
    stage.run(2_000)
    assert (stage.answer().status, stage.answer().kept) == ("ok", 0)
    assert exec_ms(stage, "b") == {51.0}
    (directory, *_) = [one.message for one in reversed(stage.sent) if isinstance(one.message, Directory)]
    assert {one.model_id: one.is_idempotent for one in directory.models} == {"a": True, "b": False}


@pytest.mark.parametrize(
    ("changed", "stays"),
    [
        ({}, True),
        ({"slo_ms": 90}, True),
        ({"rate_rps": 30, "priority": 3, "term": 2, "arrival": {"process": "uniform"}}, True),
        ({"profile": OTHER_LINE}, False),
        ({"idempotent": False}, False),
        ({"run_limit_ms": 900}, False),
        ({"memory_mb": 10}, False),
        ({"heads": [{"name": "x"}, {"name": "y"}]}, False),
    ],
)
def test_a_slice_is_kept_while_it_hosts_what_is_wanted(changed: dict[str, Any], *, stays: bool) -> None:
    cluster = {"cluster": {"nodes": [{"host": "left"}]}, "placement": "symphony"}

    def asked(section: dict[str, Any], current: tuple[CurrentSlice, ...]) -> PlanMade:
        document = json.dumps({"models": [section, model("c")], **cluster})
        return make_plan(PlanAsked(1, document, "", current, {}))

    (start,) = asked(model("b"), ()).moves[0].starts
    running = CurrentSlice(SliceId("left/gpu0/0"), NodeId("left"), 0, None, start.hints, 0)
    made = asked({**model("b"), **changed}, (running,))
    assert made.reason == ""
    assert [one.slice_id for one in made.kept] == ["left/gpu0/0"] * stays
    assert [move.ends for move in made.moves] == [("left/gpu0/0",)] * (not stays)
    forgotten = tuple(replace(hint, digest=0) for hint in start.hints)
    made = asked({**model("b"), **changed}, (replace(running, hints=forgotten),))
    assert [one.slice_id for one in made.kept] == ["left/gpu0/0"], "of an older plan nothing is known"


def test_what_a_file_says_is_the_same_as_its_json() -> None:
    """YAML has numbers as keys."""
    line = {size: 5.0 + size for size in (1, 2, 10)}
    stage = Stage(model("a", profile={"table": line}), nodes=[{"host": "left"}], placement="symphony")
    stage.run(1_000)
    stage.hear(OPERATOR, add(model("b")))
    stage.run(1_000)
    assert (stage.answer().status, stage.answer().started, stage.answer().changed) == ("ok", 0, 1)


def test_a_model_that_comes_back_to_a_slice_that_hosts_it_still_runs_once_there() -> None:
    spec = ModelSpec(B, 100.0, 1, is_idempotent=False)
    record = SliceRecord(SliceSpec(SliceId("s"), 0, "emulated", None, (spec,)), NodeId("left"), 0)
    fleet = Fleet([record], {B: 100.0})
    fleet.forget_model(B)
    fleet.put_model(B, 100.0)
    (info,) = fleet.models()
    assert not info.is_idempotent
