from __future__ import annotations

import numpy as np
import pytest

from fabric.ids import ModelId, SliceId
from roles.workload.outcomes import BatchRecord, Outcome, Window, batch_sizes_in, busy_gpus, model_outcome

A = ModelId("a")
WINDOW = Window(1000.0, 2000.0)


def batch(
    started_at_ms: float,
    finished_at_ms: float,
    gpu: int = 0,
    share_percent: float | None = None,
    size: int = 4,
) -> BatchRecord:
    slice_id = SliceId(f"n/gpu{gpu}/0")
    return BatchRecord(A, size, slice_id, gpu, share_percent, started_at_ms, started_at_ms, finished_at_ms)


def test_each_request_of_the_window_has_one_fate() -> None:
    #                      before   good    late    exactly  dropped  behind
    arrived = np.array([999.999, 1000.0, 1500.0, 1600.0, 1999.0, 2000.0])
    finished = np.array([1005.0, 1010.0, 1530.1, 1630.0, np.nan, 2001.0])
    found = model_outcome(arrived, finished, 30.0, WINDOW, [2, 4, 6])
    assert (found.offered, found.good, found.late, found.dropped) == (4, 2, 1, 1)
    assert found.bad_rate == 0.5
    assert found.p50_ms == 30.0
    assert found.p99_ms == pytest.approx(30.1)
    assert (found.batch_mean, found.batch_p50) == (4.0, 4.0)


def test_each_request_may_have_an_slo_of_its_own() -> None:
    arrived = np.array([999.0, 1000.0, 1001.0, 1002.0])
    finished = arrived + 20.0
    finished[3] = np.nan
    found = model_outcome(arrived, finished, np.array([1.0, 20.0, 19.0, 30.0]), WINDOW)
    assert (found.offered, found.good, found.late, found.dropped) == (3, 1, 1, 1)


def test_a_request_is_followed_beyond_the_window() -> None:
    found = model_outcome(np.array([1999.0]), np.array([2020.0]), 30.0, WINDOW)
    assert found.good == 1


def test_a_finish_at_the_deadline_is_good_whatever_rounding_says() -> None:
    found = model_outcome(np.array([1000.1]), np.array([1000.1 + 0.7 + 0.1 + 0.2]), 1.0, WINDOW)
    assert found.good == 1


def test_where_nothing_ran_there_are_no_percentiles() -> None:
    found = model_outcome(np.array([1000.0]), np.array([np.nan]), 30.0, WINDOW)
    assert (found.p50_ms, found.p99_ms, found.batch_mean, found.batch_p50) == (None, None, None, None)
    assert found.bad_rate == 1.0


def test_where_nothing_was_offered_nothing_is_bad() -> None:
    assert model_outcome(np.array([]), np.array([]), 30.0, WINDOW).bad_rate == 0.0


def test_p99_is_a_latency_that_occurred() -> None:
    arrived = np.full(100, 1000.0)
    found = model_outcome(arrived, arrived + np.arange(1, 101), 1000.0, WINDOW)
    assert (found.p50_ms, found.p99_ms) == (50.0, 99.0)


def test_batches_count_where_they_start_in_the_window() -> None:
    batches = [
        batch(999, 1001, size=1),
        batch(1000, 1001, size=2),
        batch(1999, 2020, size=3),
        batch(2000, 2001),
    ]
    assert batch_sizes_in([*batches, batch(1500, 1501, size=0)], WINDOW) == {A: [2, 3]}


def test_busy_time_is_cut_at_the_window_and_weighted_by_share() -> None:
    batches = [batch(900, 1100), batch(1900, 2100), batch(1000, 1500, gpu=1, share_percent=40)]
    fractions, used = busy_gpus(batches, 3, WINDOW)
    assert fractions == pytest.approx((0.2, 0.2, 0.0))
    assert used == 2


def test_slices_without_a_limit_keep_one_gpu_busy_together() -> None:
    fractions, _ = busy_gpus([batch(1000, 1400), batch(1200, 1600), batch(1300, 1350)], 1, WINDOW)
    assert fractions == pytest.approx((0.6,))


def test_a_batch_outside_the_window_uses_no_gpu() -> None:
    assert busy_gpus([batch(100, 1000), batch(2000, 2100)], 1, WINDOW) == ((0.0,), 0)


def test_the_json_is_the_contract_of_simulate() -> None:
    arrived = np.array([1000.0, 1100.0, 1200.0, 1300.0])
    finished = np.array([1010.0, 1110.0, 1210.0, np.nan])
    model = model_outcome(arrived, finished, 30.0, WINDOW, [3])
    outcome = Outcome(WINDOW.duration_s, {A: model}, (0.5, 0.0), 1)
    assert outcome.as_json() == {
        "offered_rps": 4.0,
        "goodput_rps": 3.0,
        "bad_rate": 0.25,
        "models": {
            "a": {
                "offered": 4,
                "good": 3,
                "late": 0,
                "dropped": 1,
                "bad_rate": 0.25,
                "p50_ms": 10.0,
                "p99_ms": 10.0,
                "batch_mean": 3.0,
                "batch_p50": 3.0,
            }
        },
        "applications": {},
        "gpus": {"count": 2, "busy_fraction": [0.5, 0.0], "used": 1},
        "advice_gpus": 3,
    }


def test_a_model_that_cannot_be_served_asks_for_no_gpus() -> None:
    good = model_outcome(np.array([1000.0]), np.array([1001.0]), 30.0, WINDOW)
    hopeless = model_outcome(np.array([1000.0]), np.array([np.nan]), 30.0, WINDOW)
    outcome = Outcome(1.0, {A: good, ModelId("b"): hopeless}, (0.9, 0.9), 2)
    assert outcome.worst_bad_rate == 1.0
    assert outcome.advice_gpus == 2


def test_no_fewer_gpus_are_advised_than_one_model_needs() -> None:
    one = model_outcome(np.array([1000.0]), np.array([1001.0]), 30.0, WINDOW)
    idle = (0.1, 0.1, 0.0, 0.0)
    assert Outcome(1.0, {A: one}, idle, 2).advice_gpus == 1
    assert Outcome(1.0, {A: one}, idle, 2, gpus_min=2).advice_gpus == 2
    assert Outcome(1.0, {A: one}, idle, 2, is_work_known=False).advice_gpus is None
