"""What the baseline disciplines have in common: models, slices, lines of waiting requests, timers.

They are here to be compared with, and because some placements assume them; they are written to be read beside
their papers, and unlike the central matchmaker some look at every model or slice per batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from heapq import heappop

from fabric.ids import FrontendId, ModelId, SliceId
from policies.batching.base import (
    NEVER_MS,
    BatchDecision,
    BatchModel,
    BatchSlice,
    Dispatch,
    Drop,
    RequestRun,
)
from policies.batching.baselines.state import BaselineModel, BaselineSlice, Line, Timer
from policies.batching.batch_moments import exec_at_ms, exec_table, just_after
from policies.batching.preparing import Announced
from policies.batching.timers import Timed

NOTHING: tuple[BatchDecision, ...] = ()


class Baseline(Timed[Timer | Announced[BaselineModel]], ABC):
    """Keeps the books; a subclass says where a request lines up and what a free slice does."""

    def __init__(self) -> None:
        super().__init__()
        self._models: dict[ModelId, BaselineModel] = {}
        self._slices: dict[SliceId, BaselineSlice] = {}
        self._announced: Announced[BaselineModel] = Announced()

    # ------------------------------------------------------------ what a baseline decides

    @abstractmethod
    def _line_up(
        self, state: BaselineModel, runs: Sequence[RequestRun], now_ms: float, out: list[BatchDecision]
    ) -> None:
        """Runs whose inputs are ready want to be served: all line up before any is sent."""

    @abstractmethod
    def _slice_due(self, slice_: BaselineSlice, now_ms: float, out: list[BatchDecision]) -> None:
        """A slice is free, or will be within the delay of its models."""

    def _fleet_changed(self, now_ms: float, out: list[BatchDecision]) -> None:
        """Models or slices have come or gone."""

    # ------------------------------------------------------------ Discipline

    def set_guard_ms(self, guard_ms: float) -> None:
        """No baseline has a guard."""

    def add_model(self, model: BatchModel, now_ms: float) -> None:  # noqa: ARG002  see `Discipline`
        """See `Discipline`."""
        known = self._models.get(model.model_id)
        if known is not None:
            known.model = model
            return
        state = BaselineModel(model)
        self._models[model.model_id] = state
        for slice_ in self._slices.values():
            if model.model_id in slice_.hosted:
                state.hosts[slice_.slice_id] = slice_
        self._model_added(state)

    def _model_added(self, state: BaselineModel) -> None:
        """A model is new; its slices are known already. Nothing is decided now: nobody would hear of it."""

    def remove_model(self, model_id: ModelId, now_ms: float) -> Sequence[BatchDecision]:
        """See `Discipline`."""
        state = self._models.pop(model_id, None)
        if state is None:
            return NOTHING
        runs = state.preparing.take_all()
        for line in state.lines:
            runs += line.queue.pop(line.queue.count)
            line.expiry.armed_at_ms = NEVER_MS
        self._follow_preparing(state)
        out: list[BatchDecision] = [Drop(model_id, runs, is_expired=False)] if runs else []
        self._fleet_changed(now_ms, out)
        return out

    def add_slice(self, slice_: BatchSlice, now_ms: float) -> Sequence[BatchDecision]:
        """See `Discipline`."""
        out: list[BatchDecision] = []
        known = self._slices.get(slice_.slice_id)
        if known is not None and known.hosted.keys() == {model.model_id for model in slice_.hosted}:
            self._set_tables(known, slice_)
            self._free_from(known, slice_.free_at_ms, now_ms)
        else:
            displaced = self._forget(slice_.slice_id)
            added = BaselineSlice(slice_, lambda at_ms, out: self._slice_due(added, at_ms, out))
            self._slices[slice_.slice_id] = added
            for model in slice_.hosted:
                if (state := self._models.get(model.model_id)) is not None:
                    state.hosts[added.slice_id] = added
            self._set_tables(added, slice_)
            self._free_from(added, slice_.free_at_ms, now_ms)
            self._fleet_changed(now_ms, out)
            self._queue_ready(now_ms, out)
            self._line_up_again(displaced, now_ms, out)
        out.extend(self.tick(now_ms))
        return out

    def remove_slices(self, slice_ids: Collection[SliceId], now_ms: float) -> Sequence[BatchDecision]:
        """See `Discipline`."""
        out: list[BatchDecision] = []
        displaced = [one for slice_id in slice_ids for one in self._forget(slice_id)]
        self._fleet_changed(now_ms, out)
        self._queue_ready(now_ms, out)
        self._line_up_again(displaced, now_ms, out)
        for state in self._models.values():
            for line in state.lines:
                # What was left to a faster slice may have to run elsewhere, or nowhere.
                self._look_again(line, now_ms)
        return out

    def slice_free(self, slice_id: SliceId, free_at_ms: float, now_ms: float) -> Sequence[BatchDecision]:
        """See `Discipline`."""
        slice_ = self._slices.get(slice_id)
        if slice_ is None or slice_.free_at_ms == free_at_ms:
            return NOTHING
        self._free_from(slice_, free_at_ms, now_ms)
        return self.tick(now_ms)

    def arrive(self, model_id: ModelId, run: RequestRun, now_ms: float) -> Sequence[BatchDecision]:
        """See `Discipline`."""
        state = self._models[model_id]
        out: list[BatchDecision] = []
        if now_ms >= self._announced.armed_at_ms:
            self._queue_ready(now_ms, out)
        if run.ready_at_ms > now_ms:
            late = state.preparing.put(run, state.alone_ms(None))
            self._follow_preparing(state)
            if late is not None:
                out.append(Drop(model_id, [late], is_expired=True))
        else:
            self._line_up(state, (run,), now_ms, out)
        return out or NOTHING

    def arrive_again(
        self, model_id: ModelId, runs: Sequence[RequestRun], now_ms: float
    ) -> Sequence[BatchDecision]:
        """See `Discipline`."""
        return [decision for run in runs for decision in self.arrive(model_id, run, now_ms)]

    def withdraw(
        self, model_id: ModelId, frontend_id: FrontendId, spans: Sequence[tuple[int, int]], now_ms: float
    ) -> None:
        """See `Discipline`."""
        state = self._models.get(model_id)
        if state is None:
            return
        for line in state.lines:
            if line.queue.withdraw(frontend_id, spans):
                self._look_again(line, now_ms)
        if state.preparing.withdraw(frontend_id, spans):
            self._follow_preparing(state)

    def forget_frontend(self, frontend_id: FrontendId, now_ms: float) -> Mapping[ModelId, int]:
        """See `Discipline`."""
        forgotten: dict[ModelId, int] = {}
        for model_id, state in self._models.items():
            count = state.preparing.forget(frontend_id)
            if count:
                self._follow_preparing(state)
            for line in state.lines:
                if gone := line.queue.forget(frontend_id):
                    count += gone
                    self._look_again(line, now_ms)
            if count:
                forgotten[model_id] = count
        return forgotten

    def tick(self, now_ms: float) -> Sequence[BatchDecision]:
        """See `Discipline`."""
        out: list[BatchDecision] = []
        if now_ms >= self._announced.armed_at_ms:
            self._queue_ready(now_ms, out)
        timers = self._timers
        while timers and timers[0][0] <= now_ms:
            at_ms, _, timer = heappop(timers)
            if at_ms == timer.armed_at_ms and isinstance(timer, Timer):
                timer.armed_at_ms = NEVER_MS
                timer.act(now_ms, out)
        return out or NOTHING

    def queued(self, model_id: ModelId) -> int:
        """See `Discipline`."""
        state = self._models.get(model_id)
        if state is None:
            return 0
        return state.preparing.count + sum(line.queue.count for line in state.lines)

    # ------------------------------------------------------------ for subclasses

    def _look_again(self, line: Line, now_ms: float) -> None:
        """Something else than an arrival or an end has changed for it; the next tick, due at once, sees to that."""
        if line.queue.count:
            self._arm(line.expiry, now_ms)

    def _new_line(self, state: BaselineModel, home: BaselineSlice | None) -> Line:
        line = Line(state, home, lambda at_ms, out: self._expire(line, at_ms, out))
        state.lines.append(line)
        return line

    def _drop_line(self, line: Line) -> list[RequestRun]:
        """Take a line away; its requests come back."""
        line.model.lines.remove(line)
        line.expiry.armed_at_ms = NEVER_MS
        return line.queue.pop(line.queue.count)

    def _push(self, line: Line, run: RequestRun) -> None:
        """Queue a run and watch over its deadline."""
        if line.queue.push(run) == 0:
            at_ms = just_after(run.deadline_at_ms - line.model.alone_ms(line.home))
            if at_ms < line.expiry.armed_at_ms:
                self._arm(line.expiry, at_ms)

    def _expire(self, line: Line, now_ms: float, out: list[BatchDecision]) -> None:
        """Drop what can no longer finish even alone, and watch over the next one."""
        queue = line.queue
        alone_ms = line.model.alone_ms(line.home)
        if dropped := queue.drop_before(now_ms + alone_ms):
            out.append(Drop(line.model.model_id, dropped, is_expired=True))
        if queue.runs:
            self._arm(line.expiry, just_after(max(now_ms, queue.runs[0].deadline_at_ms - alone_ms)))

    def _send(
        self,
        line: Line,
        slice_: BaselineSlice,
        size: int,
        reason: str,
        now_ms: float,
        out: list[BatchDecision],
    ) -> Dispatch:
        """Send the first `size` requests of a line, and look at the slice again when it is nearly free."""
        state = line.model
        arrived_at_ms = line.queue.runs[0].arrived_at_ms
        exec_ms = slice_.tables[state.model_id][size]
        start_at_ms = exec_at_ms(now_ms, state.lead_ms(size), slice_.free_at_ms)
        runs = line.queue.pop(size)
        intervals_ms = slice_.hosted[state.model_id].interval_ms
        dispatch = Dispatch(
            slice_.slice_id,
            state.model_id,
            runs,
            size,
            start_at_ms,
            min(run.deadline_at_ms for run in runs) - exec_ms,
            exec_ms,
            max(0.0, now_ms - arrived_at_ms),
            reason,
            intervals_ms[size - 1] if intervals_ms else None,
        )
        out.append(dispatch)
        self._free_from(slice_, start_at_ms + dispatch.occupied_ms, now_ms)
        return dispatch

    def _free_from(self, slice_: BaselineSlice, free_at_ms: float, now_ms: float) -> None:
        slice_.free_at_ms = free_at_ms
        leads_ms = [
            state.lead_ms(1)
            for model_id in slice_.hosted
            if (state := self._models.get(model_id)) is not None
        ]
        self._arm(slice_.free, max(now_ms, free_at_ms - min(leads_ms, default=0.0)))

    # ------------------------------------------------------------ own business

    def _set_tables(self, slice_: BaselineSlice, given: BatchSlice) -> None:
        slice_.order = given.order
        for model in given.hosted:
            known = slice_.hosted.get(model.model_id)
            if known is None or known.exec_ms is not model.exec_ms:
                slice_.tables[model.model_id] = exec_table(model.exec_ms)
            slice_.hosted[model.model_id] = model

    def _follow_preparing(self, state: BaselineModel) -> None:
        """What is being prepared of it has changed."""
        self._announced.follow(state)
        self._arm(self._announced, self._announced.next_at_ms)

    def _queue_ready(self, now_ms: float, out: list[BatchDecision]) -> None:
        """Inputs are ready by now."""
        ready = self._announced.take_ready(now_ms)
        self._arm(self._announced, self._announced.next_at_ms)
        for state, runs in ready:
            self._line_up(state, runs, now_ms, out)

    def _forget(self, slice_id: SliceId) -> list[tuple[BaselineModel, list[RequestRun]]]:
        """Take a slice away; what had lined up for it alone comes back."""
        slice_ = self._slices.pop(slice_id, None)
        if slice_ is None:
            return []
        slice_.free.armed_at_ms = NEVER_MS
        displaced: list[tuple[BaselineModel, list[RequestRun]]] = []
        for model_id in slice_.hosted:
            state = self._models.get(model_id)
            if state is None:
                continue
            state.hosts.pop(slice_id, None)
            lines = [line for line in state.lines if line.home is slice_]
            displaced += [(state, self._drop_line(line)) for line in lines]
        return displaced

    def _line_up_again(
        self, displaced: list[tuple[BaselineModel, list[RequestRun]]], now_ms: float, out: list[BatchDecision]
    ) -> None:
        for state, runs in displaced:
            self._line_up(state, runs, now_ms, out)
