"""Local streams: what two ends on one host say by a connected Unix socket, instead of by ZeroMQ's ipc (ADR 0300).

ZeroMQ wakes a thread of its own at both ends of every message: a round trip of 200 bytes costs 150 us of CPU and takes 150 us, by
a plain Unix socket 45 and 22. So beside each socket of ZeroMQ's at `ipc://PATH` its owner listens at `PATH.stream`. Who
connects to an ipc address tries that first, and goes by ZeroMQ where nobody listens there, or where the other is of another user.

Sans ZeroMQ, a message is

    [frames: u32] [bytes of each frame: u32 ...] [frame] [frame] ...

in the host's byte order. The numbers, and each frame but the last, are padded to 8 bytes. The first message of whoever
connected is a greeting: one frame, `GREETING` and the identity of the connection (see `fabric/sockets/routes.py`; of a push socket, none).

What the kernel does not take at once waits here, within the bounds of the link, and leaves when its owner's loop hears that
there is room.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import sys
from collections import deque
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

from fabric.codec import Buffer
from fabric.errors import RemoteProtocolError
from fabric.frames import ALIGNMENT, SMALL_BELOW_BYTES
from fabric.ids import PeerId
from fabric.sockets.options import LinkOptions

SWITCH: Final = "TENUTO_EXPRESS"
GREETING: Final = b"tenuto stream 1 "
STREAMS_MAX: Final = 8_192
"""Accepted by one link; who comes then is turned away, and goes by ZeroMQ."""
READ_BYTES: Final = 64 << 10
FLUSH_BYTES: Final = 1 << 20
"""Sent in one turn of what had to wait, so that one who reads a lot does not hold up the others."""
_BUFFERS_MAX: Final = 1_000  # of one call; the kernel takes 1,024
_BACKLOG: Final = 128
_PADDING: Final = bytes(ALIGNMENT)
_ONE: Final = struct.Struct("=II")  # the numbers of a message of one frame
_CREDENTIALS: Final = struct.Struct("=iII")  # process, user, group
_HEARING: Final = select.EPOLLIN | select.EPOLLRDHUP
_OUT_OF_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@cache
def are_allowed() -> bool:
    """Whether this process uses local streams; `TENUTO_EXPRESS=0` in its environment forbids it."""
    return sys.platform == "linux" and os.environ.get(SWITCH) != "0"


class LocalStream:
    """One connected stream: whole messages out and in, without blocking.

    `peer`: who is there, as its owner found out by `identity`, which the other end has greeted with.
    """

    __slots__ = (
        "_at",
        "_data",
        "_filled",
        "_large",
        "_lengths",
        "_options",
        "_poll",
        "_socket",
        "_unsent",
        "_unsent_bytes",
        "descriptor",
        "has_heard",
        "identity",
        "is_broken",
        "is_ended",
        "is_readable",
        "is_waiting",
        "peer",
    )

    def __init__(self, connected: socket.socket, options: LinkOptions, poll: select.epoll) -> None:
        self.descriptor = connected.fileno()
        self.identity: bytes | None = None
        self.peer = PeerId("")
        self.is_broken = False
        """Nothing can be sent any more."""
        self.is_ended = False
        """The other end is gone, and nothing is left to read."""
        self.is_readable = False
        """The kernel may have more of it."""
        self.is_waiting = False
        """Among those that are asked next; for its owner."""
        self.has_heard = False
        """A message came by it."""
        self._socket = connected
        self._options = options
        self._poll = poll
        self._unsent: deque[list[memoryview]] = deque()  # what is left of messages that wait
        self._unsent_bytes = 0
        self._data = b""
        self._at = 0  # of `_data` all before is taken
        self._large: memoryview | None = None  # the frames of a message that does not fit into one reading
        self._lengths: Sequence[int] = ()
        self._filled = 0
        poll.register(self.descriptor, _HEARING)

    @property
    def has_unsent(self) -> bool:
        """Whether something waits for the kernel to have room."""
        return bool(self._unsent)

    @property
    def has_more(self) -> bool:
        """Whether `receive` may give more."""
        return self.is_readable or bool(self._data)

    def send(self, parts: Sequence[Buffer], size: int) -> bool:
        """Queue a whole message of `size` bytes; False: the queue is full, or the other end is gone.

        Buffers must not change until they have left.
        """
        if self.is_broken:
            return False
        if self._unsent:
            options = self._options
            if (
                len(self._unsent) >= options.queue_messages_max
                or self._unsent_bytes + size > options.queue_bytes_max
            ):
                return False
            self._keep(_framed(parts))
            return True
        try:
            if len(parts) == 1 and size < SMALL_BELOW_BYTES:  # nearly all there are
                whole = b"".join((_ONE.pack(1, size), parts[0]))
                sent = self._socket.send(whole)
                if sent == len(whole):
                    return True
                buffers = [memoryview(whole)]
            else:
                buffers = _framed(parts)
                sent = self._socket.sendmsg(buffers[:_BUFFERS_MAX])
        except BlockingIOError:
            buffers, sent = _framed(parts), 0
        except OSError:
            self.is_broken = True  # whoever reads will find the end
            return False
        if _cut_off(buffers, sent):
            self._keep(buffers)
            self._poll.modify(self.descriptor, _HEARING | select.EPOLLOUT)
        return True

    def flush(self) -> None:
        """The kernel has room: send what waits."""
        budget = FLUSH_BYTES
        try:
            while self._unsent and budget > 0:
                rest = self._unsent[0]
                sent = self._socket.sendmsg(rest[:_BUFFERS_MAX])
                budget -= sent
                self._unsent_bytes -= sent
                if not _cut_off(rest, sent):
                    self._unsent.popleft()
        except BlockingIOError:
            return
        except OSError:
            self.is_broken = True
            self._unsent.clear()
            self._unsent_bytes = 0
        if not self._unsent:
            self._poll.modify(self.descriptor, _HEARING)

    def receive(self) -> Sequence[Buffer] | None:
        """The frames of the next message; None: it is not here yet. Raises RemoteProtocolError for what can be none."""
        while True:
            parts = self._next()
            if parts is not None:
                self.has_heard = True
                return parts
            if not self.is_readable or self.is_ended:
                return None
            self._read()

    def has_ended(self) -> bool:
        """Read once; whether that was the end, and nothing is left of what came before."""
        self.is_readable = True
        self._read()
        return self.is_ended and not self.has_more

    def unread(self) -> int:
        """How many messages are here that nobody will take."""
        count = 0
        with contextlib.suppress(RemoteProtocolError):
            while self.receive() is not None:
                count += 1
        return count

    def close(self) -> None:
        """What the kernel has of ours still arrives. Safe to call twice."""
        if self._socket.fileno() < 0:
            return
        self.is_ended = self.is_broken = True
        self._unsent.clear()
        self._poll.unregister(self.descriptor)
        self._socket.close()

    # ------------------------------------------------------------ out

    def _keep(self, buffers: list[memoryview]) -> None:
        self._unsent.append(buffers)
        self._unsent_bytes += sum(map(len, buffers))

    # ------------------------------------------------------------ in

    def _next(self) -> Sequence[Buffer] | None:
        """The next message, of what has been read."""
        if self._large is not None:
            if self._filled < len(self._large):
                return None
            large, self._large = self._large.toreadonly(), None
            return _cut_up(large, 0, self._lengths)
        data, at = self._data, self._at
        left = len(data) - at
        if left < _ONE.size:
            return None
        count, first = _ONE.unpack_from(data, at)
        if count == 1 and first <= left - _ONE.size:  # nearly all there are
            start = at + _ONE.size
            self._take_up_to(start + first)
            return (data[start : start + first],)
        return self._next_of(data, at, count)

    def _next_of(self, data: bytes, at: int, count: int) -> Sequence[Buffer] | None:
        """The next message, of several frames or not all here."""
        options = self._options
        if not 1 <= count <= options.frames_max:
            raise RemoteProtocolError(f"a message of {count} frames by a local stream")
        numbers = _padded(4 + 4 * count)
        if len(data) - at < numbers:
            return None
        lengths = struct.unpack_from(f"={count}I", data, at + 4)
        if max(lengths) > options.frame_bytes_max:
            raise RemoteProtocolError(f"a frame of {max(lengths)} bytes by a local stream")
        size = sum(map(_padded, lengths[:-1])) + lengths[-1]
        if size > options.header_bytes_max + options.payload_bytes_max + ALIGNMENT * count:
            raise RemoteProtocolError(f"a message of {size} bytes by a local stream")
        start = at + numbers
        if len(data) - start >= size:
            self._take_up_to(start + size)
            return _cut_up(memoryview(data), start, lengths)
        if size > SMALL_BELOW_BYTES:
            self._large, self._lengths = memoryview(bytearray(size)), lengths
            self._filled = len(data) - start
            self._large[: self._filled] = memoryview(data)[start:]
            self._take_up_to(len(data))
        return None

    def _take_up_to(self, at: int) -> None:
        if at == len(self._data):
            self._data, self._at = b"", 0
        else:
            self._at = at

    def _read(self) -> None:
        """Take more from the kernel; less than was asked for means that it has no more."""
        try:
            if self._large is not None:
                asked = len(self._large) - self._filled
                read = self._socket.recv_into(self._large[self._filled :])
                self._filled += read
            else:
                asked = READ_BYTES
                new = self._socket.recv(READ_BYTES)
                read = len(new)
                self._data = self._data[self._at :] + new if self._data else new
                self._at = 0
        except BlockingIOError:
            self.is_readable = False
            return
        except OSError:  # it was reset
            read = 0
            asked = 1
        self.is_ended = not read
        self.is_readable = read == asked


class LocalStreams:
    """The streams of one link, what listens for more of them, and one descriptor that tells of all.

    `watch` lets that descriptor tell of others too.
    """

    def __init__(self, options: LinkOptions) -> None:
        self.ended: list[LocalStream] = []
        """Whose other end is gone, since the owner has emptied this."""
        self.told: set[int] = set()
        """Of the descriptors that are watched, those that have told since the owner has emptied this."""
        self._options = options
        self._poll = select.epoll()
        self._streams: dict[int, LocalStream] = {}
        self._waiting: deque[LocalStream] = deque()  # those that may have a message, in turn
        self._leaving: list[LocalStream] = []
        self._listener: socket.socket | None = None

    def __len__(self) -> int:
        """How many are connected."""
        return len(self._streams)

    def fileno(self) -> int:
        """Readable when there may be something to take; -1 once closed."""
        return -1 if self._poll.closed else self._poll.fileno()

    @property
    def has_more(self) -> bool:
        """Whether `take` may give something, or somebody is gone, of which the descriptor does not tell."""
        return bool(self._waiting or self.ended)

    def watch(self, descriptor: int) -> None:
        """Tell of that one too."""
        self._poll.register(descriptor, select.EPOLLIN)

    def listen(self, path: Path | None) -> None:
        """Take whoever connects there. Nobody can where the path is too long, or what it names cannot be made."""
        if path is None or not are_allowed():
            return
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.bind(str(path))
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            return
        self._listener = listener
        self._poll.register(listener.fileno(), select.EPOLLIN)

    def connect(self, path: Path | None, identity: bytes) -> LocalStream | None:
        """A stream to who listens there, greeted; None: nobody does, or one of another user."""
        if path is None or not are_allowed():
            return None
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            opened.connect(str(path))
            if not _is_ours(opened):
                raise PermissionError(errno.EPERM, "another user's")
            stream = self._add(opened)
        except OSError:
            opened.close()
            return None
        stream.identity = b""
        greeting = GREETING + identity
        return stream if stream.send((greeting,), len(greeting)) else None

    def look(self) -> None:
        """Find out who has something, and send what waits where there is room now."""
        for descriptor, events in self._poll.poll(0):
            stream = self._streams.get(descriptor)
            if stream is not None:
                if events & select.EPOLLOUT:
                    stream.flush()
                if events & select.EPOLLRDHUP and stream.has_ended():
                    self._lose(stream)
                elif events != select.EPOLLOUT:
                    stream.is_readable = True
                    self._wait(stream)
            elif self._listener is not None and descriptor == self._listener.fileno():
                self._accept(self._listener)
            else:
                self.told.add(descriptor)
        if self._leaving:
            self._leaving = [stream for stream in self._leaving if not self._has_left(stream)]

    def take(self) -> tuple[LocalStream, Sequence[Buffer]] | None:
        """The next message, of all streams in turn, and by which it came; None: there is none.

        Raises RemoteProtocolError for what can be none; its stream has ended then.
        """
        while self._waiting:
            stream = self._waiting.popleft()
            stream.is_waiting = False
            try:
                parts = stream.receive()
                if parts is not None and stream.identity is None:
                    stream.identity = _greeted(parts)
                    parts = stream.receive()
            except RemoteProtocolError:
                self._lose(stream)
                raise
            if stream.has_more:
                self._wait(stream)
            if parts is not None:
                return stream, parts
            if stream.is_ended:
                self._lose(stream)
        return None

    def end(self, stream: LocalStream, *, is_flushed: bool = False) -> None:
        """Close one; what it has not been taken of is lost. `is_flushed`: once what waits there has left."""
        if is_flushed and stream.has_unsent:
            self._leaving.append(stream)
            return
        if stream.is_waiting:
            self._waiting.remove(stream)
        self._remove(stream)

    def end_leaving(self) -> None:
        """Those that were to leave have had their time."""
        for stream in self._leaving:
            self.end(stream)
        self._leaving = []

    def close(self, flush_ms: float) -> None:
        """Wait for at most so long for what has not left, then end all. Safe to call twice."""
        if self._poll.closed:
            return
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._flush(flush_ms)
        for stream in list(self._streams.values()):
            self._remove(stream)
        self._waiting.clear()
        self._leaving.clear()
        self._poll.close()

    def _flush(self, within_ms: float) -> None:
        clock = self._options.clock
        until_ms = clock.now_ms() + within_ms
        while unsent := [stream for stream in self._streams.values() if stream.has_unsent]:
            left_ms = until_ms - clock.now_ms()
            if left_ms <= 0:
                return
            room = select.poll()
            for stream in unsent:
                room.register(stream.descriptor, select.POLLOUT)
            room.poll(left_ms)
            for stream in unsent:
                stream.flush()

    def _wait(self, stream: LocalStream) -> None:
        if not stream.is_waiting:
            stream.is_waiting = True
            self._waiting.append(stream)

    def _lose(self, stream: LocalStream) -> None:
        self.end(stream)
        self.ended.append(stream)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_BACKLOG):
            try:
                accepted, _ = listener.accept()
            except OSError as error:
                if error.errno in _OUT_OF_DESCRIPTORS:  # it would tell of the same one for ever
                    self._poll.unregister(listener.fileno())
                    listener.close()
                    self._listener = None
                return
            accepted.setblocking(False)
            if len(self._streams) >= STREAMS_MAX or not _is_ours(accepted):
                accepted.close()
                continue
            self._add(accepted)

    def _add(self, connected: socket.socket) -> LocalStream:
        stream = LocalStream(connected, self._options, self._poll)
        self._streams[stream.descriptor] = stream
        return stream

    def _remove(self, stream: LocalStream) -> None:
        if self._streams.get(stream.descriptor) is stream:  # else another has its number by now
            del self._streams[stream.descriptor]
        stream.close()

    def _has_left(self, stream: LocalStream) -> bool:
        if stream.has_unsent and not stream.is_ended:
            return False
        self.end(stream)
        return True


def _framed(parts: Sequence[Buffer]) -> list[memoryview]:
    """A message's bytes, in pieces."""
    numbers = struct.pack(f"={1 + len(parts)}I", len(parts), *map(len, parts))
    pieces = [memoryview(numbers + _PADDING[: -len(numbers) % ALIGNMENT])]
    for part in parts:
        if len(part):
            pieces.append(memoryview(part))
        if len(part) % ALIGNMENT:
            pieces.append(memoryview(_PADDING[: -len(part) % ALIGNMENT]))
    if len(parts[-1]) % ALIGNMENT:
        pieces.pop()
    return pieces


def _cut_off(buffers: list[memoryview], sent: int) -> bool:
    """Take what was sent off the front; whether anything is left."""
    gone = 0
    for buffer in buffers:
        if sent < len(buffer):
            break
        sent -= len(buffer)
        gone += 1
    del buffers[:gone]
    if buffers and sent:
        buffers[0] = buffers[0][sent:]
    return bool(buffers)


def _cut_up(data: memoryview, start: int, lengths: Sequence[int]) -> Sequence[Buffer]:
    """The frames that lie there one behind the other. Small ones are copied, so that they do not keep large ones."""
    parts: list[Buffer] = []
    for length in lengths:
        frame = data[start : start + length]
        parts.append(bytes(frame) if length < SMALL_BELOW_BYTES else frame)
        start += _padded(length)
    return parts


def _padded(length: int) -> int:
    return length + -length % ALIGNMENT


def _greeted(parts: Sequence[Buffer]) -> bytes:
    """The identity in a greeting. Raises RemoteProtocolError where it is none."""
    greeting = bytes(parts[0])
    if len(parts) != 1 or not greeting.startswith(GREETING):
        raise RemoteProtocolError(f"{greeting[:40]!r} is not how a local stream begins")
    return greeting.removeprefix(GREETING)


def _is_ours(connected: socket.socket) -> bool:
    """Whether the process at the other end, as the kernel says, is of our user."""
    told = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(told)
    return bool(user == os.geteuid())
