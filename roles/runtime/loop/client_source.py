"""The source for a link to clients: nobody watches them, but how late they are counts."""

from __future__ import annotations

from collections.abc import Callable

from fabric.clock import Clock
from fabric.ids import PeerId
from fabric.link import Received
from fabric.messages import Ping, Pong
from fabric.transit_time import DOUBTED_FROM_MS
from roles.runtime.loop.sources import EventT, LinkSource, TimedLink


class ClientLinkSource(LinkSource[EventT]):
    """Hears a link whose peers are not watched, but whose lateness counts.

    Who seems late is pinged, at most once a second: if its host has slept, and so its clock stood still, the round trip tells.
    """

    def __init__(
        self,
        link: TimedLink,
        clock: Clock,
        translate: Callable[[Received], EventT | None],
        lost: Callable[[PeerId], EventT] | None = None,
    ) -> None:
        super().__init__(link, self._heard, lost)
        self._transit = link.transit
        self._clock = clock
        self._event_of = translate

    def _heard(self, received: Received) -> EventT | None:
        peer, message = received.peer, received.message
        if isinstance(message, Pong):
            self._transit.take_answer(peer, message.number, self._clock.now_ms())
            return None
        if received.late_ms > DOUBTED_FROM_MS:
            number = self._transit.ask(peer, self._clock.now_ms())
            if number is not None:
                self._link.send(peer, Ping(number))
        return self._event_of(received)
