"""Whoever can go now is looked at now, whatever made that possible. A bug each, found by reading."""

from __future__ import annotations

import pytest

from policies.batching.base import Delay
from policies.batching.baselines.baseline import Baseline
from policies.batching.disciplines.clockwork import Clockwork
from policies.batching.disciplines.deferred import Deferred
from policies.batching.disciplines.eager import Eager
from policies.batching.disciplines.shepherd import Shepherd
from policies.batching.disciplines.tenuto import Tenuto
from policies.batching.matchmaking.model_state import ModelPlan
from tests.batching_stage import Stage, hosted, linear


@pytest.mark.parametrize("ready_in_ms", [0.0, 5.0])
def test_requests_that_are_not_ready_yet_make_a_waiting_batch_as_urgent_as_it_will_be(
    ready_in_ms: float,
) -> None:
    stage = Stage(Eager())
    for name in "xab":
        stage.model(name, 200.0)
    stage.slice("s", hosted("x", (20.0,)), hosted("a", linear(5.0, 5.0, 8)), hosted("b", (20.0,)))
    stage.arrive("x", 20.0)
    stage.arrive("a", 75.5, count=7, ready_in_ms=ready_in_ms)
    stage.arrive("a", 75.0)  # eight in all: the latest moment is 30
    stage.arrive("b", 60.0)  # 40
    stage.drain()
    assert [(batch.model_id, len(batch.seqs)) for batch in stage.batches[:2]] == [("x", 1), ("a", 8)]


def test_what_is_ready_goes_though_something_else_is_still_being_prepared() -> None:
    stage = Stage(Deferred())
    stage.model("a", 100.0)
    stage.slice("s", hosted("a", linear(1.0, 7.0, 8)))
    stage.arrive("a", 100.0, ready_in_ms=80.0)
    stage.until(10.0)
    for _ in range(8):
        stage.arrive("a", 89.0)  # before it
    stage.drain()
    assert (stage.batches[0].start_at_ms, len(stage.batches[0].seqs)) == (10.0, 8)
    assert not stage.drops


@pytest.mark.parametrize("is_one_unready", [False, True])
def test_a_batch_takes_the_higher_priorities_though_something_else_is_still_being_prepared(
    is_one_unready: bool,
) -> None:
    stage = Stage(Eager())
    stage.model("a", 200.0)
    stage.slice("s", hosted("a", linear(1.0, 10.0, 4)), free_at_ms=50.0)
    stage.arrive("a", 160.0, count=6)
    stage.arrive("a", 165.0, count=4, priority=9)
    if is_one_unready:
        stage.arrive("a", 150.0, ready_in_ms=60.0)
    stage.until(50.0)
    assert [batch.seqs for batch in stage.batches] == [[7, 8, 9, 10]]


class Planned(Tenuto):
    """Under one plan: everybody spares a reserve of one slice."""

    def _plan(self, now_ms: float) -> None:
        self._plan_at_ms = now_ms + 1e9
        for state in self._models.values():
            state.follow(ModelPlan(0.0, 1, spares_reserve=True))
            for candidate in state.candidates:
                for pool in candidate.pools:
                    pool.reserve = 1 if pool.size > 1 else 0


def test_a_tick_ends_where_a_slow_class_has_left_requests_to_a_fast_one_and_spares_the_reserve() -> None:
    discipline = Planned()
    stage = Stage(discipline)
    stage.model("a", 300.0, Delay(0.0, 1.0))
    stage.model("b", 400.0, Delay(2.0, 0.0))
    stage.slice("fast", hosted("a", linear(1, 9, 8)), order=0, free_at_ms=50.0)
    slow = (hosted("a", linear(10, 90, 8)), hosted("b", linear(10, 90, 8)))
    stage.slice("low", *slow, order=1, free_at_ms=20.0)
    stage.slice("high", *slow, order=2)
    discipline._plan(0.0)
    stage.until(5.0)
    stage.arrive("a", 80.0)  # only the fast one can
    stage.arrive("a", 250.0)
    stage.arrive("b", 390.0)
    stage.drain()
    assert stage.count("ran") == 3


@pytest.mark.parametrize(
    "how", ["nobody is in front", "who is in front expires", "who is in front is withdrawn"]
)
def test_who_has_a_longer_way_is_served_though_somebody_else_stood_in_front(how: str) -> None:
    stage = Stage(Eager())
    stage.model("x", 200.0)
    stage.model("front", 200.0)
    stage.model("far", 200.0, Delay(10.0))
    stage.slice("s", hosted("x", (100.0,)), hosted("front", linear(1, 9, 4)), hosted("far", linear(1, 19, 4)))
    stage.arrive("x", 100.0)
    stage.until(50.0)
    if "expires" in how or "withdrawn" in how:
        stage.arrive("front", 51.0 if "expires" in how else 61.0)
    stage.arrive("far", 82.0)  # until 132: sent at 92 it just makes it
    if "withdrawn" in how:
        stage.until(91.0)
        stage.withdraw("front", 1, 1)
    stage.drain()
    assert [batch.model_id for batch in stage.batches] == ["x", "far"]


@pytest.mark.parametrize("make", [Clockwork, Shepherd])
@pytest.mark.parametrize("how", ["withdrawn", "given up"])
def test_an_idle_slice_runs_what_stood_behind_a_head_that_only_a_fast_one_could_run(
    make: type[Baseline], how: str
) -> None:
    stage = Stage(make())
    stage.model("a", 500.0)
    stage.model("x", 500.0)
    stage.slice("fast", hosted("a", (10.0,)), hosted("x", (100.0,)), order=0)
    stage.slice("slow", hosted("a", (100.0,)), order=1)
    stage.arrive("x", 400.0)
    stage.until(1.0)
    stage.arrive("a", 99.5)  # neither can run it in time, but the fast one could if it were free
    stage.arrive("a", 150.0)
    stage.until(2.0)
    if how == "withdrawn":
        stage.withdraw("a", 1, 1)
    else:
        stage.unslice("fast")
    stage.drain()
    assert [(batch.slice_id, batch.sent_at_ms, batch.seqs) for batch in stage.batches[1:]] == [
        ("slow", 2.0, [2])
    ]
