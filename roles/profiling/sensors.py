"""Power and clock of one GPU while something runs on it; nothing where there is no NVML."""

from __future__ import annotations

import importlib
import statistics
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from fabric.errors import ConfigError
from roles.node_agent.discovery import Nvml

_CLOCK_SM = 1
SAMPLE_EVERY_S = 0.05
SETTLE_SAMPLES = 4  # NVML's power is a mean over the last moments: the first samples are of what was before


@dataclass(slots=True)
class Sensors:
    """NVML's view of one GPU, by its number. Every value is None where the GPU does not say it."""

    gpu: int
    driver: str = ""
    _nvml: Any = field(default=None, repr=False)
    _handle: Any = field(default=None, repr=False)

    @classmethod
    def open(cls, gpu: int) -> Self:
        """Never raises: without NVML there is just nothing to say."""
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return cls(gpu)
        try:
            nvml.nvmlInit()
            handle = nvml.nvmlDeviceGetHandleByIndex(gpu)
            driver = nvml.nvmlSystemGetDriverVersion()
        except nvml.NVMLError:
            return cls(gpu)
        return cls(gpu, driver.decode() if isinstance(driver, bytes) else str(driver), nvml, handle)

    def power_w(self) -> float | None:
        """Drawn now."""
        return _scaled(self._asked("nvmlDeviceGetPowerUsage"), 1e-3)

    def frequency_mhz(self) -> float | None:
        """Of the SMs now."""
        return _scaled(self._asked("nvmlDeviceGetClockInfo", _CLOCK_SM), 1.0)

    def power_max_w(self) -> float | None:
        """The limit that is enforced."""
        return _scaled(self._asked("nvmlDeviceGetEnforcedPowerLimit"), 1e-3)

    def frequency_max_mhz(self) -> float | None:
        """The highest clock of the SMs."""
        return _scaled(self._asked("nvmlDeviceGetMaxClockInfo", _CLOCK_SM), 1.0)

    def _asked(self, name: str, *arguments: object) -> Any:
        call: Callable[..., Any] | None = getattr(self._nvml, name, None)
        if call is None:
            return None
        try:
            return call(self._handle, *arguments)
        except self._nvml.NVMLError:
            return None


def nvml_number(gpu: int, visible: str | None) -> int:
    """NVML's number of what CUDA calls `gpu` where it counts in the order of the bus. `visible`: CUDA_VISIBLE_DEVICES, None: not set.

    Raises ConfigError where that cannot be told.
    """
    if visible is None:
        return gpu
    names = [name.strip() for name in visible.split(",")]
    name = names[gpu] if gpu < len(names) else ""
    if name.isdecimal():
        return int(name)
    if not name.startswith("GPU-"):
        raise ConfigError(f"CUDA_VISIBLE_DEVICES={visible} names no GPU that would be cuda:{gpu}")
    return Nvml.open().number_of(name)


class Sampling:
    """Samples power and clock between `with` and its end."""

    def __init__(self, sensors: Sensors) -> None:
        self._sensors = sensors
        self._power_w: list[float] = []
        self._frequency_mhz: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="sensors", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(5.0)

    @property
    def power_w(self) -> float | None:
        """The median once things had settled."""
        return _settled(self._power_w)

    @property
    def frequency_mhz(self) -> float | None:
        """The median once things had settled."""
        return _settled(self._frequency_mhz)

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_EVERY_S):
            for value, into in (
                (self._sensors.power_w(), self._power_w),
                (self._sensors.frequency_mhz(), self._frequency_mhz),
            ):
                if value is not None:
                    into.append(value)


def _settled(samples: list[float]) -> float | None:
    settled = samples[SETTLE_SAMPLES:] or samples
    return statistics.median(settled) if settled else None


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else float(value) * factor
