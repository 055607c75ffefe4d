"""The thesis' router (listing 4.3): batches of a fixed target size, replicas in turn.

For each model one batch is under construction, meant for one replica. It is closed when it has that replica's
target size or MAX_WAIT after its first request (also where that is given up meanwhile), and goes to the replica
whatever the replica is doing; the next batch is for the next replica. Turns are taken so that requests are spread by the plan's weights (ADR 0012).
Nothing looks at deadlines but the worker, which does not start what can no longer finish.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from fabric.ids import ModelId, SliceId
from fabric.policy_options import Number
from policies.batching.base import NEVER_MS, BatchDecision, RequestRun
from policies.batching.baselines.baseline import Baseline
from policies.batching.baselines.state import BaselineModel, BaselineSlice, Line, Timer
from policies.batching.batch_moments import just_after
from policies.batching.drop import fallback_target
from policies.registry import Registered


@dataclass(slots=True)
class _Open:
    """The batch under construction of one model, and whose turn it is."""

    line: Line
    timeout: Timer
    replica: BaselineSlice | None = None
    credits: dict[SliceId, float] = field(default_factory=dict)


class Fixed(Baseline):
    """`batch`: the target on every replica; None: the plan's, or half the SLO's worth where it names none."""

    def __init__(self, *, max_wait_ms: float = 100.0, batch: int | None = None) -> None:
        super().__init__()
        self._max_wait_ms = max_wait_ms
        self._batch = batch
        self._open: dict[ModelId, _Open] = {}
        self._closed: dict[SliceId, list[Line]] = {}

    def _line_up(
        self, state: BaselineModel, runs: Sequence[RequestRun], now_ms: float, out: list[BatchDecision]
    ) -> None:
        opened = self._open.get(state.model_id)
        if opened is None or opened.line.model is not state:
            opened = self._open_for(state)
        for run in runs:
            due_at_ms = self._due_at_ms(run)
            if not opened.line.queue.count or due_at_ms < opened.timeout.armed_at_ms:
                self._arm(opened.timeout, due_at_ms)
            self._push(opened.line, run)
            self._close_full(opened, now_ms, out)  # a batch is of who came first, not of the tightest

    def _due_at_ms(self, run: RequestRun) -> float:
        return run.arrived_at_ms + self._max_wait_ms

    def _wait(self, opened: _Open) -> None:
        """Until the first of what is under construction is due, if there is anything."""
        self._arm(opened.timeout, min(map(self._due_at_ms, opened.line.queue.runs), default=NEVER_MS))

    def _open_for(self, state: BaselineModel) -> _Open:
        opened = _Open(
            self._new_line(state, None), Timer(lambda at_ms, out: self._timed_out(opened, at_ms, out))
        )
        self._open[state.model_id] = opened
        return opened

    def _timed_out(self, opened: _Open, now_ms: float, out: list[BatchDecision]) -> None:
        count = opened.line.queue.count
        replica = self._replica(opened)
        if count and replica is not None:
            self._close(opened, replica, min(count, self._target(opened, replica)), now_ms, out)

    def _close_full(self, opened: _Open, now_ms: float, out: list[BatchDecision]) -> None:
        while (replica := self._replica(opened)) is not None:
            target = self._target(opened, replica)
            if opened.line.queue.count < target:
                return
            self._close(opened, replica, target, now_ms, out)

    def _close(
        self, opened: _Open, replica: BaselineSlice, size: int, now_ms: float, out: list[BatchDecision]
    ) -> None:
        """The batch under construction is the replica's now; what is left, with looser deadlines, begins the next one."""
        line = self._new_line(opened.line.model, replica)
        for run in opened.line.queue.pop(size):
            self._push(line, run)
        opened.replica = None
        self._wait(opened)
        self._closed.setdefault(replica.slice_id, []).append(line)
        self._slice_due(replica, now_ms, out)

    def _replica(self, opened: _Open) -> BaselineSlice | None:
        """Whose batch it is: smooth weighted round-robin, a turn costing what it moves."""
        if opened.replica is None and opened.line.model.hosts:
            total = 0.0
            best: BaselineSlice | None = None
            for slice_ in sorted(
                opened.line.model.hosts.values(), key=lambda host: (host.order, host.slice_id)
            ):
                hosted = slice_.hosted[opened.line.model.model_id]
                turns = hosted.weight / self._target(opened, slice_)
                total += turns
                credit = opened.credits.get(slice_.slice_id, 0.0) + turns
                opened.credits[slice_.slice_id] = credit
                if best is None or credit > opened.credits[best.slice_id] + 1e-9:
                    best = slice_
            assert best is not None
            opened.credits[best.slice_id] -= total
            opened.replica = best
        return opened.replica

    def _target(self, opened: _Open, replica: BaselineSlice) -> int:
        model = opened.line.model
        table = replica.tables[model.model_id]
        target = self._batch or replica.hosted[model.model_id].batch_size_target
        return min(target or fallback_target(table, model.model.slo_ms), len(table) - 2)

    def _slice_due(self, slice_: BaselineSlice, now_ms: float, out: list[BatchDecision]) -> None:
        waiting = self._closed.get(slice_.slice_id, [])
        while waiting:
            line = waiting[0]
            # The replica's batches may have become smaller since this one was closed: it goes in pieces then.
            size = min(line.queue.count, len(slice_.tables[line.model.model_id]) - 2)
            if self._models.get(line.model.model_id) is not line.model or not size:
                self._take_down(line)
                waiting.pop(0)
                continue
            lead_ms = line.model.lead_ms(size)
            if slice_.free_at_ms > now_ms + lead_ms:
                self._arm(
                    slice_.free, just_after(slice_.free_at_ms - lead_ms) if lead_ms else slice_.free_at_ms
                )
                return
            self._expire(line, now_ms, out)
            if line.queue.count:
                self._send(line, slice_, min(size, line.queue.count), "turn", now_ms, out)

    def _take_down(self, line: Line) -> None:
        if line in line.model.lines:
            self._drop_line(line)

    def _fleet_changed(self, now_ms: float, out: list[BatchDecision]) -> None:
        self._closed = {
            slice_id: [line for line in lines if self._slices.get(slice_id) is line.home]
            for slice_id, lines in self._closed.items()
            if slice_id in self._slices
        }
        for model_id, opened in list(self._open.items()):
            state = opened.line.model
            if self._models.get(model_id) is not state:
                self._arm(opened.timeout, NEVER_MS)
                del self._open[model_id]
                continue
            opened.replica = None
            opened.credits = {name: credit for name, credit in opened.credits.items() if name in state.hosts}
            if opened.line.queue.count:
                self._close_full(opened, now_ms, out)
                self._wait(opened)  # it may have timed out while there was no replica


REGISTERED: Final = Registered(
    {
        "max_wait_ms": Number(100.0, is_minimum_allowed=True),
        "batch": Number(None, minimum=1, is_minimum_allowed=True, is_whole=True),
    },
    lambda options: Fixed(max_wait_ms=options["max_wait_ms"], batch=options.get("batch")),
)
