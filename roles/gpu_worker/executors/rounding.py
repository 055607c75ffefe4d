"""Whether one computation done in two ways gave the same: another order of sums rounds differently."""

from __future__ import annotations

import torch
from torch import Tensor


def is_same(found: Tensor, expected: Tensor, relative: float, absolute: float) -> bool:
    """Floats that differ by no more than `relative` of each, and `absolute` times the largest finite one (times 1 at most).

    So outputs that are small throughout are not equal by that. NaN equals NaN. Whole numbers have nothing to round.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    left, right = found.double(), expected.double()
    finite = right[right.isfinite()].abs()
    largest = finite.max().item() if finite.numel() else 0.0
    return torch.allclose(left, right, rtol=relative, atol=absolute * min(1.0, largest), equal_nan=True)
