"""Arrival rate over a sliding window, the time passed in.

Symphony's implementation samples every 50 ms and takes the plain mean of the last 100 samples, i.e. of 5 s.
Every arrival that comes to the queue counts, also one that is dropped later; of one whose inputs are being prepared when they are ready.
"""

from __future__ import annotations

import math

SAMPLE_MS = 50.0
SAMPLES = 100


class RateMeter:
    """Counts arrivals; O(1) amortised per arrival, memory of `samples` integers.

    Sampling starts with the first arrival, so a model that has just come is not averaged with silence.
    `version` changes whenever the rate may have changed: what is derived from it is worth computing again.
    A caller in a hurry may raise `counted` itself before `due_at_ms`, when the current sample ends (-inf: none
    has begun).
    """

    __slots__ = (
        "_filled",
        "_position",
        "_ring",
        "_sample_ms",
        "_sum",
        "counted",
        "due_at_ms",
        "version",
    )

    def __init__(self, sample_ms: float = SAMPLE_MS, samples: int = SAMPLES) -> None:
        self._sample_ms = sample_ms
        self._ring: list[float] = [0] * samples
        self._position = 0
        self._filled = 0
        self._sum: float = 0
        self.counted = 0
        self.due_at_ms = -math.inf
        self.version = 0

    def add(self, count: int, now_ms: float) -> None:
        """`count` requests arrived at `now_ms`."""
        if now_ms >= self.due_at_ms:
            self._roll(now_ms)
        self.counted += count

    def begin_at(self, rate_rps: float, now_ms: float) -> None:
        """Go on as one that has measured that rate until now."""
        each = rate_rps * self._sample_ms / 1000.0
        self._ring = [each] * len(self._ring)
        self._filled = len(self._ring)
        self._sum = each * self._filled
        self.counted = 0
        self.due_at_ms = now_ms + self._sample_ms
        self.version += 1

    def rate_rps(self, now_ms: float) -> float | None:
        """Mean over the completed samples; None before the first one is complete."""
        if now_ms >= self.due_at_ms > -math.inf:
            self._roll(now_ms)
        if not self._filled:
            return None
        return 1000.0 * self._sum / (self._filled * self._sample_ms)

    def _roll(self, now_ms: float) -> None:
        due_at_ms = self.due_at_ms
        if due_at_ms == -math.inf:
            self.due_at_ms = now_ms + self._sample_ms
            return
        ring = self._ring
        size = len(ring)
        done = int((now_ms - due_at_ms) // self._sample_ms) + 1
        # After a silence longer than the window every sample in it is zero: no need to write them twice.
        for _ in range(min(done, size + 1)):
            self._sum += self.counted - ring[self._position]
            ring[self._position] = self.counted
            self.counted = 0
            self._position = (self._position + 1) % size
            self._filled = min(self._filled + 1, size)
        if done > size or self._sum < 0.0:
            self._sum = 0  # nothing came: what is left is rounding
        self.due_at_ms = due_at_ms + done * self._sample_ms
        self.version += 1
