from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from tritonclient.utils import serialize_byte_tensor

from fabric.errors import Internal, InvalidInput, TooLarge
from roles.gateway.http.predict import read_predict
from roles.gateway.http.protocol_v2 import write_json
from roles.gateway.rpc.messages import message_class
from roles.gateway.rpc.translation import read_infer as read_message
from roles.gateway.tensors import (
    datatype_of,
    declared_dtype,
    from_raw,
    from_values,
    numbers,
    to_raw,
    to_values,
)
from tests.strategies import tensors


def is_real(name: str) -> bool:
    return not name.startswith("complex")


@given(tensors())
def test_every_array_comes_back_from_its_raw_bytes(tensor: Any) -> None:
    array = tensor.array
    if not is_real(array.dtype.name):
        with pytest.raises(Internal):
            datatype_of(array.dtype.name)
        return
    raw = to_raw(array)
    again = from_raw("x", datatype_of(array.dtype.name), array.shape, raw)
    assert isinstance(again, np.ndarray)
    assert (again.dtype, again.shape) == (array.dtype, array.shape)
    assert again.tobytes() == array.tobytes()


@given(tensors())
def test_every_array_comes_back_from_json_but_for_what_is_no_number(tensor: Any) -> None:
    array = tensor.array
    if not is_real(array.dtype.name):
        return
    if array.dtype.kind == "f":
        array = np.where(np.isinf(array), np.nan, array).astype(array.dtype)
    text = write_json(to_values(array))
    values = json.loads(text)
    again = from_values("x", datatype_of(array.dtype.name), array.shape, values)
    assert isinstance(again, np.ndarray)
    np.testing.assert_array_equal(again, array)
    assert again.dtype == array.dtype


def test_bf16_is_widened_as_tritons_client_does_it() -> None:
    values = np.array([[1.0, -2.5, 3.140625], [0.0, 1e30, -1e-30]], np.float32)
    narrow = values.astype(ml_dtypes.bfloat16)
    raw = narrow.tobytes()
    found = from_raw("x", "BF16", (2, 3), memoryview(raw))
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, narrow.astype(np.float32))


def test_bytes_are_taken_apart_as_tritons_client_puts_them_together() -> None:
    elements = (b"\x89PNG\r\n", b"", "né".encode())
    raw = serialize_byte_tensor(np.array(elements, object)).item()
    assert from_raw("x", "BYTES", (3,), memoryview(raw)) == elements


@pytest.mark.parametrize(
    ("shape", "raw"),
    [
        ((1,), b""),
        ((1,), b"\x05\0\0\0ab"),
        ((1,), b"\x01\0\0\0abc"),
        ((2,), b"\x01\0\0\0a\x01"),
        ((256,), b"\0\0\0\0"),
        ((1,), b"\xff\xff\xff\xff"),
    ],
)
def test_elements_that_do_not_add_up_are_refused(shape: tuple[int, ...], raw: bytes) -> None:
    with pytest.raises(InvalidInput):
        from_raw("x", "BYTES", shape, memoryview(raw))


@pytest.mark.parametrize(
    ("datatype", "shape", "size"),
    [
        ("FP32", (2,), 7),
        ("FP32", (2,), 12),
        ("BF16", (3,), 12),
        ("FP128", (1,), 16),
        ("fp32", (1,), 4),
        ("FP32", (-1,), 4),
        ("FP32", (1 << 62, 1 << 62), 4),
        ("FP32", (1,) * 9, 4),
        ("FP32", (0, 1 << 63), 0),
        ("FP32", (0, 1 << 62, 1 << 62), 0),
        ("BF16", (1 << 62, 4, 0), 0),
    ],
)
def test_raw_bytes_that_are_not_that_tensor_are_refused(datatype: str, shape: Any, size: int) -> None:
    with pytest.raises(InvalidInput):
        from_raw("x", datatype, shape, memoryview(bytes(size)))
    with pytest.raises(InvalidInput):
        from_values("x", datatype, shape, [0.0] * (size // 4))


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("INT8", [128, 0]),
        ("UINT8", [-1, 0]),
        ("UINT64", [1 << 64, 0]),
        ("INT32", [1.5, 0]),
        ("INT64", [1 << 63, -1]),
        ("INT64", [1.0, 2.0]),
        ("INT32", ["1", "2"]),
        ("INT32", [None, 1]),
        ("FP32", ["1", "2"]),
        ("FP32", [None, "2"]),
        ("FP32", [1e300, 0]),
        ("FP16", [1e6, 0]),
        ("FP64", [10**400, 0]),
        ("BOOL", [0, 1]),
        ("FP32", [[1], [2, 3]]),
        ("FP32", [1, 2, 3]),
        ("FP32", [[1, 2]]),
        ("FP32", {"a": 1}),
        ("FP32", None),
        ("FP32", 3),
        ("BF16", [1, 2]),
        ("BYTES", [1, 2]),
        ("BYTES", ["a"]),
        ("FP32", [{"a": 1}, {}]),
        ("FP32", [True, "x"]),
    ],
)
def test_json_that_does_not_fit_is_refused_and_never_changed(datatype: str, values: Any) -> None:
    with pytest.raises(InvalidInput):
        from_values("x", datatype, (2,), values)


def test_json_may_be_flat_or_as_the_shape_is() -> None:
    for values in ([1, 2, 3, 4], [[1, 2], [3, 4]]):
        found = from_values("x", "UINT32", (2, 2), values)
        assert isinstance(found, np.ndarray)
        assert found.tolist() == [[1, 2], [3, 4]]
    assert from_values("x", "BYTES", (2, 1), [["a"], ["é"]]) == (b"a", "é".encode())
    assert from_values("x", "UINT64", (2,), [0, (1 << 64) - 1]).tolist() == [0, (1 << 64) - 1]  # type: ignore[union-attr]
    assert from_values("x", "UINT64", (1,), [(1 << 64) - 1]).tolist() == [(1 << 64) - 1]  # type: ignore[union-attr]


def test_null_is_a_nan_both_ways() -> None:
    found = numbers("x", [1.5, None], declared_dtype("float32"))
    assert struct.pack("<2f", *found.tolist()) == struct.pack("<2f", 1.5, float("nan"))


@pytest.mark.parametrize(
    ("datatype", "shape", "values", "reason"),
    [
        ("FP32", (1, 8, 9), [1.0], "has 1 elements in a list; its shape [1, 8, 9] takes 72"),
        ("FP32", (3, 2), [[1, 2, 3], [4, 5, 6]], "has 6 elements in the shape [2, 3]; its shape [3, 2] takes 6"),
        ("FP32", (2,), [[1, 2], [3]], "is not an array: it has lists of different lengths, or too deep ones"),
        ("FP32", (1,), ["a"], "holds texts; it must hold numbers, as FP32 (float32)"),
        ("INT64", (1,), [1.5], "holds fractions, or numbers that are too large; it must hold whole numbers, as INT64 (int64)"),
        ("BOOL", (1,), [1], "holds numbers; it must hold true or false, as BOOL (bool)"),
        ("UINT8", (1,), [300], "goes from 300 to 300; UINT8 (uint8) takes 0 to 255"),
        ("FP16", (1,), [1e9], "holds a number over the range of FP16 (float16)"),
    ],
)  # fmt: skip
def test_what_came_and_what_should_have_come_are_both_told(
    datatype: str, shape: tuple[int, ...], values: Any, reason: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        from_values("x", datatype, shape, values)
    assert str(caught.value) == f"input 'x' {reason}"


@pytest.mark.parametrize(
    "read",
    [
        lambda values: from_values("x", "FP32", (3000,), values),
        lambda values: from_values("x", "INT8", (3000,), values),
        lambda values: from_values("x", "BOOL", (3000,), values),
        lambda values: numbers("x", values, declared_dtype("float32")),
        lambda values: numbers("x", [values], declared_dtype("int64")),
        lambda values: read_predict("m", json.dumps({"inputs": values}).encode(), "", "", None),
    ],
)
@pytest.mark.parametrize("rest", ["b", 1, None])
def test_a_long_text_among_short_values_takes_no_room_for_each(
    read: Callable[[list[Any]], Any], rest: Any
) -> None:
    values = ["a" * 25_000, *[rest] * 2_999]
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInput, match="it must hold"):
            read(values)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_more_elements_of_bytes_than_one_inference_takes_are_not_even_looked_at() -> None:
    count = 1 << 20
    with pytest.raises(TooLarge, match="has 1048576 elements of BYTES; one inference may have 256 rows"):
        from_raw("x", "BYTES", (count,), memoryview(bytes(4 * count)))
    with pytest.raises(TooLarge):
        from_values("x", "BYTES", (16, count), [])
    asked = message_class("ModelInferRequest")(model_name="m")
    asked.inputs.add(name="x", datatype="BYTES", shape=[257]).contents.bytes_contents.extend([b""] * 257)
    with pytest.raises(TooLarge):
        read_message(asked)


class CountedShape(list[int]):
    """Tells how many of its lengths were looked at."""

    seen = 0

    def __iter__(self) -> Any:
        for one in super().__iter__():
            self.seen += 1
            yield one


def test_of_a_shape_with_too_many_lengths_no_product_is_made() -> None:
    shape = CountedShape([9 << 60] * 100_000)
    for read in (from_raw, from_values):
        with pytest.raises(InvalidInput, match="it must be at most 8 lengths"):
            read("x", "FP32", shape, memoryview(b""))
    assert shape.seen == 0
