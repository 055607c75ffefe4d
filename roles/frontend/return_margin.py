"""What a frontend keeps back of each budget for the way back to the client: the mean way, and a learned margin."""

from __future__ import annotations

from typing import Protocol

from fabric.learned_margin import LearnedWay

_RETURN_START_MS = 1.0
_DROPPED_WEIGHT = 4  # a margin that loses requests before they ran is worse than one that loses them after
_MARGIN_SHARE = 0.1  # for what was not measured yet, such as the next stall: cheap where budgets are long,
_MARGIN_FROM_MS = 10.0  # and counted from here on: where they are short every bit of it costs throughput


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
