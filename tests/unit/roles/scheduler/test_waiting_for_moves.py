"""Who waits for what while a move ends the only slice of a model, on virtual time."""

from __future__ import annotations

import os
import subprocess
import sys

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
    PlanAsked,
    PlanMade,
    RunBatch,
    SliceChanged,
    SliceStatus,
)
from roles.runtime.core import Tick
from roles.scheduler.planning.make_plan import make_plan
from roles.scheduler.planning.running_move import LINGER_MS, START_LIMIT_MS
from tests.unit.roles.scheduler.test_controller import (
    FIRST,
    FRONTEND,
    OPERATOR,
    Stage,
    add,
    model,
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


def anew_one_by_one(asked: PlanAsked) -> PlanMade:
    """A plan that has no slice stay: the first is started beside them, the last one when all have ended."""
    made = make_plan(replace(asked, current=()))
    first, *_, last = (start for move in made.moves for start in move.starts)
    ends = tuple(one.slice_id for one in asked.current)
    return replace(made, moves=(MoveInfo(0, (first, replace(last, after=ends)), ends),))


def on_gpus(count: int) -> Stage:
    stage = Stage(model("a"), nodes=[{"host": "left", "gpus": count}], placement="symphony")
    stage.make_plan = anew_one_by_one
    stage.run(2)
    return stage


def rolled_back() -> list[str]:
    """All that was sent until a move has failed that had ended eight slices."""
    stage = on_gpus(8)
    stage.is_starting_slow = True
    stage.hear(OPERATOR, ModelSet(1, A, slo_ms=150.0))
    stage.run(2)
    come(stage, SliceId("left/gpu0/1"))
    stage.run(1_000)
    tell(stage, SliceId("left/gpu7/1"), "failed")
    stage.run(1_000)
    assert stage.answer().status == "failed"
    assert sorted(stage.hosted()) == [
        "left/gpu0/2",
        *(f"left/gpu{gpu}/{2 if gpu == 7 else 1}" for gpu in range(1, 8)),
    ]
    return list(map(repr, stage.sent))


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


def test_a_slice_has_as_long_as_its_models_take_one_after_the_other() -> None:
    stage = one_slice("a", "b", nodes=("left", "right"))
    stage.run(2)
    stage.is_starting_slow = True
    stage.node_goes("right")
    stage.run(60_000)
    stage.node_comes("right")
    stage.run(START_LIMIT_MS + 50_000)
    (new,) = stage.running[NodeId("right")]
    stage.start(NodeId("right"), stage.running[NodeId("right")][new])
    stage.run(1_000)
    plan = stage.status().plan
    assert plan is not None
    assert (plan.moves_failed, plan.state) == (0, "steady")
    stage.node_goes("right")
    stage.run(60_000)
    stage.node_comes("right")
    stage.run(2 * START_LIMIT_MS + 10_000)
    plan = stage.status().plan
    assert plan is not None
    assert plan.moves_failed == 1, "for ever it is not waited for"
    assert any(f"not ready within {2 * START_LIMIT_MS / 1e3:g} s" in one for one in plan.lately)


def test_what_starts_only_when_old_slices_have_ended_has_all_its_time_from_then_on() -> None:
    stage = on_gpus(2)
    stage.is_starting_slow = True
    stage.hear(OPERATOR, ModelSet(1, A, slo_ms=150.0))
    for gpu in range(2):
        stage.run(0.8 * START_LIMIT_MS)
        come(stage, SliceId(f"left/gpu{gpu}/1"))
    stage.run(1_000)
    assert stage.answer().status == "ok"
    assert sorted(stage.hosted()) == ["left/gpu0/1", "left/gpu1/1"]


def test_a_move_and_its_roll_back_do_not_depend_on_the_hash_seed_of_the_process() -> None:
    command = [sys.executable, "-c", f"from {__name__} import rolled_back; print(rolled_back())"]
    told = {
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1


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
