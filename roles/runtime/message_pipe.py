"""One message and its tensors through a pipe, within a time: how a role and a child of its talk that stays.

The frames are those of the sockets, so that what a child says, a user's code perhaps, is held against the same limits.
"""

from __future__ import annotations

import os
import select
import struct
from collections.abc import Sequence
from typing import Final

from fabric.clock import Clock
from fabric.errors import FabricError, RemoteProtocolError
from fabric.frames import FRAMES_MAX, PAYLOAD_BYTES_MAX, join, pack, split
from fabric.link import NO_EPOCH, NamedTensor
from fabric.messages import AnyMessage

_COUNT: Final = struct.Struct("<I")
_LENGTH: Final = struct.Struct("<Q")
_READ_BYTES: Final = 1 << 20


class TooSlow(FabricError):
    """The other side did not take or give it in time."""


class Ended(FabricError):
    """The other side has closed its end."""


class MessagePipe:
    """Both ends of a conversation, as descriptors. `clock`: for limits; without a limit both may block for ever."""

    def __init__(self, read_fd: int, write_fd: int, clock: Clock) -> None:
        self._read_fd, self._write_fd = read_fd, write_fd
        self._clock = clock
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)

    def send(
        self, message: AnyMessage, tensors: Sequence[NamedTensor], until_ms: float | None, bytes_max: int
    ) -> None:
        """Say it. Raises LocalProtocolError for what cannot be said, TooSlow, Ended."""
        frames = join([pack(message, tensors, payload_bytes_max=bytes_max)], epoch=NO_EPOCH, sent_at_ms=0.0)
        lengths = b"".join(_LENGTH.pack(len(frame)) for frame in frames)
        self._write(_COUNT.pack(len(frames)) + lengths, until_ms)
        for frame in frames:
            self._write(frame, until_ms)

    def receive(self, until_ms: float | None) -> tuple[AnyMessage, Sequence[NamedTensor]]:
        """What the other side says next. Raises TooSlow, Ended, RemoteProtocolError."""
        (count,) = _COUNT.unpack(self._read(_COUNT.size, until_ms))
        if not 1 <= count <= FRAMES_MAX:
            raise RemoteProtocolError(f"a message of {count} frames")
        lengths = [
            _LENGTH.unpack_from(packed)[0]
            for packed in [self._read(_LENGTH.size, until_ms) for _ in range(count)]
        ]
        if sum(lengths) > 2 * PAYLOAD_BYTES_MAX:
            raise RemoteProtocolError(f"a message of {sum(lengths)} bytes")
        envelope, named = split([self._read(length, until_ms) for length in lengths])
        return envelope.parcels[0].body, named[0]

    def _write(self, data: bytes | memoryview, until_ms: float | None) -> None:
        left = memoryview(data)
        while left:
            self._wait(self._write_fd, select.POLLOUT, until_ms)
            try:
                left = left[os.write(self._write_fd, left) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise Ended("it does not listen any more") from error

    def _read(self, size: int, until_ms: float | None) -> memoryview:
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            self._wait(self._read_fd, select.POLLIN, until_ms)
            try:
                count = os.readv(self._read_fd, [view[done : done + _READ_BYTES]])
            except BlockingIOError:
                continue
            except OSError as error:
                raise Ended("it cannot be heard any more") from error
            if not count:
                raise Ended("it has ended")
            done += count
        return view.toreadonly()

    def _wait(self, descriptor: int, event: int, until_ms: float | None) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        if until_ms is None:
            poll.poll()
            return
        left_ms = until_ms - self._clock.now_ms()
        if left_ms <= 0 or not poll.poll(left_ms):
            raise TooSlow("it took too long")
