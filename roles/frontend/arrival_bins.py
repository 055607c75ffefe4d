"""When a model's requests came in the last minute: counts in bins of 5 ms, in memory that does not grow with them."""

from __future__ import annotations

from array import array
from typing import Final

BIN_MS: Final = 5.0
BINS: Final = 12_000


class ArrivalBins:
    """Of one model at one frontend."""

    __slots__ = ("_counts", "_newest")

    def __init__(self) -> None:
        self._counts = array("I", bytes(4 * BINS))
        self._newest: int | None = None

    def note(self, now_ms: float) -> None:
        """One came. `now_ms` never goes back."""
        newest = int(now_ms // BIN_MS)
        if newest != self._newest:
            self._turn_to(newest)
        self._counts[newest % BINS] += 1

    def listed(self, now_ms: float) -> tuple[int, ...]:
        """Of the last minute, oldest first; the last bin is of now."""
        self._turn_to(int(now_ms // BIN_MS))
        assert self._newest is not None, "turned to it"
        at = self._newest % BINS + 1
        return (*self._counts[at:], *self._counts[:at])

    def _turn_to(self, newest: int) -> None:
        """What was a minute ago is no more."""
        former, self._newest = self._newest, newest
        if former is None or former == newest:
            return
        if newest - former >= BINS:
            self._counts = array("I", bytes(4 * BINS))
            return
        for stale in range(former + 1, newest + 1):
            self._counts[stale % BINS] = 0
