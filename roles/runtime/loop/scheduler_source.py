"""What a role hears from one scheduler, wherever that is: the rule that `LocalScheduler` and `RemoteScheduler` share.

A message that was refused is lost, while the connection may be back before anybody takes the scheduler for silent. So
its next look tells of it as a `Lost` too, and the core begins with a hello again. That is no more often than it
looks, whatever becomes of the hello. A connection that was closed is told of at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from fabric.clock import Clock
from fabric.heartbeats import HeartbeatTiming
from fabric.ids import PeerId
from fabric.keys import Keyring
from fabric.messages import AnyMessage
from fabric.transport import ZMQ, Transport
from roles.runtime.core import SCHEDULER_ID, Heard, Lost
from roles.runtime.loop.server_connection import ServerConnection
from roles.runtime.loop.sources import REFUSED, SourceOver
from roles.runtime.process_events import SchedulerFound

LOOK_EVERY_MS = 100.0

SchedulerEvent = Heard | Lost | SchedulerFound


class SchedulerSource(SourceOver, ABC):
    """What the scheduler says comes under its role id. `keyring`: for one that is reached by TCP."""

    def __init__(
        self,
        own: PeerId,
        clock: Clock,
        keyring: Keyring | None = None,
        role_id: str = SCHEDULER_ID,
        heartbeats: HeartbeatTiming | None = None,
        transport: Transport = ZMQ,
    ) -> None:
        self._scheduler = PeerId(role_id)
        self._connection = ServerConnection(own, self._scheduler, clock, heartbeats, keyring, transport)
        super().__init__(self._connection)
        self._look_at_ms = 0.0

    def send(self, message: AnyMessage) -> bool:
        """False: there is no connection, or its queue is full; a `Lost` follows."""
        return self._connection.send(message)

    def leave(self) -> None:
        """End the connection: nothing is said, heard or looked for any more. The descriptor stays until `close`."""
        self._connection.leave()

    def close(self) -> None:
        """Flush, and give the descriptors back."""
        self._connection.close()

    @property
    def wake_at_ms(self) -> float | None:
        """The next look, or heartbeat."""
        wake_at_ms = self._connection.wake_at_ms
        return self._look_at_ms if wake_at_ms is None else min(wake_at_ms, self._look_at_ms)

    def take(self, limit: int, now_ms: float) -> Sequence[SchedulerEvent]:
        """Where it is, what it said, and what became of it."""
        events: list[SchedulerEvent] = []
        if self._look_at_ms <= now_ms:
            self._look_at_ms = now_ms + self._look_every_ms(now_ms)
            if self._was_refused():
                events.append(Lost(self._scheduler, REFUSED))
            events.extend(self._look())
        events.extend(self._connection.take(limit, now_ms))
        return events

    def _look_every_ms(self, now_ms: float) -> float:  # noqa: ARG002  who knows that all is well looks less often
        return LOOK_EVERY_MS

    @abstractmethod
    def _was_refused(self) -> bool:
        """Whether something was refused since the last look."""

    @abstractmethod
    def _look(self) -> Sequence[SchedulerFound]:
        """Where it is, when that is new: it is connected to there."""
