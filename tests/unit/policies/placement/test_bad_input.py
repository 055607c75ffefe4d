"""Bad input, answered in one way by every policy: who is concerned, and what is missing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from fabric.errors import ConfigError
from fabric.ids import ModelId, NodeId
from policies.placement.common.base import GpuSlot, PlacedModelInput, Placement, Profiles
from policies.placement.registry import PLACEMENTS, placement_policy
from profiles.model import LinearProfile
from profiles.store import shipped_profile

GIB = 2**30
GOOD, BAD = ModelId("good"), ModelId("bad")
KNOWN = shipped_profile("thesis-v100-estimate/resnet50")  # everything that a policy may ask of a profile
PLAIN = LinearProfile(1, 5)  # run times, and nothing else
IGNITER_FAMILY = {"igniter", "ffd", "gslice", "gpulets"}
METRIC = {
    "usher": "achieved_occupancy_percent",
    "wao-usher": "weighted_occupancy_percent",
    "wsm-usher": "weighted_sm_percent",
    "ao-milp": "achieved_occupancy_percent",
    "wsm-milp": "weighted_sm_percent",
}
USHERS = {"usher", "wao-usher", "wsm-usher"}
WITHOUT_RATES = {"symphony", "exclusive", "given"}

policies = pytest.mark.parametrize("name", sorted(PLACEMENTS))


def model(model_id: ModelId, slo_ms: float = 200, rate_rps: float | None = 100) -> PlacedModelInput:
    return PlacedModelInput(model_id, slo_ms, rate_rps)


def gpu(index: int, gpu_type: str = "v100", price: float | None = None) -> GpuSlot:
    return GpuSlot(index, gpu_type, 16 * GIB, NodeId("node0"), index, price_per_hour=price)


def placed(
    name: str,
    models: Sequence[PlacedModelInput],
    gpus: Sequence[GpuSlot],
    profiles: Profiles,
) -> Placement:
    written = [
        {"gpu": i, "models": [{"model": m.model_id} for m in models]} for i in range(max(1, len(gpus)))
    ]
    options = {"slices": written} if name == "given" else {}
    return placement_policy(name, options).place(models, gpus, profiles)


def beside_a_good_one(name: str, bad: PlacedModelInput, profiles: Profiles) -> str | None:
    """Why the bad model is unplaced, None where it is placed; the good one is placed in full in any case."""
    for models in ([model(GOOD), bad], [bad, model(GOOD)]):
        found = placed(name, models, [gpu(0), gpu(1), gpu(2)], {(GOOD, "v100"): KNOWN, **profiles})
        hosted = {entry.model_id for planned in found.slices for entry in planned.models}
        unplaced = {one.model_id: one for one in found.unplaced}
        assert GOOD in hosted
        assert GOOD not in unplaced
        assert (BAD in hosted) is (BAD not in unplaced)
    if BAD not in unplaced:
        return None
    assert unplaced[BAD].rate_rps == bad.rate_rps
    return unplaced[BAD].reason


# ---------------------------------------------------------------- what concerns one model


@policies
def test_a_model_without_a_profile_is_unplaced(name: str) -> None:
    assert beside_a_good_one(name, model(BAD), {}) == "it has no profile for GPU type v100"


@policies
def test_an_slo_that_no_batch_meets_is_named(name: str) -> None:
    reason = beside_a_good_one(name, model(BAD, slo_ms=3), {(BAD, "v100"): KNOWN})
    assert reason is not None
    assert (
        "its SLO of 3 ms is below the 6.7" in reason
    )  # resnet50 4 takes 6.78 ms, and so does a single request


@policies
@pytest.mark.parametrize(
    ("rate_rps", "words"),
    [
        (None, "it has no rate_rps, and this policy plans for rates"),
        (0.0, "its rate_rps is 0: there is nothing"),
    ],
    ids=["unknown", "zero"],
)
def test_without_a_rate_only_policies_that_plan_for_rates_leave_a_model_out(
    name: str, rate_rps: float | None, words: str
) -> None:
    reason = beside_a_good_one(name, model(BAD, rate_rps=rate_rps), {(BAD, "v100"): KNOWN})
    if name in WITHOUT_RATES or (
        name == "tenuto" and rate_rps is None
    ):  # where a rate is unknown, it shares all
        assert reason is None
    else:
        assert reason is not None
        assert words in reason


@policies
def test_a_profile_that_lacks_what_the_policy_needs_is_named(name: str) -> None:
    reason = beside_a_good_one(name, model(BAD), {(BAD, "v100"): PLAIN})
    if name in IGNITER_FAMILY:
        assert reason is not None
        assert "its profile for GPU type v100 has no iGniter coefficients" in reason
    elif name in METRIC:
        assert reason is not None
        assert f"its profile for GPU type v100 has no {METRIC[name]}" in reason
    else:
        assert reason is None


@policies
def test_a_model_that_no_type_of_gpu_knows_names_them_all(name: str) -> None:
    slots = [gpu(0), gpu(1, "t4"), gpu(2, "a100")]
    found = placed(name, [model(GOOD), model(BAD)], slots, {(GOOD, "v100"): KNOWN})
    assert {planned.gpu for planned in found.slices} == {0}
    (left,) = found.unplaced
    assert left.model_id == BAD
    for gpu_type in ("v100", "t4", "a100"):
        assert f"it has no profile for GPU type {gpu_type}" in left.reason


@policies
def test_a_model_with_a_profile_for_one_type_only_is_placed_there_without_prices(name: str) -> None:
    slots = [gpu(0, "t4"), gpu(1)]
    found = placed(name, [model(GOOD)], slots, {(GOOD, "v100"): KNOWN})
    assert {planned.gpu for planned in found.slices} == {1}
    assert found.unplaced == ()


@policies
def test_nothing_that_can_be_placed_is_a_plan_too(name: str) -> None:
    found = placed(name, [model(BAD)], [gpu(0)], {})
    assert found.slices == ()
    assert [one.reason for one in found.unplaced] == ["it has no profile for GPU type v100"]
    assert placed(name, [replace(model(BAD), slo_ms=1e-6)], [gpu(0)], {(BAD, "v100"): KNOWN}).slices == ()


# ---------------------------------------------------------------- what concerns the request as a whole


@policies
def test_without_a_gpu_there_is_nothing_to_plan(name: str) -> None:
    with pytest.raises(ConfigError, match="there is no GPU to place on"):
        placed(name, [model(GOOD)], [], {(GOOD, "v100"): KNOWN})


@policies
def test_a_missing_price_is_an_error_only_where_prices_are_compared(name: str) -> None:
    slots = [gpu(0, "v100", price=3.06), gpu(1, "t4")]
    known = {(GOOD, "v100"): KNOWN, (GOOD, "t4"): KNOWN}
    if name in IGNITER_FAMILY | USHERS:
        with pytest.raises(ConfigError, match="GPU type t4 has no price_per_hour"):
            placed(name, [model(GOOD)], slots, known)
    else:
        assert placed(name, [model(GOOD)], slots, known).unplaced == ()
