"""When a GPU is planned with no more, and from when on again: on virtual time."""

from __future__ import annotations

from fabric.ids import NodeId, PeerId, SliceId
from fabric.messages import GpuRef, NodeHello, SliceSpec, SliceState
from roles.scheduler.fleet import Fleet, SliceRecord
from roles.scheduler.planning.usable_gpus import FIRST_WAIT_MS, REST_MS, WAIT_MS, GpuPresence
from tests.unit.roles.scheduler.test_core import FIRST

NODE = NodeId("left")
GPU = GpuRef(NODE, 0)
LOOK_EVERY_MS = 500.0


class Stage:
    """A node with one GPU and one slice, and who looks at it every half second."""

    def __init__(self) -> None:
        self.record = SliceRecord(SliceSpec(SliceId("left/gpu0/0"), 0, "emulated", None, ()), NODE, 0)
        self.fleet = Fleet([self.record], {})
        self.presence = GpuPresence([GPU])
        self.now_ms = 0.0
        self.agents = 0

    def run(self, for_ms: float) -> None:
        until_ms = self.now_ms + for_ms
        while self.now_ms < until_ms:
            self.fleet.now_ms = self.now_ms
            self.presence.look(self.fleet, self.now_ms)
            self.now_ms += LOOK_EVERY_MS

    def agent_starts(self) -> None:
        self.agents += 1
        self.fleet.node_joined(PeerId(f"node-left/{self.agents:08x}"), NodeHello(NODE, FIRST, (), ()))

    def agent_ends(self) -> None:
        self.fleet.node_lost(NODE)
        self.slice_dies()

    def slice_dies(self) -> None:
        self.record.state = SliceState.LOST

    def slice_is_ready(self, took_ms: float = 0.0) -> None:
        self.fleet.starts.begin(self.record.spec.slice_id, (), self.now_ms)
        self.run(took_ms)
        self.fleet.starts.end(self.record.spec.slice_id, (), self.now_ms)
        self.record.state = SliceState.READY

    def is_there(self) -> bool:
        return GPU not in self.presence.absent


def served(took_ms: float = 0.0) -> Stage:
    """It has started, which took so long, and serves."""
    stage = Stage()
    stage.agent_starts()
    stage.slice_is_ready(took_ms)
    stage.run(1_000)
    assert stage.is_there()
    return stage


def test_a_node_that_never_came_is_waited_for_for_longer() -> None:
    stage = Stage()
    stage.run(FIRST_WAIT_MS)
    assert stage.is_there()
    stage.run(1_000)
    assert not stage.is_there()


def test_a_node_that_was_away_for_long_has_as_long_as_ever_to_start_its_slices() -> None:
    """The time for which it was away says nothing of slices that have just begun to start."""
    stage = served()
    stage.agent_ends()
    stage.run(3 * WAIT_MS)
    assert not stage.is_there()
    stage.agent_starts()
    stage.run(WAIT_MS - 1_000)
    stage.slice_is_ready()
    stage.run(1_000)
    assert stage.is_there()


def test_a_node_that_comes_back_while_its_slices_are_taken_elsewhere_is_there_when_they_are_gone() -> None:
    """A plan may take longer than the return: what was planned away does not start any more, and leaves a free GPU."""
    stage = served()
    stage.agent_ends()
    stage.run(3 * WAIT_MS)
    stage.agent_starts()
    stage.run(2_000)
    stage.fleet.forget_slice(stage.record)
    stage.run(1_000)
    assert stage.is_there()


def test_slices_that_stay_dead_on_a_node_that_is_there_rest_and_are_tried_again() -> None:
    stage = served()
    stage.slice_dies()
    stage.run(WAIT_MS)
    assert stage.is_there()
    stage.run(2_000)
    assert not stage.is_there()
    stage.fleet.forget_slice(stage.record)
    stage.run(REST_MS - 2_000)
    assert not stage.is_there()
    stage.run(3_000)
    assert stage.is_there()


def test_a_new_agent_ends_the_rest() -> None:
    """Whoever starts it anew has changed something."""
    stage = served()
    stage.slice_dies()
    stage.run(WAIT_MS + 2_000)
    stage.fleet.forget_slice(stage.record)
    stage.agent_ends()
    stage.agent_starts()
    stage.run(1_000)
    assert stage.is_there()


def test_a_slice_that_is_ready_after_all_is_planned_with() -> None:
    stage = served()
    stage.slice_dies()
    stage.run(WAIT_MS + 2_000)
    assert not stage.is_there()
    stage.slice_is_ready()
    stage.run(1_000)
    assert stage.is_there()


def test_a_slice_that_takes_half_a_minute_to_start_is_given_that_time_when_it_dies() -> None:
    """It would be ended while it starts, and tried elsewhere, where it takes as long."""
    stage = served(took_ms=30_000)
    stage.slice_dies()
    stage.run(1_000)
    stage.slice_is_ready(took_ms=40_000)
    assert stage.is_there()
    stage.slice_dies()
    stage.run(2 * 40_000 + WAIT_MS + 2_000)
    assert not stage.is_there(), "but not for ever"


def test_a_node_that_was_away_for_nearly_as_long_as_is_waited_has_its_time_to_start_slices_too() -> None:
    stage = served()
    stage.agent_ends()
    stage.run(WAIT_MS - 1_000)
    stage.agent_starts()
    stage.run(WAIT_MS - 1_000)
    assert stage.is_there()
    stage.slice_is_ready()
    stage.run(5 * WAIT_MS)
    assert stage.is_there()


def test_an_agent_that_starts_over_and_over_without_its_slices_is_not_waited_for_for_ever() -> None:
    stage = served()
    stage.agent_ends()
    for _ in range(5):
        stage.agent_starts()
        stage.run(WAIT_MS / 2)
    assert not stage.is_there()
