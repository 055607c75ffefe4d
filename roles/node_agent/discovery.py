"""What NVML says of this host's NVIDIA GPUs: once what they are, then what they do. Nothing else here knows NVML.

The package nvidia-ml-py is an extra, so `pynvml` is imported when somebody asks. A call to a GPU that has fallen
off its bus can take seconds: whoever samples does it on a thread of its own.

NVML counts CUDA cores, not multiprocessors. How many cores one has is fixed per compute capability, so the
count is divided; for a capability that is not in the table `sm_count` is 0, which means unknown.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from fabric.errors import ConfigError
from fabric.messages import GpuInfo, GpuSample

CORES_PER_SM: Final[Mapping[tuple[int, int], int]] = {
    (3, 0): 192,
    (3, 5): 192,
    (3, 7): 192,
    (5, 0): 128,
    (5, 2): 128,
    (5, 3): 128,
    (6, 0): 64,
    (6, 1): 128,
    (6, 2): 128,
    (7, 0): 64,
    (7, 2): 64,
    (7, 5): 64,
    (8, 0): 64,
    (8, 6): 128,
    (8, 7): 128,
    (8, 9): 128,
    (9, 0): 128,
    (10, 0): 128,
    (10, 3): 128,
    (12, 0): 128,
}
THROTTLE_REASONS: Final[Mapping[int, str]] = {
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
    0x100: "display_clocks",
}
"""Those that mean less speed than could be had. An idle GPU and clocks that somebody set are not among them."""

_TEMPERATURE_OF_GPU, _CLOCK_SM, _CLOCK_MEMORY = 0, 1, 2  # NVML's enumerations

ValueT = TypeVar("ValueT")


class NvmlUnavailable(ConfigError):
    """There is no NVML here, no driver behind it, or a GPU that does not answer: no real GPU can be served."""


class Nvml:
    """An open NVML. Devices are numbered as the driver does, in the order of their bus addresses.

    It is not shut down: that would wait for a GPU that hangs, and the end of the process does the same.
    """

    def __init__(self, pynvml: Any) -> None:
        self._pynvml = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise NvmlUnavailable(f"no usable NVIDIA GPU or driver here ({error})") from error

    @classmethod
    def open(cls) -> Nvml:
        """Raises NvmlUnavailable, whose text says what is missing."""
        try:
            pynvml = importlib.import_module("pynvml")
        except ImportError as error:
            raise NvmlUnavailable(
                "device cuda needs the package nvidia-ml-py (pip install 'tenuto[worker]')"
            ) from error
        return cls(pynvml)

    def count(self) -> int:
        """How many GPUs the driver shows."""
        return int(self._asked(self._pynvml.nvmlDeviceGetCount))

    def number_of(self, uid: str) -> int:
        """Of the GPU whose uid begins so. Raises NvmlUnavailable where there is none, or more than one."""
        nvml = self._pynvml
        uids = [
            _text(self._asked(nvml.nvmlDeviceGetUUID, self._asked(nvml.nvmlDeviceGetHandleByIndex, gpu)))
            for gpu in range(self.count())
        ]
        found = [gpu for gpu, one in enumerate(uids) if one.startswith(uid)]
        if len(found) != 1:
            raise NvmlUnavailable(f"{len(found)} GPUs here have a UUID that begins with {uid}")
        return found[0]

    def describe(self, gpu: int, gpu_type: str) -> GpuInfo:
        """What the GPU is. Raises NvmlUnavailable where it does not answer."""
        nvml = self._pynvml
        handle = self._asked(nvml.nvmlDeviceGetHandleByIndex, gpu)
        capability = tuple(map(int, self._asked(nvml.nvmlDeviceGetCudaComputeCapability, handle)))
        cores = self._sensed(lambda: int(nvml.nvmlDeviceGetNumGpuCores(handle))) or 0
        mig = self._sensed(lambda: int(nvml.nvmlDeviceGetMigMode(handle)[0]))
        return GpuInfo(
            gpu,
            gpu_type,
            "cuda",
            int(self._asked(nvml.nvmlDeviceGetMemoryInfo, handle).total),
            _text(self._asked(nvml.nvmlDeviceGetUUID, handle)),
            _text(self._asked(nvml.nvmlDeviceGetName, handle)),
            cores // CORES_PER_SM.get((capability[0], capability[1]), cores + 1),
            f"{capability[0]}.{capability[1]}",
            mig == 1,
            _text(self._asked(nvml.nvmlSystemGetDriverVersion)),
        )

    def sample(self, gpu: int) -> GpuSample:
        """What the GPU does now; all None where it does not answer."""
        nvml = self._pynvml
        handle = self._sensed(lambda: nvml.nvmlDeviceGetHandleByIndex(gpu))
        if handle is None:
            return GpuSample(gpu)
        milliwatts = self._sensed(lambda: float(nvml.nvmlDeviceGetPowerUsage(handle)))
        reasons = self._sensed(lambda: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))) or 0
        return GpuSample(
            gpu,
            self._sensed(lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
            self._sensed(lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used)),
            None if milliwatts is None else milliwatts / 1e3,
            self._sensed(lambda: int(nvml.nvmlDeviceGetClockInfo(handle, _CLOCK_SM))),
            self._sensed(lambda: int(nvml.nvmlDeviceGetClockInfo(handle, _CLOCK_MEMORY))),
            self._sensed(lambda: max(0, int(nvml.nvmlDeviceGetTemperature(handle, _TEMPERATURE_OF_GPU)))),
            tuple(word for bit, word in THROTTLE_REASONS.items() if reasons & bit),
        )

    def _asked(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except self._pynvml.NVMLError as error:
            raise NvmlUnavailable(f"a GPU cannot be asked ({error})") from error

    def _sensed(self, call: Callable[[], ValueT]) -> ValueT | None:
        """None where this GPU has no such thing: few have every sensor."""
        try:
            return call()
        except self._pynvml.NVMLError:
            return None


def _text(said: str | bytes) -> str:
    """Older versions of the package answer in bytes."""
    return said.decode("utf-8", "replace") if isinstance(said, bytes) else str(said)
