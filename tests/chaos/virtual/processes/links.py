"""Links over virtual connections: as a ROUTER, a DEALER, a PULL and a pool of PUSH sockets have them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from fabric import frames
from fabric.curve import LinkAccess
from fabric.ids import Incarnation, PeerId
from fabric.link import NamedTensor, Packed
from fabric.messages import AnyMessage
from fabric.sockets import CONNECT_MS, RECONNECT_AFTER_MS, LinkOptions, PushOptions
from fabric.sockets.base import Outdated
from fabric.sockets.local_streams import FLUSH_MS
from fabric.sockets.routes import Routes
from tests.chaos.virtual.processes.network import End, Network, Owner, Parts, Wire

CONTROL_QUEUE: Final = 1_000 + 64
PAYLOAD_QUEUE: Final = 64
RETRY_MS: Final = (20.0, 500.0)


class _Listener(End):
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
    """As a ROUTER: by the real rules of which connection is a peer's (`fabric/sockets/routes.py`)."""

    def __init__(self, network: Network, owner: Owner, addresses: Sequence[str]) -> None:
        super().__init__(network, owner, addresses)
        self._routes = Routes()
        self._wires: dict[bytes, Wire] = {}

    def accept(self, wire: Wire) -> None:
        super().accept(wire)
        self._wires[wire.identity] = wire

    def hang_up(self, wire: Wire) -> None:
        super().hang_up(wire)
        self._wires.pop(wire.identity, None)
        if self._routes.peer_at(wire.identity) is not None:
            self._routes.end(wire.name)
            self._note_lost(wire.name)

    def close(self) -> None:
        super().close()
        self._wires.clear()

    def peer_of(self, wire: Wire) -> PeerId:
        if not self._routes.note(wire.identity, wire.name, wire.mark, None):
            raise Outdated(f"{wire.name} has a newer connection")
        return wire.name

    def send_packed(self, peer: PeerId, packed: Sequence[Packed]) -> bool:
        identity = self._routes.to(peer)
        wire = None if identity is None else self._wires.get(identity)
        if wire is None:
            self._routes.forget(peer)
            self._note_lost(peer)
            self._counters["unroutable_out"] += 1
            return False
        self._say(wire, packed)
        return self._note(packed, is_sent=wire.send(wire.near, self._join(packed), CONTROL_QUEUE))

    def _note_lost(self, peer: PeerId) -> None:
        self._lost.append(peer)
        self.transit.forget(peer)


class VirtualPayloads(_Listener):
    """As a PULL."""

    may_read_late = True

    def peer_of(self, wire: Wire) -> PeerId:
        return PeerId("")


class _Connecting(End):
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
            self.forget(wire)
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

    def _meet(self, attempt: int, far: End) -> None:
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
        self._began_at_ms = owner.now_ms()
        self.on_hang_up: Callable[[], None] = lambda: None
        self.connect()

    def peer_of(self, wire: Wire) -> PeerId:
        return self._server

    def hang_up(self, wire: Wire) -> None:
        is_ours = wire is self.wire
        super().hang_up(wire)
        if is_ours:
            # Of a connection that this end had not given up.
            self._lost = [self._server]
            self.on_hang_up()

    def reconnect(self) -> None:
        """As `DealerLink.reconnect`: at the first send 100 ms later; one that is on its way goes on."""
        now_ms = self.owner.now_ms()
        if self._connect_at_ms is None and (
            self.wire is not None or now_ms >= self._began_at_ms + CONNECT_MS
        ):
            self.disconnect()
            self._connect_at_ms = now_ms + RECONNECT_AFTER_MS

    def send_packed(self, peer: PeerId, packed: Sequence[Packed]) -> bool:
        if peer != self._server or self.is_closed:
            return False
        if self._connect_at_ms is not None and self.owner.now_ms() >= self._connect_at_ms:
            self._connect_at_ms, self._began_at_ms = None, self.owner.now_ms()
            self.connect()
        if self.wire is None:
            return self._note(packed, is_sent=False)
        self._say(self.wire, packed)
        return self._note(packed, is_sent=self.wire.send(self.wire.far, self._join(packed), CONTROL_QUEUE))


class _Pushing(_Connecting):
    """One push socket: what is sent before it is connected waits."""

    def __init__(self, network: Network, owner: Owner, addresses: Sequence[str]) -> None:
        super().__init__(network, owner, PeerId(""), addresses)
        self._waiting: deque[tuple[float, Parts]] = deque()
        """With the moment at which each was sent."""
        self._is_flushing = False
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
        self._waiting.append((self._network.time.now_ms, parts))
        return True

    def connected(self) -> None:
        assert self.wire is not None
        while self._waiting:
            sent_at_ms, parts = self._waiting.popleft()
            self.wire.send(self.wire.far, parts, 2 * PAYLOAD_QUEUE, sent_at_ms)
        if self._is_flushing:
            self.close()

    def flush(self) -> None:
        """Close it once what waits is sent, at the latest after 100 ms."""
        if not self._waiting:
            self.close()
            return
        self._is_flushing = True
        self._network.time.at(self._network.time.now_ms + FLUSH_MS, self.close)


@dataclass
class _Target:
    incarnation: Incarnation
    addresses: tuple[str, ...]
    socket: _Pushing | None = None


class VirtualPush(End):
    """As `fabric.sockets.PushPool`."""

    def __init__(self, network: Network, owner: Owner) -> None:
        super().__init__(network, owner)
        self.targets: dict[PeerId, _Target] = {}

    def know(self, peer: PeerId, incarnation: Incarnation, addresses: Sequence[str]) -> None:
        """As `fabric.transport.PushLink`."""
        known = self.targets.get(peer)
        if known is not None and (known.incarnation, known.addresses) == (incarnation, tuple(addresses)):
            return
        if known is not None and known.socket is not None:
            known.socket.close()
        self.targets[peer] = _Target(incarnation, tuple(addresses))

    def drop(self, peer: PeerId) -> None:
        """As `fabric.transport.PushLink`."""
        target = self.targets.pop(peer, None)
        if target is not None and target.socket is not None:
            target.socket.flush()

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


class VirtualTransport:
    """Links of one process; as `fabric.transport.Transport`."""

    def __init__(self, network: Network, owner: Owner) -> None:
        self._network = network
        self._owner = owner

    def bind_peers(
        self, addresses: Sequence[str], options: LinkOptions | None = None, guard: LinkAccess | None = None
    ) -> VirtualPeers:
        """A server's end."""
        del options, guard
        return VirtualPeers(self._network, self._owner, addresses)

    def bind_payload(
        self, addresses: Sequence[str], options: LinkOptions | None = None, guard: LinkAccess | None = None
    ) -> VirtualPayloads:
        """A receiver of payload."""
        del options, guard
        return VirtualPayloads(self._network, self._owner, addresses)

    def connect(
        self, own: PeerId, server: PeerId, addresses: Sequence[str], guard: LinkAccess | None = None
    ) -> VirtualServer:
        """A client's end."""
        del guard
        return VirtualServer(self._network, self._owner, own, server, addresses)

    def push(self, options: PushOptions | None = None, guard: LinkAccess | None = None) -> VirtualPush:
        """A sender of payload."""
        del options, guard
        return VirtualPush(self._network, self._owner)
