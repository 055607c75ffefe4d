"""Requests that are announced before their inputs are ready are treated like those that come when they are."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from fabric.ids import FrontendId, ModelId, SliceId
from policies.batching.base import NEVER_MS, BatchSlice, Dispatch, RequestRun
from policies.batching.registry import DISCIPLINES, make_discipline
from tests.batching_stage import Stage, hosted, linear

OPTIONS: dict[str, dict[str, Any]] = {"timeout": {"timeout_ms": 5}, "fixed": {"max_wait_ms": 5, "batch": 4}}
EAGER = ("eager", "clockwork", "shepherd")
SLO_MS = {"a": 60.0, "b": 90.0}
TABLES = {"a": linear(1, 5, 16), "b": linear(0.5, 8, 16)}


def stage(name: str, slices: int, *models: str) -> Stage:
    to = Stage(make_discipline(name, OPTIONS.get(name)), is_in_time=name not in {"fixed", "nexus"})
    for model in models:
        to.model(model, SLO_MS[model])
    for order in range(slices):
        to.slice(f"s{order}", *(hosted(model, TABLES[model]) for model in models), order=order)
    return to


def played(name: str, seed: int, *, is_announced: bool) -> Stage:
    """Half of the requests are not ready when they are asked; the scheduler hears of them then, or when they are."""
    draw = random.Random(seed)
    to = stage(name, 3, "a", "b")
    asked_at_ms = 0.0
    heard: list[tuple[float, int, str, float, float, int | None]] = []
    for seq in range(1, 300):
        asked_at_ms += draw.expovariate(0.25)
        model = draw.choice("ab")
        deadline_at_ms = asked_at_ms + SLO_MS[model] * draw.uniform(0.8, 1.2)
        prepare_ms = draw.choice((0.0, draw.uniform(1.0, 25.0)))
        priority = draw.choice((None, None, 7))
        heard_at_ms = asked_at_ms if is_announced else asked_at_ms + prepare_ms
        heard.append((heard_at_ms, seq, model, deadline_at_ms, prepare_ms if is_announced else 0.0, priority))
    for heard_at_ms, seq, model, deadline_at_ms, ready_in_ms, priority in sorted(
        heard, key=lambda one: one[:2]
    ):
        to.until(heard_at_ms)
        budget_ms = deadline_at_ms - heard_at_ms
        to.arrive(model, budget_ms, ready_in_ms=ready_in_ms, seq=seq, priority=priority)
    to.drain()
    return to


@pytest.mark.parametrize("name", DISCIPLINES)
def test_they_run_as_if_they_had_come_when_they_were_ready(name: str) -> None:
    for seed in range(10):
        announced, ready = played(name, seed, is_announced=True), played(name, seed, is_announced=False)
        assert announced.batches == ready.batches, f"seed {seed}"
        assert announced.drops == ready.drops, f"seed {seed}"


@pytest.mark.parametrize("name", DISCIPLINES)
@pytest.mark.parametrize("ready_in_ms", [15.0, 40.0])
def test_of_a_stream_that_slices_have_time_for_none_is_given_up(name: str, ready_in_ms: float) -> None:
    draw = random.Random(1)
    to = stage(name, 4, "a")
    for _ in range(500):
        to.until(to.now_ms + draw.expovariate(0.25))
        to.arrive("a", 60.0, ready_in_ms=ready_in_ms)
    to.drain()
    assert to.drops == []


@pytest.mark.parametrize("name", EAGER)
def test_who_is_ready_waits_for_nobody_who_is_not(name: str) -> None:
    draw = random.Random(2)
    to = stage(name, 16, "a")
    ready_at_ms: dict[int, float] = {}
    for seq in range(400):
        to.until(to.now_ms + draw.expovariate(0.25))
        ready_in_ms = draw.choice((0.0, 20.0, 35.0))
        ready_at_ms[seq] = to.now_ms + ready_in_ms
        to.arrive("a", 60.0, ready_in_ms=ready_in_ms, seq=seq)
    to.drain()
    started_at_ms = {seq: batch.start_at_ms for batch in to.batches for seq in batch.seqs}
    assert started_at_ms == pytest.approx(ready_at_ms, abs=1e-3)


@pytest.mark.parametrize("name", DISCIPLINES)
def test_what_will_be_ready_too_late_is_answered_when_it_is_announced(name: str) -> None:
    """Four due from 20 to 21 that take 6 alone and are ready at 14.5: those due before 20.5 come too late."""
    to = stage(name, 1, "a")
    to.arrive("a", 20.0, count=4, span_ms=1.0, ready_in_ms=14.5)
    assert to.drops == [(0.0, True, [1, 2])]
    assert to.discipline.queued(ModelId("a")) == 2
    to.arrive("a", 20.0, ready_in_ms=19.0)
    assert to.drops[1:] == [(0.0, True, [5])]
    to.drain()
    assert to.count("waiting") == 0


@pytest.mark.parametrize("name", DISCIPLINES)
def test_what_is_withdrawn_or_whose_frontend_goes_is_forgotten(name: str) -> None:
    to = stage(name, 1, "a")
    to.arrive("a", 60.0, count=4, ready_in_ms=10.0)
    to.arrive("a", 60.0, count=2, ready_in_ms=5.0, frontend="g")
    to.withdraw("a", 2, 2)
    assert to.discipline.queued(ModelId("a")) == 4
    assert to.discipline.forget_frontend(FrontendId("g"), 0.0) == {ModelId("a"): 2}
    assert to.discipline.wake_at_ms == 10.0
    to.until(9.0)
    assert to.batches == []
    to.drain()
    assert sorted(seq for batch in to.batches for seq in batch.seqs) == [1, 4]


@pytest.mark.parametrize("name", DISCIPLINES)
def test_a_removed_model_gives_them_back(name: str) -> None:
    to = stage(name, 1, "a")
    to.arrive("a", 60.0, count=4, ready_in_ms=10.0)
    to.unmodel("a")
    assert to.drops == [(0.0, False, [1, 2, 3, 4])]
    assert to.discipline.queued(ModelId("a")) == 0
    to.drain()
    assert to.batches == []


@pytest.mark.parametrize("name", DISCIPLINES)
@pytest.mark.parametrize("counts", [(1, 1, 1, 1), (2, 1, 1)])
def test_what_is_ready_at_one_moment_runs_together(name: str, counts: tuple[int, ...]) -> None:
    """The loosest was announced first. One slice has the time for one batch of all."""
    to = stage(name, 1, "a")
    for place, count in enumerate(counts):
        to.arrive("a", 33.5 - place, count=count, ready_in_ms=20.0)
    to.drain()
    assert [len(batch.seqs) for batch in to.batches] == [4]
    assert to.batches[0].seqs[-1] == counts[0], "the tightest first"
    assert to.drops == []


EVENTS: dict[str, Callable[[Stage, float], object]] = {
    "a slice is free": lambda to, now_ms: to.discipline.slice_free(SliceId("s0"), now_ms, now_ms),
    "a slice comes": lambda to, now_ms: to.discipline.add_slice(
        BatchSlice(SliceId("s1"), 1, (hosted("a", TABLES["a"]),), now_ms), now_ms
    ),
    "a slice leaves": lambda to, now_ms: to.discipline.remove_slices((SliceId("s1"),), now_ms),
    "a request comes": lambda to, now_ms: to.discipline.arrive(
        ModelId("b"), RequestRun(FrontendId("f"), 9, 1, now_ms + 90.0, now_ms), now_ms
    ),
}


@pytest.mark.parametrize("name", sorted(set(DISCIPLINES) - {"fixed", "timeout", "deferred"}))
@pytest.mark.parametrize("event", EVENTS)
def test_an_event_before_an_overdue_tick_leaves_out_nobody_who_is_ready(name: str, event: str) -> None:
    """Two are ready at 20, when a slice is free for them; something else is heard of 0.3 ms later, before the tick for that."""
    to = stage(name, 1, "a", "b")
    if name == "nexus" and event == "a slice comes":
        pytest.skip("what waits is assigned anew, slice by slice, before anything else")
    if event == "a slice leaves":
        to.slice("s1", hosted("b", TABLES["b"]), order=1)
    if event in {"a slice is free", "a slice comes"}:
        to.discipline.slice_free(SliceId("s0"), NEVER_MS, 0.0)
        to.arrive("a", 60.0, count=2)
    for _ in range(2):
        to.arrive("a", 60.0, ready_in_ms=20.0)
    to.until(20.0, is_inclusive=False)
    decisions = EVENTS[event](to, 20.3)
    assert isinstance(decisions, Sequence)
    sent = [decision for decision in decisions if isinstance(decision, Dispatch)]
    count = 2 if event in {"a request comes", "a slice leaves"} else 4
    assert [one.batch_size for one in sent if one.model_id == "a"][:1] == [count]
