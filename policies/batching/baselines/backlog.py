"""Baselines with one queue per model and a choice whenever a slice is free: Clockwork and Shepherd."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left, insort
from collections.abc import Sequence

from fabric.ids import ModelId, SliceId
from policies.batching.base import NEVER_MS, BatchDecision, RequestRun
from policies.batching.baselines.baseline import Baseline
from policies.batching.baselines.state import BaselineModel, BaselineSlice, Line


class Backlog(Baseline):
    """Eager and central: no slice stays idle while something waits that it could finish in time."""

    def __init__(self) -> None:
        super().__init__()
        self._line_of: dict[ModelId, Line] = {}
        self._idle: list[tuple[int, SliceId, BaselineSlice]] = []

    @abstractmethod
    def _choose(self, slice_: BaselineSlice, lines: list[Line], now_ms: float) -> tuple[Line, int] | None:
        """Which line's head to run on a free slice, and how many; None: nothing of it can finish in time."""

    def _overtake(self, line: Line, now_ms: float, out: list[BatchDecision]) -> None:
        """A line has grown and no slice is free for it."""

    def _line_up(
        self, state: BaselineModel, runs: Sequence[RequestRun], now_ms: float, out: list[BatchDecision]
    ) -> None:
        line = self._line_for(state)
        for run in runs:
            self._push(line, run)
        if line.expiry.armed_at_ms <= now_ms:
            # A run comes too late itself. It must not stand before those that do not.
            line.expiry.armed_at_ms = NEVER_MS
            self._expire(line, now_ms, out)
        self._serve(line, now_ms, out)

    def _serve(self, line: Line, now_ms: float, out: list[BatchDecision]) -> None:
        if not self._use_idle(line, now_ms, out):
            self._overtake(line, now_ms, out)

    def _line_for(self, state: BaselineModel) -> Line:
        line = self._line_of.get(state.model_id)
        if line is None or line.model is not state:
            line = self._line_of[state.model_id] = self._new_line(state, None)
        return line

    def _use_idle(self, line: Line, now_ms: float, out: list[BatchDecision]) -> bool:
        """Run what slices can that have nothing to do; False: nothing of this line.

        A slow slice may idle while something waits that is too urgent for it. What stood behind that may run there.
        """
        wanted, is_sent = line, False
        lines = [line]
        while lines:
            line = lines[-1]
            slice_ = self._idle_slice(line, now_ms) if line.queue.count else None
            ran = None if slice_ is None else self._run_on(slice_, now_ms, out)
            is_sent = is_sent or ran is wanted
            if ran is None:
                lines.pop()
            elif ran is not line:
                lines.append(ran)
        return is_sent

    def _idle_slice(self, line: Line, now_ms: float) -> BaselineSlice | None:
        hosts = line.model.hosts
        idle = (slice_ for _, slice_id, slice_ in self._idle if slice_id in hosts)
        return next((slice_ for slice_ in idle if slice_.fit(line, now_ms)), None)

    def _slice_due(self, slice_: BaselineSlice, now_ms: float, out: list[BatchDecision]) -> None:
        ran = self._run_on(slice_, now_ms, out)
        if ran is not None:
            self._use_idle(ran, now_ms, out)
            return
        key = (slice_.order, slice_.slice_id, slice_)
        place = bisect_left(self._idle, key[:2], key=lambda idle: idle[:2])
        if place == len(self._idle) or self._idle[place][2] is not slice_:
            insort(self._idle, key, key=lambda idle: idle[:2])

    def _run_on(self, slice_: BaselineSlice, now_ms: float, out: list[BatchDecision]) -> Line | None:
        """Send a batch to a slice that is free, and say of which line it was."""
        lines = [
            line
            for model_id in slice_.hosted
            if (line := self._line_of.get(model_id)) is not None and line.queue.count
        ]
        chosen = self._choose(slice_, lines, now_ms) if lines else None
        if chosen is None:
            return None
        line, size = chosen
        self._launch(line, slice_, size, now_ms, out)
        return line

    def _launch(
        self, line: Line, slice_: BaselineSlice, size: int, now_ms: float, out: list[BatchDecision]
    ) -> None:
        self._send(line, slice_, size, "eager", now_ms, out)

    def _expire(self, line: Line, now_ms: float, out: list[BatchDecision]) -> None:
        super()._expire(line, now_ms, out)
        self._use_idle(line, now_ms, out)  # what stood behind an expired head may run where it could not

    def _free_from(self, slice_: BaselineSlice, free_at_ms: float, now_ms: float) -> None:
        self._idle = [idle for idle in self._idle if idle[2] is not slice_]
        super()._free_from(slice_, free_at_ms, now_ms)

    def _fleet_changed(self, now_ms: float, out: list[BatchDecision]) -> None:
        del now_ms, out
        self._idle = [idle for idle in self._idle if self._slices.get(idle[2].slice_id) is idle[2]]
        self._line_of = {
            model_id: line
            for model_id, line in self._line_of.items()
            if self._models.get(model_id) is line.model
        }
