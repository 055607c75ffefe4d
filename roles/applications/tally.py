"""What became of a stage's tasks, counted."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from typing import Protocol


class AskedTask(Protocol):
    """When a task was asked, and when it is due."""

    @property
    def asked_at_ms(self) -> float:
        """On the clock of the frontend."""
        ...

    @property
    def due_at_ms(self) -> float:
        """On the same clock."""
        ...


@dataclass(slots=True)
class StageTally:
    """Of one stage, since the start. Times are sums over those that were answered: until they ran, and how long they ran.

    `fates`: of each task that ended, when it was asked, when it was due and when it was answered (NaN: never), in ms, one after
    the other. None where nobody wants them: a frontend serves for months.
    """

    asked: int = 0
    answered: int = 0
    dropped: int = 0
    cancelled: int = 0
    waited_ms: float = 0.0
    run_ms: float = 0.0
    fates: array[float] | None = None

    def note_answered(self, task: AskedTask, answered_at_ms: float, waited_ms: float, run_ms: float) -> None:
        """One was."""
        self.answered += 1
        self.waited_ms += waited_ms
        self.run_ms += run_ms
        self._note_fate(task, answered_at_ms)

    def note_dropped(self, task: AskedTask) -> None:
        """The scheduler gave one up."""
        self.dropped += 1
        self._note_fate(task)

    def note_cancelled(self, task: AskedTask) -> None:
        """One was withdrawn, as its application's request was lost."""
        self.cancelled += 1
        self._note_fate(task)

    def _note_fate(self, task: AskedTask, answered_at_ms: float = math.nan) -> None:
        if self.fates is not None:
            self.fates.extend((task.asked_at_ms, task.due_at_ms, answered_at_ms))

    def add(self, other: StageTally) -> None:
        """What became of others, too."""
        self.asked += other.asked
        self.answered += other.answered
        self.dropped += other.dropped
        self.cancelled += other.cancelled
        self.waited_ms += other.waited_ms
        self.run_ms += other.run_ms
        if self.fates is not None and other.fates is not None:
            self.fates.extend(other.fates)
