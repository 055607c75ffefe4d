"""What NVML says, through a stand-in of its package."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from fabric.errors import ConfigError
from fabric.messages import GpuInfo, GpuSample
from roles.config.cluster import NodeConfig
from roles.node_agent.discovery import Nvml, NvmlUnavailable
from roles.node_agent.gpus import discover, open_nvml
from tests.gpu_stand_ins import STAND_INS, a100, write_gpus


@pytest.fixture
def pynvml(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.delenv("TENUTO_STAND_IN_NVML", raising=False)
    found = importlib.util.spec_from_file_location("pynvml", STAND_INS / "nvml" / "pynvml.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


@pytest.fixture
def gpus(pynvml: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    del pynvml
    path = tmp_path / "gpus.json"
    monkeypatch.setenv("TENUTO_STAND_IN_NVML", str(path))
    return iter([path])


def node(gpus: int = 1, device: str = "cuda") -> NodeConfig:
    return NodeConfig("a", gpus, "a100", 16 << 30, device=device)


def test_a_gpu_is_described_in_full(gpus: Iterator[Path]) -> None:
    write_gpus(next(gpus), a100(3))
    (info,) = discover(node(), Nvml.open())
    assert info == GpuInfo(
        0,
        "a100",
        "cuda",
        40 << 30,
        "GPU-3",
        "NVIDIA A100-SXM4-40GB",
        108,  # 6912 cores of 64 in each multiprocessor
        "8.0",
        is_mig=False,
        driver="550.54.15",
    )


def test_a_gpu_is_found_by_the_beginning_of_its_uuid(gpus: Iterator[Path]) -> None:
    write_gpus(next(gpus), a100(30), a100(31), a100(4))
    nvml = Nvml.open()
    assert [nvml.number_of(uid) for uid in ("GPU-31", "GPU-4")] == [1, 2]
    for uid, count in (("GPU-3", 2), ("GPU-7", 0)):
        with pytest.raises(NvmlUnavailable, match=f"{count} GPUs here have a UUID that begins with {uid}"):
            nvml.number_of(uid)


def test_what_a_gpu_does_not_know_of_itself_is_left_open(gpus: Iterator[Path]) -> None:
    write_gpus(next(gpus), a100(0, cores=None, mig=None), a100(1, capability="99.0", mig=1))
    first, second = discover(node(2), Nvml.open())
    assert (first.sm_count, first.is_mig) == (0, False)
    assert (second.sm_count, second.is_mig) == (0, True)


def test_a_sample_has_what_there_are_sensors_for(gpus: Iterator[Path]) -> None:
    bare = dict.fromkeys(("busy_percent", "used_bytes", "milliwatts", "clocks_mhz", "throttle", "celsius"))
    write_gpus(next(gpus), a100(0, throttle=0x4 | 0x40 | 0x1), a100(1, **bare))
    nvml = Nvml.open()
    throttle = ("sw_power_cap", "hw_thermal_slowdown")  # idle (1) is no loss of speed
    assert nvml.sample(0) == GpuSample(0, 37.0, 3 << 30, 151.5, 1410, 1215, 41, throttle)
    assert nvml.sample(1) == GpuSample(1)
    assert nvml.sample(2) == GpuSample(2), "one that has fallen off the bus"


def test_no_driver_is_an_error_that_names_the_node_and_what_to_do(pynvml: ModuleType) -> None:
    del pynvml
    with pytest.raises(
        NvmlUnavailable, match=r"node a: no usable NVIDIA GPU .*Driver Not Loaded.*say device: cpu or"
    ):
        open_nvml(node())


def test_no_package_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NvmlUnavailable, match="node a: device cuda needs the package nvidia-ml-py"):
        open_nvml(node())


def test_fewer_gpus_than_promised_is_an_error(gpus: Iterator[Path]) -> None:
    write_gpus(next(gpus), a100(0))
    with pytest.raises(ConfigError, match="says 2 cuda GPUs, this host has 1; say gpus: 1"):
        discover(node(2), Nvml.open())


def test_nodes_without_nvidia_gpus_need_no_driver() -> None:
    assert open_nvml(node(device="emulated")) is None
    assert discover(node(2, "emulated"), None) == (
        GpuInfo(0, "a100", "emulated", 16 << 30),
        GpuInfo(1, "a100", "emulated", 16 << 30),
    )
    (host,) = discover(node(device="cpu"), None)
    assert host.memory_bytes > 1 << 30
