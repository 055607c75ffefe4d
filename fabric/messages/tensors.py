"""Descriptions of tensors: as they ride with a message, and as a model takes and gives them."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from fabric.messages.base import Value

TENSORS_MAX: Final = 4_096
"""Of one message."""
RANK_MAX: Final = 8
Shape = Annotated[tuple[int, ...], msgspec.Meta(max_length=RANK_MAX)]


class SharedAt(Value, frozen=True):
    """Bytes in memory that processes of one host share (`fabric/shared_memory.py`)."""

    arena: str
    offset: int


class TensorSpec(Value, frozen=True):
    """Raw bytes: little-endian, C order. `dtype` is numpy's name, such as ``float32``. `at`: they have no frame."""

    name: str
    dtype: str
    shape: Shape
    at: SharedAt | None = None


class TensorInfo(Value, frozen=True):
    """One input or output of a model, for a single request: `shape` has no batch axis; -1 is any length."""

    name: str
    dtype: str
    shape: Shape


class ImagePreprocess(Value, frozen=True):
    """Decode, resize the shorter side, crop the centre, scale to 0..1, normalise per channel; CHW float32.

    `input_name` is the model input it produces.
    """

    input_name: str
    resize: int
    crop: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
