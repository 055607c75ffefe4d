"""The protocol's datatypes and numpy's arrays: raw little-endian bytes, JSON numbers, byte strings.

Source: Open Inference Protocol v2, "Tensor Data", and the binary tensor data extension. An element of BYTES is preceded by its
length, four bytes little-endian. BF16 has no counterpart in numpy or in our messages: it is widened to float32, exactly.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from types import NoneType
from typing import Any, Final

import numpy as np

from fabric.errors import Internal, InvalidInput, TooLarge
from fabric.link import Tensor
from fabric.messages import RANK_MAX
from fabric.policy_options import shown
from fabric.tensors import dtype_name

BYTES: Final = "BYTES"
BF16: Final = "BF16"
FILES_MAX: Final = 256
"""Elements of a BYTES tensor: each is a request of its own."""
VALUES_MAX: Final = 4 << 20
"""Elements of one inference, or of its answer, that go one by one, in `contents` or in JSON: each is an object of Python for a while, and nothing else is done meanwhile."""
_LENGTH: Final = struct.Struct("<I")  # before each element of BYTES
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

_HELD: Final[Mapping[frozenset[type], str]] = {
    frozenset({str}): "texts",
    frozenset({bool}): "true or false",
    frozenset({int}): "numbers",
    frozenset({float}): "fractions, or numbers that are too large",
    frozenset({int, float}): "fractions, or numbers that are too large",
}
"""What came, by the types of JSON's values."""
_TAKEN: Final[Mapping[str, tuple[frozenset[type], str]]] = {
    "b": (frozenset({bool}), "true or false"),
    "i": (frozenset({int}), "whole numbers"),
    "u": (frozenset({int}), "whole numbers"),
    "f": (frozenset({int, float, NoneType}), "numbers"),
}
"""By the kind of numpy's type: the types of JSON's values that belong there, and what they are called."""

Elements = tuple[bytes, ...]
"""Of a BYTES tensor, in C order."""


def datatype_of(dtype: str) -> str:
    """The protocol's name of a numpy dtype. Raises Internal for one that it has no name for (complex numbers)."""
    datatype = _DATATYPES.get(dtype)
    if datatype is None:
        raise Internal(f"the protocol has no datatype for {dtype}; the SDK carries it")
    return datatype


def count_of(name: str, datatype: str, shape: Sequence[int]) -> int:
    """How many elements there are. Raises InvalidInput for a shape that no tensor has, TooLarge for more files than one inference takes."""
    # The rank first: the product of a million lengths takes minutes.
    # An empty tensor may say any lengths beside its 0: numpy takes them as far as their product counts bytes.
    if (
        len(shape) > RANK_MAX
        or any(length < 0 for length in shape)
        or math.prod(max(1, length) for length in shape) > _ELEMENTS_MAX
    ):
        raise InvalidInput(
            f"input {shown(name)} has the shape {_shown(shape)}; it must be at most {RANK_MAX} lengths of 0 and more,"
            f" and of {_ELEMENTS_MAX} elements"
        )
    count = math.prod(shape)
    if datatype == BYTES and count > FILES_MAX:
        raise TooLarge(
            f"input {shown(name)} has {count} elements of BYTES; one inference may have {FILES_MAX} rows of one each"
        )
    return count


def from_raw(name: str, datatype: str, shape: Sequence[int], raw: memoryview) -> Tensor | Elements:
    """View raw bytes as the tensor they are said to be. Raises InvalidInput where they are not, TooLarge as `count_of` does."""
    count = count_of(name, datatype, shape)
    if datatype == BYTES:
        return _elements(name, count, raw)
    dtype = _RAW_BF16 if datatype == BF16 else _numpy_dtype(name, datatype)
    if len(raw) != count * dtype.itemsize:
        raise InvalidInput(
            f"input {shown(name)} has {len(raw)} bytes; {datatype} {_shown(shape)} takes {count * dtype.itemsize}"
        )
    array: Tensor = np.ndarray(tuple(shape), dtype, buffer=raw) if count else np.empty(tuple(shape), dtype)
    return _widened(array) if datatype == BF16 else array


def from_values(name: str, datatype: str, shape: Sequence[int], values: Any) -> Tensor | Elements:
    """What JSON says: a list of values in C order, or lists in lists as the shape is. Raises InvalidInput, TooLarge."""
    count = count_of(name, datatype, shape)
    if datatype == BF16:
        raise InvalidInput(f"input {shown(name)} is BF16, which goes as binary data only")
    if not isinstance(values, list):
        raise InvalidInput(f"input {shown(name)} has no data: give a list, or binary data")
    leaves, nested = _leaves(name, values)
    if len(leaves) != count or (len(nested) > 1 and nested != tuple(shape)):
        said = f"its shape {_shown(shape)} takes {count}"
        found = f"in the shape {_shown(nested)}" if len(nested) > 1 else "in a list"
        raise InvalidInput(f"input {shown(name)} has {len(leaves)} elements {found}; {said}")
    if datatype == BYTES:
        if not all(isinstance(one, str) for one in leaves):
            raise InvalidInput(f"input {shown(name)} is BYTES; in JSON its elements are texts")
        return tuple(one.encode() for one in leaves)
    return _array(name, leaves, _numpy_dtype(name, datatype)).reshape(tuple(shape))


def numbers(name: str, values: Any, dtype: np.dtype[np.generic]) -> Tensor:
    """JSON's numbers as an array of that type, exactly. Raises InvalidInput where one does not fit.

    Null is a NaN, as in what we answer.
    """
    leaves, shape = _leaves(name, values)
    return _array(name, leaves, dtype).reshape(shape)


def to_raw(array: Tensor) -> memoryview:
    """Its bytes, little-endian, in C order: a view where the array is so already."""
    dtype = _NUMPY[datatype_of(dtype_name(array.dtype))]
    return np.asarray(array, dtype=dtype, order="C").reshape(-1).view(np.uint8).data


def check_values(arrays: Iterable[Tensor]) -> None:
    """Raises TooLarge where an answer would have more elements in JSON than it may."""
    count = sum(array.size for array in arrays)
    if count > VALUES_MAX:
        raise TooLarge(
            f"the answer has {count} elements; JSON may have {VALUES_MAX}: ask /v2/models/…/infer for binary data"
        )


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


def _leaves(name: str, values: Any) -> tuple[list[Any], tuple[int, ...]]:
    """What the lists in lists hold, in C order, and their shape. Raises InvalidInput where they have none."""
    level: list[Any] = [values]
    shape: tuple[int, ...] = ()
    while list in (kinds := set(map(type, level))):
        lengths = set(map(len, level)) if len(kinds) == 1 else set()
        if len(lengths) != 1 or len(shape) == RANK_MAX:
            raise InvalidInput(
                f"input {shown(name)} is not an array: it has lists of different lengths, or too deep ones"
            )
        shape = (*shape, *lengths)
        level = list(chain.from_iterable(level))
    return level, shape


def _array(name: str, leaves: list[Any], dtype: np.dtype[np.generic]) -> Tensor:
    # Of texts numpy would make an array as wide as the longest of them, times their number: it sees none.
    kinds = frozenset(map(type, leaves))
    taken, called = _TAKEN[dtype.kind]
    if not kinds <= taken:
        raise InvalidInput(
            f"input {shown(name)} holds {_HELD.get(kinds, 'values of several kinds')};"
            f" it must hold {called}, as {_named(dtype)}"
        )
    if dtype.kind in "iu":
        limits = np.iinfo(dtype_name(dtype))
        low, high = min(leaves, default=0), max(leaves, default=0)
        if low < limits.min or high > limits.max:
            raise InvalidInput(
                f"input {shown(name)} goes from {shown(low)} to {shown(high)};"
                f" {_named(dtype)} takes {limits.min} to {limits.max}"
            )
        return np.array(leaves, dtype)
    try:
        found = np.asarray(leaves)
        if found.dtype.kind == "O":  # nulls, or numbers of over 64 bits
            found = found.astype(np.float64)
        with np.errstate(over="raise"):
            return found.astype(dtype)
    except (FloatingPointError, OverflowError) as error:
        raise InvalidInput(f"input {shown(name)} holds a number over the range of {_named(dtype)}") from error


def _elements(name: str, count: int, raw: memoryview) -> Elements:
    found = []
    at = 0
    for _ in range(count):
        begins_at = at + _LENGTH.size
        ends_at = begins_at + _LENGTH.unpack_from(raw, at)[0] if begins_at <= len(raw) else begins_at
        if ends_at > len(raw):
            raise InvalidInput(f"input {shown(name)} ends within an element of BYTES")
        found.append(bytes(raw[begins_at:ends_at]))
        at = ends_at
    if at != len(raw):
        raise InvalidInput(
            f"input {shown(name)} has {len(raw) - at} bytes after its {count} elements of BYTES"
        )
    return tuple(found)


def _shown(shape: Sequence[int]) -> str:
    text = str(list(shape[: RANK_MAX + 1]))
    return text if len(text) <= _SHOWN_MAX and len(shape) <= RANK_MAX else f"{text[:_SHOWN_MAX]}…"
