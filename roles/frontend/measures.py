"""What a frontend measures of its own path, and what it makes of it: budgets announced, ready moments, ledgers."""

from __future__ import annotations

import bisect
from collections import deque
from typing import Protocol

from fabric.margin import LearnedWay
from fabric.messages import Ledger, Outputs
from roles.frontend.requests import Request

_RETURN_START_MS = 1.0
_DROPPED_WEIGHT = 4  # a margin that loses requests before they ran is worse than one that loses them after
_MARGIN_SHARE = 0.1  # for what was not measured yet, such as the next stall: cheap where budgets are long,
_MARGIN_FROM_MS = 10.0  # and counted from here on: where they are short every bit of it costs throughput
_PREPROCESS_START_MS = 10.0  # a photograph of a megapixel, decoded and resized on one core
_PREPROCESS_WINDOW = 64


class ReturnMargin(Protocol):
    """What a frontend keeps back of a model's budgets for the way back."""

    @property
    def reserve_ms(self) -> float:
        """What to keep back of every budget."""
        ...

    def budget_ms(self, left_ms: float) -> float:
        """What to announce of what is left."""
        ...

    def slack_ms(self, left_ms: float) -> float:
        """How much more than announced may be used where nothing else comes in between."""
        ...

    def note_batch(self, return_ms: float) -> None:
        """One batch's outputs took this long."""
        ...

    def note_answer(self, late_ms: float, budget_ms: float) -> None:
        """One answer was so much too late to be with its client in time; 0 or less: in time."""
        ...

    def note_dropped(self, count: int) -> None:
        """So many were given up because what was left of their budgets was too little."""
        ...


class ReturnPath:
    """What to keep back of every budget of a model: its outputs' mean way to the client's socket, and a margin.

    The margin answers for all that the plan of a batch does not know: late timers, late inputs, a busy host.
    """

    def __init__(self) -> None:
        self._way = LearnedWay(_RETURN_START_MS)

    @property
    def reserve_ms(self) -> float:
        """What to keep back of every budget."""
        return self._way.planned_ms

    def budget_ms(self, left_ms: float) -> float:
        """What to announce of what is left."""
        return less_return(left_ms, self.reserve_ms)

    def slack_ms(self, left_ms: float) -> float:
        """How much more than announced may be used where nothing else comes in between."""
        return max(0.0, left_ms - self.budget_ms(left_ms) - self._way.mean_ms)

    def note_batch(self, return_ms: float) -> None:
        """One batch's outputs took this long."""
        self._way.note(return_ms)

    def note_answer(self, late_ms: float, budget_ms: float) -> None:
        """One answer was so much too late to be with its client in time; 0 or less: in time."""
        self._way.note_end(late_ms, budget_ms)

    def note_dropped(self, count: int) -> None:
        """So many were given up because what was left of their budgets was too little."""
        self._way.note_in_time(_DROPPED_WEIGHT * count)


def less_return(left_ms: float, reserve_ms: float) -> float:
    """What remains of `left_ms` before the result must be on its way.

    Kept back are the reserve, or a tenth of what the budget has beyond 10 ms if that is more, and at most a quarter.
    """
    left_ms = max(0.0, left_ms)
    least_ms = _MARGIN_SHARE * (left_ms - _MARGIN_FROM_MS)
    return left_ms - min(max(reserve_ms, least_ms), LearnedWay.SHARE_MAX * left_ms)


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
