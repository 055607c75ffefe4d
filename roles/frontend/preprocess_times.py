"""How long preprocessing takes, measured for each model: a run is announced as ready after its p95."""

from __future__ import annotations

import bisect
from collections import deque

_PREPROCESS_START_MS = 10.0  # a photograph of a megapixel, decoded and resized on one core
_PREPROCESS_WINDOW = 64


class PreprocessTimes:
    """The p95 of the last preprocessing times of one model, from asked to ready."""

    def __init__(self) -> None:
        self._window: deque[float] = deque()
        self._sorted: list[float] = []

    def note(self, took_ms: float) -> None:
        """One took this long."""
        if len(self._window) == _PREPROCESS_WINDOW:
            del self._sorted[bisect.bisect_left(self._sorted, self._window.popleft())]
        self._window.append(took_ms)
        bisect.insort(self._sorted, took_ms)

    @property
    def p95_ms(self) -> float:
        """A guess before the first one."""
        if not self._sorted:
            return _PREPROCESS_START_MS
        return self._sorted[int(0.95 * (len(self._sorted) - 1) + 0.5)]
