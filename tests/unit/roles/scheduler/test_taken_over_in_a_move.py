"""A scheduler that takes over while the former one moves slices goes on from the plan that was settled last."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from fabric.ids import ModelId, NodeId, SliceId
from fabric.messages import MoveInfo, NewSlice, PlanAsked, PlanMade, SliceSpec
from roles.scheduler.planning.make_plan import make_plan
from tests.unit.roles.scheduler import test_controller
from tests.unit.roles.scheduler.test_controller import OPERATOR, Stage, add, model
from tests.unit.roles.scheduler.test_plan_again import late

NODES = ({"host": "left"}, {"host": "right"})


def anew(asked: PlanAsked) -> PlanMade:
    """The plan with slices in the place of those that it would change."""
    made = make_plan(asked)
    moves = []
    for change in (change for move in made.moves for change in move.changes):
        node = NodeId(change.slice_id.partition("/")[0])
        start = NewSlice(node, SliceSpec(SliceId(""), 0, "emulated", None, change.models), change.hints)
        moves.append(MoveInfo(0, (start,), (change.slice_id,)))
    return replace(made, moves=tuple(moves))


@pytest.mark.parametrize("times", [1, 3])
def test_no_slice_gets_the_id_of_one_that_a_former_scheduler_had_begun(times: int) -> None:
    """Its agent may still speak of that one, and another move would take it for its own."""
    stage = Stage(model("a"), nodes=NODES, placement="symphony")
    stage.run(1_000)
    begun: set[str] = set()
    for number in range(times):
        stage.make_plan = anew
        stage.is_starting_slow = True
        before = set(stage.hosted())
        stage.hear(OPERATOR, add(f"b{number}"))
        fresh = set(stage.hosted()) - before
        assert len(fresh) == 2
        assert not fresh & begun
        begun |= fresh
        stage = Stage(model("a"), nodes=NODES, placement="symphony", ran=stage, takes_over=True)
        assert set(stage.hosted()) == before, "the plan that was settled"


def test_the_plan_that_was_settled_has_the_models_that_a_changed_file_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until the first plan for that file is."""
    ran = Stage(model("a"), model("b"), nodes=NODES, placement="symphony")
    ran.run(1_000)
    monkeypatch.setattr(test_controller, "make_plan", late)
    stage = Stage(model("a"), nodes=NODES, placement="symphony", ran=ran)
    controller = stage.scheduler.controller
    assert controller is not None
    stage.is_delivering = True  # the planner has not answered yet
    stage.run(100)
    assert not controller.is_steady
    settled = controller.settled_plan()
    assert {one.model_id for one in settled.settings.models} == {ModelId("a"), ModelId("b")}
