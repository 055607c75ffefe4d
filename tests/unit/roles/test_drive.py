from __future__ import annotations

import pytest

from fabric.messages import StatusListed
from roles.drive import DriverStats


def test_a_quantile_of_the_lateness_is_never_too_low_and_at_most_an_eighth_too_high() -> None:
    for late_us in (0, 1, 15, 16, 17, 31, 32, 499, 500, 511, 512, 4_097, 999_999, 70_000_000):
        stats = DriverStats()
        stats.note_lateness(late_us / 1e3)
        assert late_us / 1e3 <= stats.late_ms(0.99) <= late_us / 1e3 * 1.125 + 0.001


def test_lateness_beyond_all_buckets_stays_in_the_last_one() -> None:
    stats = DriverStats()
    stats.note_lateness(1e9)
    assert stats.late_ms(1.0) > 100_000.0
    assert stats.late_ms_max == 1e9


def test_quantiles_are_those_of_all_ticks() -> None:
    stats = DriverStats()
    assert stats.late_ms(0.99) == 0.0
    for late_us in range(100):
        stats.note_lateness(late_us / 1e3)
    # The fiftieth is 49 us, in a bucket of 48 to 51; the hundredth is 99, in one of 96 to 103.
    assert stats.late_ms(0.5) == pytest.approx(0.052)
    assert stats.late_ms(1.0) == pytest.approx(0.104)


def test_a_status_tells_what_the_loop_measured_beside_what_the_role_counted() -> None:
    stats = DriverStats(turns=3, turn_ms_max=2.0, collect_ms_max=4.0)
    stats.note_lateness(0.005)
    told = stats.told_in(StatusListed("frontend-0", 1, (), (), {"requests": 5.0}))
    assert told.counters == {
        "requests": 5.0,
        "turns": 3.0,
        "ticks": 1.0,
        "timer_late_p50_ms": 0.006,
        "timer_late_p99_ms": 0.006,
        "timer_late_ms_max": 0.005,
        "turn_ms_max": 2.0,
        "collect_ms_max": 4.0,
    }
