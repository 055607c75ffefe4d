"""What streams that were closed still have to send: it leaves in the background, for a moment, and never holds up a loop.

ZeroMQ does the same for its sockets (linger).
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections import deque
from dataclasses import dataclass

from fabric.clock import Clock, MonotonicClock
from fabric.sockets.local_stream import FLUSH_BYTES, send_waiting

_LOOK_EVERY_MS = 10.0  # for streams that joined meanwhile


@dataclass(slots=True)
class _Leaving:
    connected: socket.socket
    unsent: deque[list[memoryview]]
    until_ms: float


class BackgroundFlush:
    """A thread that is there while something is to leave. It is no daemon: an orderly end of the process waits for it."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self._lock = threading.Lock()
        self._leaving: list[_Leaving] = []
        self._is_running = False

    def begin_anew(self) -> None:
        """In a fork, which has none of its parent's threads: what these are to send is theirs to send."""
        self._lock = threading.Lock()
        self._is_running = False
        for one in self._leaving:
            one.connected.close()
        self._leaving.clear()

    def take(self, connected: socket.socket, unsent: deque[list[memoryview]], within_ms: float) -> None:
        """Send that, as far as the other end reads it in time, then close the socket."""
        with self._lock:
            self._leaving.append(_Leaving(connected, unsent, self._clock.now_ms() + within_ms))
            if not self._is_running:
                self._is_running = True
                try:
                    threading.Thread(target=self._run, name="flush").start()
                except RuntimeError:  # the process has ended but for this, or may have no more threads
                    self._is_running = False
                    self._leaving.pop().connected.close()

    def _run(self) -> None:
        while True:
            with self._lock:
                leaving = self._leaving.copy()
                if not leaving:
                    self._is_running = False
                    return
            room = select.poll()
            for one in leaving:
                room.register(one.connected, select.POLLOUT)
            room.poll(_LOOK_EVERY_MS)
            now_ms = self._clock.now_ms()
            over = [one for one in leaving if _has_left(one) or one.until_ms <= now_ms]
            with self._lock:
                self._leaving = [one for one in self._leaving if one not in over]
            for one in over:
                one.connected.close()


def _has_left(one: _Leaving) -> bool:
    """Send of it what can be sent; whether that was all, or nobody is there to have more."""
    try:
        send_waiting(one.connected, one.unsent, FLUSH_BYTES)
    except OSError:
        return True
    return not one.unsent


IN_BACKGROUND = BackgroundFlush()
"""The process's."""


os.register_at_fork(after_in_child=IN_BACKGROUND.begin_anew)
