"""What became of a model's requests in the last seconds, out of counts that only grow: a copy each second, and the difference to it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

WINDOW_S: Final = 10
_SECOND_MS: Final = 1e3


class _Copy(NamedTuple):
    """The counts as they were when that second began."""

    second: int
    asked: int
    outcomes: Mapping[str, int]
    latencies: tuple[int, ...]


class Lately(NamedTuple):
    """Since `window_ms` ago. `latencies`: how many fell in each bucket of the model's histogram."""

    window_ms: float
    asked: int
    outcomes: Mapping[str, int]
    latencies: tuple[int, ...]


class LastSeconds:
    """Of one model. Tell it of each event *before* it is counted: what came before is then in the copy, and that event is not."""

    __slots__ = ("_copies", "_first_second", "next_at_ms")

    def __init__(self) -> None:
        self._copies: deque[_Copy] = deque(maxlen=WINDOW_S + 1)
        self._first_second: int | None = None
        self.next_at_ms = -1e18
        """An event before that moment changes nothing here."""

    def copy(self, now_ms: float, asked: int, outcomes: Mapping[str, int], latencies: Sequence[int]) -> None:
        """A new second has begun, and nothing has been counted in it so far."""
        second = int(now_ms // _SECOND_MS)
        self.next_at_ms = (second + 1) * _SECOND_MS
        if self._first_second is None:
            self._first_second = second
        self._copies.append(_Copy(second, asked, dict(outcomes), tuple(latencies)))

    def until(
        self, now_ms: float, asked: int, outcomes: Mapping[str, int], latencies: Sequence[int]
    ) -> Lately:
        """The last `WINDOW_S` whole seconds and what has passed of this one; fewer where nothing is known before."""
        from_second = int(now_ms // _SECOND_MS) - WINDOW_S
        # Where no copy was made since, nothing has happened since: the counts of now are those of then.
        base = next((one for one in self._copies if one.second >= from_second), None)
        began_s = from_second if self._first_second is None else max(from_second, self._first_second)
        window_ms = max(_SECOND_MS, now_ms - began_s * _SECOND_MS)
        if base is None:
            return Lately(window_ms, 0, {}, (0,) * len(latencies))
        since = Counter(outcomes)
        since.subtract(base.outcomes)
        return Lately(
            window_ms,
            asked - base.asked,
            {outcome: count for outcome, count in since.items() if count},
            tuple(now - then for now, then in zip(latencies, base.latencies, strict=True)),
        )
