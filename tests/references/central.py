"""Symphony's central scheduling, read from the paper (algorithm 1, sections 3.1 to 3.4, appendix D).

A model's *candidate* for a slice is the largest batch from the head of its queue that the head's deadline allows there.
It is *due* from the moment at which its discipline wants it to go:

- deferred: frontrun = deadline - l(b + 1), when not one request more would fit; a full batch at once
- eager: at once
- timeout: when its first request has waited long enough, or at the latest moment, deadline - l(b)

A slice that is free goes to the due candidate with the smallest latest moment; a candidate takes the slice that runs it
fastest, and of equal ones the first. What cannot finish even alone is given up. The window drop also gives up heads
that would force a batch smaller than the target while enough younger requests wait for one of that size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.references.playing import MARGIN_MS, Gpu, Reference, Request, Sent, Setting, largest_fitting

SAMPLE_MS, SAMPLES = 50.0, 100  # of the rate meter, as in the authors' implementation


@dataclass(frozen=True)
class Candidate:
    """A batch that a slice could run now."""

    model: str
    requests: tuple[Request, ...]
    latest_at_ms: float


@dataclass(frozen=True)
class Rules:
    """One discipline. `due_at_ms(head, waiting, run_ms, delay_ms)`: when a batch should go if no more requests come.

    `is_window`: heads may be given up to protect the target. `is_prompt`: that is looked at after every event, as the
    authors do; else when a batch becomes due, when a slice comes for it, and when its head cannot finish any more.
    """

    due_at_ms: Callable[[Request, int, Sequence[float], float], float]
    is_window: bool
    is_prompt: bool = False


def deferred(head: Request, waiting: int, run_ms: Sequence[float], delay_ms: float) -> float:
    if waiting >= len(run_ms):
        return -math.inf
    return head.deadline_at_ms - MARGIN_MS - (run_ms[waiting] + delay_ms)  # l(waiting + 1)


def eager(head: Request, waiting: int, run_ms: Sequence[float], delay_ms: float) -> float:
    return -math.inf


def timeout(timeout_ms: float) -> Callable[[Request, int, Sequence[float], float], float]:
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
        self._waits_for: dict[str, int | None] = dict.fromkeys(self.models)  # a slice, with this head

    def arrive(self, request: Request, now_ms: float) -> None:
        queue = self._queue[request.model]
        queue.append(request)
        queue.sort(key=lambda one: (one.deadline_at_ms, one.number))
        self._arrived[request.model].append(now_ms)

    def moments(self, now_ms: float) -> list[float]:
        found = []
        for name, queue in self._queue.items():
            if not queue:
                continue
            delay_ms = self.models[name].delay_ms
            found += [
                self.free_at_ms[gpu.name] - delay_ms + (MARGIN_MS if delay_ms else 0.0)
                for gpu in self.hosts(name)
            ]
            for run_ms in self._tables(name):
                left = [one for one in queue if one.deadline_at_ms - now_ms >= run_ms[0] + delay_ms]
                if left:
                    found.append(self._rules.due_at_ms(left[0], len(left), run_ms, delay_ms))
            found += [one.deadline_at_ms - self.fastest_ms(name) + MARGIN_MS for one in queue]
        return found

    def look(self, now_ms: float) -> None:
        while self._give_up(now_ms) or self._send(now_ms):
            pass
        for name, queue in self._queue.items():
            if queue and self._is_due(name, now_ms):
                self._waits_for[name] = queue[0].number

    # ------------------------------------------------------------ giving up

    def _give_up(self, now_ms: float) -> bool:
        """What cannot be served any more, and what the window drop takes, of every model that is looked at."""
        for name, queue in self._queue.items():
            if not queue or not self.hosts(name):
                continue
            if queue[0].deadline_at_ms < now_ms + self.fastest_ms(name):
                is_looked_at = True
            elif self._rules.is_prompt or self._waits_for[name] != queue[0].number:
                is_looked_at = self._is_due(name, now_ms)
            else:
                is_looked_at = False
            if is_looked_at and self._drop_heads(name, now_ms):
                return True
        return False

    def _drop_heads(self, name: str, now_ms: float) -> bool:
        queue = self._queue[name]
        run_ms, delay_ms = self._tables(name)[0], self.models[name].delay_ms
        target = self._target(name, run_ms, now_ms) if self._rules.is_window else 1
        tail = self._longest_tail(queue, run_ms, now_ms + delay_ms)
        size = min(target, tail)
        if size == 0:
            lost = list(queue)
        else:
            lost = [one for one in queue if one.deadline_at_ms - now_ms < run_ms[size - 1] + delay_ms]
        self._queue[name] = queue[len(lost) :]
        self.played.given_up.update(one.number for one in lost)
        return bool(lost)

    @staticmethod
    def _longest_tail(queue: list[Request], run_ms: Sequence[float], start_at_ms: float) -> int:
        """How many of the last requests could run as one batch started then."""
        for first in range(len(queue)):
            size = len(queue) - first
            if size <= len(run_ms) and queue[first].deadline_at_ms - start_at_ms >= run_ms[size - 1]:
                return size
        return 0

    def _target(self, name: str, run_ms: Sequence[float], now_ms: float) -> int:
        """The batch size that the model's rate can sustain (`batch_size_estimator.cpp`)."""
        slo_ms, arrived = self.models[name].slo_ms, self._arrived[name]
        samples = int((now_ms - arrived[0]) // SAMPLE_MS)
        if samples == 0:
            return max(1, sum(ms <= slo_ms / 2 for ms in run_ms))
        first = max(0, samples - SAMPLES)
        counted = sum(first <= (at_ms - arrived[0]) // SAMPLE_MS < samples for at_ms in arrived)
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
        for order, gpu in enumerate(self.gpus):
            due = [found for name in gpu.run_ms if (found := self._candidate(name, gpu, now_ms))]
            best = min(due, key=lambda one: one.latest_at_ms, default=None)
            if best is not None:
                if self.free_at_ms[gpu.name] <= now_ms + self.models[best.model].delay_ms:
                    speed = gpu.run_ms[best.model][0]
                    matches.append((speed, order, gpu, best))
        if not matches:
            return False
        _, _, gpu, best = min(matches, key=lambda match: match[:2])
        name, delay_ms = best.model, self.models[best.model].delay_ms
        if self._rules.is_window and self._drop_heads(name, now_ms):
            return True
        start_at_ms = max(now_ms + delay_ms, self.free_at_ms[gpu.name])
        self.free_at_ms[gpu.name] = start_at_ms + gpu.run_ms[name][len(best.requests) - 1]
        sent = {one.number for one in best.requests}
        self._queue[name] = [one for one in self._queue[name] if one.number not in sent]
        self.played.sent.append(Sent(now_ms, gpu.name, name, tuple(one.number for one in best.requests)))
        return True

    def _candidate(self, name: str, gpu: Gpu, now_ms: float) -> Candidate | None:
        """What the slice would run of a model, if that is due; requests too urgent for it are left to faster ones."""
        run_ms, delay_ms = gpu.run_ms[name], self.models[name].delay_ms
        queue = [one for one in self._queue[name] if one.deadline_at_ms - now_ms >= run_ms[0] + delay_ms]
        if not queue or self._rules.due_at_ms(queue[0], len(queue), run_ms, delay_ms) > now_ms:
            return None
        left_ms = queue[0].deadline_at_ms - now_ms - delay_ms
        size = min(len(queue), largest_fitting(run_ms, left_ms))
        return Candidate(name, tuple(queue[:size]), queue[0].deadline_at_ms - run_ms[size - 1])

    def _is_due(self, name: str, now_ms: float) -> bool:
        queue = self._queue[name]
        run_ms, delay_ms = self._tables(name)[0], self.models[name].delay_ms
        return self._rules.due_at_ms(queue[0], len(queue), run_ms, delay_ms) <= now_ms

    def _tables(self, name: str) -> list[Sequence[float]]:
        """The run times of the model on its slices, the fastest first."""
        return sorted((gpu.run_ms[name] for gpu in self.hosts(name)), key=lambda run_ms: run_ms[0])
