"""The timers of a discipline: a heap of moments with lazy deletion. What is armed anew leaves its former entry behind."""

from __future__ import annotations

from heapq import heappop
from typing import Generic, Protocol, TypeVar


class Armed(Protocol):
    """`armed_at_ms`: the moment of its only entry that counts."""

    armed_at_ms: float


ArmedT = TypeVar("ArmedT", bound=Armed)


class Timed(Generic[ArmedT]):
    """`_timers`: moment, serial number, target. Who arms a target sets its `armed_at_ms` and pushes an entry."""

    def __init__(self) -> None:
        self._timers: list[tuple[float, int, ArmedT]] = []
        self._serial = 0

    @property
    def wake_at_ms(self) -> float | None:
        """See `Discipline`."""
        timers = self._timers
        while timers:
            if timers[0][0] == timers[0][2].armed_at_ms:
                return timers[0][0]
            heappop(timers)
        return None
