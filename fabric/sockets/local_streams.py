"""The local streams of a link: those that others connected to it, and those that it connected (ADR 0310).

ZeroMQ wakes a thread of its own at both ends of every message: a round trip of 200 bytes costs 150 us of CPU and takes 150 us, by
a plain Unix socket 45 and 22. So beside each socket of ZeroMQ's at `ipc://PATH` its owner listens at `PATH.stream`. Who
connects to an ipc address tries that first, and goes by ZeroMQ where nobody listens there; to another user's process it does not speak at all.

The first message of whoever connected is a greeting: one frame, `GREETING` and the identity of the connection (see
`fabric/sockets/routes.py`; of a push socket, none).
"""

from __future__ import annotations

import contextlib
import errno
import math
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
from fabric.errors import ConfigError, RemoteProtocolError
from fabric.ipc import private_files
from fabric.sockets.flushing import IN_BACKGROUND
from fabric.sockets.local_stream import SLOW_FROM_MS, LocalStream
from fabric.sockets.options import LinkOptions

SWITCH: Final = "TENUTO_EXPRESS"
GREETING: Final = b"TENUTO-STREAM/1 "
FLUSH_MS: Final = 100
LISTEN_AGAIN_MS: Final = 1_000.0
GREET_WITHIN_MS: Final = 3_000.0
"""Whoever has connected and not greeted by then is hung up on, as ZeroMQ does."""
STREAMS_MAX: Final = 8_192
"""Accepted by one link; who comes then is turned away, and goes by ZeroMQ."""
_BACKLOG: Final = 128
_CREDENTIALS: Final = struct.Struct("=iII")  # process, user, group
_OUT_OF_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@cache
def are_allowed() -> bool:
    """Whether this process uses local streams; `TENUTO_EXPRESS=0` in its environment forbids it."""
    return sys.platform == "linux" and os.environ.get(SWITCH) != "0"


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
        self._slow: deque[tuple[float, LocalStream]] = deque()  # when something began to wait for them
        self._ungreeted: deque[tuple[float, LocalStream]] = deque()  # those accepted last, and until when
        self._listeners: dict[int, tuple[socket.socket, Path]] = {}
        self._listen_again: list[Path] = []  # once there are descriptors again
        self._listen_again_at_ms = math.inf

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
            return None
        try:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError:
            return self._listen_later(path)
        try:
            with private_files():
                listener.bind(str(path))
            listener.listen(_BACKLOG)
            self._poll.register(listener.fileno(), select.EPOLLIN)
        except OSError:
            listener.close()
            return None
        self._listeners[listener.fileno()] = listener, path
        return None

    def connect(self, path: Path | None, identity: bytes) -> LocalStream | None:
        """A stream to who listens there, greeted; None: nobody does, or no descriptor is left.

        Raises ConfigError where it is another user's process: at ZeroMQ's socket beside it nobody would ask.
        """
        if path is None or self._poll.closed or not are_allowed():
            return None
        try:
            opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError:
            return None
        try:
            opened.connect(str(path))
            stream = self._add(opened) if _is_ours(opened) else None
        except OSError:
            opened.close()
            return None
        if stream is None:
            opened.close()
            raise ConfigError(f"{path} is not spoken to: a process of another user listens there")
        stream.identity = b""
        greeting = GREETING + identity
        stream.send((greeting,), len(greeting))  # an empty socket takes it
        return stream

    def look(self) -> None:
        """Find out who has something, and send what waits where there is room now."""
        for descriptor, events in self._poll.poll(0):
            stream = self._streams.get(descriptor)
            if stream is not None:
                if events & select.EPOLLOUT:
                    stream.flush()
                if events & select.EPOLLRDHUP and stream.find_end():
                    self._lose(stream)
                elif events != select.EPOLLOUT:
                    stream.is_readable = True
                    self._wait(stream)
            elif descriptor in self._listeners:
                self._accept(descriptor)
            else:
                self.told.add(descriptor)
        if self._slow:
            self._keep_apart(self._options.clock.now_ms())
        if self._ungreeted:
            self._end_ungreeted(self._options.clock.now_ms())
        if self._listen_again and self._options.clock.now_ms() >= self._listen_again_at_ms:
            again, self._listen_again = self._listen_again, []
            for path in again:
                with contextlib.suppress(OSError):  # then nobody can listen there
                    path.unlink(missing_ok=True)
                self.listen(path)

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
            if parts is not None:
                if stream.has_more:
                    self._wait(stream)
                return stream, parts
            if stream.is_ended:
                self._lose(stream)
        return None

    def end(self, stream: LocalStream, *, is_flushed: bool = False) -> None:
        """Give one up; what it brought and was not taken is lost. `is_flushed`: what waits to be sent may leave for a moment."""
        if stream.is_waiting:
            stream.is_waiting = False
            self._waiting.remove(stream)
        if self._streams.get(stream.descriptor) is stream:  # else another has its number by now
            del self._streams[stream.descriptor]
        stream.close(_leave if is_flushed else None)

    def close(self) -> None:
        """End all; what waits to be sent may leave for a moment, in the background. Safe to call twice."""
        if self._poll.closed:
            return
        for listener, _ in self._listeners.values():
            listener.close()
        self._listeners.clear()
        for stream in list(self._streams.values()):
            self.end(stream, is_flushed=True)
        self._slow.clear()
        self._poll.close()

    def _wait(self, stream: LocalStream) -> None:
        if not stream.is_waiting:
            stream.is_waiting = True
            self._waiting.append(stream)

    def _lose(self, stream: LocalStream) -> None:
        self.end(stream)
        self.ended.append(stream)

    def _note_slow(self, stream: LocalStream, now_ms: float) -> None:
        self._keep_apart(now_ms)  # as nobody may say anything for long, and so nobody look
        self._slow.append((now_ms, stream))

    def _keep_apart(self, now_ms: float) -> None:
        while self._slow and now_ms > self._slow[0][0] + SLOW_FROM_MS:
            since_ms, stream = self._slow.popleft()
            stream.keep_apart(since_ms)

    def _accept(self, descriptor: int) -> None:
        listener, path = self._listeners[descriptor]
        for _ in range(_BACKLOG):
            try:
                accepted, _ = listener.accept()
            except OSError as error:
                if error.errno in _OUT_OF_DESCRIPTORS:
                    # It would tell of the same one for ever. Those who have connected are turned away, and go by ZeroMQ.
                    del self._listeners[descriptor]
                    listener.close()
                    self._listen_later(path)
                return
            accepted.setblocking(False)
            try:
                if len(self._streams) >= STREAMS_MAX or not _is_ours(accepted):
                    raise PermissionError(errno.EPERM, "too many, or another user's")
                stream = self._add(accepted)
                self._ungreeted.append((self._options.clock.now_ms() + GREET_WITHIN_MS, stream))
            except OSError:
                accepted.close()

    def _end_ungreeted(self, now_ms: float) -> None:
        while self._ungreeted:
            until_ms, stream = self._ungreeted[0]
            is_awaited = stream.identity is None and not stream.is_closed
            if is_awaited and now_ms < until_ms:
                break
            self._ungreeted.popleft()
            if is_awaited and stream.is_waiting:  # we have not read yet what it said
                self._ungreeted.append((now_ms + GREET_WITHIN_MS, stream))
            elif is_awaited:
                self.end(stream)

    def _listen_later(self, path: Path) -> None:
        self._listen_again.append(path)
        self._listen_again_at_ms = self._options.clock.now_ms() + LISTEN_AGAIN_MS

    def _add(self, connected: socket.socket) -> LocalStream:
        stream = LocalStream(connected, self._options, self._poll, self._note_slow)
        self._streams[stream.descriptor] = stream
        return stream


def _leave(connected: socket.socket, unsent: deque[list[memoryview]]) -> None:
    IN_BACKGROUND.take(connected, unsent, FLUSH_MS)


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
