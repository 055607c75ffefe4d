from __future__ import annotations

import numpy as np
import pytest

from fabric.ids import ModelId, SliceId
from roles.workload.outcomes import (
    BatchRecord,
    GpuUse,
    Outcome,
    Window,
    batch_sizes_in,
    gpu_use,
    model_outcome,
)

A, B = ModelId("a"), ModelId("b")
WINDOW = Window(1000.0, 2000.0)


def batch(
    started_at_ms: float,
    finished_at_ms: float,
    gpu: int = 0,
    share_percent: float | None = None,
    size: int = 4,
    model_id: ModelId = A,
) -> BatchRecord:
    slice_id = SliceId(f"n/gpu{gpu}/0")
    return BatchRecord(
        model_id, size, slice_id, gpu, share_percent, started_at_ms, started_at_ms, finished_at_ms
    )


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
    use = gpu_use(batches, 3, WINDOW)
    assert use.busy_fraction == pytest.approx((0.2, 0.2, 0.0))
    assert use.used == 2
    assert use.of_model == pytest.approx({A: 0.4})


def test_slices_without_a_limit_keep_one_gpu_busy_together() -> None:
    use = gpu_use([batch(1000, 1400), batch(1200, 1600), batch(1300, 1350)], 1, WINDOW)
    assert use.busy_fraction == pytest.approx((0.6,))


def test_device_time_is_told_by_model_and_adds_up_to_the_busy_gpus() -> None:
    batches = [
        batch(1000, 1400),  # by itself until 1200, then half of it each until 1300, a third until 1350
        batch(1200, 1600, model_id=B),
        batch(1300, 1350, model_id=B),
        batch(1000, 1500, gpu=1, share_percent=40, model_id=B),
        batch(1600, 1700, gpu=1, share_percent=60),
    ]
    use = gpu_use(batches, 2, WINDOW)
    assert use.of_model == pytest.approx(
        {A: 0.2 + 0.05 + 0.05 / 3 + 0.025 + 0.06, B: 0.05 + 0.1 / 3 + 0.025 + 0.2 + 0.2}
    )
    assert sum(use.of_model.values()) == pytest.approx(sum(use.busy_fraction))


def test_more_than_a_whole_gpu_is_divided_as_it_was_asked_for() -> None:
    batches = [batch(1000, 2000, share_percent=90), batch(1000, 2000, share_percent=60, model_id=B)]
    use = gpu_use(batches, 1, WINDOW)
    assert use.busy_fraction == (1.0,)
    assert use.of_model == pytest.approx({A: 0.6, B: 0.4})


def test_a_batch_outside_the_window_uses_no_gpu() -> None:
    use = gpu_use([batch(100, 1000), batch(2000, 2100)], 1, WINDOW)
    assert (use.busy_fraction, use.used, use.of_model) == ((0.0,), 0, {})


def test_the_json_is_the_contract_of_simulate() -> None:
    arrived = np.array([1000.0, 1100.0, 1200.0, 1300.0])
    finished = np.array([1010.0, 1110.0, 1210.0, np.nan])
    model = model_outcome(arrived, finished, 30.0, WINDOW, [3])
    outcome = Outcome(WINDOW.duration_s, {A: model}, GpuUse((0.5, 0.0), {A: 0.5}))
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
                "gpus": 0.5,
            }
        },
        "applications": {},
        "gpus": {"count": 2, "busy_fraction": [0.5, 0.0], "used": 1},
        "advice_gpus": 3,
    }


def test_a_model_that_cannot_be_served_asks_for_no_gpus() -> None:
    good = model_outcome(np.array([1000.0]), np.array([1001.0]), 30.0, WINDOW)
    hopeless = model_outcome(np.array([1000.0]), np.array([np.nan]), 30.0, WINDOW)
    outcome = Outcome(1.0, {A: good, ModelId("b"): hopeless}, GpuUse((0.9, 0.9)))
    assert outcome.worst_bad_rate == 1.0
    assert outcome.advice_gpus == 2


def test_where_nothing_is_served_idle_gpus_are_not_too_many() -> None:
    hopeless = model_outcome(np.array([1000.0]), np.array([np.nan]), 30.0, WINDOW)
    assert Outcome(1.0, {A: hopeless}, GpuUse((0.0, 0.0, 0.0))).advice_gpus == 3
    assert Outcome(1.0, {}, GpuUse((0.0, 0.0, 0.0))).advice_gpus == 1


def test_no_fewer_gpus_are_advised_than_one_model_needs() -> None:
    one = model_outcome(np.array([1000.0]), np.array([1001.0]), 30.0, WINDOW)
    idle = GpuUse((0.1, 0.1, 0.0, 0.0))
    assert Outcome(1.0, {A: one}, idle).advice_gpus == 1
    assert Outcome(1.0, {A: one}, idle, gpus_min=2).advice_gpus == 2
    assert Outcome(1.0, {A: one}, idle, is_work_known=False).advice_gpus is None
    assert Outcome(1.0, {A: one}, idle, is_work_known=False).gpus_of(A) is None
