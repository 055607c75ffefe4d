"""A stage for one discipline: virtual time, slices that take exactly l(b), and a ledger of every request's fate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from fabric.ids import FrontendId, ModelId, SliceId
from policies.batching.base import (
    BatchDecision,
    BatchModel,
    BatchSlice,
    Delay,
    Discipline,
    Dispatch,
    Drop,
    HostedModel,
    Preempt,
    RequestRun,
)

RequestKey = tuple[ModelId, FrontendId, int]
ROUNDING_MS = 1e-6


def linear(alpha_ms: float, beta_ms: float, batch_size_max: int) -> tuple[float, ...]:
    """l(b) = alpha·b + beta for b = 1 … batch_size_max."""
    return tuple(alpha_ms * size + beta_ms for size in range(1, batch_size_max + 1))


def hosted(
    name: str,
    exec_ms: Sequence[float],
    *,
    target: int | None = None,
    weight: float = 1.0,
    may_stop: bool = True,
) -> HostedModel:
    return HostedModel(ModelId(name), tuple(exec_ms), target, weight, may_stop=may_stop)


@dataclass
class Ran:
    """One batch as it was sent."""

    sent_at_ms: float
    slice_id: str
    start_at_ms: float
    end_at_ms: float
    model_id: str
    seqs: list[int]
    reason: str
    waited_ms: float


@dataclass
class Stage:
    """Plays events at a discipline and checks each decision against what must always hold.

    `is_in_time`: no batch may be planned past its tightest deadline.
    """

    discipline: Discipline
    is_in_time: bool = True
    now_ms: float = 0.0
    batches: list[Ran] = field(default_factory=list)
    drops: list[tuple[float, bool, list[int]]] = field(default_factory=list)
    fates: dict[RequestKey, str] = field(default_factory=dict)
    preempted: int = 0

    def __post_init__(self) -> None:
        self._hosted: dict[SliceId, dict[ModelId, HostedModel]] = {}
        self._ends: list[tuple[float, int, SliceId]] = []
        self._running: dict[SliceId, list[tuple[int, float, ModelId, list[RequestRun]]]] = {}
        self._models: set[ModelId] = set()
        self._serial = 0
        self._seqs: dict[tuple[ModelId, FrontendId], int] = {}

    def model(self, name: str, slo_ms: float, delay: Delay | None = None, priority: int = 0) -> None:
        model = BatchModel(ModelId(name), slo_ms, delay or Delay(), priority)
        self._models.add(model.model_id)
        self.discipline.add_model(model, self.now_ms)

    def unmodel(self, name: str) -> None:
        self._models.discard(ModelId(name))
        self._take(self.discipline.remove_model(ModelId(name), self.now_ms))

    def slice(self, name: str, *models: HostedModel, order: int = 0, free_at_ms: float | None = None) -> None:
        slice_id = SliceId(name)
        self._hosted[slice_id] = {model.model_id: model for model in models}
        free = max([self.now_ms, *(end for _, end, *_ in self._running.get(slice_id, ()))])
        given = BatchSlice(slice_id, order, tuple(models), free if free_at_ms is None else free_at_ms)
        self._take(self.discipline.add_slice(given, self.now_ms))

    def unslice(self, name: str) -> None:
        self._hosted.pop(SliceId(name), None)
        self._running.pop(SliceId(name), None)
        self._take(self.discipline.remove_slices((SliceId(name),), self.now_ms))

    def arrive(
        self,
        name: str,
        budget_ms: float,
        *,
        count: int = 1,
        span_ms: float = 0.0,
        ready_in_ms: float = 0.0,
        frontend: str = "f",
        seq: int | None = None,
        priority: int | None = None,
    ) -> None:
        model_id, frontend_id = ModelId(name), FrontendId(frontend)
        first_seq = self._seqs.get((model_id, frontend_id), 1) if seq is None else seq
        self._seqs[model_id, frontend_id] = first_seq + count
        for number in range(first_seq, first_seq + count):
            self.fates[model_id, frontend_id, number] = "waiting"
        run = RequestRun(
            frontend_id,
            first_seq,
            count,
            self.now_ms + budget_ms,
            self.now_ms,
            span_ms if count > 1 else 0.0,
            self.now_ms + ready_in_ms if ready_in_ms else 0.0,
            priority=priority,
        )
        self._take(self.discipline.arrive(model_id, run, self.now_ms))

    def withdraw(self, name: str, first_seq: int, count: int, frontend: str = "f") -> None:
        model_id, frontend_id = ModelId(name), FrontendId(frontend)
        self.discipline.withdraw(model_id, frontend_id, [(first_seq, count)], self.now_ms)
        for seq in range(first_seq, first_seq + count):
            if self.fates.get((model_id, frontend_id, seq)) == "waiting":
                self.fates[model_id, frontend_id, seq] = "withdrawn"

    def until(self, at_ms: float, *, is_inclusive: bool = True) -> None:
        """Let time pass: batches end, the discipline ticks when it asked to. Else what is due at the end waits."""
        turns = 0
        while True:
            wake_at_ms = self.discipline.wake_at_ms
            end_at_ms = self._ends[0][0] if self._ends else math.inf
            next_at_ms = min(end_at_ms, math.inf if wake_at_ms is None else wake_at_ms)
            if next_at_ms > at_ms or next_at_ms == math.inf or (next_at_ms == at_ms and not is_inclusive):
                break
            turns = turns + 1 if next_at_ms <= self.now_ms else 0
            assert turns < 1000, f"the discipline turns on the spot at {self.now_ms}"
            self.now_ms = max(self.now_ms, next_at_ms)
            if end_at_ms <= next_at_ms:
                self._end()
            else:
                self._take(self.discipline.tick(self.now_ms))
        self.now_ms = at_ms if at_ms < math.inf else self.now_ms

    def drain(self) -> None:
        self.until(math.inf)

    def count(self, fate: str) -> int:
        return sum(1 for known in self.fates.values() if known == fate)

    def _end(self) -> None:
        _, serial, slice_id = heappop(self._ends)
        running = self._running.get(slice_id, [])
        if any(known[0] == serial for known in running):
            self._running[slice_id] = [known for known in running if known[0] != serial]
            free_at_ms = max([self.now_ms, *(end for _, end, *_ in self._running[slice_id])])
            self._take(self.discipline.slice_free(slice_id, free_at_ms, self.now_ms))

    def _take(self, decisions: Sequence[BatchDecision]) -> None:
        stopped: list[tuple[ModelId, list[RequestRun]]] = []
        for decision in decisions:
            if isinstance(decision, Dispatch):
                self._dispatched(decision)
            elif isinstance(decision, Drop):
                self._dropped(decision)
            else:
                stopped.append(self._preempt(decision))
        for model_id, runs in stopped:
            if model_id in self._models:
                self._take(self.discipline.arrive_again(model_id, runs, self.now_ms))
            else:
                self._take([Drop(model_id, runs, is_expired=False)])

    def _dispatched(self, batch: Dispatch) -> None:
        table_ms = self._hosted[batch.slice_id][batch.model_id].exec_ms
        assert 1 <= batch.batch_size == sum(run.count for run in batch.runs) <= len(table_ms)
        assert batch.exec_ms == table_ms[batch.batch_size - 1]
        assert batch.start_at_ms >= self.now_ms
        end_at_ms = batch.start_at_ms + batch.exec_ms
        running = self._running.setdefault(batch.slice_id, [])
        busy_until_ms = max([0.0, *(end for _, end, *_ in running)])
        assert batch.start_at_ms >= busy_until_ms, "two batches on one slice"
        if self.is_in_time:
            tightest_at_ms = min(run.deadline_at_ms for run in batch.runs)
            assert end_at_ms <= tightest_at_ms + ROUNDING_MS
            assert batch.start_at_ms <= batch.latest_at_ms + ROUNDING_MS
        assert all(run.ready_at_ms <= batch.start_at_ms for run in batch.runs)
        keys = self._settle(batch.model_id, batch.runs, "ran")
        self._serial += 1
        running.append((self._serial, end_at_ms, batch.model_id, batch.runs))
        heappush(self._ends, (end_at_ms, self._serial, batch.slice_id))
        self.batches.append(
            Ran(
                round(self.now_ms, 3),
                batch.slice_id,
                round(batch.start_at_ms, 3),
                round(end_at_ms, 3),
                batch.model_id,
                [key[2] for key in keys],
                batch.reason,
                round(batch.waited_ms, 3),
            )
        )

    def _dropped(self, drop: Drop) -> None:
        assert drop.runs
        keys = self._settle(drop.model_id, drop.runs, "expired" if drop.is_expired else "dropped")
        self.drops.append((round(self.now_ms, 3), drop.is_expired, [key[2] for key in keys]))

    def _preempt(self, preempt: Preempt) -> tuple[ModelId, list[RequestRun]]:
        self.preempted += 1
        slice_id = preempt.dispatch.slice_id
        _, end_at_ms, model_id, runs = self._running[slice_id].pop()
        assert runs is preempt.dispatch.runs, "it is the last one there"
        assert end_at_ms >= self.now_ms
        assert self._hosted[slice_id][model_id].may_stop
        for key in _keys(model_id, runs):
            assert self.fates[key] == "ran"
            self.fates[key] = "waiting"
        return model_id, runs

    def _settle(self, model_id: ModelId, runs: Sequence[RequestRun], fate: str) -> list[RequestKey]:
        keys = _keys(model_id, runs)
        for key in keys:
            assert self.fates[key] == "waiting", f"{key} was {self.fates[key]} already"
            self.fates[key] = fate
        return keys


def _keys(model_id: ModelId, runs: Sequence[RequestRun]) -> list[RequestKey]:
    return [
        (model_id, run.frontend_id, seq)
        for run in runs
        for seq in range(run.first_seq, run.first_seq + run.count)
    ]
