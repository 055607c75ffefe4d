"""What a model's kernels ask of a GPU, from a trace of their launches (thesis section 5.3).

A kernel's blocks are put on multiprocessors (SMs), several to one as far as its threads, registers, shared memory and
the number of blocks allow; blocks that find no SM wait for the next *wave*. From that come the SMs it needs, and with
the durations of one batch's kernels the three metrics by which Usher and its variants place models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from msgspec import Struct

from fabric.errors import ProfileError
from profiles.requirements import Requirements

WARP_THREADS = 32


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What one GPU's SMs hold. `shared_bytes_per_sm` and the registers are those of a whole SM."""

    sm_count: int
    threads_per_sm: int
    blocks_per_sm: int
    registers_per_sm: int
    shared_bytes_per_sm: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch: from `start_ms` for `duration_ms`, on the trace's own clock.

    `occupancy_percent` is the tracer's estimate of the achieved occupancy; None: it made none.
    """

    name: str
    start_ms: float
    duration_ms: float
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    registers_per_thread: int = 0
    shared_bytes: int = 0
    occupancy_percent: float | None = None

    @property
    def blocks(self) -> int:
        """Thread blocks launched."""
        return math.prod(self.grid)

    @property
    def threads_per_block(self) -> int:
        """Threads of one block."""
        return math.prod(self.block)


def blocks_per_sm(kernel: Kernel, limits: DeviceLimits) -> int:
    """How many of its blocks run on one SM at once: the smallest of the thesis' four bounds.

    Raises ProfileError for a launch that the device could not have run.
    """
    threads = kernel.threads_per_block
    bounds = [limits.threads_per_sm // threads, limits.blocks_per_sm]
    if kernel.shared_bytes:  # without any, shared memory is no bound
        bounds.append(limits.shared_bytes_per_sm // kernel.shared_bytes)
    if kernel.registers_per_thread:
        bounds.append(limits.registers_per_sm // (threads * kernel.registers_per_thread))
    if min(bounds) < 1:
        raise ProfileError(
            f"kernel {kernel.name} does not fit on an SM of this device: {threads} threads a block"
        )
    return min(bounds)


def sms_needed(kernel: Kernel, limits: DeviceLimits) -> int:
    """SMs for all its blocks at once; may be more than there are."""
    return math.ceil(kernel.blocks / blocks_per_sm(kernel, limits))


def waves(kernel: Kernel, limits: DeviceLimits) -> int:
    """Rounds in which its blocks are scheduled."""
    return math.ceil(sms_needed(kernel, limits) / limits.sm_count)


def sm_percent(kernel: Kernel, limits: DeviceLimits) -> float:
    """SM utilisation: the SMs it needs of those there are, 100 at most (thesis section 5.3.2)."""
    return min(100.0, 100.0 * sms_needed(kernel, limits) / limits.sm_count)


def occupancy_percent(kernel: Kernel, limits: DeviceLimits) -> float:
    """Active warps of those the whole GPU could hold; by its launch where the tracer made no estimate."""
    if kernel.occupancy_percent is not None:
        return kernel.occupancy_percent
    warps = math.ceil(kernel.threads_per_block / WARP_THREADS)
    resident = min(blocks_per_sm(kernel, limits), kernel.blocks / limits.sm_count)
    return min(100.0, 100.0 * resident * warps / (limits.threads_per_sm / WARP_THREADS))


def requirements_of(
    kernels: Sequence[Kernel], limits: DeviceLimits, memory_percent: float | None = None
) -> Requirements:
    """Usher's metrics of one batch whose kernels these are.

    Achieved occupancy: the largest sum over kernels that overlap. The weighted ones: the sum over each interval
    between starts and ends, times its length, over the time from the first start to the last end, gaps included.
    """
    if not kernels:
        raise ProfileError("a batch without kernels has no occupancy")
    occupancies = list(_sums(kernels, [occupancy_percent(kernel, limits) for kernel in kernels]))
    sms = list(_sums(kernels, [sm_percent(kernel, limits) for kernel in kernels]))
    return Requirements(
        achieved_occupancy_percent=max(value for value, _ in occupancies),
        weighted_occupancy_percent=_mean(occupancies),
        weighted_sm_percent=_mean(sms),
        memory_percent=memory_percent,
    )


class LaunchGaps(Struct, frozen=True):
    """iGniter's scheduling side of one batch: its kernels, and the idle time before each on average."""

    kernels: int
    gap_ms_per_kernel: float
    active_ms: float


def launch_gaps(kernels: Sequence[Kernel]) -> LaunchGaps:
    """How long the GPU sat idle between the kernels of one batch (iGniter's k_sch, section 3.1)."""
    if not kernels:
        raise ProfileError("a batch without kernels has no gaps")
    intervals = list(_sums(kernels, [1.0] * len(kernels)))
    active_ms = math.fsum(length for value, length in intervals if value)
    idle_ms = math.fsum(length for value, length in intervals if not value)
    return LaunchGaps(len(kernels), idle_ms / len(kernels), active_ms)


def _sums(kernels: Sequence[Kernel], values: Sequence[float]) -> Iterable[tuple[float, float]]:
    """(sum of the values of the kernels that run, 100 at most; length in ms) of every interval in the batch."""
    edges = sorted(
        [(kernel.start_ms, value) for kernel, value in zip(kernels, values, strict=True)]
        + [
            (kernel.start_ms + kernel.duration_ms, -value)
            for kernel, value in zip(kernels, values, strict=True)
        ]
    )
    running = 0
    total = 0.0
    for (at_ms, change), (next_ms, _) in pairwise(edges):
        total += change
        running += 1 if change > 0 else -1
        if running == 0:
            total = 0.0  # what rounding left over
        if next_ms > at_ms:
            yield min(100.0, total), next_ms - at_ms


def _mean(intervals: Sequence[tuple[float, float]]) -> float:
    weighted = math.fsum(value * length for value, length in intervals)
    return min(
        100.0, weighted / math.fsum(length for _, length in intervals)
    )  # rounding may lift it over all of them
