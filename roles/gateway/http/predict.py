"""`POST /v1/models/M:predict`: for people, with curl. Pure functions, as in `protocol_v2.py`.

A body is a picture's file, or JSON: `{"inputs": {"x": [[1, 2]]}}` for one item (`{"inputs": [[1, 2]]}` where the model has one
input), or `{"instances": [...]}` for several of them. Numbers take the type that the model declares; `{"b64": "..."}` is a file.
"""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qsl

import numpy as np

from fabric.client import InferResult
from fabric.errors import InvalidInput
from fabric.link import Tensor
from fabric.messages import TENSORS_MAX, Ledger, ModelInfo
from fabric.policy_options import shown
from roles.gateway.http.protocol_v2 import read_json
from roles.gateway.inference import ROWS_MAX, Inference, InputTensor, Rows, budget_of, priority_of
from roles.gateway.tensors import check_values, declared_dtype, numbers, to_values

KEYS: Final = ("inputs", "instances", "deadline_ms", "priority", "id")
_FILES: Final = ("image/", "application/octet-stream")
_DTYPE_UNSAID: Final = "float32"  # of a model that declares no inputs


def read_predict(
    model: str, body: bytes, content_type: str, query: str, info: ModelInfo | None
) -> tuple[Inference, Rows]:
    """What a body asks for. Raises InvalidInput, TooLarge."""
    asked_in_query = _query(query)
    if content_type.lower().startswith(_FILES):
        name = _only_input(info)
        _check_takes_file(name, info)
        file = InputTensor(name, (1,), (body,))
        inference = Inference(
            model, (file,), budget_ms=budget_of(asked_in_query), priority=priority_of(asked_in_query)
        )
        return inference, Rows([{name: _bytes(body)}], is_stacked=False)
    document = read_json(body)
    if not isinstance(document, dict):
        raise InvalidInput(
            'the body must be {"inputs": …} or {"instances": [...]}, or a picture with its Content-Type'
        )
    for key in document:
        if key not in KEYS:
            raise InvalidInput(f"unknown key {shown(key)}; there are {', '.join(KEYS)}")
    document = {key: value for key, value in document.items() if value is not None}  # null: left out
    parameters = {**asked_in_query, **document}
    request_id = document.get("id", "")
    if not isinstance(request_id, str):
        raise InvalidInput("id must be a text")
    inference = Inference(
        model, (), budget_ms=budget_of(parameters), priority=priority_of(parameters), request_id=request_id
    )
    return inference, _rows(document, info)


def write_predict(
    inference: Inference, results: Sequence[InferResult], *, is_stacked: bool
) -> dict[str, Any]:
    """The answer's document: outputs as nested lists, and where the time went. Raises TooLarge."""
    check_values(array for result in results for array in result.outputs.values())
    outputs = [_nested(result.outputs) for result in results]
    answer: dict[str, Any] = {"model": inference.model}
    if inference.request_id:
        answer["id"] = inference.request_id
    if is_stacked:
        answer["predictions"] = outputs
        answer["ledgers"] = [_plain(result.ledger) for result in results]
    else:
        answer["outputs"] = outputs[0]
        answer["ledger"] = _plain(results[0].ledger)
    return answer


def _rows(document: Mapping[str, Any], info: ModelInfo | None) -> Rows:
    if ("inputs" in document) == ("instances" in document):
        raise InvalidInput('give one of "inputs" (one item) and "instances" (a list of items)')
    is_stacked = "instances" in document
    items = document["instances"] if is_stacked else [document["inputs"]]
    if not isinstance(items, list) or not 1 <= len(items) <= ROWS_MAX:
        raise InvalidInput(f'"instances" must be a list of 1 to {ROWS_MAX} items')
    tensors = sum(len(one) for one in items if isinstance(one, dict))
    if tensors > TENSORS_MAX:
        raise InvalidInput(f"{tensors} tensors; one inference may have {TENSORS_MAX}")
    return Rows([_item(one, info) for one in items], is_stacked=is_stacked)


def _item(value: Any, info: ModelInfo | None) -> Mapping[str, Tensor]:
    if not isinstance(value, dict) or "b64" in value:
        name = _only_input(info)
        return {name: _tensor(name, value, info)}
    return {name: _tensor(name, one, info) for name, one in value.items()}


def _tensor(name: str, value: Any, info: ModelInfo | None) -> Tensor:
    if isinstance(value, dict):
        _check_takes_file(name, info)
        return _file_in_json(name, value)
    declared = None if info is None else next((one for one in info.inputs if one.name == name), None)
    return numbers(name, value, declared_dtype(_DTYPE_UNSAID if declared is None else declared.dtype))


def _file_in_json(name: str, value: Mapping[str, Any]) -> Tensor:
    text = value.get("b64")
    if len(value) != 1 or not isinstance(text, str):
        raise InvalidInput(f'input {shown(name)} must be numbers, or {{"b64": "…"}} for a file')
    try:
        return _bytes(b64decode(text, validate=True))
    except (binascii.Error, ValueError) as error:
        raise InvalidInput(f"input {shown(name)} is not base64: {error}") from error


def _check_takes_file(name: str, info: ModelInfo | None) -> None:
    """Raises InvalidInput where the model takes numbers there. A file is 1-D uint8."""
    if info is None or (info.image is not None and info.image.input_name == name):
        return
    for one in info.inputs:
        if one.name == name and (one.dtype != "uint8" or len(one.shape) != 1):
            raise InvalidInput(
                f"model {shown(info.model_id)} takes no file for {shown(name)}: it takes {one.dtype} of shape {list(one.shape)}"
            )


def _bytes(data: bytes) -> Tensor:
    return np.frombuffer(data, np.uint8) if data else np.empty(0, np.uint8)


def _only_input(info: ModelInfo | None) -> str:
    if info is None or not info.inputs:
        return "input"
    if info.image is not None:
        return info.image.input_name
    if len(info.inputs) > 1:
        names = ", ".join(one.name for one in info.inputs)
        raise InvalidInput(f"model {shown(info.model_id)} has several inputs ({names:.200}): name each one")
    return info.inputs[0].name


def _query(query: str) -> dict[str, object]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=16, errors="strict")
    except (ValueError, UnicodeDecodeError) as error:
        raise InvalidInput(f"the query: {error}") from error
    found: dict[str, object] = {}
    for name, text in pairs:
        if name not in ("deadline_ms", "priority"):
            raise InvalidInput(f"unknown parameter {shown(name)}; there are deadline_ms and priority")
        try:
            found[name] = int(text) if name == "priority" else float(text)
        except ValueError as error:
            raise InvalidInput(f"{name} is {shown(text)}; it must be a number") from error
    return found


def _plain(ledger: Ledger) -> dict[str, Any]:
    """By name: on the wire it is an array."""
    return {name: getattr(ledger, name) for name in ledger.__struct_fields__}


def _nested(outputs: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        name: array.tolist() if array.dtype.kind != "c" else [str(one) for one in to_values(array)]
        for name, array in outputs.items()
    }
