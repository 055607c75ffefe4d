"""ndarray <-> (dtype, shape, frame), never copied where the array is already contiguous and little-endian."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

import numpy as np

from fabric.codec import Buffer
from fabric.errors import LocalProtocolError, RemoteProtocolError
from fabric.link import NamedTensor, Tensor
from fabric.messages import RANK_MAX, SharedAt, TensorSpec
from fabric.shared_memory import Arena

DTYPES: Final[Mapping[str, np.dtype[np.generic]]] = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}


def to_frame(name: str, array: Tensor) -> tuple[TensorSpec, memoryview]:
    """Describe an array and view its bytes; the view keeps the array alive, who changes it changes the frame.

    Only an array that is strided or big-endian is copied. Raises LocalProtocolError for a dtype that has no
    raw form (objects, strings, dates) or more than 8 dimensions.
    """
    spec = _described(name, array)
    flat = np.asarray(array, dtype=DTYPES[spec.dtype], order="C").reshape(-1).view(np.uint8)
    return spec, flat.data


def to_place(tensor: NamedTensor) -> TensorSpec:
    """Describe a tensor that has a place in shared memory. Raises LocalProtocolError like `to_frame`."""
    assert tensor.place is not None, "it has one"
    return _described(tensor.name, tensor.array, tensor.place.at)


def share(tensor: NamedTensor, arena: Arena) -> bool:
    """Copy a tensor into shared memory and let it lie there from now on; False: there is no room.

    Raises LocalProtocolError like `to_frame`.
    """
    spec, frame = to_frame(tensor.name, tensor.array)
    place = arena.put(frame)
    if place is None:
        return False
    tensor.array = from_frame(spec, place.data)
    tensor.place = place
    return True


def size_of(spec: TensorSpec) -> int:
    """The bytes of the array described. Raises RemoteProtocolError unless dtype is known and rank at most 8."""
    dtype = DTYPES.get(spec.dtype)
    if dtype is None or len(spec.shape) > RANK_MAX:
        raise RemoteProtocolError(f"tensor of dtype {spec.dtype!r:.40} and rank {len(spec.shape)}")
    return math.prod(spec.shape) * dtype.itemsize


def from_frame(spec: TensorSpec, frame: Buffer) -> Tensor:
    """View a frame as the array it says it is: read-only, alive as long as it is referenced.

    Raises RemoteProtocolError unless dtype is known, rank at most 8 and the frame exactly as long as the shape.
    """
    if size_of(spec) != len(frame):
        raise RemoteProtocolError(f"tensor {spec.dtype}{list(spec.shape)} in a frame of {len(frame)} bytes")
    try:
        array: Tensor = np.ndarray(spec.shape, DTYPES[spec.dtype], buffer=frame)
    except (ValueError, OverflowError) as error:  # such as shape (2**53, 2**53, 0): empty, yet beyond numpy
        raise RemoteProtocolError(f"tensor of shape {list(spec.shape)}: {error}") from error
    array.flags.writeable = False
    return array


def _described(name: str, array: Tensor, at: SharedAt | None = None) -> TensorSpec:
    name_of_dtype = dtype_name(array.dtype)
    if name_of_dtype not in DTYPES:
        raise LocalProtocolError(
            f"tensor {name!r:.80} is of dtype {array.dtype}; what can be sent is {', '.join(DTYPES)}"
        )
    if array.ndim > RANK_MAX:
        raise LocalProtocolError(f"tensor {name!r:.80} has {array.ndim} dimensions; it may have {RANK_MAX}")
    return TensorSpec(name, name_of_dtype, array.shape, at)


@lru_cache(maxsize=64)
def dtype_name(dtype: np.dtype[np.generic]) -> str:
    """The wire's name of a dtype. numpy works it out anew at every call, which costs more than all else here."""
    return dtype.name
