"""The worker's way to the scheduler, which its agent shows it: a source of the driver.

Any sign that the scheduler may have missed a word of ours (a refused send, a silence) makes its next word a
`SchedulerAnswers`, upon which the core says again what is ready. That covers a scheduler that restarts behind the
same address. It has nothing to say to a worker it does not know, so until then the worker probes.
"""

from __future__ import annotations

from collections.abc import Sequence

from fabric.clock import Clock
from fabric.heartbeats import HeartbeatTiming
from fabric.ids import PeerId
from fabric.keys import Keyring
from fabric.messages import AnyMessage, Ping
from fabric.transport import ZMQ, Transport
from roles.gpu_worker.events import SchedulerAnswers
from roles.runtime.core import SCHEDULER, Heard, Lost
from roles.runtime.loop.server_connection import ServerConnection
from roles.runtime.loop.sources import SourceOver

PROBE_EVERY_MS = 20.0  # while there is no connection: a send is refused then, so it costs next to nothing
_PROBE = Ping(0)  # liveness counts its own from 1

ConnectionEvent = Heard | Lost | SchedulerAnswers


class SchedulerConnection(SourceOver):
    """Closed until the agent says where the scheduler is."""

    def __init__(
        self, own: PeerId, clock: Clock, keyring: Keyring | None = None, transport: Transport = ZMQ
    ) -> None:
        self._connection = ServerConnection(own, SCHEDULER, clock, keyring=keyring, transport=transport)
        super().__init__(self._connection)
        self._is_waiting = True
        self._probe_at_ms: float | None = None

    def open(self, addresses: Sequence[str], heartbeats: HeartbeatTiming, now_ms: float) -> None:
        """Connect, instead of to where it was before; if it cannot be reached by what the agent said, until that says otherwise."""
        self._connection.open(addresses, heartbeats, is_patient=True)  # keys change while workers start
        self._wait(now_ms)

    def send(self, message: AnyMessage, now_ms: float) -> bool:
        """False: there is no connection, or its queue is full; the core hears when the scheduler is back."""
        is_out = self._connection.send(message)
        if not is_out and self._connection.is_open:
            self._wait(now_ms)
        return is_out

    def close(self) -> None:
        """Flush, and give the descriptors back."""
        self._connection.close()

    @property
    def wake_at_ms(self) -> float | None:
        """The next heartbeat or probe."""
        wake_at_ms, probe_at_ms = self._connection.wake_at_ms, self._probe_at_ms
        if wake_at_ms is None or probe_at_ms is None:
            return probe_at_ms if wake_at_ms is None else wake_at_ms
        return min(wake_at_ms, probe_at_ms)

    def take(self, limit: int, now_ms: float) -> Sequence[ConnectionEvent]:
        """What it said, and what became of it."""
        if not self._connection.is_open:
            return ()
        heard, refused = self._counts()
        events: list[ConnectionEvent] = list(self._connection.take(limit, now_ms))
        heard_now, refused_now = self._counts()
        if self._is_waiting and heard_now > heard:
            self._is_waiting = False
            self._probe_at_ms = None
            events.insert(0, SchedulerAnswers())
        if refused_now > refused or (events and isinstance(events[-1], Lost)):
            self._wait(now_ms)
        if self._probe_at_ms is not None and self._probe_at_ms <= now_ms:
            self._probe_at_ms = None if self._connection.send(_PROBE) else now_ms + PROBE_EVERY_MS
        return events

    def _counts(self) -> tuple[float, float]:
        """Signs of life, and refused sends: among both are heartbeats, of which nobody else hears."""
        return self._connection.counters["messages_in"], self._connection.counters["full_out"]

    def _wait(self, now_ms: float) -> None:
        self._is_waiting = True
        self._probe_at_ms = now_ms
