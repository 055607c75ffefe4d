"""What all links over ZeroMQ share: bounds, socket options, and how a message is sent and taken whole."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar, Final, NamedTuple, Self

import zmq

from fabric import frames
from fabric.addresses import check_address
from fabric.clock import Clock
from fabric.codec import Buffer
from fabric.curve import KEYLESS, LinkAccess, Speaker, check_listening, keyless
from fabric.errors import ConfigError, PeerLost, RemoteProtocolError
from fabric.ids import Epoch, PeerId
from fabric.ipc import IPC, IpcPath, check_not_foreign, private_files
from fabric.link import NO_EPOCH, NamedTensor, Packed, Received
from fabric.messages import AnyMessage, SharedAt
from fabric.shared_memory import Borrowed, Region
from fabric.sockets.local_stream import LocalStream
from fabric.sockets.local_streams import FLUSH_MS, LocalStreams
from fabric.sockets.monitor import ConnectionMonitor
from fabric.sockets.options import CONTROL, LinkOptions
from fabric.sockets.unfinished import UnfinishedMessages
from fabric.transit_time import TransitMeter

COPY_BELOW_BYTES: Final = (
    frames.SMALL_BELOW_BYTES
)  # below it a copy is cheaper than the book-keeping of a view
RECEIVED_MAX: Final = 64
"""Messages that ZeroMQ reads ahead of us, from each peer: what is over that waits at its sender."""
TURN_HEADER_BYTES: Final = 32 << 10
"""One `receive` decodes no more than so many bytes of headers and one header: what it takes grows with them."""
KEEPALIVE_S: Final = 2
HANDSHAKE_MS: Final = (
    3_000  # a connection that has not said who it is for so long ends; so long waits whoever was refused
)
UNACKNOWLEDGED_MS: Final = 5_000  # bytes that nobody acknowledges for so long end the connection
NOBODY: Final = PeerId("")  # who sent what comes out of a PULL
NO_DESCRIPTOR: Final = -1  # of what came by a local stream

# As plain integers: arithmetic with enums costs more than some of the calls it is for.
_EVENTS: Final = int(zmq.EVENTS)
_READABLE: Final = int(zmq.POLLIN)
_NOBLOCK: Final = int(zmq.NOBLOCK)
MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_IPC_PEER: Final = re.compile(
    rf"[^:]*:{os.geteuid()}:\d+:\d+"
)  # its user, group and process, as the kernel says
_GONE_EVERY_MS: Final = 1_000.0
_FIRST_SOCKET_DESCRIPTORS: Final = (
    16  # libzmq's threads take some ten; libzmq 4.3.5 aborts the process without
)
_SOCKETS_MAX: Final = 8_192  # a frontend has one push socket for every slice it feeds


@cache
def context() -> zmq.Context[zmq.Socket[bytes]]:
    """The process's ZeroMQ context, made at first use, ended at exit with nothing left to linger.

    A process that is forked has none of the threads of its parent's, so it makes its own. Raises PeerLost where there
    are too few descriptors left for what comes with its first socket.
    """
    with naming_descriptors():
        _check_descriptors(_FIRST_SOCKET_DESCRIPTORS)
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made.set(zmq.MAX_SOCKETS, _SOCKETS_MAX)
    atexit.register(made.destroy, linger=0)
    return made


def _check_descriptors(count: int) -> None:
    """Raises OSError where fewer can be opened."""
    taken: list[int] = []
    try:
        while len(taken) < count:
            taken.append(os.eventfd(0))
    finally:
        for descriptor in taken:
            os.close(descriptor)


os.register_at_fork(after_in_child=context.cache_clear)


class SocketLink(ABC):
    """What all links over one socket share: that socket of ZeroMQ's, and the local streams beside it."""

    kind: ClassVar[int]
    is_routing: ClassVar[bool] = False
    """Whether ZeroMQ puts a route before the header."""
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
        self._lost: dict[PeerId, None] = {}  # whose connections have ended, until somebody asks
        self._has_looked = False  # just now, so that the next `receive` need not
        with naming_descriptors():
            self._streams = LocalStreams(self._options)
        self._monitor: ConnectionMonitor | None = None
        self._unfinished: UnfinishedMessages | None = None  # where others connect by TCP
        try:
            self._socket = open_socket(self.kind, self._options)
        except PeerLost:
            self._streams.close()
            raise
        self._lender = _ByIpc(self._clock) if self._options.is_sharing else None
        self._frames_max = self.is_routing + self._options.frames_max
        self._is_amid = False  # in a message that has more frames than were taken of it
        # Asking ZeroMQ whether there is more is the dearest thing in a quiet turn of a loop, and its answer can only
        # have changed after something was done with the socket, or when the descriptor says so.
        self._is_touched = True
        self._is_zmqs_turn = False
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._streams.watch(self._descriptor)

    @property
    def addresses(self) -> Sequence[str]:
        """Where others reach this link, ipc first."""
        return self._addresses

    @property
    def counters(self) -> Mapping[str, float]:
        """See `new_counters`."""
        if self._guard is not None:
            self._note_ended()  # which hears of who came without a key
            self._counters["keys_refused"] = float(self._guard.refused)
            self._counters["keys_not_taken_over"] = float(self._guard.keyring.failures)
        if self._lender is not None:
            self._counters["shared_bytes_in"] = float(self._lender.lent_bytes)
        self._counters["local_streams"] = float(len(self._streams))
        return self._counters

    @property
    def has_more(self) -> bool:
        """Whether somebody is lost, or a message is waiting of which the descriptor may not tell."""
        if self._came or self._lost or self._streams.has_more:
            return True
        if self._is_touched and self._is_zmq_waiting():
            return True
        return self._unfinished is not None and self._unfinished.is_due

    def fileno(self) -> int:
        """A descriptor that tells of messages by ZeroMQ and by local streams, and of ended connections; -1 once closed."""
        return self._streams.fileno()

    def take_lost(self) -> Sequence[PeerId]:
        """Peers whose connection was closed, or that a send found gone, since the last call. Payload's links hear of none."""
        self._look()
        self._has_looked = True
        self._note_ended()
        if not self._lost:
            return ()
        unheard = {one.peer for one in self._came}  # what they said before comes first
        lost = tuple(peer for peer in self._lost if peer not in unheard)
        for peer in lost:
            del self._lost[peer]
        return lost

    def _watch_connections(self, events: int) -> ConnectionMonitor:
        """From now on the descriptor tells of ended connections too. Raises PeerLost where no descriptor is left."""
        try:
            with naming_descriptors():
                self._monitor = ConnectionMonitor(self._socket, context(), events)
        except PeerLost:
            self.close()
            raise
        self._streams.watch(self._monitor.descriptor)
        return self._monitor

    def receive(self, limit: int) -> Sequence[Received]:
        """At most `limit` messages. What is not heard counts against the limit, so that a flood of it cannot hold us."""
        came, self._came = self._came, []
        if self._guard is not None:
            self._follow_keys()
        if self._lender is not None:
            self._lender.look()
        if not self._has_looked:
            self._look()
        self._has_looked = False
        counters = self._counters
        taken = headers_size = 0
        while len(came) + taken < limit and headers_size < TURN_HEADER_BYTES:
            try:
                whole = self._take_whole()
                if whole is None:
                    break
                headers_size += len(whole.parts[0]) if whole.parts else 0
                counters["bytes_in"] += frames.size_of(whole.parts)
                came += self._open_up(whole)
            except RemoteProtocolError as error:
                counters["outdated_in" if isinstance(error, Outdated) else "garbage_in"] += 1
                taken += 1
            # Mostly one message is waiting, and asking costs half of being told that there is no other.
            if len(came) + taken == 1 and not self.has_more:
                break
        if self._streams.ended:
            self._note_streams_ended()
        if self._unfinished is not None and self._unfinished.is_due:
            counters["garbage_in"] += self._look_at_unfinished(self._unfinished)
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
        self._streams.close()
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

    def _look(self) -> None:
        """Find out what the descriptor tells of."""
        streams = self._streams
        if streams.fileno() < 0:
            return
        streams.look()
        if streams.told:
            if self._descriptor in streams.told:
                self._is_touched = True
            if self._monitor is not None and self._monitor.descriptor in streams.told:
                self._monitor.is_told = True
            streams.told.clear()
        if streams.ended:
            self._note_streams_ended()

    def _look_at_unfinished(self, unfinished: UnfinishedMessages) -> int:
        is_all_taken = not (self._is_touched and self._is_zmq_waiting())
        if self._monitor is not None:
            self._monitor.is_told = True  # perhaps of a connection by which a message has come already
            self._note_ended()
        return unfinished.look(is_all_taken=is_all_taken)

    def _is_zmq_waiting(self) -> bool:
        if self._socket.closed:
            return False
        self._is_touched = bool(int(self._socket.getsockopt(_EVENTS)) & _READABLE)
        return self._is_touched

    def _take_whole(self) -> Whole | None:
        """All frames of the next message, by ZeroMQ and by local streams in turn; None: there is none.

        Raises RemoteProtocolError for what breaks the bounds: by a stream, which has ended then, or of too many frames.
        """
        self._is_zmqs_turn = not self._is_zmqs_turn
        if self._is_zmqs_turn and (whole := self._take_by_zmq()) is not None:
            return whole
        streamed = self._streams.take()
        if streamed is not None:
            stream, parts = streamed
            return Whole(b"", parts, None, NO_DESCRIPTOR, stream)
        return None if self._is_zmqs_turn else self._take_by_zmq()

    def _take_by_zmq(self) -> Whole | None:
        if not self._is_touched or self._socket.closed or (self._is_amid and not self._pass_over()):
            return None
        try:
            frame = self._socket.recv(_NOBLOCK, copy=False)
        except zmq.Again:
            self._is_touched = False
            return None
        descriptor = _descriptor(frame)
        if self._unfinished is not None and descriptor is not None:
            self._unfinished.ends(descriptor)
        came = [_content(frame)]
        while frame.more:
            if len(came) > self._frames_max:
                self._is_amid = True
                raise RemoteProtocolError(f"a message of more than {self._frames_max} frames")
            frame = self._socket.recv(_NOBLOCK, copy=False)
            came.append(_content(frame))
        if descriptor is None:
            raise RemoteProtocolError("by ZMTP 1 or 2, which say nothing of a connection: 3 is needed")
        if self.is_routing:
            return Whole(came[0], came[1:], frame, descriptor, None)
        return Whole(b"", came, frame, descriptor, None)

    def _pass_over(self) -> bool:
        """Take what is left of a message that is too long; False: there is more of it than one turn may take."""
        with contextlib.suppress(zmq.Again):
            for _ in range(frames.FRAMES_MAX):
                if not self._socket.recv(_NOBLOCK, copy=False).more:
                    self._is_amid = False
                    return True
        return False

    def _open_up(self, whole: Whole) -> list[Received]:
        peer, speaker = self._sender(whole)
        if speaker is not None and self._unfinished is not None:
            self._unfinished.spoke(whole.descriptor, speaker.public)
        lender = self._lender
        if lender is not None:
            lender.frame = whole.last_frame
        envelope, named = frames.split(
            whole.parts,
            header_bytes_max=self._options.header_bytes_max,
            payload_bytes_max=self._options.payload_bytes_max,
            borrowed=lender,
        )
        if lender is not None:
            lender.frame = None  # it may be large
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

    def _note_ended(self) -> None:  # noqa: B027  most links have nothing to do here
        """Find out which of ZeroMQ's connections have ended."""

    def _note_streams_ended(self) -> None:
        """Somebody at the other end of a local stream is gone; whoever sends payload needs no answer."""
        self._streams.ended.clear()

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

    def __init__(self, options: LinkOptions | None = None, guard: LinkAccess | None = None) -> None:
        super().__init__(options, guard)
        self._ports: set[int] = set()  # by TCP
        self._connections = self._watch_connections(
            zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | (KEYLESS if guard else 0)
        )

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
                    self._streams.listen(
                        claim.stream_path
                    )  # before ZeroMQ's: whoever finds that one can find this one
                elif address.startswith("tcp://"):
                    check_listening(address, guard)
                    if guard is not None and not is_guarded:
                        guard.listen(self._socket)  # holds for what is bound from here on
                        is_guarded = True
                with naming(address, "bind"), private_files():
                    self._socket.bind(address)
                bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
                if not bound.startswith(IPC):
                    self._ports.add(int(bound.rpartition(":")[2]))
                self._addresses.append(guard.announced(bound) if guard and is_guarded else bound)
            if self._ports:
                self._unfinished = UnfinishedMessages(
                    self._connections.standing, self._options, self._ports, asks_for_keys=is_guarded
                )
        except ConfigError:
            self.close()
            raise

    def _sender(self, whole: Whole) -> tuple[PeerId, Speaker | None]:
        return NOBODY, None if self._guard is None or whole.last_frame is None else self._guard.check(
            whole.last_frame, whole.descriptor, NOBODY
        )

    def _note_ended(self) -> None:
        if self._socket.closed:
            return
        if self._guard is not None:
            self._guard.refused_by_link += self._connections.count_failed()
        for descriptor in self._connections.ended():
            self._connection_ended(descriptor)

    def _connection_ended(self, descriptor: int) -> None:
        """One of ZeroMQ's has."""

    def _keys_changed(self, guard: LinkAccess) -> None:
        guard.hang_up_on_revoked()


class Outdated(RemoteProtocolError):
    """Its sender gave up the connection that it came by, and has spoken on a newer one."""


class Whole(NamedTuple):
    """A message as it came, by ZeroMQ or by a local stream."""

    route: Buffer
    """The identity of the connection, where ZeroMQ says it."""
    parts: Sequence[Buffer]
    last_frame: zmq.Frame | None
    """Knows more of ZeroMQ's connection by which it came."""
    descriptor: int
    """Of that connection."""
    stream: LocalStream | None


class _ByIpc:
    """Lends what is in shared memory to peers that are connected by ipc: only they can be of our host and user.

    `frame`: of the message that is looked at; None: it came by a local stream, whose peer is.
    """

    def __init__(self, clock: Clock) -> None:
        self.frame: zmq.Frame | None = None
        self.lent_bytes = 0
        self._clock = clock
        self._borrowed = Borrowed(clock=clock)
        self._looked_at_ms = 0.0

    def look(self) -> None:
        """Let go what is gone, about once a second."""
        if self._borrowed and self._clock.now_ms() >= self._looked_at_ms + _GONE_EVERY_MS:
            self._looked_at_ms = self._clock.now_ms()
            self._borrowed.forget_gone()

    def place(self, at: SharedAt, size: int) -> Region:
        """Raises RemoteProtocolError for another peer, and for bytes that are not there."""
        if self.frame is not None:
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
    """Bytes of which ZeroMQ is not done with, by the trackers of their messages' last frames.

    Nobody knows for how long, and what ZeroMQ has cannot be changed: so it is given what is `kept_apart`.
    """

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
        "keys_not_taken_over",
        "full_out",
        "unroutable_out",
    )
    return dict.fromkeys(names, 0.0)


def open_socket(kind: int, options: LinkOptions) -> zmq.Socket[bytes]:
    """Raises PeerLost where there is no descriptor left for it."""
    with naming_descriptors():
        opened = context().socket(kind)
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


def _descriptor(frame: zmq.Frame) -> int | None:
    """Of the connection by which it came; None: its peer speaks a version of ZMTP in which nothing is known of it."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None


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

    The key is empty where none is needed. Raises ConfigError naming an address that cannot be one, whose key is missing or
    not trusted, or at which another user's socket is.
    """
    key = ""
    check_address(address)
    if address.startswith(IPC):
        check_not_foreign(address)
    if guard is None:
        address = keyless(address)
    elif not address.startswith(IPC):
        address, key = guard.connect_to(socket, address, principal)
    with naming(address, "connect to"):
        socket.connect(address)
    return address, key


@contextlib.contextmanager
def naming(address: str, doing: str) -> Iterator[None]:
    """Turn ZeroMQ's error about an address into one that names it."""
    try:
        yield
    except zmq.ZMQError as error:
        reason = "it is in use" if error.errno == zmq.EADDRINUSE else str(error).lower()
        raise ConfigError(f"cannot {doing} {address}: {reason}") from error


@contextlib.contextmanager
def naming_descriptors() -> Iterator[None]:
    """Turn the error that no descriptor is left into PeerLost."""
    try:
        yield
    except (OSError, zmq.ZMQError) as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise PeerLost(f"no socket can be opened: {error.strerror}") from error
