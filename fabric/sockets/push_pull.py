"""Payload: a receiver's PULL, and a sender's PUSH sockets to many of them.

A push socket cannot have ZMQ_IMMEDIATE: its first message is sent in the moment it is opened, before any connection
can exist, and would be refused every time. Instead its queue is small in messages and in bytes (ZeroMQ only counts
messages, so the bytes are ours to count, by trackers that tell when ZeroMQ is done with a message's last frame), and
`drop` gives it 100 ms to leave once a worker is known to be lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import zmq
from msgspec import Struct
from msgspec.structs import replace

from fabric import frames
from fabric.arena_sharing import ArenaSharing
from fabric.curve import LinkAccess, principal_of_receiver
from fabric.errors import ConfigError, PeerLost, RemoteProtocolError
from fabric.ids import Incarnation, PeerId
from fabric.ipc import IPC, check_not_foreign, nearest, stream_path_of
from fabric.link import NO_EPOCH, NamedTensor, Packed, Received
from fabric.messages import AnyMessage
from fabric.shared_memory import is_shared_with, memory_address
from fabric.sockets.base import (
    COPY_BELOW_BYTES,
    InFlight,
    ListeningLink,
    connect_socket,
    naming_descriptors,
    new_counters,
    note_refused,
    note_sent,
    open_socket,
    send_parts,
)
from fabric.sockets.local_stream import LocalStream
from fabric.sockets.local_streams import FLUSH_MS, LocalStreams
from fabric.sockets.options import LinkOptions


class PushOptions(Struct, frozen=True):
    """Bounds of each push socket; one message is always allowed into an empty one, however large.

    `shared_bytes_max`: of tensors that lie in shared memory for receivers of this host, 0 for none. They must be
    kept (as NamedTensors) until the receiver has answered.
    """

    link: LinkOptions = LinkOptions(queue_messages_max=64)
    queue_bytes_max: int = 256 << 20
    shared_bytes_max: int = 0
    idle_close_ms: float = 60_000.0


class PullLink(ListeningLink):
    """Takes payload from anybody; the messages themselves say whose they are."""

    kind = zmq.PULL
    default = LinkOptions(queue_messages_max=64)

    @property
    def addresses(self) -> Sequence[str]:
        """Where others reach this link: ipc first, shared memory last."""
        memory = memory_address() if self._options.is_sharing else ""
        return [*self._addresses, memory] if memory else self._addresses

    def send_packed(self, peer: PeerId, packed: Sequence[Packed]) -> bool:
        """Nothing leaves by this link."""
        del peer, packed
        return False


@dataclass(slots=True)
class _Target:
    incarnation: Incarnation
    addresses: tuple[str, ...]
    is_known_here: bool  # its memory could be shared, by its addresses
    is_sharing: bool = False
    key: str = ""  # by which we know who is there
    socket: zmq.Socket[bytes] | None = None
    stream: LocalStream | None = None
    is_turned_away: bool = (
        False  # from local streams: one has ended, so this incarnation is gone, or takes no more of them
    )
    used_at_ms: float = 0.0
    in_flight: InFlight = field(default_factory=InFlight)

    def close(self, streams: LocalStreams, linger_ms: int) -> None:
        if self.stream is not None:
            streams.end(self.stream, is_flushed=linger_ms > 0)
        if self.socket is not None:
            self.socket.close(linger=linger_ms)
        self.socket = self.stream = None
        self.in_flight = InFlight()


class PushPool:
    """Push sockets by the name of the slice or frontend they feed: opened at the first send, closed when idle.

    Arrays given to `send` must not change until they are sent: frames of 64 kB and more are not copied, but where
    they are part of something much larger, and for a receiver with which we share memory: that copy is the only one, and a tensor that
    lies there already is not sent at all.
    """

    def __init__(self, options: PushOptions | None = None, guard: LinkAccess | None = None) -> None:
        self.epoch = NO_EPOCH
        self._options = options or PushOptions()
        self._guard = guard
        self._clock = self._options.link.clock
        self._sharing = ArenaSharing(self._options.shared_bytes_max, frames.SMALL_BELOW_BYTES, self._clock)
        self._counters = new_counters()
        self._targets: dict[PeerId, _Target] = {}
        with naming_descriptors():
            self._streams = LocalStreams(
                replace(self._options.link, queue_bytes_max=self._options.queue_bytes_max)
            )
        self._swept_at_ms = 0.0

    def know(self, peer: PeerId, incarnation: Incarnation, addresses: Sequence[str]) -> None:
        """Take an entry of the directory. A new incarnation or place closes the socket to the old one."""
        target = self._targets.get(peer)
        if target is not None and (target.incarnation, target.addresses) == (incarnation, tuple(addresses)):
            return
        if target is not None:
            target.close(self._streams, linger_ms=0)  # who has its address now is another one
        is_known_here = self._options.shared_bytes_max > 0 and any(map(is_shared_with, addresses))
        self._targets[peer] = _Target(incarnation, tuple(addresses), is_known_here)

    def send(self, peer: PeerId, message: AnyMessage, tensors: Sequence[NamedTensor] = ()) -> bool:
        """False: nobody of that name is known or can be connected to, or the queue is full (messages or bytes).

        Raises LocalProtocolError for what cannot be sent.
        """
        target = self._targets.get(peer)
        if target is None:
            return self._unroutable()
        if self._guard is not None and self._guard.has_changed():
            self._close_revoked(self._guard)
        now_ms = self._clock.now_ms()
        if now_ms - self._swept_at_ms > 1_000.0:
            self.close_idle(now_ms)
        try:
            self._open(peer, target)
        except (ConfigError, PeerLost):
            # The directory holds what somebody said of himself; or there is no descriptor left, for the moment.
            return self._unroutable()
        if target.is_sharing:
            self._sharing.share(tensors)
        packed = frames.pack(
            message,
            tensors,
            payload_bytes_max=self._options.link.payload_bytes_max,
            is_sharing=target.is_sharing,
        )
        parts = frames.join((packed,), epoch=self.epoch, sent_at_ms=now_ms)
        size = frames.size_of(parts)
        target.used_at_ms = now_ms
        if target.stream is not None:
            is_in = target.stream.send(parts, size)
            return note_sent(self._counters, size, (packed,)) if is_in else note_refused(self._counters)
        assert target.socket is not None, "one of them is open"
        if not target.in_flight.has_room(size, self._options.queue_bytes_max):
            return note_refused(self._counters)
        parts = frames.kept_apart(parts)
        is_in, tracker = send_parts(target.socket, parts, is_tracked=size >= COPY_BELOW_BYTES)
        if not is_in:
            return note_refused(self._counters)
        target.in_flight.add(tracker, size)
        return note_sent(self._counters, size, (packed,))

    def drop(self, peer: PeerId) -> None:
        """Forget a peer that is lost or gone, and flush for at most 100 ms in the background.

        Who is lost for others may wait for what was sent all the same.
        """
        target = self._targets.pop(peer, None)
        if target is not None:
            target.close(self._streams, linger_ms=FLUSH_MS)

    def close_idle(self, now_ms: float) -> None:
        """Close sockets unused for 60 s; the next send opens one again. `send` sees to it once a second."""
        self._swept_at_ms = now_ms
        for target in self._targets.values():
            if now_ms - target.used_at_ms > self._options.idle_close_ms:
                target.close(self._streams, linger_ms=0)

    def receive(self, limit: int) -> Sequence[Received]:
        """Nothing comes in by this link; what waits for room in a local stream goes on, and streams that have ended are closed."""
        del limit
        if self._streams.fileno() >= 0:
            self._streams.look()
            with contextlib.suppress(RemoteProtocolError):
                while self._streams.take() is not None:  # who takes payload says nothing
                    pass
            if self._streams.ended:
                self._close_ended()
        return ()

    def take_lost(self) -> Sequence[PeerId]:
        """A push socket cannot tell; the directory does."""
        return ()

    @property
    def has_more(self) -> bool:
        """Whether a stream has ended that is not closed yet."""
        return self._streams.has_more

    @property
    def addresses(self) -> Sequence[str]:
        """Nobody connects to this link."""
        return ()

    @property
    def counters(self) -> Mapping[str, float]:
        """See `new_counters`, and `sockets_open`."""
        is_open = sum(target.socket is not None for target in self._targets.values())
        streams = float(len(self._streams))
        return {**self._counters, "sockets_open": float(is_open), "local_streams": streams}

    def fileno(self) -> int:
        """Readable when a local stream has room for what waits, or has ended; -1 once closed."""
        return self._streams.fileno()

    def close(self) -> None:
        """Flush for at most 100 ms in the background."""
        for target in self._targets.values():
            target.close(self._streams, linger_ms=FLUSH_MS)
        self._targets.clear()
        self._streams.close()
        self._sharing.close()

    def _unroutable(self) -> bool:
        self._counters["unroutable_out"] += 1
        return False

    def _close_revoked(self, guard: LinkAccess) -> None:
        for peer, target in self._targets.items():
            if target.key and not guard.trusts(target.key, principal_of_receiver(peer)):
                target.close(self._streams, linger_ms=0)

    def _close_ended(self) -> None:
        for target in self._targets.values():
            if target.stream in self._streams.ended:
                target.stream, target.is_turned_away = None, True
        self._streams.ended.clear()

    def _open(self, peer: PeerId, target: _Target) -> None:
        """A way to it, if there is none yet. Raises ConfigError and PeerLost as sockets do."""
        if target.socket is not None or target.stream is not None:
            return
        address = nearest(target.addresses)
        is_by_ipc = address.startswith(IPC)
        if is_by_ipc:
            check_not_foreign(address)
        target.is_sharing = target.is_known_here and is_by_ipc
        if is_by_ipc and not target.is_turned_away:
            target.stream = self._streams.connect(stream_path_of(address), b"")
            if target.stream is not None:
                return
        opened = open_socket(zmq.PUSH, self._options.link)
        try:
            _, target.key = connect_socket(opened, address, self._guard, principal_of_receiver(peer))
        except ConfigError:
            opened.close()
            raise
        target.socket = opened
