"""Events that any thread leaves for the driver's thread, with a descriptor that ends its sleep."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from typing import Generic, TypeVar

EventT = TypeVar("EventT")


class Mailbox(Generic[EventT]):
    """A source: `post` from any thread, `take` on the driver's.

    An event can be taken before its wake-up is written; the descriptor then becomes readable for nothing, and a
    driver that asks only for events would spin on it. So both are counted, and `has_more` stays true until
    every wake-up has been read as well.
    """

    def __init__(self) -> None:
        self._events: deque[EventT] = deque()
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._posted = 0
        self._woken = 0
        self._is_closed = False

    def post(self, event: EventT) -> None:
        """Leave an event and wake the driver."""
        with self._lock:
            if self._is_closed:
                return
            self._posted += 1
            self._events.append(event)
            os.eventfd_write(self._descriptor, 1)

    def fileno(self) -> int:
        """Readable when an event was posted."""
        return self._descriptor

    @property
    def has_more(self) -> bool:
        """Whether something is left to take or to read."""
        return bool(self._events) or self._woken != self._posted

    @property
    def wake_at_ms(self) -> float | None:
        """Never by itself: the descriptor wakes."""
        return None

    def take(self, limit: int, now_ms: float) -> list[EventT]:  # noqa: ARG002  a Source's signature
        """At most `limit` events."""
        with contextlib.suppress(BlockingIOError):
            self._woken += os.eventfd_read(self._descriptor)
        return [self._events.popleft() for _ in range(min(limit, len(self._events)))]

    def forget(self) -> None:
        """Nobody wants what was left so far."""
        with self._lock:
            self._events.clear()

    def close(self) -> None:
        """Give the descriptor back; what a thread that would not end posts later goes nowhere."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._descriptor)
