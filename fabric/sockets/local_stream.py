"""A local stream: a connected Unix socket that carries whole messages, in place of ZeroMQ's ipc (ADR 0310).

A message is

    [frames: u32] [bytes of each frame: u32 ...] [frame] [frame] ...

in the host's byte order. The numbers, and each frame but the last, are padded to 8 bytes.

What the kernel does not take at once waits here, within the bounds of the link, and leaves when its owner's loop hears that
there is room.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from fabric.codec import Buffer
from fabric.errors import RemoteProtocolError
from fabric.frames import ALIGNMENT, SMALL_BELOW_BYTES, kept_apart
from fabric.ids import PeerId
from fabric.sockets.options import LinkOptions

READ_BYTES: Final = 64 << 10
FLUSH_BYTES: Final = 1 << 20
"""Sent in one turn of what had to wait, so that one who reads a lot does not hold up the others."""
SLOW_FROM_MS: Final = 10.0
"""Whoever has not read for so long may not for longer: what waits is kept by itself then, not with what it is part of."""
_BUFFERS_MAX: Final = 1_000  # of one call; the kernel takes 1,024
_PADDING: Final = bytes(ALIGNMENT)
_ONE: Final = struct.Struct("=II")  # the numbers of a message of one frame
_HEARING: Final = select.EPOLLIN | select.EPOLLRDHUP


class LocalStream:
    """One connected stream: whole messages out and in, without blocking.

    `peer`: who is there, as its owner found out by `identity`, which the other end has greeted with. `on_wait` hears when something
    begins to wait, and sees to `keep_apart`.
    """

    __slots__ = (
        "_at",
        "_data",
        "_filled",
        "_large",
        "_lengths",
        "_on_wait",
        "_options",
        "_poll",
        "_socket",
        "_unsent",
        "_unsent_bytes",
        "_unsent_from_ms",
        "descriptor",
        "has_heard",
        "identity",
        "is_broken",
        "is_closed",
        "is_ended",
        "is_readable",
        "is_waiting",
        "peer",
    )

    def __init__(
        self,
        connected: socket.socket,
        options: LinkOptions,
        poll: select.epoll,
        on_wait: Callable[[LocalStream, float], None],
    ) -> None:
        self.descriptor = connected.fileno()
        self.identity: bytes | None = None
        self.peer = PeerId("")
        self.is_broken = False
        """Nothing can be sent any more."""
        self.is_ended = False
        """The other end is gone, and the kernel has nothing more of it."""
        self.is_closed = False
        """It was given up here."""
        self.is_readable = False
        """The kernel may have more of it."""
        self.is_waiting = False
        """Among those that are asked next; for its owner."""
        self.has_heard = False
        """A message came by it."""
        self._socket = connected
        self._options = options
        self._poll = poll
        self._on_wait = on_wait
        self._unsent: deque[list[memoryview]] = deque()  # what is left of messages that wait
        self._unsent_bytes = 0
        self._unsent_from_ms = 0.0  # since then something has waited
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
            is_slow = options.clock.now_ms() > self._unsent_from_ms + SLOW_FROM_MS
            self._keep(_framed(kept_apart(parts) if is_slow else parts))
            return True
        try:
            if len(parts) == 1 and size < SMALL_BELOW_BYTES:  # nearly all there are
                whole = b"".join((_ONE.pack(1, size), parts[0]))
                sent = self._socket.send(whole, socket.MSG_NOSIGNAL)
                if sent == len(whole):
                    return True
                buffers = [memoryview(whole)]
            else:
                buffers = _framed(parts)
                sent = self._socket.sendmsg(buffers[:_BUFFERS_MAX], (), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            buffers, sent = _framed(parts), 0
        except OSError:
            self._break()
            return False
        if _cut_off(buffers, sent):
            self._keep(buffers)
            self._unsent_from_ms = now_ms = self._options.clock.now_ms()
            self._on_wait(self, now_ms)
            self._poll.modify(self.descriptor, _HEARING | select.EPOLLOUT)
        return True

    def flush(self) -> None:
        """The kernel has room: send what waits."""
        try:
            self._unsent_bytes -= send_waiting(self._socket, self._unsent, FLUSH_BYTES)
        except OSError:
            self._break()
            self._unsent.clear()
            self._unsent_bytes = 0
        if not self._unsent:
            self._poll.modify(self.descriptor, _HEARING)

    def keep_apart(self, since_ms: float) -> None:
        """What has waited since then may for long: copy what is part of something much larger."""
        if self._unsent_from_ms != since_ms:
            return  # all of that was read, and what waits now has only begun to
        for buffers in self._unsent:
            buffers[:] = [memoryview(one) for one in kept_apart(buffers)]

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

    def find_end(self) -> bool:
        """Read once, as the other end is said to be gone; whether it is, and has left nothing more to take."""
        self.is_readable = True
        self._read()
        return self.is_ended and not self.has_more

    def drop_unread(self) -> int:
        """Nobody will take what is here; how many messages that were."""
        count = 0
        with contextlib.suppress(RemoteProtocolError):
            while self.receive() is not None:
                count += 1
        return count

    def close(self, flush: Callable[[socket.socket, deque[list[memoryview]]], None] | None = None) -> None:
        """What the kernel has of ours still arrives; what waits here goes on by `flush`, which closes the socket then. Safe to call twice."""
        if self.is_closed:
            return
        self.is_closed = self.is_ended = True
        self._poll.unregister(self.descriptor)
        if flush is not None and self._unsent and not self.is_broken:
            flush(self._socket, self._unsent)
        else:
            self._socket.close()
        self.is_broken, self._unsent = True, deque()

    # ------------------------------------------------------------ out

    def _break(self) -> None:
        """The other end is gone, or the kernel had no memory for what was said: who reads will find the end, here and there."""
        self.is_broken = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

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
            try:
                self._large = _room(size) if options.payload_bytes_max else memoryview(bytearray(size))
            except MemoryError as error:
                raise RemoteProtocolError(f"there is no memory for a message of {size} bytes") from error
            self._lengths = lengths
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
                if not asked:  # it is all here, and has to be taken first
                    return
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


def _room(size: int) -> memoryview:
    """Memory for tensors, which has been used before where there is such, and whose pages else come as they are filled."""
    import numpy as np  # noqa: PLC0415  who never has tensors does without

    return np.empty(size, np.uint8).data


def send_waiting(connected: socket.socket, unsent: deque[list[memoryview]], bytes_max: int) -> int:
    """Send what waits, as far as the kernel takes it, and hardly more than `bytes_max`; how many bytes that were.

    Raises OSError where the other end is gone.
    """
    total = 0
    with contextlib.suppress(BlockingIOError):
        while unsent and total < bytes_max:
            sent = connected.sendmsg(unsent[0][:_BUFFERS_MAX], (), socket.MSG_NOSIGNAL)
            total += sent
            if not _cut_off(unsent[0], sent):
                unsent.popleft()
    return total


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
