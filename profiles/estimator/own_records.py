"""Kernel records of the user's own GPU: which operators to measure, and what their kernels' trace says."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Final

from fabric.errors import ProfileError
from profiles.estimator.gpus import GPU_SPECS, GpuSpec
from profiles.estimator.records import KernelRecord, shipped_records
from profiles.estimator.work import ELEMENTWISE_OPS, MATRIX_OPS, ROW_OPS, Work
from profiles.occupancy import DeviceLimits, Kernel

OF_EACH_CLASS: Final = 200
MEMORY_SHARE: Final = 0.25
"""Of the GPU's memory, the most that an operator reads and writes: its library may want as much again to work in."""
_SIZES_FROM: Final = "a100"  # the shipped GPU with the most memory, so with the largest operators


def works_to_measure(memory_bytes: int, of_each: int = OF_EACH_CLASS) -> list[Work]:
    """Operators of the sizes that the shipped records have, as far as they fit."""
    works = (record.work for record in shipped_records(_SIZES_FROM))
    return evenly_chosen([work for work in works if work.size_bytes <= MEMORY_SHARE * memory_bytes], of_each)


def evenly_chosen(works: Iterable[Work], of_each: int = OF_EACH_CLASS) -> list[Work]:
    """Of every class so many, from the smallest to the largest."""
    by_class: dict[str, set[Work]] = {}
    for work in works:
        by_class.setdefault(work.op, set()).add(work)
    chosen: list[Work] = []
    for _, same in sorted(by_class.items()):
        ascending = sorted(same, key=lambda work: (work.flops, work.size_bytes, work.dims))
        last = len(ascending) - 1
        places = {round(last * number / max(1, of_each - 1)) for number in range(of_each)}
        chosen += [ascending[place] for place in sorted(places)]
    return chosen


def record_of(work: Work, times_ms: Sequence[float], kernels: Sequence[Kernel]) -> KernelRecord:
    """One operator: the median of its run times, and its kernels, whose names end where their arguments begin.

    Raises ProfileError where the tracer saw no kernel.
    """
    if not kernels:
        raise ProfileError(
            f"torch's tracer saw no kernel of {work.op}: it may not look, or another tracer does"
        )
    longest = max(kernels, key=lambda kernel: kernel.duration_ms)
    names = tuple(kernel.name.partition("(")[0].removeprefix("void ").replace(";", ",") for kernel in kernels)
    return KernelRecord(work, statistics.median(times_ms), names, longest.blocks, longest.threads_per_block)


def own_gpu(
    name: str,
    gpu_type: str | None,
    memory_bytes: int,
    limits: DeviceLimits,
    copy_gbps: float,
    records: Sequence[KernelRecord],
) -> GpuSpec:
    """The GPU of those records under the name that workload files have for it; by default one out of its own name.

    Of a GPU that is not known here the peak rates are the highest that its records reach, which is as much as any
    operator can be told to reach. Convolutions say nothing of arithmetic: they may compute less than they seem to.
    """
    plain = name.removeprefix("NVIDIA ")
    if gpu_type is None:
        same = (spec.gpu_type for spec in GPU_SPECS.values() if spec.name == plain)
        gpu_type = next(same, re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-"))
    known = GPU_SPECS.get(gpu_type)
    if known is not None:
        return known
    return GpuSpec(
        gpu_type,
        name,
        memory_bytes,
        _peak([(one.work.size_bytes, one) for one in records if one.work.op in (*ELEMENTWISE_OPS, *ROW_OPS)]),
        _peak([(one.work.flops, one) for one in records if one.work.op in MATRIX_OPS]),
        limits,
        copy_gbps=copy_gbps,
    )


def _peak(done: Sequence[tuple[float, KernelRecord]]) -> float:
    """In billions a second."""
    if not done:
        raise ProfileError("no operator of every kind fits this GPU: nothing says what it reaches")
    return max(amount / one.latency_ms for amount, one in done) / 1e6
