"""What became of a stage's tasks, counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StageTally:
    """Of one stage, since the start. Times are sums over those that were answered: until they ran, and how long they ran."""

    asked: int = 0
    answered: int = 0
    dropped: int = 0
    cancelled: int = 0
    waited_ms: float = 0.0
    run_ms: float = 0.0

    def note_answered(self, waited_ms: float, run_ms: float) -> None:
        """One was."""
        self.answered += 1
        self.waited_ms += waited_ms
        self.run_ms += run_ms

    def add(self, other: StageTally) -> None:
        """What became of others, too."""
        self.asked += other.asked
        self.answered += other.answered
        self.dropped += other.dropped
        self.cancelled += other.cancelled
        self.waited_ms += other.waited_ms
        self.run_ms += other.run_ms
