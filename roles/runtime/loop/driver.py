"""Runs cores on the real clock: hear, decide, do, sleep, in bounded turns on one thread.

A turn takes at most `TURN_LIMIT` events from each source and looks at the cores' timers after every one of
them, so a flood on one socket cannot starve another socket or a timer. Only sources that have something are
asked: after every sleep the caches are cold, and what a turn touches is what it costs.

Sleeping is coarse and then fine. `epoll` knows what is readable but sleeps whole milliseconds; the last one or two
are a `select` on the epoll descriptor, which sleeps microseconds but cannot hold descriptors over 1023, which
this one, made at the start, never is.

The collector is off while a loop runs, as it would stop it at any moment for any time. Instead the loop collects: all,
when it has time to spare; the young, as soon as there are many; and all at last, if it never has time to spare. So
garbage is bounded and a pause is short: about a millisecond for the young, the live heap's share for all of it.

ZeroMQ's descriptors are edge-triggered: they say that something *changed*, once, and a send can swallow the
edge. So a source says by `has_more` whether it may have something that its descriptor does not tell, and the
driver never sleeps then.
"""

from __future__ import annotations

import gc
import logging
import math
import select
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from msgspec.structs import replace

from fabric.clock import Clock, MonotonicClock
from fabric.errors import LocalProtocolError
from fabric.messages import StatusListed
from roles.runtime.core import Core, Tick
from roles.runtime.loop.sources import Source, Teller, is_fed_within, teller_of, timer_of
from roles.runtime.metrics.usage import cpu_ms, resident_bytes
from roles.runtime.process import wake_exactly

TURN_LIMIT = 64  # events a source may give in one turn; 64 x ~20 us keeps a turn near a millisecond
SLEEP_MAX_MS = 200.0  # a bound on every sleep: a lost wake-up costs this much and no more
COARSE_FROM_MS = 2.0
COLLECT_EVERY_MS = 2_000.0
COLLECT_IF_IDLE_MS = (
    20.0  # a full collection of a frozen heap takes a few ms: only with this much time to spare
)
COLLECT_AT_LAST_MS = 20_000.0  # a loop that has had no time to spare for so long collects all the same
YOUNG_MAX = 10_000  # objects made and not gone again: collecting them takes about a millisecond
YOUNG_TIMES_MAX = 3  # collections of the youngest, before those that outlived one are looked at with them
RECENT_MAX = 128  # events that a role remembers, for the report of a defect: with more, each one's memory has left the cache
SWITCH_S = 1e-4  # another thread of the process that computes lets the loop in after so long, not after 5 ms

log = logging.getLogger("tenuto")
EventT = TypeVar("EventT")
ActionT = TypeVar("ActionT")


_STEP_BITS = 4  # the first 16 buckets are a microsecond wide, then eight share every doubling: 12.5 % at most
_BUCKETS = 8 * 30  # up to two minutes and more


@dataclass(slots=True)
class DriverStats:
    """What a driver measured of itself. Lateness: how long after `wake_at_ms` a tick was handled."""

    turns: int = 0
    ticks: int = 0
    late_ms_total: float = 0.0
    late_ms_max: float = 0.0
    turn_ms_max: float = 0.0
    collect_ms_max: float = 0.0
    unsendable: int = 0
    late_buckets: list[int] = field(default_factory=lambda: [0] * _BUCKETS)

    def note_lateness(self, late_ms: float) -> None:
        """Count one tick."""
        self.ticks += 1
        self.late_ms_total += late_ms
        self.late_ms_max = max(self.late_ms_max, late_ms)
        late_us = int(late_ms * 1e3)
        shift = max(0, late_us.bit_length() - _STEP_BITS)
        self.late_buckets[min(_BUCKETS - 1, 8 * shift + (late_us >> shift))] += 1

    def late_ms(self, quantile: float) -> float:
        """An upper bound of that quantile of the lateness, in ms; 0 before the first tick.

        It is at most an eighth too high, and never over the largest.
        """
        left = quantile * self.ticks
        for bucket, count in enumerate(self.late_buckets):
            left -= count
            if left <= 0 and count:
                shift = max(0, bucket // 8 - 1)
                return min(float((bucket - 8 * shift + 1) << shift) / 1e3, self.late_ms_max)
        return 0.0

    def told_in(self, status: StatusListed) -> StatusListed:
        """A role's status with what its process and loop measured, since the start: the same counters for every role."""
        measured = {
            "cpu_ms": cpu_ms(),
            "memory_bytes": resident_bytes(),
            "turns": float(self.turns),
            "ticks": float(self.ticks),
            "timer_late_p50_ms": self.late_ms(0.5),
            "timer_late_p99_ms": self.late_ms(0.99),
            "timer_late_ms_max": self.late_ms_max,
            "turn_ms_max": self.turn_ms_max,
            "collect_ms_max": self.collect_ms_max,
            "messages_unsendable": float(self.unsendable),
        }
        return replace(status, counters={**status.counters, **measured})


def _nothing() -> None:
    """For roles that gather nothing."""


class Role(Generic[EventT, ActionT]):
    """One core, what it hears from, and what does as it says. `perform` does one action; it may not block.

    What it cannot send (LocalProtocolError), such as others' words in one, is counted and lost: no peer ends a role.
    `on_turn_end`: what a turn's actions gathered, such as messages to send, goes before the driver sleeps.
    """

    def __init__(
        self,
        core: Core[EventT | Tick, ActionT],
        sources: Sequence[Source[EventT]],
        perform: Callable[[ActionT], None],
        on_turn_end: Callable[[], None] = _nothing,
    ) -> None:
        self.sources = sources
        self.on_turn_end = on_turn_end
        self.stats = DriverStats()
        """Of the loop that runs this role, with all that it runs."""
        self.recent: deque[tuple[float, EventT | Tick]] = deque(maxlen=RECENT_MAX)
        """What it took last, newest last, with the moments."""
        self._remember = self.recent.append
        self._core = core
        self._perform = perform
        self.next_at_ms = math.inf
        """The core's timer, as of its last event or the turn's end; infinite: it wants none."""
        self._wanted_at_ms: float | None = None
        self._fed_at_ms = 0.0
        self._due_at_ms = 0.0
        self._said = ""

    @property
    def name(self) -> str:
        """What its core is called."""
        return type(self._core).__name__

    def begin(self, now_ms: float, stats: DriverStats) -> None:
        """A driver takes the role up. Moments before now are no lateness of its."""
        self._fed_at_ms = now_ms
        self.stats = stats
        self.look_at_timer()

    def look_at_timer(self) -> None:
        """Whatever happened to the core may have changed it."""
        wake_at_ms = self._core.wake_at_ms
        if wake_at_ms != self._wanted_at_ms:
            self._aim(wake_at_ms)

    def _aim(self, wake_at_ms: float | None) -> None:
        self._wanted_at_ms = wake_at_ms
        if wake_at_ms is None:
            self.next_at_ms = math.inf
        else:
            self.next_at_ms = wake_at_ms
            # A core that wants a moment of the past means now: only what passes from here on is our doing.
            self._due_at_ms = max(wake_at_ms, self._fed_at_ms)

    def feed(self, event: EventT | Tick, now_ms: float) -> None:
        """Let the core take an event, and do what it decides."""
        self._fed_at_ms = now_ms
        self._remember((now_ms, event))
        core, perform = self._core, self._perform
        for action in core.handle(event, now_ms):
            try:
                perform(action)
            except LocalProtocolError as error:
                self.note_unsendable(str(error))
        wake_at_ms = core.wake_at_ms  # `look_at_timer`, without a call for every event
        if wake_at_ms != self._wanted_at_ms:
            self._aim(wake_at_ms)

    def note_unsendable(self, why: str) -> None:
        """Count what could not be sent: also what was gathered, and goes as the turn ends."""
        self.stats.unsendable += 1
        if why != self._said:  # else it is tried again and again
            log.warning("message_unsendable error=%r", why)
        self._said = why

    def tick(self, clock: Clock) -> None:
        """Feed the tick that the core wants: its moment has come."""
        now_ms = clock.now_ms()
        self.stats.note_lateness(now_ms - self._due_at_ms)
        self._aim(None)
        self.feed(Tick(), now_ms)

    def end_turn(self) -> None:
        """Let go what the turn's actions gathered."""
        self.on_turn_end()
        self.look_at_timer()


OnDefect = Callable[[Exception, Sequence[Role[Any, Any]]], object]


def _ignored(error: Exception, roles: Sequence[Role[Any, Any]]) -> None:
    """For loops whose errors are their caller's."""


class Driver:
    """Runs `roles` until told to stop: mostly one; several of one process share turns, thread and sleep.

    What a role hands to another one of its process is heard in the same turn, and once what that one hands back.
    `on_defect` is told of what a turn raised, before that goes on its way.
    """

    def __init__(
        self,
        roles: Sequence[Role[Any, Any]],
        clock: Clock,
        on_defect: OnDefect = _ignored,
    ) -> None:
        self.stats = DriverStats()
        self._roles = roles
        self._clock = clock
        self._epoll = select.epoll()
        self._on_defect = on_defect
        self._collect_at_ms = 0.0
        sources = [source for role in roles for source in role.sources]
        # After every sleep the caches are cold: what need not be asked is not.
        self._tellers = _tellers(sources)
        self._timers = [(source, timer) for source in sources if (timer := timer_of(source)) is not None]
        self._passes = _passes(roles)
        self._places = {source: place for place, source in enumerate(sources)}
        self._by_descriptor = {source.fileno(): source for source in sources if source.fileno() >= 0}
        self._taken: list[Source[Any]] = []
        for descriptor in self._by_descriptor:
            self._epoll.register(descriptor, select.EPOLLIN)
        self._ready: set[Source[Any]] = {source for source in sources if source.has_more}
        self._ready.update(
            self._by_descriptor[found] for found, _ in self._epoll.poll(0) if found in self._by_descriptor
        )
        for role in roles:
            role.begin(clock.now_ms(), self.stats)

    def run(self, is_stopping: Callable[[], bool]) -> None:
        """Turn until `is_stopping()`. Whoever sets it must also make a descriptor readable."""
        wake_exactly()
        switch_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        gc.collect()
        gc.freeze()
        gc.disable()
        self._collect_at_ms = self._clock.now_ms() + COLLECT_EVERY_MS
        try:
            while not is_stopping():
                self.turn()
        except Exception as error:
            self._on_defect(error, self._roles)
            raise
        finally:
            gc.enable()
            gc.unfreeze()
            sys.setswitchinterval(switch_s)

    def turn(self) -> None:
        """Hear from every source that has something, tick if due, then sleep until something is due."""
        clock, roles, ready = self._clock, self._roles, self._ready
        taken = self._taken = []
        began_ms = now_ms = clock.now_ms()
        for role, own, handed in self._passes:
            for source, teller in handed:
                if teller.has_more:
                    ready.add(source)
            due = ready & own
            ready -= due
            feed = role.feed
            for source in sorted(due, key=self._places.__getitem__):
                taken.append(source)
                for event in source.take(TURN_LIMIT, now_ms):
                    now_ms = clock.now_ms()
                    feed(event, now_ms)
                    for other in roles:
                        if now_ms >= other.next_at_ms:
                            other.tick(clock)
            for other in roles:
                if now_ms >= other.next_at_ms:
                    other.tick(clock)
            role.end_turn()
        now_ms = clock.now_ms()
        self.stats.turns += 1
        self.stats.turn_ms_max = max(self.stats.turn_ms_max, now_ms - began_ms)
        young, older, _ = gc.get_count()
        if young > YOUNG_MAX:
            now_ms = self._collect(now_ms, 1 if older > YOUNG_TIMES_MAX else 0)
        self._ready = self._sleep(now_ms)

    def close(self) -> None:
        """Give the descriptor back."""
        self._epoll.close()

    def _sleep(self, now_ms: float) -> set[Source[Any]]:
        """Until a source has something or a moment comes; the sources to hear from."""
        wake_at_ms = now_ms + SLEEP_MAX_MS
        for role in self._roles:
            wake_at_ms = min(wake_at_ms, role.next_at_ms)
        ready: set[Source[Any]] = set()
        timed: list[tuple[float, Source[Any]]] = []
        # What a `take` has left, its descriptor may not tell of a second time.
        ready.update(source for source in self._taken if source.has_more)
        for source, teller in self._tellers:
            if teller.has_more:
                ready.add(source)
        for source, timer in self._timers:
            at_ms = timer.wake_at_ms
            if at_ms is not None:
                timed.append((at_ms, source))
                if at_ms < wake_at_ms:
                    wake_at_ms = at_ms
        if ready:
            wake_at_ms = now_ms
        over_ms = now_ms - self._collect_at_ms
        if over_ms >= 0 and (wake_at_ms - now_ms > COLLECT_IF_IDLE_MS or over_ms >= COLLECT_AT_LAST_MS):
            now_ms = self._collect(now_ms, 2)
            self._collect_at_ms = now_ms + COLLECT_EVERY_MS
        for descriptor, _ in self._readable(wake_at_ms, now_ms):
            heard = self._by_descriptor.get(descriptor)
            if heard is not None:
                ready.add(heard)
        if timed:
            now_ms = self._clock.now_ms()
            ready.update(source for at_ms, source in timed if at_ms <= now_ms)
        return ready

    def _readable(self, wake_at_ms: float, now_ms: float) -> list[tuple[int, int]]:
        """What is readable by `wake_at_ms` at the latest; all of it, though one sleep ends with the first."""
        wait_ms = wake_at_ms - now_ms
        if wait_ms > COARSE_FROM_MS:
            found = self._epoll.poll((int(wait_ms) - 1) / 1e3)
            if found:
                return found
            wait_ms = wake_at_ms - self._clock.now_ms()
        if wait_ms > 0:
            select.select([self._epoll], [], [], wait_ms / 1e3)
        return self._epoll.poll(0)

    def _collect(self, began_ms: float, generation: int) -> float:
        """The moment at which that was done."""
        gc.collect(generation)
        now_ms = self._clock.now_ms()
        self.stats.collect_ms_max = max(self.stats.collect_ms_max, now_ms - began_ms)
        return now_ms


def _passes(
    roles: Sequence[Role[Any, Any]],
) -> list[tuple[Role[Any, Any], frozenset[Source[Any]], Sequence[tuple[Source[Any], Teller]]]]:
    """What a turn goes through: each role, with its sources and those to which another role of the process may hand something.

    The sleep has asked all; what comes by sockets meanwhile is heard in the next turn.
    """
    within = [
        [(one, teller) for one, teller in _tellers(role.sources) if is_fed_within(one)] for role in roles
    ]
    first = [
        (role, frozenset(role.sources), handed if place else ())
        for place, (role, handed) in enumerate(zip(roles, within, strict=True))
    ]
    again = [
        (role, frozenset(one for one, _ in handed), handed)
        for role, handed in zip(roles[:-1], within, strict=False)
    ]
    return [*first, *again]


def _tellers(sources: Sequence[Source[Any]]) -> list[tuple[Source[Any], Teller]]:
    """The sources that have to be asked, and whom."""
    return [(source, teller) for source in sources if (teller := teller_of(source)) is not None]


def run_roles(
    roles: Sequence[Role[Any, Any]],
    is_stopping: Callable[[], bool],
    on_defect: OnDefect,
) -> None:
    """On one loop and the real clock, until `is_stopping`, which is asked after each turn."""
    driver = Driver(roles, MonotonicClock(), on_defect)
    try:
        driver.run(is_stopping)
    finally:
        driver.close()
