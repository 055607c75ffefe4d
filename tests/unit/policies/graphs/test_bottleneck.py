"""Which stage limits an application, in cases that can be worked out by hand."""

from __future__ import annotations

import pytest

from policies.graphs.bottleneck import bottleneck


def test_where_all_slices_host_all_a_stage_limits_by_its_part_of_the_gpu_time() -> None:
    # 10, 2 · 5 and 0.5 · 40 ms of GPU for each request: 40 ms in all, on two GPUs 50 requests/s.
    found = bottleneck({"a": 1.0, "b": 2.0, "c": 0.5}, [{"a": 100.0, "b": 200.0, "c": 25.0}] * 2)
    assert found.stage == "c"
    assert found.rate_rps == pytest.approx(50.0)
    assert found.parts == pytest.approx({"a": 0.25, "b": 0.25, "c": 0.5})


def test_a_stage_whose_own_slices_are_too_few_limits_alone() -> None:
    found = bottleneck({"a": 1.0, "b": 3.0}, [{"a": 100.0}, {"b": 90.0}, {"b": 30.0}])
    assert found.stage == "b"
    assert found.rate_rps == pytest.approx(40.0, rel=0.01)
    assert found.parts["b"] > 0.95


def test_a_slice_that_can_serve_both_helps_the_one_that_lacks_more() -> None:
    found = bottleneck({"a": 1.0, "b": 1.0}, [{"a": 50.0}, {"b": 20.0}, {"a": 100.0, "b": 100.0}])
    assert found.rate_rps == pytest.approx((50.0 + 20.0 + 100.0) / 2, rel=0.01)


def test_a_stage_that_nothing_hosts_serves_nothing() -> None:
    found = bottleneck({"a": 1.0, "b": 1.0}, [{"a": 50.0}])
    assert (found.stage, found.rate_rps) == ("b", 0.0)
