"""Models that hang or end their worker's process: a slice is served without one that has done so three times.

What a model does to its process its neighbours on the slice suffer too. One accident is nobody's fault; who does it
again and again is left out, until its own specification or its slice's share changes, or it was unwanted for a while, or, where
nothing is left of its slice, until that is tried again.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from fabric.ids import ModelId, SliceId
from fabric.messages import LeftOut, ModelSpec, SliceSpec

STRIKES_MAX = 3
FORGIVEN_AFTER_MS = 600_000.0  # who hangs once a day costs its slice some seconds a day


@dataclass(slots=True)
class _Record:
    spec: SliceSpec
    strikes: int
    last_at_ms: float
    reason: str


class Suspects:
    """Of the wanted slices only, so there are no more than models on them."""

    def __init__(self) -> None:
        self._records: dict[tuple[SliceId, ModelId], _Record] = {}

    def note(self, spec: SliceSpec, model_id: ModelId, reason: str, now_ms: float) -> int:
        """It was this model's doing; how often by now."""
        key = spec.slice_id, model_id
        record = self._records.get(key)
        if record is None or now_ms - record.last_at_ms > FORGIVEN_AFTER_MS:
            record = self._records[key] = _Record(spec, 0, now_ms, reason)
        record.strikes += 1
        record.last_at_ms, record.reason = now_ms, reason
        return record.strikes

    def give_another_try(self, slice_ids: Container[SliceId]) -> None:
        """Their models that are left out may load once more: who does it again is left out again."""
        for (slice_id, _), record in self._records.items():
            if slice_id in slice_ids:
                record.strikes = min(record.strikes, STRIKES_MAX - 1)

    def left_out(self, slices: Container[SliceId]) -> tuple[LeftOut, ...]:
        """Models that these slices are served without."""
        return tuple(
            LeftOut(
                slice_id, model_id, f"left out after it ended its worker {STRIKES_MAX} times: {one.reason}"
            )
            for (slice_id, model_id), one in self._records.items()
            if slice_id in slices and one.strikes >= STRIKES_MAX
        )

    def keep(self, wanted: Mapping[SliceId, SliceSpec]) -> None:
        """Forget models that are wanted no more where they were, or otherwise."""
        for slice_id, model_id in list(self._records):
            former, spec = self._records[slice_id, model_id].spec, wanted.get(slice_id)
            is_same = spec is not None and former.is_same_but_models(spec)
            if not is_same or _model_of(spec, model_id) != _model_of(former, model_id):
                del self._records[slice_id, model_id]


def _model_of(spec: SliceSpec | None, model_id: ModelId) -> ModelSpec | None:
    return next((one for one in spec.models if one.model_id == model_id), None) if spec is not None else None
