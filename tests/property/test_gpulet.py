"""Every gpulet plan holds by the definitions: SLOs, duty cycles, memory, cuts, rates (tests/gpulet_checker.py)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fabric.ids import ModelId, NodeId
from policies.placement.common.base import GpuSlot, PlacedModelInput, Placement
from policies.placement.registry import placement_policy
from profiles.store import shipped_profile
from tests.gpulet_checker import DATA, Asked, problems

MODELS = DATA["schedulability_grid"]["model_order"]
MEMORY_BYTES = 11_000 * 2**20


def gpus(count: int, memory_bytes: int = MEMORY_BYTES) -> list[GpuSlot]:
    return [GpuSlot(i, "2080ti", memory_bytes, NodeId("a"), i) for i in range(count)]


def placed_and_checked(
    asked: Sequence[Asked],
    slots: Sequence[GpuSlot],
    search: str,
    *,
    interference: bool,
    current: Placement | None = None,
) -> Placement:
    by_id = {f"{one.model}-{place}": one for place, one in enumerate(asked)}
    inputs = [PlacedModelInput(ModelId(name), one.slo_ms, one.rate_rps) for name, one in by_id.items()]
    profiles = {
        (ModelId(name), "2080ti"): shipped_profile(f"gpulet-2080ti/{one.model}")
        for name, one in by_id.items()
    }
    policy = placement_policy("gpulet", {"search": search, "interference": interference})
    placed = policy.place(inputs, slots, profiles, current)
    models_max = len(asked) if search == "whole" else 3
    assert problems(placed, by_id, slots, has_interference=interference, models_max=models_max) == [], placed
    if not interference:
        assert placed.violations == ()
    assert placed == policy.place(inputs, slots, profiles, current)
    return placed


@st.composite
def workloads(draw: st.DrawFn) -> list[Asked]:
    models = draw(st.lists(st.sampled_from(MODELS), min_size=1, max_size=9))
    return [
        Asked(
            model,
            DATA["models"][model]["slo_ms"] * draw(st.sampled_from([0.5, 0.8, 1.0, 1.5, 3.0])),
            draw(
                st.one_of(
                    st.floats(1e-9, 20), st.floats(20, 600), st.sampled_from([50.0, 100.0, 200.0, 1500.0])
                )
            ),
        )
        for model in models
    ]


@settings(deadline=None, max_examples=150)
@given(workloads(), st.integers(1, 5), st.booleans(), st.sampled_from(["elastic", "whole"]))
def test_any_plan_holds_by_the_definitions(
    asked: list[Asked], count: int, interference: bool, search: str
) -> None:
    placed_and_checked(asked, gpus(count), search, interference=interference)


@settings(deadline=None, max_examples=15)
@given(workloads(), st.integers(1, 2), st.booleans())
def test_any_exhaustive_plan_holds_and_serves_where_elastic_does(
    asked: list[Asked], count: int, interference: bool
) -> None:
    ideal = placed_and_checked(asked, gpus(count), "exhaustive", interference=interference)
    elastic = placed_and_checked(asked, gpus(count), "elastic", interference=interference)
    assert len(ideal.unplaced) == 0 or len(elastic.unplaced) > 0


@settings(deadline=None, max_examples=30)
@given(workloads(), st.integers(1, 4), st.integers(2_000, 8_000), st.booleans())
def test_small_memories_are_respected(
    asked: list[Asked], count: int, memory_mb: int, interference: bool
) -> None:
    placed_and_checked(asked, gpus(count, memory_mb * 2**20), "elastic", interference=interference)


def grid_case(number: int) -> list[Asked]:
    """Case n of the paper's grid: the n-th non-zero rate vector, the first model slowest."""
    rates = []
    for _ in MODELS:
        number, digit = divmod(number, 3)
        rates.append(DATA["schedulability_grid"]["rates_rps"][digit])
    return [
        Asked(model, DATA["models"][model]["slo_ms"], rate)
        for model, rate in zip(MODELS, reversed(rates), strict=True)
        if rate
    ]


@pytest.mark.parametrize("interference", [False, True])
def test_points_of_the_papers_grid_hold(interference: bool) -> None:
    for number in random.Random(7).sample(range(1, 19_683), 60):
        placed_and_checked(grid_case(number), gpus(4), "elastic", interference=interference)


def test_on_the_grid_exhaustive_serves_most_and_whole_gpus_least() -> None:
    served = {"exhaustive": 0, "elastic": 0, "whole": 0}
    for number in random.Random(3).sample(range(1, 19_683), 15):
        for search in served:
            placed = placed_and_checked(grid_case(number), gpus(3), search, interference=False)
            served[search] += not placed.unplaced
    assert served["exhaustive"] >= served["elastic"] > 2 * served["whole"]


def test_the_checker_sees_what_is_wrong() -> None:
    asked = {"vgg16": Asked("vgg16", 142.0, 200.0), "bert": Asked("bert", 22.0, 200.0)}
    inputs = [PlacedModelInput(ModelId(name), one.slo_ms, one.rate_rps) for name, one in asked.items()]
    profiles = {(ModelId(name), "2080ti"): shipped_profile(f"gpulet-2080ti/{name}") for name in asked}
    placed = placement_policy("gpulet").place(inputs, gpus(2), profiles)

    def wrong(plan: Placement, slots: Sequence[GpuSlot] = (), **changed: Asked) -> str:
        return " ".join(problems(plan, asked | changed, slots or gpus(2), has_interference=True))

    assert wrong(placed) == ""
    assert "SLO is 60" in wrong(placed, vgg16=Asked("vgg16", 60.0, 200.0))
    assert "unplaced of 300" in wrong(placed, vgg16=Asked("vgg16", 142.0, 300.0))
    assert "predicts" in wrong(placed, bert=Asked("mobilenet_v2", 22.0, 200.0))
    assert "MB" in wrong(placed, gpus(2, 2**31))
    assert "do not exist" in wrong(placed, [GpuSlot(9, "2080ti", MEMORY_BYTES, NodeId("a"), 0)])
    first = placed.slices[0]
    larger = replace(first.models[0], batch=32)
    grown = replace(placed, slices=(replace(first, models=(larger,)), *placed.slices[1:]))
    assert "a round of" in wrong(grown)
    assert "is cut into" in wrong(
        replace(placed, slices=(replace(first, share_percent=60.0), *placed.slices[1:]))
    )
