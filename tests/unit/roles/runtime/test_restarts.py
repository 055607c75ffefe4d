from __future__ import annotations

import pytest

from roles.runtime.restarts import RestartRule, Restarts


def test_the_first_start_is_at_once_then_the_pause_doubles_from_a_tenth_of_a_second_to_five_seconds() -> None:
    restarts = Restarts(RestartRule(failures_max=100))
    pauses = []
    now_ms = 0.0
    for _ in range(9):
        start_at_ms = restarts.note_failure(now_ms)
        assert start_at_ms is not None
        pauses.append(start_at_ms - now_ms)
        now_ms = start_at_ms
    assert pauses == [0, 100, 200, 400, 800, 1600, 3200, 5000, 5000]


def test_the_fifth_failure_within_a_minute_is_the_last() -> None:
    restarts = Restarts(RestartRule())
    assert all(restarts.note_failure(moment) is not None for moment in (0.0, 10_000.0, 20_000.0, 30_000.0))
    assert restarts.note_failure(60_000.0) is None


def test_five_failures_over_more_than_a_minute_are_forgiven() -> None:
    restarts = Restarts(RestartRule())
    moments = [step * 15_001.0 for step in range(40)]
    assert all(restarts.note_failure(moment) is not None for moment in moments)
    assert restarts.failures == 5


def test_a_process_that_takes_two_minutes_to_fail_is_not_started_for_ever() -> None:
    restarts = Restarts(RestartRule())
    moments = [step * 122_000.0 for step in range(1, 6)]
    answers = [restarts.note_failure(moment, wasted_ms=120_000.0) for moment in moments]
    assert answers[:4] == [moment + pause for moment, pause in zip(moments, (0, 100, 200, 400), strict=False)]
    assert answers[4] is None


def test_after_a_quiet_minute_the_next_start_is_at_once_again() -> None:
    restarts = Restarts(RestartRule())
    for moment in (0.0, 1_000.0, 2_000.0):
        restarts.note_failure(moment)
    assert restarts.note_failure(70_000.0) == 70_000.0


def test_a_process_that_fails_for_years_does_not_overflow() -> None:
    restarts = Restarts(RestartRule(failures_max=3, window_ms=30_000.0))
    for step in range(2_000):
        restarts.note_failure(step * 20_000.0)
    assert restarts.note_failure(2_000 * 20_000.0) == pytest.approx(2_000 * 20_000.0 + 5_000.0)
