"""Control: a server's ROUTER and its clients' DEALERs.

A dealer has ZMQ_IMMEDIATE, so a send without a connection is refused and its owner knows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Final

import zmq

from fabric import frames
from fabric.codec import Buffer
from fabric.curve import Guard, principal_of_server
from fabric.errors import ConfigError
from fabric.ids import PeerId
from fabric.ipc import IPC, nearest
from fabric.link import Packed
from fabric.sockets.base import (
    COPY_BELOW_BYTES,
    MORE,
    InFlight,
    LinkOptions,
    ListeningLink,
    SocketLink,
    connect_socket,
    note_refused,
    note_sent,
    send_parts,
)

_IDENTITIES_LOST_MAX: Final = 10_000
_PEERS_IN_FLIGHT_KEPT: Final = 256  # before those with nothing in flight are forgotten
RECONNECT_AFTER_MS: Final = 100.0  # between the end of a connection, or a failed try, and the next


class RouterLink(ListeningLink):
    """Many peers, each by its name: the server's end of control, and of clients.

    A peer that was never here or is gone is refused and reported by `take_lost`; one whose queue is full, in
    messages or in bytes, is refused. A second connection under a living peer's name is ignored (no hand-over):
    names carry a nonce.
    """

    kind = zmq.ROUTER
    routes = 1

    def __init__(self, options: LinkOptions | None = None, guard: Guard | None = None) -> None:
        super().__init__(options, guard)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        self._lost: list[PeerId] = []
        self._in_flight: dict[PeerId, InFlight] = {}  # of peers that were sent something large

    def send_packed(self, peer: PeerId, packed: Sequence[Packed]) -> bool:
        """False: the peer is unroutable (see `take_lost`) or its queue is full."""
        if self._socket.closed:
            return False
        parts = self._join(packed)
        size = frames.size_of(parts)
        is_large = size >= COPY_BELOW_BYTES
        if is_large and not self._of(peer).has_room(size, self._options.queue_bytes_max):
            return note_refused(self._counters)
        self._is_touched = True
        try:
            self._socket.send(frames.route_to(peer), MORE)
        except zmq.Again:
            return note_refused(self._counters)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            if len(self._lost) < _IDENTITIES_LOST_MAX:
                self._lost.append(peer)
            self.transit.forget(peer)
            self._in_flight.pop(peer, None)
            self._counters["unroutable_out"] += 1
            return False
        _, tracker = send_parts(self._socket, parts, is_tracked=is_large)
        if is_large:
            self._in_flight[peer].add(tracker, size)
        return note_sent(self._counters, size, packed)

    def take_lost(self) -> Sequence[PeerId]:
        """Peers that a send found gone since the last call."""
        lost, self._lost = self._lost, []
        return lost

    @property
    def has_more(self) -> bool:
        """Whether somebody is lost, or a message is waiting."""
        return bool(self._lost) or super().has_more

    def _of(self, peer: PeerId) -> InFlight:
        own = self._in_flight.get(peer)
        if own is None:
            if len(self._in_flight) >= _PEERS_IN_FLIGHT_KEPT:  # mostly of peers that left without a word
                self._in_flight = {
                    other: theirs for other, theirs in self._in_flight.items() if not theirs.has_room(1, 0)
                }
            own = self._in_flight[peer] = InFlight()
        return own

    def _peer(self, parts: Sequence[Buffer]) -> PeerId:
        return frames.peer_from(parts[0])


class DealerLink(SocketLink):
    """One server, under its given name; the client's end. Sends are refused while there is no connection."""

    kind = zmq.DEALER

    def __init__(
        self,
        own: PeerId,
        server: PeerId,
        addresses: Sequence[str],
        options: LinkOptions | None = None,
        guard: Guard | None = None,
    ) -> None:
        super().__init__(options, guard)
        self._server = server
        self._given = tuple(addresses)
        self._connected_to = ""
        self._connect_at_ms: float | None = None
        self._socket.setsockopt(zmq.IDENTITY, frames.route_to(own))
        self._socket.setsockopt(zmq.IMMEDIATE, 1)

    @classmethod
    def connect(
        cls,
        own: PeerId,
        server: PeerId,
        addresses: Sequence[str],
        options: LinkOptions | None = None,
        guard: Guard | None = None,
    ) -> DealerLink:
        """Connect to the nearest of `addresses`, in the background and again whenever it breaks.

        `guard`: by TCP, with its key. Raises ConfigError for an address that cannot be one, or whose key is not trusted.
        """
        link = cls(own, server, addresses, options, guard)
        try:
            link._connect()
        except ConfigError:
            link.close()
            raise
        return link

    def reconnect(self) -> None:
        """Give the connection up for a new one, for a server that is silent though the connection looks alive.

        After a cut a router may not have noticed that our old connection is gone and will then ignore a new one
        of the same name, for good. So the new one begins at the first send 100 ms later, and if that was too
        early for the router, the next silence brings the owner here again.
        """
        if self._connected_to:
            with contextlib.suppress(zmq.ZMQError):  # ENOENT: it broke at this very moment
                self._socket.disconnect(self._connected_to)
        self._connected_to = ""
        self._connect_at_ms = self._clock.now_ms() + RECONNECT_AFTER_MS

    @property
    def is_by_ipc(self) -> bool:
        """Whether the server can only be a process of this host."""
        return self._connected_to.startswith(IPC)

    def send_packed(self, peer: PeerId, packed: Sequence[Packed]) -> bool:
        """False: not connected, or the queue is full, or `peer` is not the server."""
        if self._socket.closed or peer != self._server:
            return False
        if self._connect_at_ms is not None:
            if self._clock.now_ms() < self._connect_at_ms:
                return note_refused(self._counters)  # the old connection may still take messages, to nowhere
            try:
                self._connect()
            except ConfigError:  # its key is trusted no more; perhaps another one is, before long
                self._connect_at_ms = self._clock.now_ms() + RECONNECT_AFTER_MS
                return note_refused(self._counters)
        parts = self._join(packed)
        self._is_touched = True
        is_in, _ = send_parts(self._socket, parts)
        return (
            note_sent(self._counters, frames.size_of(parts), packed)
            if is_in
            else note_refused(self._counters)
        )

    def _connect(self) -> None:
        self._is_touched = True
        address = nearest(self._given)
        principal = principal_of_server(self._server)
        self._connected_to = connect_socket(self._socket, address, self._guard, principal)
        self._connect_at_ms = None

    def _peer(self, parts: Sequence[Buffer]) -> PeerId:
        del parts
        return self._server
