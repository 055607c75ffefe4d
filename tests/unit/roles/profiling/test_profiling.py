"""The parts of `tenuto profile`: words that mean nothing, run times, sensors, kernels, iGniter's sections, the picture."""

from __future__ import annotations

import hashlib
import inspect
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from msgspec.structs import replace

from fabric.errors import ConfigError
from fabric.messages import LoaderSpec
from profiles.igniter.fit import AlonePoint, GroupPoint
from profiles.igniter.sections import CacheUse, GpuNumbers, igniter_points, igniter_sections
from profiles.measured import MeasuredProfile, Point, Subject
from profiles.occupancy import DeviceLimits, Kernel, LaunchGaps
from profiles.profilers.torch import Measurer
from profiles.store import shipped_data
from roles.cli.profile import profile
from roles.gpu_worker.executors.profiled import ProfiledModel, device_named
from roles.profiling.kernels import kernel_rows
from roles.profiling.sensors import Sampling, Sensors, nvml_number
from tests.unit.roles.gpu_worker.executors.models_for_tests import Doubler, WithoutWeights

DIGITS = "deploy.local.demo.digits_model:Digits"
MODELS = "tests.unit.roles.gpu_worker.executors.models_for_tests"


def run(*arguments: str) -> tuple[int, str, BaseException | None]:
    result = CliRunner().invoke(profile, [*arguments, "--seconds", "0.05"])
    return result.exit_code, result.output, result.exception


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["keras/resnet50"], "there is no 'keras'"),
        ([DIGITS, "--device", "tpu"], "there is no 'tpu'"),
        ([DIGITS, "--batches", "1,x"], "'x' is no whole number"),
        ([DIGITS, "--shares", "a"], "'a' is no number"),
        ([DIGITS, "--file", "gone.yaml"], "gone.yaml"),
    ],
)
def test_words_that_mean_nothing_are_refused_before_anything_starts(
    arguments: list[str], reason: str
) -> None:
    code, _, error = run(*arguments)
    assert code == 1
    assert isinstance(error, ConfigError)
    assert reason in str(error)


def test_a_model_in_ranks_is_measured_by_its_worker(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text(
        'models: [{name: m, slo_ms: 9, loader: {python: "a.b:C", ranks: 2}}]\ncluster: {gpus: 2}\n'
    )
    _, _, error = run("m", "--file", str(path))
    assert isinstance(error, ConfigError)
    assert "model m runs in 2 ranks, and one process is measured here" in str(error)


# ---------------------------------------------------------------- parts


@pytest.mark.parametrize(
    "spec",
    [LoaderSpec(zoo="torchvision", arch="squeezenet1_1"), LoaderSpec(python=f"{MODELS}:IsAModule")],
    ids=("holds a module", "is one"),
)
def test_the_same_weights_have_the_same_digest_and_others_another_one(spec: LoaderSpec) -> None:
    def digest(seed: int) -> str:
        return ProfiledModel(replace(spec, seed=seed), torch.device("cpu")).digest

    assert digest(0) == digest(0) != digest(1)


@pytest.mark.parametrize("model", [Doubler, WithoutWeights], ids=("holds no module", "is one without any"))
def test_a_class_without_weights_has_a_digest_of_its_source(model: type) -> None:
    found = ProfiledModel(LoaderSpec(python=f"{MODELS}:{model.__name__}"), torch.device("cpu"))
    assert found.digest == hashlib.sha256(inspect.getsource(model).encode()).hexdigest()


class Steps:
    """Every look takes 10 ms."""

    def __init__(self) -> None:
        self.at_ms = 0.0

    def __call__(self) -> float:
        self.at_ms += 10.0
        return self.at_ms


def test_runs_fill_their_time_and_slow_models_run_five_times() -> None:
    measurer = Measurer(torch.device("cpu"), Steps())
    assert len(measurer.run_times_ms(lambda: None, 1_000.0)) == 100
    assert len(measurer.run_times_ms(lambda: None, 20.0)) == 5
    assert set(measurer.run_times_ms(lambda: None, 50.0)) == {10.0}
    assert measurer.trace(lambda: None) is None
    assert measurer.copy_bytes_per_ms() is None


@pytest.mark.parametrize("name", ["tpu", "cuda", "meta"])
def test_a_device_that_is_not_there_is_a_configuration_error(name: str) -> None:
    if name == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match=r"there is no device|finds no CUDA"):
        device_named(name)


def test_launches_that_are_alike_are_one_row() -> None:
    limits = DeviceLimits(80, 2048, 32, 65_536, 98_304)
    alike = [
        Kernel("a", at, 1.0, (320, 1, 1), (256, 1, 1), 32, 0, occupancy)
        for at, occupancy in ((0, 30.0), (2, 50.0))
    ]
    other = Kernel("a", 5.0, 3.0, (640, 1, 1), (256, 1, 1), 32, 0, 60.0)
    rows = kernel_rows([*alike, other], limits)
    assert [(row.launches, row.duration_ms, row.occupancy_percent, row.sm_percent) for row in rows] == [
        (1, 3.0, 60.0, 100.0),
        (2, 2.0, 40.0, 50.0),
    ]


def test_without_a_driver_the_sensors_are_silent() -> None:
    sensors = Sensors(0)
    assert (sensors.power_w(), sensors.frequency_max_mhz()) == (None, None)
    with Sampling(sensors) as sampled:
        pass
    assert (sampled.power_w, sampled.frequency_mhz) == (None, None)


@pytest.mark.parametrize(("visible", "number"), [(None, 1), ("2,0", 0), (" 3 , 5 ", 5)])
def test_nvmls_number_of_a_gpu_is_what_cuda_may_see(visible: str | None, number: int) -> None:
    assert nvml_number(1, visible) == number


@pytest.mark.parametrize("visible", ["", "0", "-1,-1", "0,MIG-7f", "0,NoDevFiles"])
def test_a_gpu_that_cuda_may_not_see_has_no_number(visible: str) -> None:
    with pytest.raises(ConfigError, match="names no GPU that would be cuda:1"):
        nvml_number(1, visible)


def test_igniters_sections_come_out_of_its_authors_raw_profile() -> None:
    """resnet50 on the V100: the measured numbers in, the published coefficients out."""
    data = shipped_data("igniter_v100")
    raw, known, hardware = (
        data["raw_profile"]["resnet50"],
        data["workload_coefficients"]["resnet50"],
        data["hardware"],
    )
    gpu = GpuNumbers(300, 53.5, 1530, 1e7, 2.5)
    transferred = (602_112, 4_000)
    points = [
        Point(
            share,
            b,
            raw["gpu_latency_ms"][i][j] + b * sum(transferred) / 1e7,
            0,
            0,
            1,
            0,
            raw["gpu_power_w"][i][j],
            raw["gpu_frequency_mhz"][i][j],
        )
        for i, b in enumerate(raw["batches"])
        for j, share in enumerate(raw["shares_pct"])
    ]
    alone = igniter_points(points, gpu, sum(transferred))
    three = [p for p in alone if (p.batch_size, p.share_percent) in ((1, 10), (16, 50), (32, 100))]
    cache = CacheUse(
        list(zip(three, raw["l2_util_pct_at_b1s10_b16s50_b32s100"], strict=True)),
        raw["l2_util_pct_at_b16_s50"],
        raw["active_time_alone_ms"],
        raw["active_time_two_colocated_ms"],
        raw["frequency_two_colocated_mhz"],
    )
    seen = hardware["fit_input_vgg19_1_to_5_colocated_at_20pct"]
    groups = [
        GroupPoint(count, *values)
        for count, values in enumerate(
            zip(seen["power_w"], seen["frequency_mhz"], seen["mean_gap_per_kernel_ms"], strict=True), start=1
        )
    ]
    gaps = LaunchGaps(80, raw["idle_time_alone_ms"] / 80, 1.0)
    found = igniter_sections(alone, gpu, gaps, groups, transferred, cache)
    for key in found["hardware"]:
        assert found["hardware"][key] == pytest.approx(hardware[key], rel=1e-4), key
    for key in found["coefficients"]:
        assert found["coefficients"][key] == pytest.approx(known[key], rel=1e-2, abs=0.02), key
    without = igniter_sections(alone, gpu, gaps, groups, transferred)["coefficients"]
    assert (without["alpha_cacheutil_pct_per_rps"], without["alpha_cache_per_pct"]) == (0, 0)
    assert isinstance(alone[0], AlonePoint)


def test_a_profile_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plots'")
    from roles.lab.plots import plot_profile

    points = [
        Point(share, b, b + 100 / share, b + 1.0, b + 2.0, 9, 0) for share in (50, 100) for b in (1, 2, 4)
    ]
    subject = Subject("m", "ab", "cuda", "v100")
    plot_profile(tmp_path / "p.png", MeasuredProfile(subject, points, 1, 1))
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
