"""Control: a server's ROUTER and its clients' DEALERs.

A dealer has ZMQ_IMMEDIATE, so a send without a connection is refused and its owner knows. Both ends hear at once of
a connection that was closed (`take_lost`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Final

import zmq

from fabric import frames
from fabric.curve import LinkAccess, Speaker, principal_of_server
from fabric.errors import ConfigError, RemoteProtocolError
from fabric.ids import PeerId
from fabric.ipc import IPC, check_not_foreign, nearest, stream_path_of
from fabric.link import Packed, Received
from fabric.sockets.base import (
    COPY_BELOW_BYTES,
    HANDSHAKE_MS,
    MORE,
    InFlight,
    ListeningLink,
    Outdated,
    SocketLink,
    Whole,
    connect_socket,
    note_refused,
    note_sent,
    send_parts,
)
from fabric.sockets.local_stream import LocalStream
from fabric.sockets.options import LinkOptions
from fabric.sockets.routes import Routes, new_route

_IDENTITIES_LOST_MAX: Final = 10_000
_PEERS_IN_FLIGHT_KEPT: Final = 256  # before those with nothing in flight are forgotten
RECONNECT_AFTER_MS: Final = 100.0  # between the end of a connection, or a failed try, and the next
CONNECT_MS: Final = 1_000.0  # so long a connection may take to come about, however short a patience is
_FAILURES_TOLD: Final = 4  # so many handshakes in a row are no accident
_STANDING: Final = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
_FAILED: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class RouterLink(ListeningLink):
    """Many peers, each by its name: the server's end of control, and of clients.

    A peer that never spoke or is gone is refused and reported by `take_lost`; one whose queue is full, in
    messages or in bytes, is refused. Of several connections under one name the newest is answered, and once it has
    spoken it alone is heard, see `Routes`.
    """

    kind = zmq.ROUTER
    is_routing = True

    def __init__(self, options: LinkOptions | None = None, guard: LinkAccess | None = None) -> None:
        super().__init__(options, guard)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        self._routes = Routes()
        self._stream_of: dict[PeerId, LocalStream] = {}  # those whose newest connection is one
        self._in_flight: dict[PeerId, InFlight] = {}  # of peers that were sent something large

    def send_packed(self, peer: PeerId, packed: Sequence[Packed]) -> bool:
        """False: the peer is unroutable (see `take_lost`) or its queue is full."""
        if self._socket.closed:
            return False
        self._follow_keys()
        route = self._routes.to(peer)
        if route is None:
            return self._unroutable(peer)
        parts = self._join(packed)
        size = frames.size_of(parts)
        stream = self._stream_of.get(peer)
        if stream is not None:
            if stream.send(parts, size):
                return note_sent(self._counters, size, packed)
            if stream.is_broken:  # lost it is when what it has said before is read
                self._counters["unroutable_out"] += 1
                return False
            return note_refused(self._counters)
        is_large = size >= COPY_BELOW_BYTES
        if is_large:
            if not self._of(peer).has_room(size, self._options.queue_bytes_max):
                return note_refused(self._counters)
            parts = frames.kept_apart(parts)
        self._is_touched = True
        try:
            self._socket.send(route, MORE)
        except zmq.Again:
            return note_refused(self._counters)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return self._unroutable(peer)
        _, tracker = send_parts(self._socket, parts, is_tracked=is_large)
        if is_large:
            self._in_flight[peer].add(tracker, size)
        return note_sent(self._counters, size, packed)

    def _connection_ended(self, descriptor: int) -> None:
        for peer in self._routes.end_at(descriptor):
            self._note_lost(peer)

    def _note_streams_ended(self) -> None:
        for stream in self._streams.ended:
            if self._stream_of.get(stream.peer) is stream:
                self._routes.forget(stream.peer)
                self._note_lost(stream.peer)
        self._streams.ended.clear()

    def _unroutable(self, peer: PeerId) -> bool:
        self._counters["unroutable_out"] += 1
        self._routes.forget(peer)
        self._note_lost(peer)
        return False

    def _note_lost(self, peer: PeerId) -> None:
        """It is told of once, by whichever saw it first."""
        stream = self._stream_of.pop(peer, None)
        if stream is not None:
            self._streams.end(stream)
        if len(self._lost) < _IDENTITIES_LOST_MAX:
            self._lost[peer] = None
        self.transit.forget(peer)
        self._in_flight.pop(peer, None)

    def _keys_changed(self, guard: LinkAccess) -> None:
        super()._keys_changed(guard)
        for peer in self._routes.forget_keys(guard.lets_in):
            self._note_lost(peer)

    def _of(self, peer: PeerId) -> InFlight:
        own = self._in_flight.get(peer)
        if own is None:
            if len(self._in_flight) >= _PEERS_IN_FLIGHT_KEPT:  # mostly of peers that left without a word
                self._in_flight = {of: its for of, its in self._in_flight.items() if not its.has_room(1, 0)}
            own = self._in_flight[peer] = InFlight()
        return own

    def _sender(self, whole: Whole) -> tuple[PeerId, Speaker | None]:
        if whole.stream is not None:
            return self._sender_by(whole.stream), None
        assert whole.last_frame is not None, "it came by ZeroMQ"
        route = bytes(whole.route)
        descriptor = whole.descriptor
        known = self._routes.peer_at(route, descriptor)
        peer, mark = (known, "") if known is not None else frames.peer_from(route)
        speaker = None if self._guard is None else self._guard.check(whole.last_frame, descriptor, peer)
        if known is None:
            # Before the message is looked at: the kernel gives descriptors out again.
            self._connections.is_told = True
            self._note_ended()
            self._note_spoken(route, peer, mark, None if speaker is None else speaker.public, descriptor)
            if descriptor not in self._connections.standing:  # it ended before anybody read this
                self._connection_ended(descriptor)
        return peer, speaker

    def _sender_by(self, stream: LocalStream) -> PeerId:
        """Whose stream that is: with its first message, from then on its peer is answered there."""
        if stream.peer and self._routes.to(stream.peer) is not None:
            return stream.peer
        assert stream.identity is not None, "that came before"
        try:
            peer, mark = frames.peer_from(stream.identity)
            self._note_spoken(stream.identity, peer, mark, None, None)
        except RemoteProtocolError:
            self._streams.end(stream)
            raise
        stream.peer = peer
        self._stream_of[peer] = stream
        return peer

    def _note_spoken(
        self, route: bytes, peer: PeerId, mark: str, key: str | None, descriptor: int | None
    ) -> None:
        """Somebody speaks by a connection for the first time. Raises Outdated where he has spoken by a newer one."""
        if not self._routes.note(route, peer, mark, key, descriptor):
            raise Outdated(f"{peer} has a newer connection")
        if self._routes.to(peer) != route:
            return  # the connection has ended
        former = self._stream_of.pop(peer, None)
        if former is not None and former.identity != route:
            self._counters["outdated_in"] += former.drop_unread()
            self._streams.end(former)
        self._lost.pop(peer, None)  # it is back before anybody heard that it was gone


class DealerLink(SocketLink):
    """One server, under its given name; the client's end. Sends are refused while there is no connection.

    A connection by TCP that does not come about is begun anew by this link, at a send, not by ZeroMQ: with the next key that is
    trusted, or later where the server says that ours is not (`refusal`).
    """

    kind = zmq.DEALER

    def __init__(
        self,
        own: PeerId,
        server: PeerId,
        addresses: Sequence[str],
        options: LinkOptions | None = None,
        guard: LinkAccess | None = None,
    ) -> None:
        super().__init__(options, guard)
        self.refusal = ""
        """Why the server does not let us in; empty: nothing of that kind is known."""
        self._own = own
        self._server = server
        self._given = tuple(addresses)
        self._connected_to, self._server_key, self._own_key, self._identity = "", "", "", b""
        self._connect_at_ms: float | None = None
        self._began_at_ms = 0.0
        self._stream: LocalStream | None = None
        self._is_by_zmq = False  # ZeroMQ's connection has carried something, so all the rest goes there
        self._is_turned_away = False  # from local streams, as long as ZeroMQ's connection stands
        self._is_stale = False  # a local stream has ended, so what stood beside it is of who is gone
        self._why_not = ""  # nothing is even tried there
        self._failures = 0  # handshakes since the last that did not fail
        self._was_let_in = False
        self._connections = self._watch_connections(_STANDING | _FAILED)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)

    @classmethod
    def connect(
        cls,
        own: PeerId,
        server: PeerId,
        addresses: Sequence[str],
        options: LinkOptions | None = None,
        guard: LinkAccess | None = None,
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
        """Give up a connection whose server is silent, for a new one at the first send 100 ms later; one that is on its way goes on."""
        now_ms = self._clock.now_ms()
        if self._connect_at_ms is not None:
            self._connect_at_ms = min(self._connect_at_ms, now_ms + RECONNECT_AFTER_MS)
        elif self._is_by_zmq or self._stream is not None or now_ms >= self._began_at_ms + CONNECT_MS:
            self._connect_later(RECONNECT_AFTER_MS)

    def receive(self, limit: int) -> Sequence[Received]:
        """At most `limit` messages; of a server whose key is trusted no more none."""
        received = super().receive(limit)
        return received if self._connected_to else ()

    @property
    def trouble(self) -> str:
        """What may be wrong with a server that does not answer; empty: nothing is known."""
        if self._guard is not None and self._failures >= _FAILURES_TOLD:
            return ": it ends each connection, perhaps it has none of the keys that are trusted"
        return self._why_not

    def _note_ended(self) -> None:
        if self._socket.closed or not self._connections.ended():
            return
        if self._is_by_zmq:  # else it stood idle beside a local stream
            self._lost[self._server] = None
        self._is_by_zmq = self._is_turned_away = False

    @property
    def is_by_ipc(self) -> bool:
        """Whether the server can only be a process of this host."""
        return self._connected_to.startswith(IPC)

    def send_packed(self, peer: PeerId, packed: Sequence[Packed]) -> bool:
        """False: not connected, or the queue is full, or `peer` is not the server."""
        if self._socket.closed or peer != self._server:
            return False
        self._follow_keys()
        if self._connect_at_ms is not None and self._clock.now_ms() < self._connect_at_ms:
            return note_refused(self._counters)  # the old connection may still take messages, to nowhere
        try:
            if self._is_stale:  # a local stream has ended: as ZeroMQ does, at once and at the same place
                place = self._connected_to
                self._disconnect()
                self._connect_to(place)  # what came last, and the loss, are still to be heard
            elif self._connect_at_ms is not None:
                self._connect()
            if self.is_by_ipc and self._stream is None and not self._is_by_zmq:
                check_not_foreign(self._connected_to)  # nobody may have been there when it connected
                if not self._is_turned_away:
                    self._stream = self._streams.connect(stream_path_of(self._connected_to), self._identity)
        except ConfigError as error:
            # Its key is trusted no more, or another user is there; perhaps not for long.
            self._why_not = f": {error}"
            self._connect_later(RECONNECT_AFTER_MS)
            return note_refused(self._counters)
        parts = self._join(packed)
        size = frames.size_of(parts)
        if self._stream is not None:
            is_in = self._stream.send(parts, size)
            return note_sent(self._counters, size, packed) if is_in else note_refused(self._counters)
        self._is_touched = True
        is_in, _ = send_parts(self._socket, parts)
        if not is_in:
            self._look_why()
            return note_refused(self._counters)
        self._failures, self.refusal, self._was_let_in, self._is_by_zmq = 0, "", True, True
        return note_sent(self._counters, size, packed)

    def _connect(self) -> None:
        # What came by the connection before, whose end ZeroMQ lets us read, is of before we gave the server up.
        self._came, self._is_amid = [], False
        self._lost.clear()
        with contextlib.suppress(zmq.Again):
            while True:
                self._socket.recv(zmq.NOBLOCK)
        self._connect_to(nearest(self._given))

    def _connect_to(self, address: str) -> None:
        self._is_touched = True
        self._is_by_zmq = self._is_turned_away = False
        if not address.startswith(IPC):  # after a handshake that failed we begin the next, not ZeroMQ
            self._socket.setsockopt(zmq.RECONNECT_STOP, zmq.RECONNECT_STOP_HANDSHAKE_FAILED)
        self._identity = new_route(self._own)
        self._socket.setsockopt(zmq.ROUTING_ID, self._identity)
        principal = principal_of_server(self._server)
        self._connected_to, self._server_key = connect_socket(self._socket, address, self._guard, principal)
        self._own_key = "" if self._guard is None else self._guard.keyring.own.public
        self._connect_at_ms, self._began_at_ms, self._why_not = None, self._clock.now_ms(), ""

    def _connect_later(self, after_ms: float) -> None:
        self._disconnect()
        self._connect_at_ms = self._clock.now_ms() + after_ms

    def _disconnect(self) -> None:
        self._is_stale = False
        if self._stream is not None:
            self._streams.end(self._stream)
            self._stream = None
        if self._connected_to:
            with contextlib.suppress(zmq.ZMQError):  # ENOENT: it broke at this very moment
                self._socket.disconnect(self._connected_to)
        self._connected_to = ""

    def _look_why(self) -> None:
        """There is no connection; find out whether a handshake failed."""
        self._look()
        for event in self._connections.failed():
            if self._connected_to.startswith(IPC):
                continue
            self._failures += 1
            after_ms = float(HANDSHAKE_MS)
            match event:
                case zmq.Event.HANDSHAKE_FAILED_AUTH:
                    if self._guard is None or self._guard.keyring.own.public == self._own_key:
                        self.refusal = f"{self._connected_to} does not let our key in"
                    else:  # ours was replaced since we connected, and ZeroMQ keeps to the former one
                        after_ms = RECONNECT_AFTER_MS
                case zmq.Event.HANDSHAKE_FAILED_PROTOCOL if self._failures >= _FAILURES_TOLD:
                    has = "asks for a key" if self._guard is None else "has no key"
                    self.refusal = f"{self._connected_to} {has}"
                case _ if self._guard is None and self._failures >= _FAILURES_TOLD and not self._was_let_in:
                    # Who asks for a key mostly hangs up before he says so. One that let us in is more likely gone, behind a proxy.
                    self.refusal = (
                        f"{self._connected_to} ends each connection at once: probably it asks for a key, or it is the port of"
                        " something else (a gateway, a page of metrics): `tenuto status` lists where clients connect"
                    )
                case _:  # it has another key than we thought, or the line broke
                    after_ms = RECONNECT_AFTER_MS
            self._connect_later(after_ms)

    def _note_streams_ended(self) -> None:
        for stream in self._streams.ended:
            if stream is self._stream:
                self._stream = None
                self._is_stale, self._is_turned_away = stream.has_heard, not stream.has_heard
                self._lost[self._server] = None
        self._streams.ended.clear()

    def _keys_changed(self, guard: LinkAccess) -> None:
        if self._server_key and not guard.trusts(self._server_key, principal_of_server(self._server)):
            if self._is_by_zmq:  # which does not tell of the end that we make
                self._lost[self._server] = None
                self._is_by_zmq = False
            self._connect_later(RECONNECT_AFTER_MS)

    def _sender(self, whole: Whole) -> tuple[PeerId, Speaker | None]:
        del whole
        return self._server, None
