"""What frontends and the scheduler remembered, on the clock of whoever asked them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fabric.ids import BatchId, ModelId, SliceId
from fabric.messages import (
    BatchEntry,
    BatchesRemembered,
    Ledger,
    RequestRecord,
    RequestsRemembered,
    SliceAbsence,
)
from roles.runtime.metrics.catalog import CLIENT_FAULTS

SAME_CLOCK_MS: Final = 50.0
"""Hosts that were started within so short a time of each other are taken for one."""
SECOND_MS: Final = 1_000.0
"""Frontends count what was bad in bins as wide."""


@dataclass(frozen=True, slots=True)
class BatchSeen:
    """A batch. Moments are on the asker's clock; `entry` has the durations."""

    entry: BatchEntry
    sent_at_ms: float
    started_at_ms: float
    ended_at_ms: float

    @property
    def model_id(self) -> ModelId:
        """Of its requests."""
        return self.entry.model_id

    @property
    def slice_id(self) -> SliceId:
        """Where it ran."""
        return self.entry.slice_id

    @property
    def gpu(self) -> str:
        """`node/gpu0`."""
        return gpu_of(self.entry.slice_id)

    @property
    def has_run(self) -> bool:
        """Whether it was launched and came to its end."""
        return self.entry.status == "ok" and self.entry.exec_ms > 0

    def overlap_ms(self, from_ms: float, until_ms: float) -> float:
        """How long it ran within a span."""
        return max(0.0, min(until_ms, self.ended_at_ms) - max(from_ms, self.started_at_ms))


@dataclass(frozen=True, slots=True)
class RequestSeen:
    """A request that has had its answer."""

    record: RequestRecord
    asked_at_ms: float
    ended_at_ms: float

    @property
    def ledger(self) -> Ledger:
        """Where its time went, as far as it is known."""
        return self.record.ledger

    @property
    def batch_id(self) -> BatchId:
        """Of its last grant; 0: it had none."""
        return self.record.batch_id

    @property
    def is_good(self) -> bool:
        """Whether it was answered within its budget."""
        return self.record.outcome == "good"

    @property
    def is_bad(self) -> bool:
        """Whether the service is to blame."""
        return not self.is_good and self.record.outcome not in CLIENT_FAULTS

    @property
    def has_run(self) -> bool:
        """Whether it was answered with outputs."""
        return self.record.outcome in ("good", "late")


@dataclass(frozen=True, slots=True)
class AbsenceSeen:
    """A slice took no batches. `ended_at_ms` None: it does not yet."""

    entry: SliceAbsence
    began_at_ms: float
    ended_at_ms: float | None

    @property
    def slice_id(self) -> SliceId:
        """Which one."""
        return self.entry.slice_id


class CountsSeen:
    """What frontends counted of models, added up bin by bin; bins have numbers on the asker's clock.

    Each answer reaches back a minute from its own moment. Arrivals are told over the span that every answer covers, without the
    bin of the first answer's moment, which was not over. What was bad is known by the second, so it is set against what came in
    whole seconds.
    """

    def __init__(self) -> None:
        self.bin_ms = 0.0
        self._arrivals: defaultdict[ModelId, Counter[int]] = defaultdict(Counter)
        self._bad: defaultdict[ModelId, Counter[int]] = defaultdict(Counter)
        self._unserved: defaultdict[ModelId, Counter[int]] = defaultdict(Counter)
        self._first, self._end = 0, 1 << 62

    def add(self, model_id: ModelId, told: RequestsRemembered, zero_ms: float) -> None:
        """A frontend's answer that was asked for about that model; nothing where it does not serve it.

        `zero_ms`: when its clock was at 0, one for all its answers: the least of what `zero_of_clock_ms` says of each.
        """
        if not told.arrivals or not told.bin_ms:
            return
        self.bin_ms = told.bin_ms
        newest = told.newest_bin + round(zero_ms / told.bin_ms)
        first = newest + 1 - len(told.arrivals)
        self._first, self._end = max(self._first, first), min(self._end, newest)
        _add(self._arrivals[model_id], first, 1, told.arrivals)
        in_second = round(SECOND_MS / told.bin_ms)
        second = newest - told.newest_bin % in_second
        # An older frontend tells of the whole minute alone: it counts as of the last second that was over.
        for counts, its in (
            (self._bad[model_id], told.bad_by_second or (told.bad, 0)),
            (self._unserved[model_id], told.unserved_by_second or (told.unserved, 0)),
        ):
            _add(counts, second - (len(its) - 1) * in_second, in_second, its)

    def by_model(self) -> dict[ModelId, list[int]]:
        """Arrivals, oldest first, all of the same bins."""
        span = range(self._first, self._end)
        return {model_id: [counts[number] for number in span] for model_id, counts in self._arrivals.items()}

    def counted_ms(self, span_ms: float) -> float:
        """How long the whole seconds are that the newest `span_ms` is in, and that every answer covers: at least one."""
        return len(self._whole_seconds(span_ms)) * self.bin_ms if self.bin_ms else span_ms

    def offered(self, span_ms: float) -> Mapping[ModelId, int]:
        """What came in these seconds."""
        return self._newest(self._arrivals, span_ms)

    def bad(self, span_ms: float) -> Mapping[ModelId, int]:
        """How many were late or refused in them, through no fault of their client's."""
        return self._newest(self._bad, span_ms)

    def unserved(self, span_ms: float) -> Mapping[ModelId, int]:
        """How many of the bad ones found no slice, or lost theirs."""
        return self._newest(self._unserved, span_ms)

    def _newest(self, counts: Mapping[ModelId, Counter[int]], span_ms: float) -> dict[ModelId, int]:
        if not counts:
            return {}
        span = self._whole_seconds(span_ms)
        return {
            model_id: sum(count for number, count in its.items() if number in span)
            for model_id, its in counts.items()
        }

    def _whole_seconds(self, span_ms: float) -> range:
        in_second = round(SECOND_MS / self.bin_ms)
        end = self._end - self._end % in_second
        since = self._end - round(span_ms / self.bin_ms)
        since -= since % in_second
        oldest = self._first + -self._first % in_second
        return range(min(max(since, oldest), end - in_second), end)


def _add(counts: Counter[int], first: int, step: int, its: Sequence[int]) -> None:
    for at, count in enumerate(its):
        if count:
            counts[first + at * step] += count


def zero_of_clock_ms(told: RequestsRemembered, now_ms: float) -> float:
    """When the frontend's clock was at 0, on the asker's, to within the way of its answer, which came just now: 0 on the same host.

    An answer that was long on its way makes it later, never earlier.
    """
    zero_ms = now_ms - (told.newest_bin + 1) * told.bin_ms
    return 0.0 if abs(zero_ms) < SAME_CLOCK_MS else zero_ms


def gpu_of(slice_id: SliceId) -> str:
    """The GPU that a slice is on: its name less the number of the slice."""
    return slice_id.rpartition("/")[0]


def batches_seen(remembered: BatchesRemembered, now_ms: float) -> list[BatchSeen]:
    """As they were `now_ms` ago, newest first."""
    found = []
    for entry in remembered.batches:
        ended_at_ms = now_ms - entry.ended_ago_ms
        found.append(BatchSeen(entry, now_ms - entry.sent_ago_ms, ended_at_ms - entry.exec_ms, ended_at_ms))
    return found


def absences_seen(remembered: BatchesRemembered, now_ms: float) -> list[AbsenceSeen]:
    """Likewise, oldest first."""
    return [
        AbsenceSeen(
            entry,
            now_ms - entry.began_ago_ms,
            None if entry.ended_ago_ms is None else now_ms - entry.ended_ago_ms,
        )
        for entry in remembered.absences
    ]


def requests_seen(remembered: RequestsRemembered, now_ms: float) -> list[RequestSeen]:
    """Likewise."""
    found = []
    for record in remembered.requests:
        ended_at_ms = now_ms - record.ended_ago_ms
        found.append(RequestSeen(record, ended_at_ms - record.ledger.total_ms, ended_at_ms))
    return found


def batch_of(request: RequestSeen, batches: Sequence[BatchSeen]) -> BatchSeen | None:
    """The batch that it was granted to last, where that is remembered."""
    if not request.batch_id:
        return None
    return next((one for one in batches if one.entry.batch_id == request.batch_id), None)
