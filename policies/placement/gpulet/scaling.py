"""GPU scaling (gpulet, Algorithm 2): the fewest GPUs with which the search succeeds.

Elastic partitioning prefers GPUs that are not cut, so it is always called this way: given all GPUs at once it
would spread over all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from policies.placement.common.gpu_kinds import GpuKind
from policies.placement.gpulet.board import Board, ModelDemand
from policies.placement.gpulet.exhaustive import exhaustive, refuse_too_many
from policies.placement.gpulet.partition import elastic, in_order
from policies.placement.gpulet.time_sharing import whole_gpus

SEARCHES: dict[str, Callable[..., bool]] = {
    "elastic": elastic,
    "exhaustive": exhaustive,
    "whole": whole_gpus,
}


def scaled(
    demands: Sequence[ModelDemand],
    kinds: Sequence[GpuKind],
    *,
    search: str = "elastic",
    has_interference: bool = False,
    first_count: int = 1,
) -> Board | None:
    """The plan on the first N GPUs, N from `first_count` (those used so far) up; None: unschedulable on all.

    Raises ConfigError where an exhaustive search over all of them is too much.
    """
    if search == "exhaustive":
        refuse_too_many(Board.of(kinds))
    ordered = in_order(demands)
    for count in range(min(max(1, first_count), len(kinds)), len(kinds) + 1):
        board = Board.of(kinds[:count], has_interference=has_interference)
        if SEARCHES[search](ordered, board):
            return board
    return None


def as_much_as_fits(
    demands: Sequence[ModelDemand],
    kinds: Sequence[GpuKind],
    *,
    search: str = "elastic",
    has_interference: bool = False,
) -> Board:
    """All GPUs, and whatever of an unschedulable workload they can carry."""
    board = Board.of(kinds, has_interference=has_interference)
    SEARCHES[search](in_order(demands), board, is_partial=True)
    return board
