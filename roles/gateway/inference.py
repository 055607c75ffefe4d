"""One inference as the protocol has it, by HTTP or gRPC, and the requests of ours that it becomes.

A request of ours is one item, without a batch axis. So a tensor of the model's declared shape is one request; where every
input has one axis more in front, each row of it is a request of its own, and their outputs come back stacked. All of them run or the
first that does not decides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from fabric.errors import Internal, InvalidInput, ModelNotFound, TooLarge
from fabric.limits import DURATION_MAX_MS
from fabric.link import Tensor
from fabric.messages import PRIORITY_MAX, ModelInfo
from fabric.policy_options import shown
from roles.gateway.failures import Unsupported
from roles.gateway.tensors import FILES_MAX, Elements

VERSION: Final = "1"
"""The only one that a model has."""
ROWS_MAX: Final = FILES_MAX
"""Requests that one inference may become."""
_PRIORITY_LOWEST: Final = PRIORITY_MAX + 1
_US_PER_MS: Final = 1_000.0
_DURATIONS: Final = {
    "deadline_ms": f"a number of ms, over 0 and at most {DURATION_MAX_MS:,.0f}",
    "timeout": "a number of microseconds; 0 is none",
}
_NUMBER_MAX: Final = 1e300  # JSON's whole numbers have no end, a float has

Parameters = Mapping[str, object]


@dataclass(slots=True, frozen=True)
class InputTensor:
    """As it came: `shape` with the batch axis, if there is one."""

    name: str
    shape: tuple[int, ...]
    data: Tensor | Elements


@dataclass(slots=True, frozen=True)
class OutputWanted:
    """An output that was asked for by name."""

    name: str
    is_binary: bool


@dataclass(slots=True, frozen=True)
class Inference:
    """What is asked. No `outputs`: all of them, binary or not as `is_binary` says. `budget_ms` None: the model's SLO."""

    model: str
    inputs: Sequence[InputTensor]
    outputs: Sequence[OutputWanted] = ()
    is_binary: bool = False
    budget_ms: float | None = None
    priority: int | None = None
    request_id: str = ""


@dataclass(slots=True, frozen=True)
class Rows:
    """The requests of ours that an inference becomes. `is_stacked`: its tensors have a batch axis."""

    rows: Sequence[Mapping[str, Tensor]]
    is_stacked: bool


def check_version(model: str, version: str) -> None:
    """Raises ModelNotFound for another version than the one there is."""
    if version not in ("", VERSION):
        raise ModelNotFound(f"model {shown(model)} has the version {VERSION} only, not {shown(version)}")


def budget_of(parameters: Parameters) -> float | None:
    """From `deadline_ms`, or Triton's `timeout` in microseconds, in ms; the tighter one of both. Raises InvalidInput."""
    found = []
    deadline_ms = _number(parameters, "deadline_ms")
    if deadline_ms is not None:
        found.append(deadline_ms)
    timeout_us = _number(parameters, "timeout")
    if timeout_us:  # 0 is none, as with Triton
        found.append(timeout_us / _US_PER_MS)
    for budget_ms in found:
        if not 0 < budget_ms <= DURATION_MAX_MS:
            raise InvalidInput(f"the deadline is {budget_ms:g} ms; it must be {_DURATIONS['deadline_ms']}")
    return min(found, default=None)


def priority_of(parameters: Parameters) -> int | None:
    """Triton's `priority`: 1 is the highest, what is over 10 the lowest; 0 is the model's own. Raises InvalidInput."""
    asked = parameters.get("priority")
    if asked is None:
        return None
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 0:
        raise InvalidInput(
            f"a priority of {shown(asked)}; it must be 1 (the highest) and more, or 0 for the model's own"
        )
    return None if asked == 0 else _PRIORITY_LOWEST - min(asked, _PRIORITY_LOWEST)


def as_tritons(priority: int) -> int:
    """The number of Triton's that stands for one of ours."""
    return _PRIORITY_LOWEST - priority


def check_parameters(parameters: Parameters) -> None:
    """Raises Unsupported for what would change the answer and is not done here."""
    if parameters.get("sequence_id") not in (None, 0, ""):
        raise Unsupported("there are no sequences here: every request stands for itself")


def check_tensor_parameters(name: str, parameters: Parameters) -> None:
    """The same for those of one tensor."""
    if "shared_memory_region" in parameters:
        raise Unsupported(
            f"there are no shared memory regions here, as {shown(name)} has one: send the tensor, or use the SDK on the same host"
        )
    if parameters.get("classification"):
        raise Unsupported(
            f"there is no classification extension here, as asked for {shown(name)}: a model's top_k does it on the device"
        )


def checked_rows(info: ModelInfo | None, inference: Inference) -> Rows:
    """Its requests, and that it asks for no output twice, or that the model does not have. Raises as `rows_of` does."""
    names = [one.name for one in inference.outputs]
    if len(set(names)) != len(names):  # each time it would be written out whole
        raise InvalidInput("the same output is asked for twice")
    rows = rows_of(info, inference.inputs)
    if info is not None and info.outputs:
        _check_outputs(inference, [one.name for one in info.outputs])
    return rows


def rows_of(info: ModelInfo | None, inputs: Sequence[InputTensor]) -> Rows:
    """Split what came into requests. `info` None: the model is not known here, the frontend decides.

    Shapes that are neither the declared ones nor one axis more stay as they are: the frontend says what is wrong with them.
    Raises InvalidInput, TooLarge for more rows than `ROWS_MAX`.
    """
    names = [one.name for one in inputs]
    if len(set(names)) != len(names):
        raise InvalidInput("the same input comes twice")
    count = _rows_in(info, inputs)
    if count is None:
        return Rows([{one.name: _whole(one) for one in inputs}], is_stacked=False)
    if count > ROWS_MAX:
        raise TooLarge(f"{count} rows; one inference may have {ROWS_MAX}")
    if count == 0:
        raise InvalidInput("the first axis, of the batch, has the length 0")
    return Rows([{one.name: _row(one, at) for one in inputs} for at in range(count)], is_stacked=True)


def outputs_of(
    inference: Inference, answers: Sequence[Mapping[str, Tensor]], *, is_stacked: bool
) -> Mapping[str, Tensor]:
    """The outputs of all rows as one answer, of several those that are asked for.

    Raises Internal where they cannot be stacked, InvalidInput where no row has one that is asked for.
    """
    if not is_stacked:
        return answers[0]
    known = list(dict.fromkeys(name for answer in answers for name in answer))
    _check_outputs(inference, known)
    names = [one.name for one in inference.outputs] or known
    if not all(name in answer for answer in answers for name in names):
        raise Internal(
            "the rows have different outputs: ask for them one by one, or name outputs that all have"
        )
    try:
        return {name: np.stack([answer[name] for answer in answers]) for name in names}
    except ValueError as error:
        raise Internal("the rows have outputs of different shapes: ask for them one by one") from error


def wanted_of(inference: Inference, outputs: Mapping[str, Tensor]) -> Sequence[tuple[str, Tensor, bool]]:
    """Name, array and whether it goes as binary, in the order that was asked for. Raises InvalidInput for an unknown one."""
    if not inference.outputs:
        return [(name, array, inference.is_binary) for name, array in outputs.items()]
    _check_outputs(inference, list(outputs))
    return [(one.name, outputs[one.name], one.is_binary) for one in inference.outputs]


def _check_outputs(inference: Inference, known: Sequence[str]) -> None:
    """Raises InvalidInput where an output is asked for that the model does not have."""
    for one in inference.outputs:
        if one.name not in known:
            raise InvalidInput(
                f"model {shown(inference.model)} has no output {shown(one.name)}; it has {', '.join(known)[:200] or 'none'}"
            )


def _rows_in(info: ModelInfo | None, inputs: Sequence[InputTensor]) -> int | None:
    """The length of the batch axis that all inputs have; None: they have none."""
    if info is None or not info.inputs or not inputs:
        return None
    ranks = {tensor.name: len(tensor.shape) for tensor in info.inputs}
    lengths = set()
    for one in inputs:
        rank = ranks.get(one.name)
        if rank is None or len(one.shape) != (1 if isinstance(one.data, tuple) else rank) + 1:
            return None
        lengths.add(one.shape[0])
    return lengths.pop() if len(lengths) == 1 else None


def _whole(one: InputTensor) -> Tensor:
    if not isinstance(one.data, tuple):
        return one.data
    if len(one.data) != 1:
        raise _not_one_file(one, len(one.data))
    return _file(one, 0)


def _row(one: InputTensor, at: int) -> Tensor:
    return _file(one, at) if isinstance(one.data, tuple) else one.data[at]


def _file(one: InputTensor, at: int) -> Tensor:
    """An element of BYTES is a file, such as a picture: 1-D uint8, as the SDK sends it."""
    assert isinstance(one.data, tuple), "the caller has looked"
    each = math.prod(one.shape[1:]) if len(one.shape) > 1 else math.prod(one.shape)
    if each != 1:
        raise _not_one_file(one, each)
    return np.frombuffer(one.data[at], np.uint8) if one.data[at] else np.empty(0, np.uint8)


def _not_one_file(one: InputTensor, count: int) -> InvalidInput:
    return InvalidInput(
        f"input {shown(one.name)} has {count} elements of BYTES; a request takes one, such as a picture's file:"
        " shape [1], or [rows, 1] for every input of a model that says what it takes"
    )


def _number(parameters: Parameters, name: str) -> float | None:
    value = parameters.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _NUMBER_MAX:
        raise InvalidInput(f"{name} is {shown(value)}; it must be {_DURATIONS[name]}")
    return float(value)
