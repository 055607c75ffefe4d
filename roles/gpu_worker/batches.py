"""The batches granted to one slice, sans-IO: which inputs came, what may start now, what is too late.

RunBatch and Inputs race on different sockets, so a batch is put together here. When it may start is `batch_start_rules.py`'s to say.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from fabric.ids import BatchId, FrontendId, ModelId
from fabric.limits import ago_ms
from fabric.messages import Inputs, Part, RunBatch
from roles.gpu_worker.batch_start_rules import may_start_at_ms, start_moments
from roles.runtime.core import NO_PAYLOAD, Handle


class PartInputs(Struct, frozen=True):
    """What came for one part. `cut` (first, of): only `live_seqs` of the payload's `of` requests, from `first` on.

    `heads`: which one each request is for, of a model that has any.
    """

    live_seqs: tuple[int, ...]
    payload: Handle
    cut: tuple[int, int] | None = None
    heads: tuple[ModelId, ...] = ()


@dataclass(slots=True)
class Batch:
    """One granted batch; moments on our clock."""

    run: RunBatch
    received_at_ms: float
    start_at_ms: float
    latest_at_ms: float
    expires_at_ms: float
    inputs: dict[int, PartInputs] = field(default_factory=dict)
    complete_at_ms: float = 0.0
    """When the last input came (while incomplete: so far); before RunBatch itself counts as then."""
    started_at_ms: float = 0.0
    rows: range = range(0)
    """What runs now, or is to run on the device."""
    rest: list[range] = field(default_factory=list)
    """What is still to run, apart, after the model raised on all of it together."""
    failure: str = ""
    """Why it is run apart."""
    ran: int = 0
    """Rows that have run apart, and `exec_ms` for how long."""
    exec_ms: float = 0.0
    overdue_at_ms: float = math.inf
    """When what runs has hung."""
    between_ms: float = 0.0
    """What it has waited between the stages of a pipeline."""
    is_recalled: bool = False
    """The device was asked for it back, and has not answered."""
    is_preempted: bool = False
    """The scheduler wants it no more."""

    @property
    def is_complete(self) -> bool:
        """Whether every part is in."""
        return len(self.inputs) == len(self.run.parts)

    @property
    def has_live(self) -> bool:
        """Whether a part that is in has a live request."""
        return any(part.live_seqs for part in self.inputs.values())

    @property
    def is_dead(self) -> bool:
        """Every part is in and none has a live request."""
        return self.is_complete and not self.has_live

    @property
    def all_rows(self) -> range:
        """A row is a live request, counted over the parts in their order."""
        return range(sum([len(part.live_seqs) for part in self.inputs.values()]))

    @property
    def may_start_at_ms(self) -> float:
        """The moment at which it goes, as things stand, even if it is not the first in line."""
        return may_start_at_ms(
            self.start_at_ms,
            self.latest_at_ms,
            self.expires_at_ms,
            is_complete=self.is_complete,
            has_live=self.has_live,
        )

    def wants(self, inputs: Inputs) -> bool:
        """Whether these inputs are a part of the batch that has not come yet."""
        if not 0 <= inputs.part < len(self.run.parts) or inputs.part in self.inputs:
            return False
        part = self.run.parts[inputs.part]
        return (
            inputs.frontend_id == part.frontend_id
            and inputs.model_id == self.run.model_id
            and len(inputs.heads) in (0, len(inputs.live_seqs))
            and _are_of(inputs.live_seqs, part)
        )

    def has(self, inputs: Inputs) -> bool:
        """Whether that part is in already."""
        return inputs.part in self.inputs and inputs.frontend_id == self.run.parts[inputs.part].frontend_id

    def accept(self, inputs: Inputs, payload: Handle, now_ms: float) -> None:
        """Take a part the batch `wants`."""
        self.inputs[inputs.part] = PartInputs(inputs.live_seqs, payload, heads=inputs.heads)
        self.complete_at_ms = now_ms

    def live(self) -> Iterator[tuple[FrontendId, PartInputs]]:
        """The parts that bring requests, in the order of their numbers: the order of the job's rows."""
        for number in sorted(self.inputs):
            if self.inputs[number].live_seqs:
                yield self.run.parts[number].frontend_id, self.inputs[number]

    def running(self) -> Iterator[tuple[FrontendId, PartInputs]]:
        """What of the live parts is in `rows`."""
        first = 0
        for frontend_id, part in self.live():
            count = len(part.live_seqs)
            low, high = max(self.rows.start - first, 0), min(self.rows.stop - first, count)
            if high - low == count:
                yield frontend_id, part
            elif low < high:
                seqs, heads = part.live_seqs[low:high], part.heads[low:high]
                yield frontend_id, PartInputs(seqs, part.payload, (low, count), heads)
            first += count

    def halve(self, reason: str) -> None:
        """The model raised on `rows`: they are run again in halves, the first one next."""
        middle = (self.rows.start + self.rows.stop) // 2
        self.rest[:0] = [range(self.rows.start, middle), range(middle, self.rows.stop)]
        self.failure = reason

    def payloads(self) -> list[Handle]:
        """Everything kept for the batch."""
        return [part.payload for part in self.inputs.values() if part.payload != NO_PAYLOAD]

    def missing(self) -> tuple[Part, ...]:
        """The parts that have not come."""
        return tuple(part for number, part in enumerate(self.run.parts) if number not in self.inputs)

    @property
    def transfer_ms(self) -> float:
        """From RunBatch to the last input."""
        return ago_ms(self.complete_at_ms, self.received_at_ms)

    @property
    def queue_ms(self) -> float:
        """From the last input (or RunBatch, if later) to the start, and in a pipeline also from stage to stage."""
        return self._queued_ms(self.complete_at_ms)

    @property
    def awaited_ms(self) -> tuple[float, float]:
        """`transfer_ms` and `queue_ms`; what is missing counts as in from when the batch could go without it."""
        until_ms = self.complete_at_ms
        if not self.is_complete:
            until_ms = max(until_ms, self.may_start_at_ms)
        return ago_ms(until_ms, self.received_at_ms), self._queued_ms(until_ms)

    def _queued_ms(self, from_ms: float) -> float:
        return ago_ms(self.started_at_ms + self.between_ms, from_ms)


def granted(run: RunBatch, late_ms: float, now_ms: float) -> Batch:
    """Put a RunBatch that is `late_ms` old on our clock."""
    return Batch(run, now_ms, *start_moments(run, now_ms - late_ms), complete_at_ms=now_ms)


class BatchQueue:
    """Waiting batches of one slice in order of start, the one that runs, and those that a pipeline's later stages have.

    One of those that wait may have been handed over: the device begins it by itself when it is free (ADR 0300).
    """

    def __init__(self) -> None:
        self.running: Batch | None = None
        """What keeps the slice from starting another one: on the device, or in a pipeline's first stage."""
        self.ahead: Batch | None = None
        """Of those that wait, the one that the device has got behind `running`."""
        self._passed: list[Batch] = []  # in later stages
        self._behind: list[Batch] = []  # run apart, and on the device behind `running`
        self._waiting: list[Batch] = []
        self._looked_at_ms = -math.inf
        """When it was last asked which one starts next."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self.started)

    def __iter__(self) -> Iterator[Batch]:
        """All that have not ended."""
        return iter((*self.started, *self._waiting))

    @property
    def started(self) -> list[Batch]:
        """Those that have started and not ended, in the order of their starts."""
        on_device = self._behind if self.running is None else [*self._behind, self.running]
        return [*self._passed, *on_device]

    def started_as(self, batch_id: BatchId, now_ms: float) -> Batch:
        """One of them, which is there: an executor speaks of what it was given and has not ended."""
        if self.ahead is not None and self.ahead.run.batch_id == batch_id:
            self.start(self.ahead, now_ms)
        return next(batch for batch in self.started if batch.run.batch_id == batch_id)

    def find(self, batch_id: BatchId) -> Batch | None:
        """A batch that has not ended."""
        return next((batch for batch in self if batch.run.batch_id == batch_id), None)

    def has(self, model_id: ModelId) -> bool:
        """Whether a batch of the model has not ended."""
        return any(batch.run.model_id == model_id for batch in self)

    def leave_first_stage(self, batch_id: BatchId) -> bool:
        """That batch is in a later stage from now on; False where it was before, as one that is run apart."""
        if self.running is None or self.running.run.batch_id != batch_id:
            return False
        self._passed.append(self.running)
        self.running = None
        return True

    def has_left_first_stage(self, batch: Batch) -> bool:
        """Whether that one is in a later stage, which is another process's."""
        return batch in self._passed

    def go_on(self, failed: Batch, now_ms: float) -> Batch | None:
        """A run of that batch is over, though more of it is to run; what the device has begun by itself, if it had anything."""
        began = self.ahead
        if failed is not self.running or (began is None and not self._behind):
            return None
        self._behind.append(failed)
        self.running = None
        if began is None:
            return self.next_behind()
        self.start(began, now_ms)
        return began

    @property
    def has_behind(self) -> bool:
        """Whether something that is run apart waits for the device."""
        return bool(self._behind)

    def begin_again(self, batch: Batch) -> None:
        """One that has started is on the device once more, in a pipeline from the first stage on, and comes behind what is there."""
        if batch in self._passed:
            self._passed.remove(batch)
            self._behind.append(batch)
        self.next_behind()

    def next_behind(self) -> Batch | None:
        """The device is free for what is run apart; the batch of which that is, if there is one."""
        if self.running is None and self._behind:
            self.running = self._behind.pop(0)
            return self.running
        return None

    def end(self, batch: Batch) -> None:
        """One that the device had is over."""
        if self.running is batch:
            self.running = None
        elif self.ahead is batch:
            self._leave(batch)
        else:
            (self._passed if batch in self._passed else self._behind).remove(batch)

    def add(self, batch: Batch) -> None:
        """Take a newly granted batch."""
        bisect.insort(self._waiting, batch, key=lambda other: (other.start_at_ms, other.run.batch_id))

    def remove(self, batch: Batch) -> None:
        """Give up one that waits."""
        self._waiting.remove(batch)

    def take_ended(self, now_ms: float) -> Sequence[Batch]:
        """Remove what will never run: dead ones, and expired ones."""
        ended = [
            batch
            for batch in self._waiting
            if batch is not self.ahead and (batch.is_dead or batch.expires_at_ms <= now_ms)
        ]
        if ended:
            self._waiting = [batch for batch in self._waiting if batch not in ended]
        return ended

    def next_to_start(self, now_ms: float) -> Batch | None:
        """The first batch that may start now, if the device is free."""
        self._looked_at_ms = now_ms
        for place, batch in enumerate(self._waiting):
            if batch.may_start_at_ms <= now_ms or (place == 0 and batch.is_complete):
                return batch
        return None

    def hand_over(self, batch: Batch) -> None:
        """The device has that one behind what runs."""
        self.ahead = batch
        batch.rows = batch.all_rows

    def start(self, batch: Batch, now_ms: float) -> None:
        """One that waited is on the device; where another one still is, that one runs apart and comes behind it."""
        self._leave(batch)
        batch.started_at_ms = now_ms
        batch.rows = batch.all_rows
        if self.running is None:
            self.running = batch
        else:
            self._passed.append(batch)

    def put_back(self, batch: Batch) -> None:
        """The device has not begun it after all."""
        self.end(batch)
        batch.is_recalled = False
        batch.overdue_at_ms = math.inf
        self.add(batch)

    def take_waiting(self) -> Sequence[Batch]:
        """Give up everything that has not started, but for what the device has."""
        waiting = [batch for batch in self._waiting if batch is not self.ahead]
        self._waiting = [] if self.ahead is None else [self.ahead]
        return waiting

    @property
    def wake_at_ms(self) -> float | None:
        """When the next batch may start or, while the device is busy, expires or takes the place of what is handed over, or what runs has hung."""
        moments = [batch.overdue_at_ms for batch in self.started]
        if self.running is None:
            moments += [batch.may_start_at_ms for batch in self._waiting]
            return min(moments, default=None)
        moments += [batch.expires_at_ms for batch in self._waiting if not batch.is_recalled]
        for batch in self._waiting:
            if batch is self.ahead or batch.may_start_at_ms <= self._looked_at_ms:
                break
            if batch.is_complete or self.ahead is not None:  # else nothing changes for the device
                moments.append(batch.may_start_at_ms)
        return min(moments)

    def _leave(self, batch: Batch) -> None:
        self._waiting.remove(batch)
        if batch is self.ahead:
            self.ahead = None


def _are_of(seqs: Sequence[int], part: Part) -> bool:
    """Whether the seqs are different ones out of the part's runs."""
    runs = iter(sorted(part.runs, key=lambda run: run.first_seq))
    run = next(runs, None)
    previous = -1
    for seq in sorted(seqs):
        while run is not None and seq >= run.first_seq + run.count:
            run = next(runs, None)
        if run is None or seq < run.first_seq or seq == previous:
            return False
        previous = seq
    return True
