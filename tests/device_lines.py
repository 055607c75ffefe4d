"""Devices of tests: each slice's batches run one after the other, as whoever executes them must see to (ADR 0300)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from fabric.ids import BatchId, SliceId
from roles.gpu_worker.events import Execute
from roles.gpu_worker.executors.base import RunAborted


class DeviceLines:
    """`begin` is called with what begins, and the moment."""

    def __init__(self, begin: Callable[[Execute, float], None]) -> None:
        self._begin = begin
        self._lines: dict[SliceId, list[Execute]] = defaultdict(list)

    def of(self, slice_id: SliceId) -> list[Execute]:
        """What a slice has, the first one running."""
        return self._lines[slice_id]

    def give(self, execute: Execute, now_ms: float) -> None:
        """It runs when those before it have ended."""
        line = self._lines[execute.run.slice_id]
        line.append(execute)
        if len(line) == 1:
            self._begin(execute, now_ms)

    def end_first(self, slice_id: SliceId, now_ms: float) -> list[RunAborted]:
        """The first one has ended, and the next one begins; those that are too late for that."""
        line = self._lines[slice_id]
        del line[0]
        late = []
        while line and line[0].expires_at_ms <= now_ms:
            late.append(RunAborted(slice_id, line.pop(0).run.batch_id))
        if line:
            self._begin(line[0], now_ms)
        return late

    def recall(self, slice_id: SliceId, batch_id: BatchId) -> list[RunAborted]:
        """Give one back that has not begun."""
        line = self._lines[slice_id]
        waits = [one for one in line[1:] if one.run.batch_id == batch_id]
        for one in waits:
            line.remove(one)
        return [RunAborted(slice_id, batch_id)] * len(waits)
