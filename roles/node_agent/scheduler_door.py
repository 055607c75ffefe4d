"""The agent's way to the scheduler, wherever it is at the moment: a source of the driver.

A scheduler that is started again writes a new run file, perhaps with another address. So the run file is read
again and again, and a new incarnation gets a new connection. The driver knows one descriptor for ever: an
epoll of ours, behind which sockets come and go.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence

from fabric.clock import Clock
from fabric.ids import PeerId
from fabric.messages import AnyMessage
from fabric.sockets import DealerLink
from roles.core import Heard, Lost
from roles.hearing import LinkSource
from roles.node_agent.core import SCHEDULER, SchedulerFound
from roles.process import RunFile

LOOK_EVERY_MS = 100.0
DoorEvent = Heard | Lost | SchedulerFound


class SchedulerDoor:
    """`find` reads the scheduler's run file; None: it is not there (yet, or any more)."""

    def __init__(self, own: PeerId, find: Callable[[], RunFile | None], clock: Clock) -> None:
        self._own = own
        self._clock = clock
        self._find = find
        self._epoll = select.epoll()
        self._link: DealerLink | None = None
        self._incarnation = ""
        self._heard: LinkSource | None = None
        self._look_at_ms = 0.0

    def send(self, message: AnyMessage) -> bool:
        """False: there is no connection, or its queue is full; the next hello says it again."""
        return self._link is not None and self._link.send(SCHEDULER, message)

    def reconnect(self) -> None:
        """Begin a new connection to the same place."""
        if self._link is not None and self._heard is not None:
            self._link.reconnect()
            self._heard.watch(SCHEDULER)  # and again, until somebody answers

    def close(self) -> None:
        """Flush, and give the descriptors back."""
        self._close_link()
        self._epoll.close()

    # The driver's side.

    def fileno(self) -> int:
        """The same for all connections."""
        return self._epoll.fileno()

    @property
    def has_more(self) -> bool:
        """Whether a message is waiting."""
        return self._link is not None and self._link.has_more

    @property
    def wake_at_ms(self) -> float | None:
        """The next look at the run file, or heartbeat."""
        wake_at_ms = None if self._heard is None else self._heard.wake_at_ms
        return self._look_at_ms if wake_at_ms is None else min(wake_at_ms, self._look_at_ms)

    def take(self, limit: int, now_ms: float) -> Sequence[DoorEvent]:
        """What it said, and what became of it."""
        events: list[DoorEvent] = []
        if self._look_at_ms <= now_ms:
            self._look_at_ms = now_ms + LOOK_EVERY_MS
            events.extend(self._look())
        if self._heard is not None:
            events.extend(self._heard.take(limit, now_ms))
        return events

    def _look(self) -> Sequence[DoorEvent]:
        found = self._find()
        if found is None or found.incarnation == self._incarnation:
            return ()
        self._close_link()
        addresses = tuple(found.addresses["control"])
        self._link = DealerLink.connect(self._own, SCHEDULER, addresses)
        self._epoll.register(self._link.fileno(), select.EPOLLIN)
        self._incarnation = found.incarnation
        self._heard = LinkSource(self._link, self._clock)
        self._heard.watch(SCHEDULER)
        return (SchedulerFound(addresses),)

    def _close_link(self) -> None:
        if self._link is not None:
            self._epoll.unregister(self._link.fileno())
            self._link.close()
            self._link = self._heard = None
