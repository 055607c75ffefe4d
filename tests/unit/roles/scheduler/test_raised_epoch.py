"""An active scheduler goes on with a higher epoch: a slice gets batches while its worker takes commands of that one.

A worker of a node whose agent has not granted it refuses each batch at once: the next one would follow, until its requests had no try left.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from fabric.ids import ModelId, NodeId
from fabric.messages import (
    AnyMessage,
    Arrivals,
    Done,
    Dropped,
    EpochGranted,
    RunBatch,
    SliceChanged,
    SliceState,
    SliceStatus,
)
from tests.unit.roles.scheduler.test_first_directory import BORN, FRONTEND, SCHEDULERS, Cluster, slice_on

HIGHER = 80


def raised(schedulers: int, models: str = "mmm") -> Cluster:
    """It serves; then the agent of c is back, with a higher epoch. That one and a grant a still higher one, b has not yet."""
    cluster = Cluster(schedulers, models)
    cluster.connect("c")
    cluster.lose(cluster.agent("c"))
    cluster.take_over("a", "b")
    for node in "ab":
        cluster.grant(node)
        cluster.slice_ready(node)
    assert cluster.listed[-1] == {"a", "b"}
    former = cluster.replica.epoch
    cluster.connect("c", epoch=HIGHER)
    assert cluster.asks[cluster.agent("a")].epoch > HIGHER
    for node in "ac":
        cluster.grant(node)
    assert cluster.replica.epoch > max(former, HIGHER)
    return cluster


def batches(said: Iterable[AnyMessage]) -> list[RunBatch]:
    return [one for one in said if isinstance(one, RunBatch)]


def arrive(cluster: Cluster, model: str = "m", count: int = 1, first: int = 0) -> list[AnyMessage]:
    """So many, one after the other."""
    said = []
    for seq in range(first, first + count):
        said += cluster.hear(FRONTEND, Arrivals(ModelId(model), seq, 1, 900.0, 0.0, 0.0, 0.0))
    return said


@pytest.mark.parametrize("schedulers", SCHEDULERS)
def test_a_slice_gets_no_batches_until_its_worker_takes_commands_of_the_epoch(schedulers: int) -> None:
    cluster = raised(schedulers)
    assert batches(arrive(cluster, count=20)) == []
    said = cluster.slice_ready("a") + cluster.slice_ready("c")
    assert {batch.slice_id for batch in batches(said)} == {slice_on("a"), slice_on("c")}
    (running, *_) = batches(said)
    missing = running.parts
    said = cluster.hear(
        cluster.worker(running.slice_id[0]),
        Done(running.batch_id, running.slice_id, running.model_id, "ok", 0, missing, 0.1, 0.0, 0.0),
    )
    assert slice_on("b") not in {batch.slice_id for batch in batches(said)}
    cluster.grant("b")
    assert batches(cluster.slice_ready("b")), "it is offered what waits"


@pytest.mark.parametrize("schedulers", SCHEDULERS)
def test_what_was_granted_there_runs_on(schedulers: int) -> None:
    """So frontends are told of the slice as before. Its worker is not: it says again what was lost until a directory lists it."""
    cluster = raised(schedulers)
    cluster.told.clear()
    cluster.workers_told.clear()
    cluster.slice_ready("a")
    cluster.run_until(cluster.now_ms + 5.0)
    assert cluster.listed
    assert all({"a", "b"} <= listed for listed in cluster.listed)
    assert set(cluster.workers_told) == {cluster.worker("a")}
    cluster.grant("b")
    cluster.slice_ready("b")
    cluster.run_until(cluster.now_ms + 5.0)
    assert cluster.worker("b") in cluster.workers_told


@pytest.mark.parametrize("schedulers", SCHEDULERS)
def test_a_model_that_is_only_there_waits_for_it(schedulers: int) -> None:
    cluster = raised(schedulers, "abc")
    said = arrive(cluster, "b", 3)
    assert not [one for one in said if isinstance(one, RunBatch | Dropped)]
    cluster.grant("b")
    assert batches(cluster.slice_ready("b"))


@pytest.mark.parametrize("schedulers", SCHEDULERS)
def test_a_slice_that_is_not_to_end_after_all_gets_none_either_until_then(schedulers: int) -> None:
    """Its agent had begun to stop, and another one has its worker."""
    cluster = raised(schedulers)
    for state in (SliceState.DRAINING, SliceState.READY):
        cluster.hear(cluster.agent("b"), SliceChanged(NodeId("b"), SliceStatus(slice_on("b"), BORN, state)))
    assert batches(arrive(cluster, count=5)) == []
    cluster.grant("b")
    assert batches(cluster.slice_ready("b"))


@pytest.mark.parametrize("schedulers", SCHEDULERS)
def test_nobody_else_begins_an_epoch(schedulers: int) -> None:
    cluster = raised(schedulers)
    cluster.slice_ready("a")
    cluster.hear(cluster.worker("a"), EpochGranted(HIGHER, ()))
    assert batches(arrive(cluster))
