"""gpulet's interference coefficients from co-located pairs, by least squares (gpulet section 4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fabric.errors import ProfileError
from profiles.requirements import Bandwidths, LinearCoefficients


@dataclass(frozen=True, slots=True)
class PairPoint:
    """One side of a measured pair: both sides' use as it counts in the model, and how much slower this one was."""

    own: Bandwidths
    other: Bandwidths
    slowdown: float


def fit_linear_interference(
    points: Sequence[PairPoint], *, is_scaled_by_share: bool = False
) -> LinearCoefficients:
    """Coefficients for utilisations as fractions; ProfileError where the pairs do not determine all five."""
    rows = np.array(
        [
            [p.own.l2_percent, p.other.l2_percent, p.own.dram_percent, p.other.dram_percent, 100.0]
            for p in points
        ]
    )
    if len(points) < 5 or np.linalg.matrix_rank(rows) < 5:
        raise ProfileError("five coefficients need at least five pairs that use the GPU differently")
    found = np.linalg.lstsq(rows / 100, np.array([p.slowdown for p in points]), rcond=None)[0]
    l2_self, l2_other, dram_self, dram_other, constant = (float(value) for value in found)
    return LinearCoefficients(l2_self, l2_other, dram_self, dram_other, constant, is_scaled_by_share)
