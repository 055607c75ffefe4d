"""What it took to start slices, and so when those that start now will be ready.

A slice's own last start says best what its next one takes; of a slice that has not started yet the last starts of its
models say it, the slowest of them. Who needs more than twice that may need as long again as it has taken by now: requests wait
for it by that, the longer it takes the fewer.

A slice that can only start when another one has ended is expected from the moment at which that other one gets no more batches.

A slice whose agent says that it is ready has not to start: its worker has only to say so too. That is a matter of one message,
which a busy host may delay; it is expected at once, for `THERE_MS`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Final

from fabric.ids import ModelId, SliceId
from fabric.limits import DURATION_MAX_MS
from policies.batching.base import NEVER_MS

LATE_TIMES: Final = 2.0
LATE_MS: Final = 100.0
THERE_MS: Final = 5_000.0  # some five times in which a worker repeats that it is ready


@dataclass(slots=True)
class _Start:
    models: tuple[ModelId, ...]
    began_at_ms: float | None
    """None: when that was nobody said."""
    has_begun: bool = True
    """False: it begins at `began_at_ms`, or later, when what is in its place has ended."""
    there_since_ms: float | None = None
    """Since when its agent says that it is ready."""


class StartTimes:
    """Measured from the report that a process starts (or that the one before was lost) to the slice's being ready."""

    def __init__(self) -> None:
        self._under_way: dict[SliceId, _Start] = {}
        self._with_model: dict[ModelId, dict[SliceId, _Start]] = {}
        """The same by model: every directory asks it of each one that nothing serves."""
        self._took_ms: dict[SliceId, float] = {}
        self._of_model_ms: dict[ModelId, float] = {}
        self._slowest_ms: dict[SliceId, float | None] = {}
        """What the slowest model of each start takes, as far as is known; worked out once, for every model of a start asks for it."""

    def begin(self, slice_id: SliceId, models: Iterable[ModelId], now_ms: float) -> None:
        """It starts, now."""
        self._pop(slice_id)
        self._put(slice_id, models, now_ms)

    def expect(self, slice_id: SliceId, models: Iterable[ModelId], begins_at_ms: float) -> None:
        """It will start, then at the earliest."""
        if slice_id not in self._under_way:
            self._put(slice_id, models, begins_at_ms, has_begun=False)

    def there(self, slice_id: SliceId, models: Iterable[ModelId], now_ms: float) -> None:
        """Its agent says that it is ready, for the first time if it does so again."""
        if slice_id not in self._under_way:
            self._put(slice_id, models, None)
        start = self._under_way[slice_id]
        if start.there_since_ms is None:
            start.there_since_ms = now_ms

    def end(self, slice_id: SliceId, served: Container[ModelId], now_ms: float) -> None:
        """It is ready. Nothing is learned where nobody said when it began, nor of models that were removed meanwhile."""
        start = self._pop(slice_id)
        if start is not None and start.began_at_ms is not None:
            took_ms = self._took_ms[slice_id] = now_ms - start.began_at_ms
            self._of_model_ms |= dict.fromkeys((one for one in start.models if one in served), took_ms)
            self._slowest_ms.clear()

    def may_take_ms(self, slice_id: SliceId) -> float:
        """The longest that it is waited for when it starts once more; 0: it never did."""
        took_ms = self._took_ms.get(slice_id)
        return 0.0 if took_ms is None else _longest_ms(took_ms)

    def cancel(self, slice_id: SliceId) -> bool:
        """It does not start any more, for all that is known; False: it did not anyway."""
        return self._pop(slice_id) is not None

    def forget(self, slice_id: SliceId) -> None:
        """There is no such slice any more."""
        self.cancel(slice_id)
        self._took_ms.pop(slice_id, None)

    def forget_model(self, model_id: ModelId) -> None:
        """There is no such model any more."""
        self._of_model_ms.pop(model_id, None)
        self._slowest_ms.clear()

    def coming_at_ms(self, model_id: ModelId, now_ms: float) -> float:
        """When the first slice that starts with that model will be ready, not before now; never: none is expected."""
        return self._soonest(model_id, now_ms)[0]

    def coming_in_ms(self, model_id: ModelId, now_ms: float) -> float | None:
        """How long until then, as others are told; None: none is expected. 0 of one that is late: it may be ready any moment."""
        coming_at_ms, is_late = self._soonest(model_id, now_ms)
        if coming_at_ms == NEVER_MS:
            return None
        return 0.0 if is_late else min(coming_at_ms - now_ms, DURATION_MAX_MS)

    def _put(
        self,
        slice_id: SliceId,
        models: Iterable[ModelId],
        began_at_ms: float | None,
        *,
        has_begun: bool = True,
    ) -> None:
        start = self._under_way[slice_id] = _Start(tuple(dict.fromkeys(models)), began_at_ms, has_begun)
        for model_id in start.models:
            self._with_model.setdefault(model_id, {})[slice_id] = start

    def _pop(self, slice_id: SliceId) -> _Start | None:
        start = self._under_way.pop(slice_id, None)
        self._slowest_ms.pop(slice_id, None)
        for model_id in () if start is None else start.models:
            its = self._with_model[model_id]
            del its[slice_id]
            if not its:
                del self._with_model[model_id]
        return start

    def _soonest(self, model_id: ModelId, now_ms: float) -> tuple[float, bool]:
        """When, and whether it is late."""
        its = (
            self._ready_at_ms(slice_id, start, now_ms)
            for slice_id, start in self._with_model.get(model_id, {}).items()
        )
        return min(its, default=(NEVER_MS, False))

    def _ready_at_ms(self, slice_id: SliceId, start: _Start, now_ms: float) -> tuple[float, bool]:
        if start.there_since_ms is not None and now_ms < start.there_since_ms + THERE_MS:
            return now_ms, False
        if start.began_at_ms is None:
            return NEVER_MS, False
        takes_ms = self._took_ms.get(slice_id)
        if takes_ms is None:
            takes_ms = self._slowest_of_ms(slice_id, start)
        if takes_ms is None:
            return NEVER_MS, False
        began_at_ms = start.began_at_ms if start.has_begun else max(now_ms, start.began_at_ms)
        taken_ms = now_ms - began_at_ms
        if taken_ms > _longest_ms(takes_ms):
            return now_ms + taken_ms, True
        return max(now_ms, began_at_ms + takes_ms), False

    def _slowest_of_ms(self, slice_id: SliceId, start: _Start) -> float | None:
        if slice_id not in self._slowest_ms:
            known = [self._of_model_ms.get(model_id) for model_id in start.models]
            self._slowest_ms[slice_id] = max((one for one in known if one is not None), default=None)
        return self._slowest_ms[slice_id]


def _longest_ms(takes_ms: float) -> float:
    """Who needs more than that is late."""
    return LATE_TIMES * takes_ms + LATE_MS
