"""What all links over ZeroMQ share: bounds, socket options, and how a message is sent and taken whole."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import re
import select
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar, Final, NamedTuple, Self

import zmq

from fabric import frames
from fabric.clock import Clock, MonotonicClock
from fabric.codec import BULKY_HEADER_BYTES_MAX, LONG_HEADER_BYTES_MAX, Buffer
from fabric.curve import LinkAccess, Speaker, check_listening, keyless
from fabric.errors import ConfigError, PeerLost, RemoteProtocolError
from fabric.ids import Epoch, PeerId
from fabric.ipc import IPC, IpcPath
from fabric.link import NO_EPOCH, NamedTensor, Packed, Received
from fabric.messages import AnyMessage, SharedAt
from fabric.shared_memory import Borrowed, Region
from fabric.sockets.monitor import ConnectionMonitor
from fabric.transit_time import TransitMeter

COPY_BELOW_BYTES: Final = (
    frames.SMALL_BELOW_BYTES
)  # below it a copy is cheaper than the book-keeping of a view
RECEIVED_MAX: Final = 64
"""Messages that ZeroMQ reads ahead of us, from each peer: what is over that waits at its sender."""
TURN_HEADER_BYTES: Final = 32 << 10
"""One `receive` decodes no more than so many bytes of headers and one header: what it takes grows with them."""
FLUSH_MS: Final = 100
KEEPALIVE_S: Final = 2
HANDSHAKE_MS: Final = (
    3_000  # a connection that has not said who it is for so long ends; so long waits whoever was refused
)
UNACKNOWLEDGED_MS: Final = 5_000  # bytes that nobody acknowledges for so long end the connection
NOBODY: Final = PeerId("")  # who sent what comes out of a PULL

# As plain integers: arithmetic with enums costs more than some of the calls it is for.
_EVENTS: Final = int(zmq.EVENTS)
_READABLE: Final = int(zmq.POLLIN)
_NOBLOCK: Final = int(zmq.NOBLOCK)
MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_IPC_PEER: Final = re.compile(
    rf"[^:]*:{os.geteuid()}:\d+:\d+"
)  # its user, group and process, as the kernel says
_SOCKETS_MAX: Final = 8_192  # a frontend has one push socket for every slice it feeds


@dataclass(slots=True, frozen=True)
class LinkOptions:
    """Bounds of one link. A queue of messages is per peer and direction; the others are per message.

    `header_bytes_max`: of those that come in, as the link's purpose needs. `payload_bytes_max` 0: no tensors.
    `is_sharing`: tensors may come through memory that processes of this host share, from peers connected by ipc.
    `queue_bytes_max`: of a router, waiting for one peer, in messages of 64 kB and more; one message is always
    allowed into an empty queue, however large.
    """

    clock: Clock = field(default_factory=MonotonicClock)
    queue_messages_max: int = 1_000
    header_bytes_max: int = LONG_HEADER_BYTES_MAX
    payload_bytes_max: int = frames.PAYLOAD_BYTES_MAX
    is_sharing: bool = False
    queue_bytes_max: int = 256 << 20

    @property
    def frame_bytes_max(self) -> int:
        """Of a single frame; who sends a larger one loses the connection."""
        return max(self.payload_bytes_max, self.header_bytes_max)

    @property
    def frames_max(self) -> int:
        """Of a message without its route: more are not kept."""
        return frames.FRAMES_MAX if self.payload_bytes_max else 1


CONTROL: Final = LinkOptions(header_bytes_max=BULKY_HEADER_BYTES_MAX, payload_bytes_max=0)
"""What roles say to one another: no tensors, but lists of a whole cluster."""


@cache
def context() -> zmq.Context[zmq.Socket[bytes]]:
    """The process's ZeroMQ context, made at first use, ended at exit with nothing left to linger."""
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made.set(zmq.MAX_SOCKETS, _SOCKETS_MAX)
    atexit.register(made.destroy, linger=0)
    return made


class SocketLink(ABC):
    """What all links over one socket share."""

    kind: ClassVar[int]
    routes: ClassVar[int] = 0  # frames before the header
    default: ClassVar[LinkOptions] = CONTROL

    def __init__(self, options: LinkOptions | None = None, guard: LinkAccess | None = None) -> None:
        self.epoch = NO_EPOCH
        self.transit = TransitMeter()
        self._options = options or self.default
        self._clock = self._options.clock
        self._guard = guard
        self._counters = new_counters()
        self._claims: list[IpcPath] = []
        self._addresses: list[str] = []
        self._came: list[Received] = []  # of what travelled together, and was more than was asked for
        self._socket = open_socket(self.kind, self._options)
        self._monitor: ConnectionMonitor | None = None
        self._epoll: select.epoll | None = None
        self._lender = _ByIpc() if self._options.is_sharing else None
        self._frames_max = self.routes + self._options.frames_max
        self._is_amid = False  # in a message that has more frames than were taken of it
        # Asking ZeroMQ whether there is more is the dearest thing in a quiet turn of a loop, and its answer can only
        # have changed after something was done with the socket, or when the descriptor says so.
        self._is_touched = True

    @property
    def addresses(self) -> Sequence[str]:
        """Where others reach this link, ipc first."""
        return self._addresses

    @property
    def counters(self) -> Mapping[str, float]:
        """See `new_counters`."""
        if self._guard is not None:
            self._counters["keys_refused"] = float(self._guard.refused)
        if self._lender is not None:
            self._counters["shared_bytes_in"] = float(self._lender.lent_bytes)
        return self._counters

    @property
    def has_more(self) -> bool:
        """Whether a message is waiting of which the descriptor may not tell, because the socket was used since."""
        if self._came:
            return True
        if not self._is_touched or self._socket.closed:
            return False
        self._is_touched = bool(int(self._socket.getsockopt(_EVENTS)) & _READABLE)
        return self._is_touched

    def fileno(self) -> int:
        """ZeroMQ's edge-triggered descriptor, or one that also tells of ended connections; -1 once closed."""
        if self._socket.closed:
            return -1
        return int(self._socket.getsockopt(zmq.FD)) if self._epoll is None else self._epoll.fileno()

    def take_lost(self) -> Sequence[PeerId]:
        """Nobody: only links with a monitor hear of ended connections."""
        return ()

    def _watch_connections(self, events: int = zmq.EVENT_DISCONNECTED) -> ConnectionMonitor:
        """From now on the descriptor tells of ended connections too. Raises PeerLost where no descriptor is left."""
        try:
            self._monitor = ConnectionMonitor(self._socket, context(), events)
            self._epoll = select.epoll()
            for descriptor in (int(self._socket.getsockopt(zmq.FD)), self._monitor.fileno()):
                self._epoll.register(descriptor, select.EPOLLIN)
        except (OSError, zmq.ZMQError) as error:
            self.close()
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            raise PeerLost(f"no socket can be opened: {error.strerror}") from error
        return self._monitor

    def receive(self, limit: int) -> Sequence[Received]:
        """At most `limit` messages. What is not heard counts against the limit, so that a flood of it cannot hold us."""
        came, self._came = self._came, []
        if self._guard is not None:
            self._follow_keys()
        counters, routes = self._counters, self.routes
        taken = headers_size = 0
        while len(came) + taken < limit and headers_size < TURN_HEADER_BYTES and not self._socket.closed:
            self._is_touched = True
            if self._is_amid and not self._pass_over():
                break
            try:
                whole = self._take_whole()
            except zmq.Again:
                break
            if len(whole.parts) > routes:
                headers_size += len(whole.parts[routes])
            counters["bytes_in"] += frames.size_of(whole.parts[routes:])
            try:
                came += self._open_up(whole)
            except RemoteProtocolError as error:
                counters["outdated_in" if isinstance(error, Outdated) else "garbage_in"] += 1
                taken += 1
            # Mostly one message is waiting, and asking costs half of being told that there is no other.
            if len(came) + taken == 1 and not self.has_more:
                break
        if len(came) > limit:
            came, self._came = came[:limit], came[limit:]
        if came:
            counters["messages_in"] += len(came)
        return came

    def close(self) -> None:
        """Flush for at most 100 ms in the background, give the addresses back."""
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
        if self._epoll is not None:
            self._epoll.close()
            self._epoll = None
        self._socket.close(linger=FLUSH_MS)
        for claim in self._claims:
            claim.release()
        if self._guard is not None:
            self._guard.close()

    def send(self, peer: PeerId, message: AnyMessage, tensors: Sequence[NamedTensor] = ()) -> bool:
        """Queue a message for `peer`; False as `send_packed`. Raises LocalProtocolError for what cannot be sent."""
        packed = frames.pack(message, tensors, payload_bytes_max=self._options.payload_bytes_max)
        return self.send_packed(peer, (packed,))

    @abstractmethod
    def send_packed(self, peer: PeerId, packed: Sequence[Packed]) -> bool:
        """Queue messages that travel as one; False: none of them is queued."""

    def _take_whole(self) -> Whole:
        """All frames of one message; of one with too many only as many as it takes to tell. Raises zmq.Again."""
        frame = self._socket.recv(_NOBLOCK, copy=False)
        parts = [_content(frame)]
        while frame.more:
            if len(parts) > self._frames_max:
                self._is_amid = True
                break
            frame = self._socket.recv(_NOBLOCK, copy=False)
            parts.append(_content(frame))
        return Whole(parts, frame)

    def _pass_over(self) -> bool:
        """Take what is left of a message that is too long; False: there is more of it than one turn may take."""
        for _ in range(frames.FRAMES_MAX):
            if not self._socket.recv(_NOBLOCK, copy=False).more:
                self._is_amid = False
                return True
        return False

    def _open_up(self, whole: Whole) -> list[Received]:
        if len(whole.parts) > self._frames_max:
            raise RemoteProtocolError(f"a message of more than {self._frames_max} frames")
        peer, speaker = self._sender(whole)
        lender = self._lender
        if lender is not None:
            lender.frame = whole.last
        envelope, named = frames.split(
            whole.parts[self.routes :],
            header_bytes_max=self._options.header_bytes_max,
            payload_bytes_max=self._options.payload_bytes_max,
            borrowed=lender,
        )
        if lender is not None:
            lender.frame = _NO_FRAME  # it may be large
        if self._guard is not None and speaker is not None:
            for parcel in envelope.parcels:
                self._guard.check_owner(speaker.principal, parcel.body)
        late_ms = 0.0
        if peer:  # senders to a PULL share one queue but not one clock; no budget comes that way
            late_ms = self.transit.late_ms(peer, envelope.sent_at_ms, self._clock.now_ms())
        epoch: Epoch = envelope.epoch  # type: ignore[assignment]  # a call of `Epoch` for every message costs as much as the rest
        return [
            Received(peer, parcel.body, tensors, late_ms, epoch)
            for parcel, tensors in zip(envelope.parcels, named, strict=True)
        ]

    @abstractmethod
    def _sender(self, whole: Whole) -> tuple[PeerId, Speaker | None]:
        """Who sent it, and by whose key, where it came by one.

        Raises RemoteProtocolError for who may not, Outdated for who has said something newer.
        """

    def _follow_keys(self) -> None:
        if self._guard is not None and not self._socket.closed and self._guard.has_changed():
            self._keys_changed(self._guard)

    @abstractmethod
    def _keys_changed(self, guard: LinkAccess) -> None:
        """Whom we trust has changed: end the connections of those whom we trust no more."""

    def _join(self, packed: Sequence[Packed]) -> list[Buffer]:
        return frames.join(packed, epoch=self.epoch, sent_at_ms=self._clock.now_ms())


class ListeningLink(SocketLink):
    """A link that others connect to."""

    @classmethod
    def bind(
        cls, addresses: Sequence[str], options: LinkOptions | None = None, guard: LinkAccess | None = None
    ) -> Self:
        """Listen at all of `addresses`; port 0 takes a free one. Raises ConfigError naming the one it cannot.

        `guard`: connections by TCP need a key that it allows.
        """
        link = cls(options, guard)
        link._bind(addresses)
        return link

    def _bind(self, addresses: Sequence[str]) -> None:
        """Raises ConfigError naming the address that cannot be bound; nothing stays bound then."""
        guard, is_guarded = self._guard, False
        try:
            with contextlib.suppress(zmq.ZMQError):  # a system that does not say whose a connection is
                self._socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
            for address in sorted(addresses, key=lambda one: not one.startswith(IPC)):
                if address.startswith(IPC):
                    claim = IpcPath(address)
                    claim.claim()
                    self._claims.append(claim)
                elif address.startswith("tcp://"):
                    check_listening(address, guard)
                    if guard is not None and not is_guarded:
                        guard.listen(self._socket)  # holds for what is bound from here on
                        is_guarded = True
                with naming(address, "bind"), private_files():
                    self._socket.bind(address)
                bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
                self._addresses.append(guard.announced(bound) if guard and is_guarded else bound)
        except ConfigError:
            self.close()
            raise

    def _sender(self, whole: Whole) -> tuple[PeerId, Speaker | None]:
        return NOBODY, None if self._guard is None else self._guard.check(whole.last, NOBODY)

    def _keys_changed(self, guard: LinkAccess) -> None:
        guard.hang_up_on_revoked()


class Outdated(RemoteProtocolError):
    """Its sender gave up the connection that it came by, and has spoken on a newer one."""


class Whole(NamedTuple):
    """A message as it came."""

    parts: list[Buffer]
    last: zmq.Frame  # knows by which connection it came


_NO_FRAME: Final = zmq.Frame()


class _ByIpc:
    """Lends what is in shared memory to peers that are connected by ipc: only they can be of our host and user.

    `frame`: of the message that is looked at.
    """

    def __init__(self) -> None:
        self.frame = _NO_FRAME
        self.lent_bytes = 0
        self._borrowed = Borrowed()

    def place(self, at: SharedAt, size: int) -> Region:
        """Raises RemoteProtocolError for another peer, and for bytes that are not there."""
        try:
            shown = str(self.frame.get("Peer-Address"))
        except zmq.ZMQError:  # it had gone before its connection was looked at
            shown = "an address unknown"
        if not _IPC_PEER.fullmatch(shown):
            raise RemoteProtocolError(f"a peer at {shown} cannot share memory with us")
        region = self._borrowed.place(at, size)
        self.lent_bytes += len(region.data)
        return region


@dataclass(slots=True)
class InFlight:
    """Bytes of which ZeroMQ is not done with, by the trackers of their messages' last frames."""

    messages: deque[tuple[zmq.MessageTracker, int]] = field(default_factory=deque)
    size: int = 0

    def has_room(self, size: int, bytes_max: int) -> bool:
        """Whether so many bytes fit beside those that are still there; into an empty queue they always do."""
        while self.messages and self.messages[0][0].done:
            self.size -= self.messages.popleft()[1]
        return not self.messages or self.size + size <= bytes_max

    def add(self, tracker: zmq.MessageTracker | None, size: int) -> None:
        """What was sent; without a tracker it was copied."""
        if tracker is not None:
            self.messages.append((tracker, size))
            self.size += size


def new_counters() -> dict[str, float]:
    """The counters every link has. Bytes are headers and tensors, without ZeroMQ's own framing.

    Shared ones lay in shared memory and are counted apart.
    """
    names = (
        "messages_in",
        "messages_out",
        "bytes_in",
        "bytes_out",
        "shared_bytes_in",
        "shared_bytes_out",
        "garbage_in",
        "outdated_in",
        "keys_refused",
        "full_out",
        "unroutable_out",
    )
    return dict.fromkeys(names, 0.0)


def open_socket(kind: int, options: LinkOptions) -> zmq.Socket[bytes]:
    """Raises PeerLost where there is no descriptor left for it."""
    try:
        opened = context().socket(kind)
    except zmq.ZMQError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise PeerLost(f"no socket can be opened: {error.strerror}") from error
    opened.setsockopt(zmq.LINGER, 0)
    opened.setsockopt(zmq.SNDHWM, options.queue_messages_max)
    opened.setsockopt(zmq.RCVHWM, min(options.queue_messages_max, RECEIVED_MAX))
    opened.setsockopt(zmq.MAXMSGSIZE, options.frame_bytes_max)
    # A host that vanished without a FIN is found by the kernel. ZeroMQ's own heartbeats stay off: libzmq 4.3.5
    # aborts the process ("!_io_error", stream_engine_base.cpp) when a peer leaves while our receive queue is full.
    opened.setsockopt(zmq.TCP_KEEPALIVE, 1)
    opened.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
    opened.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)
    opened.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    opened.setsockopt(zmq.TCP_MAXRT, UNACKNOWLEDGED_MS)
    opened.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    # A role that was killed is back within a second, and its peers should not be the ones who wait then.
    opened.setsockopt(zmq.RECONNECT_IVL, 20)
    opened.setsockopt(zmq.RECONNECT_IVL_MAX, 100)
    return opened


def _content(frame: zmq.Frame) -> Buffer:
    return frame.bytes if len(frame) < COPY_BELOW_BYTES else frame.buffer


def send_parts(
    socket: zmq.Socket[bytes], parts: Sequence[Buffer], *, is_tracked: bool = False
) -> tuple[bool, zmq.MessageTracker | None]:
    """Queue a whole message or nothing of it. The tracker is done when ZeroMQ is done with the last frame."""
    last = len(parts) - 1
    if not last and not is_tracked and len(parts[0]) < COPY_BELOW_BYTES:  # nearly all there is
        try:
            socket.send(parts[0], _NOBLOCK)
        except zmq.Again:
            return False, None
        return True, None
    is_in = True
    tracker: zmq.MessageTracker | None = None
    for place, part in enumerate(parts):
        flags = MORE if place < last else _NOBLOCK
        try:
            if is_tracked and place == last:
                frame = zmq.Frame(part, track=True, copy=False, copy_threshold=0)
                tracker = socket.send(frame, flags, copy=False, track=True)
            else:
                socket.send(part, flags, copy=len(part) < COPY_BELOW_BYTES)
        except zmq.Again:
            if place == 0:
                return False, None
            is_in = (
                False  # the connection broke in between: ZeroMQ swallows the rest, but wants to see its end
            )
    return is_in, tracker


def note_sent(counters: dict[str, float], size: int, packed: Sequence[Packed]) -> bool:
    """Count what went out, in `size` bytes; True."""
    counters["messages_out"] += len(packed)
    counters["bytes_out"] += size
    for one in packed:
        if one.shared_size:
            counters["shared_bytes_out"] += one.shared_size
    return True


def note_refused(counters: dict[str, float]) -> bool:
    """Count a message that a full queue or a missing connection refused; False."""
    counters["full_out"] += 1
    return False


def connect_socket(
    socket: zmq.Socket[bytes], address: str, guard: LinkAccess | None, principal: str
) -> tuple[str, str]:
    """Connect, by TCP with a key where there is a guard; the address without that of `principal`, who is there, and that key.

    The key is empty where none is needed. Raises ConfigError naming an address that cannot be one, or whose key is missing or
    not trusted.
    """
    key = ""
    if guard is None:
        address = keyless(address)
    elif not address.startswith(IPC):
        address, key = guard.connect_to(socket, address, principal)
    with naming(address, "connect to"):
        socket.connect(address)
    return address, key


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """What is made meanwhile, sockets too, is for this user alone. Roles have that mask anyway."""
    former = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(former)


@contextlib.contextmanager
def naming(address: str, doing: str) -> Iterator[None]:
    """Turn ZeroMQ's error about an address into one that names it."""
    try:
        yield
    except zmq.ZMQError as error:
        reason = "it is in use" if error.errno == zmq.EADDRINUSE else str(error).lower()
        raise ConfigError(f"cannot {doing} {address}: {reason}") from error
