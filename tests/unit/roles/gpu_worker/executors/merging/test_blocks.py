"""The largest block that two weights have in common, against every rectangle tried."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roles.gpu_worker.executors.merging.blocks import Block, Weight, common_block, largest_rectangle


def drawn(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 6), st.integers(1, 6), st.data())
@settings(max_examples=60, deadline=None)
def test_no_rectangle_of_true_cells_is_larger_than_the_one_found(
    rows: int, columns: int, data: st.DataObject
) -> None:
    bits = data.draw(st.lists(st.booleans(), min_size=rows * columns, max_size=rows * columns))
    cells = np.array(bits).reshape(rows, columns)
    row, column, height, width = largest_rectangle(cells)
    assert cells[row : row + height, column : column + width].all()
    best = max(
        (bottom - top) * (right - left)
        for top in range(rows)
        for bottom in range(top, rows + 1)
        for left in range(columns)
        for right in range(left, columns + 1)
        if cells[top:bottom, left:right].all()
    )
    assert height * width == best


def test_equal_weights_are_one_block_and_unrelated_ones_have_none() -> None:
    first = drawn(30, 20, 1)
    assert common_block(Weight(first), Weight(first.clone())) == Block((0, 0), (0, 0), 30, 20)
    assert common_block(Weight(first), Weight(drawn(30, 20, 2))) is None


@pytest.mark.parametrize(
    ("shift", "at"), [((0, 0), (2, 3)), ((5, 0), (7, 3)), ((3, 4), (5, 7)), ((-2, -3), (0, 0))]
)
def test_a_block_is_found_wherever_it_is_in_the_other_weight(
    shift: tuple[int, int], at: tuple[int, int]
) -> None:
    first, second = drawn(40, 32, 1), drawn(40, 32, 2)
    height, width = 30, 24
    second[at[0] : at[0] + height, at[1] : at[1] + width] = first[2 : 2 + height, 3 : 3 + width]
    found = common_block(Weight(first), Weight(second))
    assert found == Block((2, 3), at, height, width)
    assert (found.second[0] - found.first[0], found.second[1] - found.first[1]) == shift


def test_less_than_four_tenths_in_common_is_none() -> None:
    first, second = drawn(40, 32, 1), drawn(40, 32, 2)
    second[:15] = first[:15]
    assert common_block(Weight(first), Weight(second)) is None
    second[:17] = first[:17]
    assert common_block(Weight(first), Weight(second)) == Block((0, 0), (0, 0), 17, 32)


def test_of_a_convolution_only_whole_output_channels_are_a_block() -> None:
    first, second = drawn(10, 4 * 9, 1).view(10, 4, 3, 3), drawn(10, 4 * 9, 2).view(10, 4, 3, 3)
    second[3:, :3] = first[3:, :3]
    assert common_block(Weight(first, is_by_rows=True), Weight(second, is_by_rows=True)) is None
    second[3:] = first[3:]
    found = common_block(Weight(first, is_by_rows=True), Weight(second, is_by_rows=True))
    assert found == Block((3, 0), (3, 0), 7, 36)


def test_half_precision_is_compared_too() -> None:
    first = drawn(16, 16, 1).to(torch.bfloat16)
    second = first.clone()
    second[12:] = 0
    assert common_block(Weight(first), Weight(second)) == Block((0, 0), (0, 0), 12, 16)


def test_equal_entries_that_are_scattered_are_no_block_and_cost_no_time() -> None:
    scattered = np.random.default_rng(0).random((4096, 4096)) < 0.7
    assert largest_rectangle(scattered) == (0, 0, 0, 0)
