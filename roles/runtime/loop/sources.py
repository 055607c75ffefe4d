"""What a driver takes events from, and the sources that read from links.

- `LinkSource`: a link whose peers are not watched; a function makes an event of each message.
- `WatchedLinkSource`: a link whose peers are watched. Messages become `Heard`, silence becomes `Lost`.
- `SendingSource`: a link by which nothing comes.
- `TranslatedSource`: another source, whose events a function translates.

All four are a `SourceOver`, as are the sources of single roles that read from another one. A `TimedSource` reads from
nothing that tells of itself, so it has only moments. Beside this page
`client_source.py` has the one for a server's clients, `server_connection.py` the two for a client's end, `mailbox.py` the one for events of other threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, Never, Protocol, TypeVar, runtime_checkable

from fabric.clock import Clock
from fabric.heartbeats import HeartbeatTiming, Liveness
from fabric.ids import PeerId
from fabric.inproc import HubLink
from fabric.link import Link, Received
from fabric.messages import Ping, Pong
from fabric.transit_time import DOUBTED_FROM_MS, TransitMeter
from roles.runtime.core import NO_PAYLOAD, Heard, Lost
from roles.runtime.loop.mailbox import Mailbox

SILENT = "it has been silent for too long"
REFUSED = "it did not take what it was told"
CLOSED = "its connection was closed"

EventT = TypeVar("EventT")
InnerT = TypeVar("InnerT")
EventT_co = TypeVar("EventT_co", covariant=True)


class Source(Protocol[EventT_co]):
    """Something a role hears from: a socket, an executor, a thread pool, a child process."""

    def fileno(self) -> int:
        """Readable when `take` may have something; -1: no descriptor, only `wake_at_ms`."""
        ...

    @property
    def has_more(self) -> bool:
        """Whether `take` may give something that the descriptor does not tell of."""
        ...

    @property
    def wake_at_ms(self) -> float | None:
        """The moment at which `take` will have something by itself; None: never."""
        ...

    def take(self, limit: int, now_ms: float) -> Sequence[EventT_co]:
        """At most `limit` events, without blocking."""
        ...


@runtime_checkable
class _Readable(Protocol):
    """Links have these, and sources."""

    def fileno(self) -> int: ...

    @property
    def has_more(self) -> bool: ...


class SourceOver:
    """A source that reads from something else, a link or another source, and is ready when that is."""

    def __init__(self, below: _Readable) -> None:
        self.below = below

    def fileno(self) -> int:
        """The descriptor below."""
        return self.below.fileno()

    @property
    def has_more(self) -> bool:
        """Whether something is waiting below."""
        return self.below.has_more

    @property
    def wake_at_ms(self) -> float | None:
        """Never by itself."""
        return None


class TimedSource(ABC, Generic[EventT]):
    """A source without a descriptor: it is asked at its moments, and has nothing between them."""

    def fileno(self) -> int:
        """None."""
        return -1

    @property
    def has_more(self) -> bool:
        """Never without its moment."""
        return False

    @property
    @abstractmethod
    def wake_at_ms(self) -> float | None:
        """Its next moment; None: none before something else happens."""

    @abstractmethod
    def take(self, limit: int, now_ms: float) -> Sequence[EventT]:
        """At most `limit` events; see `Source`."""


class LinkSource(SourceOver, Generic[EventT]):
    """Hears a link whose peers are not watched.

    `translate` makes an event of a message, or None of one that is not for the core. `lost` makes one of a peer
    whose connection was closed, or that a send found gone; without it nobody wants to know.
    """

    def __init__(
        self,
        link: Link,
        translate: Callable[[Received], EventT | None],
        lost: Callable[[PeerId], EventT] | None = None,
    ) -> None:
        super().__init__(link)
        self._link = link
        self._translate = translate
        self._lost = lost
        self.backlog_ms = 0.0
        """How long the link has not been empty, as of the last `take`."""
        self._full_at_ms: float | None = None

    def waited_ms(self, received: Received) -> float:
        """How long a message of the last `take` has waited for us to read it.

        One that is late need not have waited here; and a link that has never been empty for long may still be read at once. Both
        together say that it has.
        """
        return min(self.backlog_ms, received.late_ms)

    def take(self, limit: int, now_ms: float) -> Sequence[EventT]:
        """The peers that are gone, then what at most `limit` messages say."""
        translate, lost = self._translate, self._lost
        self.backlog_ms = 0.0 if self._full_at_ms is None else now_ms - self._full_at_ms
        gone = self._link.take_lost()  # asked for in any case, or they would pile up
        # Before what has come: under a name that was gone that is of its next connection.
        events = [lost(peer) for peer in gone] if lost is not None else []
        came = self._link.receive(limit)
        events += [event for received in came if (event := translate(received)) is not None]
        if len(came) < limit or not self._link.has_more:
            self._full_at_ms = None
        elif self._full_at_ms is None:
            self._full_at_ms = now_ms
        return events


class SendingSource(SourceOver):
    """A link that only sends: what waits there for room goes on when there is some. Nothing comes of it."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self._link = link

    def take(self, limit: int, now_ms: float) -> Sequence[Never]:
        """Nothing."""
        del now_ms
        self._link.receive(limit)
        return ()


class TimedLink(Link, Protocol):
    """A link that measures the way of its messages."""

    transit: TransitMeter


class WatchedLinkSource(SourceOver):
    """Hears a control link; every peer is watched from its first message on.

    Heartbeats live here: pings are answered, quiet peers are asked for a sign of life, and round trips teach the
    link how much of a message's age was the way; who seems late is asked for one within a second. A core hears of none of that, only of the peer that is gone, and of one
    that begins with them: it has been talking to somebody else behind our address, or we had given it up.
    """

    def __init__(self, link: TimedLink, clock: Clock, heartbeats: HeartbeatTiming | None = None) -> None:
        super().__init__(link)
        self._link = link
        self._clock = clock
        self._liveness = Liveness(heartbeats)
        self._given_up: list[PeerId] = []

    def give_up(self, peer: PeerId) -> None:
        """It has not read for so long that it missed something it had to hear: it is as good as gone, and begins anew with what it says next."""
        self._given_up.append(peer)

    @property
    def has_more(self) -> bool:
        """Whether somebody was given up, or something is waiting below."""
        return bool(self._given_up) or self._link.has_more

    def watch(self, peer: PeerId) -> None:
        """Expect signs of life from a peer that has not said anything yet."""
        self._liveness.watch(peer, self._clock.now_ms())

    @property
    def wake_at_ms(self) -> float | None:
        """The next ping, or the next peer to give up."""
        return self._liveness.wake_at_ms

    def take(self, limit: int, now_ms: float) -> Sequence[Heard | Lost]:
        """The peers whose connection is gone, at most `limit` messages, then the peers that are silent."""
        events: list[Heard | Lost] = []
        doubted: set[PeerId] = set()
        given_up, self._given_up = self._given_up, []
        for peer in given_up:
            self._liveness.forget(peer)
            events.append(Lost(peer, REFUSED))
        for peer in self._link.take_lost():
            self._liveness.forget(peer)
            events.append(Lost(peer, CLOSED))
        for received in self._link.receive(limit):
            peer, message = received.peer, received.message
            if self._liveness.watch(peer, now_ms) and isinstance(message, Ping | Pong):
                events.append(Heard(peer, message, received.late_ms))
            elif isinstance(message, Pong):
                rtt_ms = self._liveness.pong(peer, message.number, now_ms)
                if rtt_ms is not None:
                    self._link.transit.observe_rtt(peer, rtt_ms, now_ms)
            elif isinstance(message, Ping):
                self._liveness.pinged(peer, now_ms)
                self._link.send(peer, Pong(message.number))
            else:
                self._liveness.heard(peer, now_ms)
                events.append(Heard(peer, message, received.late_ms, NO_PAYLOAD, received.epoch))
            if received.late_ms > DOUBTED_FROM_MS:
                doubted.add(peer)
        for peer in doubted:
            ping = self._liveness.ask(peer, now_ms)
            if ping is not None:
                self._link.send(peer, ping)
        if self._liveness.wake_at_ms is not None and self._liveness.wake_at_ms <= now_ms:
            for peer, ping in self._liveness.due(now_ms):
                self._link.send(peer, ping)
            for peer in self._liveness.lost(now_ms):
                self._link.transit.forget(peer)
                events.append(Lost(peer, SILENT))
        return events


class TranslatedSource(SourceOver, Generic[InnerT, EventT]):
    """Another source's events as a core's own, one by one; None: not for the core."""

    def __init__(self, inner: Source[InnerT], translate: Callable[[InnerT], EventT | None]) -> None:
        super().__init__(inner)
        self.inner = inner
        self._translate = translate

    @property
    def wake_at_ms(self) -> float | None:
        """When the inner one will."""
        return self.inner.wake_at_ms

    def take(self, limit: int, now_ms: float) -> Sequence[EventT]:
        """What at most `limit` events of the inner one say."""
        translate = self._translate
        return [event for inner in self.inner.take(limit, now_ms) if (event := translate(inner)) is not None]


class Teller(Protocol):
    """What knows whether something waits of which no descriptor tells."""

    @property
    def has_more(self) -> bool:
        """Whether something does."""
        ...


class Timer(Protocol):
    """What knows a source's next moment."""

    @property
    def wake_at_ms(self) -> float | None:
        """That moment; None: there is none."""
        ...


def teller_of(source: Teller) -> Teller | None:
    """Whose `has_more` a source's comes down to; None: of all but what a `take` has left its descriptor tells."""
    kind = type(source)
    if isinstance(source, SourceOver) and kind.has_more is SourceOver.has_more:
        return teller_of(source.below)
    if isinstance(source, Mailbox) and kind.has_more is Mailbox.has_more:
        return None
    return source


def is_fed_within(source: object) -> bool:
    """Whether other roles of the process may hand it something: it reads from a link of theirs, or has no descriptor at all."""
    while isinstance(source, SourceOver):
        source = source.below
    return isinstance(source, HubLink) or (isinstance(source, _Readable) and source.fileno() < 0)


def timer_of(source: Timer) -> Timer | None:
    """Whose `wake_at_ms` a source's comes down to; None: it has no moments."""
    kind = type(source)
    if isinstance(source, TranslatedSource):
        return timer_of(source.inner)
    if isinstance(source, SourceOver) and kind.wake_at_ms is SourceOver.wake_at_ms:
        return None
    if isinstance(source, Mailbox) and kind.wake_at_ms is Mailbox.wake_at_ms:
        return None
    return source
