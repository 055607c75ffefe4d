"""The timers of a discipline: a heap of moments with lazy deletion. What is armed anew leaves its former entry behind."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import Any, Final, Generic, Protocol, TypeVar

from policies.batching.base import NEVER_MS

ENTRIES_MAX: Final = (
    256  # of a heap before it is looked through: below one that stays on top outdated ones pile up
)


class Armed(Protocol):
    """`armed_at_ms`: the moment of its only entry that counts."""

    armed_at_ms: float


ArmedT = TypeVar("ArmedT", bound=Armed)


EntryT = TypeVar("EntryT", bound=tuple[Any, ...])


def keep_first_of_each(heap: list[EntryT], counting: Iterable[EntryT]) -> int:
    """Keep of a heap's entries that still count the first of each target, the last element. How many may lie there before the next time."""
    of_target = {id(entry[-1]): entry for entry in sorted(counting, reverse=True)}
    heap[:] = sorted(of_target.values())
    return max(ENTRIES_MAX, 2 * len(heap))


class Timed(Generic[ArmedT]):
    """`_timers`: moment, serial number, target; `_arm` pushes an entry."""

    def __init__(self) -> None:
        self._timers: list[tuple[float, int, ArmedT]] = []
        self._timers_max = ENTRIES_MAX
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

    def _arm(self, target: ArmedT, at_ms: float) -> None:
        """Its timer is due then, and not when it was before; NEVER_MS: not at all."""
        if at_ms == target.armed_at_ms:
            return
        target.armed_at_ms = at_ms
        if at_ms == NEVER_MS:
            return
        timers = self._timers
        if len(timers) >= self._timers_max:
            counting = (entry for entry in timers if entry[0] == entry[2].armed_at_ms)
            self._timers_max = keep_first_of_each(timers, counting)
        self._serial += 1
        heappush(timers, (at_ms, self._serial, target))
