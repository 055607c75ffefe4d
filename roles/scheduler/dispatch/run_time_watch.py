"""Whether slices keep the run times that were promised for them (iGniter section 4.2).

Every look a slice's p99 of measured over promised run time is judged. iGniter: an interval of 1 s is bad, and the
half second after it too; then a larger slice takes over. Of up to 100 batches in an interval the p99 is the longest one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from fabric.ids import ModelId, SliceId
from policies.placement.common.base import WHOLE_PERCENT
from roles.scheduler.fleet import SliceRecord

JUDGED_EVERY_MS = 1_000.0
JUDGED_AGAIN_MS = 500.0
TOLERANCE = 1.10  # 10 % is the largest error of iGniter's predictions (section 5.2)
BATCHES_MAX = 10_000  # are kept of a slice: nobody looks while a plan is made or carried out
BATCHES_MIN = 5  # of fewer in an interval too little is known


@dataclass(slots=True)
class _Interval:
    """What a slice's batches took since it was judged, as shares of what was promised."""

    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=BATCHES_MAX))
    since_ms: float | None = None
    is_doubted: bool = False
    """The interval before this one was bad."""


class RunTimeWatch:
    """Of slices with a limited share: others have nothing to grow by.

    A promise is what the plan predicts of a replica; where it says nothing, l(b) is.
    """

    def __init__(self) -> None:
        self._intervals: dict[SliceId, _Interval] = {}

    def note(self, record: SliceRecord, model_id: ModelId, ran: int, exec_ms: float) -> None:
        """A batch of `ran` took so long there."""
        spec = record.spec
        if spec.share_percent is None or spec.share_percent >= WHOLE_PERCENT:
            return
        promised_ms = record.exec_ms(model_id, ran)
        if not promised_ms:
            return  # the slice's batches have become smaller since, and nothing is promised of larger ones
        for hint in record.hints:
            if hint.model_id == model_id and hint.predicted_ms is not None and ran <= (hint.batch or 0):
                promised_ms = max(promised_ms, hint.predicted_ms)
        interval = self._intervals.get(spec.slice_id)
        if interval is None:
            interval = self._intervals[spec.slice_id] = _Interval()
        interval.ratios.append(exec_ms / promised_ms)

    def broken(self, now_ms: float) -> Mapping[SliceId, float]:
        """Slices that broke their promise for a second and again for half a second, with their p99 ratio."""
        found: dict[SliceId, float] = {}
        for slice_id, interval in self._intervals.items():
            if interval.since_ms is None:
                interval.since_ms = now_ms
            if now_ms - interval.since_ms < (JUDGED_AGAIN_MS if interval.is_doubted else JUDGED_EVERY_MS):
                continue
            interval.since_ms = now_ms
            p99 = _p99(interval.ratios) if len(interval.ratios) >= BATCHES_MIN else 0.0
            interval.ratios.clear()
            is_bad = p99 > TOLERANCE
            if is_bad and interval.is_doubted:
                found[slice_id] = p99
            interval.is_doubted = is_bad and not interval.is_doubted
        return found

    def forget(self, slice_id: SliceId) -> None:
        """The slice is gone."""
        self._intervals.pop(slice_id, None)


def _p99(values: Collection[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]
