"""Moments of a batch, target sizes, and who is given up: figures worked out by hand."""

from __future__ import annotations

import math
from collections import deque

import pytest

from fabric.ids import FrontendId
from policies.batching.base import Delay, RequestRun
from policies.batching.batch_moments import (
    cost_table,
    exec_at_ms,
    exec_table,
    just_after,
    just_before,
    latest_at_ms,
    lead_table,
)
from policies.batching.drop import fallback_target, suffix_size, target_size
from tests.batching_stage import linear

SYMPHONY_3_3 = exec_table(linear(1, 5, 64))
RESNET50 = exec_table(linear(1.053, 5.072, 64))


def run(deadline_at_ms: float, count: int = 1) -> RequestRun:
    return RequestRun(FrontendId("f"), 1, count, deadline_at_ms, 0.0)


def test_four_requests_due_at_12_may_start_at_3() -> None:
    assert latest_at_ms(12.0, 4, SYMPHONY_3_3) == 3.0


def test_exec_is_the_last_of_its_three_reasons() -> None:
    assert exec_at_ms(10.0, 0.5, 0.0) == 10.5
    assert exec_at_ms(10.0, 0.5, 12.0) == 12.0


@pytest.mark.parametrize("at_ms", [0.0, 1e3, 1e10, 2e11, 5e12, 1e18])
def test_just_after_and_just_before_are_other_moments_whatever_the_clock_shows(at_ms: float) -> None:
    assert just_before(at_ms) < at_ms < just_after(at_ms)


def test_cost_is_delay_plus_run_time_and_an_empty_batch_always_fits() -> None:
    cost = cost_table(exec_table((6.0, 7.0)), lead_table(Delay(control_ms=1.0, data_ms_per_item=0.5), 2))
    assert cost == [-math.inf, 7.5, 9.0, math.inf]


def test_the_target_is_the_staggered_bound_at_the_models_own_rate() -> None:
    # 5264 r/s: l + b/r = 1.053 b + 5.072 + b/5.264 <= 25 holds up to b = 16.
    assert target_size(RESNET50, 5264.0, 25.0) == 16
    # Data transfer costs too: 1.293 b + 5.072 <= 24.9 holds up to b = 15.
    assert target_size(RESNET50, 5264.0, 24.9, 0.05) == 15


def test_a_model_that_keeps_less_than_one_slice_busy_gathers_for_b_over_r() -> None:
    # 2·l(b) <= 100 holds up to 45, where n = r·l/b is far below 1; l(b) + b/r <= 100 only up to 8, or never.
    assert target_size(SYMPHONY_3_3, 100.0, 100.0) == 8
    assert target_size(SYMPHONY_3_3, 10.0, 100.0) == 1


def test_the_target_is_at_least_one_and_at_most_the_largest_batch() -> None:
    assert target_size(SYMPHONY_3_3, 1e6, 6.5) == 1
    assert target_size(SYMPHONY_3_3, 0.0, 100.0) == 1
    assert target_size(SYMPHONY_3_3, 1e6, 1e6) == 64


@pytest.mark.parametrize("rate_rps", [1.0, 50.0, 333.0, 2000.0, 40_000.0])
@pytest.mark.parametrize("budget_ms", [5.0, 11.0, 25.0, 70.0, 400.0])
@pytest.mark.parametrize("data_ms", [0.0, 0.05])
def test_the_target_is_what_the_scan_of_the_notes_finds(
    rate_rps: float, budget_ms: float, data_ms: float
) -> None:
    def scan() -> int:
        per_ms = rate_rps / 1000.0
        for size in range(1, 66):
            run_ms = RESNET50[size]
            busy = per_ms * run_ms / size
            if run_ms * (1 + 1 / max(1.0, busy)) > budget_ms - data_ms * size:
                break
        if busy > 1:
            return max(1, size - 1)
        fitting = [b for b in range(1, 65) if RESNET50[b] + b / per_ms + data_ms * b <= budget_ms]
        return max(fitting, default=1)

    assert target_size(RESNET50, rate_rps, budget_ms, data_ms) == scan()


def test_before_any_rate_is_known_half_the_slo_is_for_waiting() -> None:
    assert fallback_target(RESNET50, 25.0) == 7
    assert fallback_target(RESNET50, 8.0) == 1


def test_the_suffix_is_the_longest_tail_that_can_run_as_one_batch() -> None:
    cost = cost_table(SYMPHONY_3_3, lead_table(Delay(), 64))
    runs = deque([run(6.5), run(7.5), run(8.5, count=3)])
    # The last three need l(3) = 8 <= 8.5; with the one before them l(4) = 9 > 7.5.
    assert suffix_size(runs, cost, 0.0, target=64) == 3
    assert suffix_size(runs, cost, 0.0, target=2) == 2
    # A moment later the run of three can give two.
    assert suffix_size(runs, cost, 1.0, target=64) == 2
    assert suffix_size(runs, cost, 3.0, target=64) == 0
