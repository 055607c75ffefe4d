"""What a client can tell of a request before it is sent: each check says what was given and what would be right."""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping
from numbers import Complex, Real
from typing import TYPE_CHECKING, Any

from fabric.client.client_options import ClientOptions
from fabric.errors import InvalidInput, TooLarge
from fabric.limits import DURATION_MAX_MS, NAME_CHARS_MAX
from fabric.link import NamedTensor, Tensor
from fabric.messages import PRIORITY_MAX, TENSORS_MAX
from fabric.policy_options import written

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    Inputs = Mapping[str, ArrayLike | bytes]
else:  # most commands talk to a cluster without tensors, and NumPy would be a third of what they take
    Inputs = Mapping[str, Any]
"""By input name: anything numpy takes for an array, or the bytes of an encoded file (sent as 1-D uint8)."""


def checked_model(model: str) -> str:
    """The name. Raises InvalidInput for what is none."""
    if not isinstance(model, str):
        raise InvalidInput(f"the model is {type(model).__name__}; it must be a name")
    return _plain_name(model, "the model's name")


def checked_inputs(inputs: Inputs, options: ClientOptions) -> list[NamedTensor]:
    """As tensors. Raises InvalidInput, TooLarge."""
    if not isinstance(inputs, Mapping):
        raise InvalidInput(f"the inputs are {type(inputs).__name__}; they must be a mapping: {{name: array}}")
    try:
        items = dict(inputs).items()
    except Exception as error:
        raise InvalidInput(f"the inputs cannot be read: {written(error)}") from error
    if len(items) > TENSORS_MAX:
        raise InvalidInput(f"{len(items):,} inputs; there may be at most {TENSORS_MAX:,}")
    tensors = [_as_tensor(name, value) for name, value in items]
    size, size_max = sum(tensor.array.nbytes for tensor in tensors), options.payload_bytes_max
    if size > size_max:
        raise TooLarge(
            f"{size:,} bytes of inputs; this client sends at most {size_max:,} a request (payload_bytes_max)"
        )
    return tensors


def limit_ms_of(budget_ms: float | None, options: ClientOptions) -> float:
    """How long to wait at most. Raises InvalidInput for a budget that is none."""
    budget_ms = plain_budget(budget_ms)
    return (options.budget_unknown_ms if budget_ms is None else budget_ms) + options.grace_ms


def checked_priority(priority: int | None) -> int | None:
    """As the encoder takes it: what is no whole number a frontend would take for no message at all."""
    if priority is None:
        return None
    try:
        number = operator.index(priority)
    except Exception:  # noqa: BLE001  somebody else's class, which may raise anything
        number = -1
    if not 0 <= number <= PRIORITY_MAX:
        raise InvalidInput(
            f"priority is {written(priority)}; it must be a whole number from 0 to {PRIORITY_MAX}"
            " (None: the model's)"
        )
    return number


def plain_budget(budget_ms: float | None) -> float | None:
    """As the encoder takes it, of whatever kind of number: a decimal, a fraction, numpy's. Raises InvalidInput for a budget that is none."""
    if budget_ms is None:
        return None
    if type(budget_ms) is float and 0.0 < budget_ms <= DURATION_MAX_MS:
        return budget_ms  # the usual one: what follows takes twenty calls
    try:
        # Compared first: float() takes texts and spans of time, too. numpy compares complex numbers, Python does not.
        is_one = budget_ms > 0.0 and not _is_complex(budget_ms)
        number = float(budget_ms) if is_one else 0.0
    except Exception:  # noqa: BLE001  somebody else's class, which may raise anything
        number = 0.0
    if not 0.0 < number <= DURATION_MAX_MS:
        raise InvalidInput(
            f"budget_ms is {written(budget_ms)}; it must be a number of ms, over 0 and at most {DURATION_MAX_MS:,.0f}"
            " (None: the model's SLO)"
        )
    return number


def _is_complex(number: object) -> bool:
    return isinstance(number, Complex) and not isinstance(number, Real)


def _as_tensor(name: str, value: ArrayLike | bytes) -> NamedTensor:
    import numpy as np  # noqa: PLC0415  see above

    if not isinstance(name, str):
        raise InvalidInput(f"an input is named {written(name)}; names are texts")
    plain = _plain_name(name, "an input's name")
    array: Tensor
    if _is_masked(value):  # its mask would not travel
        raise InvalidInput(f"input {plain!r} is a masked array; give its values, such as array.filled(0)")
    try:
        if isinstance(value, memoryview) and not value.c_contiguous:
            value = value.tobytes()  # numpy takes no view with gaps
        if isinstance(value, bytes | bytearray | memoryview):
            array = np.frombuffer(value, np.uint8)
        else:
            array = np.asarray(value)
    except Exception as error:
        raise InvalidInput(f"input {plain!r} is not an array: {written(error)}") from error
    return NamedTensor(plain, array)  # whether it can be sent is said when it is packed


def _is_masked(value: object) -> bool:
    """Without `np.ma` where nobody has it yet: numpy imports it at its first mention, some 20 ms in the middle of a client's first request."""
    kind = getattr(sys.modules.get("numpy.ma"), "MaskedArray", None)
    return kind is not None and isinstance(value, kind)


def _plain_name(name: str, what: str) -> str:
    """As the encoder takes it: nothing that is only derived from a text, such as numpy's or a member of an enumeration."""
    if len(name) > NAME_CHARS_MAX:
        raise InvalidInput(
            f"{what} has {len(name):,} characters ({name[:20]!r}…); it may have at most {NAME_CHARS_MAX}"
        )
    plain = str.__str__(name)
    try:
        plain.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{what} is {written(plain)}, which holds half of a character") from error
    return plain
