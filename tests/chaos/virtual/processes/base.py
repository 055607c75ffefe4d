"""One process of a virtual cluster: its clock, its links, its turns; started, stopped, killed."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from fabric.clock import Clock
from roles.runtime.loop.driver import Driver, OnDefect, Role
from roles.runtime.loop.sources import Source
from tests.chaos.virtual.processes.links import VirtualTransport
from tests.chaos.virtual.processes.network import End

if TYPE_CHECKING:
    from tests.chaos.virtual.world import World

LEAST_WAIT_MS: Final = 1e-3
"""A turn takes time: a moment that is there but for a rounding is there at the next one."""

EventT = TypeVar("EventT")


class Posted(Generic[EventT]):
    """A source of what the world leaves for a process."""

    def __init__(self, owner: Process) -> None:
        self._owner = owner
        self._events: deque[EventT] = deque()

    def post(self, event: EventT) -> None:
        """Leave it, and wake the process."""
        self._events.append(event)
        self._owner.wake(self._owner.world.now_ms)

    def fileno(self) -> int:
        """None."""
        return -1

    @property
    def has_more(self) -> bool:
        """Whether something is left."""
        return bool(self._events)

    @property
    def wake_at_ms(self) -> float | None:
        """Never by itself."""
        return None

    def take(self, limit: int, now_ms: float) -> Sequence[EventT]:
        """At most `limit`."""
        del now_ms
        return [self._events.popleft() for _ in range(min(limit, len(self._events)))]


class VirtualDriver(Driver):
    """The real turns; the world sleeps."""

    def __init__(self, role: Role[Any, Any], clock: Clock, on_defect: OnDefect) -> None:
        super().__init__([role], clock, on_defect=on_defect)
        self.next_at_ms = math.inf
        """When the next turn is worth it, by the process's clock."""
        self._timed: Sequence[tuple[float, Source[Any]]] = ()
        self._sleep(clock.now_ms())

    def hear(self, now_ms: float) -> None:
        """One turn, over what is ready."""
        ready = {source for source in self._places if source.has_more}
        for at_ms, source in self._timed:
            if at_ms <= now_ms:
                ready.add(source)
        self._ready = ready
        self.turn()
        assert not self.stats.unsendable, "what our own roles say makes nothing that cannot be sent"

    def _sleep(self, now_ms: float) -> set[Any]:
        next_at_ms = math.inf
        timed = []
        for source in self._places:
            if source.has_more:
                next_at_ms = now_ms
            elif (at_ms := source.wake_at_ms) is not None:
                timed.append((at_ms, source))
                if at_ms < next_at_ms:
                    next_at_ms = at_ms
        for role in self._roles:
            next_at_ms = min(next_at_ms, role.next_at_ms)
        self._timed = timed
        self.next_at_ms = max(next_at_ms, now_ms + LEAST_WAIT_MS)
        return set()


class Process:
    """One start of a role. `place` is where it runs; `clock_offset_ms` what its clock is ahead of the world's."""

    role: Role[Any, Any]

    def __init__(self, world: World, place: str) -> None:
        self.world = world
        self.place = place
        self.incarnation = world.next_incarnation()
        self.clock_offset_ms = world.clock_offset_ms(place)
        self.ends: list[End] = []
        self.is_dead = False
        self.is_stopped = False
        self.resumed_at_ms = 0.0
        """When it went on last."""
        self.slept_ms = 0.0
        """For how long its clock stood, altogether."""
        self.transport = VirtualTransport(world.network, self)
        self._driver: VirtualDriver | None = None
        self._due_at_ms: float | None = None
        self._later: list[Callable[[], None]] = []
        world.processes.append(self)

    # As a Clock, and as an Owner of links.

    def now_ms(self) -> float:
        """By its own clock."""
        return self.world.now_ms + self.clock_offset_ms

    def wake(self, at_ms: float) -> None:
        """A turn at that moment of the world, if none comes before."""
        if self.is_dead or (self._due_at_ms is not None and self._due_at_ms <= at_ms):
            return
        self._due_at_ms = at_ms
        self.world.at(at_ms, lambda: self._turn_at(at_ms))

    def when_running(self, callback: Callable[[], None]) -> None:
        """Now, or when it goes on."""
        if self.is_dead:
            return
        if self.is_stopped:
            self._later.append(callback)
        else:
            callback()
            self.wake(self.world.now_ms)

    def run(self, role: Role[Any, Any]) -> None:
        """It is set up: turns begin."""
        self.role = role
        self._driver = VirtualDriver(role, self, self._defect)
        self.wake(self.world.now_ms)

    def stop_for(self, for_ms: float, *, does_clock_stop: bool) -> None:
        """SIGSTOP, and SIGCONT so much later; or its host sleeps, and its clock with it."""
        if self.is_dead or self.is_stopped:
            return
        self.is_stopped = True
        self.world.at(self.world.now_ms + for_ms, lambda: self._go_on(for_ms if does_clock_stop else 0.0))

    def kill(self) -> None:
        """It is gone, with its links."""
        if not self.is_dead:
            self.world.network.kill(self)
            self._gone()

    def vanish(self, for_ms: float) -> None:
        """It is gone with its host, which loses power and is back so much later: nobody closes its links."""
        if not self.is_dead:
            self.world.network.vanish(self, self.world.now_ms + for_ms)
            self._gone()

    def _gone(self) -> None:
        self.is_dead = True
        self.world.processes.remove(self)
        self.released()

    def end(self) -> None:
        """In good order: what it sent arrives."""
        self.close()
        self.kill()

    def close(self) -> None:
        """Close the links."""

    def released(self) -> None:
        """Give descriptors of this very process back."""
        if self._driver is not None:
            self._driver.close()

    def turned(self) -> None:
        """After each turn."""

    def _go_on(self, slept_ms: float) -> None:
        if self.is_dead:
            return
        self.is_stopped = False
        self.resumed_at_ms = self.world.now_ms
        self.slept_ms += slept_ms
        self.clock_offset_ms -= slept_ms
        later, self._later = self._later, []
        for callback in later:
            callback()
        self._due_at_ms = None
        self.wake(self.world.now_ms)

    def _turn_at(self, at_ms: float) -> None:
        if self.is_dead or self.is_stopped or self._due_at_ms != at_ms:
            return
        self._due_at_ms = None
        self.turn()

    def turn(self) -> None:
        """One turn of its loop."""
        assert self._driver is not None
        self._driver.hear(self.now_ms())
        self.turned()
        if self.is_dead:
            return
        next_at_ms = self._driver.next_at_ms
        for end in self.ends:
            if end.inbox:
                self.wake(end.inbox[0].arrives_at_ms)
        if next_at_ms < math.inf:
            self.wake(self.world.now_ms + next_at_ms - self.now_ms())

    def _defect(self, error: Exception, roles: object) -> None:
        del roles
        raise error
