"""A margin learned from what came late: so wide that all but a chosen share are in time, and no wider.

Whoever plans for an end keeps something back for what cannot be known: a stall, a queue, a busy core. Where each of
several roles keeps back the worst it has seen, the sum of the worsts is kept back, which never happens at once, and
what remains of a tight budget is too little for a batch that pays. So a margin follows the share that really came
late at its own end of the way, whatever the reason was (a quantile by stochastic approximation: Robbins and
Monro 1951).
"""

from __future__ import annotations

from typing import Final

STEP_MS: Final = 1.0  # a margin widens by so much at most for one that was late


class Margin:
    """In ms, at least 0. Nothing in it looks at a clock, so on a virtual one without lateness it stays 0."""

    __slots__ = ("_late_share", "ms")

    def __init__(self, late_share: float, start_ms: float = 0.0) -> None:
        self.ms = start_ms
        self._late_share = late_share

    def note(self, late_ms: float, most_ms: float) -> None:
        """One came so much too late; 0 or less: in time."""
        if late_ms > 0.0:
            self.note_late(late_ms, most_ms)
        else:
            self.note_in_time()

    def note_late(self, late_ms: float, most_ms: float) -> None:
        """One came so much too late. What no margin up to `most_ms` would have saved teaches nothing."""
        if late_ms + self.ms <= most_ms:
            self.ms += min(late_ms, STEP_MS)

    def note_in_time(self, count: int = 1) -> None:
        """So many came in time, or were not even tried because the margin left no time for them."""
        if self.ms:
            self.ms = max(0.0, self.ms - STEP_MS * self._late_share * count)


class LearnedWay:
    """What a way takes, for whoever plans for its end, in ms: its mean as a mean, and a margin for the rest.

    `start_ms`: a guess that counts as one sample; without one nothing is planned with before the first. The margin
    follows the ends: about one answer of 400 comes late (more, where by less than 1 ms: ADR 0120), and with what is
    dropped on purpose less than 1 % is lost.
    """

    SHARE_MAX: Final = 0.25
    """Of a budget: nobody keeps back more, and lateness that would ask for more teaches nothing."""

    _LATE_SHARE: Final = 1 / 400
    _MEMORY: Final = 0.1

    def __init__(self, start_ms: float | None = None) -> None:
        self.mean_ms = start_ms or 0.0
        self._samples = 0 if start_ms is None else 1
        self._margin = Margin(self._LATE_SHARE)

    @property
    def planned_ms(self) -> float:
        """What to plan with."""
        return self.mean_ms + self._margin.ms

    def note(self, took_ms: float) -> None:
        """It took this long once; clocks that disagree may say less than nothing."""
        self._samples += 1
        self.mean_ms += max(self._MEMORY, 1 / self._samples) * (max(0.0, took_ms) - self.mean_ms)

    def note_end(self, late_ms: float, budget_ms: float) -> None:
        """One answer was so much too late at the end; 0 or less: in time."""
        self._margin.note(late_ms, self.SHARE_MAX * budget_ms - self.mean_ms)

    def note_in_time(self, count: int) -> None:
        """So many would have been."""
        self._margin.note_in_time(count)
