"""What lines leave over: alpha_ms * b + beta_ms through measurements, and lines between measured points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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


@dataclass(frozen=True, slots=True)
class InterpolationError:
    """How far the line between two measured neighbours is from a point that was measured between them.

    Relative errors, as fractions; `points` is how many were left out in turn, 0 where none has neighbours.
    """

    points: int
    mean: float
    largest: float


def batch_interpolation_error(columns: Mapping[float, Mapping[int, float]]) -> InterpolationError:
    """Leave-one-out over the batch sizes of every share; `columns` as in `TableProfile.columns`.

    An upper bound of what a lookup between measured sizes errs: it spans twice the distance a lookup does.
    """
    return _left_out(columns.values())


def share_interpolation_error(columns: Mapping[float, Mapping[int, float]]) -> InterpolationError:
    """Leave-one-out over the shares of every batch size; `columns` as in `TableProfile.columns`."""
    batch_sizes = {batch_size for column in columns.values() for batch_size in column}
    return _left_out(
        [
            {share: column[batch_size] for share, column in columns.items() if batch_size in column}
            for batch_size in sorted(batch_sizes)
        ]
    )


def _left_out(series: Iterable[Mapping[float, float] | Mapping[int, float]]) -> InterpolationError:
    errors: list[float] = []
    for values in series:
        points = sorted(values.items())
        for (low, low_ms), (key, ms), (high, high_ms) in zip(points, points[1:], points[2:], strict=False):
            line_ms = low_ms + (high_ms - low_ms) * (key - low) / (high - low)
            errors.append(abs(line_ms / ms - 1))
    if not errors:
        return InterpolationError(0, 0.0, 0.0)
    return InterpolationError(len(errors), math.fsum(errors) / len(errors), max(errors))
