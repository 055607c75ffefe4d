"""What frontends and the scheduler remembered, on the clock of whoever asked them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

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


class ArrivalsSeen:
    """What frontends of one host counted of models, added up bin by bin; bins have numbers on that host's clock.

    Each answer reaches back a minute from its own moment. All models are told over the span that every answer covers, without the
    bin of the first answer's moment, which was not over. `offered`: of each answer's whole minute, as what was bad is counted.
    """

    def __init__(self) -> None:
        self.bin_ms = 0.0
        self.offered: Counter[ModelId] = Counter()
        self._counts: dict[ModelId, Counter[int]] = {}
        self._first, self._end = 0, 1 << 62

    def add(self, model_id: ModelId, told: RequestsRemembered) -> None:
        """An answer that was asked for about that model."""
        self.bin_ms = told.bin_ms
        self.offered[model_id] += sum(told.arrivals)
        first = told.newest_bin + 1 - len(told.arrivals)
        self._first, self._end = max(self._first, first), min(self._end, told.newest_bin)
        counts = self._counts.setdefault(model_id, Counter())
        for number, count in enumerate(told.arrivals, first):
            if count:
                counts[number] += count

    def by_model(self) -> dict[ModelId, list[int]]:
        """Oldest first, all of the same bins."""
        span = range(self._first, self._end)
        return {model_id: [counts[number] for number in span] for model_id, counts in self._counts.items()}


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
