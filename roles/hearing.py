"""A link as something a driver hears from: messages become `Heard`, silence becomes `Lost`.

Heartbeats live here: pings are answered, quiet peers are asked for a sign of life, and round trips teach the
link how much of a message's age was the way. A core hears of none of that, only of the peer that is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from fabric.clock import Clock
from fabric.ids import PeerId
from fabric.link import Link
from fabric.liveness import Liveness
from fabric.messages import Ping, Pong
from fabric.transit import TransitMeter
from roles.core import Heard, Lost

SILENT = "it has been silent for too long"
UNROUTABLE = "its connection is closed"


class TimedLink(Link, Protocol):
    """A link that measures the way of its messages."""

    transit: TransitMeter


class LinkSource:
    """Hears a control link; every peer is watched from its first message on."""

    def __init__(self, link: TimedLink, clock: Clock) -> None:
        self._link = link
        self._clock = clock
        self._liveness = Liveness()

    def watch(self, peer: PeerId) -> None:
        """Expect signs of life from a peer that has not said anything yet."""
        self._liveness.watch(peer, self._clock.now_ms())

    def fileno(self) -> int:
        """The link's descriptor."""
        return self._link.fileno()

    @property
    def has_more(self) -> bool:
        """Whether a message is waiting."""
        return self._link.has_more

    @property
    def wake_at_ms(self) -> float | None:
        """The next ping, or the next peer to give up."""
        return self._liveness.wake_at_ms

    def take(self, limit: int, now_ms: float) -> Sequence[Heard | Lost]:
        """At most `limit` messages, then the peers that are gone."""
        events: list[Heard | Lost] = []
        for received in self._link.receive(limit):
            peer, message = received.peer, received.message
            self._liveness.watch(peer, now_ms)
            if isinstance(message, Pong):
                rtt_ms = self._liveness.pong(peer, message.number, now_ms)
                if rtt_ms is not None:
                    self._link.transit.observe_rtt(peer, rtt_ms, now_ms)
            elif isinstance(message, Ping):
                self._liveness.heard(peer, now_ms)
                self._link.send(peer, Pong(message.number))
            else:
                self._liveness.heard(peer, now_ms)
                events.append(Heard(peer, message, received.late_ms))
        if self._liveness.wake_at_ms is not None and self._liveness.wake_at_ms <= now_ms:
            for peer, ping in self._liveness.due(now_ms):
                self._link.send(peer, ping)
            events.extend(Lost(peer, SILENT) for peer in self._liveness.lost(now_ms))
        for peer in self._link.take_lost():
            self._liveness.forget(peer)
            events.append(Lost(peer, UNROUTABLE))
        return events
