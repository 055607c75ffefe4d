"""`POST /v2/models/M/infer`: HTTP bodies of the Open Inference Protocol to inferences and back, as pure functions.

A body is JSON, or JSON and then raw tensors in the order of their inputs; then the header field
`Inference-Header-Content-Length` says where the JSON ends, and each such input's parameter `binary_data_size` how long it is.
An answer has the same layout (Open Inference Protocol v2, "Inference Request"; extension "binary tensor data").
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec

from fabric.errors import InvalidInput, TooLarge
from fabric.link import Tensor
from fabric.messages import TENSORS_MAX
from fabric.policy_options import shown
from fabric.tensors import dtype_name
from roles.gateway.failures import Failure
from roles.gateway.http.messages import BINARY, JSON, Body, Reply, retry_headers
from roles.gateway.inference import (
    VERSION,
    Inference,
    InputTensor,
    OutputWanted,
    budget_of,
    check_parameters,
    check_tensor_parameters,
    priority_of,
    wanted_of,
)
from roles.gateway.tensors import check_values, datatype_of, from_raw, from_values, to_raw, to_values

LENGTH_HEADER: Final = "inference-header-content-length"
JSON_BYTES_MAX: Final = 16 << 20
"""Of JSON alone: numbers in it take ten times their bytes while they are read, and nothing else is done meanwhile."""

Parameters = dict[str, Any]


# What may be left out may be null too: clients that are made from a schema send all members.


class _Input(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    parameters: Parameters | None = None
    data: msgspec.Raw = msgspec.Raw()


class _Output(msgspec.Struct):
    name: str
    parameters: Parameters | None = None


class _Request(msgspec.Struct):
    inputs: Annotated[list[_Input], msgspec.Meta(max_length=TENSORS_MAX)]
    id: str | None = None
    parameters: Parameters | None = None
    outputs: Annotated[list[_Output], msgspec.Meta(max_length=TENSORS_MAX)] | None = None


_UNREADABLE: Final = (msgspec.DecodeError, UnicodeError, RecursionError)
_KINDS: Final = {
    "array": "a list",
    "object": "an object",
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
}
_requests: Final = msgspec.json.Decoder(_Request)
_documents: Final = msgspec.json.Decoder()
_encoder: Final = msgspec.json.Encoder()


def read_infer(model: str, body: bytes, header_length: str | None) -> Inference:
    """The inference that a body asks for. `header_length`: the header field of that name. Raises InvalidInput, TooLarge, Unsupported."""
    size = _json_size(body, header_length)
    asked = _decoded(body[:size] if size < len(body) else body)
    parameters = _given(asked.parameters)
    check_parameters(parameters)
    rest = memoryview(body)[size:]
    inputs = []
    for one in asked.inputs:
        of_input = _given(one.parameters)
        check_tensor_parameters(one.name, of_input)
        raw_size = of_input.get("binary_data_size")
        if raw_size is None:
            data = from_values(one.name, one.datatype, one.shape, _values(one))
        else:
            raw, rest = _cut(one.name, raw_size, rest)
            data = from_raw(one.name, one.datatype, one.shape, raw)
        inputs.append(InputTensor(one.name, tuple(one.shape), data))
    if rest:
        raise InvalidInput(f"{len(rest)} bytes of binary data belong to no input")
    is_binary = parameters.get("binary_data_output") is True
    outputs = []
    for wanted in asked.outputs or ():
        of_output = _given(wanted.parameters)
        check_tensor_parameters(wanted.name, of_output)
        outputs.append(OutputWanted(wanted.name, of_output.get("binary_data", is_binary) is True))
    return Inference(
        model,
        inputs,
        outputs,
        is_binary,
        budget_of(parameters),
        priority_of(parameters),
        asked.id or "",
    )


def write_infer(
    inference: Inference, outputs: Mapping[str, Tensor]
) -> tuple[Sequence[Body], str, int | None]:
    """The body of its answer, the content type, and the JSON's length where tensors follow it (else None). Raises InvalidInput, TooLarge."""
    described: list[dict[str, Any]] = []
    raw: list[Body] = []
    wanted = wanted_of(inference, outputs)
    check_values(array for _, array, is_binary in wanted if not is_binary)
    for name, array, is_binary in wanted:
        one: dict[str, Any] = {
            "name": name,
            "datatype": datatype_of(dtype_name(array.dtype)),
            "shape": array.shape,
        }
        if is_binary:
            data = to_raw(array)
            one["parameters"] = {"binary_data_size": len(data)}
            raw.append(data)
        else:
            one["data"] = to_values(array)
        described.append(one)
    answer: dict[str, Any] = {"model_name": inference.model, "model_version": VERSION, "outputs": described}
    if inference.request_id:
        answer["id"] = inference.request_id
    head = _encoder.encode(answer)
    return ((head, *raw), BINARY, len(head)) if raw else ((head,), JSON, None)


def write_json(document: Any) -> bytes:
    """Any other answer. NaN and infinity are null."""
    return _encoder.encode(document)


def failed(failure: Failure) -> Reply:
    """The answer that says what went wrong."""
    return Reply(failure.status, (write_json(failure.as_plain()),), headers=retry_headers(failure))


def read_json(body: bytes | str, what: str = "the body") -> Any:
    """Any other body, or what else is JSON. Raises InvalidInput, TooLarge."""
    if len(body) > JSON_BYTES_MAX:
        raise TooLarge(
            f"{len(body)} bytes of JSON; there may be {JSON_BYTES_MAX}: send tensors as binary data"
        )
    try:
        return _documents.decode(body)
    except _UNREADABLE as error:
        raise InvalidInput(f"{what} is not JSON: {error}") from error


def _json_size(body: bytes, header_length: str | None) -> int:
    if header_length is None:
        size = len(body)
    elif not (header_length.isascii() and header_length.isdigit() and len(header_length) <= 12):
        raise InvalidInput(
            f"Inference-Header-Content-Length is {shown(header_length)}; it must be a number of bytes"
        )
    else:
        size = int(header_length)
    if size > len(body):
        raise InvalidInput(f"Inference-Header-Content-Length is {size}; the body has {len(body)} bytes")
    if size > JSON_BYTES_MAX:
        raise TooLarge(f"{size} bytes of JSON; there may be {JSON_BYTES_MAX}: send tensors as binary data")
    return size


def _decoded(text: bytes) -> _Request:
    try:
        return _requests.decode(text)
    except _UNREADABLE as error:
        raise InvalidInput(f"the request's JSON: {_reworded(str(error))}") from error


def _reworded(decoder_message: str) -> str:
    """The decoder's words with the path first, then what is there and what should be."""
    what, _, at = decoder_message.partition(" - at `$")
    path = at.rstrip("`").lstrip(".")
    expected = re.match(r"Expected `(\w+)(?: \| null)?`, got `(\w+)`", what)
    if expected:
        right, found = (_KINDS.get(word, word) for word in expected.groups())
        return f"{path or 'the whole'} is {found}; it must be {right}"
    missing = re.search(r"missing required field `(\w+)`", what)
    if missing:
        return f"{path}.{missing[1]} is missing".lstrip(".")
    return f"{path}: {what}" if path else what


def _given(parameters: Parameters | None) -> Parameters:
    return {key: value for key, value in parameters.items() if value is not None} if parameters else {}


def _values(one: _Input) -> Any:
    if not bytes(one.data):
        raise InvalidInput(f"input {shown(one.name)} has no data, and no binary_data_size")
    try:
        return _documents.decode(one.data)
    except _UNREADABLE as error:
        raise InvalidInput(f"the data of input {shown(one.name)}: {error}") from error


def _cut(name: str, size: object, rest: memoryview) -> tuple[memoryview, memoryview]:
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise InvalidInput(
            f"binary_data_size of input {shown(name)} is {shown(size)}; it must be a number of bytes"
        )
    if size > len(rest):
        raise InvalidInput(f"input {shown(name)} has {size} bytes; {len(rest)} are left of the body")
    return rest[:size], rest[size:]
