"""Which requests to give up, and the batch size worth protecting by it (Symphony section 3.2, Nexus' early drop).

*Simple drop* gives up what can no longer finish even alone. *Window drop* also gives up heads that would force
a small batch while enough younger requests wait for a batch of the target size: the queue's *suffix* is its
longest tail that can still run as one batch, b = min(target, suffix), and every head that cannot finish in a
batch of b is given up. The target is a floor for this, never a cap: the batch then grows to what its head allows.

The target comes from the model's own rate r by the staggered bound: with n = r·l/b slices busy for this model,
requests wait at most l/n while the batch before them is gathered, so the largest b with l·(1 + 1/max(1, n)) within
the budget is sustainable. Where fewer than one slice is busy, gathering b requests takes b/r instead.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque

from policies.batching.base import RequestRun
from policies.batching.batch_moments import Table


def suffix_size(runs: deque[RequestRun], cost: Table, now_ms: float, target: int) -> int:
    """The size of the longest tail that can run as one batch sent now, counted up to `target`; 0: not even the last.

    Walks from the tail, so it costs the runs of one target batch however long the queue is. A run counts by its
    tightest deadline until it is cut.
    """
    size = 0
    for run in reversed(runs):
        slack_ms = run.deadline_at_ms - now_ms
        grown = size + run.count
        if grown >= target:
            return target if cost[target] <= slack_ms else max(size, _fit(cost, slack_ms))
        if cost[grown] > slack_ms:
            return max(size, _fit(cost, slack_ms))
        size = grown
    return size


def _fit(cost: Table, slack_ms: float) -> int:
    return max(0, bisect_right(cost, slack_ms) - 1)


def fallback_target(exec_table: Table, slo_ms: float) -> int:
    """The target before any rate is known: the largest batch that leaves half the SLO for waiting, at least 1."""
    return max(1, bisect_right(exec_table, slo_ms / 2, 0, len(exec_table) - 1) - 1)


def target_size(exec_table: Table, rate_rps: float, budget_ms: float, data_ms_per_item: float = 0.0) -> int:
    """The batch size the model can sustain at its rate, at least 1 and at most the largest.

    `budget_ms`: the SLO less the control delay and the return path. O(log b_max): both bounds never fall with b,
    as l·(1 + 1/max(1, r·l/b)) = l + min(l, b/r).
    """
    if rate_rps <= 0:
        return 1
    gap_ms = 1000.0 / rate_rps
    largest = len(exec_table) - 2

    low, high = 0, largest + 1  # low fits, high does not
    while high - low > 1:
        size = (low + high) // 2
        run_ms = exec_table[size]
        if run_ms + min(run_ms, size * gap_ms) + data_ms_per_item * size <= budget_ms:
            low = size
        else:
            high = size
    if exec_table[high] > high * gap_ms:  # n = r·l/b > 1 slices are busy where the bound stops
        return max(1, low)

    low, high = 0, largest + 1
    while high - low > 1:
        size = (low + high) // 2
        if exec_table[size] + size * gap_ms + data_ms_per_item * size <= budget_ms:
            low = size
        else:
            high = size
    return max(1, low)
