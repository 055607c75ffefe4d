"""Symphony's central scheduling, read from the paper (algorithm 1, sections 3.1 to 3.4, appendix D).

A model's *candidate* for a slice is the largest batch from the head of its queue that the head's deadline allows there.
It is *due* from the moment at which its discipline wants it to go:

- deferred: frontrun = deadline - l(b + 1), when not one request more would fit; a full batch at once
- eager: at once
- timeout: when its first request has waited long enough, or at the latest moment, deadline - l(b)

A slice that is free goes to the due candidate with the smallest latest moment; a candidate takes the slice that runs the
largest batch fastest, and of equal ones the first. What cannot finish even alone is given up. The window drop also gives up heads
that would force a batch smaller than the target while enough younger requests wait for one of that size.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from tests.references.playing import MARGIN_MS, Reference, Request, Sent, Setting, largest_fitting

SAMPLE_MS, SAMPLES = 50.0, 100  # of the rate meter, as in the authors' implementation


@dataclass(frozen=True)
class Candidate:
    """A batch that a slice could run now."""

    model: str
    first: int
    size: int
    latest_at_ms: float


Due = Callable[[Request, int, Sequence[float], float], float]
"""(head, waiting, run times, delay): when a batch should go if no more requests come."""


@dataclass(frozen=True)
class Rules:
    """One discipline. `is_window`: heads of due batches may be given up to protect the target."""

    due_at_ms: Due
    is_window: bool


def deferred(head: Request, waiting: int, run_ms: Sequence[float], delay_ms: float) -> float:
    if waiting >= len(run_ms):
        return -math.inf
    return head.deadline_at_ms - MARGIN_MS - (run_ms[waiting] + delay_ms)  # l(waiting + 1)


def eager(head: Request, waiting: int, run_ms: Sequence[float], delay_ms: float) -> float:
    return -math.inf


def timeout(timeout_ms: float) -> Due:
    def due_at_ms(head: Request, waiting: int, run_ms: Sequence[float], delay_ms: float) -> float:
        if waiting >= len(run_ms):
            return -math.inf
        latest_at_ms = head.deadline_at_ms - MARGIN_MS - (run_ms[waiting - 1] + delay_ms)
        return min(latest_at_ms, head.arrived_at_ms + timeout_ms)

    return due_at_ms


class Central(Reference):
    """`queue[model]`: what waits, by deadline."""

    def __init__(self, setting: Setting, rules: Rules) -> None:
        super().__init__(setting)
        self._rules = rules
        self._queue: dict[str, list[Request]] = {name: [] for name in self.models}
        self._arrived: dict[str, list[float]] = {name: [] for name in self.models}
        self._kinds = {gpu.name: tuple(map(id, gpu.run_ms.values())) for gpu in setting.gpus}

    def arrive(self, request: Request, now_ms: float) -> None:
        insort(self._queue[request.model], request, key=lambda one: (one.deadline_at_ms, one.number))
        self._arrived[request.model].append(now_ms)

    def moments(self, now_ms: float) -> list[float]:
        found = []
        for delay_ms in {self.models[name].delay_ms for name, queue in self._queue.items() if queue}:
            later_ms = MARGIN_MS - delay_ms if delay_ms else 0.0
            found += [free_at_ms + later_ms for free_at_ms in self.free_at_ms.values()]
        for name, queue in self._queue.items():
            if not queue:
                continue
            for run_ms in self.tables(name):
                found += self._due(name, run_ms, now_ms)[:1]
            found.append(queue[0].deadline_at_ms - self.fastest_ms(name) + MARGIN_MS)
            if len({model.delay_ms for model in self.models.values()}) > 1:
                due = (self._candidate(name, run_ms, now_ms) for run_ms in self.tables(name))
                shrinks_later_ms = MARGIN_MS - self.models[name].delay_ms  # and is less urgent then
                found += [one.latest_at_ms + shrinks_later_ms for one in due if one is not None]
            if self._rules.is_window and self._is_due(name, now_ms):
                first_at_ms = self._arrived[name][0]
                found.append(first_at_ms + SAMPLE_MS * (1 + (now_ms - first_at_ms) // SAMPLE_MS))
        return found

    def look(self, now_ms: float) -> None:
        while self._give_up(now_ms) or self._send(now_ms):
            pass

    # ------------------------------------------------------------ giving up

    def _give_up(self, now_ms: float) -> bool:
        """What cannot be served any more, and with it what the window drop takes."""
        for name, queue in self._queue.items():
            if not queue or not self.hosts(name):
                continue
            if queue[0].deadline_at_ms < now_ms + self.fastest_ms(name) and self._drop_heads(name, now_ms):
                return True
        return False

    def _drop_heads(self, name: str, now_ms: float) -> bool:
        lost = self._queue[name][: self._heads(name, now_ms)]
        del self._queue[name][: len(lost)]
        self.played.given_up.update(one.number for one in lost)
        return bool(lost)

    def _heads(self, name: str, now_ms: float) -> int:
        """How many the drop takes now."""
        queue = self._queue[name]
        run_ms, delay_ms = self.tables(name)[0], self.models[name].delay_ms
        target = self._target(name, run_ms, now_ms) if self._rules.is_window else 1
        tail = self._longest_tail(queue, run_ms, now_ms + delay_ms)
        size = min(target, tail)
        if size == 0:
            return len(queue)
        limit_ms = run_ms[size - 1] + delay_ms
        return sum(1 for _ in takewhile(lambda one: one.deadline_at_ms - now_ms < limit_ms, queue))

    @staticmethod
    def _longest_tail(queue: list[Request], run_ms: Sequence[float], start_at_ms: float) -> int:
        """How many of the last requests could run as one batch started then."""
        size = 0
        while size < min(len(queue), len(run_ms)):
            if queue[-size - 1].deadline_at_ms - start_at_ms < run_ms[size]:
                break
            size += 1
        return size

    def _target(self, name: str, run_ms: Sequence[float], now_ms: float) -> int:
        """The batch size that the model's rate can sustain (`batch_size_estimator.cpp`)."""
        slo_ms, arrived = self.models[name].slo_ms, self._arrived[name]
        samples = int((now_ms - arrived[0]) // SAMPLE_MS)
        if samples == 0:
            return max(1, sum(ms <= slo_ms / 2 for ms in run_ms))
        first = max(0, samples - SAMPLES)
        begin, end = (arrived[0] + SAMPLE_MS * place for place in (first, samples))
        counted = bisect_left(arrived, end) - bisect_left(arrived, begin)
        if not counted:
            return 1
        rate = counted / ((samples - first) * SAMPLE_MS)
        budget_ms = slo_ms - self.models[name].delay_ms
        target, busy = len(run_ms), math.inf
        for size, ms in enumerate(run_ms, start=1):
            if ms * (1 + 1 / max(1.0, rate * ms / size)) > budget_ms:
                target, busy = size - 1, rate * ms / size
                break
        if busy <= 1.0:
            target = sum(ms + size / rate <= budget_ms for size, ms in enumerate(run_ms, start=1))
        return max(1, target)

    # ------------------------------------------------------------ sending

    def _send(self, now_ms: float) -> bool:
        """Give one free slice to the most urgent that wants it."""
        matches = []
        best_of: dict[tuple[int, ...], Candidate | None] = {}
        horizon_ms = now_ms + max(model.delay_ms for model in self.models.values())
        for order, gpu in enumerate(self.gpus):
            if self.free_at_ms[gpu.name] > horizon_ms:
                continue
            kind = self._kinds[gpu.name]
            if kind not in best_of:
                due = [self._candidate(name, run_ms, now_ms) for name, run_ms in gpu.run_ms.items()]
                wanted = [one for one in due if one is not None]
                best_of[kind] = min(wanted, key=lambda one: one.latest_at_ms, default=None)
            best = best_of[kind]
            if best and self.free_at_ms[gpu.name] <= now_ms + self.models[best.model].delay_ms:
                matches.append((gpu.run_ms[best.model][-1], order, gpu, best))
        if not matches:
            return False
        _, _, gpu, best = min(matches, key=lambda match: match[:2])
        name, delay_ms = best.model, self.models[best.model].delay_ms
        if self._rules.is_window and self._drop_heads(name, now_ms):
            return True
        queue = self._queue[name]
        sent = queue[best.first : best.first + best.size]
        del queue[best.first : best.first + best.size]
        start_at_ms = max(now_ms + delay_ms, self.free_at_ms[gpu.name])
        self.free_at_ms[gpu.name] = start_at_ms + gpu.run_ms[name][best.size - 1]
        self.played.sent.append(Sent(now_ms, gpu.name, name, tuple(one.number for one in sent)))
        return True

    def _candidate(self, name: str, run_ms: Sequence[float], now_ms: float) -> Candidate | None:
        """What a slice with these run times would run of a model whose batch is due: without what the drop takes then."""
        due = self._due(name, run_ms, now_ms)
        if not due or due[0] > now_ms:
            return None
        _, first, waiting = due
        if self._rules.is_window:
            first = max(first, self._heads(name, now_ms))
            waiting = len(self._queue[name]) - first
            if not waiting:
                return None
        deadline_at_ms = self._queue[name][first].deadline_at_ms
        size = min(waiting, largest_fitting(run_ms, deadline_at_ms - now_ms - self.models[name].delay_ms))
        return Candidate(name, first, size, deadline_at_ms - run_ms[size - 1])

    def _due(self, name: str, run_ms: Sequence[float], now_ms: float) -> tuple[float, int, int] | tuple[()]:
        """When a batch should go, its first place in the queue, and how many wait from there; (): nothing can run.

        Requests too urgent for these run times are left to faster slices.
        """
        queue, delay_ms = self._queue[name], self.models[name].delay_ms
        first = 0
        while first < len(queue) and queue[first].deadline_at_ms - now_ms < run_ms[0] + delay_ms:
            first += 1
        waiting = len(queue) - first
        if not waiting:
            return ()
        return self._rules.due_at_ms(queue[first], waiting, run_ms, delay_ms), first, waiting

    def _is_due(self, name: str, now_ms: float) -> bool:
        due = self._due(name, self.tables(name)[0], now_ms)
        return not due or due[0] <= now_ms
