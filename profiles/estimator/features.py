"""What the regressors see of a piece of work on a GPU, as columns of numbers.

`paper_features` are those that Usher names (section 3.2): batch, weights, inputs, outputs, floating-point operations, as
logarithms. `ratio_features` are without units of time: how the work fills this GPU (waves of tiles over its SMs), how
its sizes divide by powers of two, its intensity over the GPU's balance. So one regressor can serve several GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from profiles.estimator.gpus import GpuSpec
from profiles.estimator.work import ELEMENTWISE_OPS, MATRIX_OPS, OPS, Work

Array = Any
"""A numpy array: sklearn's side of it has no types."""

TILES: Final = ((128, 128), (128, 64), (64, 64), (128, 32), (32, 128))
ALIGNED_MAX: Final = 5  # powers of two up to 32


def paper_features(works: Sequence[Work]) -> Array:
    """[works, 6]: logarithms of batch, weights, inputs, outputs, operations and bytes."""
    return np.log1p(
        np.array(
            [
                [
                    work.dims[0],
                    work.weight_elements,
                    work.input_elements,
                    work.output_elements,
                    work.flops,
                    work.size_bytes,
                ]
                for work in works
            ],
            dtype=float,
        )
    )


def ratio_features(works: Sequence[Work], gpu: GpuSpec, floors_ms: Sequence[float]) -> Array:
    """[works, n]; `floors_ms` is what the smallest operator of each one's class takes on this GPU."""
    dims = np.array([work.dims for work in works], dtype=float)
    roofline_ms = np.array([gpu.roofline_ms(work) for work in works])
    arithmetic_ms = np.array([work.flops for work in works]) / (gpu.gflops * 1e6)
    memory_ms = np.array([work.size_bytes for work in works]) / (gpu.bandwidth_gbps * 1e6)
    columns = [
        np.log(roofline_ms / np.array(floors_ms)),
        np.log((arithmetic_ms + 1e-12) / memory_ms),
        *np.log(dims.T),
        *(_aligned(column) for column in dims.T),
        np.array([OPS.index(work.op) if work.op in OPS else -1 for work in works], dtype=float),
    ]
    if works[0].op not in ELEMENTWISE_OPS:
        columns += _tiles(works, gpu.limits.sm_count)
    return np.column_stack(columns)


def _tiles(works: Sequence[Work], sm_count: int) -> list[Array]:
    """For every tile: waves over the SMs, and how full the last one and the tiles themselves are."""
    batch, rows, columns = np.array([_output(work) for work in works], dtype=float).T
    found = []
    for high, wide in TILES:
        tiles = batch * np.ceil(rows / high) * np.ceil(columns / wide)
        waves = tiles / sm_count
        found += [np.log(waves), waves / np.ceil(waves), rows * columns * batch / (tiles * high * wide)]
    return found


def _output(work: Work) -> tuple[int, int, int]:
    """Its result as a batch of matrices."""
    if work.op in MATRIX_OPS:
        return work.dims[0], work.dims[1], work.dims[2]
    if work.op == "conv":
        batch, _, channels_out, side = work.dims
        return 1, batch * side * side, channels_out
    return 1, work.dims[0], work.dims[1]


def _aligned(column: Array) -> Array:
    """The power of two that divides each size, up to ALIGNED_MAX."""
    whole = column.astype(np.int64)
    return sum((whole % (1 << power) == 0).astype(float) for power in range(1, ALIGNED_MAX + 1))
