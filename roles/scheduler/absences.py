"""When slices that had been ready were not: for operators, who ask later why requests found none."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from fabric.ids import ModelId, SliceId
from fabric.limits import DURATION_MAX_MS, ago_ms
from fabric.messages import SliceAbsence

ABSENCES_MAX: Final = 256
"""Remembered, and in one answer."""
MODELS_TOLD_MAX: Final = 4_096
"""Names of models in one answer, in all."""


@dataclass(slots=True)
class _Absence:
    slice_id: SliceId
    models: tuple[ModelId, ...]
    """That it should host: it may be forgotten before anybody asks."""
    reason: str
    began_at_ms: float
    ended_at_ms: float | None = None


class Absences:
    """Of all slices, since this scheduler became active."""

    def __init__(self) -> None:
        self._open: dict[SliceId, _Absence] = {}
        self._ended: deque[_Absence] = deque(maxlen=ABSENCES_MAX)

    def begin(self, slice_id: SliceId, models: tuple[ModelId, ...], reason: str, now_ms: float) -> None:
        """It was ready, and takes no more batches."""
        self._open.setdefault(slice_id, _Absence(slice_id, models, reason, now_ms))

    def explain(self, slice_id: SliceId, reason: str) -> None:
        """Its agent knows better what a lost connection was."""
        absence = self._open.get(slice_id)
        if absence is not None and reason:
            absence.reason = reason

    def end(self, slice_id: SliceId, now_ms: float) -> None:
        """It takes batches again, or there is no such slice any more."""
        absence = self._open.pop(slice_id, None)
        if absence is not None and absence.began_at_ms < now_ms:
            absence.ended_at_ms = now_ms
            self._ended.append(absence)

    def listed(self, now_ms: float) -> tuple[SliceAbsence, ...]:
        """The newest, those that last at the end. Of what ended longer ago than a message can say nobody asks."""
        told = [
            one
            for one in (*self._ended, *self._open.values())
            if one.ended_at_ms is None or now_ms - one.ended_at_ms <= DURATION_MAX_MS
        ]
        found: list[SliceAbsence] = []
        names_left = MODELS_TOLD_MAX
        for one in told[: -ABSENCES_MAX - 1 : -1]:
            models = one.models if len(one.models) <= names_left else ()
            names_left -= len(models)
            ended_ago_ms = None if one.ended_at_ms is None else ago_ms(now_ms, one.ended_at_ms)
            found.append(
                SliceAbsence(one.slice_id, one.reason, ago_ms(now_ms, one.began_at_ms), ended_ago_ms, models)
            )
        return tuple(reversed(found))
