"""Runs one core on the real clock: hear, decide, do, sleep, in bounded turns on one thread.

A turn takes at most `TURN_LIMIT` events from each source and looks at the core's timer after every one of
them, so a flood on one socket cannot starve another socket or a timer. Sleeping is a `select` on an epoll
descriptor that holds every source's descriptor: `epoll` itself can only sleep whole milliseconds, `select`
sleeps microseconds but cannot hold descriptors over 1023, which the one epoll descriptor, made at the start,
never is.

ZeroMQ's descriptors are edge-triggered: they say that something *changed*, once, and a send can swallow the
edge. So a source says by `has_more` whether it would give something now, and the driver never sleeps then.
"""

from __future__ import annotations

import contextlib
import gc
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from fabric.clock import Clock
from fabric.messages import StatusListed, replaced
from roles.core import Core, Tick

TURN_LIMIT = 64  # events a source may give in one turn; 64 x ~20 us keeps a turn near a millisecond
SLEEP_MAX_MS = 200.0  # a bound on every sleep: a lost wake-up costs this much and no more
COLLECT_EVERY_MS = 2_000.0
COLLECT_IF_IDLE_MS = (
    20.0  # a full collection of a frozen heap takes a few ms: only with this much time to spare
)

EventT = TypeVar("EventT")
EventT_co = TypeVar("EventT_co", covariant=True)
ActionT = TypeVar("ActionT")


class Source(Protocol[EventT_co]):
    """Something a role hears from: a socket, an executor, a thread pool, a child process."""

    def fileno(self) -> int:
        """Readable when `take` may have something; -1: no descriptor, only `wake_at_ms`."""
        ...

    @property
    def has_more(self) -> bool:
        """Whether `take` would give something now."""
        ...

    @property
    def wake_at_ms(self) -> float | None:
        """The moment at which `take` will have something by itself; None: never."""
        ...

    def take(self, limit: int, now_ms: float) -> Sequence[EventT_co]:
        """At most `limit` events, without blocking."""
        ...


_STEP_BITS = 4  # the first 16 buckets are a microsecond wide, then eight share every doubling: 12.5 % at most
_BUCKETS = 8 * 30  # up to two minutes and more


@dataclass(slots=True)
class DriverStats:
    """What a driver measured of itself. Lateness: how long after `wake_at_ms` a tick was handled."""

    turns: int = 0
    ticks: int = 0
    late_ms_max: float = 0.0
    turn_ms_max: float = 0.0
    collect_ms_max: float = 0.0
    late_buckets: list[int] = field(default_factory=lambda: [0] * _BUCKETS)

    def note_lateness(self, late_ms: float) -> None:
        """Count one tick."""
        self.ticks += 1
        self.late_ms_max = max(self.late_ms_max, late_ms)
        late_us = int(late_ms * 1e3)
        shift = max(0, late_us.bit_length() - _STEP_BITS)
        self.late_buckets[min(_BUCKETS - 1, 8 * shift + (late_us >> shift))] += 1

    def late_ms(self, quantile: float) -> float:
        """An upper bound of that quantile of the lateness, in ms, at most an eighth too high; 0 before the first tick."""
        left = quantile * self.ticks
        for bucket, count in enumerate(self.late_buckets):
            left -= count
            if left <= 0 and count:
                shift = max(0, bucket // 8 - 1)
                return float((bucket - 8 * shift + 1) << shift) / 1e3
        return 0.0

    def told_in(self, status: StatusListed) -> StatusListed:
        """A role's status with what its loop measured, since the start: the same counters for every role."""
        measured = {
            "turns": float(self.turns),
            "ticks": float(self.ticks),
            "timer_late_p50_ms": self.late_ms(0.5),
            "timer_late_p99_ms": self.late_ms(0.99),
            "timer_late_ms_max": self.late_ms_max,
            "turn_ms_max": self.turn_ms_max,
            "collect_ms_max": self.collect_ms_max,
        }
        return replaced(status, counters={**status.counters, **measured})


def _nothing() -> None:
    """For roles that gather nothing."""


class Driver(Generic[EventT, ActionT]):
    """Runs `core` until told to stop. `perform` does one action; it may not block.

    `on_turn_end`: what a turn's actions gathered, such as messages to send, goes before the driver sleeps.
    """

    def __init__(
        self,
        core: Core[EventT | Tick, ActionT],
        sources: Sequence[Source[EventT]],
        perform: Callable[[ActionT], None],
        clock: Clock,
        on_turn_end: Callable[[], None] = _nothing,
    ) -> None:
        self.stats = DriverStats()
        self._on_turn_end = on_turn_end
        self._core = core
        self._sources = list(sources)
        self._perform = perform
        self._clock = clock
        self._epoll = select.epoll()
        self._collect_at_ms = 0.0
        self._fed_at_ms = clock.now_ms()
        self._wanted_at_ms: float | None = None
        self._due_at_ms = 0.0
        for source in self._sources:
            if source.fileno() >= 0:
                self._epoll.register(source.fileno(), select.EPOLLIN)

    def run(self, is_stopping: Callable[[], bool]) -> None:
        """Turn until `is_stopping()`. Whoever sets it must also make a source's descriptor readable."""
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            while not is_stopping():
                self.turn()
        finally:
            gc.enable()
            gc.unfreeze()

    def turn(self) -> None:
        """Hear from every source, tick if due, then sleep until something is due."""
        began_ms = self._clock.now_ms()
        for source in self._sources:
            if source.has_more or _is_due(source.wake_at_ms, began_ms):
                for event in source.take(TURN_LIMIT, self._clock.now_ms()):
                    self._feed(event)
                    self._tick_if_due()
        self._tick_if_due()
        self._on_turn_end()
        self.stats.turns += 1
        self.stats.turn_ms_max = max(self.stats.turn_ms_max, self._clock.now_ms() - began_ms)
        self._sleep()

    def close(self) -> None:
        """Give the descriptor back."""
        self._epoll.close()

    def _feed(self, event: EventT | Tick) -> None:
        self._fed_at_ms = now_ms = self._clock.now_ms()
        for action in self._core.handle(event, now_ms):
            self._perform(action)

    def _tick_if_due(self) -> None:
        wake_at_ms = self._core.wake_at_ms
        if wake_at_ms is None:
            self._wanted_at_ms = None
            return
        if wake_at_ms != self._wanted_at_ms:
            self._wanted_at_ms = wake_at_ms
            # A core that wants a moment of the past means now: only what passes from here on is our doing.
            self._due_at_ms = max(wake_at_ms, self._fed_at_ms)
        now_ms = self._clock.now_ms()
        if now_ms >= wake_at_ms:
            self._wanted_at_ms = None
            self.stats.note_lateness(now_ms - self._due_at_ms)
            self._feed(Tick())

    def _sleep(self) -> None:
        if any(source.has_more for source in self._sources):
            return
        now_ms = self._clock.now_ms()
        wake_at_ms = now_ms + SLEEP_MAX_MS
        for moment_ms in (self._core.wake_at_ms, *(source.wake_at_ms for source in self._sources)):
            if moment_ms is not None and moment_ms < wake_at_ms:
                wake_at_ms = moment_ms
        wait_ms = wake_at_ms - now_ms
        if wait_ms > COLLECT_IF_IDLE_MS and now_ms >= self._collect_at_ms:
            wait_ms -= self._collect(now_ms)
        if wait_ms > 0:
            select.select([self._epoll], [], [], wait_ms / 1e3)
        # The nested descriptor is level-triggered on what epoll holds: emptying it here keeps select quiet.
        with contextlib.suppress(InterruptedError):
            self._epoll.poll(0)

    def _collect(self, now_ms: float) -> float:
        gc.collect()
        took_ms = self._clock.now_ms() - now_ms
        self._collect_at_ms = now_ms + COLLECT_EVERY_MS
        self.stats.collect_ms_max = max(self.stats.collect_ms_max, took_ms)
        return took_ms


def _is_due(moment_ms: float | None, now_ms: float) -> bool:
    return moment_ms is not None and moment_ms <= now_ms
