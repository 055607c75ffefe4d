"""HTTP bodies: examples of the published specification, and tritonclient's own encoder and decoder as the other side."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput, InferResult

from fabric.errors import InvalidInput, TooLarge
from fabric.link import Tensor
from roles.gateway.failures import Unsupported
from roles.gateway.http.protocol_v2 import JSON_BYTES_MAX, read_infer, write_infer
from roles.gateway.inference import Inference, OutputWanted
from roles.gateway.tensors import VALUES_MAX
from tests.strategies import tensors

# "Inference Request Examples" of the Open Inference Protocol (input1's shape corrected: the page gives one value for [3]).
FROM_THE_SPECIFICATION = b"""{
  "id" : "42",
  "inputs" : [
    {"name" : "input0", "shape" : [ 2, 2 ], "datatype" : "UINT32", "data" : [ 1, 2, 3, 4 ]},
    {"name" : "input1", "shape" : [ 1 ], "datatype" : "BOOL", "data" : [ true ]}
  ],
  "outputs" : [ {"name" : "output0"} ]
}"""

# "Binary Tensor Request" of the extension.
BINARY_HEAD = b"""{
  "model_name" : "mymodel",
  "inputs" : [
    {"name" : "input0", "shape" : [ 2, 2 ], "datatype" : "UINT32", "parameters" : {"binary_data_size" : 16}},
    {"name" : "input1", "shape" : [ 3 ], "datatype" : "BOOL", "parameters" : {"binary_data_size" : 3}}
  ],
  "outputs" : [ {"name" : "output0", "parameters" : {"binary_data" : true}} ]
}"""


def arrays_of(inference: Inference) -> dict[str, Any]:
    return {one.name: one.data for one in inference.inputs}


def test_the_specifications_json_is_read() -> None:
    inference = read_infer("mymodel", FROM_THE_SPECIFICATION, None)
    assert (inference.model, inference.request_id) == ("mymodel", "42")
    assert inference.outputs == [OutputWanted("output0", is_binary=False)]
    found = arrays_of(inference)
    assert found["input0"].tolist() == [[1, 2], [3, 4]]
    assert found["input0"].dtype == np.uint32
    assert found["input1"].tolist() == [True]


def test_the_specifications_binary_request_is_read() -> None:
    body = BINARY_HEAD + np.array([1, 2, 3, 4], "<u4").tobytes() + b"\1\0\1"
    inference = read_infer("mymodel", body, str(len(BINARY_HEAD)))
    found = arrays_of(inference)
    assert found["input0"].tolist() == [[1, 2], [3, 4]]
    assert found["input1"].tolist() == [True, False, True]
    assert inference.outputs == [OutputWanted("output0", is_binary=True)]


def test_the_specifications_answer_is_written() -> None:
    inference = Inference("mymodel", (), [OutputWanted("output0", is_binary=False)], request_id="42")
    output = np.array([[1.0, 1.1], [2.0, 2.1], [3.0, 3.1]], np.float64)
    (body,), content_type, size = write_infer(inference, {"output0": output, "other": output})
    assert (content_type, size) == ("application/json", None)
    assert json.loads(bytes(body)) == {
        "model_name": "mymodel",
        "model_version": "1",
        "id": "42",
        "outputs": [
            {"name": "output0", "datatype": "FP64", "shape": [3, 2], "data": [1.0, 1.1, 2.0, 2.1, 3.0, 3.1]}
        ],
    }


def encoded(array: Tensor, *, is_binary: bool, **options: Any) -> tuple[bytes, str | None]:
    """By tritonclient."""
    datatype = {"bool": "BOOL", "float16": "FP16", "float32": "FP32", "float64": "FP64"}.get(array.dtype.name)
    wanted = InferInput("x", list(array.shape), datatype or array.dtype.name.upper())
    wanted.set_data_from_numpy(array, binary_data=is_binary)
    body, size = InferenceServerClient.generate_request_body([wanted], **options)
    return body, None if size is None else str(size)


@given(tensors(), st.booleans())
def test_what_tritons_client_encodes_is_read_bit_by_bit(tensor: Any, is_binary: bool) -> None:
    array = tensor.array
    if array.dtype.kind == "c":
        return
    if not is_binary and (array.dtype.name == "float16" or not np.isfinite(array).all()):
        return  # its JSON has no numbers for them
    body, size = encoded(array, is_binary=is_binary)
    inference = read_infer("m", body, size)
    found = arrays_of(inference)["x"]
    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert inference.is_binary  # it names no output, and asks for all of them as binary data


def test_tritons_options_are_read() -> None:
    outputs = [InferRequestedOutput("a"), InferRequestedOutput("b", binary_data=False)]
    array = np.zeros((2,), np.float32)
    options: dict[str, Any] = {"request_id": "7", "timeout": 25_000, "priority": 1}
    inference = read_infer("m", *encoded(array, is_binary=True, outputs=outputs, **options))
    assert (inference.request_id, inference.budget_ms, inference.priority) == ("7", 25.0, 9)
    assert inference.outputs == [OutputWanted("a", is_binary=True), OutputWanted("b", is_binary=False)]


@given(st.lists(tensors(), min_size=1, max_size=4), st.booleans())
def test_what_is_written_tritons_client_reads_bit_by_bit(outputs: list[Any], is_binary: bool) -> None:
    named = {f"o{at}": one.array for at, one in enumerate(outputs) if one.array.dtype.kind != "c"}
    if not is_binary:
        named = {name: array for name, array in named.items() if np.isfinite(array).all()}
    inference = Inference("m", (), [OutputWanted(name, is_binary) for name in named])
    parts, _, size = write_infer(inference, named)
    read = InferResult.from_response_body(b"".join(parts), header_length=size)
    for name, array in named.items():
        found = read.as_numpy(name)
        assert found is not None
        assert found.shape == array.shape
        np.testing.assert_array_equal(found, array)


@given(st.binary(max_size=300), st.one_of(st.none(), st.integers(-3, 400).map(str)))
def test_any_body_is_read_or_refused(body: bytes, size: str | None) -> None:
    with contextlib.suppress(InvalidInput, TooLarge, Unsupported):
        read_infer("m", body, size)


def one_input(**keys: Any) -> bytes:
    return json.dumps(
        {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1], **keys}]}
    ).encode()


@pytest.mark.parametrize(
    ("body", "size"),
    [
        (b"", None),
        (b"[]", None),
        (b'{"inputs": [{"name": "x"}]}', None),
        (one_input(shape=[1.5]), None),
        (one_input(shape=[2]), None),
        (one_input(data=None), None),
        (one_input(parameters={"binary_data_size": 4}), None),
        (one_input(parameters={"binary_data_size": -1}), None),
        (one_input(parameters={"binary_data_size": True}), None),
        (one_input(), "5"),
        (one_input(), "99999"),
        (one_input(), "-1"),
        (one_input(), "1e3"),
        (one_input() + b"more", str(len(one_input()))),
        (b'{"inputs": ' + b"[" * 50_000, None),
        (b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": ' + b"[" * 50_000, None),
        (b"\xff\xfe", None),
    ],
)
def test_wrong_bodies_are_refused_with_words(body: bytes, size: str | None) -> None:
    with pytest.raises(InvalidInput, match=r".{10}"):
        read_infer("m", body, size)


def test_json_without_end_is_too_large() -> None:
    with pytest.raises(TooLarge, match="binary"):
        read_infer("m", b" " * (JSON_BYTES_MAX + 1), None)


@pytest.mark.parametrize(
    "parameters",
    [{"shared_memory_region": "r"}, {"classification": 3}],
)
def test_what_would_change_the_answer_and_is_not_done_is_said(parameters: dict[str, Any]) -> None:
    with pytest.raises(Unsupported):
        read_infer("m", one_input(parameters=parameters), None)


def test_an_answer_in_json_has_an_end() -> None:
    half = np.zeros(VALUES_MAX // 2 + 1, np.uint8)
    both = {"y": half, "z": half}
    with pytest.raises(
        TooLarge, match=r"has 4194306 elements; JSON may have 4194304: ask .* for binary data"
    ):
        write_infer(Inference("m", ()), both)
    one_of_them = [OutputWanted("y", is_binary=False), OutputWanted("z", is_binary=True)]
    for inference in (Inference("m", (), is_binary=True), Inference("m", (), one_of_them)):
        parts, _, size = write_infer(inference, both)
        assert size == len(parts[0])


def test_sequences_are_not_done() -> None:
    body = json.dumps({"inputs": [], "parameters": {"sequence_id": 7}}).encode()
    with pytest.raises(Unsupported, match="sequences"):
        read_infer("m", body, None)


def test_null_for_what_may_be_left_out_is_as_if_it_was() -> None:
    """Clients that are made from a schema send all members."""
    given = {"id": None, "parameters": None, "outputs": None}
    values = one_input(parameters=None)
    assert read_infer("m", json.dumps({**json.loads(values), **given}).encode(), None) == read_infer(
        "m", values, None
    )
    wanted = {
        "parameters": {"binary_data_output": True},
        "outputs": [{"name": "y", "parameters": None}, {"name": "z", "parameters": {"binary_data": None}}],
    }
    inference = read_infer("m", json.dumps({**json.loads(values), **wanted}).encode(), None)
    assert inference.outputs == [OutputWanted(name, is_binary=True) for name in "yz"]
    raw = one_input(
        data=None, parameters={"binary_data_size": 4, "shared_memory_region": None, "timeout": None}
    )
    (sent,) = read_infer("m", raw + b"\0\0\x80?", str(len(raw))).inputs
    assert sent.data.tolist() == [1.0]  # type: ignore[union-attr]


def test_an_unknown_output_is_named() -> None:
    inference = Inference("m", (), [OutputWanted("nix", is_binary=True)])
    with pytest.raises(InvalidInput, match=r"no output 'nix'; it has y"):
        write_infer(inference, {"y": np.zeros(1)})


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"[]", "the whole is a list; it must be an object"),
        (b"{}", "inputs is missing"),
        (b'{"inputs": [{"name": "x"}]}', "inputs[0].datatype is missing"),
        (b'{"inputs": null}', "inputs is null; it must be a list"),
        (b'{"inputs": [], "id": 7}', "id is a whole number; it must be a text"),
        (b'{"inputs": [], "outputs": {}}', "outputs is an object; it must be a list"),
        (one_input(parameters="x"), "inputs[0].parameters is a text; it must be an object"),
        (one_input(shape="x"), "inputs[0].shape is a text; it must be a list"),
        (one_input(shape=[1.5]), "inputs[0].shape[0] is a number; it must be a whole number"),
    ],
)
def test_a_body_of_another_layout_is_told_where_it_differs(body: bytes, reason: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        read_infer("m", body, None)
    assert str(caught.value) == f"the request's JSON: {reason}"
