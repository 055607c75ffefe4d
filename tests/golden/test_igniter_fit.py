"""iGniter's fits against its authors' own: their raw profile in, their published coefficients out."""

from __future__ import annotations

from typing import Any

import pytest

from fabric.errors import ProfileError
from profiles.igniter.fit import (
    AlonePoint,
    GroupPoint,
    active_points,
    cache_slowdown,
    fit_active,
    fit_by_ability,
    fit_frequency,
    fit_line,
    fit_power,
    fit_sched,
)
from profiles.igniter.performance_model import Resident, read_coefficients
from profiles.linear_fit import PairPoint, fit_linear_interference
from profiles.requirements import Bandwidths
from profiles.store import shipped_data

MODELS = ("alexnet", "resnet50", "vgg19", "ssd")


def igniter() -> Any:
    return shipped_data("igniter_v100")


def raw_points(model: str) -> list[AlonePoint]:
    raw = igniter()["raw_profile"][model]
    return [
        AlonePoint(
            batch_size,
            share,
            raw["gpu_latency_ms"][i][j],
            raw["gpu_power_w"][i][j],
            raw["gpu_frequency_mhz"][i][j],
        )
        for i, batch_size in enumerate(raw["batches"])
        for j, share in enumerate(raw["shares_pct"])
    ]


def group_points() -> list[GroupPoint]:
    seen = igniter()["hardware"]["fit_input_vgg19_1_to_5_colocated_at_20pct"]
    columns = zip(seen["power_w"], seen["frequency_mhz"], seen["mean_gap_per_kernel_ms"], strict=True)
    return [GroupPoint(count, *values) for count, values in enumerate(columns, start=1)]


@pytest.mark.parametrize("model", MODELS)
def test_the_active_time_of_the_authors_profile_is_fitted_at_least_as_well_as_theirs(model: str) -> None:
    raw, theirs = igniter()["raw_profile"][model], igniter()["workload_coefficients"][model]
    points = active_points(raw_points(model), 1530, raw["idle_time_alone_ms"])

    def squares(k: tuple[float, float, float, float, float]) -> float:
        return sum((((k[0] * b + k[1]) * b + k[2]) / (r + k[3]) + k[4] - ms) ** 2 for b, r, ms in points)

    ours = fit_active(points)
    published = (
        theirs["k1_ms_pct"],
        theirs["k2_ms_pct"],
        theirs["k3_ms_pct"],
        theirs["k4_pct"],
        theirs["k5_ms"],
    )
    assert squares(ours) <= squares(published) * (1 + 1e-6)
    assert ours == pytest.approx(published, rel=0.01, abs=0.05)


@pytest.mark.parametrize("model", MODELS)
def test_coefficients_are_recovered_from_what_they_predict(model: str) -> None:
    known = read_coefficients(igniter()["workload_coefficients"][model])
    points = [(b, r, Resident(known, b, r).active_ms) for b in (1, 16, 32) for r in (10.0, 50.0, 100.0)]
    assert fit_active(points) == pytest.approx(known.active, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("model", MODELS)
def test_power_and_cache_by_ability_are_the_authors(model: str) -> None:
    raw, theirs = igniter()["raw_profile"][model], igniter()["workload_coefficients"][model]
    points = raw_points(model)
    idle_ms = raw["idle_time_alone_ms"]
    power = fit_power(points, 1530, 53.5, idle_ms)
    assert (power.slope, power.offset) == pytest.approx(
        (theirs["alpha_power_w_per_rps"], theirs["beta_power_w"]), rel=1e-5
    )
    three = [p for p in points if (p.batch_size, p.share_percent) in ((1, 10), (16, 50), (32, 100))]
    used = zip(three, raw["l2_util_pct_at_b1s10_b16s50_b32s100"], strict=True)
    cache = fit_by_ability(list(used), idle_ms)
    assert (cache.slope, cache.offset) == pytest.approx(
        (theirs["alpha_cacheutil_pct_per_rps"], theirs["beta_cacheutil_pct"]), rel=1e-5
    )


@pytest.mark.parametrize("model", MODELS)
def test_the_sensitivity_to_the_cache_is_the_authors(model: str) -> None:
    raw, theirs = igniter()["raw_profile"][model], igniter()["workload_coefficients"][model]
    found = cache_slowdown(
        raw["active_time_alone_ms"],
        raw["active_time_two_colocated_ms"],
        raw["frequency_two_colocated_mhz"] / 1530,
        raw["l2_util_pct_at_b16_s50"],
    )
    assert found == pytest.approx(theirs["alpha_cache_per_pct"], rel=1e-5)


def test_the_gpus_own_coefficients_by_hand() -> None:
    """Increments of 70.67 W make 329.56 and 400.22 W of demand, 29.56 and 100.22 over the limit, for 44.44 and
    98.6 MHz less: -(29.56 · 44.44 + 100.22 · 98.6) / (29.56² + 100.22²) = -11196 / 10918 = -1.0254.

    Added gaps of 2 … 5 workloads at full clock: 0.000306, 0.005396, 0.010167, 0.014551 ms; their line has slope
    0.0237536 / 5 = 0.0047507 and offset 0.0076049 - 3.5 · 0.0047507 = -0.0090224.
    """
    points = group_points()
    assert fit_frequency(points, 300, 1530) == pytest.approx(-1.0254, abs=1e-4)
    sched = fit_sched(points, 1530)
    assert (sched.slope, sched.offset) == pytest.approx((0.0047507, -0.0090224), abs=1e-6)


def test_a_gpu_that_never_throttled_has_no_slope() -> None:
    assert fit_frequency(group_points()[:3], 300, 1530) == 0.0


def test_gpulets_coefficients_are_recovered_from_the_750_pairs_they_were_fitted_to() -> None:
    """Both sides of each pair, latency over the solo one at the same batch and share, utilisations as measured there."""
    data = shipped_data("igniter_gpulet_profiles_v100")
    points = []
    for a, b, batch_a, batch_b, share_a, measured_a_ms, measured_b_ms in data["colocated_pairs"]:
        sides = ((a, batch_a, share_a, measured_a_ms), (b, batch_b, 100 - share_a, measured_b_ms))
        used = [
            Bandwidths(
                data["l2_util_pct"][model][str(batch)][str(share)],
                data["dram_util_pct"][model][str(batch)][str(share)],
            )
            for model, batch, share, _ in sides
        ]
        for place, (model, batch, share, ms) in enumerate(sides):
            solo_ms = data["latency_ms"][model][str(batch)][str(share)]
            points.append(PairPoint(used[place], used[1 - place], ms / solo_ms))
    l2_self, l2_other, dram_self, dram_other, added = data["linear_interference_fit"]["coefficients"]
    found = fit_linear_interference(points)
    assert (found.l2_self, found.l2_other, found.dram_self, found.dram_other) == pytest.approx(
        (100 * l2_self, 100 * l2_other, 100 * dram_self, 100 * dram_other), rel=1e-3, abs=1e-4
    )
    assert found.constant == pytest.approx(1 + added, rel=1e-4)


def test_too_little_to_fit_is_said() -> None:
    with pytest.raises(ProfileError, match="two different places"):
        fit_line([(1.0, 2.0), (1.0, 3.0)])
    with pytest.raises(ProfileError, match="five configurations"):
        fit_active([(1, 10.0, 5.0)])
    with pytest.raises(ProfileError, match="at two shares"):
        fit_active([(b, 100.0, 5.0 + b) for b in (1, 2, 4, 8, 16)])
    with pytest.raises(ProfileError, match="alone to compare"):
        fit_sched(group_points()[1:], 1530)
    with pytest.raises(ProfileError, match="two group sizes"):
        fit_frequency(group_points()[2:], 300, 1530)
    with pytest.raises(ProfileError, match="not used"):
        cache_slowdown(5.0, 6.0, 1.0, 0.0)
    with pytest.raises(ProfileError, match="five pairs"):
        fit_linear_interference([PairPoint(Bandwidths(1, 1), Bandwidths(1, 1), 1.1)] * 9)
