"""Connections as ZeroMQ has them over TCP, on a virtual clock.

Within a connection nothing is lost, doubled or overtaken; it may only take longer. Where a connection breaks, a first part of what was
under way arrives and the rest is lost, and each end hears of it a moment later. A connecting end tries again by itself. What it
may do meanwhile depends on the kind of its link (docs/wire.md): control refuses to send, payload waits in a short queue.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from fabric import frames
from fabric.codec import Buffer
from fabric.errors import RemoteProtocolError
from fabric.ids import Epoch, PeerId
from fabric.link import NO_EPOCH, NamedTensor, Packed, Received
from fabric.messages import WIRE_VERSION, AnyMessage, Envelope, Ping, Pong
from fabric.sockets import new_counters
from fabric.transit_time import TransitMeter

Parts = Sequence[Buffer] | Envelope

LEAST_WAIT_MS: Final = 1e-3
GIVEN_UP_AFTER_MS: Final = 5_000.0
"""Unacknowledged for so long, a connection ends (docs/wire.md)."""


class Timeline(Protocol):
    """The world's clock and what is to happen."""

    now_ms: float

    def at(self, at_ms: float, callback: Callable[[], object]) -> None:
        """Call back at that moment."""
        ...


class Owner(Protocol):
    """The process that has a link."""

    place: str
    """Where it runs, whichever start of it this is."""
    ends: list[End]
    is_dead: bool
    is_stopped: bool

    def now_ms(self) -> float:
        """By its own clock."""
        ...

    def wake(self, at_ms: float) -> None:
        """It has something to hear at that moment of the world."""
        ...

    def when_running(self, callback: Callable[[], None]) -> None:
        """Now, or when it goes on; never, if it is dead by then."""
        ...


@dataclass
class Path:
    """What is between two places."""

    delay_ms: float
    jitter_ms: float
    slower_ms: float = 0.0
    slower_until_ms: float = 0.0
    cut_until_ms: float = 0.0
    full_until_ms: float = 0.0
    """Until then queues take nothing more: what is said is refused."""
    back_at_ms: float | None = None
    """When the host of one end that has vanished, or vanished last, is there again."""

    @property
    def disturbed_until_ms(self) -> float:
        """Whatever it is."""
        return max(self.slower_until_ms, self.cut_until_ms, self.full_until_ms)


@dataclass(order=True)
class Item:
    arrives_at_ms: float
    order: int
    wire: Wire
    parts: Sequence[bytes] | Envelope
    """A heartbeat, as half of all messages are, is handed over as it is: there is nothing to learn from its bytes."""
    sent_at_ms: float


class Wire:
    """One connection. `near` connected to `far`, which listens; `name` is whom `far` takes it for."""

    def __init__(self, network: Network, near: End, far: End, name: PeerId) -> None:
        self.near, self.far, self.name = near, far, name
        self.mark = f"{network.next_order():x}.0"
        """Grows with each connection."""
        self.identity = f"{name}#{self.mark}".encode()
        self.path = network.path(near.owner.place, far.owner.place)
        self.is_broken = False
        self.is_half_open = False
        """One end's host is gone, and the other one has not heard of it."""
        self.under_way: dict[End, int] = {near: 0, far: 0}
        self._network = network
        self._last_at_ms: dict[End, float] = {near: 0.0, far: 0.0}

    def send(self, to: End, parts: Parts, queue_max: int, sent_at_ms: float | None = None) -> bool:
        """False: too much waits there. What goes into a broken connection is gone, which its sender does not know yet.

        `sent_at_ms`: when its process sent it, if it has waited for the connection.
        """
        if self.is_broken:
            return True
        network, path = self._network, self.path
        now_ms = network.time.now_ms
        if self.under_way[to] >= queue_max or now_ms < path.full_until_ms:
            return False
        if self.is_half_open:
            self.under_way[to] += 1
            self._send_into_nothing()
            return True
        at_ms = now_ms + path.delay_ms + network.draws.random() * path.jitter_ms
        if now_ms < path.slower_until_ms:
            at_ms += path.slower_ms
        if now_ms < path.cut_until_ms:
            at_ms += path.cut_until_ms - now_ms
        at_ms = self._last_at_ms[to] = max(at_ms, self._last_at_ms[to])
        self.under_way[to] += 1
        if sent_at_ms is None:
            sent_at_ms = now_ms
        taken = parts if isinstance(parts, Envelope) else list(map(bytes, parts))
        to.arrive(Item(at_ms, network.next_order(), self, taken, sent_at_ms))
        return True

    def break_off(self, *, is_all_lost: bool = False) -> None:
        """It breaks now, wherever: of what is under way a first part arrives, if anything."""
        if self.is_broken:
            return
        self.is_broken = True
        network = self._network
        now_ms = network.time.now_ms
        for end in (self.near, self.far):
            coming = sorted(item for item in end.inbox if item.wire is self and item.arrives_at_ms > now_ms)
            kept = 0 if is_all_lost or end.owner.is_dead else network.draws.randint(0, len(coming))
            if kept < len(coming):
                lost = {item.order for item in coming[kept:]}
                end.inbox = [item for item in end.inbox if item.order not in lost]
                heapq.heapify(end.inbox)
            heard_at_ms = now_ms + self.path.delay_ms
            if not is_all_lost:  # else each end gave it up by itself: the end's telling passes no cut either
                heard_at_ms = max(heard_at_ms, min(self.path.cut_until_ms, now_ms + GIVEN_UP_AFTER_MS))
            if kept and end.may_read_late:
                wait_ms = network.draws.choice((0.0, 40.0)) * network.draws.random()
                for item in coming[:kept]:
                    item.arrives_at_ms += wait_ms
                heapq.heapify(end.inbox)
                end.owner.wake(coming[kept - 1].arrives_at_ms)
            if kept:
                heard_at_ms = max(heard_at_ms, coming[kept - 1].arrives_at_ms)
            if not end.owner.is_dead:
                self._hang_up_at(heard_at_ms, end)
        network.wires.pop(self, None)

    def lose_host(self, owner: Owner) -> None:
        """That end's host is gone, with what was under way to it; nobody tells the other one."""
        self.is_half_open = True
        end = self.near if self.near.owner is owner else self.far
        if end.inbox:
            self._send_into_nothing()

    def _send_into_nothing(self) -> None:
        """TCP sends it again, until the host is back and knows of no such connection, or it gives up."""
        network = self._network
        back_at_ms = self.path.back_at_ms
        again_ms = network.draws.uniform(0.0, 200.0)
        ends_at_ms = network.time.now_ms + GIVEN_UP_AFTER_MS
        if back_at_ms is not None:
            ends_at_ms = min(ends_at_ms, max(back_at_ms, network.time.now_ms) + again_ms)
        network.time.at(ends_at_ms, partial(self.break_off, is_all_lost=True))

    def finish(self, by: End) -> None:
        """One end closes it in good order: what is under way to the other one arrives, then that hears the end."""
        if self.is_broken:
            return
        self.is_broken = True
        other = self.far if by is self.near else self.near
        at_ms = max(self._network.time.now_ms + self.path.delay_ms, self._last_at_ms[other])
        self._hang_up_at(max(at_ms, self.path.cut_until_ms), other)
        self._network.wires.pop(self, None)

    def _hang_up_at(self, at_ms: float, end: End) -> None:
        """Behind what arrives at that moment."""
        heard_at_ms = at_ms + LEAST_WAIT_MS
        self._network.time.at(heard_at_ms, lambda: end.owner.when_running(lambda: end.hang_up(self)))


class End:
    """What all links share; as `fabric.link.Link`."""

    may_read_late = False
    """Whether it may read what a next connection brings before the rest of the last one."""

    def __init__(self, network: Network, owner: Owner) -> None:
        self.epoch: Epoch = NO_EPOCH
        self.transit = TransitMeter()
        self.owner = owner
        self.inbox: list[Item] = []
        self.is_closed = False
        self._network = network
        self._came: list[tuple[Item, Received]] = []
        """Of what travelled together, and was more than was asked for, with what it came in."""
        self._lost: list[PeerId] = []
        self._counters = new_counters()
        owner.ends.append(self)

    def accept(self, wire: Wire) -> None:
        """Somebody has connected, to an end that listens."""
        raise NotImplementedError

    def arrive(self, item: Item) -> None:
        """Take what will be here at its moment."""
        heapq.heappush(self.inbox, item)
        self.owner.wake(item.arrives_at_ms)

    def forget(self, wire: Wire) -> None:
        """This end gives that connection up itself, so it reads nothing more of it: neither does a socket that disconnects."""
        self.inbox = [item for item in self.inbox if item.wire is not wire]
        heapq.heapify(self.inbox)

    def hang_up(self, wire: Wire) -> None:
        """That connection is over, and this end knows."""

    def peer_of(self, wire: Wire) -> PeerId:
        """Whom messages of that connection are from."""
        raise NotImplementedError

    def send(self, peer: PeerId, message: AnyMessage, tensors: Sequence[NamedTensor] = ()) -> bool:
        """As `fabric.link.Link`."""
        if self._network.refuses(message):
            return False
        return self.send_packed(peer, (frames.pack(message, tensors),))

    def send_packed(self, peer: PeerId, packed: Sequence[Packed]) -> bool:
        """As `fabric.outbox.Sending`."""
        del peer, packed
        return False

    def receive(self, limit: int) -> Sequence[Received]:
        """As `fabric.link.Link`."""
        came, self._came = self._came, []
        now_ms = self._network.time.now_ms
        while len(came) < limit and self.inbox and self.inbox[0].arrives_at_ms <= now_ms:
            item = heapq.heappop(self.inbox)
            item.wire.under_way[self] -= 1
            try:
                came.extend(self._open_up(item))
            except RemoteProtocolError:
                self._counters["garbage_in"] += 1
        taken, self._came = came[:limit], came[limit:]
        self._counters["messages_in"] += len(taken)
        for item, received in taken:
            self._network.read(item.wire, self, item.sent_at_ms, received)
        return [received for _, received in taken]

    def take_lost(self) -> Sequence[PeerId]:
        """As `fabric.link.Link`."""
        lost, self._lost = self._lost, []
        return lost

    @property
    def has_more(self) -> bool:
        """Whether something has arrived, or somebody is gone."""
        inbox = self.inbox
        return bool(
            (inbox and inbox[0].arrives_at_ms <= self._network.time.now_ms) or self._came or self._lost
        )

    @property
    def addresses(self) -> Sequence[str]:
        """None, but for who listens."""
        return ()

    @property
    def counters(self) -> Mapping[str, float]:
        """As on a socket."""
        return self._counters

    def fileno(self) -> int:
        """Nothing to wait for."""
        return -1

    def close(self) -> None:
        """In good order: what was sent arrives."""
        self.is_closed = True
        self.inbox.clear()
        if self in self.owner.ends:
            self.owner.ends.remove(self)

    def _open_up(self, item: Item) -> list[tuple[Item, Received]]:
        parts = item.parts
        envelope, named = (parts, ((),)) if isinstance(parts, Envelope) else frames.split(parts)
        peer, late_ms = self.peer_of(item.wire), 0.0
        if peer:
            late_ms = self.transit.late_ms(peer, envelope.sent_at_ms, self.owner.now_ms())
        epoch = Epoch(envelope.epoch)
        return [
            (item, Received(peer, parcel.body, tensors, late_ms, epoch))
            for parcel, tensors in zip(envelope.parcels, named, strict=True)
        ]

    def _join(self, packed: Sequence[Packed]) -> Parts:
        parcel = packed[0].parcel
        if len(packed) == 1 and isinstance(parcel.body, Ping | Pong):
            return Envelope(WIRE_VERSION, self.epoch, self.owner.now_ms(), (parcel,))
        return frames.join(packed, epoch=self.epoch, sent_at_ms=self.owner.now_ms())

    def _say(self, wire: Wire, packed: Sequence[Packed]) -> None:
        self._network.said(self.owner, wire, [one.parcel.body for one in packed])

    def _note(self, packed: Sequence[Packed], *, is_sent: bool) -> bool:
        self._counters["messages_out" if is_sent else "full_out"] += len(packed)
        return is_sent


class Network:
    """All connections of a world, and what is between its places."""

    def __init__(
        self, time: Timeline, draws: random.Random, delay_ms: Callable[[str, str], tuple[float, float]]
    ) -> None:
        self.time = time
        self.draws = draws
        self.listeners: dict[str, End] = {}
        self.wires: dict[Wire, None] = {}
        self.read: Callable[[Wire, End, float, Received], None] = lambda *_: None
        """Hears of each message as a process takes it: its connection, the reader, when it was sent, and the message."""
        self.said: Callable[[Owner, Wire, Sequence[AnyMessage]], None] = lambda *_: None
        """Hears of all that goes into a control connection: who says it, and what."""
        self.refuses: Callable[[AnyMessage], bool] = lambda _: False
        """Whether a queue is too full to take that message, of those that are sent alone."""
        self._delay_ms = delay_ms
        self._paths: dict[tuple[str, str], Path] = {}
        self._order = 0

    @property
    def paths(self) -> Sequence[Path]:
        """All that something went by."""
        return list(self._paths.values())

    def next_order(self) -> int:
        """Of two that arrive at one moment the one that was sent first is first."""
        self._order += 1
        return self._order

    def path(self, one: str, other: str) -> Path:
        """Between two places; both ways alike."""
        key = (min(one, other), max(one, other))
        if key not in self._paths:
            self._paths[key] = Path(*self._delay_ms(*key))
        return self._paths[key]

    def between(self, one: str, other: str) -> list[Wire]:
        """The connections between two places, in a fixed order."""
        found = [wire for wire in self.wires if {wire.near.owner.place, wire.far.owner.place} == {one, other}]
        return sorted(found, key=lambda wire: (wire.near.owner.place, wire.name, wire.far.addresses))

    def cut(self, one: str, other: str, for_ms: float) -> None:
        """Nothing passes for so long; what is under way then is sent again by TCP, or lost with its connection."""
        path = self.path(one, other)
        now_ms = self.time.now_ms
        path.cut_until_ms = max(path.cut_until_ms, now_ms + for_ms)
        for wire in self.between(one, other):
            for end in (wire.near, wire.far):
                for item in end.inbox:
                    if item.wire is wire and item.arrives_at_ms > now_ms:
                        item.arrives_at_ms = max(item.arrives_at_ms, path.cut_until_ms)
                        end.owner.wake(item.arrives_at_ms)
                heapq.heapify(end.inbox)
            if for_ms > GIVEN_UP_AFTER_MS:
                self.time.at(now_ms + GIVEN_UP_AFTER_MS, partial(wire.break_off, is_all_lost=True))

    def kill(self, owner: Owner) -> None:
        """A process is gone: the kernel closes what it had."""
        for wire in self._end(owner):
            wire.break_off()

    def vanish(self, owner: Owner, back_at_ms: float) -> None:
        """A process is gone with its host: nobody closes what it had."""
        for wire in self._end(owner):
            wire.path.back_at_ms = back_at_ms
            wire.lose_host(owner)

    def _end(self, owner: Owner) -> list[Wire]:
        for end in owner.ends:
            end.is_closed = True
            for address in end.addresses:
                if self.listeners.get(address) is end:
                    del self.listeners[address]
        owner.ends.clear()
        return [wire for wire in self.wires if owner in (wire.near.owner, wire.far.owner)]
