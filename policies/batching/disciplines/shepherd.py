"""Shepherd's Flex (Symphony section 2.2): the largest batch first, and it may stop a running one.

One candidate per model, the most its head allows. A free slice takes the largest; while none is free, a candidate
at least `preempt_ratio` times as large as a running batch (and larger) stops that batch, whose requests wait again and
whose work is lost (ADR 0013). Where the device cannot stop a batch, or its model must not run twice, nothing is stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fabric.ids import ModelId, SliceId
from fabric.policy_options import Number
from policies.batching.base import BatchDecision, Dispatch, Preempt, RequestRun
from policies.batching.baselines.backlog import Backlog
from policies.batching.baselines.state import BaselineSlice, Line
from policies.registry import Registered


@dataclass(slots=True)
class _Running:
    line: Line
    sent: Dispatch

    @property
    def size(self) -> int:
        return self.sent.batch_size

    @property
    def end_at_ms(self) -> float:
        return self.sent.start_at_ms + self.sent.exec_ms


class Shepherd(Backlog):
    """Requests are given up only when they can no longer finish even alone."""

    def __init__(self, *, preempt_ratio: float = 3.0) -> None:
        super().__init__()
        self._preempt_ratio = preempt_ratio
        self._running: dict[SliceId, list[_Running]] = {}

    def _choose(self, slice_: BaselineSlice, lines: list[Line], now_ms: float) -> tuple[Line, int] | None:
        sized = [(line, size) for line in lines if (size := slice_.fit(line, now_ms))]
        if not sized:
            return None
        return min(sized, key=lambda pair: (-pair[1], pair[0].queue.runs[0].deadline_at_ms))

    def _overtake(self, line: Line, now_ms: float, out: list[BatchDecision]) -> None:
        if line.queue.count < self._preempt_ratio:
            return
        victim: BaselineSlice | None = None
        stopped: _Running | None = None
        smallest = line.queue.count / self._preempt_ratio
        for slice_id, slice_ in line.model.hosts.items():
            running = self._busy(slice_id, now_ms)
            # Of a model that has gone from the slice meanwhile nobody knows any more whether it may be stopped.
            hosted = slice_.hosted.get(running[0].line.model.model_id) if running else None
            # With a second batch on its way the slice is nearly done with the first.
            if (
                len(running) == 1
                and hosted is not None
                and hosted.may_stop
                and running[0].size <= smallest
                and (victim is None or running[0].size < smallest)
            ):
                victim, stopped, smallest = slice_, running[0], running[0].size
        if victim is None or stopped is None:
            return
        size = victim.fit(line, now_ms, free_at_ms=now_ms)
        if size < self._preempt_ratio * smallest or size <= smallest:
            return
        del self._running[victim.slice_id]
        victim.free_at_ms = now_ms
        out.append(Preempt(stopped.sent))
        self._launch(line, victim, size, now_ms, out)
        if stopped.line is not line:  # else its requests, which are about to come back, go before these
            self._use_idle(line, now_ms, out)

    def arrive_again(
        self, model_id: ModelId, runs: Sequence[RequestRun], now_ms: float
    ) -> Sequence[BatchDecision]:
        """See `Discipline`. What was stopped stops nothing."""
        out: list[BatchDecision] = []
        back = self._line_for(self._models[model_id])
        for run in runs:
            self._push(back, run)
        self._use_idle(back, now_ms, out)
        return out

    def _launch(
        self, line: Line, slice_: BaselineSlice, size: int, now_ms: float, out: list[BatchDecision]
    ) -> None:
        reason = "preempt" if out and isinstance(out[-1], Preempt) else "largest"
        sent = self._send(line, slice_, size, reason, now_ms, out)
        running = self._busy(slice_.slice_id, now_ms)
        running.append(_Running(line, sent))
        self._running[slice_.slice_id] = running

    def _busy(self, slice_id: SliceId, now_ms: float) -> list[_Running]:
        return [running for running in self._running.get(slice_id, ()) if running.end_at_ms > now_ms]

    def _free_from(self, slice_: BaselineSlice, free_at_ms: float, now_ms: float) -> None:
        if free_at_ms <= now_ms:
            self._running.pop(slice_.slice_id, None)  # done earlier than promised
        super()._free_from(slice_, free_at_ms, now_ms)

    def _fleet_changed(self, now_ms: float, out: list[BatchDecision]) -> None:
        super()._fleet_changed(now_ms, out)
        self._running = {
            slice_id: running for slice_id, running in self._running.items() if slice_id in self._slices
        }


REGISTERED: Final = Registered(
    {"preempt_ratio": Number(3.0, minimum=1)},
    lambda options: Shepherd(preempt_ratio=options["preempt_ratio"]),
)
