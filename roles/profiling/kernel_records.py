"""`tenuto profile --kernels`: operator after operator on the user's own GPU, for the estimator to learn from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any, Final, Protocol

from fabric.clock import MonotonicClock
from fabric.errors import ConfigError
from profiles.estimator.check import checked
from profiles.estimator.gpus import GpuSpec
from profiles.estimator.own_records import own_gpu, record_of, works_to_measure
from profiles.estimator.records import KernelRecord
from profiles.estimator.work import Work
from profiles.kernel_trace import kernels_of, limits_of
from profiles.profilers.kernel_operators import operator_of
from profiles.profilers.memory import is_out_of_memory
from profiles.profilers.torch import MeasuredBatch, Measurer, device_memory_bytes, versions
from roles.gpu_worker.executors.profiled import device_named

FOR_MS: Final = 20.0  # of run times for each of thousands of operators, at least five runs
UNSEEN_EVERY: Final = 5


class MeasuringKernels(Protocol):
    """A `Measurer`, or its stand-in."""

    def memory(self) -> AbstractContextManager[object]:
        """Around one operator; what is left of the last one is given back first."""
        ...

    def run_times_ms(self, batch: MeasuredBatch, for_ms: float) -> list[float]:
        """Of as many runs as fit into `for_ms`."""
        ...

    def trace(self, batch: MeasuredBatch) -> Mapping[str, Any] | None:
        """torch.profiler's trace of one run."""
        ...

    def copy_bytes_per_ms(self) -> float | None:
        """From pinned memory to the device."""
        ...


def measured_kernels(
    device: str, gpu_type: str | None, progress: Callable[[float], None], warn: Callable[[str], None]
) -> tuple[GpuSpec, list[KernelRecord]]:
    """The GPU and its records. Raises ConfigError where there is no CUDA, ProfileError where nothing can be traced."""
    found = device_named(device)
    if found.type != "cuda":
        raise ConfigError(f"kernels are a GPU's: --kernels needs --device cuda, not {device}")
    memory_bytes = device_memory_bytes(found)
    return records_of_works(
        works_to_measure(memory_bytes),
        Measurer(found, MonotonicClock().now_ms),
        lambda work: operator_of(work, found),
        lambda records, trace, copy_gbps: own_gpu(
            versions(found)["gpu"],
            gpu_type,
            memory_bytes,
            limits_of(trace, found.index or 0),
            copy_gbps,
            records,
        ),
        progress,
        warn,
    )


def records_of_works(
    works: Sequence[Work],
    measurer: MeasuringKernels,
    operator: Callable[[Work], MeasuredBatch],
    gpu_of: Callable[[Sequence[KernelRecord], Mapping[str, Any], float], GpuSpec],
    progress: Callable[[float], None],
    warn: Callable[[str], None],
) -> tuple[GpuSpec, list[KernelRecord]]:
    """Everything but CUDA."""
    records: list[KernelRecord] = []
    trace: Mapping[str, Any] = {}
    left_out = 0
    for number, work in enumerate(works, start=1):
        try:
            times_ms, trace = _measured(measurer, operator, work)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            left_out += 1
        else:
            records.append(record_of(work, times_ms, kernels_of(trace)))
        progress(number / len(works))
    if left_out:
        warn(f"left out: {left_out} operators that ran out of memory")
    copied = measurer.copy_bytes_per_ms()
    return gpu_of(records, trace, (copied or 0.0) / 1e6), records


def _measured(
    measurer: MeasuringKernels, operator: Callable[[Work], MeasuredBatch], work: Work
) -> tuple[list[float], Mapping[str, Any]]:
    """In a frame of its own, so that nothing of one operator is held while the next one is made."""
    with measurer.memory():
        batch = operator(work)
        times_ms = measurer.run_times_ms(batch, FOR_MS)
        return times_ms, measurer.trace(batch) or {"traceEvents": []}


def retrained_errors(gpu: GpuSpec, records: Sequence[KernelRecord]) -> dict[str, dict[str, float]]:
    """The estimator trained with four fifths of the records, judged on the others; as `estimate_checked` says it."""
    known = [one for place, one in enumerate(records) if place % UNSEEN_EVERY]
    return {op: asdict(errors) for op, errors in checked(records[::UNSEEN_EVERY], gpu, known).items()}
