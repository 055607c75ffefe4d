"""Connections as ZeroMQ has them over TCP, on a virtual clock.

Within a connection nothing is lost, doubled or overtaken; it may only take longer. Where a connection breaks, a first part of what was
under way arrives and the rest is lost, and each end hears of it a moment later. A connecting end tries again by itself. What it
may do meanwhile depends on the kind of its link (docs/wire.md): control refuses to send, payload waits in a short queue.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from fabric import frames
from fabric.codec import Buffer
from fabric.curve import Guard
from fabric.errors import RemoteProtocolError
from fabric.ids import Epoch, Incarnation, PeerId
from fabric.link import NO_EPOCH, NamedTensor, Packed, Received
from fabric.messages import AnyMessage
from fabric.sockets import RECONNECT_AFTER_MS, LinkOptions, PushOptions, new_counters
from fabric.transit import TransitMeter

CONTROL_QUEUE: Final = 1_000 + 64
PAYLOAD_QUEUE: Final = 64
RETRY_MS: Final = (20.0, 500.0)
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
    ends: list[_End]
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


@dataclass(order=True)
class _Item:
    arrives_at_ms: float
    order: int
    wire: Wire
    parts: list[bytes]
    sent_at_ms: float


class Wire:
    """One connection. `near` connected to `far`, which listens; `name` is whom `far` takes it for."""

    def __init__(self, network: Network, near: _End, far: _Listener, name: PeerId) -> None:
        self.near, self.far, self.name = near, far, name
        self.path = network.path(near.owner.place, far.owner.place)
        self.is_broken = False
        self.under_way: dict[_End, int] = {near: 0, far: 0}
        self._network = network
        self._last_at_ms: dict[_End, float] = {near: 0.0, far: 0.0}

    def send(self, to: _End, parts: Sequence[Buffer], queue_max: int) -> bool:
        """False: too much waits there. What goes into a broken connection is gone, which its sender does not know yet."""
        if self.is_broken:
            return True
        if self.under_way[to] >= queue_max:
            return False
        network, path = self._network, self.path
        now_ms = network.time.now_ms
        at_ms = now_ms + path.delay_ms + network.draws.random() * path.jitter_ms
        if now_ms < path.slower_until_ms:
            at_ms += path.slower_ms
        if now_ms < path.cut_until_ms:
            at_ms += path.cut_until_ms - now_ms
        at_ms = self._last_at_ms[to] = max(at_ms, self._last_at_ms[to])
        self.under_way[to] += 1
        to.arrive(_Item(at_ms, network.next_order(), self, [bytes(part) for part in parts], now_ms))
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
            if kept and isinstance(end, VirtualPayloads):  # which may read the next connection first
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

    def finish(self, by: _End) -> None:
        """One end closes it in good order: what is under way to the other one arrives, then that hears the end."""
        if self.is_broken:
            return
        self.is_broken = True
        other = self.far if by is self.near else self.near
        at_ms = max(self._network.time.now_ms + self.path.delay_ms, self._last_at_ms[other])
        self._hang_up_at(max(at_ms, self.path.cut_until_ms), other)
        self._network.wires.pop(self, None)

    def _hang_up_at(self, at_ms: float, end: _End) -> None:
        self._network.time.at(at_ms, lambda: end.owner.when_running(lambda: end.hang_up(self)))


class _End:
    """What all links share; as `fabric.link.Link`."""

    def __init__(self, network: Network, owner: Owner) -> None:
        self.epoch: Epoch = NO_EPOCH
        self.transit = TransitMeter()
        self.owner = owner
        self.inbox: list[_Item] = []
        self.is_closed = False
        self._network = network
        self._came: list[Received] = []
        self._counters = new_counters()
        owner.ends.append(self)

    def arrive(self, item: _Item) -> None:
        """Take what will be here at its moment."""
        heapq.heappush(self.inbox, item)
        self.owner.wake(item.arrives_at_ms)

    def hang_up(self, wire: Wire) -> None:
        """That connection is over, and this end knows."""

    def peer_of(self, wire: Wire) -> PeerId:
        """Whom messages of that connection are from."""
        raise NotImplementedError

    def send(self, peer: PeerId, message: AnyMessage, tensors: Sequence[NamedTensor] = ()) -> bool:
        """As `fabric.link.Link`."""
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
        received, self._came = came[:limit], came[limit:]
        self._counters["messages_in"] += len(received)
        return received

    def take_lost(self) -> Sequence[PeerId]:
        """As `fabric.link.Link`."""
        return ()

    @property
    def has_more(self) -> bool:
        """Whether something has arrived."""
        return bool(self._came) or bool(
            self.inbox and self.inbox[0].arrives_at_ms <= self._network.time.now_ms
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

    def _open_up(self, item: _Item) -> list[Received]:
        envelope, named = frames.split(item.parts)
        peer, late_ms = self.peer_of(item.wire), 0.0
        if peer:
            late_ms = self.transit.late_ms(peer, envelope.sent_at_ms, self.owner.now_ms())
        epoch = Epoch(envelope.epoch)
        self._network.opened(item.wire, self, item.sent_at_ms, envelope.parcels)
        return [
            Received(peer, parcel.body, tensors, late_ms, epoch)
            for parcel, tensors in zip(envelope.parcels, named, strict=True)
        ]

    def _join(self, packed: Sequence[Packed]) -> list[Buffer]:
        return frames.join(packed, epoch=self.epoch, sent_at_ms=self.owner.now_ms())

    def _note(self, packed: Sequence[Packed], *, is_sent: bool) -> bool:
        self._counters["messages_out" if is_sent else "full_out"] += len(packed)
        return is_sent


class _Listener(_End):
    """Has an address."""

    def __init__(self, network: Network, owner: Owner, addresses: Sequence[str]) -> None:
        super().__init__(network, owner)
        self._addresses = [one for one in addresses if one.startswith("ipc://")]
        self.wires: list[Wire] = []
        for address in self._addresses:
            assert address not in network.listeners, f"{address} is taken"
            network.listeners[address] = self

    @property
    def addresses(self) -> Sequence[str]:
        return self._addresses

    def accept(self, wire: Wire) -> None:
        """Somebody has connected."""
        self.wires.append(wire)

    def hang_up(self, wire: Wire) -> None:
        if wire in self.wires:
            self.wires.remove(wire)

    def close(self) -> None:
        super().close()
        for address in self._addresses:
            if self._network.listeners.get(address) is self:
                del self._network.listeners[address]
        for wire in list(self.wires):
            wire.finish(self)
        self.wires.clear()


class VirtualPeers(_Listener):
    """As a ROUTER."""

    def __init__(self, network: Network, owner: Owner, addresses: Sequence[str]) -> None:
        super().__init__(network, owner, addresses)
        self.named: dict[PeerId, Wire] = {}
        self._lost: list[PeerId] = []

    def accept(self, wire: Wire) -> None:
        """A second connection of a living name stays open, and nobody listens to it."""
        super().accept(wire)
        self.named.setdefault(wire.name, wire)

    def hang_up(self, wire: Wire) -> None:
        super().hang_up(wire)
        if self.named.get(wire.name) is wire:
            del self.named[wire.name]

    def arrive(self, item: _Item) -> None:
        if self.named.get(item.wire.name) is item.wire:
            super().arrive(item)

    def peer_of(self, wire: Wire) -> PeerId:
        return wire.name

    def send_packed(self, peer: PeerId, packed: Sequence[Packed]) -> bool:
        wire = self.named.get(peer)
        if wire is None:
            self._lost.append(peer)
            self.transit.forget(peer)
            self._counters["unroutable_out"] += 1
            return False
        return self._note(packed, is_sent=wire.send(wire.near, self._join(packed), CONTROL_QUEUE))

    def take_lost(self) -> Sequence[PeerId]:
        lost, self._lost = self._lost, []
        return lost

    @property
    def has_more(self) -> bool:
        return bool(self._lost) or super().has_more


class VirtualPayloads(_Listener):
    """As a PULL."""

    def peer_of(self, wire: Wire) -> PeerId:
        return PeerId("")


class _Connecting(_End):
    """Tries until it is connected, and again when that breaks."""

    def __init__(self, network: Network, owner: Owner, own: PeerId, addresses: Sequence[str]) -> None:
        super().__init__(network, owner)
        self.wire: Wire | None = None
        self._own = own
        self._address = addresses[0] if addresses else ""
        self._attempt = 0
        self._failures = 0

    def connect(self) -> None:
        """Try, in the background."""
        self._attempt += 1
        self._try(self._attempt)

    def disconnect(self) -> None:
        """Give it up."""
        self._attempt += 1
        wire, self.wire = self.wire, None
        if wire is not None:
            wire.finish(self)

    def connected(self) -> None:
        """For what has waited."""

    def hang_up(self, wire: Wire) -> None:
        if wire is self.wire:
            self.wire = None
            if not self.is_closed:
                self._again(self._attempt)

    def close(self) -> None:
        self.disconnect()
        super().close()

    def _try(self, attempt: int) -> None:
        if attempt != self._attempt or self.is_closed or self.owner.is_dead:
            return
        network = self._network
        far = network.listeners.get(self._address)
        if far is None or far.owner.is_stopped or self.owner.is_stopped:
            self._again(attempt)
            return
        path = network.path(self.owner.place, far.owner.place)
        if network.time.now_ms < path.cut_until_ms:
            self._again(attempt)
            return
        network.time.at(network.time.now_ms + 2 * path.delay_ms, lambda: self._meet(attempt, far))

    def _meet(self, attempt: int, far: _Listener) -> None:
        if attempt != self._attempt or self.is_closed or self.owner.is_dead:
            return
        if self._network.listeners.get(self._address) is not far:
            self._again(attempt)
            return
        self._failures = 0
        self.wire = Wire(self._network, self, far, self._own)
        self._network.wires[self.wire] = None
        far.accept(self.wire)
        self.connected()

    def _again(self, attempt: int) -> None:
        network = self._network
        self._failures += 1
        first_ms, longest_ms = RETRY_MS
        wait_ms = min(first_ms * 2.0 ** min(self._failures - 1, 10), longest_ms)
        wait_ms *= 1.0 + 0.2 * network.draws.random()
        network.time.at(network.time.now_ms + wait_ms, lambda: self._try(attempt))


class VirtualServer(_Connecting):
    """As a DEALER whose sends are refused while there is no connection. `on_hang_up` hears of each break."""

    def __init__(
        self, network: Network, owner: Owner, own: PeerId, server: PeerId, addresses: Sequence[str]
    ) -> None:
        super().__init__(network, owner, own, addresses)
        self._server = server
        self._connect_at_ms: float | None = None
        self.on_hang_up: Callable[[], None] = lambda: None
        self.connect()

    def peer_of(self, wire: Wire) -> PeerId:
        return self._server

    def hang_up(self, wire: Wire) -> None:
        is_ours = wire is self.wire
        super().hang_up(wire)
        if is_ours:
            self.on_hang_up()

    def reconnect(self) -> None:
        """As `DealerLink.reconnect`: at the first send 100 ms later."""
        self.disconnect()
        self._connect_at_ms = self.owner.now_ms() + RECONNECT_AFTER_MS

    def send_packed(self, peer: PeerId, packed: Sequence[Packed]) -> bool:
        if peer != self._server or self.is_closed:
            return False
        if self._connect_at_ms is not None and self.owner.now_ms() >= self._connect_at_ms:
            self._connect_at_ms = None
            self.connect()
        if self.wire is None:
            return self._note(packed, is_sent=False)
        return self._note(packed, is_sent=self.wire.send(self.wire.far, self._join(packed), CONTROL_QUEUE))


class _Pushing(_Connecting):
    """One push socket: what is sent before it is connected waits."""

    def __init__(self, network: Network, owner: Owner, addresses: Sequence[str]) -> None:
        super().__init__(network, owner, PeerId(""), addresses)
        self._waiting: deque[list[Buffer]] = deque()
        self.connect()

    def peer_of(self, wire: Wire) -> PeerId:
        raise AssertionError("nothing comes by it")

    def push(self, packed: Sequence[Packed]) -> bool:
        """False: its queue is full."""
        parts = self._join(packed)
        if self.wire is not None:
            return self.wire.send(self.wire.far, parts, 2 * PAYLOAD_QUEUE)
        if len(self._waiting) >= PAYLOAD_QUEUE:
            return False
        self._waiting.append(parts)
        return True

    def connected(self) -> None:
        assert self.wire is not None
        while self._waiting:
            self.wire.send(self.wire.far, self._waiting.popleft(), 2 * PAYLOAD_QUEUE)


@dataclass
class _Target:
    incarnation: Incarnation
    addresses: tuple[str, ...]
    socket: _Pushing | None = None


class VirtualPush(_End):
    """As `fabric.sockets.PushPool`."""

    def __init__(self, network: Network, owner: Owner) -> None:
        super().__init__(network, owner)
        self.targets: dict[PeerId, _Target] = {}

    def know(self, peer: PeerId, incarnation: Incarnation, addresses: Sequence[str]) -> None:
        """As `fabric.transport.PushLink`."""
        known = self.targets.get(peer)
        if known is not None and (known.incarnation, known.addresses) == (incarnation, tuple(addresses)):
            return
        self.drop(peer)
        self.targets[peer] = _Target(incarnation, tuple(addresses))

    def drop(self, peer: PeerId) -> None:
        """As `fabric.transport.PushLink`."""
        target = self.targets.pop(peer, None)
        if target is not None and target.socket is not None:
            target.socket.close()

    def send(self, peer: PeerId, message: AnyMessage, tensors: Sequence[NamedTensor] = ()) -> bool:
        target = self.targets.get(peer)
        if target is None:
            self._counters["unroutable_out"] += 1
            return False
        if target.socket is None:
            target.socket = _Pushing(self._network, self.owner, target.addresses)
        packed = (frames.pack(message, tensors),)
        return self._note(packed, is_sent=target.socket.push(packed))

    def close(self) -> None:
        for peer in list(self.targets):
            self.drop(peer)
        super().close()


class Network:
    """All connections of a world, and what is between its places."""

    def __init__(
        self, time: Timeline, draws: random.Random, delay_ms: Callable[[str, str], tuple[float, float]]
    ) -> None:
        self.time = time
        self.draws = draws
        self.listeners: dict[str, _Listener] = {}
        self.wires: dict[Wire, None] = {}
        self.opened: Callable[[Wire, _End, float, Sequence[object]], None] = lambda *_: None
        """Hears of each message that is read: its connection, the reader, when it was sent, and what it says."""
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
                        item.arrives_at_ms += for_ms
                        end.owner.wake(item.arrives_at_ms)
                heapq.heapify(end.inbox)
            if for_ms > GIVEN_UP_AFTER_MS:
                self.time.at(now_ms + GIVEN_UP_AFTER_MS, partial(wire.break_off, is_all_lost=True))

    def kill(self, owner: Owner) -> None:
        """A process is gone: the kernel closes what it had."""
        for end in owner.ends:
            end.is_closed = True
            if isinstance(end, _Listener):
                for address in end.addresses:
                    if self.listeners.get(address) is end:
                        del self.listeners[address]
        owner.ends.clear()
        for wire in [wire for wire in self.wires if owner in (wire.near.owner, wire.far.owner)]:
            wire.break_off()


class VirtualTransport:
    """Links of one process; as `fabric.transport.Transport`."""

    def __init__(self, network: Network, owner: Owner) -> None:
        self._network = network
        self._owner = owner

    def bind_peers(
        self, addresses: Sequence[str], options: LinkOptions | None = None, guard: Guard | None = None
    ) -> VirtualPeers:
        """A server's end."""
        del options, guard
        return VirtualPeers(self._network, self._owner, addresses)

    def bind_payload(
        self, addresses: Sequence[str], options: LinkOptions | None = None, guard: Guard | None = None
    ) -> VirtualPayloads:
        """A receiver of payload."""
        del options, guard
        return VirtualPayloads(self._network, self._owner, addresses)

    def connect(
        self, own: PeerId, server: PeerId, addresses: Sequence[str], guard: Guard | None = None
    ) -> VirtualServer:
        """A client's end."""
        del guard
        return VirtualServer(self._network, self._owner, own, server, addresses)

    def push(self, options: PushOptions | None = None, guard: Guard | None = None) -> VirtualPush:
        """A sender of payload."""
        del options, guard
        return VirtualPush(self._network, self._owner)
