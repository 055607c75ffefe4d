"""Link between roles of one process that share a loop: messages are handed over as they are.

Nothing is encoded, so a hop costs microseconds and no wake-up. What the wire would refuse is refused here too
(`frames.pack` is what everything passes on its way into a link), and queues have the bounds that sockets have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from fabric import frames
from fabric.clock import Clock
from fabric.errors import LocalProtocolError
from fabric.ids import Epoch, PeerId
from fabric.link import NO_EPOCH, Link, NamedTensor, Packed, Received
from fabric.messages import AnyMessage
from fabric.outbox import Sending
from fabric.sockets import new_counters
from fabric.transit_time import TransitMeter

QUEUE_MESSAGES_MAX = 1_000


class PeersLink(Link, Sending, Protocol):
    """The server's end of a control link: many peers, each by its name."""

    transit: TransitMeter


class ServerLink(Link, Sending, Protocol):
    """The client's end of a control link, whether its one server is another process or not."""

    transit: TransitMeter

    def reconnect(self) -> None:
        """Give the connection up for a new one."""
        ...


class _Queue:
    """Messages from one end to the other, each with the moment at which it was sent."""

    def __init__(self, clock: Clock) -> None:
        self.waiting: deque[tuple[float, PeerId, AnyMessage, Epoch]] = deque()
        self._clock = clock

    def put(self, sender: PeerId, packed: Sequence[Packed], epoch: Epoch) -> bool:
        """False: it is full. Raises LocalProtocolError for tensors: they have channels of their own."""
        if any(one.parcel.tensors for one in packed):
            raise LocalProtocolError("tensors do not go by a control link")
        if len(self.waiting) + len(packed) > QUEUE_MESSAGES_MAX:
            return False
        sent_at_ms = self._clock.now_ms()
        self.waiting.extend([(sent_at_ms, sender, one.parcel.body, epoch) for one in packed])
        return True

    def take(self, limit: int) -> list[Received]:
        """At most `limit`, the oldest first."""
        now_ms = self._clock.now_ms()
        taken: list[Received] = []
        for _ in range(min(limit, len(self.waiting))):
            sent_at_ms, sender, message, epoch = self.waiting.popleft()
            taken.append(Received(sender, message, (), now_ms - sent_at_ms, epoch))
        return taken


class HubLink:
    """A router for peers elsewhere, and the way to those of this process, which `connect`."""

    def __init__(self, router: PeersLink, own: PeerId, clock: Clock) -> None:
        self.transit = router.transit
        self._router = router
        self._own = own
        self._clock = clock
        self._here: dict[PeerId, _Queue] = {}
        self._inbox = _Queue(clock)

    @property
    def epoch(self) -> Epoch:
        """Stamped on everything sent."""
        return self._router.epoch

    @epoch.setter
    def epoch(self, epoch: Epoch) -> None:
        self._router.epoch = epoch

    def connect(self, own: PeerId) -> LocalLink:
        """The other end, for a peer of that name."""
        outbox = self._here[own] = _Queue(self._clock)
        return LocalLink(own, self._own, outbox, self._inbox, lambda: self._here.pop(own, None))

    def send(self, peer: PeerId, message: AnyMessage, tensors: Sequence[NamedTensor] = ()) -> bool:
        """Queue a message for `peer`; False as `send_packed`. Raises LocalProtocolError for what cannot be sent."""
        return self.send_packed(peer, (frames.pack(message, tensors),))

    def send_packed(self, peer: PeerId, packed: Sequence[Packed]) -> bool:
        """False: the peer is unroutable (see `take_lost`) or its queue is full."""
        here = self._here.get(peer)
        if here is None:
            return self._router.send_packed(peer, packed)
        return here.put(self._own, packed, self.epoch)

    def receive(self, limit: int) -> Sequence[Received]:
        """What came from here, then from elsewhere; at most `limit` of each, so that neither can starve the other."""
        if not self._inbox.waiting:
            return self._router.receive(limit)
        return [*self._inbox.take(limit), *self._router.receive(limit)]

    def take_lost(self) -> Sequence[PeerId]:
        """Peers whose connection was closed, or that a send found gone, since the last call."""
        return self._router.take_lost()

    @property
    def has_more(self) -> bool:
        """Whether a message is waiting of which the router's descriptor may not tell."""
        return bool(self._inbox.waiting) or self._router.has_more

    @property
    def addresses(self) -> Sequence[str]:
        """Where others reach the router."""
        return self._router.addresses

    @property
    def counters(self) -> Mapping[str, float]:
        """The router's: what stays in this process is not on any wire."""
        return self._router.counters

    def fileno(self) -> int:
        """The router's descriptor."""
        return self._router.fileno()

    def close(self) -> None:
        """Flush the router for at most 100 ms; nobody is here any more."""
        self._here.clear()
        self._router.close()


class LocalLink:
    """A peer's end; see `HubLink.connect`. Behaves as a `DealerLink` whose server is always there."""

    def __init__(
        self, own: PeerId, server: PeerId, inbox: _Queue, outbox: _Queue, leave: Callable[[], object]
    ) -> None:
        self.epoch = NO_EPOCH
        self.transit = TransitMeter()
        self._own = own
        self._server = server
        self._inbox = inbox
        self._outbox = outbox
        self._leave = leave
        self._counters = new_counters()

    def send(self, peer: PeerId, message: AnyMessage, tensors: Sequence[NamedTensor] = ()) -> bool:
        """Queue a message for `peer`; False as `send_packed`. Raises LocalProtocolError for what cannot be sent."""
        return self.send_packed(peer, (frames.pack(message, tensors),))

    def send_packed(self, peer: PeerId, packed: Sequence[Packed]) -> bool:
        """False: the queue is full, or `peer` is not the server."""
        if peer != self._server or not self._outbox.put(self._own, packed, self.epoch):
            self._counters["full_out"] += 1
            return False
        self._counters["messages_out"] += len(packed)
        return True

    def reconnect(self) -> None:
        """There is nothing between the ends that could break."""

    def receive(self, limit: int) -> Sequence[Received]:
        """At most `limit` messages."""
        came = self._inbox.take(limit)
        self._counters["messages_in"] += len(came)
        return came

    def take_lost(self) -> Sequence[PeerId]:
        """The server ends with us."""
        return ()

    @property
    def has_more(self) -> bool:
        """Whether a message is waiting."""
        return bool(self._inbox.waiting)

    @property
    def addresses(self) -> Sequence[str]:
        """Nobody connects to this end."""
        return ()

    @property
    def counters(self) -> Mapping[str, float]:
        """As on a socket; no bytes travel."""
        return self._counters

    def fileno(self) -> int:
        """Nothing to wait for: both ends share a loop."""
        return -1

    def close(self) -> None:
        """The server finds this peer gone."""
        self._leave()
