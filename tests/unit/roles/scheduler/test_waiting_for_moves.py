"""Who waits for what while a move ends the only slice of a model, on virtual time."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from fabric.ids import ModelId, NodeId, PeerId, SliceId
from fabric.messages import (
    Arrivals,
    Directory,
    Done,
    Dropped,
    Grant,
    ModelSet,
    MoveInfo,
    RunBatch,
    SliceChanged,
    SliceStatus,
)
from roles.runtime.core import Tick
from roles.scheduler.planning.make_plan import make_plan
from roles.scheduler.planning.running_move import LINGER_MS
from tests.unit.roles.scheduler.test_controller import (
    FIRST,
    FRONTEND,
    OPERATOR,
    Stage,
    add,
    one_slice,
    started_anew,
)

A, LEFT = ModelId("a"), NodeId("left")
OLD, NEW, OLD_AGAIN = (SliceId(f"left/gpu0/{number}") for number in range(3))
START_MS = 100.0
LONG_MS, SHORT_MS = 3_000.0, 40.0


def tell(stage: Stage, slice_id: SliceId, state: str, incarnation: str = "") -> None:
    status = SliceStatus(slice_id, type(FIRST)(incarnation), state, "")
    stage.hear(stage.agent(LEFT), SliceChanged(LEFT, status))


def ask(stage: Stage, first_seq: int, budget_ms: float) -> None:
    stage.hear(FRONTEND, Arrivals(A, first_seq, 1, budget_ms))


def ask_four(stage: Stage) -> None:
    """Two run, one behind the other, and two are queued."""
    for seq, budget_ms in enumerate((LONG_MS, LONG_MS, LONG_MS, SHORT_MS)):
        ask(stage, seq, budget_ms)
        stage.run(7.0 if seq == 0 else 0.0)


def come(stage: Stage, slice_id: SliceId) -> None:
    stage.start(LEFT, stage.running[LEFT][slice_id])


def end_batches(stage: Stage) -> None:
    for batch in [one.message for one in stage.sent if isinstance(one.message, RunBatch)]:
        done = Done(batch.batch_id, batch.slice_id, A, "ok", 1, (), 0.0, 0.0, 6.0)
        stage.hear(PeerId("worker-left-0/00000001"), done)


def granted(stage: Stage) -> list[int]:
    grants = [one.message for one in stage.sent if isinstance(one.message, Grant)]
    return [
        seq for one in grants for run in one.runs for seq in range(run.first_seq, run.first_seq + run.count)
    ]


def dropped(stage: Stage) -> list[tuple[int, str, float | None]]:
    """First seq, code, and when to come again."""
    drops = [one.message for one in stage.sent if isinstance(one.message, Dropped)]
    return [(run.first_seq, one.code, one.retry_after_ms) for one in drops for run in one.runs]


def replicas(stage: Stage) -> tuple[int, float | None]:
    """Of model a, as all are told; and when one comes."""
    directories = [one.message for one in stage.sent if isinstance(one.message, Directory)]
    (told,) = [one for one in directories[-1].models if one.model_id == A]
    return told.replicas, told.coming_in_ms


def moving() -> Stage:
    """A move has to end the only slice before the next one can start. Of four requests two run there and two are queued."""
    stage = one_slice("a")
    stage.make_plan = started_anew
    stage.run(2)
    tell(stage, OLD, "lost", FIRST)
    tell(stage, OLD, "starting")
    stage.run(START_MS)
    come(stage, OLD)
    stage.run(2)
    ask_four(stage)
    assert granted(stage) == [0, 1]
    stage.is_starting_slow = True
    stage.hear(OPERATOR, add("b"))
    return stage


def test_what_is_queued_and_what_comes_while_the_old_slice_ends_waits_for_the_new_one() -> None:
    stage = moving()
    assert dropped(stage) == [(3, "NoReplica", LINGER_MS + START_MS)], "it cannot wait so long"
    stage.run(2)
    assert replicas(stage) == (0, LINGER_MS + START_MS - 1.0)
    ask(stage, 4, LONG_MS)
    stage.run(200)
    assert OLD in stage.hosted(), "its batches run still"
    stage.sent = [one for one in stage.sent if not isinstance(one.message, Dropped)]
    ask(stage, 5, SHORT_MS)
    assert dropped(stage) == [(5, "NoReplica", START_MS)], (
        "from when the old one has ended, which may be at once"
    )
    end_batches(stage)
    stage.run(300)
    assert stage.hosted() == {NEW: ["a", "b"]}
    ask(stage, 6, LONG_MS)
    come(stage, NEW)
    for _ in range(3):
        stage.run(7)
        end_batches(stage)
    assert granted(stage) == [0, 1, 2, 4, 6]
    assert [seq for seq, *_ in dropped(stage)] == [5]
    assert replicas(stage) == (1, None)


@pytest.mark.parametrize("phase_ms", [0.5 * step for step in range(40)])  # of the looks at who waits in vain
def test_where_the_new_slice_fails_they_wait_for_the_old_one_to_start_again(phase_ms: float) -> None:
    stage = moving()
    end_batches(stage)
    stage.run(300)
    ask(stage, 4, LONG_MS)
    stage.run(phase_ms)
    tell(stage, NEW, "failed")
    stage.run(100)
    assert stage.hosted() == {OLD_AGAIN: ["a"]}
    assert replicas(stage)[0] == 0
    come(stage, OLD_AGAIN)
    stage.run(7)
    assert granted(stage) == [0, 1, 2, 4]
    assert [seq for seq, *_ in dropped(stage)] == [3]


def test_a_move_that_is_given_up_before_its_start_has_begun_is_waited_for_no_more() -> None:
    """As where another slice of the move fails while the old one drains."""
    stage = moving()
    controller = stage.scheduler.controller
    assert controller is not None
    (move,) = controller._moves
    fleet = stage.scheduler._fleet
    move.give_up("it has to be", fleet, stage.scheduler._actuator, stage.now_ms)
    assert NEW not in fleet.starts._under_way
    end_batches(stage)
    stage.run(300)
    assert stage.hosted() == {OLD_AGAIN: ["a"]}
    come(stage, OLD_AGAIN)
    assert granted(stage) == [0, 1, 2]


def test_a_slice_that_drains_serves_nobody_and_all_are_told() -> None:
    stage = one_slice("a")
    stage.make_plan = lambda asked: replace(make_plan(asked), moves=(MoveInfo(0, (), (OLD,)),))
    stage.run(2)
    ask_four(stage)
    stage.hear(OPERATOR, ModelSet(1, A, slo_ms=150.0))
    stage.run(2)
    assert OLD in stage.hosted(), "its batches run still"
    assert replicas(stage) == (0, None)
    ask(stage, 4, LONG_MS)
    assert {(seq, code) for seq, code, _ in dropped(stage)} == {(seq, "NoReplica") for seq in (2, 3, 4)}
    end_batches(stage)
    stage.run(1_000)
    assert OLD not in stage.hosted()
    assert replicas(stage) == (0, None)


def test_a_model_that_leaves_its_only_slice_is_not_served_there() -> None:
    stage = one_slice("a")
    stage.run(2)
    scheduler = stage.scheduler
    (record,) = scheduler._fleet.slices.values()
    scheduler._actuator.leave(record, frozenset({A}), stage.now_ms)
    scheduler.handle(Tick(), stage.now_ms)
    stage.run(2)
    assert replicas(stage) == (0, None)
    ask(stage, 0, LONG_MS)
    assert [(seq, code) for seq, code, _ in dropped(stage)] == [(0, "NoReplica")]
    scheduler._actuator.narrow(record, frozenset({A}), lambda *_: 0, stage.now_ms)
    assert scheduler._fleet.replicas[A] == 0, "counted off once"
