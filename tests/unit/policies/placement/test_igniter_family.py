from __future__ import annotations

import pytest
from msgspec.structs import replace

from fabric.ids import ModelId
from policies.placement.common.base import PlacedModelInput, Profiles
from policies.placement.registry import placement_policy
from profiles.igniter.performance_model import IgniterProfile, Resident
from profiles.store import shipped_profile
from tests.igniter_workloads import GIB, by_gpu, gpus, inputs, profiles, table_3

FAMILY = ("igniter", "ffd", "gslice", "gpulets")


def model(
    name: str = "a", slo_ms: float = 40, rate_rps: float | None = 100, memory_bytes: int | None = None
) -> PlacedModelInput:
    return PlacedModelInput(ModelId(name), slo_ms, rate_rps, memory_bytes)


def of(kind: str, *names: str, gpu_type: str = "v100") -> Profiles:
    return {(ModelId(name), gpu_type): shipped_profile(f"igniter-{gpu_type}/{kind}") for name in names}


@pytest.mark.parametrize("name", FAMILY)
def test_an_slo_that_no_batch_meets_is_refused_with_the_times(name: str) -> None:
    """VGG-19 alone at 100 %, batch 1: 0.9262 + 0.0392 + 0.0606 + 202.64 / 100.19 = 3.05 ms; half of 5 is 2.5."""
    placed = placement_policy(name).place([model(slo_ms=5)], gpus(1), of("vgg19", "a"))
    assert placed.slices == ()
    assert "half its SLO, 2.5 ms" in placed.unplaced[0].reason


def test_more_than_a_whole_gpu_takes_dedicated_ones_and_a_remainder() -> None:
    """VGG-19 in S 10 at 100 %: active (158.193 b + 44.45 - 0.0048 b²) / 100.19 + 0.9262 is 9.26 ms for b 5, for
    540 requests per second and 345 W, so f is 1483 of 1530 MHz: 0.303 + 9.30 * 1.032 = 9.90 ms; b 6 takes over
    10.8. Throughput 5 / (9.90 - 0.301) = 521, of which nine tenths are carried: 469 twice, and 62 are left:
    b = ceil(0.62 / 1.004) = 1, 202.64 / 8.974 - 0.19 = 22.39 -> 22.5 %."""
    placed = placement_policy("igniter").place([model(slo_ms=20, rate_rps=1000)], gpus(5), of("vgg19", "a"))
    assert not placed.unplaced
    assert not placed.violations
    assert [(s.gpu, s.share_percent, s.models[0].batch, s.models[0].rate_rps) for s in placed.slices] == [
        (0, 100, 5, 469),
        (1, 100, 5, 469),
        (2, 22.5, 1, 62),
    ]


def test_an_endless_rate_takes_what_there_is_and_names_the_rest() -> None:
    placed = placement_policy("igniter").place([model(rate_rps=1e9)], gpus(3), of("vgg19", "a"))
    assert placed.gpus_used == (0, 1, 2)
    carried = sum(planned.models[0].rate_rps or 0 for planned in placed.slices)
    assert placed.unplaced[0].rate_rps == pytest.approx(1e9 - carried)
    assert "all 3 GPUs" in placed.unplaced[0].reason


def test_a_batch_over_the_largest_profiled_one_is_that_one_with_a_tighter_objective() -> None:
    """AlexNet, SLO 200, 1000 requests per second: theorem 1 asks for ceil(100 / 1.06) = 95, profiled are 32.

    32 requests every 32 ms: the batch has to run within 32 ms and its loading time."""
    placed = placement_policy("igniter").place(
        [model(slo_ms=200, rate_rps=1000)], gpus(1), of("alexnet", "a")
    )
    entry = placed.slices[0].models[0]
    assert entry.batch == 32
    assert entry.predicted_ms is not None
    assert entry.predicted_ms <= 32 + 32 * 602112 / 1e7
    assert placed.violations == ()


def test_with_fewer_gpus_the_plan_is_filled_in_its_order() -> None:
    """Thesis section 5.1.5: of table 3's six GPUs the first four, W12 to W9; the rest is unplaced."""
    workloads = table_3()
    placed = placement_policy("igniter").place(inputs(workloads), gpus(4), profiles(workloads, "v100"))
    assert [set(gpu) for gpu in by_gpu(placed)] == [{"W12"}, {"W8", "W6"}, {"W7", "W4"}, {"W10", "W9"}]
    assert {u.model_id: u.rate_rps for u in placed.unplaced} == {
        "W1": 1200,
        "W2": 400,
        "W3": 800,
        "W5": 600,
        "W11": 50,
    }
    assert {u.reason for u in placed.unplaced} == {"the plan takes 6 GPUs of type v100, there are 4"}
    assert placed.expected_goodput_rps == pytest.approx(300 + 400 + 200 + 300 + 400 + 150 + 200)


def test_equal_workloads_keep_the_order_of_the_file() -> None:
    names = ("c", "a", "b")
    placed = placement_policy("igniter").place(
        [model(name, slo_ms=20, rate_rps=300) for name in names], gpus(3), of("vgg19", *names)
    )
    assert [planned.models[0].model_id for planned in placed.slices] == list(names)


def test_memory_is_a_limit_too() -> None:
    models = [model(name, memory_bytes=10 * GIB) for name in "ab"]
    placed = placement_policy("igniter").place(models, gpus(2), of("alexnet", *"ab"))
    assert placed.gpus_used == (0, 1)
    large = placement_policy("igniter").place([model(memory_bytes=20 * GIB)], gpus(2), of("alexnet", "a"))
    assert "memory" in large.unplaced[0].reason


def test_a_new_gpu_is_checked_unless_the_paper_is_wanted() -> None:
    """VGG-19 at a large share draws over 300 W: r_lower, which knows no power limit, is then too little.

    S 10, 480 requests per second: b = ceil(4.8 / 1.0289) = 5, work 835.3, left 8.7315, share 95.48 -> 97.5 %.
    Active 9.477 ms, 527.6 rps, 53.5 + 2.08 + 0.53673 * 527.6 = 338.7 W: f = 1530 - 1.0254 * 38.7 = 1490.3 MHz,
    latency 0.3031 + (9.477 + 0.0392) * 1.02666 = 10.07 ms."""
    wanted = [model(slo_ms=20, rate_rps=480)]
    paper = placement_policy("igniter", {"new_gpu": "paper"}).place(wanted, gpus(3), of("vgg19", "a"))
    checked = placement_policy("igniter").place(wanted, gpus(3), of("vgg19", "a"))
    assert checked.violations == ()
    assert by_gpu(paper) == [{"a": (97.5, 5)}]
    assert paper.violations == ("GPU 0: a takes 10.07 ms, over half its SLO, 10 ms",)
    assert by_gpu(checked) == [{"a": (100, 5)}]


def test_a_model_without_a_profile_for_one_type_goes_to_the_other() -> None:
    """Both fit on one V100 ($3.06); a on a T4 and b on a V100 would be $3.586."""
    slots = gpus(2, price=3.06) + gpus(2, "t4", 2, 0.526)
    known = {**of("alexnet", "a", "b"), **of("alexnet", "a", gpu_type="t4")}
    placed = placement_policy("igniter").place([model("a"), model("b")], slots, known)
    assert {planned.models[0].model_id: planned.gpu for planned in placed.slices} == {"a": 0, "b": 0}
    assert placed.unplaced == ()
    alone = placement_policy("igniter").place([model("a")], slots, known)
    assert alone.gpus_used == (2,)
    nowhere = placement_policy("igniter").place([model("a"), model("c")], slots, known)
    assert [(u.model_id, u.reason) for u in nowhere.unplaced] == [
        ("c", "it has no profile for GPU type t4; it has no profile for GPU type v100")
    ]


def test_shares_of_18_percent_units_stay_within_the_gpu() -> None:
    """An A100's unit is 100/54 %: 54 of them are the whole GPU, whatever their floating-point sum."""
    profile = shipped_profile("igniter-v100/vgg19")
    assert isinstance(profile, IgniterProfile)
    hardware = replace(profile.hardware, share_step_percent=100 / 54)
    fine = IgniterProfile(hardware, profile.coefficients, "finer units")
    placed = placement_policy("igniter").place(
        [model(slo_ms=20, rate_rps=1500)], gpus(9), {(ModelId("a"), "v100"): fine}
    )
    assert not placed.unplaced
    assert not placed.violations
    assert placed.slices[0].share_percent == 100


def test_a_share_at_the_pole_of_a_fit_is_slow_and_not_a_division_by_zero() -> None:
    """A fitted k4 of -1: the hyperbola has its pole at 1 %, and is negative left of it."""
    fitted = shipped_profile("igniter-v100/vgg19")
    assert isinstance(fitted, IgniterProfile)
    k1, k2, k3, _, k5 = fitted.coefficients.active
    coefficients = replace(fitted.coefficients, active=(k1, k2, k3, -1.0, k5))
    times_ms = [Resident(coefficients, 4, share_percent).active_ms for share_percent in (0.5, 1.0, 2.0, 50.0)]
    assert times_ms[0] == times_ms[1] > 1_000.0
    assert times_ms == sorted(times_ms, reverse=True)
