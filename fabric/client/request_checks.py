"""What a client can tell of a request before it is sent: each check says what was given and what would be right."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from fabric.client.client_options import ClientOptions
from fabric.errors import InvalidInput, TooLarge
from fabric.limits import DURATION_MAX_MS, NAME_CHARS_MAX
from fabric.link import NamedTensor, Tensor
from fabric.messages import PRIORITY_MAX, TENSORS_MAX

Inputs = Mapping[str, ArrayLike | bytes]
"""By input name: anything numpy takes for an array, or the bytes of an encoded file (sent as 1-D uint8)."""


def checked_model(model: str) -> str:
    """The name. Raises InvalidInput for what is none."""
    if not isinstance(model, str):
        raise InvalidInput(f"the model is {type(model).__name__}; it must be a name")
    return _short(model, "the model's name")


def checked_inputs(inputs: Inputs, options: ClientOptions) -> list[NamedTensor]:
    """As tensors. Raises InvalidInput, TooLarge."""
    if not isinstance(inputs, Mapping):
        raise InvalidInput(f"the inputs are {type(inputs).__name__}; they must be a mapping: {{name: array}}")
    if len(inputs) > TENSORS_MAX:
        raise InvalidInput(f"{len(inputs):,} inputs; there may be at most {TENSORS_MAX:,}")
    tensors = [NamedTensor(name, _as_tensor(name, value)) for name, value in inputs.items()]
    size, size_max = sum(tensor.array.nbytes for tensor in tensors), options.payload_bytes_max
    if size > size_max:
        raise TooLarge(
            f"{size:,} bytes of inputs; this client sends at most {size_max:,} a request (payload_bytes_max)"
        )
    return tensors


def limit_ms_of(budget_ms: float | None, options: ClientOptions) -> float:
    """How long to wait at most. Raises InvalidInput for a budget that is none."""
    if budget_ms is None:
        return options.budget_unknown_ms + options.grace_ms
    try:
        is_one = 0 < budget_ms <= DURATION_MAX_MS
    except (TypeError, ValueError):  # no number, or several
        is_one = False
    if not is_one:
        raise InvalidInput(
            f"budget_ms is {budget_ms!r:.40}; it must be a number of ms, over 0 and at most {DURATION_MAX_MS:,.0f}"
            " (None: the model's SLO)"
        )
    return budget_ms + options.grace_ms


def checked_priority(priority: int | None) -> int | None:
    """As the encoder takes it: what is no whole number a frontend would take for no message at all."""
    if priority is None:
        return None
    try:
        number = operator.index(priority)
    except TypeError:
        number = -1
    if not 0 <= number <= PRIORITY_MAX:
        raise InvalidInput(
            f"priority is {priority!r:.40}; it must be a whole number from 0 to {PRIORITY_MAX}"
            " (None: the model's)"
        )
    return number


def plain_budget(budget_ms: float | None) -> float | None:
    """As the encoder takes it: numpy's floats are not for it."""
    return None if budget_ms is None else float(budget_ms)


def _as_tensor(name: str, value: ArrayLike | bytes) -> Tensor:
    if not isinstance(name, str):
        raise InvalidInput(f"an input is named {name!r:.60}; names are texts")
    _short(name, "an input's name")
    if isinstance(value, bytes | bytearray | memoryview):
        return np.frombuffer(value, np.uint8)
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidInput(f"input {name!r} is not an array: {error}") from error
    return array  # whether it can be sent is said when it is packed


def _short(name: str, what: str) -> str:
    if len(name) > NAME_CHARS_MAX:
        raise InvalidInput(
            f"{what} has {len(name):,} characters ({name[:20]!r}…); it may have at most {NAME_CHARS_MAX}"
        )
    return name
