"""How many requests/s of an application a placement can serve, worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from fabric.ids import ModelId, NodeId
from policies.graphs import ApplicationPlan
from policies.graphs.graph import Stage, graph_of
from policies.graphs.limits import limits
from policies.placement.common.base import GpuSlot, Placement, PlannedModel, PlannedSlice
from profiles.model import ModelProfile, TableProfile

MODEL = ModelId("m")


def limit_rps(
    profile: ModelProfile, gpus: int, slo_ms: float, demands: Sequence[Mapping[str, float]] = ({"only": 1.0},)
) -> float:
    """Of an application of one stage, on one slice over so many GPUs."""
    graph = graph_of([Stage("only", MODEL)])
    plan = ApplicationPlan("app", graph, slo_ms, {"only": profile.exec_table()}, gpus)
    slots = [GpuSlot(gpu, "v100", 1 << 34, NodeId("n"), gpu) for gpu in range(gpus)]
    one = PlannedSlice(0, None, (PlannedModel(MODEL),), tuple(range(1, gpus)))
    asked = [(plan, demands)]
    (decision,) = limits(asked, Placement((one,)), slots, {(MODEL, "v100"): profile}, {MODEL: slo_ms})
    return decision.metrics["requests/s at most"]


def table() -> TableProfile:
    return TableProfile({100.0: {1: 90.0, 2: 120.0}})


def test_a_slice_serves_the_largest_batch_that_may_wait_for_another_one() -> None:
    assert limit_rps(table(), 1, 240.0) == pytest.approx(2_000 / 120)
    assert limit_rps(table(), 1, 239.0) == pytest.approx(1_000 / 90)


def test_a_pipeline_takes_a_batch_as_often_as_its_slowest_stage() -> None:
    """Its stages take 40 and 60 for one, 4/3 of that for two: 80 of 133."""
    profile = table().with_cuts({2: (40.0, 60.0)})
    assert limit_rps(profile, 2, 240.0) == pytest.approx(2_000 / 80)
    assert limit_rps(profile, 2, 210.0) == pytest.approx(1_000 / 60)


def test_of_fan_outs_that_change_the_moment_counts_at_which_least_is_served() -> None:
    demands = [{"only": each} for each in (0.0, 4.0, 2.0)]
    assert limit_rps(table(), 1, 240.0, demands) == pytest.approx(2_000 / 120 / 4)


def test_a_model_in_ranks_has_its_profile_of_all_of_them() -> None:
    assert limit_rps(table(), 2, 240.0) == pytest.approx(2_000 / 120)
