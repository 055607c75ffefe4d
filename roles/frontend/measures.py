"""What a frontend measures of its own path, and what it makes of it: budgets announced, ready moments, ledgers."""

from __future__ import annotations

import bisect
from collections import deque

from fabric.messages import Ledger, Outputs
from roles.frontend.requests import Request

_RETURN_START_MS = 1.0
_RETURN_HALF_LIFE_MS = 2_000.0
_RETURN_SHARE_MAX = 0.25
_MARGIN_SHARE = 0.04  # for what was not measured yet: a hold of two seconds need not end on a millisecond
_PREPROCESS_START_MS = 10.0  # a photograph of a megapixel, decoded and resized on one core
_PREPROCESS_WINDOW = 64


class ReturnPath:
    """How long outputs take from the device to the client's socket: a maximum that halves every 2 s.

    The maximum and not a mean, because a budget announced too wide loses its request; decaying with time and
    not with samples, because after one bad stall there may be no samples left to forget it by.
    """

    def __init__(self) -> None:
        self._peak_ms = _RETURN_START_MS
        self._peak_at_ms = 0.0

    def note(self, return_ms: float, now_ms: float) -> None:
        """One batch's outputs took this long."""
        if return_ms >= self.reserve_ms(now_ms):
            self._peak_ms, self._peak_at_ms = return_ms, now_ms

    def reserve_ms(self, now_ms: float) -> float:
        """What to keep back of every budget."""
        halvings = (now_ms - self._peak_at_ms) / _RETURN_HALF_LIFE_MS
        return float(self._peak_ms * 2.0**-halvings)


def less_return(left_ms: float, reserve_ms: float) -> float:
    """What remains of `left_ms` before the result must be on its way.

    Kept back are the reserve or 4 %, whichever is more, and at most a quarter.
    """
    return left_ms - min(max(reserve_ms, _MARGIN_SHARE * left_ms), _RETURN_SHARE_MAX * left_ms)


class PreprocessTimes:
    """The p95 of the last preprocessing times of one model, from asked to ready."""

    def __init__(self) -> None:
        self._window: deque[float] = deque()
        self._sorted: list[float] = []

    def note(self, took_ms: float) -> None:
        """One took this long."""
        if len(self._window) == _PREPROCESS_WINDOW:
            del self._sorted[bisect.bisect_left(self._sorted, self._window.popleft())]
        self._window.append(took_ms)
        bisect.insort(self._sorted, took_ms)

    @property
    def p95_ms(self) -> float:
        """A guess before the first one."""
        if not self._sorted:
            return _PREPROCESS_START_MS
        return self._sorted[int(0.95 * (len(self._sorted) - 1) + 0.5)]


def settle(request: Request, outputs: Outputs, now_ms: float) -> Ledger:
    """Where the request's time went.

    `held_ms` is announced -> granted less what was forced; what an earlier grant that came to nothing had cost
    counts as forced. `return_ms` is the rest after the grant that the worker does not account for.
    `preprocess_ms` runs beside the hold, so the parts may add up to more than `total_ms`.
    """
    place = request.place
    granted_at_ms = place.granted_at_ms if place is not None else request.announced_at_ms
    waited_ms = place.waited_ms if place is not None else 0.0
    first_at_ms = request.first_announced_at_ms
    lost_ms = request.announced_at_ms - first_at_ms if first_at_ms is not None else 0.0
    on_worker_ms = outputs.transfer_ms + outputs.queue_ms + outputs.gpu_ms
    return Ledger(
        preprocess_ms=request.preprocess_ms,
        held_ms=max(0.0, granted_at_ms - request.announced_at_ms - waited_ms),
        waited_ms=waited_ms + lost_ms,
        transfer_ms=outputs.transfer_ms,
        queue_ms=outputs.queue_ms,
        gpu_ms=outputs.gpu_ms,
        return_ms=max(0.0, now_ms - granted_at_ms - on_worker_ms),
        total_ms=now_ms - request.asked_at_ms,
        batch_size=outputs.batch_size,
        slice_id=outputs.slice_id,
        reason=place.reason if place is not None else "",
    )
