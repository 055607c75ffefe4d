"""Measures a model on a device: run times, memory, and on CUDA the kernels of one batch.

Times on CUDA are between events on the model's own stream, so the host's doings are not in them; on a CPU they are
the caller's clock. Nothing here knows how a model is loaded.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import torch

RUNS_MIN: Final = 20
RUNS_MAX: Final = 2_000
WARM_RUNS: Final = 3
_STATUS = Path("/proc/self/status")


class MeasuredBatch(Protocol):
    """One batch of fixed size, ready to run again and again."""

    def __call__(self) -> object:
        """Copy in, infer, copy out; on CUDA all of it only put on the current stream."""
        ...


class Measurer:
    """One process' view of one device."""

    def __init__(self, device: torch.device, now_ms: Callable[[], float]) -> None:
        self._device = device
        self._now_ms = now_ms
        self._is_cuda = device.type == "cuda"

    def run_times_ms(self, batch: MeasuredBatch, for_ms: float) -> list[float]:
        """Run times of as many batches as fit into `for_ms`, 20 at least; those that warm it up are not counted.

        A batch that takes longer than a twentieth of `for_ms` runs five times: minutes, not hours.
        """
        with self._running():
            for _ in range(WARM_RUNS):
                batch()
            self._wait()
            first_ms = self._one_ms(batch)
            fitting = int(for_ms / max(first_ms, 1e-6))
            wanted = max(5, fitting) if fitting < RUNS_MIN else min(RUNS_MAX, fitting)
            return [self._one_ms(batch) for _ in range(wanted)]

    def back_to_back(self, batch: MeasuredBatch, until: Callable[[], bool]) -> list[float]:
        """Run times of batches one after another until told to stop, between 1 and 2,000 of them kept."""
        times_ms: list[float] = []
        with self._running():
            while not times_ms or not until():
                times_ms.append(self._one_ms(batch))
                del times_ms[:-RUNS_MAX]
        return times_ms

    @contextmanager
    def memory(self) -> Iterator[Callable[[], int]]:
        """Inside, the given function says the most that was reserved: by torch on CUDA, by the process on a CPU."""
        if self._is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
            yield lambda: int(torch.cuda.max_memory_reserved(self._device))
        else:
            yield lambda: _status_bytes("VmHWM")

    def trace(self, batch: MeasuredBatch) -> Mapping[str, Any] | None:
        """torch.profiler's trace of one warm batch; None on a CPU, which has no kernels."""
        if not self._is_cuda:
            return None
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with self._running():
            for _ in range(WARM_RUNS):
                batch()
            self._wait()
            with torch.profiler.profile(activities=activities) as seen:
                batch()
                self._wait()
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "trace.json"
            seen.export_chrome_trace(str(path))
            found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def copy_bytes_per_ms(self, size_bytes: int = 1 << 28, turns: int = 10) -> float | None:
        """Pinned memory to the device (iGniter's B_pcie); None on a CPU."""
        if not self._is_cuda:
            return None
        host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        there = torch.empty_like(host, device=self._device)
        took_ms = [self._one_ms(lambda: there.copy_(host, non_blocking=True)) for _ in range(turns + 1)]
        return size_bytes / sorted(took_ms[1:])[turns // 2]

    def _one_ms(self, batch: Callable[[], object]) -> float:
        if not self._is_cuda:
            began_ms = self._now_ms()
            batch()
            return self._now_ms() - began_ms
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        batch()
        ended.record()
        ended.synchronize()
        return float(began.elapsed_time(ended))

    def _wait(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize(self._device)

    @contextmanager
    def _running(self) -> Iterator[None]:
        with torch.inference_mode():
            yield


def versions(device: torch.device) -> dict[str, str]:
    """What a profile is keyed by beside the model: torch, and the GPU's own name."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return {"torch": torch.__version__, "gpu": name}


def device_memory_bytes(device: torch.device) -> int:
    """Of the whole GPU; 0 on a CPU."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else 0


def _status_bytes(key: str) -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0
