"""What a gRPC message would take is found from the lengths of its fields."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from fabric.errors import InvalidInput, RequestError, TooLarge
from fabric.messages import RANK_MAX
from roles.gateway.http.limits import BodyBudget
from roles.gateway.rpc.messages import message_class, methods
from roles.gateway.rpc.service import RpcService
from roles.gateway.rpc.size_check import TENSOR_FIELDS_MAX, check_size
from roles.gateway.rpc.translation import read_infer
from roles.gateway.tensors import FILES_MAX, VALUES_MAX
from tests.unit.roles.gateway.rpc.test_stream import service

Asked = message_class("ModelInferRequest")


def numbered(number: int, value: bytes) -> bytes:
    """A field that has a length."""
    length, size = b"", len(value)
    while size >= 0x80:
        length += bytes([size & 0x7F | 0x80])
        size >>= 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + value


def an_input(*fields: bytes) -> bytes:
    return numbered(5, numbered(1, b"x") + b"".join(fields))


def contents(field: str, value: bytes) -> bytes:
    number = message_class("InferTensorContents").DESCRIPTOR.fields_by_name[field].number
    return an_input(numbered(5, numbered(number, value)))


MANY = 1 << 20
LONG_SHAPE = numbered(3, b"\x01" * MANY)
EMPTY_FILES = numbered(5, b"\x42\x00" * MANY)
PARAMETERS = numbered(4, numbered(1, b"a")) * (1 << 17)


@pytest.mark.parametrize(
    ("raw", "refusal"),
    [
        (an_input(LONG_SHAPE), "a shape of over 80 bytes"),
        (an_input(numbered(3, b"\x01" * 50) * 3), "a shape of over 80 bytes"),
        (an_input(b"\x18\x01" * MANY), "a shape of over 80 bytes"),
        (an_input(EMPTY_FILES), "over 256 elements of BYTES"),
        (an_input(numbered(5, b"\x42\x00" * 200) * 2), "over 256 elements of BYTES"),
        (an_input(PARAMETERS), "over 32768 fields"),
        (numbered(6, PARAMETERS), "over 32768 fields"),
        (an_input(PARAMETERS[: len(PARAMETERS) // 4]) * 3, "over 32768 fields"),
        (an_input(numbered(5, b"\x30\x01" * MANY)), "over 32768 fields"),
        (an_input(b"\x2a\x00" * 70) * 500, "over 32768 fields"),
        (an_input(numbered(5, b"")) * 12_000 + an_input(b"\x0b\x0c" * 30_000), "over 32768 fields"),
    ],
)
def test_what_would_take_many_times_its_bytes_is_refused_before_it_is_read(raw: bytes, refusal: str) -> None:
    def parse(raw: bytes) -> Any:
        raise AssertionError("it was read")

    budget = BodyBudget(1 << 26)
    found = RpcService._read(service(budget), parse, raw)
    with pytest.raises(InvalidInput, match=refusal):
        assert found.message
    assert budget.used == 0


@pytest.mark.parametrize(
    ("field", "element"),
    [
        ("bool_contents", b"\x01"),
        ("int_contents", b"\xff\x01"),
        ("int64_contents", b"\xff" * 9 + b"\x01"),
        ("uint_contents", b"\x01"),
        ("uint64_contents", b"\x81\x01"),
        ("fp32_contents", bytes(4)),
        ("fp64_contents", bytes(8)),
    ],
)
def test_elements_are_counted_whatever_bytes_they_have(field: str, element: bytes) -> None:
    """Of all inputs together."""
    half = contents(field, element * (VALUES_MAX // 2))
    check_size(half * 2)
    with pytest.raises(TooLarge, match="send tensors as raw_input_contents"):
        check_size(half * 2 + contents(field, element * 200))


def test_as_much_as_there_may_be_is_read() -> None:
    asked = Asked(model_name="m")
    for at in range(4_096):
        one = asked.inputs.add(name=str(at), datatype="FP32", shape=[1] * RANK_MAX)
        one.contents.fp32_contents.append(1.0)
        asked.outputs.add(name=str(at)).parameters["binary_data"].bool_param = True
        for name in ("a", "b", "c"):
            one.parameters[name].bool_param = True
    check_size(asked.SerializeToString())
    files = Asked(model_name="m")
    one = files.inputs.add(name="x", datatype="BYTES", shape=[FILES_MAX])
    one.contents.bytes_contents.extend([b"a"] * FILES_MAX)
    check_size(files.SerializeToString())
    assert len(read_infer(files).inputs[0].data) == FILES_MAX
    negative = Asked(model_name="m")
    one = negative.inputs.add(name="x", datatype="INT64", shape=[-1] * RANK_MAX)
    check_size(negative.SerializeToString())
    assert TENSOR_FIELDS_MAX == 32_768, "the guide says so"


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=50))
def test_any_values_are_read_as_they_were_written(values: list[int]) -> None:
    asked = Asked(model_name="m")
    asked.inputs.add(name="x", datatype="INT64", shape=[len(values)]).contents.int64_contents.extend(values)
    check_size(asked.SerializeToString())
    data = read_infer(Asked.FromString(asked.SerializeToString())).inputs[0].data
    assert np.asarray(data).tolist() == values


@given(st.binary(max_size=200), st.integers(0, 6))
def test_what_is_no_message_is_left_to_the_parser(noise: bytes, number: int) -> None:
    """Also within an input, and where a length leads beyond the end."""
    for raw in (noise, numbered(number + 1, noise), numbered(5, numbered(number + 1, noise))[:-1]):
        try:
            check_size(raw)
        except RequestError:
            continue
        with contextlib.suppress(DecodeError):
            Asked.FromString(raw)


def test_no_other_request_has_fields_of_these_numbers() -> None:
    for method in methods():
        if not method.name.endswith("Infer"):
            numbers = {field.number for field in method.input_type.fields}
            assert not numbers & {5, 6}, method.name
