"""The protocol's datatypes and numpy's arrays: raw little-endian bytes, JSON numbers, byte strings.

Source: Open Inference Protocol v2, "Tensor Data", and the binary tensor data extension. An element of BYTES is preceded by its
length, four bytes little-endian. BF16 has no counterpart in numpy or in our messages: it is widened to float32, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from fabric.errors import Internal, InvalidInput
from fabric.link import Tensor
from fabric.messages import RANK_MAX
from fabric.policy_options import shown
from fabric.tensors import dtype_name

BYTES: Final = "BYTES"
BF16: Final = "BF16"
_LENGTH_BYTES: Final = 4  # before each element of BYTES
_ELEMENTS_MAX: Final = 1 << 40  # far more than any body has
_SHOWN_MAX: Final = 60  # characters of a client's own words in an answer

_NUMPY: Final[Mapping[str, np.dtype[np.generic]]] = {
    datatype: np.dtype(name).newbyteorder("<")
    for datatype, name in {
        "BOOL": "bool",
        **{f"{kind}{bits}": f"{kind.lower()}{bits}" for kind in ("INT", "UINT") for bits in (8, 16, 32, 64)},
        **{f"FP{bits}": f"float{bits}" for bits in (16, 32, 64)},
    }.items()
}
_DATATYPES: Final[Mapping[str, str]] = {dtype_name(dtype): datatype for datatype, dtype in _NUMPY.items()}
_RAW_BF16: Final = np.dtype("<u2")

_HELD: Final = {
    "U": "texts",
    "b": "true or false",
    "f": "fractions, or numbers that are too large",
    "i": "numbers",
    "u": "numbers",
}
_TAKEN: Final = {"b": "true or false", "i": "whole numbers", "u": "whole numbers", "f": "numbers"}
"""By the kind of numpy's type: what came, and what belongs there."""

Elements = tuple[bytes, ...]
"""Of a BYTES tensor, in C order."""


def datatype_of(dtype: str) -> str:
    """The protocol's name of a numpy dtype. Raises Internal for one that it has no name for (complex numbers)."""
    datatype = _DATATYPES.get(dtype)
    if datatype is None:
        raise Internal(f"the protocol has no datatype for {dtype}; the SDK carries it")
    return datatype


def count_of(name: str, shape: Sequence[int]) -> int:
    """How many elements there are. Raises InvalidInput for a shape that no tensor has."""
    # An empty tensor may say any lengths beside its 0: numpy takes them as far as their product counts bytes.
    size = math.prod(max(1, length) for length in shape)
    if len(shape) > RANK_MAX or any(length < 0 for length in shape) or size > _ELEMENTS_MAX:
        raise InvalidInput(
            f"input {shown(name)} has the shape {_shown(list(shape))}; it must be at most {RANK_MAX} lengths of 0 and more,"
            f" and of {_ELEMENTS_MAX} elements"
        )
    return math.prod(shape)


def from_raw(name: str, datatype: str, shape: Sequence[int], raw: memoryview) -> Tensor | Elements:
    """View raw bytes as the tensor they are said to be. Raises InvalidInput where they are not."""
    count = count_of(name, shape)
    if datatype == BYTES:
        return _elements(name, count, raw)
    dtype = _RAW_BF16 if datatype == BF16 else _numpy_dtype(name, datatype)
    if len(raw) != count * dtype.itemsize:
        raise InvalidInput(
            f"input {shown(name)} has {len(raw)} bytes; {datatype} {_shown(list(shape))} takes {count * dtype.itemsize}"
        )
    array: Tensor = np.ndarray(tuple(shape), dtype, buffer=raw) if count else np.empty(tuple(shape), dtype)
    return _widened(array) if datatype == BF16 else array


def from_values(name: str, datatype: str, shape: Sequence[int], values: Any) -> Tensor | Elements:
    """What JSON says: a list of values in C order, or lists in lists as the shape is. Raises InvalidInput."""
    count = count_of(name, shape)
    if datatype == BF16:
        raise InvalidInput(f"input {shown(name)} is BF16, which goes as binary data only")
    if not isinstance(values, list):
        raise InvalidInput(f"input {shown(name)} has no data: give a list, or binary data")
    if datatype == BYTES:
        return _texts(name, count, values)
    array = numbers(name, values, _numpy_dtype(name, datatype))
    if array.size != count or (array.ndim > 1 and array.shape != tuple(shape)):
        said = f"its shape {_shown(list(shape))} takes {count}"
        found = f"in the shape {_shown(list(array.shape))}" if array.ndim > 1 else "in a list"
        raise InvalidInput(f"input {shown(name)} has {array.size} elements {found}; {said}")
    return array.reshape(tuple(shape))


def numbers(name: str, values: Any, dtype: np.dtype[np.generic]) -> Tensor:
    """JSON's numbers as an array of that type, exactly. Raises InvalidInput where one does not fit.

    Null is a NaN, as in what we answer.
    """
    try:
        found = np.asarray(values)
    except (ValueError, OverflowError, RecursionError) as error:
        raise InvalidInput(
            f"input {shown(name)} is not an array: it has lists of different lengths, or too deep ones"
        ) from error
    wanted = dtype.kind
    if found.dtype.kind == "O" and wanted == "f":
        found = _with_nulls(name, found)
    if found.dtype.kind in "fO" and wanted in "iu":
        found = _whole_numbers(values, found)
    allowed = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}.get(wanted, "")
    if found.size and found.dtype.kind not in allowed:
        raise InvalidInput(
            f"input {shown(name)} holds {_HELD.get(found.dtype.kind, 'values of several kinds')};"
            f" it must hold {_TAKEN[wanted]}, as {_named(dtype)}"
        )
    if wanted in "iu" and found.size:
        limits = np.iinfo(dtype_name(dtype))
        low, high = int(found.min()), int(found.max())
        if low < limits.min or high > limits.max:
            raise InvalidInput(
                f"input {shown(name)} goes from {low} to {high}; {_named(dtype)} takes {limits.min} to {limits.max}"
            )
    try:
        with np.errstate(over="raise"):
            return found.astype(dtype)
    except FloatingPointError as error:
        raise InvalidInput(f"input {shown(name)} holds a number over the range of {_named(dtype)}") from error


def to_raw(array: Tensor) -> memoryview:
    """Its bytes, little-endian, in C order: a view where the array is so already."""
    dtype = _NUMPY[datatype_of(dtype_name(array.dtype))]
    return np.asarray(array, dtype=dtype, order="C").reshape(-1).view(np.uint8).data


def to_values(array: Tensor) -> list[Any]:
    """For JSON, in C order; what is no number becomes null when it is encoded."""
    values: list[Any] = array.reshape(-1).tolist()
    return values


def declared_dtype(dtype: str) -> np.dtype[np.generic]:
    """Of a model's declared input. Raises InvalidInput for one that JSON has no numbers for."""
    return _numpy_dtype("", _DATATYPES.get(dtype, dtype))


def _numpy_dtype(name: str, datatype: str) -> np.dtype[np.generic]:
    dtype = _NUMPY.get(datatype)
    if dtype is None:
        known = ", ".join((*_NUMPY, BF16, BYTES))
        raise InvalidInput(f"input {shown(name)} has the datatype {shown(datatype)}; there are {known}")
    return dtype


def _named(dtype: np.dtype[np.generic]) -> str:
    """By both of its names: the protocol's, and that of the SDK, in which models say what they take."""
    return f"{_DATATYPES[dtype_name(dtype)]} ({dtype_name(dtype)})"


def _widened(raw: Tensor) -> Tensor:
    """BF16 is the upper half of a float32."""
    return (raw.astype("<u4") << 16).view("<f4")


def _with_nulls(name: str, found: Tensor) -> Tensor:
    if not all(one is None or type(one) in (int, float) for one in found.reshape(-1).tolist()):
        raise InvalidInput(
            f"input {shown(name)} holds values of several kinds; it must hold numbers, or null"
        )
    try:
        return found.astype(np.float64)
    except OverflowError as error:
        raise InvalidInput(f"input {shown(name)} holds a number over the range of float64") from error


def _whole_numbers(values: Any, found: Tensor) -> Tensor:
    """Whole numbers around 2^63, which numpy takes for floats or objects where they stand beside small ones."""
    exact = np.array(values, dtype=object)
    flat = exact.reshape(-1).tolist()
    if not all(type(one) is int for one in flat):
        return found
    is_any_negative = any(one < 0 for one in flat)
    try:
        return exact.astype(np.int64 if is_any_negative else np.uint64)
    except OverflowError:
        return found


def _elements(name: str, count: int, raw: memoryview) -> Elements:
    if count > len(raw) // _LENGTH_BYTES:
        raise InvalidInput(f"input {shown(name)} has {len(raw)} bytes, too few for {count} elements of BYTES")
    found = []
    at = 0
    for _ in range(count):
        ends_at = at + _LENGTH_BYTES
        ends_at += int.from_bytes(raw[at:ends_at], "little")
        if ends_at > len(raw) or at + _LENGTH_BYTES > len(raw):
            raise InvalidInput(f"input {shown(name)} ends within an element of BYTES")
        found.append(bytes(raw[at + _LENGTH_BYTES : ends_at]))
        at = ends_at
    if at != len(raw):
        raise InvalidInput(
            f"input {shown(name)} has {len(raw) - at} bytes after its {count} elements of BYTES"
        )
    return tuple(found)


def _texts(name: str, count: int, values: list[Any]) -> Elements:
    flat: list[Any] = values
    for _ in range(RANK_MAX):
        if not any(isinstance(one, list) for one in flat):
            break
        flat = [inner for one in flat for inner in (one if isinstance(one, list) else [one])]
    if not all(isinstance(one, str) for one in flat):
        raise InvalidInput(f"input {shown(name)} is BYTES; in JSON its elements are texts")
    if len(flat) != count:
        raise InvalidInput(f"input {shown(name)} has {len(flat)} elements; its shape says {count}")
    return tuple(one.encode() for one in flat)


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}…"
