"""Slices that are as good as each other: a pool has one model set and one speed class per model.

A scheduler of thousands of slices must not look at each of them, so it looks at pools: who is free by a moment
(the lowest order, so that load consolidates and high orders stay idle; or the longest idle), when the next one
will be, and which candidates wait for one. All heaps delete lazily: what is outdated is skipped when it surfaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Generic, Protocol, TypeVar

from fabric.ids import ModelId, SliceId
from policies.batching.base import NEVER_MS, HostedModel
from policies.batching.batch_moments import Table
from policies.batching.matchmaking.speed_classes import SpeedClass
from policies.batching.timers import ENTRIES_MAX, keep_first_of_each


class Waiting(Protocol):
    """A candidate in a pool's queue: an entry counts only while it carries the candidate's own stamp."""

    stamp: int


WaiterT = TypeVar("WaiterT", bound=Waiting)

_GONE_MAX = 16  # more than the slices that are there, and the heaps are worth clearing


class Slice:
    """What is known of one slice. `hosted`: as it was given; `tables`: the run times of the models it hosts, its own ones.

    Of a pipeline `intervals` say when it can start the next batch (`HostedModel`), and `at_once` how many it runs at a time.

    `due_at_ms`: the last moment that was said; it may have passed, and the slice not be free. `is_late`: so it is.

    `order` is unique: the rank the slice was given, then the order of coming.
    """

    __slots__ = (
        "at_once",
        "due_at_ms",
        "free_at_ms",
        "hosted",
        "intervals",
        "is_idle",
        "is_late",
        "is_listed",
        "order",
        "pool",
        "slice_id",
        "tables",
    )

    def __init__(
        self, slice_id: SliceId, order: int, tables: dict[ModelId, Table], free_at_ms: float
    ) -> None:
        self.slice_id = slice_id
        self.order = order
        self.hosted: tuple[HostedModel, ...] = ()
        self.tables = tables
        self.intervals: dict[ModelId, Sequence[float]] = {}
        self.at_once = 1.0
        self.free_at_ms = free_at_ms
        self.due_at_ms = free_at_ms
        self.is_late = False
        self.is_idle = False
        self.is_listed = False  # among its pool's idle ones, idle or not: one entry is enough
        self.pool: Pool[Any] | None = None

    def interval_ms(self, model_id: ModelId, batch_size: int) -> float | None:
        """When the next batch can start behind that one; None: when that one has ended."""
        times_ms = self.intervals.get(model_id)
        return times_ms[batch_size - 1] if times_ms else None


class Pool(Generic[WaiterT]):
    """Slices of one kind and the candidates that wait for one of them.

    `armed_at_ms`: when the slice timer that counts will fire. `lead_max_ms`: at least the delay of every
    candidate that waits, so that a batch can be sent so much before the slice is free. `early` are candidates
    that may go but need not yet; they get a slice only while more than `reserve` are idle, less the `late` ones, which serve nobody. `idle`:
    how many were, when `find` was last asked. `at_once`: how many batches all its slices run at a time.
    """

    __slots__ = (
        "_busy",
        "_gone",
        "_idle",
        "_serial",
        "_waiting_max",
        "armed_at_ms",
        "at_once",
        "classes",
        "early",
        "early_max",
        "idle",
        "is_lowest",
        "late",
        "lead_max_ms",
        "reserve",
        "size",
        "waiting",
    )

    def __init__(self, classes: tuple[SpeedClass, ...], *, is_lowest: bool) -> None:
        self.classes = classes
        self.is_lowest = is_lowest
        self.size = 0
        self.at_once = 0.0
        self.armed_at_ms = NEVER_MS
        self.lead_max_ms = 0.0
        self.waiting: list[tuple[float, int, int, int, WaiterT]] = []
        self.early: list[tuple[float, int, int, WaiterT]] = []
        self.early_max = ENTRIES_MAX
        self._waiting_max = ENTRIES_MAX
        self.reserve = 0
        self.late = 0
        self.idle = 0
        self._busy: list[tuple[float, int, int, Slice]] = []
        self._idle: list[tuple[float, int, Slice]] = []
        self._gone = 0  # slices that left and may still be in the heaps, below others that stay on top
        self._serial = 0

    def join(self, slice_: Slice) -> None:
        """The slice belongs to this pool from now on."""
        slice_.pool = self
        self.late += slice_.is_late
        self.size += 1
        self.at_once += slice_.at_once
        self.free_from(slice_, slice_.free_at_ms)

    def leave(self, slice_: Slice) -> None:
        """The slice belongs to no pool. One less is kept in reserve: as many as before may be taken early."""
        slice_.pool = None
        self.reserve = max(0, self.reserve - 1)
        slice_.is_listed = False
        self.idle -= slice_.is_idle
        self.late -= slice_.is_late
        slice_.is_idle = slice_.is_late = False
        self.size -= 1
        self.at_once -= slice_.at_once
        self._gone += 1
        if self._gone > self.size + _GONE_MAX:
            self._gone = 0
            self._busy = [entry for entry in self._busy if entry[3].pool is self]
            self._idle = [entry for entry in self._idle if entry[2].pool is self]
            heapify(self._busy)
            heapify(self._idle)

    def free_from(self, slice_: Slice, free_at_ms: float) -> None:
        """The slice has, or will have, nothing to do from that moment. Infinite: nobody knows when."""
        slice_.free_at_ms = free_at_ms
        self.idle -= slice_.is_idle
        slice_.is_idle = False
        if free_at_ms < NEVER_MS:  # an entry for never would never surface, and one comes with most batches
            if slice_.is_late:
                slice_.is_late = False
                self.late -= 1
            slice_.due_at_ms = free_at_ms
            self._serial += 1
            heappush(self._busy, (free_at_ms, slice_.order, self._serial, slice_))

    def note_late(self, slice_: Slice) -> None:
        """The slice, of which nobody knows any more when it will be free, should have been by now."""
        slice_.is_late = True
        self.late += 1

    def find(self, horizon_ms: float) -> Slice | None:
        """The best slice that is free by then, or None."""
        busy = self._busy
        idle = self._idle
        while busy and busy[0][0] <= horizon_ms:
            free_at_ms, order, _, slice_ = heappop(busy)
            if slice_.pool is self and not slice_.is_idle and slice_.free_at_ms == free_at_ms:
                slice_.is_idle = True
                self.idle += 1
                if not (self.is_lowest and slice_.is_listed):
                    slice_.is_listed = True
                    heappush(idle, (order if self.is_lowest else free_at_ms, order, slice_))
        while idle:
            rank, _, slice_ = idle[0]
            is_stale = not self.is_lowest and rank != slice_.free_at_ms  # idle, busy, and idle again
            if slice_.pool is not self or not slice_.is_idle or is_stale:
                heappop(idle)
                slice_.is_listed = False
            elif slice_.free_at_ms > horizon_ms:  # looked at with a longer horizon before
                heappop(idle)
                slice_.is_listed = False
                self.free_from(slice_, slice_.free_at_ms)
            else:
                return slice_
        return None

    def next_free_at_ms(self) -> float:
        """When the next slice that is not free will be; asked when `find` has just found none."""
        top = self._next_busy()
        return NEVER_MS if top is None else top.free_at_ms

    def _next_busy(self) -> Slice | None:
        busy = self._busy
        while busy:
            free_at_ms, _, _, slice_ = busy[0]
            if slice_.pool is self and not slice_.is_idle and slice_.free_at_ms == free_at_ms:
                return slice_
            heappop(busy)
        return None

    def wait(self, latest_at_ms: float, priority: int, serial: int, candidate: WaiterT) -> None:
        """Queue a candidate by the last moment it can start; among equals by priority, then first come."""
        waiting = self.waiting
        if len(waiting) >= self._waiting_max:  # outdated entries pile up where no slice comes
            counting = (entry for entry in waiting if entry[3] == entry[4].stamp)
            self._waiting_max = keep_first_of_each(waiting, counting)
        heappush(waiting, (latest_at_ms, -priority, serial, candidate.stamp, candidate))

    def first_waiting(self) -> WaiterT | None:
        """The candidate that is served next, as far as its queued moment says."""
        waiting = self.waiting
        while waiting:
            candidate = waiting[0][4]
            if waiting[0][3] == candidate.stamp:
                return candidate
            heappop(waiting)
        return None

    def wait_again(self, latest_at_ms: float) -> bool:
        """Correct the first candidate's moment to a later one; True if it is still the first."""
        waiting = self.waiting
        _, priority, serial, stamp, candidate = waiting[0]
        heapreplace(waiting, (latest_at_ms, priority, serial, stamp, candidate))
        return waiting[0][4] is candidate and waiting[0][0] == latest_at_ms

    def is_spare(self, horizon_ms: float) -> bool:
        """Whether a slice is idle by then that need not be kept for who cannot wait."""
        return self.find(horizon_ms) is not None and self.idle > self.reserve - self.late
