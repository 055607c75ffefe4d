"""What to measure, sans-IO: which batches at which shares, in which order, and the numbers of a sample of run times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fabric.errors import ProfileError
from profiles.igniter.fit import BATCH_SIZES, SHARES_PERCENT
from profiles.model import BATCH_SIZE_LIMIT, WHOLE_GPU_PERCENT


@dataclass(frozen=True, slots=True)
class ShareRuns:
    """One process: its share of the device, and the batch sizes it runs, ascending."""

    share_percent: float
    batch_sizes: tuple[int, ...]
    traced: tuple[int, ...] = ()
    """Of those, the ones whose kernels are looked at."""


def runs_of(
    batch_sizes: Sequence[int], shares: Sequence[float], *, for_igniter: bool = False
) -> list[ShareRuns]:
    """A process for every share, the whole device first; its kernels are looked at there.

    `for_igniter` adds the configurations iGniter's fit needs. Every share gets the same batches: a table has no
    holes. Raises ProfileError for sizes and shares that cannot be.
    """
    sizes = set(batch_sizes) | (set(BATCH_SIZES) if for_igniter else set())
    all_shares = set(shares) | (set(SHARES_PERCENT) if for_igniter else set()) | {WHOLE_GPU_PERCENT}
    if not batch_sizes or not all(1 <= size <= BATCH_SIZE_LIMIT for size in sizes):
        raise ProfileError(f"batch sizes are whole numbers from 1 to {BATCH_SIZE_LIMIT}, at least one")
    if not all(0 < share <= WHOLE_GPU_PERCENT for share in all_shares):
        raise ProfileError("shares are over 0 and at most 100 percent")
    ascending = tuple(sorted(sizes | {1}))  # a table starts at batch 1
    return [
        ShareRuns(share, ascending, ascending if share == WHOLE_GPU_PERCENT else ())
        for share in sorted(all_shares, reverse=True)
    ]


def powers_of_two(largest: int) -> list[int]:
    """1, 2, 4, … and the largest."""
    sizes = [1 << power for power in range(largest.bit_length()) if 1 << power < largest]
    return [*sizes, largest]


def percentile(values: Iterable[float], percent: float) -> float:
    """The smallest value that so many percent of the values do not exceed (nearest rank)."""
    ranked = sorted(values)
    if not ranked:
        raise ProfileError("no run was measured")
    return ranked[max(0, math.ceil(percent / 100 * len(ranked)) - 1)]
