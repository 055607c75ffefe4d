"""Counts of values by size, in plain lists: what is counted for every request has to cost next to nothing."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

SLO_FRACTIONS: Final = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 0.9375, 1.0, 1.125, 1.25, 1.5, 2.0, 4.0)
"""Upper bounds of the buckets of a latency, as parts of the model's SLO. At 1 it ends to be good."""
SHORT_FRACTIONS: Final = (0.03125, 0.0625, 0.125, 0.25, 0.5, 0.75, 1.0)
"""The same of a part of a latency, such as a wait."""
BATCH_SIZES: Final = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 128.0, 256.0, 512.0)


class Histogram:
    """`counts[i]`: values over `bounds[i - 1]`, up to `bounds[i]`; the last one is of all that are larger."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def note(self, value: float) -> None:
        """Count one."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


def of_slo(slo_ms: float, fractions: Sequence[float]) -> Histogram:
    """An empty one, in ms, whose bounds are these parts of an SLO."""
    return Histogram([slo_ms * fraction for fraction in fractions])
