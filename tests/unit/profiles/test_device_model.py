from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.errors import ProfileError
from fabric.ids import ModelId
from profiles.device_model import DeviceModel
from profiles.fit import batch_interpolation_error, fit_linear, share_interpolation_error
from profiles.gpu import GIB, gpu_profile
from profiles.interference import Running, interference_named
from profiles.model import LinearProfile

RESNET = ModelId("resnet50")


class Doubling:
    covers_unlimited_slices = False

    def slowdown(self, running: Running, neighbours: Sequence[Running]) -> float:
        return 2.0 ** len(neighbours)


def test_a_batch_takes_its_solo_time_without_interference() -> None:
    profiles = {RESNET: LinearProfile(1, 5)}
    device = DeviceModel(profiles, interference_named("none", profiles, "generic"))
    assert device.exec_ms(Running(RESNET, 8), [Running(RESNET, 8)]) == 13
    assert device.exec_table(RESNET)[7] == 13


def test_neighbours_stretch_a_batch_by_the_interference_model() -> None:
    device = DeviceModel({RESNET: LinearProfile(1, 5)}, Doubling())
    assert device.exec_ms(Running(RESNET, 8), [Running(RESNET, 1), Running(RESNET, 2)]) == 52


def test_a_model_without_a_profile_is_an_error() -> None:
    with pytest.raises(ProfileError, match="model bert has no profile"):
        DeviceModel({}).exec_ms(Running(ModelId("bert"), 1))


def test_interference_that_is_not_there_is_never_silently_none() -> None:
    with pytest.raises(ProfileError, match="no interference model 'nonesuch'; available: none, igniter"):
        interference_named("nonesuch", {}, "generic")


def test_an_option_that_cannot_be_is_refused_whoever_sends_it() -> None:
    with pytest.raises(ProfileError, match=r"interference model sm on gpu 3: sm\.strength is -1;"):
        interference_named("sm", {}, "gpu 3", {"strength": -1.0})


def test_a_profile_without_what_a_law_needs_is_told_where_there_is_one() -> None:
    with pytest.raises(
        ProfileError, match=r"resnet50 has no SM utilisation .*; shipped families that do: thesis-v100"
    ):
        interference_named("sm", {RESNET: LinearProfile(1, 5)}, "generic")


def test_a_fit_finds_the_line_and_says_what_it_leaves_over() -> None:
    fit = fit_linear([(1, 6.1), (2, 6.9), (4, 9.1), (8, 12.9)])
    assert fit.alpha_ms == pytest.approx(0.9826, abs=1e-3)
    assert 0 < fit.residual_ms <= fit.residual_max_ms < 0.2
    assert fit.exec_ms(4) == pytest.approx(9.0, abs=0.1)


@given(
    st.floats(0.01, 50),
    st.floats(0, 100),
    st.lists(st.integers(1, 512), min_size=2, max_size=20, unique=True),
)
def test_a_fit_of_exact_points_has_no_residual(alpha_ms: float, beta_ms: float, sizes: list[int]) -> None:
    fit = fit_linear([(b, alpha_ms * b + beta_ms) for b in sizes])
    assert fit.alpha_ms == pytest.approx(alpha_ms, rel=1e-6, abs=1e-6)
    assert fit.beta_ms == pytest.approx(beta_ms, rel=1e-5, abs=1e-5)
    assert fit.residual_ms < 1e-6 * (1 + 512 * alpha_ms + beta_ms)


def test_interpolation_errors_leave_one_point_out_by_hand() -> None:
    """At 50 %, the line from 10 (batch 1) to 22 (batch 4) is at 14 for batch 2, where 12.5 was measured.

    At batch 1, share 50 % lies between 30 (at 20 %) and 6 (at 100 %) at 21 where 10 was measured: off by 1.1; at 2,
    between 40 and 8 at 28, where 12.5 was measured: 1.24; at 4, between 64 and 12 at 44.5, where 22 was: 1.022727.
    """
    columns = {
        20.0: {1: 30.0, 2: 40.0, 4: 64.0},
        50.0: {1: 10.0, 2: 12.5, 4: 22.0},
        100.0: {1: 6.0, 2: 8.0, 4: 12.0},
    }
    only = batch_interpolation_error({50.0: columns[50.0]})
    assert only.points == 1
    assert only.mean == only.largest == pytest.approx(14 / 12.5 - 1)
    by_share = share_interpolation_error(columns)
    assert by_share.points == 3
    assert by_share.mean == pytest.approx((1.1 + 1.24 + 1.022727) / 3, abs=1e-6)
    assert by_share.largest == pytest.approx(1.24)
    assert share_interpolation_error({100.0: columns[100.0]}).points == 0


@pytest.mark.parametrize("points", [[], [(1, 5.0)], [(2, 5.0), (2, 6.0)], [(1, 5.0), (2, 0.0)]])
def test_a_fit_needs_two_sizes_and_real_measurements(points: list[tuple[int, float]]) -> None:
    with pytest.raises(ProfileError):
        fit_linear(points)


def test_known_gpus_have_their_memory_and_unknown_ones_that_of_generic() -> None:
    assert gpu_profile("V100").memory_bytes == 16 * GIB
    assert gpu_profile("v100").mps_step_percent == 2.5
    assert gpu_profile("t4").mps_step_percent == 5.0
    assert gpu_profile("l40s").memory_bytes == gpu_profile("generic").memory_bytes
    assert gpu_profile("l40s").gpu_type == "l40s"
