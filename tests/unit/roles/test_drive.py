from __future__ import annotations

from collections.abc import Sequence

import pytest

from fabric.messages import StatusListed
from roles.core import Tick
from roles.drive import Driver, DriverStats


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


class HandClock:
    """Moves by a millisecond with every look."""

    def __init__(self) -> None:
        self.at_ms = 1_000.0

    def now_ms(self) -> float:
        self.at_ms += 1.0
        return self.at_ms


class Alarm:
    """Wants these moments, one after the other."""

    def __init__(self, *moments_ms: float) -> None:
        self.left = list(moments_ms)

    @property
    def wake_at_ms(self) -> float | None:
        return self.left[0] if self.left else None

    def handle(self, event: Tick, now_ms: float) -> Sequence[None]:
        self.left.pop(0)
        return ()


def test_lateness_counts_from_the_moment_that_was_wanted() -> None:
    stats = ticks(Alarm(1_003.5))
    assert stats.ticks == 1
    assert 0.5 <= stats.late_ms_max < 10.0  # a few looks at the clock


@pytest.mark.parametrize("moments_ms", [(0.0,), (1_003.5, 0.0), (0.0, 1_003.5, 0.0), (0.0, 0.0)])
def test_a_core_that_wants_a_moment_of_the_past_is_late_only_from_when_it_said_so(
    moments_ms: tuple[float, ...],
) -> None:
    stats = ticks(Alarm(*moments_ms))
    assert stats.ticks == len(moments_ms)
    assert stats.late_ms_max < 10.0  # a few looks at the clock, not a second


def ticks(core: Alarm) -> DriverStats:
    driver: Driver[Tick, None] = Driver(core, [], lambda _: None, HandClock())
    try:
        driver.run(lambda: core.wake_at_ms is None)
    finally:
        driver.close()
    return driver.stats
