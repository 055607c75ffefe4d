"""What a role has counted at one moment, as values that another thread may read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roles.runtime.metrics.catalog import Metric
from roles.runtime.metrics.histogram import Histogram

MS: float = 1e-3
"""Everything inside is in ms, everything on the page in seconds."""


@dataclass(slots=True, frozen=True)
class Buckets:
    """A histogram as it was: its upper bounds, how many values are in each bucket, and their sum."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(slots=True, frozen=True)
class Measured:
    """One time series at one moment; `labels` in the order of the metric's."""

    metric: Metric
    labels: tuple[str, ...]
    value: float | Buckets


Snapshot = Sequence[Measured]


def buckets_of(histogram: Histogram, unit: float = MS) -> Buckets:
    """As it is now. `unit`: what one of its own units is on the page."""
    return Buckets(
        tuple([bound * unit for bound in histogram.bounds]), tuple(histogram.counts), histogram.total * unit
    )
