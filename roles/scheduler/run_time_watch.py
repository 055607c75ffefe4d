"""Whether slices keep the run times that were promised for them (iGniter section 4.2).

Every look a slice's p99 of measured over promised run time is judged. iGniter: an interval of 1 s is bad, and the
half second after it too; then a larger slice takes over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence

from fabric.ids import ModelId, SliceId
from fabric.messages import ReplicaHint
from policies.placement.common.base import WHOLE_PERCENT
from roles.scheduler.fleet import SliceRecord

JUDGED_EVERY_MS = 1_000.0
JUDGED_AGAIN_MS = 500.0
SLACK = 1.10  # 10 % is the largest error of iGniter's predictions (section 5.2)
BATCHES_MAX = 10_000  # are kept of a slice: nobody looks while a plan is made or carried out
BATCHES_MIN = 5  # of fewer in an interval one hiccup would be the p99


class RunTimeWatch:
    """Of slices with a limited share: others have nothing to grow by."""

    def __init__(self) -> None:
        self._ratios: dict[SliceId, deque[float]] = {}
        self._doubted_at_ms: dict[SliceId, float] = {}
        self._judged_at_ms: dict[SliceId, float] = {}
        self._promised_ms: dict[tuple[SliceId, ModelId], tuple[int, float]] = {}

    def promise(self, slice_id: SliceId, hints: Sequence[ReplicaHint]) -> None:
        """What the plan says of a slice; where it says nothing, l(b) is the promise."""
        for hint in hints:
            if hint.predicted_ms is not None and hint.batch is not None:
                self._promised_ms[slice_id, hint.model_id] = hint.batch, hint.predicted_ms
            else:
                self._promised_ms.pop((slice_id, hint.model_id), None)

    def note(self, record: SliceRecord, model_id: ModelId, ran: int, exec_ms: float) -> None:
        """A batch of `ran` took so long there."""
        spec = record.spec
        if spec.share_percent is None or spec.share_percent >= WHOLE_PERCENT:
            return
        promised_ms = record.exec_ms(model_id, ran)
        if not promised_ms:
            return  # the slice's batches have become smaller since, and nothing is promised of larger ones
        planned = self._promised_ms.get((spec.slice_id, model_id))
        if planned is not None and ran <= planned[0]:
            promised_ms = max(promised_ms, planned[1])
        ratios = self._ratios.get(spec.slice_id)
        if ratios is None:
            ratios = self._ratios[spec.slice_id] = deque(maxlen=BATCHES_MAX)
        ratios.append(exec_ms / promised_ms)

    def broken(self, now_ms: float) -> Mapping[SliceId, float]:
        """Slices that broke their promise for a second and again for half a second, with their p99 ratio."""
        found: dict[SliceId, float] = {}
        for slice_id, ratios in self._ratios.items():
            doubted = slice_id in self._doubted_at_ms
            since_ms = self._judged_at_ms.setdefault(slice_id, now_ms)
            if now_ms - since_ms < (JUDGED_AGAIN_MS if doubted else JUDGED_EVERY_MS):
                continue
            self._judged_at_ms[slice_id] = now_ms
            p99 = _p99(ratios) if len(ratios) >= BATCHES_MIN else 0.0
            ratios.clear()
            if p99 <= SLACK:
                self._doubted_at_ms.pop(slice_id, None)
            elif doubted:
                del self._doubted_at_ms[slice_id]
                found[slice_id] = p99
            else:
                self._doubted_at_ms[slice_id] = now_ms
        return found

    def forget(self, slice_id: SliceId) -> None:
        """The slice is gone."""
        self._ratios.pop(slice_id, None)
        self._doubted_at_ms.pop(slice_id, None)
        self._judged_at_ms.pop(slice_id, None)
        for key in [key for key in self._promised_ms if key[0] == slice_id]:
            del self._promised_ms[key]


def _p99(values: Collection[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]
