"""Models that must be cut get a pipeline each before any policy is asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fabric.errors import ConfigError
from fabric.ids import ModelId, NodeId
from policies.placement.common.base import (
    GpuSlot,
    PlacedModelInput,
    Placement,
    PlannedModel,
    PlannedSlice,
    Profiles,
)
from policies.placement.common.cut_models import cut_first
from policies.placement.registry import placement_policy
from profiles.store import shipped_profile, shipped_refs
from roles.config.cluster import ClusterConfig, placed_models
from roles.config.read_config import parse_config

CUT = {"python": "a.b:C", "stages": 2}
RANKS = {"python": "a.b:C", "ranks": 2}
WHOLE = {"python": "a.b:C"}


def cluster(
    *models: dict[str, Any], gpus: tuple[int, ...] = (4,), memory_gb: float = 16, **keys: Any
) -> ClusterConfig:
    nodes = [
        {"host": host, "gpus": count, "device": "cpu", "memory_gb": memory_gb}
        for host, count in zip("abc", gpus, strict=False)
    ]
    named = [{"name": f"m{place}", "slo_ms": 100, **model} for place, model in enumerate(models)]
    return parse_config(
        {"models": named, "cluster": {"nodes": nodes}, "placement": "exclusive", **keys}, Path()
    )


def gpus_of(placed: Placement) -> dict[str, list[tuple[int, ...]]]:
    found: dict[str, list[tuple[int, ...]]] = {}
    for one in placed.slices:
        for model in one.models:
            found.setdefault(model.model_id, []).append(one.gpus)
    return found


def test_each_has_gpus_of_its_own_and_the_policy_has_the_others() -> None:
    placed = cluster({"loader": WHOLE}, {"loader": CUT}).place()
    found = gpus_of(placed)
    assert found["m1"] == [(0, 1)]
    assert found["m0"]
    assert all(set(gpus) <= {2, 3} for gpus in found["m0"])


def test_stages_are_on_one_host_and_leave_large_hosts_to_others() -> None:
    assert gpus_of(cluster({"loader": CUT}, gpus=(1, 4, 2)).place())["m0"] == [(5, 6)]


def test_a_pipeline_stays_where_it_is() -> None:
    there = Placement((PlannedSlice(2, None, (PlannedModel(ModelId("m0")),), (3,)),))
    assert gpus_of(cluster({"loader": CUT}).place(current=there))["m0"] == [(2, 3)]


def now(**gpus_of_model: tuple[int, ...]) -> Placement:
    return Placement(
        tuple(
            PlannedSlice(first, None, (PlannedModel(ModelId(name)),), tuple(others))
            for name, (first, *others) in gpus_of_model.items()
        )
    )


def without(config: ClusterConfig, *lost: int) -> list[GpuSlot]:
    return [gpu for gpu in config.gpus if gpu.index not in lost]


@pytest.mark.parametrize("cut", [CUT, RANKS])
def test_a_pipeline_whose_gpus_are_all_there_does_not_move_for_one_that_lost_a_gpu(cut: Any) -> None:
    config = cluster({"loader": cut}, {"loader": cut}, gpus=(6,))
    placed = config.place(current=now(m0=(0, 1), m1=(2, 3)), gpus=without(config, 0))
    assert gpus_of(placed) == {"m0": [(1, 4)], "m1": [(2, 3)]}


def test_a_pipeline_moves_where_another_one_has_no_place_else() -> None:
    config = cluster({"loader": {**CUT, "stages": 4}}, {"loader": CUT}, gpus=(4, 4))
    placed = config.place(current=now(m0=(0, 1, 2, 3), m1=(4, 5)), gpus=without(config, 0))
    assert gpus_of(placed) == {"m0": [(4, 5, 6, 7)], "m1": [(1, 2)]}


def test_more_stages_than_equal_gpus_of_a_host_leave_that_model_out_and_serve_the_others() -> None:
    three = {"python": "a.b:C", "stages": 3}
    placed = cluster({"loader": three}, {"loader": WHOLE}, gpus=(2, 2)).place()
    assert list(gpus_of(placed)) == ["m1"]
    (left,) = placed.unplaced
    assert left.model_id == "m0"
    assert left.reason == (
        "it must be cut into 3 stages, each on a GPU of its own; no host has 3 equal GPUs free (the most: 2)"
    )


def test_when_pipelines_have_all_gpus_the_others_hear_that() -> None:
    placed = cluster({"loader": CUT}, {"loader": WHOLE}, gpus=(2,)).place()
    assert gpus_of(placed) == {"m0": [(0, 1)]}
    assert [one.reason for one in placed.unplaced] == ["models that need several GPUs have them all"]


def test_what_no_gpu_holds_is_held_by_several() -> None:
    large = {"memory_mb": 3000}
    whole = cluster({"loader": WHOLE, **large}, memory_gb=2).place()
    assert not whole.slices
    assert gpus_of(cluster({"loader": CUT, **large}, memory_gb=2).place())["m0"] == [(0, 1)]
    too_large = cluster({"loader": CUT, "memory_mb": 5000}, memory_gb=2).place()
    assert "memory: a stage needs" in too_large.unplaced[0].reason


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        (1, r"loader\.stages: is 1; it must be from 2 to 64"),
        (65, r"loader\.stages"),
        ([], r"loader\.stages: its modules and the first stage"),
        (["a", "a"], r"loader\.stages\[1\]"),
        ("four", r"loader\.stages"),
    ],
)
def test_what_is_no_number_of_stages_is_refused(stages: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        cluster({"loader": {"python": "a.b:C", "stages": stages}})


def test_ranks_have_gpus_of_one_host_and_of_their_own_and_each_a_part_of_the_memory() -> None:
    assert gpus_of(cluster({"loader": RANKS}, gpus=(1, 4, 2)).place())["m0"] == [(5, 6)]
    placed = cluster({"loader": WHOLE}, {"loader": RANKS}).place()
    assert gpus_of(placed)["m1"] == [(0, 1)]
    large = cluster({"loader": RANKS, "memory_mb": 3000}, memory_gb=2)
    assert gpus_of(large.place())["m0"] == [(0, 1)]
    too_large = cluster({"loader": RANKS, "memory_mb": 5000}, memory_gb=2).place()
    assert "memory: a rank needs" in too_large.unplaced[0].reason


def test_more_ranks_than_equal_gpus_of_a_host_leave_that_model_out_and_serve_the_others() -> None:
    three = {"python": "a.b:C", "ranks": 3}
    placed = cluster({"loader": three}, {"loader": WHOLE}, gpus=(2, 2)).place()
    assert list(gpus_of(placed)) == ["m1"]
    assert [one.reason for one in placed.unplaced] == [
        "it must run in 3 ranks, each on a GPU of its own; no host has 3 equal GPUs free (the most: 2)"
    ]


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        ({"python": "a.b:C", "ranks": 1}, r"loader\.ranks: is 1; it must be from 2 to 64"),
        ({"python": "a.b:C", "ranks": 65}, r"loader\.ranks"),
        ({"python": "a.b:C", "ranks": "two"}, r"loader\.ranks"),
        ({"python": "a.b:C", "ranks": 2, "stages": 2}, r"loader\.ranks: goes without stages"),
        ({"python": "a.b:C", "ranks": 2, "cuda_graphs": True}, r"loader\.ranks: goes without cuda_graphs"),
        ({"zoo": "torchvision", "arch": "resnet18", "ranks": 2}, r"loader\.ranks: belongs to python"),
    ],
)
def test_ranks_that_cannot_be_are_refused(loader: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        cluster({"loader": loader})


def test_an_emulated_model_in_ranks_needs_a_profile_of_all_of_them_together() -> None:
    def emulated(**model: Any) -> Placement:
        named = {"name": "m0", "slo_ms": 100, "loader": RANKS, **model}
        document = {"models": [named], "cluster": {"gpus": 2}, "placement": "exclusive"}
        return parse_config(document, Path()).place()

    assert emulated().unplaced[0].reason == "it has no profile for GPU type generic"
    assert gpus_of(emulated(profile={"table": {1: 90}}))["m0"] == [(0, 1)]
    assert "below the 110 ms" in emulated(profile={"table": {1: 110}}).unplaced[0].reason


class _Heard:
    """A policy that keeps what it was told of the present."""

    heard: Placement | None = None

    def place(
        self,
        models: Sequence[PlacedModelInput],
        gpus: Sequence[GpuSlot],
        profiles: Profiles,
        current: Placement | None = None,
    ) -> Placement:
        self.heard = current
        return Placement(())


@pytest.mark.parametrize("cut", [CUT, RANKS, None])
@pytest.mark.parametrize("drained", [set(), {3}, {2, 3}])
def test_a_policy_hears_of_what_runs_on_its_gpus_for_its_models(cut: Any, drained: set[int]) -> None:
    """Neither of pipelines, nor of models in ranks, nor of GPUs that it may not use."""
    config = cluster({"loader": WHOLE}, {"loader": WHOLE}, *([{"loader": cut}] if cut else ()), gpus=(6,))
    whole = [PlannedSlice(gpu, None, (PlannedModel(ModelId(f"m{gpu % 2}")),)) for gpu in (2, 3, 4, 5)]
    pipeline = PlannedSlice(0, None, (PlannedModel(ModelId("m2")),), (1,))
    now = Placement((*([pipeline] if cut else ()), *whole))
    gpus = [gpu for gpu in config.gpus if gpu.index not in drained]
    policy = _Heard()
    cut_first(placed_models(config.models), gpus, {}, now).with_others(policy, {}, now)
    assert policy.heard is not None
    assert list(policy.heard.slices) == [one for one in whole if one.gpu not in drained]


@pytest.mark.parametrize("name", ["gpulet", "symphony"])
def test_equal_plans_beside_a_pipeline_stay_as_they_are(name: str) -> None:
    models = [PlacedModelInput(ModelId(f"m{place}"), 100.0, 5.0, 2**30) for place in range(6)]
    models.append(PlacedModelInput(ModelId("gang"), 500.0, 1.0, 2**30, ranks=4))
    gpus = [GpuSlot(place, "v100", 16 * 2**30, NodeId(f"n{place // 4}"), place % 4) for place in range(16)]
    profile = shipped_profile(next(ref for ref in shipped_refs() if ref.startswith("gpulet-2080ti/")))
    profiles = {(model.model_id, "v100"): profile for model in models}
    policy = placement_policy(name, {"subclusters": 2} if name == "symphony" else {})
    plans: list[Placement] = []
    for _ in range(4):
        now = plans[-1] if plans else None
        plans.append(cut_first(models, gpus, profiles, now).with_others(policy, profiles, now))
    assert all(gpus_of(plan) == gpus_of(plans[0]) for plan in plans)
