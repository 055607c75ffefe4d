"""Which connections of a socket have ended: ZeroMQ says so at once, on a socket of its own."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from typing import Final

import zmq

_EVENT: Final = struct.Struct("=HI")  # the event's number, and the descriptor of the connection
_NAMES: Final = itertools.count(1)


class ConnectionMonitor:
    """Hears of established connections that end, by their descriptors. Belongs to the thread of its socket.

    The end of a process is seen this way as soon as its kernel closes the connection. A host that vanishes closes
    nothing: only heartbeats tell of that.
    """

    def __init__(self, watched: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]]) -> None:
        address = f"inproc://connections-{next(_NAMES)}"
        watched.monitor(address, zmq.EVENT_DISCONNECTED)
        self._watched = watched
        self._socket = context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        # No bound: ZeroMQ's own thread would wait for us, who may wait for that thread. An event is a few bytes, and
        # there are no more of them than connections that were made.
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(address)

    def fileno(self) -> int:
        """Readable when a connection may have ended."""
        return int(self._socket.getsockopt(zmq.FD))

    def ended(self) -> Iterator[int]:
        """The descriptor of each connection that has ended since the last call; it may name another one by now."""
        while True:
            try:
                event, _ = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield _EVENT.unpack(event)[1]

    def close(self) -> None:
        """Before its socket is closed."""
        self._watched.disable_monitor()
        self._socket.close()
