"""The worker's way to the scheduler: a source of the driver, behind which the connection may be exchanged.

The driver knows one descriptor for ever, an epoll of ours. Any sign that the scheduler may have missed a word of
ours (a refused send, a silence) makes its next word a `SchedulerAnswers`, upon which the core says again what is
ready. That covers a scheduler that restarts behind the same address.
"""

from __future__ import annotations

import select
from collections.abc import Sequence

from fabric.ids import PeerId
from fabric.liveness import Liveness, Patience
from fabric.messages import AnyMessage, Ping, Pong
from fabric.sockets import DealerLink
from roles.core import Heard, Lost
from roles.gpu_worker.core import SCHEDULER
from roles.gpu_worker.events import SchedulerAnswers

KNOCK_EVERY_MS = 20.0  # while there is no connection: a send is refused then, so it costs next to nothing
PATIENCE = Patience(lost_after_ms=2_000.0)
_KNOCK = Ping(0)  # liveness counts its own from 1

DoorEvent = Heard | Lost | SchedulerAnswers


class SchedulerDoor:
    """Closed until the agent says where the scheduler is."""

    def __init__(self, own: PeerId) -> None:
        self._own = own
        self._epoll = select.epoll()
        self._link: DealerLink | None = None
        self._liveness = Liveness(PATIENCE)
        self._is_waiting = True
        self._knock_at_ms: float | None = None

    def open(self, addresses: Sequence[str], now_ms: float) -> None:
        """Connect, instead of to where it was before. Raises ConfigError for what is no address."""
        self._close_link()
        self._link = DealerLink.connect(self._own, SCHEDULER, addresses)
        self._epoll.register(self._link.fileno(), select.EPOLLIN)
        self._liveness.watch(SCHEDULER, now_ms)
        self._wait(now_ms)

    def send(self, message: AnyMessage, now_ms: float) -> bool:
        """False: there is no connection, or its queue is full; the core hears when the scheduler is back."""
        if self._link is None:
            return False
        if not self._link.send(SCHEDULER, message):
            self._wait(now_ms)
            return False
        return True

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
        """The next heartbeat or knock."""
        moments = (self._liveness.wake_at_ms, self._knock_at_ms)
        return min((moment for moment in moments if moment is not None), default=None)

    def take(self, limit: int, now_ms: float) -> Sequence[DoorEvent]:
        """What it said, and what became of it."""
        events: list[DoorEvent] = []
        if self._link is None:
            return events
        for received in self._link.receive(limit):
            self._liveness.watch(SCHEDULER, now_ms)
            self._liveness.heard(SCHEDULER, now_ms)
            if self._is_waiting:
                self._is_waiting = False
                self._knock_at_ms = None
                events.append(SchedulerAnswers())
            match received.message:
                case Ping(number):
                    self._link.send(SCHEDULER, Pong(number))
                case Pong(number):
                    self._on_pong(number, now_ms)
                case message:
                    events.append(Heard(SCHEDULER, message, received.late_ms))
        if self._knock_at_ms is not None and self._knock_at_ms <= now_ms:
            is_out = self._link.send(SCHEDULER, _KNOCK)
            self._knock_at_ms = None if is_out else now_ms + KNOCK_EVERY_MS
        for _, ping in self._liveness.due(now_ms):
            self.send(ping, now_ms)
        for lost in self._liveness.lost(now_ms):
            self._link.reconnect()
            self._liveness.watch(SCHEDULER, now_ms)
            self._wait(now_ms)
            events.append(Lost(lost, "it has been silent for too long"))
        return events

    def _wait(self, now_ms: float) -> None:
        self._is_waiting = True
        self._knock_at_ms = now_ms

    def _on_pong(self, number: int, now_ms: float) -> None:
        assert self._link is not None, "it came from there"
        rtt_ms = self._liveness.pong(SCHEDULER, number, now_ms)
        if rtt_ms is not None:
            self._link.transit.observe_rtt(SCHEDULER, rtt_ms, now_ms)

    def _close_link(self) -> None:
        self._liveness.forget(SCHEDULER)
        if self._link is not None:
            self._epoll.unregister(self._link.fileno())
            self._link.close()
            self._link = None
