"""When slices that had been ready were not: for operators, who ask later why requests found none."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from fabric.ids import SliceId
from fabric.messages import SliceAbsence

ABSENCES_MAX: Final = 256
"""Remembered, and in one answer."""


@dataclass(slots=True)
class _Absence:
    slice_id: SliceId
    reason: str
    began_at_ms: float
    ended_at_ms: float | None = None


class Absences:
    """Of all slices, since this scheduler became active."""

    def __init__(self) -> None:
        self._open: dict[SliceId, _Absence] = {}
        self._ended: deque[_Absence] = deque(maxlen=ABSENCES_MAX)

    def begin(self, slice_id: SliceId, reason: str, now_ms: float) -> None:
        """It was ready, and takes no more batches."""
        self._open.setdefault(slice_id, _Absence(slice_id, reason, now_ms))

    def explain(self, slice_id: SliceId, reason: str) -> None:
        """Its agent knows better what a lost connection was."""
        absence = self._open.get(slice_id)
        if absence is not None and reason:
            absence.reason = reason

    def end(self, slice_id: SliceId, now_ms: float) -> None:
        """It takes batches again."""
        absence = self._open.pop(slice_id, None)
        if absence is not None and absence.began_at_ms < now_ms:
            absence.ended_at_ms = now_ms
            self._ended.append(absence)

    def forget(self, slice_id: SliceId) -> None:
        """There is no such slice any more, so it is not away."""
        self._open.pop(slice_id, None)

    def listed(self, now_ms: float) -> tuple[SliceAbsence, ...]:
        """The newest, those that last at the end."""
        newest = [*self._ended, *self._open.values()][-ABSENCES_MAX:]
        return tuple(
            SliceAbsence(
                one.slice_id,
                one.reason,
                max(0.0, now_ms - one.began_at_ms),
                None if one.ended_at_ms is None else max(0.0, now_ms - one.ended_at_ms),
            )
            for one in newest
        )
