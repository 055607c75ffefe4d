"""The papers' baselines, each by what Symphony or the thesis says of it."""

from __future__ import annotations

from typing import Any

import pytest

from fabric.ids import ModelId
from policies.batching.base import Delay
from policies.batching.registry import make_discipline
from tests.batching_stage import Stage, hosted, linear

TABLE = linear(1, 5, 64)  # l(b) = b + 5


def stage(name: str, slices: int = 1, *, slo_ms: float = 40.0, **options: Any) -> Stage:
    made = Stage(make_discipline(name, options), is_in_time=name != "fixed")
    made.model("m", slo_ms)
    for order in range(slices):
        made.slice(f"s{order}", hosted("m", TABLE), order=order)
    return made


def starts(of: Stage) -> list[tuple[float, str, list[int]]]:
    return [(batch.start_at_ms, batch.slice_id, batch.seqs) for batch in of.batches]


# ---------------------------------------------------------------- fixed


def test_fixed_sends_a_batch_when_it_has_the_target_size_and_goes_on_to_the_next_replica() -> None:
    to = stage("fixed", slices=2, batch=3)
    to.arrive("m", 400.0, count=2)
    assert to.batches == []
    to.arrive("m", 400.0, count=5)
    assert starts(to) == [(0.0, "s0", [1, 2, 3]), (0.0, "s1", [4, 5, 6])]


def test_fixed_sends_what_it_has_after_the_longest_wait() -> None:
    to = stage("fixed", batch=8)
    to.arrive("m", 400.0)
    to.until(60.0)
    to.arrive("m", 400.0)
    to.drain()
    assert starts(to) == [(100.0, "s0", [1, 2])]


def test_fixed_sends_a_request_after_the_longest_wait_though_tighter_ones_filled_batches_before_it() -> None:
    to = stage("fixed", batch=2)
    to.arrive("m", 4000.0)
    for at_ms in (40.0, 80.0):
        to.until(at_ms)
        to.arrive("m", 400.0, count=2)
    to.drain()
    assert starts(to) == [(40.0, "s0", [2, 3]), (80.0, "s0", [4, 5]), (100.0, "s0", [1])]


def test_fixed_waits_from_when_a_request_was_ready() -> None:
    to = stage("fixed", batch=8)
    to.arrive("m", 400.0, ready_in_ms=30.0)
    to.drain()
    assert starts(to) == [(130.0, "s0", [1])]


def test_fixed_waits_for_its_replica_even_if_another_is_idle() -> None:
    to = stage("fixed", slices=2, batch=1)
    to.slice("s0", hosted("m", linear(0, 50, 4)), order=0)
    for _ in range(3):
        to.arrive("m", 400.0)
    to.drain()
    assert starts(to) == [(0.0, "s0", [1]), (0.0, "s1", [2]), (50.0, "s0", [3])]


def test_fixed_spreads_requests_by_the_plans_weights() -> None:
    to = stage("fixed", slices=0)
    to.slice("s0", hosted("m", TABLE, target=2, weight=300.0), order=0)
    to.slice("s1", hosted("m", TABLE, target=2, weight=100.0), order=1)
    for _ in range(80):
        to.until(to.now_ms + 5.0)
        to.arrive("m", 4000.0)
    to.drain()
    served = {name: sum(len(seqs) for _, at, seqs in starts(to) if at == name) for name in ("s0", "s1")}
    assert served == {"s0": 60, "s1": 20}


def test_fixed_takes_plain_turns_where_shares_follow_the_batch_sizes() -> None:
    to = stage("fixed", slices=0)
    to.slice("s0", hosted("m", TABLE, target=4, weight=400.0), order=0)
    to.slice("s1", hosted("m", TABLE, target=1, weight=100.0), order=1)
    to.arrive("m", 4000.0, count=10)
    to.drain()
    assert sorted((at, seqs) for _, at, seqs in starts(to)) == [
        ("s0", [1, 2, 3, 4]),
        ("s0", [6, 7, 8, 9]),
        ("s1", [5]),
        ("s1", [10]),
    ]


def test_fixed_runs_late_batches_but_not_what_could_not_finish_alone() -> None:
    to = stage("fixed", batch=20)
    to.arrive("m", 10.0, count=19)
    to.arrive("m", 400.0)
    to.drain()
    assert to.count("ran") == 20
    late = stage("fixed", batch=2)
    late.arrive("m", 10.0)
    late.until(6.0)
    late.arrive("m", 400.0)
    late.drain()
    assert late.count("expired") == 1


# ---------------------------------------------------------------- clockwork


def test_clockwork_runs_powers_of_two_of_what_fits() -> None:
    to = stage("clockwork")
    to.arrive("m", 40.0, count=7)
    to.drain()
    assert [(start, len(seqs)) for start, _, seqs in starts(to)] == [(0.0, 4), (9.0, 2), (16.0, 1)]


def test_clockwork_with_all_sizes_runs_all_that_fits() -> None:
    to = stage("clockwork", sizes="all")
    to.arrive("m", 40.0, count=7)
    to.drain()
    assert [(start, len(seqs)) for start, _, seqs in starts(to)] == [(0.0, 7)]


def test_clockwork_takes_the_earliest_latest_start_first() -> None:
    to = stage("clockwork")
    to.model("n", 60.0)
    to.slice("s0", hosted("m", TABLE), hosted("n", TABLE))
    to.arrive("m", 40.0)
    to.arrive("m", 39.0)
    to.arrive("n", 38.0)
    to.drain()
    # At 6: m's latest start is 39 - 6 = 33, n's 38 - 6 = 32.
    assert [batch.model_id for batch in to.batches] == ["m", "n", "m"]


def test_clockwork_drops_only_what_cannot_finish() -> None:
    to = stage("clockwork")
    to.arrive("m", 40.0, count=4)
    to.arrive("m", 12.0)
    to.drain()
    assert to.count("ran") == 4
    assert to.count("expired") == 1


# ---------------------------------------------------------------- shepherd


def test_shepherd_takes_the_largest_batch_first() -> None:
    to = stage("shepherd")
    to.model("n", 60.0)
    to.slice("s0", hosted("m", TABLE), hosted("n", TABLE))
    to.arrive("m", 40.0, count=4)
    to.arrive("m", 20.0)
    to.arrive("n", 60.0, count=3)
    to.drain()
    assert [(batch.model_id, len(batch.seqs)) for batch in to.batches] == [("m", 4), ("n", 3)]


def test_shepherd_stops_a_batch_for_one_three_times_as_large() -> None:
    to = stage("shepherd")
    to.arrive("m", 40.0, count=2)
    to.until(1.0)
    to.arrive("m", 40.0, count=5)
    assert to.preempted == 0
    to.arrive("m", 40.0)
    assert to.preempted == 1
    assert starts(to) == [(0.0, "s0", [1, 2]), (1.0, "s0", [3, 4, 5, 6, 7, 8])]
    to.drain()
    assert starts(to)[2:] == [(12.0, "s0", [1, 2])]
    assert to.count("ran") == 8


def test_shepherd_lets_run_what_cannot_or_must_not_be_stopped() -> None:
    to = stage("shepherd")
    to.slice("s0", hosted("m", TABLE, may_stop=False))
    to.arrive("m", 40.0, count=2)
    to.until(1.0)
    to.arrive("m", 40.0, count=6)
    assert to.preempted == 0
    to.drain()
    assert to.count("ran") == 8


def test_shepherd_lets_run_a_batch_of_a_model_that_its_slice_hosts_no_more() -> None:
    to = stage("shepherd")
    to.model("n", 40.0)
    to.slice("s0", hosted("m", TABLE), hosted("n", TABLE))
    to.arrive("n", 40.0, count=2)
    to.until(1.0)
    to.slice("s0", hosted("m", TABLE))
    to.arrive("m", 40.0, count=6)
    assert to.preempted == 0
    to.drain()
    assert to.count("ran") == 8


def test_shepherd_stops_nothing_for_a_batch_that_would_be_late() -> None:
    to = stage("shepherd")
    to.arrive("m", 40.0, count=2)
    to.until(1.0)
    to.arrive("m", 9.0, count=12)
    assert to.preempted == 0


def test_shepherd_stops_a_batch_that_was_sent_before_the_one_ahead_of_it_had_ended() -> None:
    to = stage("shepherd")
    to.model("m", 60.0, Delay(control_ms=2.0))
    to.arrive("m", 60.0)
    to.arrive("m", 60.0, count=2)
    to.until(9.0)
    assert [batch.start_at_ms for batch in to.batches] == [2.0, 8.0]
    to.arrive("m", 60.0, count=6)
    assert to.preempted == 1
    to.drain()
    assert to.count("ran") == 9


def test_shepherd_with_a_higher_ratio_is_more_patient() -> None:
    to = stage("shepherd", preempt_ratio=6)
    to.arrive("m", 40.0, count=2)
    to.arrive("m", 40.0, count=11)
    assert to.preempted == 0
    to.arrive("m", 40.0)
    assert to.preempted == 1


# ---------------------------------------------------------------- all

BASELINES = [("fixed", {"batch": 1}), ("clockwork", {}), ("shepherd", {}), ("nexus", {})]


@pytest.mark.parametrize(("name", "options"), BASELINES)
def test_requests_wait_for_their_inputs_and_slices_are_used_as_they_come(
    name: str, options: dict[str, Any]
) -> None:
    to = stage(name, slices=0, **options)
    to.arrive("m", 40.0, ready_in_ms=3.0)
    to.until(10.0)
    assert to.discipline.queued(ModelId("m")) == 1
    to.slice("s0", hosted("m", TABLE))
    assert starts(to) == [(10.0, "s0", [1])]


@pytest.mark.parametrize(("name", "options"), BASELINES)
def test_a_batch_is_sent_ahead_by_the_delay(name: str, options: dict[str, Any]) -> None:
    to = stage(name, **options)
    to.model("m", 40.0, Delay(control_ms=2.0))
    to.arrive("m", 40.0)
    to.arrive("m", 40.0)
    to.drain()
    assert [(batch.sent_at_ms, batch.start_at_ms) for batch in to.batches] == [(0.0, 2.0), (6.0, 8.0)]


@pytest.mark.parametrize(("name", "options"), BASELINES)
def test_what_waits_for_a_slice_that_goes_is_served_elsewhere(name: str, options: dict[str, Any]) -> None:
    to = stage(name, slices=2, **options)
    for _ in range(4):
        to.arrive("m", 40.0)
    to.unslice("s0")
    to.drain()
    assert to.count("ran") == 4
