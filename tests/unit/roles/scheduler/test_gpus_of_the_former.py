"""Whoever goes on from a plan knows which GPUs it was made without: when they are back they are planned with."""

from __future__ import annotations

import json

import pytest

from fabric.ids import NodeId
from fabric.messages import GpuRef
from roles.scheduler.replay_start import about_scheduler, settings_of
from tests.unit.roles.scheduler.test_controller import Stage, model, two_nodes

NODES = ({"host": "left"}, {"host": "right"})
RIGHT = GpuRef(NodeId("right"), 0)


def without_right() -> Stage:
    """One of two nodes was planned away."""
    stage = two_nodes(model("a"), model("b"), placement="symphony")
    stage.run(2_000)
    stage.node_goes("right")
    stage.run(20_000)
    assert set(stage.hosted()) == {"left/gpu0/0"}
    return stage


def heir_of(former: Stage) -> Stage:
    return Stage(model("a"), model("b"), nodes=NODES, placement="symphony", ran=former, takes_over=True)


def nodes_of(stage: Stage) -> set[str]:
    return {slice_id.partition("/")[0] for slice_id in stage.hosted()}


def test_a_gpu_that_is_back_when_another_scheduler_goes_on_is_planned_with() -> None:
    heir = heir_of(without_right())
    heir.run(5_000)
    assert nodes_of(heir) == {"left", "right"}
    assert len(heir.asked) == 1
    next_heir = heir_of(heir)
    next_heir.run(60_000)
    assert next_heir.asked == []


def test_one_that_is_still_away_is_none_to_plan_for_until_it_comes() -> None:
    heir = heir_of(without_right())
    heir.node_goes("right")
    heir.run(60_000)
    assert heir.asked == []
    heir.node_comes("right")
    heir.run(5_000)
    assert nodes_of(heir) == {"left", "right"}


def test_a_scheduler_that_is_lost_while_slices_move_back_leaves_that_to_the_next() -> None:
    former = without_right()
    former.is_starting_slow = True
    former.node_comes("right")
    former.run(2_000)
    controller = former.scheduler.controller
    assert controller is not None
    assert controller.is_moving
    heir = heir_of(former)
    heir.run(5_000)
    assert nodes_of(heir) == {"left", "right"}


def test_another_file_is_planned_without_the_gpus_that_are_away() -> None:
    former = without_right()
    heir = Stage(model("a"), model("b"), model("c"), nodes=NODES, placement="symphony", ran=former)
    heir.node_goes("right")
    heir.run(60_000)
    assert heir.hosted() == {"left/gpu0/0": ["a", "b", "c"]}
    assert [asked.gpus_out for asked in heir.asked] == [(RIGHT,)]


@pytest.mark.parametrize("key", ["absent", "is_given_up"])
def test_a_plan_that_an_earlier_version_wrote_down_is_read(key: str) -> None:
    former = without_right()
    assert former.scheduler.controller is not None
    wrote = former.scheduler.controller.settled_plan()
    about = json.loads(about_scheduler(wrote.settings, former.batching, wrote.planning))
    del about["planning"][key]
    _, _, planning = settings_of(json.dumps(about).encode())
    assert planning is not None
    assert planning.absent == (frozenset() if key == "absent" else {RIGHT})
