"""What a batch asks of a GPU beside time: Usher's requirements and gpulet's bandwidths."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from fabric.errors import ProfileError
from profiles.documents import NotNegative


class Requirements(Struct, frozen=True, forbid_unknown_fields=True):
    """What a batch of one size needs of a whole GPU, in percent (Usher section 3.2, thesis section 5.3).

    None where the source does not say. Memory is the largest amount reserved over the GPU's memory.
    """

    achieved_occupancy_percent: NotNegative | None = None
    weighted_occupancy_percent: NotNegative | None = None
    weighted_sm_percent: NotNegative | None = None
    memory_percent: NotNegative | None = None


class Bandwidths(Struct, frozen=True):
    """What a model uses of the GPU's second-level cache and memory, in percent (gpulet section 4.2)."""

    l2_percent: float
    dram_percent: float


class LinearCoefficients(Struct, frozen=True):
    """gpulet's linear model of how two gpulets of one GPU disturb each other (gpulet section 4.2).

    The factor on the solo run time is `constant` plus each coefficient times its utilisation as a fraction of 1.
    `is_scaled_by_share`: the utilisations were measured on the whole GPU, so each counts times its own share.
    """

    l2_self: float
    l2_other: float
    dram_self: float
    dram_other: float
    constant: float
    is_scaled_by_share: bool


class BandwidthTable:
    """Measured bandwidths by share and batch size: linear between them, the nearest measured one outside.

    `columns[share_percent][batch_size]`; one column holds for every share. `linear` are the coefficients that
    were fitted on the same GPU with these utilisations.
    """

    def __init__(self, columns: Mapping[float, Mapping[int, Bandwidths]], linear: LinearCoefficients) -> None:
        if not columns or not all(columns.values()):
            raise ProfileError("a table of bandwidths needs at least one batch size at each of its shares")
        self.linear = linear
        self._shares = sorted(columns)
        self._columns = [columns[share] for share in self._shares]
        self._batch_sizes = [sorted(column) for column in self._columns]

    def at(self, batch_size: int, share_percent: float) -> Bandwidths:
        """What a batch of that size uses at that share."""
        low, high, weight = _between(self._shares, share_percent)
        return _mixed(self._in_column(low, batch_size), self._in_column(high, batch_size), weight)

    def _in_column(self, place: int, batch_size: int) -> Bandwidths:
        column, batch_sizes = self._columns[place], self._batch_sizes[place]
        low, high, weight = _between(batch_sizes, batch_size)
        return _mixed(column[batch_sizes[low]], column[batch_sizes[high]], weight)


class Usage(Struct, frozen=True):
    """What is known of a model beside its run time and its memory; empty where the source is silent.

    `batching_overhead_ms`: what putting a batch of b together takes, at index b - 1.
    """

    requirements: Mapping[int, Requirements] = field(default_factory=dict)
    bandwidths: BandwidthTable | None = None
    batching_overhead_ms: Sequence[float] = ()


def _between(keys: Sequence[float], key: float) -> tuple[int, int, float]:
    """The places of the keys around `key`, and how far it is from the first to the second; ends are kept."""
    high = bisect_left(keys, key)
    if high == 0 or high == len(keys):
        place = min(high, len(keys) - 1)
        return place, place, 0.0
    return high - 1, high, (key - keys[high - 1]) / (keys[high] - keys[high - 1])


def _mixed(low: Bandwidths, high: Bandwidths, weight: float) -> Bandwidths:
    return Bandwidths(
        low.l2_percent + (high.l2_percent - low.l2_percent) * weight,
        low.dram_percent + (high.dram_percent - low.dram_percent) * weight,
    )
