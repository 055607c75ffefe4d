"""Clockwork and Shepherd's Flex, read from Symphony section 2.2 and ADR 0013.

Both keep one queue per model, give up only what cannot finish even alone, and let no slice idle while it could finish
something that waits. They differ in what a free slice takes, and Shepherd may stop what runs.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from tests.references.playing import Gpu, Reference, Request, Sent, Setting, largest_fitting


@dataclass
class Running:
    """A batch between its sending and its end."""

    sent: Sent
    requests: list[Request]
    end_at_ms: float


class Backlog(Reference):
    """Eager and central."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.queue: dict[str, list[Request]] = {name: [] for name in self.models}
        self.running: dict[str, list[Running]] = {gpu.name: [] for gpu in self.gpus}
        self._arrived: str | None = None

    @abstractmethod
    def choose(self, gpu: Gpu, now_ms: float) -> tuple[str, int] | None:
        """The model and the batch size that a free slice takes."""

    def overtake(self, model: str, now_ms: float) -> None:
        """A request of the model has come, and no slice was free for it."""

    def arrive(self, request: Request, now_ms: float) -> None:
        self.put(request)
        self._arrived = request.model

    def put(self, request: Request) -> None:
        """Queue it by its deadline."""
        queue = self.queue[request.model]
        queue.append(request)
        queue.sort(key=lambda one: (one.deadline_at_ms, one.number))

    def moments(self, now_ms: float) -> list[float]:
        found = [
            one.deadline_at_ms - self.fastest_ms(name) + 1e-5
            for name, queue in self.queue.items()
            for one in queue
        ]
        return found + [
            self.free_at_ms[gpu.name] - self.models[name].delay_ms for gpu in self.gpus for name in gpu.run_ms
        ]

    def look(self, now_ms: float) -> None:
        arrived, self._arrived = self._arrived, None
        is_waiting = arrived is not None
        while True:
            self._expire(now_ms)
            match = self._match(now_ms)
            if match is None:
                break
            gpu, name, size = match
            is_waiting = is_waiting and name != arrived
            self.send(gpu, name, size, now_ms)
        if arrived is not None and is_waiting and self.queue[arrived]:
            self.overtake(arrived, now_ms)

    def fit(self, gpu: Gpu, name: str, start_at_ms: float) -> int:
        """The largest batch of a model that a slice can start then and finish in time."""
        if not self.queue[name]:
            return 0
        left_ms = self.queue[name][0].deadline_at_ms - start_at_ms
        return min(len(self.queue[name]), largest_fitting(gpu.run_ms[name], left_ms))

    def start_at_ms(self, gpu: Gpu, name: str, now_ms: float) -> float:
        """When a batch sent now could start."""
        return max(now_ms + self.models[name].delay_ms, self.free_at_ms[gpu.name])

    def send(self, gpu: Gpu, name: str, size: int, now_ms: float) -> None:
        start_at_ms = self.start_at_ms(gpu, name, now_ms)
        taken, self.queue[name] = self.queue[name][:size], self.queue[name][size:]
        sent = Sent(now_ms, gpu.name, name, tuple(one.number for one in taken))
        end_at_ms = start_at_ms + gpu.run_ms[name][size - 1]
        self.played.sent.append(sent)
        self.running[gpu.name].append(Running(sent, taken, end_at_ms))
        self.free_at_ms[gpu.name] = end_at_ms

    def _expire(self, now_ms: float) -> None:
        for name, queue in self.queue.items():
            lost = [one for one in queue if one.deadline_at_ms < now_ms + self.fastest_ms(name)]
            self.queue[name] = [one for one in queue if one not in lost]
            self.played.given_up.update(one.number for one in lost)

    def _match(self, now_ms: float) -> tuple[Gpu, str, int] | None:
        for gpu in self.gpus:
            delay_ms = min(self.models[name].delay_ms for name in gpu.run_ms)
            if self.free_at_ms[gpu.name] - delay_ms <= now_ms:
                chosen = self.choose(gpu, now_ms)
                if chosen is not None:
                    return gpu, *chosen
        return None


class Clockwork(Backlog):
    """Batches of 1, 2, 4, 8, … or of all `sizes`; the one whose latest start is the earliest that can still be met."""

    def __init__(self, setting: Setting, sizes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128)) -> None:
        super().__init__(setting)
        self._sizes = sizes

    def choose(self, gpu: Gpu, now_ms: float) -> tuple[str, int] | None:
        candidates = []
        for name in gpu.run_ms:
            fitting = self.fit(gpu, name, self.start_at_ms(gpu, name, now_ms))
            for size in self._sizes:
                if size <= fitting:
                    latest_at_ms = self.queue[name][0].deadline_at_ms - gpu.run_ms[name][size - 1]
                    candidates.append((latest_at_ms, name, size))
        if not candidates:
            return None
        _, name, size = min(candidates)
        return name, size


class Shepherd(Backlog):
    """The largest batch; one `ratio` times as large as a running one stops it, and its requests wait again."""

    def __init__(self, setting: Setting, ratio: float = 3.0) -> None:
        super().__init__(setting)
        self._ratio = ratio

    def choose(self, gpu: Gpu, now_ms: float) -> tuple[str, int] | None:
        candidates = []
        for name in gpu.run_ms:
            size = self.fit(gpu, name, self.start_at_ms(gpu, name, now_ms))
            if size:
                candidates.append((-size, self.queue[name][0].deadline_at_ms, name))
        if not candidates:
            return None
        size, _, name = min(candidates)
        return name, -size

    def overtake(self, model: str, now_ms: float) -> None:
        victim, smallest = None, math.inf
        for gpu in self.hosts(model):
            running = [one for one in self.running[gpu.name] if one.end_at_ms > now_ms]
            if len(running) == 1 and len(running[0].requests) < smallest:
                victim, smallest = gpu, len(running[0].requests)
        if victim is None:
            return
        size = self.fit(victim, model, now_ms + self.models[model].delay_ms)
        if size < self._ratio * smallest:
            return
        stopped = self.running[victim.name].pop()
        self.played.preempted.append((now_ms, victim.name))
        self.played.sent.remove(stopped.sent)
        self.free_at_ms[victim.name] = now_ms
        self.send(victim, model, size, now_ms)
        for request in stopped.requests:
            self.put(request)
        self.look(now_ms)
