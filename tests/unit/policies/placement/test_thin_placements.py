from __future__ import annotations

import random
from itertools import permutations
from typing import Any

import pytest

from fabric.errors import ConfigError
from fabric.ids import ModelId, NodeId
from policies.placement.common.base import GpuSlot, PlacedModelInput, Profiles, largest_batch
from policies.placement.registry import placement_policy
from profiles.model import LinearProfile, ModelProfile, TableProfile

GIB = 2**30


def gpu(index: int = 0, gpu_type: str = "v100", memory_gb: float = 16, device: str = "emulated") -> GpuSlot:
    return GpuSlot(index, gpu_type, int(memory_gb * GIB), NodeId("a"), index, device)


def gpus(count: int) -> list[GpuSlot]:
    return [gpu(i) for i in range(count)]


def model(
    name: str, slo_ms: float = 25, rate_rps: float | None = 100, memory_gb: float | None = None, **rest: Any
) -> PlacedModelInput:
    memory_bytes = None if memory_gb is None else int(memory_gb * GIB)
    return PlacedModelInput(ModelId(name), slo_ms, rate_rps, memory_bytes, **rest)


def profiles(*names: str, gpu_type: str = "v100", profile: ModelProfile | None = None) -> Profiles:
    return {(ModelId(name), gpu_type): profile or LinearProfile(1.053, 5.072, 64) for name in names}


# ---------------------------------------------------------------- symphony


def test_symphony_hosts_every_model_on_every_gpu() -> None:
    placed = placement_policy("symphony").place([model("a"), model("b")], gpus(3), profiles("a", "b"))
    assert [(s.gpu, s.share_percent, [m.model_id for m in s.models]) for s in placed.slices] == [
        (i, None, ["a", "b"]) for i in range(3)
    ]
    assert placed.unplaced == ()
    assert placed.gpus_used == (0, 1, 2)


def test_symphony_says_where_each_model_is_and_why_not_elsewhere() -> None:
    slots = [gpu(0), gpu(1), gpu(2, gpu_type="k80")]
    every = {**profiles("a", "b"), **profiles("a", gpu_type="k80")}
    both, some = placement_policy("symphony").place([model("a"), model("b")], slots, every).decisions
    assert (both.subject, both.metrics, both.rejected) == ("a", {"gpus": 3.0}, ())
    assert "on all 3 GPUs" in both.chosen
    assert "on 2 of 3 GPUs" in some.chosen
    assert some.rejected[0].option == "every GPU"
    assert some.rejected[0].reason.startswith(
        "b can use none of the others: it has no profile for GPU type k80"
    )


def test_symphony_expects_the_staggered_bound_of_table_2() -> None:
    policy = placement_policy("symphony")
    full = policy.place([model("a", rate_rps=1e5)], gpus(8), profiles("a"))
    assert full.expected_goodput_rps == pytest.approx(5839, abs=1)
    assert full.short_rps == {"a": pytest.approx(1e5 - 5839, abs=1)}
    light = policy.place([model("a", rate_rps=1000)], gpus(8), profiles("a"))
    assert light.expected_goodput_rps == 1000
    assert light.short_rps == {}
    unknown = policy.place([model("a", rate_rps=None)], gpus(8), profiles("a"))
    assert unknown.expected_goodput_rps is None


def test_symphony_leaves_out_what_does_not_fit_in_memory_and_says_so() -> None:
    models = [model("a", memory_gb=10), model("b", memory_gb=10), model("c", memory_gb=6)]
    placed = placement_policy("symphony").place(models, gpus(1), profiles("a", "b", "c"))
    assert [m.model_id for m in placed.slices[0].models] == ["a", "c"]
    assert [(u.model_id, u.rate_rps) for u in placed.unplaced] == [("b", 100)]
    assert "20.00 GB" in placed.unplaced[0].reason


def test_models_of_one_slice_share_the_room_for_a_running_batch() -> None:
    heavy = TableProfile({100: {1: 1.0, 8: 2.0}}, memory_by_batch={1: GIB, 8: 9 * GIB})
    models = [model(name) for name in "abcd"]
    placed = placement_policy("symphony").place(models, [gpu(memory_gb=12)], profiles(*"abcd", profile=heavy))
    assert placed.unplaced == ()  # 4 idle ones of 1 GB, and 8 GB on top for whichever runs


def test_an_slo_below_one_request_is_unplaced_with_the_reason() -> None:
    placed = placement_policy("symphony").place([model("a", slo_ms=5)], gpus(1), profiles("a"))
    assert placed.slices == ()
    assert "SLO of 5 ms is below the 6.125 ms" in placed.unplaced[0].reason


def test_real_models_go_to_real_devices_and_profiled_ones_to_emulated_ones() -> None:
    slots = [gpu(0, device="cpu"), gpu(1, device="emulated")]
    models = [model("digits", has_loader=True, needs_real_gpu=True), model("resnet50")]
    placed = placement_policy("symphony").place(models, slots, profiles("digits", "resnet50"))
    assert [(s.gpu, [m.model_id for m in s.models]) for s in placed.slices] == [
        (0, ["digits"]),
        (1, ["resnet50"]),
    ]


def test_a_model_with_loader_and_profile_can_be_rehearsed_on_emulated_devices() -> None:
    placed = placement_policy("symphony").place([model("a", has_loader=True)], gpus(1), profiles("a"))
    assert placed.unplaced == ()


# ---------------------------------------------------------------- exclusive


def test_exclusive_gives_every_model_its_own_gpus_by_need() -> None:
    models = [model("a", rate_rps=1000), model("b", rate_rps=100)]
    placed = placement_policy("exclusive").place(models, gpus(4), profiles("a", "b"))
    assert [(s.gpu, s.models[0].model_id, s.models[0].batch) for s in placed.slices] == [
        (0, "a", 7),
        (1, "b", 7),
        (2, "a", 7),
    ]  # one replica carries 562 requests per second; the fourth GPU is not needed
    assert placed.slices[0].models[0].rate_rps == pytest.approx(500)
    assert placed.slices[0].models[0].predicted_ms == pytest.approx(1.053 * 7 + 5.072)
    assert placed.expected_goodput_rps == pytest.approx(1100)


def test_exclusive_reports_the_part_of_a_rate_that_found_no_gpu() -> None:
    placed = placement_policy("exclusive").place([model("a", rate_rps=1000)], gpus(1), profiles("a"))
    capacity = 1000 * 7 / (1.053 * 7 + 5.072)
    assert placed.unplaced[0].rate_rps == pytest.approx(1000 - capacity)
    assert placed.expected_goodput_rps == pytest.approx(capacity)


def test_exclusive_with_too_few_gpus_fills_in_file_order() -> None:
    placed = placement_policy("exclusive").place([model("a"), model("b")], gpus(1), profiles("a", "b"))
    assert [u.model_id for u in placed.unplaced] == ["b"]
    assert "taken" in placed.unplaced[0].reason


@pytest.mark.parametrize("seed", range(60))
def test_exclusive_gives_as_many_models_a_gpu_as_can_have_one(seed: int) -> None:
    """Whatever the order of the models: those that can have a GPU at all, tried in every way."""
    draw = random.Random(seed)
    types = draw.choices(["v100", "t4", "a100"], k=draw.randint(1, 4))
    slots = [gpu(place, of, draw.choice([8, 16])) for place, of in enumerate(types)]
    asked = [model(name, memory_gb=draw.choice([2, 12])) for name in "abcde"[: draw.randint(1, 5)]]
    known: Profiles = {
        (one.model_id, of): LinearProfile(1.053, 5.072, 64)
        for one in asked
        for of in draw.sample(["v100", "t4", "a100"], 2)
    }
    placed = placement_policy("exclusive").place(asked, slots, known)
    able = [
        {
            one.index
            for one in slots
            if (each.model_id, one.gpu_type) in known and (each.memory_bytes or 0) <= one.memory_bytes
        }
        for each in asked
    ]
    most = max(
        sum(place in able[number] for number, place in enumerate(order) if place is not None)
        for order in permutations([*range(len(slots)), *[None] * len(asked)], len(asked))
    )
    assert len({entry.model_id for one in placed.slices for entry in one.models}) == most


def test_exclusive_with_zero_or_unknown_rates_gives_one_gpu_each() -> None:
    models = [model("a", rate_rps=0), model("b", rate_rps=None)]
    placed = placement_policy("exclusive").place(models, gpus(4), profiles("a", "b"))
    assert len(placed.slices) == 2
    assert placed.unplaced == ()


# ---------------------------------------------------------------- given


def given_policy(*slices: dict[str, Any]) -> dict[str, Any]:
    return {"slices": list(slices)}


def test_given_slices_are_placed_as_written() -> None:
    options = given_policy({"gpu": 1, "share_percent": 40, "models": [{"model": "a", "batch": 8}]})
    placed = placement_policy("given", options).place([model("a"), model("b")], gpus(2), profiles("a", "b"))
    (planned,) = placed.slices
    assert (planned.gpu, planned.share_percent, planned.models[0].batch) == (1, 40, 8)
    assert planned.models[0].predicted_ms == pytest.approx(1.053 * 8 + 5.072)
    assert [(u.model_id, u.reason) for u in placed.unplaced] == [("b", "no given slice hosts it")]


def test_given_shares_over_100_percent_are_a_violation_not_an_error() -> None:
    slices = [{"gpu": 0, "share_percent": 60, "models": [{"model": name}]} for name in "ab"]
    placed = placement_policy("given", given_policy(*slices)).place(
        [model("a"), model("b")], gpus(1), profiles("a", "b")
    )
    assert placed.violations == ("GPU 0: the shares sum to 120 %, over 100 %",)
    assert len(placed.slices) == 2


def test_given_slices_of_one_gpu_share_its_memory() -> None:
    slices = [{"gpu": 0, "models": [{"model": name}]} for name in "ab"]
    placed = placement_policy("given", given_policy(*slices)).place(
        [model("a", memory_gb=10), model("b", memory_gb=10)], gpus(1), profiles("a", "b")
    )
    assert [u.model_id for u in placed.unplaced] == ["b"]


def test_a_share_outside_the_profile_is_unplaced_with_the_profiles_reason() -> None:
    measured = TableProfile({20: {1: 2.0}, 50: {1: 1.0}})
    options = given_policy({"gpu": 0, "share_percent": 10, "models": [{"model": "a"}]})
    placed = placement_policy("given", options).place([model("a")], gpus(1), profiles("a", profile=measured))
    assert "share 10 % is under the smallest" in placed.unplaced[0].reason


@pytest.mark.parametrize(
    ("slices", "reason"),
    [
        (None, "must list the slices"),
        ([], "must list the slices"),
        ([3], "must be a mapping"),
        ([{"gpu": 0}], "slices\\[0\\].models is missing"),
        ([{"models": [{"model": "a"}]}], "slices\\[0\\].gpu is missing"),
        ([{"gpu": 0, "models": []}], "at least one model"),
        ([{"gpu": -1, "models": [{"model": "a"}]}], "whole number"),
        ([{"gpu": 0, "share": 5, "models": [{"model": "a"}]}], "did you mean share_percent"),
        ([{"gpu": 0, "share_percent": 0, "models": [{"model": "a"}]}], "over 0"),
        ([{"gpu": 0, "share_percent": 101, "models": [{"model": "a"}]}], "at most 100"),
        ([{"gpu": 0, "models": [{"model": "a", "bacth": 3}]}], "did you mean batch"),
        ([{"gpu": 0, "models": [{"model": "a"}, {"model": "a"}]}], "twice"),
    ],
)
def test_malformed_given_slices_say_what_is_wrong(slices: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        placement_policy("given", {"slices": slices}).place([model("a")], gpus(1), profiles("a"))


def test_given_slices_host_what_is_asked_for_on_the_gpus_there_are() -> None:
    hosted = [{"model": "a"}, {"model": "b"}]
    given = placement_policy("given", {"slices": [{"gpu": gpu, "models": hosted} for gpu in (0, 1)]})
    plan = given.place([model("b")], gpus(1), profiles("b"))
    assert [(one.gpu, [entry.model_id for entry in one.models]) for one in plan.slices] == [(0, ["b"])]
    only_second = placement_policy("given", {"slices": [{"gpu": 1, "models": hosted}]})
    plan = only_second.place([model("b")], gpus(1), profiles("b"))
    assert plan.slices == ()
    assert [(one.model_id, one.reason) for one in plan.unplaced] == [("b", "GPU 1 is not in use")]


# ---------------------------------------------------------------- names


def test_an_unknown_policy_or_option_suggests_the_closest() -> None:
    with pytest.raises(ConfigError, match="did you mean symphony"):
        placement_policy("symfony")
    with pytest.raises(ConfigError, match="did you mean subclusters"):
        placement_policy("symphony", {"subcluster": 1})
    with pytest.raises(ConfigError, match="at least 1"):
        placement_policy("symphony", {"subclusters": 0})


def test_the_largest_batch_within_a_limit_counts_the_limit_itself() -> None:
    assert [largest_batch((5, 7, 7, 9), limit) for limit in (4, 5, 6, 7, 9, 99)] == [0, 1, 1, 3, 4, 4]
