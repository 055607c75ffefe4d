"""Measurements -> alpha_ms * b + beta_ms, with the residual: how well a line describes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fabric.errors import ProfileError


@dataclass(frozen=True, slots=True)
class LinearFit:
    """The least-squares line through (batch size, ms) points.

    `residual_ms` is the root mean square of what the line leaves over, `residual_max_ms` its largest.
    """

    alpha_ms: float
    beta_ms: float
    residual_ms: float
    residual_max_ms: float

    def exec_ms(self, batch_size: int) -> float:
        """The line at `batch_size`."""
        return self.alpha_ms * batch_size + self.beta_ms


def fit_linear(points: Sequence[tuple[int, float]]) -> LinearFit:
    """Least squares over (batch size, ms); repeated sizes weigh by their count.

    Raises ProfileError with fewer than two different sizes, or a measurement that is not over 0.
    """
    if len({batch_size for batch_size, _ in points}) < 2:
        raise ProfileError("a line needs measurements at two different batch sizes or more")
    for batch_size, exec_ms in points:
        if batch_size < 1 or not (math.isfinite(exec_ms) and exec_ms > 0):
            raise ProfileError(f"batch {batch_size} measured as {exec_ms:g} ms is no measurement")
    mean_batch = math.fsum(batch_size for batch_size, _ in points) / len(points)
    mean_ms = math.fsum(exec_ms for _, exec_ms in points) / len(points)
    spread = math.fsum((batch_size - mean_batch) ** 2 for batch_size, _ in points)
    alpha_ms = math.fsum((b - mean_batch) * (ms - mean_ms) for b, ms in points) / spread
    beta_ms = mean_ms - alpha_ms * mean_batch
    residuals = [exec_ms - (alpha_ms * batch_size + beta_ms) for batch_size, exec_ms in points]
    return LinearFit(
        alpha_ms,
        beta_ms,
        residual_ms=math.sqrt(math.fsum(r * r for r in residuals) / len(residuals)),
        residual_max_ms=max(abs(r) for r in residuals),
    )
