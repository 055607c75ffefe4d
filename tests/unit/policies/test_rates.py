"""The arrival rate over a sliding window."""

from __future__ import annotations

import pytest

from policies.rates import RateMeter


def test_there_is_no_rate_before_the_first_sample_is_complete() -> None:
    meter = RateMeter()
    meter.add(3, now_ms=100.0)
    assert meter.rate_rps(149.9) is None
    assert meter.rate_rps(150.0) == 3 / 0.05


def test_sampling_starts_with_the_first_arrival() -> None:
    meter = RateMeter()
    assert meter.rate_rps(60_000.0) is None
    meter.add(10, now_ms=60_000.0)
    assert meter.rate_rps(60_050.0) == pytest.approx(200.0)


def test_the_rate_is_the_mean_of_the_samples_in_the_window() -> None:
    meter = RateMeter(sample_ms=10.0, samples=4)
    for at_ms, count in ((0.0, 1), (10.0, 2), (20.0, 3), (30.0, 4), (40.0, 5)):
        meter.add(count, at_ms)
    assert meter.rate_rps(40.0) == pytest.approx(10 / 0.04)
    assert meter.rate_rps(50.0) == pytest.approx(14 / 0.04)


def test_a_long_silence_leaves_a_rate_of_zero_and_costs_one_window() -> None:
    meter = RateMeter(sample_ms=10.0, samples=4)
    meter.add(100, 0.0)
    assert meter.rate_rps(1e9) == 0.0
    meter.add(8, 1e9)
    assert meter.rate_rps(1e9 + 10.0) == pytest.approx(8 / 0.04)


def test_the_version_changes_with_every_sample_and_only_then() -> None:
    meter = RateMeter(sample_ms=10.0, samples=4)
    meter.add(1, 0.0)
    meter.add(1, 9.9)
    assert meter.version == 0
    meter.add(1, 10.0)
    assert meter.version == 1


@pytest.mark.parametrize("rate_rps", [0.1, 0.3, 7.7, 333.3])
def test_after_a_silence_a_rate_is_nothing_at_all(rate_rps: float) -> None:
    """Not what rounding has left, which may be less than nothing."""
    for step_ms in (1.0, 50.0, 333.0, 10_000.0):
        meter = RateMeter()
        meter.begin_at(rate_rps, 0.0)
        moments = [step_ms * (1 + step) for step in range(int(11_000.0 / step_ms) + 1)]
        rates = [meter.rate_rps(at_ms) for at_ms in moments]
        assert all(rate is not None and rate >= 0.0 for rate in rates)
        assert rates[-1] == pytest.approx(0.0, abs=1e-9)
