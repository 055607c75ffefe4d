"""When a model's requests came in the last minute, as counts in bins: memory that does not grow with them."""

from __future__ import annotations

from array import array
from typing import Final

MINUTE_MS: Final = 60_000.0
ARRIVAL_BIN_MS: Final = 5.0
BAD_BIN_MS: Final = 1_000.0
_COUNT_MAX: Final = 65_535  # of a bin: 13 million a second


class MinuteBins:
    """Counts of the last minute; nothing is kept before the first one."""

    __slots__ = ("_bins", "_counts", "_newest", "bin_ms")

    def __init__(self, bin_ms: float) -> None:
        self.bin_ms = bin_ms
        self._bins = round(MINUTE_MS / bin_ms)
        self._counts = array("H")
        self._newest = 0

    def note(self, now_ms: float) -> None:
        """One more. `now_ms` never goes back."""
        newest = self.number(now_ms)
        if newest != self._newest or not self._counts:
            self._turn_to(newest)
        at = newest % self._bins
        if self._counts[at] < _COUNT_MAX:
            self._counts[at] += 1

    def listed(self, now_ms: float) -> tuple[int, ...]:
        """Oldest first; the last bin is of now."""
        self._turn_to(self.number(now_ms))
        at = self._newest % self._bins + 1
        return (*self._counts[at:], *self._counts[:at])

    def number(self, now_ms: float) -> int:
        """Of the bin of now, counted from the clock's zero."""
        return int(now_ms // self.bin_ms)

    def _turn_to(self, newest: int) -> None:
        """What was a minute ago is no more."""
        former, self._newest = self._newest, newest
        if not self._counts or newest - former >= self._bins:
            self._counts = array("H", bytes(2 * self._bins))
            return
        for stale in range(former + 1, newest + 1):
            self._counts[stale % self._bins] = 0
