"""A frontend's links to all schedulers of a shard: it speaks to the active one, and the others know that it is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from fabric.clock import Clock
from fabric.heartbeats import HeartbeatTiming
from fabric.ids import PeerId
from fabric.inproc import ServerLink
from fabric.link import Packed
from fabric.messages import AnyMessage, FrontendHello
from fabric.outbox import Outbox
from roles.frontend.events import FrontendEvent, SchedulerLost, SchedulerSaid
from roles.runtime.core import SCHEDULER, Heard, Lost
from roles.runtime.loop.server_connection import ServerSource
from roles.runtime.loop.sources import TranslatedSource

GREET_EVERY_MS = 250.0  # a scheduler that was not there


class SchedulerLinks:
    """By the schedulers' numbers. What is sent goes to the `active` one, `greet` to all.

    `on_refused` hears of what that one did not take.
    """

    def __init__(
        self,
        shard: int,
        links: Mapping[int, ServerLink],
        clock: Clock,
        heartbeats: HeartbeatTiming,
        on_refused: Callable[[PeerId, AnyMessage], None],
    ) -> None:
        self.active = next(iter(links))
        self._shard = shard
        self._links = links
        self._clock = clock
        self._outbox = Outbox(self, on_refused)
        self.ungreeted = set(links)
        """Schedulers that have not heard of this frontend since they were there."""
        self._greet_at_ms = 0.0
        self.sources: list[TranslatedSource[Heard | Lost, FrontendEvent]] = [
            TranslatedSource(
                ServerSource(link, SCHEDULER, clock, heartbeats), partial(self._translated, number)
            )
            for number, link in links.items()
        ]

    @property
    def link(self) -> ServerLink:
        """The active scheduler's."""
        return self._links[self.active]

    def use(self, number: int) -> None:
        """That one is the active scheduler from now on."""
        self._outbox.flush()  # what was for the former one
        self.active = number

    def tell(self, message: AnyMessage) -> None:
        """To the active one, with the end of the turn. Raises LocalProtocolError for what cannot be sent."""
        self._outbox.put(SCHEDULER, message)

    def flush(self) -> None:
        """Send what was told."""
        self._outbox.flush()

    def send_packed(self, peer: PeerId, packed: Sequence[Packed]) -> bool:
        """To the active one; False: it takes nothing."""
        return self.link.send_packed(peer, packed)

    def greet(self, hello: FrontendHello) -> None:
        """Tell all of them that this frontend is there; who does not hear it is told later."""
        self.ungreeted = {one for one in self._links if not self._links[one].send(SCHEDULER, hello)}
        self._greet_at_ms = self._clock.now_ms() + GREET_EVERY_MS

    def greet_others(self, hello: FrontendHello) -> None:
        """Tell those that were not there, or have been lost since: one of them may be the next active one.

        Not the active one: whoever goes by it says hello, and knows that a scheduler forgets with a hello what it was told.
        """
        others = self.ungreeted - {self.active}
        if not others or self._clock.now_ms() < self._greet_at_ms:
            return
        self._greet_at_ms = self._clock.now_ms() + GREET_EVERY_MS
        self.ungreeted -= {one for one in others if self._links[one].send(SCHEDULER, hello)}

    def close(self) -> None:
        """Flush, and give everything back."""
        for link in self._links.values():
            link.close()

    def _translated(self, number: int, event: Heard | Lost) -> FrontendEvent:
        if isinstance(event, Lost):
            self.ungreeted.add(number)
            return SchedulerLost(number, self._shard)
        return SchedulerSaid(event.message, event.epoch, number, self._shard)
