"""What becomes of a socket's connections: ZeroMQ says so at once, on a socket of its own, of which there can be one."""

from __future__ import annotations

import itertools
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import zmq

_EVENT: Final = struct.Struct("=HI")  # the event's number, and the descriptor of the connection
_EVENTS: Final = int(zmq.EVENTS)
_READABLE: Final = int(zmq.POLLIN)
_NAMES: Final = itertools.count(1)
_FAILURES_MAX: Final = 64  # kept until somebody asks


@dataclass(slots=True)
class StandingConnection:
    """What is known of one, in bytes: see `fabric/sockets/unfinished.py`."""

    owner: str = ""
    """The key that spoke by it last, or the address it comes from."""
    is_by_tcp: bool = True
    is_let_in: bool = False
    """Its handshake is over."""
    taken: int = 0
    """When it was looked at last."""
    taken_before: int = 0
    """When it was looked at first after its last whole message."""
    unfinished: int = 0
    """Had been taken of a message that has not ended."""
    is_stalled: bool = False
    """Nothing was taken since."""


class ConnectionMonitor:
    """Hears of established connections that end, by their descriptors, and of handshakes that fail.

    Belongs to the thread of its socket. The end of a process is seen this way as soon as its kernel closes the connection. A
    host that vanishes closes nothing: only heartbeats tell of that.
    """

    def __init__(
        self, watched: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]], events: int
    ) -> None:
        self.is_told = True
        """Something may have happened that has not been heard; its owner says so when the descriptor does."""
        address = f"inproc://connections-{next(_NAMES)}"
        watched.monitor(address, events)
        self._watched = watched
        # A client's socket has one connection: what ends before its handshake was over was none. A server looks by descriptor.
        self._counts_handshakes = bool(events & zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._is_standing = False
        self.standing: dict[int, StandingConnection] = {}
        """Those that were accepted and have not ended, by their descriptors; only where EVENT_ACCEPTED is among the events."""
        self._ended: list[int] = []
        self._failed: deque[int] = deque(maxlen=_FAILURES_MAX)
        self._failures = 0
        self._socket = context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        # No bound: ZeroMQ's own thread would wait for us, who may wait for that thread. An event is a few bytes, and
        # there are no more of them than connections that were made.
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(address)
        self.descriptor = int(self._socket.getsockopt(zmq.FD))
        """Readable when something may have happened."""

    def ended(self) -> Sequence[int]:
        """The descriptor of each connection that has ended since the last call; it may name another one by now."""
        self._hear()
        ended, self._ended = self._ended, []
        return ended

    def failed(self) -> Sequence[int]:
        """How each handshake failed since the last call: ZeroMQ's events."""
        self._hear()
        failed = list(self._failed)
        self._failed.clear()
        return failed

    def count_failed(self) -> int:
        """How many handshakes have failed since the last call."""
        self._hear()
        failures, self._failures = self._failures, 0
        return failures

    def close(self) -> None:
        """Before its socket is closed."""
        self._watched.disable_monitor()
        self._socket.close()

    def _hear(self) -> None:
        if not self.is_told:
            return
        self.is_told = False
        while int(self._socket.getsockopt(_EVENTS)) & _READABLE:
            told, _ = self._socket.recv_multipart(zmq.NOBLOCK)
            event, descriptor = _EVENT.unpack(told)
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_standing = True
            elif event == zmq.EVENT_ACCEPTED:
                self.standing[descriptor] = StandingConnection()
            elif event == zmq.EVENT_DISCONNECTED:
                self.standing.pop(descriptor, None)
                if self._is_standing or not self._counts_handshakes:
                    self._ended.append(descriptor)
                self._is_standing = False
            else:
                self._failed.append(event)
                self._failures += 1
