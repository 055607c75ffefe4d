"""Rivals that assign a request to a slice before that is free: the thesis' router and Nexus (ADR 0012 and 0013)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.references.playing import MARGIN_MS, Gpu, Reference, Request, Sent, Setting, largest_fitting

ROUNDING_MS = 1e-9


@dataclass
class Open:
    """The thesis' batch under construction of one model: its replica, and since when there is something in it."""

    requests: list[Request] = field(default_factory=list)
    began_at_ms: float = 0.0
    replica: Gpu | None = None
    credits: dict[str, float] = field(default_factory=dict)


class Fixed(Reference):
    """Thesis, listing 4.3: a batch per model is filled to the target or for MAX_WAIT, then is its replica's."""

    def __init__(self, setting: Setting, target: int, wait_ms: float) -> None:
        super().__init__(setting)
        self._target = target
        self._wait_ms = wait_ms
        self._open = {name: Open() for name in self.models}
        self._closed: dict[str, list[tuple[str, list[Request]]]] = {gpu.name: [] for gpu in self.gpus}

    def arrive(self, request: Request, now_ms: float) -> None:
        opened = self._open[request.model]
        if not opened.requests:
            opened.began_at_ms = now_ms
        opened.requests.append(request)
        self._close_if_due(request.model, now_ms)  # deadlines play no part in forming a batch

    def moments(self, now_ms: float) -> list[float]:
        found = []
        for name, opened in self._open.items():
            if opened.requests:
                found.append(opened.began_at_ms + self._wait_ms)
            found += [one.deadline_at_ms - self.fastest_ms(name) + MARGIN_MS for one in opened.requests]
        for gpu in self.gpus:
            for name, requests in self._closed[gpu.name]:
                found += [one.deadline_at_ms - self._alone_ms(name, gpu) + MARGIN_MS for one in requests]
                found.append(self.free_at_ms[gpu.name] - self.models[name].delay_ms)
                found.append(self.free_at_ms[gpu.name] - self.models[name].delay_ms + MARGIN_MS)
        return found

    def look(self, now_ms: float) -> None:
        for name, opened in self._open.items():
            opened.requests = self._in_time(opened.requests, self.fastest_ms(name), now_ms)
            self._close_if_due(name, now_ms)
        for gpu in self.gpus:
            waiting = self._closed[gpu.name]
            for place, (name, requests) in enumerate(waiting):
                waiting[place] = (name, self._in_time(requests, self._alone_ms(name, gpu), now_ms))
            while waiting:
                name, requests = waiting[0]
                delay_ms = self.models[name].delay_ms
                if requests and self.free_at_ms[gpu.name] > now_ms + delay_ms:
                    break
                waiting.pop(0)
                if requests:
                    start_at_ms = max(now_ms + delay_ms, self.free_at_ms[gpu.name])
                    self.free_at_ms[gpu.name] = start_at_ms + gpu.run_ms[name][len(requests) - 1]
                    numbers = tuple(one.number for one in requests)
                    self.played.sent.append(Sent(now_ms, gpu.name, name, numbers))

    def _close_if_due(self, name: str, now_ms: float) -> None:
        opened = self._open[name]
        if not opened.requests:
            return
        opened.replica = opened.replica or self._turn(name)
        is_full = len(opened.requests) >= self._size(name, opened.replica)
        if is_full or now_ms >= opened.began_at_ms + self._wait_ms:
            closed = sorted(opened.requests, key=lambda one: (one.deadline_at_ms, one.number))
            self._closed[opened.replica.name].append((name, closed))
            opened.requests, opened.replica = [], None

    def _alone_ms(self, name: str, gpu: Gpu) -> float:
        return gpu.run_ms[name][0] + self.models[name].delay_ms

    def _in_time(self, requests: list[Request], alone_ms: float, now_ms: float) -> list[Request]:
        lost = {one.number for one in requests if one.deadline_at_ms < now_ms + alone_ms}
        self.played.given_up |= lost
        return [one for one in requests if one.number not in lost]

    def _size(self, name: str, gpu: Gpu) -> int:
        return min(self._target, len(gpu.run_ms[name]))

    def _turn(self, name: str) -> Gpu:
        """Smooth weighted round-robin: everybody gains its weight, the richest goes and pays for all."""
        owned = self._open[name].credits
        gains = {gpu.name: gpu.weight.get(name, 1.0) / self._size(name, gpu) for gpu in self.hosts(name)}
        for gpu, gain in gains.items():
            owned[gpu] = owned.get(gpu, 0.0) + gain
        richest = max(owned.values())
        chosen = next(gpu for gpu in self.hosts(name) if owned[gpu.name] >= richest - ROUNDING_MS)
        owned[chosen.name] -= sum(gains.values())
        return chosen


@dataclass
class Turn:
    """A model on a slice under Nexus' assignment."""

    model: str
    size_max: int
    rate: float
    routed: int = 0
    queue: list[Request] = field(default_factory=list)


Shares = Mapping[str, Sequence[tuple[str, int, float]]]
"""Per slice the models that take turns there, each with its batch size and its rate a millisecond."""


class Nexus(Reference):
    """`assign(rates)`: the shares; what they must be like is tested by itself."""

    def __init__(
        self, setting: Setting, assign: Callable[[Mapping[str, float]], Shares], epoch_ms: float
    ) -> None:
        super().__init__(setting)
        self._assign = assign
        self._epoch_ms = epoch_ms
        self._next_epoch_at_ms: float | None = None
        self._arrived: dict[str, list[float]] = {name: [] for name in self.models}
        self._turns: dict[str, list[Turn]] = {gpu.name: [] for gpu in self.gpus}
        self._routes: dict[str, list[tuple[Gpu, Turn]]] = {}
        self._set_up(dict.fromkeys(self.models, 1.0))

    def arrive(self, request: Request, now_ms: float) -> None:
        if self._next_epoch_at_ms is None:
            self._next_epoch_at_ms = now_ms + min(1000.0, self._epoch_ms)
        self._arrived[request.model].append(now_ms)
        self._route(request)

    def moments(self, now_ms: float) -> list[float]:
        found = [] if self._next_epoch_at_ms is None else [self._next_epoch_at_ms]
        for gpu in self.gpus:
            for turn in self._turns[gpu.name]:
                delay_ms = self.models[turn.model].delay_ms
                alone_ms = gpu.run_ms[turn.model][0] + delay_ms
                found += [one.deadline_at_ms - alone_ms + MARGIN_MS for one in turn.queue]
                if turn.queue:
                    found.append(self.free_at_ms[gpu.name] - delay_ms)
                    found.append(self.free_at_ms[gpu.name] - delay_ms + (MARGIN_MS if delay_ms else 0.0))
        return found

    def look(self, now_ms: float) -> None:
        if self._next_epoch_at_ms is not None and now_ms >= self._next_epoch_at_ms:
            rates = {name: self._rate(name, now_ms) for name in self.models}
            self._set_up(rates if any(rates.values()) else dict.fromkeys(self.models, 1.0))
            self._next_epoch_at_ms = now_ms + self._epoch_ms if any(rates.values()) else None
        for gpu in self.gpus:
            for turn in self._turns[gpu.name]:
                alone_ms = gpu.run_ms[turn.model][0] + self.models[turn.model].delay_ms
                self._lose(turn, [one for one in turn.queue if one.deadline_at_ms < now_ms + alone_ms])
            self._run(gpu, now_ms)

    def _lose(self, turn: Turn, lost: list[Request]) -> None:
        self.played.given_up.update(one.number for one in lost)
        turn.queue = [one for one in turn.queue if one not in lost]

    def _rate(self, name: str, now_ms: float) -> float:
        """The mean of the last 100 samples of 50 ms that are complete, a millisecond."""
        arrived = self._arrived[name]
        samples = int((now_ms - arrived[0]) // 50.0) if arrived else 0
        if not samples:
            return 0.0
        first = max(0, samples - 100)
        counted = sum(first <= (at_ms - arrived[0]) // 50.0 < samples for at_ms in arrived)
        return counted / (50.0 * (samples - first))

    def _set_up(self, rates: Mapping[str, float]) -> None:
        waiting: dict[str, list[Request]] = {name: [] for name in self.models}
        for name, routes in self._routes.items():
            for _, turn in routes:
                waiting[name] += turn.queue
        shares = self._assign(rates)
        self._turns = {gpu.name: [] for gpu in self.gpus}
        self._routes = {name: [] for name in self.models}
        for gpu in self.gpus:
            for name, size, rate in shares.get(gpu.name, ()):
                self._add(gpu, Turn(name, size, rate))
        for name in self.models:
            if not self._routes[name]:
                budget_ms = self.models[name].slo_ms - self.models[name].delay_ms
                hosts = [gpu for gpu in self.hosts(name) if gpu.run_ms[name][0] <= budget_ms] or self.hosts(
                    name
                )
                fewest = min(hosts, key=lambda gpu: len(self._turns[gpu.name]))
                run_ms = fewest.run_ms[name]
                self._add(fewest, Turn(name, max(1, largest_fitting(run_ms, budget_ms / 2)), 1.0))
        for requests in waiting.values():
            for request in requests:
                self._route(request)

    def _add(self, gpu: Gpu, turn: Turn) -> None:
        self._turns[gpu.name].append(turn)
        self._routes[turn.model].append((gpu, turn))

    def _route(self, request: Request) -> None:
        """To the slice whose share has been used least; all that come together, before a slice runs any of it."""
        _, turn = min(self._routes[request.model], key=lambda route: (route[1].routed + 1) / route[1].rate)
        turn.routed += 1
        turn.queue.append(request)
        turn.queue.sort(key=lambda one: (one.deadline_at_ms, one.number))

    def _run(self, gpu: Gpu, now_ms: float) -> None:
        """A free slice runs its models in turn, at most the assigned batch, heads dropped early."""
        turns = self._turns[gpu.name]
        for turn in list(turns):
            if not turn.queue:
                continue
            run_ms, delay_ms = gpu.run_ms[turn.model], self.models[turn.model].delay_ms
            if self.free_at_ms[gpu.name] > now_ms + delay_ms:
                return
            self._drop_early(turn, run_ms, now_ms + delay_ms)
            if not turn.queue:
                continue
            left_ms = turn.queue[0].deadline_at_ms - now_ms - delay_ms
            size = min(len(turn.queue), turn.size_max, largest_fitting(run_ms, left_ms))
            taken, turn.queue = turn.queue[:size], turn.queue[size:]
            start_at_ms = max(now_ms + delay_ms, self.free_at_ms[gpu.name])
            self.free_at_ms[gpu.name] = start_at_ms + run_ms[size - 1]
            numbers = tuple(one.number for one in taken)
            self.played.sent.append(Sent(now_ms, gpu.name, turn.model, numbers))
            turns.remove(turn)
            turns.append(turn)
            return

    def _drop_early(self, turn: Turn, run_ms: Sequence[float], start_at_ms: float) -> None:
        """Give up heads that cannot finish in a batch of the assigned size, or of all that could still run."""
        tail = 0
        for size in range(1, min(len(turn.queue), len(run_ms)) + 1):
            if turn.queue[-size].deadline_at_ms - start_at_ms >= run_ms[size - 1]:
                tail = size
        size = min(turn.size_max, tail)
        limit_ms = run_ms[size - 1] if size else math.inf
        self._lose(turn, [one for one in turn.queue if one.deadline_at_ms - start_at_ms < limit_ms])
