from __future__ import annotations

import pytest

from fabric.errors import ConfigError
from fabric.ids import ModelId, NodeId
from policies.placement.common.base import GpuSlot, PlacedModelInput, Placement, Profiles
from policies.placement.registry import placement_policy
from profiles.model import LinearProfile, ModelProfile, TableProfile
from profiles.store import shipped_profile

GIB = 2**30
SLOS = {"lenet1": 5, "googlenet": 66, "resnet50": 108, "vgg16": 142, "bert": 22, "densenet161": 202}


def gpus(
    count: int, gpu_type: str = "2080ti", memory_gb: float = 11, device: str = "emulated"
) -> list[GpuSlot]:
    return [GpuSlot(i, gpu_type, int(memory_gb * GIB), NodeId("a"), i, device) for i in range(count)]


def models(**rates_rps: float | None) -> list[PlacedModelInput]:
    return [PlacedModelInput(ModelId(name), SLOS.get(name, 100), rate) for name, rate in rates_rps.items()]


def profiles(*names: str, gpu_type: str = "2080ti", profile: ModelProfile | None = None) -> Profiles:
    return {(ModelId(name), gpu_type): profile or shipped_profile(f"gpulet-2080ti/{name}") for name in names}


def place(
    asked: list[PlacedModelInput], count: int, current: Placement | None = None, **options: object
) -> Placement:
    return placement_policy("gpulet", options).place(
        asked, gpus(count), profiles(*(model.model_id for model in asked)), current
    )


def test_as_few_gpus_as_possible_are_used() -> None:
    light = place(models(resnet50=50, googlenet=50), 4)
    assert light.gpus_used == (0,)
    heavy = place(models(resnet50=600, googlenet=50), 4)
    assert len(heavy.gpus_used) > 1
    assert heavy.unplaced == ()


def test_the_scaling_starts_from_the_gpus_in_use() -> None:
    asked = models(resnet50=50, googlenet=50)
    running = place(models(resnet50=600, googlenet=200), 4)
    assert len(running.gpus_used) == 3
    assert place(asked, 4, running).gpus_used == (
        1,
        2,
    )  # uncut GPUs are preferred, so it spreads over all three


def test_a_plan_says_why() -> None:
    placed = place(models(resnet50=50, googlenet=50), 4)
    by_subject = {decision.subject: decision for decision in placed.decisions}
    assert by_subject["resnet50"].metrics["inflated_rps"] == 68
    assert by_subject["resnet50"].metrics["p_eff_percent"] == 80
    assert {one.option for one in by_subject["resnet50"].rejected} == {
        f"p_eff {size} %" for size in (20, 40, 50, 60, 100)
    }
    assert by_subject["GPUs"].chosen == "1 of 4 GPUs"


def test_what_does_not_fit_is_unplaced_and_the_rest_is_kept() -> None:
    placed = place(models(resnet50=5000, bert=100), 1)
    assert [one.model_id for one in placed.unplaced] == ["resnet50"]
    served = sum(m.rate_rps or 0 for s in placed.slices for m in s.models if m.model_id == "resnet50")
    assert (placed.unplaced[0].rate_rps or 0) + served == pytest.approx(5000)
    assert "1 GPUs have gpulets for" in placed.unplaced[0].reason
    assert placed.expected_goodput_rps == pytest.approx(served + 100)


def test_an_slo_that_two_single_requests_break_is_unplaced() -> None:
    placed = placement_policy("gpulet").place(
        [PlacedModelInput(ModelId("vgg16"), 15, 10)], gpus(1), profiles("vgg16")
    )
    # 1.1 * (7.0621 + 1.9 * 0.242238) = 8.27459 on the whole GPU
    assert "below twice the 8.27459 ms" in placed.unplaced[0].reason


def test_only_gpus_with_a_profile_are_used_in_a_mixed_cluster() -> None:
    slots = [*gpus(1, "t4"), GpuSlot(1, "2080ti", 11 * GIB, NodeId("a"), 1)]
    placed = placement_policy("gpulet").place(models(bert=100), slots, profiles("bert"))
    assert placed.gpus_used == (1,)
    assert placed.unplaced == ()


def test_a_model_that_is_too_large_says_what_it_needs() -> None:
    placed = placement_policy("gpulet").place(
        [PlacedModelInput(ModelId("bert"), 22, 10, memory_bytes=9 * GIB)], gpus(1), profiles("bert")
    )
    assert "10.20 GB, 9.90 GB of a GPU are usable" in placed.unplaced[0].reason


def test_a_profile_of_whole_gpus_only_goes_on_whole_gpus() -> None:
    asked = models(a=50, b=50)
    known = profiles("a", "b", profile=LinearProfile(1.0, 5.0))
    placed = placement_policy("gpulet").place(asked, gpus(2), known)
    assert {planned.share_percent for planned in placed.slices} == {None}
    assert placed.unplaced == ()


@pytest.mark.parametrize(
    ("family", "gpu_type"), [("gpulet-v100", "v100"), ("igniter-v100", "v100"), ("thesis-v100", "v100")]
)
def test_profiles_of_other_papers_can_be_planned_with(family: str, gpu_type: str) -> None:
    name = "resnet50"
    known: Profiles = {(ModelId(name), gpu_type): shipped_profile(f"{family}/{name}")}
    asked = [PlacedModelInput(ModelId(name), 200, 100)]
    placed = placement_policy("gpulet").place(asked, gpus(2, gpu_type, 16), known)
    assert placed.unplaced == ()
    is_cut = any(planned.share_percent is not None for planned in placed.slices)
    assert is_cut == (family != "thesis-v100")  # the thesis measured whole GPUs only


def test_low_rates_share_a_round_that_is_shorter_than_their_gaps() -> None:
    # a request of each every 1/3 s at most; the SLO leaves 100 ms for the round of 3 * 1.1 * 5 ms and the wait
    asked = models(a=1, b=1, c=1)
    flat = TableProfile({100: {1: 5.0, 32: 10.0}})
    placed = placement_policy("gpulet", {"search": "whole"}).place(
        asked, gpus(1), profiles(*"abc", profile=flat)
    )
    (planned,) = placed.slices
    assert [model.batch for model in planned.models] == [1, 1, 1]
    assert [model.duty_ms for model in planned.models] == pytest.approx([83.5] * 3)


def test_models_share_the_time_of_one_gpulet() -> None:
    asked = models(a=20, b=20, c=20)
    flat = TableProfile({100: {1: 5.0, 32: 10.0}})
    placed = placement_policy("gpulet", {"search": "whole"}).place(
        asked, gpus(1), profiles(*"abc", profile=flat)
    )
    (planned,) = placed.slices
    assert len(planned.models) == 3
    duty_ms = {model.duty_ms for model in planned.models}
    assert len(duty_ms) == 1
    round_ms = sum(model.predicted_ms or 0 for model in planned.models)
    assert (duty_ms.pop() or 0) + round_ms <= 100


def test_interference_is_planned_for_unless_told_not_to() -> None:
    asked = models(vgg16=200, densenet161=200)
    with_it = place(asked, 4)
    without = place(asked, 4, interference=False)

    def total_ms(placed: Placement) -> float:
        return sum(model.predicted_ms or 0 for planned in placed.slices for model in planned.models)

    assert total_ms(with_it) != total_ms(without)
    assert without.violations == ()


def test_residues_over_their_slo_are_listed_as_violations() -> None:
    rates = [(a, b) for a in range(50, 250, 10) for b in range(50, 250, 10)]
    plans = [place(models(googlenet=a, densenet161=b), 2) for a, b in rates]
    over = [
        model.model_id
        for placed in plans
        for planned in placed.slices
        for model in planned.models
        if (model.duty_ms or 0) + sum(m.predicted_ms or 0 for m in planned.models)
        > SLOS[model.model_id] * (1 + 1e-9)
    ]
    assert sum(len(placed.violations) for placed in plans) == len(over)


def test_exhaustive_search_refuses_what_it_cannot_look_at() -> None:
    asked = models(resnet50=1e6)
    with pytest.raises(ConfigError, match="ways; exhaustive search looks at 1000"):
        place(asked, 60, search="exhaustive")


def test_the_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="it must be true or false"):
        placement_policy("gpulet", {"interference": "yes"})
    with pytest.raises(ConfigError, match="elastic, exhaustive, whole"):
        placement_policy("gpulet", {"search": "all"})
