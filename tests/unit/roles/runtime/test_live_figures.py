"""Several frontends' figures of a model, put together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fabric.ids import ModelId
from fabric.messages import ModelFigures
from roles.runtime.live_figures import percentile, together

BOUNDS = (10.0, 20.0, 40.0)


def told(good: int, late: int, answered: tuple[int, ...], **refused: float) -> ModelFigures:
    asked = good + late + round(sum(refused.values()))
    return ModelFigures(ModelId("m"), 20.0, 10_000.0, asked, good, late, refused, BOUNDS, answered)


def test_frontends_are_added_up_and_what_clients_did_is_nobodys_fault() -> None:
    its = together(
        [
            told(60, 10, (60, 0, 10, 0), Overloaded=20, Cancelled=7),
            told(40, 0, (0, 40, 0, 0), Overloaded=5, NoReplica=25),
        ]
    )
    assert (its.rate_rps, its.goodput_rps) == pytest.approx((16.7, 10.0))
    assert (its.late, its.dropped, its.drops) == (10, {"NoReplica": 25, "Overloaded": 25}, 50)
    assert its.bad_rate == pytest.approx(60 / 160)
    assert its.p50_ms == pytest.approx(10 * 55 / 60)
    assert its.p99_ms == pytest.approx(20 + 20 * 8.9 / 10)


def test_what_stages_asked_is_added_up_too() -> None:
    its = together(
        [replace(told(60, 0, (60, 0, 0, 0)), stage_asked=50, stage_good=40), told(1, 0, (1, 0, 0, 0))]
    )
    assert (its.stage_rate_rps, its.stage_goodput_rps) == (5.0, 4.0)


def test_of_nothing_there_is_no_rate_of_bad_ones_and_no_percentile() -> None:
    its = together([told(0, 0, (0, 0, 0, 0))])
    assert (its.bad_rate, its.p50_ms, its.p99_ms, its.rate_rps) == (None, None, None, 0.0)


def test_what_is_over_the_last_bound_is_told_as_that_bound() -> None:
    assert percentile(BOUNDS, (0, 0, 0, 5), 0.5) == 40.0


@given(st.lists(st.floats(0.1, 40.0), min_size=1, max_size=60), st.sampled_from([0.5, 0.99]))
def test_a_percentile_lies_in_the_bucket_of_the_value_with_that_rank(
    values: list[float], fraction: float
) -> None:
    counts = [
        sum(low < one <= high for one in values) for low, high in zip((0.0, *BOUNDS), BOUNDS, strict=False)
    ]
    rank = -(-fraction * len(values) // 1)
    exact = sorted(values)[int(rank) - 1]
    found = percentile(BOUNDS, (*counts, 0), fraction)
    assert found is not None
    high = next(bound for bound in BOUNDS if exact <= bound)
    assert (0.0, *BOUNDS)[BOUNDS.index(high)] <= found <= high
