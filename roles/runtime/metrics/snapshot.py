"""What a role has counted at one moment, as values that another thread may read. Made on the loop, so cheaply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from msgspec import Struct

from roles.runtime.metrics.catalog import Metric
from roles.runtime.metrics.histogram import Histogram

MS: Final = 1e-3
"""Everything inside is in ms, everything on the page in seconds."""


class Buckets(NamedTuple):
    """A histogram as it was: its upper bounds, how many values are in each bucket, and their sum.

    `unit`: what one of its own units is on the page. Nobody changes the bounds.
    """

    bounds: Sequence[float]
    counts: tuple[int, ...]
    total: float
    unit: float = MS


class Measured(NamedTuple):
    """One time series at one moment; `labels` in the order of the metric's."""

    metric: Metric
    labels: tuple[str, ...]
    value: float | Buckets


Snapshot = Sequence[Measured]


class SnapshotAsked(Struct, frozen=True):
    """The page's thread wants a snapshot: answer with its server's `publish`."""


def buckets_of(histogram: Histogram, unit: float = MS) -> Buckets:
    """As it is now."""
    return Buckets(histogram.bounds, tuple(histogram.counts), histogram.total, unit)
