"""Clockwork (Symphony section 2.2): a candidate for every batch size, the earliest latest start first.

For the head of each model's queue there is a candidate per batch size; when a slice becomes free the one goes whose
latest start is the earliest that can still be met. Batching efficiency plays no part (ADR 0013). Sizes are 1, 2, 4, 8, …
as Clockwork has them, or all sizes, as Symphony's authors ran it (their section 5).
"""

from __future__ import annotations

from typing import Final

from fabric.policy_options import Choice
from policies.batching.base import NEVER_MS
from policies.batching.baselines.backlog import Backlog
from policies.batching.baselines.state import BaselineSlice, Line
from policies.batching.batch_moments import latest_at_ms
from policies.registry import Registered


class Clockwork(Backlog):
    """Requests are given up only when they can no longer finish even alone. `has_all_sizes`: not only powers of two."""

    def __init__(self, *, has_all_sizes: bool = False) -> None:
        super().__init__()
        self._has_all_sizes = has_all_sizes

    def _choose(self, slice_: BaselineSlice, lines: list[Line], now_ms: float) -> tuple[Line, int] | None:
        chosen: tuple[Line, int] | None = None
        earliest_ms = NEVER_MS
        for line in lines:
            fitting = slice_.fit(line, now_ms)
            if fitting == 0:
                continue
            size = fitting if self._has_all_sizes else 1 << (fitting.bit_length() - 1)
            # Of one model's candidates that can still be met, the largest has to start first.
            table = slice_.tables[line.model.model_id]
            latest_ms = latest_at_ms(line.queue.runs[0].deadline_at_ms, size, table)
            if latest_ms < earliest_ms:
                chosen, earliest_ms = (line, size), latest_ms
        return chosen


REGISTERED: Final = Registered(
    {"sizes": Choice(("powers_of_two", "all"))},
    lambda options: Clockwork(has_all_sizes=options["sizes"] == "all"),
)
