"""Batches of requests whose inputs are still being prepared (`ready_at_ms` lies ahead)."""

from __future__ import annotations

from bisect import bisect_right
from itertools import islice

from policies.batching.matchmaking.model_state import Candidate


def ready_batch(
    candidate: Candidate, size_max: int, now_ms: float, *, gathers_unready: bool
) -> tuple[int, float]:
    """How many of the first requests can start together in time, and when all of them are ready.

    Of `size_max` that would fit if they were ready. With `gathers_unready` as many as can still be in time
    (Symphony's GetBatch), else only those that are ready when the first one is. (0, …): not even the first.
    """
    deadline_at_ms = candidate.deadline_at_ms
    size = 0
    ready_at_ms = now_ms
    for run in islice(candidate.model.queue.runs, candidate.skip_runs, None):
        run_ready_at_ms = max(ready_at_ms, run.ready_at_ms)
        if size and not gathers_unready and run_ready_at_ms > ready_at_ms:
            break
        whole = min(size + run.count, size_max)
        fitting = min(whole, bisect_right(candidate.table, deadline_at_ms - run_ready_at_ms) - 1)
        if fitting <= size:
            break
        size, ready_at_ms = fitting, run_ready_at_ms
        if fitting < whole or size == size_max:
            break
    return size, ready_at_ms
