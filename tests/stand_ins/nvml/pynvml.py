"""Stands in for nvidia-ml-py on a host without a GPU.

$TENUTO_STAND_IN_NVML names a JSON file: a list of GPUs, each with what its functions say; what is left out is not
supported there. The file is read at every call, so a test may change it. Without the variable there is no driver.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """What every function may raise."""


def _gpus() -> list[dict[str, Any]]:
    path = os.environ.get("TENUTO_STAND_IN_NVML")
    if not path:
        raise NVMLError("Driver Not Loaded")
    gpus: list[dict[str, Any]] = json.loads(Path(path).read_text(encoding="utf-8"))
    return gpus


def _said(handle: int, name: str) -> Any:
    gpu = _gpus()[handle]
    if name not in gpu:
        raise NVMLError("Not Supported")
    return gpu[name]


def nvmlInit() -> None:  # noqa: N802  NVIDIA's names, here and below
    _gpus()


def nvmlShutdown() -> None:  # noqa: N802
    pass


def nvmlDeviceGetCount() -> int:  # noqa: N802
    return len(_gpus())


def nvmlSystemGetDriverVersion() -> str:  # noqa: N802
    return "550.54.15"


def nvmlDeviceGetHandleByIndex(index: int) -> int:  # noqa: N802
    if index >= len(_gpus()):
        raise NVMLError("Invalid Argument")
    return index


def nvmlDeviceGetUUID(handle: int) -> str:  # noqa: N802
    return str(_said(handle, "uid"))


def nvmlDeviceGetName(handle: int) -> bytes:  # noqa: N802
    return str(_said(handle, "name")).encode()


def nvmlDeviceGetCudaComputeCapability(handle: int) -> list[int]:  # noqa: N802
    return [int(part) for part in _said(handle, "capability").split(".")]


def nvmlDeviceGetNumGpuCores(handle: int) -> int:  # noqa: N802
    return int(_said(handle, "cores"))


def nvmlDeviceGetMigMode(handle: int) -> list[int]:  # noqa: N802
    mode = int(_said(handle, "mig"))
    return [mode, mode]


def nvmlDeviceGetMemoryInfo(handle: int) -> SimpleNamespace:  # noqa: N802
    return SimpleNamespace(total=_said(handle, "memory_bytes"), used=_said(handle, "used_bytes"))


def nvmlDeviceGetUtilizationRates(handle: int) -> SimpleNamespace:  # noqa: N802
    return SimpleNamespace(gpu=_said(handle, "busy_percent"), memory=0)


def nvmlDeviceGetPowerUsage(handle: int) -> int:  # noqa: N802
    return int(_said(handle, "milliwatts"))


def nvmlDeviceGetEnforcedPowerLimit(handle: int) -> int:  # noqa: N802
    return int(_said(handle, "milliwatts_max"))


def nvmlDeviceGetMaxClockInfo(handle: int, clock: int) -> int:  # noqa: N802
    return int(_said(handle, "clocks_max_mhz")[clock])


def nvmlDeviceGetClockInfo(handle: int, clock: int) -> int:  # noqa: N802
    return int(_said(handle, "clocks_mhz")[clock])


def nvmlDeviceGetCurrentClocksThrottleReasons(handle: int) -> int:  # noqa: N802
    return int(_said(handle, "throttle"))


def nvmlDeviceGetTemperature(handle: int, sensor: int) -> int:  # noqa: N802
    del sensor
    return int(_said(handle, "celsius"))
