"""What counts as the same answer of two ways to compute it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from roles.gpu_worker.executors.rounding import is_same

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ([1.0, 2e-6], [1.0, 1e-6], True),
        ([1e-6, 2e-6], [1e-6, 1e-6], False),
        ([1e-6, 1e-6 + 1e-12], [1e-6, 1e-6], True),
        ([1e6, 0.0], [1e6, 1.0], False),
        ([-INF, 2e-6], [-INF, 1e-6], False),
        ([-INF, NAN], [-INF, NAN], True),
        ([0.0, NAN], [0.0, 0.0], False),
        ([], [], True),
        ([0.0], [0.0, 0.0], False),
    ],
)
def test_outputs_are_compared_by_their_own_size(
    found: list[float], expected: list[float], same: bool
) -> None:
    assert is_same(torch.tensor(found), torch.tensor(expected), 1e-5, 1e-5) is same


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (torch.tensor([1_000_001]), torch.tensor([1_000_000])),
        (torch.tensor([True]), torch.tensor([False])),
        (torch.tensor([1]), torch.tensor([1.0])),
    ],
)
def test_whole_numbers_are_the_same_or_not(found: Tensor, expected: Tensor) -> None:
    assert not is_same(found, expected, 1e-5, 1e-5)
    assert is_same(expected, expected, 1e-5, 1e-5)
