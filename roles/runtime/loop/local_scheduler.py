"""The way to one of this host's schedulers, wherever it is at the moment: for the node agent, `tenuto up`, and the others.

A scheduler that is started again writes a new run file, perhaps with another address. So the run file is read
again and again, and a new incarnation gets a new connection.

A message that was refused is lost, while the connection may be back before anybody takes the scheduler for silent. So
its next look tells of it as a `Lost` too, and the core begins with a hello again. That is no more often than it
looks, whatever becomes of the hello. A connection that was closed is told of at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fabric.clock import Clock
from fabric.heartbeats import HeartbeatTiming
from fabric.ids import PeerId
from fabric.keys import Keyring
from fabric.messages import AnyMessage
from fabric.transport import ZMQ, Transport
from roles.runtime.core import SCHEDULER_ID, Heard, Lost
from roles.runtime.loop.server_connection import ServerConnection
from roles.runtime.loop.sources import SourceOver
from roles.runtime.process import read_run_file
from roles.runtime.process_events import SchedulerFound

LOOK_EVERY_MS = 100.0
REFUSED = "it could not be told something"

LocalSchedulerEvent = Heard | Lost | SchedulerFound


class LocalScheduler(SourceOver):
    """Closed until the scheduler's run file is there. What it says comes under its role id.

    `keyring`: for one that is reached by TCP.
    """

    def __init__(
        self,
        own: PeerId,
        run_dir: Path,
        clock: Clock,
        keyring: Keyring | None = None,
        role_id: str = SCHEDULER_ID,
        heartbeats: HeartbeatTiming | None = None,
        transport: Transport = ZMQ,
    ) -> None:
        self._role_id = role_id
        self._connection = ServerConnection(own, PeerId(role_id), clock, heartbeats, keyring, transport)
        super().__init__(self._connection)
        self._run_file = run_dir / f"{role_id}.json"
        self._incarnation = ""
        self._look_at_ms = 0.0
        self._is_behind = False

    def send(self, message: AnyMessage) -> bool:
        """False: there is no connection, or its queue is full; a `Lost` follows."""
        is_out = self._connection.send(message)
        if not is_out:
            self._is_behind = self._connection.is_open
        return is_out

    def close(self) -> None:
        """Flush, and give the descriptors back."""
        self._connection.close()

    @property
    def wake_at_ms(self) -> float | None:
        """The next look at the run file, or heartbeat."""
        wake_at_ms = self._connection.wake_at_ms
        return self._look_at_ms if wake_at_ms is None else min(wake_at_ms, self._look_at_ms)

    def take(self, limit: int, now_ms: float) -> Sequence[LocalSchedulerEvent]:
        """Where it is, what it said, and what became of it."""
        events: list[LocalSchedulerEvent] = []
        if self._look_at_ms <= now_ms:
            self._look_at_ms = now_ms + LOOK_EVERY_MS
            if self._is_behind:
                self._is_behind = False
                events.append(Lost(PeerId(self._role_id), REFUSED))
            events.extend(self._look())
        events.extend(self._connection.take(limit, now_ms))
        return events

    def _look(self) -> Sequence[SchedulerFound]:
        found = read_run_file(self._run_file)
        if found is None or found.incarnation == self._incarnation:
            return ()
        addresses = tuple(found.addresses.get("control", ()))
        if not addresses:
            return ()
        self._connection.open(addresses)
        self._incarnation = found.incarnation
        return (SchedulerFound(addresses, PeerId(self._role_id)),)
