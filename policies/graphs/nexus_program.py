"""One SLO cut into budgets of stages by Nexus' dynamic program (SOSP 2019, section 6.2; `complex_query` of its authors' code).

The SLO is cut into S equal steps. A stage that may use t steps together with all behind it takes j of them itself and
leaves t - j to each of its successors:

    cost[t] = min over 0 < j < t of own(j) + sum over successors of their cost[t - j]

where own(j) is how many GPUs the stage's requests keep busy if they have a budget of j steps. As j < t also for a leaf, a
leaf never gets its last step; `gives_last_step` mends that.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from policies.graphs.graph import Graph

Costs = NDArray[np.float64]


def divide(
    graph: Graph, own: Mapping[str, Costs], *, gives_last_step: bool
) -> tuple[float, dict[str, int]] | None:
    """The cheapest cut of a tree: its cost, and the steps of each stage; None where no cut serves all stages.

    `own[stage][j]` is what a stage costs with a budget of j steps, 0 to S, inf where it cannot be served; it never rises. Each
    root has all S steps. Of equally cheap cuts an inner stage takes the fewest steps, a leaf the most.
    """
    assert graph.is_tree
    assert all(later <= former for costs in own.values() for former, later in pairwise(costs.tolist()))
    best: dict[str, Costs] = {}
    taken: dict[str, NDArray[np.int64]] = {}
    for stage in reversed(graph.stages):
        costs = own[stage.name]
        size = costs.size
        below = [best[name] for name in graph.successors[stage.name]]
        if not below:
            found, steps = np.full(size, np.inf), np.zeros(size, dtype=np.int64)
            first = 1 if gives_last_step else 2
            steps[first:] = np.arange(first, size) - (0 if gives_last_step else 1)
            found[first:] = costs[steps[first:]]
        else:
            rest = np.sum(below, axis=0)
            # More steps at the same cost leave less for those behind: the first j of each cost is enough.
            tried = 1 + np.flatnonzero(np.append(True, costs[2:] != costs[1:-1]))
            left_over = np.arange(size)[:, np.newaxis] - tried
            totals = np.where(left_over > 0, costs[tried] + rest[left_over], np.inf)
            cheapest = totals.argmin(axis=1)
            found, steps = totals[np.arange(size), cheapest], tried[cheapest]
        best[stage.name], taken[stage.name] = found, steps
    roots = [stage.name for stage in graph.stages if not stage.after]
    total = float(sum(best[name][-1] for name in roots))
    if not np.isfinite(total):
        return None
    chosen: dict[str, int] = {}
    left = {name: best[name].size - 1 for name in roots}
    for stage in graph.stages:
        chosen[stage.name] = int(taken[stage.name][left[stage.name]])
        for name in graph.successors[stage.name]:
            left[name] = left[stage.name] - chosen[stage.name]
    return total, chosen
