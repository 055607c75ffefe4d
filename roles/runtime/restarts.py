"""When to start a failed process again, and when to stop trying. Sans-IO: moments in, moments out."""

from __future__ import annotations

from collections import deque

from msgspec import Struct


class RestartRule(Struct, frozen=True):
    """At once the first time, then exponential back-off with an end.

    One failure is an accident, and every moment without the process costs requests. From the second failure within a
    window on there is a pause, so that a process that dies at once does not eat a core; five failures in a minute are
    no accident any more. Time in which a process was only getting ready
    is no part of that minute: who hangs at its start for two would be started for ever.
    """

    first_ms: float = 100.0
    longest_ms: float = 5_000.0
    failures_max: int = 5
    window_ms: float = 60_000.0


class Restarts:
    """The failures of one process, over all its starts."""

    __slots__ = ("_failed_at_ms", "_in_a_row", "_rule", "_wasted_ms")

    def __init__(self, rule: RestartRule) -> None:
        self._rule = rule
        self._failed_at_ms: deque[float] = deque(maxlen=rule.failures_max)
        self._in_a_row = 0
        self._wasted_ms = 0.0

    def note_failure(
        self, now_ms: float, wasted_ms: float = 0.0, *, may_give_up: bool = True
    ) -> float | None:
        """The moment of the next start; None: give up, which is said only where that `may_give_up`.

        A quiet window forgives: the next start is at once again. `wasted_ms`: for how long it ran without
        ever being ready.
        """
        self._wasted_ms += wasted_ms
        at_ms = now_ms - self._wasted_ms
        if self._failed_at_ms and at_ms - self._failed_at_ms[-1] > self._rule.window_ms:
            self._in_a_row = 0
        self._failed_at_ms.append(at_ms)
        self._in_a_row += 1
        is_full = len(self._failed_at_ms) == self._rule.failures_max
        if may_give_up and is_full and at_ms - self._failed_at_ms[0] <= self._rule.window_ms:
            return None
        if self._in_a_row == 1:
            return now_ms
        # The exponent is bounded before it is raised: a float overflows at 2 ** 1024.
        doubled_ms = self._rule.first_ms * 2.0 ** min(self._in_a_row - 2, 30)
        return now_ms + min(doubled_ms, self._rule.longest_ms)

    @property
    def failures(self) -> int:
        """How many are remembered."""
        return len(self._failed_at_ms)
