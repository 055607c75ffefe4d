"""Whole graphs: durations, requirements, error bars."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fabric.errors import ProfileError
from profiles.estimator.estimate import CALIBRATION, Estimator
from profiles.estimator.gpus import gpu_spec
from profiles.estimator.graph import Allocation, OperatorCall, OperatorGraph
from tests.unit.profiles.estimator.trained import ROUNDS, few_samples, quick_estimator


def chain(*calls: OperatorCall, weights: tuple[int, ...] = ()) -> OperatorGraph:
    results = [Allocation(one.size_bytes, place, place + 1) for place, one in enumerate(calls)]
    return OperatorGraph(1, calls, results, weights, (1_000,), 1_000)


def linear(rows: int, width: int = 1024) -> OperatorCall:
    size = 4 * (2 * rows * width + width * width)
    return OperatorCall("linear", ((rows, width), (width, width)), ((rows, width),), size)


def test_a_larger_batch_takes_longer_and_more_of_the_gpu() -> None:
    estimator = quick_estimator()
    small, large = (estimator.estimate(chain(*[linear(rows)] * 10)) for rows in (16, 8192))
    assert large.exec_ms > 5 * small.exec_ms
    assert small.requirements.weighted_sm_percent is not None
    assert large.requirements.weighted_sm_percent is not None
    assert small.requirements.weighted_sm_percent < large.requirements.weighted_sm_percent <= 100
    for one in (small, large):
        assert one.low_ms <= one.exec_ms <= one.high_ms


def test_launches_bound_a_model_of_small_operators() -> None:
    estimator = quick_estimator()
    tiny = OperatorCall("relu", ((8, 8),), ((8, 8),), 512)
    one, many = (estimator.estimate(chain(*[tiny] * count)).exec_ms for count in (100, 200))
    assert many == pytest.approx(2 * one, rel=0.05)
    quicker = estimator.estimate(chain(*[tiny] * 100), replace(CALIBRATION, events_ms=0.02)).exec_ms
    assert quicker == pytest.approx(one - 100 * 0.015, rel=0.1)


def test_an_unknown_operator_widens_the_error_bars_and_is_named() -> None:
    estimator = quick_estimator()
    sizes = (((4096, 4096),), ((4096, 4096),), 8 * 4096 * 4096)
    known, unknown = (estimator.estimate(chain(OperatorCall(name, *sizes))) for name in ("relu", "novel"))
    assert unknown.unknown == {"novel": 1}
    assert known.unknown == {}
    assert (unknown.high_ms - unknown.exec_ms) > 2 * (known.high_ms - known.exec_ms)
    assert unknown.exec_ms == pytest.approx(known.exec_ms, rel=0.3)


def test_memory_is_weights_and_scratch() -> None:
    estimator = quick_estimator()
    graph = chain(linear(8192), weights=(400 << 20,))
    plain = estimator.estimate(graph, replace(CALIBRATION, scratch=1.0)).memory_bytes
    doubled = estimator.estimate(graph, replace(CALIBRATION, scratch=2.0)).memory_bytes
    assert doubled - plain == plain - (400 << 20)


def test_branches_may_overlap_where_the_paper_says_so() -> None:
    wide = linear(256)
    calls = [wide, *[replace(wide, reads=(0,)) for _ in range(4)]]
    together = Estimator(gpu_spec("v100"), few_samples(), "branches", ROUNDS)
    one = quick_estimator()
    assert together.estimate(chain(*calls)).exec_ms < one.estimate(chain(*calls)).exec_ms


def test_a_model_that_launches_nothing_is_refused() -> None:
    with pytest.raises(ProfileError, match="nothing"):
        quick_estimator().estimate(chain(OperatorCall("view", ((4,),), ((4,),), 16)))


def test_an_unknown_gpu_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ProfileError, match="v100, v100-sxm2, a100, p100"):
        gpu_spec("v1000")
