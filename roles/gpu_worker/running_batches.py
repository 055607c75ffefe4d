"""What a slice does with its batches: starts them, hands the next one over, runs what failed apart, ends them.

What follows from that for the slice and the worker (alarms, a hung device, an end) is the core's to decide.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Final

from fabric.ids import ModelId, SliceId
from fabric.messages import Inputs
from roles.gpu_worker.answers import answer_failure, done_of, preempted, release, return_batch, unlaunched
from roles.gpu_worker.batches import Batch
from roles.gpu_worker.events import Execute, Recall, WorkerAction
from roles.gpu_worker.slices import HostedSlice
from roles.runtime.core import SCHEDULER, Handle, Send

WARMING_MS: Final = 30_000.0  # a run of another model, which warms up, may be before it on the device


class Runs:
    """Of all slices of a worker. Counts in the core's own `counters`."""

    def __init__(self, counters: Counter[str]) -> None:
        self.warming: tuple[SliceId, ModelId] | None = None
        """What the device warms up at this moment: no batch runs."""
        self._counters = counters

    def fit(self, batch: Batch, inputs: Inputs, payload: Handle, now_ms: float) -> list[WorkerAction]:
        """Take a part's inputs, if they are of the batch."""
        if batch.wants(inputs):
            batch.accept(inputs, payload, now_ms)
            return []
        self._counters["inputs_unfit"] += 1
        return release(payload)

    def launch(self, slice_: HostedSlice, now_ms: float) -> list[WorkerAction]:
        """End what cannot run, start what may, and hand the device what comes next."""
        queue = slice_.queue
        actions: list[WorkerAction] = []
        if queue.running is None and queue.ahead is not None:  # the device has gone on by itself
            batch = queue.ahead
            queue.start(batch, now_ms)
            self.expect(slice_, batch, now_ms)
        apart = queue.next_behind()
        if apart is not None:
            self.expect(slice_, apart, now_ms)
        for batch in queue.take_ended(now_ms):
            if batch.is_dead:
                actions += self._end_dead(batch)
            elif batch.has_live:
                actions += self.end_unlaunched(batch)
            else:
                actions += self._end_empty(batch)
        if queue.running is None and (next_ := queue.next_to_start(now_ms)) is not None:
            queue.start(next_, now_ms)
            self.expect(slice_, next_, now_ms)
            actions.append(_execute(slice_, next_))
        return actions + self._hand_over(slice_, now_ms)

    def _hand_over(self, slice_: HostedSlice, now_ms: float) -> list[WorkerAction]:
        """While a batch runs the device has the next one, as long as it is the one that would start now (ADR 0300)."""
        queue = slice_.queue
        ahead, next_ = queue.ahead, queue.next_to_start(now_ms)
        if ahead is not None:
            is_still_next = next_ is ahead and now_ms < ahead.expires_at_ms
            return [] if is_still_next else self.recall(slice_)
        if queue.running is None or queue.has_behind or next_ is None or not next_.is_complete:
            return []
        queue.hand_over(next_)
        return [_execute(slice_, next_)]

    def recall(self, slice_: HostedSlice) -> list[WorkerAction]:
        """Ask the device once for what it was handed over."""
        ahead = slice_.queue.ahead
        if ahead is None or ahead.is_recalled:
            return []
        ahead.is_recalled = True
        return [Recall(slice_.spec.slice_id, ahead.run.batch_id)]

    def not_begun(
        self, slice_: HostedSlice, batch: Batch, now_ms: float, *, is_stopping: bool
    ) -> list[WorkerAction]:
        """The device has stopped it, or gives it back: it was asked to, or it was too late to begin."""
        if batch.is_preempted:
            slice_.queue.end(batch)
            return self.end_preempted(batch)
        if batch.failure:
            batch.rest.insert(0, batch.rows)
            self.go_on(slice_, batch, now_ms)
            return self.run_apart(slice_, batch, now_ms)
        if is_stopping:
            slice_.queue.end(batch)
            return self.end_unlaunched(batch)
        slice_.queue.put_back(batch)
        return []

    def run_apart(self, slice_: HostedSlice, batch: Batch, now_ms: float) -> list[WorkerAction]:
        """Run what is left of a batch on which the model raised, so that only the request it raises on fails.

        Rows whose loosest deadline another run would miss are not run. When nothing is left the batch ends, and at once
        where the scheduler has granted its requests again.
        """
        if batch.is_preempted:
            slice_.queue.end(batch)
            return self.end_preempted(batch)
        actions: list[WorkerAction] = []
        while batch.rest:
            batch.rows = batch.rest.pop(0)
            if now_ms < _expires_at_ms(slice_, batch):
                self._counters["runs_apart"] += 1
                slice_.queue.begin_again(batch)
                batch.overdue_at_ms = math.inf
                if batch is slice_.queue.running:
                    self.expect(slice_, batch, now_ms)
                return [*actions, _execute(slice_, batch)]
            reason = f"its budget allowed no run apart from a batch that failed: {batch.failure}"
            actions += answer_failure(batch, "DeadlineExceeded", reason)
        return actions + self._end_failed(slice_, batch)

    def go_on(self, slice_: HostedSlice, failed: Batch, now_ms: float) -> None:
        """A run of that batch has ended badly, or was a part of it: the device goes on with what it was handed over."""
        began = slice_.queue.go_on(failed, now_ms)
        if began is not None:
            self.expect(slice_, began, now_ms)

    def expect(self, slice_: HostedSlice, batch: Batch, now_ms: float) -> None:
        """What runs ends within its limit from now on, or has hung."""
        limit_ms = slice_.run_limit_ms(batch.run.model_id, len(batch.rows))
        may_warm = slice_.side_load is not None or self.warming is not None
        batch.overdue_at_ms = now_ms + limit_ms + (WARMING_MS if may_warm else 0.0)

    def end_broken(
        self, slice_: HostedSlice, batch: Batch, reason: str, *, is_innocent: bool
    ) -> list[WorkerAction]:
        """What runs, and what was still to run apart, never will. Of several requests nobody knows whose doing it was."""
        actions: list[WorkerAction] = []
        code = "Internal" if len(batch.rows) == 1 and not is_innocent else "WorkerLost"
        for rows in (batch.rows, *batch.rest):
            batch.rows = rows
            actions += answer_failure(batch, code, reason)
            code = "WorkerLost"
        return actions + self._end_failed(slice_, batch)

    def end_with_process(self, slice_: HostedSlice, now_ms: float) -> list[WorkerAction]:
        """What the device has and has not answered for, when the process ends: it may have run.

        Frontends hear that the slice is gone, and announce again what may run twice.
        """
        actions: list[WorkerAction] = []
        for batch in slice_.queue:
            actions += self._end_failed(slice_, slice_.queue.started_as(batch.run.batch_id, now_ms))
        return actions

    def end_unlaunched(self, batch: Batch) -> list[WorkerAction]:
        """Too late, or stopping, and never begun: everything goes back, what had come as well."""
        self._counters["batches_expired"] += 1
        returned = return_batch(batch, "its batch was too late to begin, or its worker stops")
        return [*returned, Send(SCHEDULER, unlaunched(batch.run))]

    def end_preempted(self, batch: Batch) -> list[WorkerAction]:
        """The scheduler wants a larger one to run in its place."""
        self._counters["batches_preempted"] += 1
        returned = return_batch(batch, "its batch was stopped for a larger one", is_stopped=True)
        return [*returned, Send(SCHEDULER, preempted(batch.run))]

    def end_expired(self, slice_: HostedSlice, batch: Batch, reason: str) -> list[WorkerAction]:
        """A pipeline's stage got it too late: nobody waits for these any more."""
        self._counters["batches_expired"] += 1
        actions: list[WorkerAction] = []
        for rows in (batch.rows, *batch.rest):
            batch.rows = rows
            actions += answer_failure(batch, "DeadlineExceeded", reason)
        slice_.queue.end(batch)
        return [*actions, *release(*batch.payloads()), Send(SCHEDULER, done_of(batch, "expired", batch.ran))]

    def _end_failed(self, slice_: HostedSlice, batch: Batch) -> list[WorkerAction]:
        self._counters["batches_failed"] += 1
        slice_.queue.end(batch)
        done = Send(SCHEDULER, done_of(batch, "failed", batch.ran, batch.exec_ms))
        return [*release(*batch.payloads()), done]

    def _end_empty(self, batch: Batch) -> list[WorkerAction]:
        """Its last moment has come, and no live request has: the parts that are missing go back."""
        self._counters["batches_expired"] += 1
        return [*release(*batch.payloads()), Send(SCHEDULER, done_of(batch, "expired"))]

    def _end_dead(self, batch: Batch) -> list[WorkerAction]:
        """All its requests were cancelled or had expired before."""
        batch.started_at_ms = batch.complete_at_ms
        return [*release(*batch.payloads()), Send(SCHEDULER, done_of(batch, "ok"))]


def _execute(slice_: HostedSlice, batch: Batch) -> Execute:
    parts = tuple(part for _, part in batch.running())
    return Execute(batch.run, parts, _expires_at_ms(slice_, batch))


def _expires_at_ms(slice_: HostedSlice, batch: Batch) -> float:
    """When its rows must have begun, for the loosest deadline of the whole batch."""
    model_id = batch.run.model_id
    granted = sum(run.count for part in batch.run.parts for run in part.runs)
    lost_at_ms = batch.expires_at_ms + slice_.exec_ms(model_id, granted)
    return lost_at_ms - slice_.exec_ms(model_id, len(batch.rows))
