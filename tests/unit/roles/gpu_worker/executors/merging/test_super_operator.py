"""A block that two weights share, run once: as each weight does by itself, and as the paper's form does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from roles.gpu_worker.executors.merging.super_operator import Place, SuperOperator

WIDTH = 8


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def two_weights(second_at: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """The block, rows and columns 1 to 6 of the first weight, and both weights."""
    first, second = drawn(WIDTH, WIDTH, seed=1), drawn(WIDTH, WIDTH, seed=2)
    row, column = second_at
    block = first[1:7, 1:7]
    second[row : row + 6, column : column + 6] = block
    return block, first, second


def in_papers_form(
    block: Tensor, first: Tensor, second: Tensor, inputs: list[Tensor], row: int
) -> list[Tensor]:
    """Section 3.4: the block padded with zeros at its place in the first weight, times all inputs; the second's outputs move to its rows."""
    padded = torch.zeros_like(first)
    padded[1:7, 1:7] = block
    products = torch.split(functional.linear(torch.cat(inputs), padded), [len(one) for one in inputs])
    moved = torch.zeros_like(products[1])
    moved[:, row : row + 6] = products[1][:, 1:7]
    rests = [first - padded, second.clone()]
    rests[1][second == first.roll((row - 1, 0), (0, 1))] = 0
    return [
        functional.linear(one, rest) + product
        for one, rest, product in zip(inputs, rests, (products[0], moved), strict=True)
    ]


@pytest.mark.parametrize("at", [(1, 1), (0, 2), (2, 0), (2, 2)])
def test_each_model_gets_what_its_own_weight_gives_wherever_the_block_is(at: tuple[int, int]) -> None:
    block, first, second = two_weights(at)
    inputs = [drawn(3, WIDTH, seed=3), drawn(5, WIDTH, seed=4)]
    bias = drawn(WIDTH, seed=5)
    operator = SuperOperator(block, [Place(first, bias, 1, 1), Place(second, None, *at)], None)
    found = operator(*inputs)
    torch.testing.assert_close(found[0], functional.linear(inputs[0], first, bias))
    torch.testing.assert_close(found[1], functional.linear(inputs[1], second))


def test_the_papers_form_is_wrong_where_the_block_is_in_other_columns() -> None:
    inputs = [drawn(3, WIDTH, seed=3), drawn(5, WIDTH, seed=4)]
    for at, is_right in (((2, 1), True), ((1, 2), False)):
        block, first, second = two_weights(at)
        apart = [functional.linear(one, weight) for one, weight in zip(inputs, (first, second), strict=True)]
        paper = in_papers_form(block, first, second, inputs, at[0])
        assert torch.allclose(paper[0], apart[0])
        assert torch.allclose(paper[1], apart[1]) == is_right
        operator = SuperOperator(block, [Place(first, None, 1, 1), Place(second, None, *at)], None)
        for one, wanted in zip(operator(*inputs), apart, strict=True):
            torch.testing.assert_close(one, wanted)


@pytest.mark.parametrize("counts", [(0, 4), (4, 0), (0, 0), (1, 2)])
def test_a_member_may_have_no_rows(counts: tuple[int, int]) -> None:
    block, first, second = two_weights((2, 0))
    inputs = [drawn(count, 3, WIDTH, seed=count) for count in counts]
    found = SuperOperator(block, [Place(first, None, 1, 1), Place(second, None, 2, 0)], None)(*inputs)
    for one, given, weight in zip(found, inputs, (first, second), strict=True):
        torch.testing.assert_close(one, functional.linear(given, weight))


@pytest.mark.parametrize("counts", [(0, 4), (2, 1)])
@pytest.mark.parametrize("row", [0, 2, 4])
def test_a_convolution_shares_whole_output_channels(counts: tuple[int, int], row: int) -> None:
    first, second = drawn(10, 3, 3, 3, seed=1), drawn(10, 3, 3, 3, seed=2)
    second[row : row + 6] = first[4:]
    bias = drawn(10, seed=3)
    settings = ([2, 2], [1, 1])
    operator = SuperOperator(first[4:], [Place(first, bias, 4), Place(second, None, row)], settings)
    inputs = [drawn(count, 3, 9, 9, seed=count) for count in counts]
    found = operator(*inputs)
    torch.testing.assert_close(found[0], torch.conv2d(inputs[0], first, bias, *settings))
    torch.testing.assert_close(found[1], torch.conv2d(inputs[1], second, None, *settings))
