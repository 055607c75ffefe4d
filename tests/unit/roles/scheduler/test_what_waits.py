"""Requests that wait are counted as such, whether they wait for a batch or for a slice that is on its way."""

from __future__ import annotations

import pytest

from fabric.ids import Incarnation, ModelId, NodeId, PeerId, SliceId
from fabric.messages import (
    Arrivals,
    Dropped,
    Left,
    ModelsRemove,
    ReplicaInfo,
    SliceChanged,
    SliceReady,
    SliceState,
    SliceStatus,
)
from roles.runtime.metrics import catalog
from tests.unit.roles.scheduler.test_controller import FRONTEND, OPERATOR, Stage, model

A = ModelId("a")
LONG = 60_000.0


def staged() -> Stage:
    """Its slice has started once, so that a loss is waited for."""
    stage = Stage(model("a", slo_ms=LONG), nodes=[{"host": "left"}], placement="symphony")
    stage.run(1_000)
    started_again(stage, 1)
    stage.run(6_000)
    return stage


def starts_again(stage: Stage, boot: int) -> None:
    agent, left, first = stage.agent(NodeId("left")), NodeId("left"), SliceId("left/gpu0/0")
    lost = SliceStatus(first, Incarnation(f"{boot:08}"), SliceState.LOST, "killed")
    stage.hear(agent, SliceChanged(left, lost))
    stage.hear(agent, SliceChanged(left, SliceStatus(first, Incarnation(""), SliceState.STARTING)))


def started_again(stage: Stage, boot: int, for_ms: float = 1_500.0) -> None:
    starts_again(stage, boot)
    stage.run(for_ms)
    (spec,) = stage.running[NodeId("left")].values()
    replicas = tuple(ReplicaInfo(one.model_id, one.batch_size_max, one.exec_ms) for one in spec.models)
    nonce = Incarnation(f"{boot + 1:08}")
    message = SliceReady(spec.slice_id, nonce, NodeId("left"), 0, ("ipc:///w",), replicas)
    stage.hear(PeerId(f"worker-left-0/{nonce}"), message)


@pytest.mark.parametrize("waits_first", [False, True])
@pytest.mark.parametrize("losses", [0, 1, 3])
def test_requests_that_wait_through_restarts_of_their_slice_arrive_once(
    losses: int, *, waits_first: bool
) -> None:
    """However often they go from one queue to the other; a rate is the mean of 5 s."""
    stage, announced = staged(), 1_000
    if waits_first:
        starts_again(stage, 2)
    stage.hear(FRONTEND, Arrivals(A, 0, announced, LONG))
    stage.run(1_100)
    for boot in range(2, 2 + losses):
        started_again(stage, boot)
        stage.run(1_100)
    stage.run(4_000)
    controller = stage.scheduler.controller
    assert controller is not None
    assert controller._loads.rate_rps(A) == pytest.approx(announced / 5.0, rel=0.02)


def test_requests_that_wait_for_a_slice_are_told_among_those_that_wait() -> None:
    stage = staged()
    starts_again(stage, 2)
    stage.hear(FRONTEND, Arrivals(A, 0, 9, LONG))
    (queue,) = [one for one in stage.scheduler.measured() if one.metric is catalog.QUEUE]
    assert queue.value == 9.0


@pytest.mark.parametrize("how", ["removed when left", "left for another shard"])
def test_a_model_that_is_left_stays_until_what_waits_for_its_slice_is_answered(how: str) -> None:
    """What was announced here is answered here."""
    if how == "removed when left":
        stage = staged()
    else:
        ran = Stage(model("a", slo_ms=LONG), model("b"), nodes=[{"host": "left"}], placement="symphony")
        ran.run(1_000)
        stage = Stage(model("b"), nodes=[{"host": "left"}], placement="symphony", ran=ran, elsewhere=["a"])
        started_again(stage, 1)
        stage.run(1_000)
    starts_again(stage, 2)
    stage.hear(FRONTEND, Arrivals(A, 0, 1, LONG))
    stage.hear(FRONTEND, Left(A))
    if how == "removed when left":
        stage.hear(OPERATOR, ModelsRemove(1, (A,), when_left=True))
    stage.run(1_000)
    assert "a" in {one.model_id for one in stage.status().models}
    assert not any(isinstance(one.message, Dropped) for one in stage.sent)
