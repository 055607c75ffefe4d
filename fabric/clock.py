"""The one place that reads time. Everything inside is float milliseconds on some clock's own zero."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where moments come from: `now_ms` never goes backwards."""

    def now_ms(self) -> float:
        """Milliseconds since this clock's own zero."""
        ...


class MonotonicClock:
    """The machine's monotonic clock. Its zero means nothing to another machine."""

    __slots__ = ()

    def now_ms(self) -> float:
        """Milliseconds of CLOCK_MONOTONIC."""
        return time.monotonic() * 1e3


class WallClock:
    """The time of day, for people and to compare with another host's. It may jump; nothing waits by it."""

    __slots__ = ()

    def now_ms(self) -> float:
        """Milliseconds since 1970."""
        return time.time() * 1e3

    def time_of_day(self) -> str:
        """Where this process is, such as 14:05:09."""
        return time.strftime("%H:%M:%S")


class VirtualClock:
    """It says what it was told: everything that is played on virtual time goes by one."""

    __slots__ = ("_now_ms",)

    def __init__(self, now_ms: float) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> float:
        """The moment of what happens now."""
        return self._now_ms

    def advance(self, at_ms: float) -> None:
        """Never backwards."""
        self._now_ms = max(self._now_ms, at_ms)
