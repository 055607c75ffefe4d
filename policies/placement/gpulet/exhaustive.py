"""The ideal scheduler of the paper's figure 16: every partitioning of the GPUs, 4^N for N of them.

Equal GPUs are interchangeable, so each multiset of cuts is tried once. On each, models are placed as in
elastic partitioning without cutting, in its order and in the opposite one. A plan of elastic partitioning itself
is one over its own cuts, so it counts: the ideal is never behind it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement, product

from fabric.errors import ConfigError
from policies.placement.common.gpu_kinds import GpuKind
from policies.placement.gpulet.board import Board, Gpulet, ModelDemand
from policies.placement.gpulet.partition import elastic
from policies.placement.gpulet.quantities import PAIRS

PARTITIONINGS_MAX = 1_000
"""16 GPUs of one kind; about a minute where nothing fits."""


def exhaustive(demands: Sequence[ModelDemand], board: Board, *, is_partial: bool = False) -> bool:
    """Place all on the board; False where no partitioning serves all, which then carries the most."""
    empty = board.copy()
    if elastic(demands, board, is_partial=is_partial):
        return True
    best, best_rps = board.copy(), _carried_rps(board, demands)
    for gpulets in partitionings(empty):
        for order in (demands, demands[::-1]):
            trial = empty.copy()
            for gpu, cut in enumerate(gpulets):
                trial.set(gpu, cut)
            if elastic(order, trial, can_cut=False, is_partial=is_partial):
                board.adopt(trial)
                return True
            if is_partial and (carried := _carried_rps(trial, demands)) > best_rps:
                best, best_rps = trial, carried
    board.adopt(best)
    return False


def partitionings(board: Board) -> Iterator[list[tuple[Gpulet, ...]]]:
    """Every way to cut the GPUs, those that differ only by swapping equal GPUs once."""
    groups = _equal_gpus(board)
    cuts = [tuple(Gpulet(size) for size in sizes) for sizes in PAIRS]
    choices = [combinations_with_replacement(cuts, len(group)) for group in groups]
    for chosen in product(*choices):
        gpulets: list[tuple[Gpulet, ...]] = [()] * len(board.kinds)
        for group, of_group in zip(groups, chosen, strict=True):
            for gpu, cut in zip(group, of_group, strict=True):
                gpulets[gpu] = cut
        yield gpulets


def refuse_too_many(board: Board) -> None:
    """ConfigError where the GPUs can be cut in more ways than can be looked at."""
    count = math.prod(math.comb(len(group) + len(PAIRS) - 1, len(group)) for group in _equal_gpus(board))
    if count > PARTITIONINGS_MAX:
        raise ConfigError(
            f"placement.gpulet: {len(board.kinds)} GPUs can be partitioned in {count} ways; exhaustive search "
            f"looks at {PARTITIONINGS_MAX} at most, so ask for fewer GPUs or search: elastic"
        )


def _equal_gpus(board: Board) -> list[list[int]]:
    groups: dict[GpuKind, list[int]] = {}
    for gpu, kind in enumerate(board.kinds):
        groups.setdefault(kind, []).append(gpu)
    return list(groups.values())


def _carried_rps(board: Board, demands: Sequence[ModelDemand]) -> float:
    return sum(min(demand.rps, board.carried_rps(demand)) for demand in demands)
