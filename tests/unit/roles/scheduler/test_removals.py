"""No slice serves another model under a name than is wanted, whatever became of a removal: on virtual time."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from fabric.ids import FrontendId, ModelId, NodeId, PeerId, SliceId
from fabric.messages import (
    CurrentSlice,
    Directory,
    FrontendHello,
    ModelInfo,
    ModelsAdd,
    ModelSpec,
    ModelsRemove,
    PlanAsked,
    PlanMade,
    ReplicaInfo,
    SliceReady,
    SliceSpec,
)
from roles.scheduler.fleet import Fleet, SliceRecord
from roles.scheduler.planning.make_plan import make_plan
from tests.scheduler_stage import texts_within
from tests.unit.roles.scheduler import test_controller
from tests.unit.roles.scheduler.test_controller import (
    FIRST,
    FRONTEND,
    OPERATOR,
    Stage,
    model,
    two_nodes,
)
from tests.unit.roles.scheduler.test_plan_again import late

A, B = ModelId("a"), ModelId("b")
OTHER_LINE = {"alpha_ms": 1.0, "beta_ms": 50.0, "max_batch": 8}
BOTH = {"left/gpu0/0": ["a", "b"], "right/gpu0/0": ["a", "b"]}


def add(*sections: dict[str, Any]) -> ModelsAdd:
    return ModelsAdd(2, json.dumps(sections))


def exec_ms(stage: Stage, name: str) -> set[float]:
    """Of one request, on each slice that hosts it."""
    specs = (spec for hosted in stage.running.values() for spec in hosted.values())
    return {one.exec_ms[0] for spec in specs for one in spec.models if one.model_id == name}


# ------------------------------------------------------------ that fail


def test_a_model_whose_removal_has_no_plan_is_refused_all_the_same_and_comes_back_as_it_is_wanted_then() -> (
    None
):
    stage = two_nodes(model("a"), model("b", idempotent=False), placement="symphony")
    stage.run(2_000)
    stage.make_plan = late
    stage.hear(OPERATOR, ModelsRemove(1, (B,)))
    assert stage.answer().status == "failed"
    assert stage.code_of("b") == "ModelNotFound"
    assert stage.hosted() == BOTH
    stage.make_plan = make_plan
    stage.sent.clear()
    stage.hear(OPERATOR, add(model("b", profile=OTHER_LINE)))
    assert not infos(stage)[B].is_idempotent, "the slices host what may not run twice"
    stage.run(2_000)
    assert (stage.answer().status, stage.answer().kept) == ("ok", 0)
    assert exec_ms(stage, "b") == {51.0}
    assert infos(stage)[B].is_idempotent


def infos(stage: Stage) -> dict[ModelId, ModelInfo]:
    """As the newest directory has them."""
    (directory, *_) = [one.message for one in reversed(stage.sent) if isinstance(one.message, Directory)]
    return {one.model_id: one for one in directory.models}


@pytest.mark.parametrize(("before", "after"), [((), ("x", "y")), (("x", "y"), ()), (("x", "y"), ("x", "z"))])
def test_a_model_that_comes_back_to_slices_that_host_it_has_the_heads_it_comes_with(
    monkeypatch: pytest.MonkeyPatch, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    def having(heads: tuple[str, ...]) -> dict[str, Any]:
        return model("b", heads=[{"name": name} for name in heads]) if heads else model("b")

    nodes = [{"host": "left"}, {"host": "right"}]
    ran = Stage(model("a"), having(before), nodes=nodes, placement="symphony")
    ran.run(1_000)
    monkeypatch.setattr(test_controller, "make_plan", late)
    stage = Stage(model("a"), nodes=nodes, placement="symphony", ran=ran)
    stage.run(1_000)
    stage.make_plan = make_plan
    stage.hear(FRONTEND, FrontendHello(FrontendId("frontend-0"), FIRST, ("ipc:///f",)))
    stage.hear(OPERATOR, add(having(after)))
    stage.run(2_000)
    assert stage.answer().status == "ok"
    assert tuple(one.model_id for one in infos(stage)[B].heads) == after


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
    assert {name: one.is_idempotent for name, one in infos(stage).items()} == {"a": True, "b": False}


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


@pytest.mark.parametrize(("wanted_mb", "goes_first"), [(2_000, False), (4_000, True), (8_000, True)])
def test_what_is_replaced_takes_the_memory_that_it_was_told(wanted_mb: int, *, goes_first: bool) -> None:
    """Of 10 GB it has 7."""
    cluster = {"cluster": {"nodes": [{"host": "left", "memory_gb": 10}]}, "placement": "symphony"}

    def asked(memory_mb: int, current: tuple[CurrentSlice, ...]) -> PlanMade:
        document = json.dumps({"models": [model("b", memory_mb=memory_mb)], **cluster})
        return make_plan(PlanAsked(1, document, "", current, {}))

    (start,) = asked(7_000, ()).moves[0].starts
    told = sum(one.memory_bytes for one in start.spec.models)
    running = CurrentSlice(SliceId("left/gpu0/0"), NodeId("left"), 0, None, start.hints, told)
    (move,) = asked(wanted_mb, (running,)).moves
    assert [one.after for one in move.starts] == [("left/gpu0/0",) if goes_first else ()]


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


def test_nothing_is_learned_of_a_model_that_is_removed_while_its_slice_starts() -> None:
    """It would stay for ever: whatever is known of a model goes when it is removed."""
    specs = (ModelSpec(A, 100.0, 1), ModelSpec(B, 100.0, 1))
    record = SliceRecord(SliceSpec(SliceId("s"), 0, "emulated", None, specs), NodeId("left"), 0)
    fleet = Fleet([record], {A: 100.0, B: 100.0})
    fleet.slice_starts(record)
    fleet.forget_model(B)
    fleet.now_ms = 40.0
    hosted = tuple(ReplicaInfo(one.model_id, 1, (5.0,)) for one in specs)
    fleet.slice_ready(PeerId("worker"), SliceReady(SliceId("s"), FIRST, NodeId("left"), 0, (), hosted))
    assert texts_within(fleet.starts) & {A, B} == {A}
    fleet.forget_model(A)
    fleet.forget_slice(record)
    assert not texts_within(fleet.starts) & {A, B}
