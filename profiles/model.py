"""ModelProfile: what a batch of a model takes on one type of GPU, and how much memory it needs.

Three kinds of it: a line (Symphony's l(b) = alpha b + beta), a table of measured points (linear between
them), and a performance model (`profiles/igniter/performance_model.py`). All answer in milliseconds, never fall as the batch
grows, and refuse to guess outside what they know unless asked to extrapolate.

A profile that was never measured by MPS share holds for every share: how much slower a smaller share is, is
then the interference model's business (`profiles/interference/base.py`).
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Self

from fabric.errors import ProfileError
from profiles.requirements import Bandwidths, Requirements, Usage

BATCH_SIZE_LIMIT = 4_096  # what one frontend has in a batch is one message, with a tensor a request at least
STAGES_MAX = 64  # of a model that is cut: one a GPU
BATCH_SIZE_MAX_DEFAULT = 512  # the contract's max_batch where a line does not say
WHOLE_GPU_PERCENT = 100.0


class ModelProfile(ABC):
    """What a model costs on one type of GPU, alone on it. `source` says where the numbers come from.

    `ref` is its name among the shipped profiles, empty for any other. `error` is how wrong its run times may be, as a
    part of them, where the estimator made them (`profiles/estimator/`); None: it did not.
    """

    def __init__(
        self,
        source: str,
        batch_size_max: int,
        memory_by_batch: Mapping[int, float] | None = None,
        usage: Usage | None = None,
        ref: str = "",
        error: float | None = None,
    ) -> None:
        if not 1 <= batch_size_max <= BATCH_SIZE_LIMIT:
            raise ProfileError(f"max_batch is {batch_size_max}; it must be from 1 to {BATCH_SIZE_LIMIT}")
        self.source = source
        self.ref = ref
        self.error = error
        self.batch_size_max = batch_size_max
        self.usage = usage or Usage()
        self._memory = _Points(rising(memory_by_batch or {1: 0.0}))
        self.cuts: Mapping[int, tuple[float, ...]] = {}
        """By number of stages: what each stage of the model, cut so, takes for one request, in ms."""
        self._tables: dict[float | None, tuple[float, ...]] = {}

    def with_cuts(self, cuts: Mapping[int, Sequence[float]]) -> Self:
        """The same, for a model that can be cut into stages; `cuts[k]` are the times of its k stages for one request, in ms.

        Raises ProfileError where a cut is none.
        """
        for count, stages_ms in cuts.items():
            if not 2 <= count <= STAGES_MAX:
                raise ProfileError(f"a cut has 2 to {STAGES_MAX} stages, not {count}")
            if len(stages_ms) != count:
                raise ProfileError(
                    f"the cut into {count} stages has {len(stages_ms)} times; it needs one a stage"
                )
            if not all(math.isfinite(ms) and ms > 0 for ms in stages_ms):
                raise ProfileError(
                    f"the cut into {count} stages has times that are not over 0: {list(stages_ms)}"
                )
        found = copy.copy(self)
        found.cuts = {count: tuple(stages_ms) for count, stages_ms in sorted(cuts.items())}
        return found

    def stage_tables(self, stages: int) -> tuple[tuple[float, ...], ...]:
        """l(b) of each stage at index b - 1, in ms; 1: of the whole model. All stages grow with the batch as the whole model does.

        Raises ProfileError where the model is not cut so.
        """
        if stages == 1:
            return (self.exec_table(),)
        cut = self.cuts.get(stages)
        if cut is None:
            known = ", ".join(map(str, self.cuts)) or "none"
            raise ProfileError(f"there is no cut into {stages} stages; known ones: {known} ({self.source})")
        table = self.exec_table()
        return tuple(tuple(alone_ms * ms / table[0] for ms in table) for alone_ms in cut)

    def exec_ms(
        self, batch_size: int, share_percent: float | None = None, *, extrapolate: bool = False
    ) -> float:
        """l(b): run time in ms of a batch of `batch_size` with that MPS share (None: no limit).

        Raises ProfileError for a batch over `batch_size_max` or a share outside the measured ones;
        `extrapolate` follows the last slope (batch) and l ∝ 1/share below the smallest share instead.
        """
        if batch_size < 1:
            raise ProfileError(f"a batch has at least one request, not {batch_size}")
        if batch_size > self.batch_size_max and not extrapolate:
            raise ProfileError(
                f"batch {batch_size} is over the largest one profiled, {self.batch_size_max} ({self.source})"
            )
        share = WHOLE_GPU_PERCENT if share_percent is None else share_percent
        if not 0 < share <= WHOLE_GPU_PERCENT:
            raise ProfileError(f"an MPS share is over 0 and at most 100 percent, not {share:g}")
        smallest = self.share_percent_min
        if share >= smallest:
            return self._exec_ms(batch_size, share)
        if not extrapolate:
            raise ProfileError(
                f"share {share:g} % is under the smallest one profiled, {smallest:g} % ({self.source})"
            )
        return self._exec_ms(batch_size, smallest) * smallest / share

    def exec_table(self, share_percent: float | None = None) -> tuple[float, ...]:
        """l(b) for b = 1 … `batch_size_max` at index b - 1, in ms."""
        table = self._tables.get(share_percent)
        if table is None:
            table = tuple(self.exec_ms(b, share_percent) for b in range(1, self.batch_size_max + 1))
            self._tables[share_percent] = table
        return table

    def memory_bytes(self, batch_size: int) -> int:
        """Device memory in use while a batch of up to that size runs; 0 where the source does not say."""
        return math.ceil(self._memory.clamped(batch_size))

    @property
    def requirements(self) -> Mapping[int, Requirements]:
        """Usher's metrics at the batch sizes that were profiled; empty where the source is silent."""
        return self.usage.requirements

    def bandwidths(self, batch_size: int, share_percent: float | None = None) -> Bandwidths | None:
        """What a batch uses of the L2 cache and memory at that MPS share (None: no limit).

        None where the source does not say. Linear between measured batch sizes and shares, the nearest
        measured one outside.
        """
        table = self.usage.bandwidths
        if table is None:
            return None
        return table.at(batch_size, WHOLE_GPU_PERCENT if share_percent is None else share_percent)

    @property
    def share_percent_min(self) -> float:
        """The smallest MPS share this profile speaks about; 0 where it holds for every share."""
        return 0.0

    @abstractmethod
    def _exec_ms(self, batch_size: int, share_percent: float) -> float:
        """l(b) for a share that is not below `share_percent_min`; follows the last slope past the end."""


class LinearProfile(ModelProfile):
    """l(b) = alpha_ms * b + beta_ms (Symphony section 3.2)."""

    def __init__(
        self,
        alpha_ms: float,
        beta_ms: float,
        batch_size_max: int = BATCH_SIZE_MAX_DEFAULT,
        *,
        source: str = "given as alpha_ms and beta_ms",
        ref: str = "",
    ) -> None:
        for name, value in (("alpha_ms", alpha_ms), ("beta_ms", beta_ms)):
            if not (math.isfinite(value) and value >= 0):
                raise ProfileError(f"{name} is {value:g}; it must be a finite number of ms, 0 or more")
        if alpha_ms + beta_ms <= 0:
            raise ProfileError("alpha_ms and beta_ms are both 0: a batch must take some time")
        super().__init__(source, batch_size_max, ref=ref)
        self.alpha_ms = alpha_ms
        self.beta_ms = beta_ms

    def _exec_ms(self, batch_size: int, share_percent: float) -> float:  # noqa: ARG002  holds for every share
        return self.alpha_ms * batch_size + self.beta_ms


class TableProfile(ModelProfile):
    """Measured points, linear between them; the last batch size is the largest.

    `columns[share_percent][batch_size]` is in ms; a single column of 100 % holds for every share, several are
    joined linearly (never too low: run time is convex in the share). A table starts at batch 1; one that was
    measured from a larger size on says `is_padded`: a smaller batch then takes what the first one takes, as
    if it were filled up with empty rows.
    """

    def __init__(
        self,
        columns: Mapping[float, Mapping[int, float]],
        *,
        source: str = "given as a table",
        memory_by_batch: Mapping[int, float] | None = None,
        is_padded: bool = False,
        usage: Usage | None = None,
        ref: str = "",
        error: float | None = None,
    ) -> None:
        if not columns:
            raise ProfileError(f"the table is empty ({source})")
        self._shares = sorted(columns)
        if not (self._shares[0] > 0 and self._shares[-1] <= WHOLE_GPU_PERCENT):
            raise ProfileError(
                f"shares must be over 0 and at most 100 percent, not {self._shares} ({source})"
            )
        self._columns = [_checked(columns[share], is_padded=is_padded) for share in self._shares]
        if len({tuple(column.keys) for column in self._columns}) > 1:
            raise ProfileError(f"every share must be measured at the same batch sizes ({source})")
        super().__init__(source, self._columns[0].keys[-1], memory_by_batch, usage, ref, error)

    @property
    def columns(self) -> dict[float, dict[int, float]]:
        """The measured points, as given: share in percent, batch size, ms."""
        pairs = zip(self._shares, self._columns, strict=True)
        return {share: dict(zip(column.keys, column.values, strict=True)) for share, column in pairs}

    @property
    def share_percent_min(self) -> float:
        """The smallest measured share; 0 for a table that knows only the whole GPU."""
        return 0.0 if self._shares == [WHOLE_GPU_PERCENT] else self._shares[0]

    def _exec_ms(self, batch_size: int, share_percent: float) -> float:
        place = bisect_left(self._shares, share_percent)
        if place == len(self._shares):  # more than was measured: at least as fast as the largest share
            return self._columns[-1].extended(batch_size)
        above = self._columns[place].extended(batch_size)
        if place == 0:
            return above
        below = self._columns[place - 1].extended(batch_size)
        weight = (share_percent - self._shares[place - 1]) / (self._shares[place] - self._shares[place - 1])
        return below + (above - below) * weight


def table_of(entries: Mapping[str | int, float], source: str = "given as a table") -> TableProfile:
    """A table of the whole GPU as people write it: batch size (a number or its text) to ms."""
    points: dict[int, float] = {}
    for key, value in entries.items():
        text = str(key)
        if not (text.isascii() and text.isdigit() and 1 <= int(text) <= BATCH_SIZE_LIMIT):
            raise ProfileError(
                f"{text[:40]!r} is not a batch size (a whole number from 1 to {BATCH_SIZE_LIMIT})"
            )
        if int(text) in points:
            raise ProfileError(f"batch {text} is in the table twice")
        points[int(text)] = value
    return TableProfile({WHOLE_GPU_PERCENT: points}, source=source)


def rising(column: Mapping[int, float]) -> dict[int, float]:
    """Values by batch size, where less was measured at a larger batch that of the smaller one."""
    sizes = sorted(column)
    return dict(zip(sizes, accumulate((column[size] for size in sizes), max), strict=True))


class _Points:
    """Values at ascending whole numbers, which never fall, linear between them."""

    __slots__ = ("keys", "values")

    def __init__(self, points: Mapping[int, float]) -> None:
        self.keys: Sequence[int] = sorted(points)
        self.values: Sequence[float] = [points[key] for key in self.keys]

    def clamped(self, key: int) -> float:
        """The value at `key`; that of the nearest end outside."""
        return self.values[-1] if key > self.keys[-1] else self.extended(key)

    def extended(self, key: int) -> float:
        """The value at `key`; below the first that of the first, past the last along the last slope."""
        place = min(bisect_left(self.keys, key), len(self.keys) - 1)
        if place == 0 and key <= self.keys[0]:
            return self.values[0]
        if place == 0:  # a single point knows no slope: in proportion, which is never too low
            return self.values[0] * key / self.keys[0]
        if self.keys[place] == key:
            return self.values[place]
        low, high = self.keys[place - 1], self.keys[place]
        slope = (self.values[place] - self.values[place - 1]) / (high - low)
        # Counted from the nearer known end, so that rounding never makes the result fall along the line.
        if key > high:
            return self.values[place] + slope * (key - high)
        return min(self.values[place - 1] + slope * (key - low), self.values[place])


def _checked(column: Mapping[int, float], *, is_padded: bool) -> _Points:
    """The points, or ProfileError naming the entries that cannot be."""
    if not column:
        raise ProfileError("the table is empty; it needs at least an entry for batch 1")
    points = _Points(column)
    for batch_size, exec_ms in zip(points.keys, points.values, strict=True):
        if not (math.isfinite(exec_ms) and exec_ms > 0):
            raise ProfileError(f"batch {batch_size} takes {exec_ms:g} ms; every entry must be over 0")
    if points.keys[0] != 1 and not is_padded:
        raise ProfileError(
            f"the table has a hole: it starts at batch {points.keys[0]} and says nothing about smaller ones; "
            "it needs an entry for batch 1"
        )
    falls = [
        f"batch {points.keys[i + 1]} takes {points.values[i + 1]:g} ms, "
        f"less than batch {points.keys[i]} with {points.values[i]:g} ms"
        for i in range(len(points.keys) - 1)
        if points.values[i + 1] < points.values[i]
    ]
    if falls:
        raise ProfileError("the table is not monotone: " + "; ".join(falls))
    return points
