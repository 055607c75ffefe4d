"""Work: what one operator asks of a GPU, in the classes for which there are kernel records.

Sizes are in elements of 32 bits unless they say bytes. `dims` are the four sizes that shape a class's kernels:

| class | dims |
|---|---|
| linear, bmm | batch, rows M, columns N, inner K |
| conv (3 x 3, stride 1) | batch, input channels, output channels, side of the square input |
| ln, softmax, elementwise | rows, elements a row, 1, 1 |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

MATRIX_OPS: Final = ("linear", "bmm")
ROW_OPS: Final = ("ln", "softmax")
ELEMENTWISE_OPS: Final = ("add", "mul", "div", "pow", "relu", "gelu", "tanh")
OTHER: Final = "other"
"""An operator that no record is like: bounded by memory, estimated by the roofline."""
OPS: Final = ("conv", *MATRIX_OPS, *ROW_OPS, *ELEMENTWISE_OPS)
ELEMENT_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class Work:
    """One operator with its sizes."""

    op: str
    dims: tuple[int, int, int, int]
    weight_elements: int
    input_elements: int
    output_elements: int
    flops: float
    size_bytes: float
    """Read and written, each once."""


def matrix_work(op: str, batch: int, rows: int, columns: int, inner: int, *, has_bias: bool = False) -> Work:
    """`linear`: [rows, inner] by weights of [columns, inner]; `bmm`: a batch of products."""
    right = batch * inner * columns + (columns if has_bias else 0)
    left, out = batch * rows * inner, batch * rows * columns
    weights = right if op == "linear" else 0
    return Work(
        op,
        (batch, rows, columns, inner),
        weights,
        left + right - weights,
        out,
        2.0 * batch * rows * columns * inner,
        ELEMENT_BYTES * float(left + right + out),
    )


def convolution_work(batch: int, channels_in: int, channels_out: int, side: int) -> Work:
    """A 3 x 3 convolution of stride 1 that keeps the size: the one the records have."""
    weights = 9 * channels_in * channels_out
    given, out = batch * channels_in * side * side, batch * channels_out * side * side
    return Work(
        "conv",
        (batch, channels_in, channels_out, side),
        weights,
        given,
        out,
        18.0 * batch * channels_in * channels_out * side * side,
        ELEMENT_BYTES * float(weights + given + out),
    )


def elementwise_work(op: str, rows: int, columns: int, operands: int) -> Work:
    """`operands` tensors of that size in, one out."""
    elements = rows * columns
    return Work(
        op,
        (rows, columns, 1, 1),
        0,
        operands * elements,
        elements,
        float(elements),
        ELEMENT_BYTES * float((operands + 1) * elements),
    )


def memory_work(input_elements: int, output_elements: int, size_bytes: float, op: str = OTHER) -> Work:
    """Anything that reads and writes, and computes little."""
    return Work(
        op, (1, max(1, output_elements), 1, 1), 0, input_elements, output_elements, 0.0, float(size_bytes)
    )


def square_side(height: int, width: int) -> int:
    """Of the square with as many points."""
    return max(1, round(math.sqrt(height * width)))
