"""Run times learned from records: better than the roofline, and never faster than it."""

from __future__ import annotations

import numpy as np
import pytest

from fabric.errors import ProfileError
from profiles.estimator.check import checked
from profiles.estimator.estimate import measuring_gaps_ms, samples_of
from profiles.estimator.gpus import gpu_spec
from profiles.estimator.records import shipped_records
from profiles.estimator.regressors import (
    Bounded,
    Floors,
    Roofline,
    Sample,
    Stacked,
    TimeRegressor,
    one_thread,
)
from profiles.estimator.work import convolution_work, elementwise_work, matrix_work
from tests.unit.profiles.estimator.trained import ROUNDS, few_samples

V100 = gpu_spec("v100")


def of_class(op: str, every: int) -> tuple[list[Sample], list[Sample]]:
    """Known and unseen ones of one class."""
    samples = [one for one in samples_of(V100) if one.record.work.op == op][::every]
    return samples[::2], samples[1::2]


def median_error(regressor: Bounded | Roofline | Stacked, samples: list[Sample]) -> float:
    said = regressor.predict_ms([one.record.work for one in samples], V100)
    return float(np.median(np.abs(said / np.array([one.record.latency_ms for one in samples]) - 1)))


@pytest.mark.parametrize("op", ["linear", "bmm", "conv"])
def test_half_of_the_records_tell_the_other_half_twice_as_well_as_the_roofline(op: str) -> None:
    known, unseen = of_class(op, 4)
    floors = Floors(known)
    learned, bare = Bounded(60), Roofline()
    with one_thread():
        learned.fit(known, floors)
        bare.fit(known, floors)
        assert 2 * median_error(learned, unseen) <= median_error(bare, unseen)


def test_the_papers_stack_learns_too() -> None:
    known, unseen = of_class("linear", 20)
    floors = Floors(known)
    stacked, bare = Stacked(), Roofline()
    with one_thread():
        stacked.fit(known, floors)
        bare.fit(known, floors)
        assert median_error(stacked, unseen) <= median_error(bare, unseen)


def test_nothing_is_faster_than_the_roofline_however_large_or_small() -> None:
    with one_thread():
        times = TimeRegressor(few_samples(), rounds=ROUNDS)
        for size in (1, 17, 300, 5_000, 100_000):
            works = [
                matrix_work("linear", 1, size, size, size, has_bias=True),
                matrix_work("bmm", 7, size, 3, size),
                elementwise_work("relu", size, size, 1),
                elementwise_work("ln", size, size, 1),
            ]
            for work, said in zip(works, times.predict_ms(works, V100), strict=True):
                assert said >= V100.roofline_ms(work), work
        (conv_ms,) = times.predict_ms([convolution_work(512, 2048, 2048, 224)], V100)
        assert conv_ms >= V100.roofline_ms(convolution_work(512, 2048, 2048, 224)) / 4


def test_a_gpu_without_records_is_told_from_the_others() -> None:
    h100 = gpu_spec("h100")
    samples = samples_of(h100)[::200]
    assert {one.gpu.gpu_type for one in samples} == {"v100", "a100", "p100"}
    work = matrix_work("linear", 1, 4096, 4096, 4096, has_bias=True)
    with one_thread():
        times = TimeRegressor(samples, rounds=ROUNDS)
        (on_h100,), (on_p100,) = times.predict_ms([work], h100), times.predict_ms([work], gpu_spec("p100"))
    assert h100.roofline_ms(work) <= on_h100 < on_p100


def test_a_class_without_records_is_an_error() -> None:
    with one_thread():
        known = [one for one in few_samples() if one.record.work.op != "bmm"]
        times = TimeRegressor(known, rounds=ROUNDS)
        with pytest.raises(ProfileError, match="bmm"):
            times.predict_ms([matrix_work("bmm", 2, 2, 2, 2)], V100)


def test_what_measuring_adds_is_less_than_the_smallest_record() -> None:
    samples = few_samples()
    floors = Floors(samples)
    for op, gap_ms in measuring_gaps_ms(samples, floors).items():
        assert 0 <= gap_ms <= floors.of(op, V100)


def test_the_check_does_not_learn_from_what_it_is_asked_about() -> None:
    """A lie in the records would be repeated by whoever learned it: ten times slower, and not believed."""
    asked = [one for one in shipped_records("v100") if one.work.op == "tanh"][::40]
    slower = [type(one)(one.work, 10 * one.latency_ms, one.kernels, one.blocks, one.threads) for one in asked]
    errors = checked(slower, V100)["tanh"]
    assert errors.n == len(asked)
    assert 0.85 < errors.median_error < 0.95
