"""What a plan was made for is not forgotten when nothing comes of it: on virtual time."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fabric.ids import ModelId, NodeId, PeerId, SliceId
from fabric.messages import (
    DrainAsked,
    ModelsAdd,
    ModelsRemove,
    PlanAsked,
    PlanMade,
    SliceChanged,
    SliceStatus,
)
from roles.scheduler.planning.make_plan import make_plan
from tests.unit.roles.scheduler.test_controller import (
    FIRST,
    OPERATOR,
    Stage,
    add,
    model,
    one_slice,
    two_nodes,
)


def late(asked: PlanAsked) -> PlanMade:
    """On a busy machine."""
    return PlanMade(asked.number, reason="the placement was not computed within 60 s")


def without_right(*names: str, plan: Callable[[PlanAsked], PlanMade]) -> Stage:
    """Of two nodes one has gone, for longer than is waited for it."""
    stage = two_nodes(*map(model, names), placement="symphony")
    stage.run(2_000)
    stage.node_goes("right")
    stage.make_plan = plan
    stage.run(15_000)
    return stage


def test_gpus_that_went_are_planned_without_after_a_plan_that_took_too_long() -> None:
    stage = without_right("a", "b", plan=late)
    assert len(stage.asked) == 1
    stage.make_plan = make_plan
    stage.run(20_000)
    assert len(stage.asked) == 1, "nothing is tried again by itself for a while"
    assert {one.slice_id for one in stage.status().slices} == {"left/gpu0/0", "right/gpu0/0"}
    stage.run(15_000)
    assert {one.slice_id for one in stage.status().slices} == {"left/gpu0/0"}


def test_gpus_that_came_are_planned_with_after_a_plan_that_took_too_long() -> None:
    stage = without_right("a", plan=make_plan)
    assert set(stage.hosted()) == {"left/gpu0/0"}
    stage.make_plan = late
    stage.node_comes("right")
    stage.run(5_000)
    stage.make_plan = make_plan
    stage.run(40_000)
    assert set(stage.hosted()) == {"left/gpu0/0", "right/gpu0/1"}


def test_gpus_that_came_are_planned_with_after_a_move_to_them_has_failed() -> None:
    stage = without_right("a", plan=make_plan)
    stage.failing = {"a"}
    stage.node_comes("right")
    stage.run(5_000)
    assert set(stage.hosted()) == {"left/gpu0/0"}
    stage.failing = set()
    stage.run(40_000)
    assert set(stage.hosted()) == {"left/gpu0/0", "right/gpu0/2"}


def test_a_removed_model_goes_from_its_slices_after_a_plan_that_took_too_long() -> None:
    """It is unknown from the moment of the removal, so nobody can ask for that again."""
    stage = two_nodes(model("a"), model("b"), placement="symphony")
    stage.run(2_000)
    stage.make_plan = late
    stage.hear(OPERATOR, ModelsRemove(1, (ModelId("b"),)))
    assert stage.answer().status == "failed"
    stage.make_plan = make_plan
    stage.run(40_000)
    assert set(map(tuple, stage.hosted().values())) == {("a",)}


def test_nothing_is_planned_again_once_a_plan_was_carried_out() -> None:
    stage = without_right("a", "b", plan=late)
    stage.make_plan = make_plan
    stage.run(200_000)
    assert len(stage.asked) == 2


def test_a_node_that_goes_while_a_slice_starts_there_holds_nobody_up_for_long() -> None:
    stage = Stage(
        model("a"), nodes=[{"host": "left"}, {"host": "right"}, {"host": "more"}], placement="symphony"
    )
    stage.run(2_000)
    stage.node_goes("right")
    stage.run(15_000)
    stage.is_starting_slow = True
    stage.node_comes("right")
    stage.run(2_000)
    assert SliceId("right/gpu0/1") in stage.running[NodeId("right")]
    stage.node_goes("right")
    stage.run(60_000)
    plan = stage.status().plan
    assert plan is not None
    assert plan.state == "steady"
    assert "right" not in {one.slice_id.partition("/")[0] for one in stage.status().slices}


def test_what_fails_each_time_is_planned_ever_more_rarely() -> None:
    stage = without_right("a", "b", plan=late)
    asked = []
    for _ in range(20):
        before = len(stage.asked)
        stage.run(60_000)
        asked.append(len(stage.asked) - before)
    assert asked[0] == 1
    assert sum(asked[10:]) <= 2, "every eight minutes at last"
    stage.make_plan = make_plan
    stage.run(500_000)
    assert {one.slice_id for one in stage.status().slices} == {"left/gpu0/0"}
    asked_by_then = len(stage.asked)
    stage.run(500_000)
    assert len(stage.asked) == asked_by_then


def test_however_often_a_change_fails_the_next_one_is_taken() -> None:
    """A script may ask for the same one all day."""
    stage = two_nodes(model("a"), placement="symphony")
    stage.run(2_000)
    stage.failing = {"b"}
    for _ in range(1_100):
        stage.sent.clear()
        stage.hear(OPERATOR, add("b"))
        stage.run(300)
        assert stage.answer().status == "failed"
    stage.failing = set()
    stage.sent.clear()
    stage.hear(OPERATOR, add("b"))
    stage.run(300)
    assert stage.answer().status == "ok"


def test_a_slice_that_had_failed_is_tried_with_what_it_hosts_now() -> None:
    """It would fail every change of its models at once, for what it hosted before."""
    stage = one_slice("a")
    stage.failing = {"a"}
    stage.run(10)
    node_id, slice_id = NodeId("left"), SliceId("left/gpu0/0")
    stage.hear(
        PeerId("node-left/00000001"), SliceChanged(node_id, SliceStatus(slice_id, FIRST, "failed", "no file"))
    )
    stage.failing = set()
    stage.hear(OPERATOR, add("b"))
    stage.run(2_000)
    assert stage.answer().status == "ok"
    assert stage.hosted() == {"left/gpu0/0": ["a", "b"]}


def test_whoever_goes_on_from_a_plan_that_was_given_up_makes_it_again() -> None:
    former = two_nodes(model("a"), model("b"), placement="symphony")
    former.run(2_000)
    former.make_plan = late
    former.hear(OPERATOR, ModelsRemove(1, (ModelId("b"),)))
    assert former.answer().status == "failed"
    nodes = [{"host": "left"}, {"host": "right"}]
    heir = Stage(model("a"), model("b"), nodes=nodes, placement="symphony", ran=former, takes_over=True)
    heir.run(10_000)
    assert set(map(tuple, heir.hosted().values())) == {("a",)}
    assert len(heir.asked) == 1
    next_heir = Stage(model("a"), model("b"), nodes=nodes, placement="symphony", ran=heir, takes_over=True)
    next_heir.run(10_000)
    assert next_heir.asked == [], "once"


def given_ones(*hosted: tuple[int, str]) -> dict[str, Any]:
    return {"given": {"slices": [{"gpu": gpu, "models": [{"model": name}]} for gpu, name in hosted]}}


def test_given_slices_are_planned_without_a_model_that_was_removed_and_a_gpu_that_is_drained() -> None:
    names, nodes = ("a", "b", "c"), [{"host": "left", "gpus": 3}]
    placement = given_ones((0, "a"), (1, "b"), (2, "c"))
    stage = Stage(*map(model, names), nodes=nodes, placement=placement)
    stage.run(2_000)
    stage.hear(OPERATOR, ModelsRemove(1, (ModelId("b"),)))
    stage.run(2_000)
    assert stage.answer().status == "ok"
    stage.sent.clear()
    stage.hear(OPERATOR, DrainAsked(2, NodeId("left"), 0))
    stage.run(2_000)
    (left,) = stage.answer().unplaced
    assert (left.model_id, left.reason) == ("a", "GPU 0 is not in use")
    assert list(stage.hosted().values()) == [["c"]]
    stage.sent.clear()
    stage.hear(OPERATOR, DrainAsked(3, NodeId("left"), 0, is_back=True))
    stage.run(2_000)
    assert stage.answer().status == "ok"
    assert sorted(stage.hosted().values()) == [["a"], ["c"]]


def test_given_groups_are_planned_without_a_model_that_was_removed_and_not_with_one_that_is_in_none() -> None:
    profile = {"profile": {"ref": "thesis-v100/resnet50"}}
    usher = {"wsm-usher": {"groups": [["a", "b"]]}}
    nodes = [{"host": "left", "gpus": 2, "type": "v100", "memory_gb": 16}]
    stage = Stage(model("a", **profile), model("b", **profile), nodes=nodes, placement=usher)
    stage.run(2_000)
    stage.hear(OPERATOR, ModelsRemove(1, (ModelId("b"),)))
    stage.run(2_000)
    assert stage.answer().status == "ok"
    assert list(stage.hosted().values()) == [["a"]]
    stage.sent.clear()
    stage.hear(OPERATOR, ModelsAdd(2, json.dumps([model("c", **profile)])))
    stage.run(2_000)
    (left,) = stage.answer().unplaced
    assert (left.model_id, left.reason) == ("c", "it is in no group of placement.wsm-usher.groups")
