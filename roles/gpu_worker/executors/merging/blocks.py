"""The largest block that two weights have in common, at whatever place in each (Usher section 3.4).

To try every shift of one against the other is quartic. A random sample of the entries of both has enough in common to tell the shift:
by the birthday bound some of k·√n entries of each are the same ones. At that shift the block is the largest rectangle of equal entries,
which a stack finds in one pass. Entries are equal when their bits are.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SIMILARITY_MIN: Final = 0.4
"""The paper's: twice the common entries over all of both."""
SAMPLES: Final = 8  # times √n: 64 common ones on average where all are common, 25 at `SIMILARITY_MIN`
VOTES_MIN: Final = 3
CELLS_MAX: Final = 100_000
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Bits = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True)
class Block:
    """Entries [row, row + height) by [column, column + width) of the first, and those at the second's own row and column."""

    first: tuple[int, int]
    second: tuple[int, int]
    height: int
    width: int

    @property
    def size(self) -> int:
        """How many entries it has."""
        return self.height * self.width


@dataclass(frozen=True, eq=False)
class Weight:
    """A matrix as it is compared: [out, …] of a tensor, the other axes in a row. `is_by_rows`: only whole rows can be run apart."""

    tensor: Tensor
    is_by_rows: bool = False

    @cached_property
    def bits(self) -> Bits:
        """As whole numbers [rows, columns]."""
        flat = self.tensor.detach().cpu().contiguous().flatten(1)
        bits: Bits = flat.view(_INTEGERS[flat.element_size()]).numpy()
        return bits

    @cached_property
    def sampled(self) -> dict[int, int]:
        """Places of some entries by their value, where no other one sampled has it."""
        flat = self.bits.reshape(-1)
        count = min(flat.size, SAMPLES * math.isqrt(flat.size))
        places = np.random.default_rng(0).integers(flat.size, size=count)
        if count == flat.size:
            places = np.arange(count)
        places = np.unique(places)
        values, first, counts = np.unique(flat[places], return_index=True, return_counts=True)
        return dict(zip(values[counts == 1].tolist(), places[first[counts == 1]].tolist(), strict=True))


def common_block(first: Weight, second: Weight) -> Block | None:
    """The largest one at the likeliest shift; None: less than `SIMILARITY_MIN` is common."""
    (rows, columns), (other_rows, other_columns) = first.bits.shape, second.bits.shape
    if first.tensor.shape == second.tensor.shape and torch.equal(first.tensor, second.tensor):
        return Block((0, 0), (0, 0), rows, columns)
    if first.is_by_rows and columns != other_columns:
        return None
    down, right = _shift(first, second)
    top, left = max(0, -down), max(0, -right)
    height, width = min(rows, other_rows - down) - top, min(columns, other_columns - right) - left
    equal: NDArray[np.bool_] = (
        first.bits[top : top + height, left : left + width]
        == second.bits[top + down : top + down + height, left + right : left + right + width]
    )
    if first.is_by_rows:
        equal = equal.all(axis=1, keepdims=True).repeat(width, axis=1) & (width == columns)
    least = SIMILARITY_MIN * (first.bits.size + second.bits.size) / 2
    if equal.sum() < least:
        return None
    row, column, height, width = largest_rectangle(equal)
    row, column = row + top, column + left
    found = Block((row, column), (row + down, column + right), height, width)
    return found if found.size >= least else None


def largest_rectangle(cells: NDArray[np.bool_]) -> tuple[int, int, int, int]:
    """Row, column, height and width of the largest rectangle of true cells; equal rows and columns beside each other count as one.

    Of no cells where they are so scattered that more than `CELLS_MAX` of these are left: no block of use, and minutes to look for.
    """
    row_at, column_at = _changes(cells), _changes(cells.T)
    few = cells[row_at[:-1]][:, column_at[:-1]]
    best = (0, 0, 0, 0)
    if few.size > CELLS_MAX:
        return best
    tops = np.zeros(few.shape[1], dtype=np.int64)  # where the run of true cells that ends in this row begins
    for place, row in enumerate(few):
        below = int(row_at[place + 1])
        tops = np.where(row, tops, below)
        heights = [*(below - tops).tolist(), 0]
        open_ones: list[tuple[int, int]] = []  # left edge and height, rising
        for column, height in enumerate(heights):
            edge = int(column_at[column])
            while open_ones and open_ones[-1][1] >= height:
                left, tall = open_ones.pop()
                width = int(column_at[column]) - left
                if tall * width > best[2] * best[3]:
                    best = (below - tall, left, tall, width)
                edge = left
            open_ones.append((edge, height))
    return best


def _changes(cells: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Where a row differs from the one before it; the first and the end count."""
    inner = np.flatnonzero((cells[1:] != cells[:-1]).any(axis=1)) + 1
    return np.concatenate([[0], inner, [len(cells)]])


def _shift(first: Weight, second: Weight) -> tuple[int, int]:
    """By how many rows and columns the second has the first's entries further on, as most of those say that were sampled in both."""
    columns, other_columns = first.bits.shape[1], second.bits.shape[1]
    votes: Counter[tuple[int, int]] = Counter()
    for value in first.sampled.keys() & second.sampled.keys():
        row, column = divmod(first.sampled[value], columns)
        other_row, other_column = divmod(second.sampled[value], other_columns)
        votes[other_row - row, other_column - column] += 1
    ((shift, count),) = votes.most_common(1) or [((0, 0), 0)]
    return shift if count >= VOTES_MIN else (0, 0)
