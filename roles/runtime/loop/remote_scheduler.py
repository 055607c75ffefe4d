"""The way to a scheduler on another host: for a node agent or another scheduler, whose configuration says where it is.

Where this host's scheduler is `LocalScheduler`'s question; here the address is known and stays. What is alike: a message
that was refused is lost, and the next look tells of that as a `Lost`, upon which the core begins with a hello again. A scheduler
that starts again behind its address refuses at least a heartbeat in between, so it is noticed too.
"""

from __future__ import annotations

from collections.abc import Sequence

from fabric.clock import Clock
from fabric.heartbeats import HeartbeatTiming
from fabric.ids import PeerId
from fabric.keys import Keyring
from fabric.messages import AnyMessage
from roles.runtime.core import SCHEDULER_ID, Lost
from roles.runtime.loop.local_scheduler import LOOK_EVERY_MS, REFUSED, LocalSchedulerEvent
from roles.runtime.loop.server_connection import ServerConnection
from roles.runtime.loop.sources import SourceOver
from roles.runtime.process_events import SchedulerFound


class RemoteScheduler(SourceOver):
    """Connects at once, and again whenever that breaks. Raises ConfigError for what is no address."""

    def __init__(
        self,
        own: PeerId,
        addresses: Sequence[str],
        clock: Clock,
        keyring: Keyring | None = None,
        role_id: str = SCHEDULER_ID,
        heartbeats: HeartbeatTiming | None = None,
    ) -> None:
        self._scheduler = PeerId(role_id)
        self._connection = ServerConnection(own, self._scheduler, clock, heartbeats, keyring)
        super().__init__(self._connection)
        self._addresses = tuple(addresses)
        self._is_found = False
        self._refused = 0.0
        self._look_at_ms = 0.0
        self._connection.open(addresses)

    def send(self, message: AnyMessage) -> bool:
        """False: there is no connection, or its queue is full; a `Lost` follows."""
        return self._connection.send(message)

    def close(self) -> None:
        """Flush, and give the descriptors back."""
        self._connection.close()

    @property
    def wake_at_ms(self) -> float | None:
        """The next look at what was refused, or heartbeat."""
        wake_at_ms = self._connection.wake_at_ms
        return self._look_at_ms if wake_at_ms is None else min(wake_at_ms, self._look_at_ms)

    def take(self, limit: int, now_ms: float) -> Sequence[LocalSchedulerEvent]:
        """Where it is, once; what it said, and what became of it."""
        events: list[LocalSchedulerEvent] = []
        if not self._is_found:
            self._is_found = True
            events.append(SchedulerFound(self._addresses, self._scheduler))
        if self._look_at_ms <= now_ms:
            self._look_at_ms = now_ms + LOOK_EVERY_MS
            refused = self._connection.counters["full_out"]
            if refused > self._refused:
                events.append(Lost(self._scheduler, REFUSED))
            self._refused = refused
        events.extend(self._connection.take(limit, now_ms))
        return events
