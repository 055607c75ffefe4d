"""What became of a scheduler's batches: counted by model and slice, and the newest ones remembered.

`Batches` tells it of each dispatch, drop and end: so it costs per batch, never per request. Nothing here decides.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from itertools import islice, takewhile
from typing import Final, NamedTuple

from fabric.ids import BatchId, ModelId, SliceId
from fabric.limits import ago_ms
from fabric.messages import BatchEntry, BatchesRemembered, Done, RecordsAsked
from policies.batching.base import Dispatch
from roles.runtime.metrics.histogram import BATCH_SIZES, Histogram
from roles.scheduler.fleet import Flight

EXPIRED: Final = "expired"
FOR_BATCH: Final = "batch"
OVER_SHARE: Final = "share"
SLICES_MAX: Final = 65_536
BATCHES_MAX: Final = 8_192
"""Remembered, each in some 400 bytes."""
RECORDS_MAX: Final = 512
"""In one answer: batches wait while it is put together, for about a millisecond."""


class _Ended(NamedTuple):
    number: int
    batch_id: BatchId
    model_id: ModelId
    slice_id: SliceId
    batch_size: int
    status: str
    reason: str
    sent_at_ms: float
    ended_at_ms: float
    planned_ms: float
    table_ms: float
    exec_ms: float
    transfer_ms: float
    queue_ms: float
    waited_ms: float


class BatchRecorder:
    """One scheduler's, since it became active."""

    def __init__(self) -> None:
        self.reasons: Counter[tuple[ModelId, str]] = Counter()
        self.sizes: defaultdict[ModelId, Histogram] = defaultdict(lambda: Histogram(BATCH_SIZES))
        self.drops: Counter[tuple[ModelId, str]] = Counter()
        self.ends: Counter[tuple[SliceId, str]] = Counter()
        self.busy_ms: defaultdict[tuple[SliceId, ModelId], float] = defaultdict(float)
        self.gpu_busy_ms: defaultdict[tuple[str, int], float] = defaultdict(float)
        self.number = 1
        """Of the newest batch that has ended, from 2 on: who asks for all after 1 gets all, without the plan."""
        self._ended: deque[_Ended] = deque(maxlen=BATCHES_MAX)

    def dispatched(self, dispatch: Dispatch) -> None:
        """A batch was sent."""
        model_id = dispatch.model_id
        self.reasons[model_id, dispatch.reason] += 1
        self.sizes[model_id].note(dispatch.batch_size)

    def dropped(self, model_id: ModelId, reason: str, count: int) -> None:
        """Requests were given up."""
        self.drops[model_id, reason] += count

    def ended(self, message: Done, flight: Flight, ended_at_ms: float) -> None:
        """A batch has ended, or was not launched."""
        record = flight.record
        self.number += 1
        size = message.ran or flight.batch_size
        self._ended.append(
            _Ended(
                self.number,
                flight.batch_id,
                flight.model_id,
                record.spec.slice_id,
                size,
                message.status,
                flight.reason,
                flight.sent_at_ms,
                ended_at_ms,
                flight.exec_ms,
                record.exec_ms(flight.model_id, size) or 0.0,
                message.exec_ms,
                message.transfer_ms,
                message.queue_ms,
                flight.waited_ms,
            )
        )
        spec = record.spec
        if len(self.ends) > SLICES_MAX:  # of many slices that came and went, and nobody asked
            self.ends.clear()
            self.busy_ms.clear()
        self.ends[spec.slice_id, message.status] += 1
        if message.exec_ms:
            self.busy_ms[spec.slice_id, flight.model_id] += message.exec_ms
            share = 1.0 if spec.share_percent is None else spec.share_percent / 100
            gpus = spec.gpus
            each_ms = message.exec_ms * share
            if spec.is_pipeline:  # its stages take about equally long
                each_ms /= len(gpus)
            for gpu in gpus:
                self.gpu_busy_ms[record.node_id, gpu] += each_ms

    def remembered(self, asked: RecordsAsked, now_ms: float) -> BatchesRemembered:
        """What an operator asks for, newest first: batches of all models, as they compete."""
        new = takewhile(lambda one: one.number > asked.after, reversed(self._ended))
        fitting = (one for one in new if one.number < asked.before)
        batches = tuple(_entry(one, now_ms) for one in islice(fitting, RECORDS_MAX))
        return BatchesRemembered(batches, after=asked.after)

    def keep_models(self, model_ids: set[ModelId]) -> None:
        """Others are served no more; of one that goes now, batches may still end."""
        for gone in self.sizes.keys() - model_ids:
            del self.sizes[gone]
        for counted in (self.reasons, self.drops):
            for key in [key for key in counted if key[0] not in model_ids]:
                del counted[key]
        for busy in [busy for busy in self.busy_ms if busy[1] not in model_ids]:
            del self.busy_ms[busy]

    def keep_slices(self, slice_ids: set[SliceId]) -> None:
        """Others are gone: their figures have been shown often enough."""
        for end in [key for key in self.ends if key[0] not in slice_ids]:
            del self.ends[end]
        for busy in [key for key in self.busy_ms if key[0] not in slice_ids]:
            del self.busy_ms[busy]


def _entry(one: _Ended, now_ms: float) -> BatchEntry:
    return BatchEntry(*one[:7], ago_ms(now_ms, one.sent_at_ms), ago_ms(now_ms, one.ended_at_ms), *one[9:])
