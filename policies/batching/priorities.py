"""Priorities (0 to 9): which requests go first where not all can be served.

A request may bear one, from the SDK to `RequestRun.priority`; else its model's counts. It decides in three places:

- which requests of a flood are admitted at all: shares of device time go to the highest first (`overload_shares.py`);
- which of a model's waiting requests a batch takes that cannot take all: `by_priority`, in `RunQueue.pop_by_priority`;
- which of two models gets a slice whose batches must start by the same moment (`matchmaking/pools.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

from policies.batching.base import RequestRun


def by_priority(runs: Iterable[RequestRun], usual: int) -> list[RequestRun]:
    """The highest first, equal ones in the order they have. `usual`: the priority of runs that have none of their own."""
    return sorted(runs, key=lambda run: usual - (usual if run.priority is None else run.priority))
