"""What the SDK refuses before it sends anything: each refusal says what was given and what would be right."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from fabric.client import ClientOptions
from fabric.client.request_checks import (
    checked_inputs,
    checked_model,
    checked_priority,
    limit_ms_of,
    plain_budget,
)
from fabric.errors import InvalidInput, LocalProtocolError, TooLarge
from fabric.frames import pack
from fabric.ids import ModelId
from fabric.link import NamedTensor
from fabric.messages import Infer
from fabric.tensors import to_frame

OPTIONS = ClientOptions()


def to_wire(model: str, name: str, budget_ms: float | None) -> object:
    """A request, as a connection sends it."""
    message = Infer(1, ModelId(model), budget_ms, 0.0, None)
    return pack(message, [NamedTensor(name, np.zeros(1, np.float32))], payload_bytes_max=1_000)


def released() -> memoryview:
    view = memoryview(b"abc")
    view.release()
    return view


@pytest.mark.parametrize("budget_ms", [-5, 0, float("nan"), float("inf"), 1e12, "5", [1, 2], np.zeros(2)])
def test_a_budget_that_is_none_is_refused_with_what_would_be_right(budget_ms: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        limit_ms_of(budget_ms, OPTIONS)
    assert str(caught.value) == (
        f"budget_ms is {budget_ms!r}; it must be a number of ms, over 0 and at most 1,000,000,000 (None: the model's SLO)"
    )


NUMBERS = (
    *(5, 5.0, True, Decimal(5), Decimal("5e0"), Fraction(5), np.float16(5), np.float32(5), np.int8(5), np.uint64(5)),
    *(np.array(5), np.array(5.0), np.bool_(True), np.longdouble(5)),
)  # fmt: skip
NOT_NUMBERS: tuple[Any, ...] = (
    *("5", b"5", "", "x", [], [5], {}, {5}, object(), int, 5j, np.complex64(5), np.str_("5"), np.array("5")),
    *(np.array([5.0]), np.array([5.0, 6.0]), np.array([]), np.array([None]), np.datetime64("2024-01-01"), np.timedelta64(5, "s")),
    *(timedelta(seconds=5), Decimal("nan"), Decimal("snan"), Decimal("inf"), Decimal("1e999999"), Fraction(10**400)),
    *(10**400, 10**5_000, -(10**5_000), math.nan, math.inf, -math.inf, np.float32("nan"), np.float64("inf"), 0, 0.0, -1),
)  # fmt: skip


class Unwilling:
    """As a tensor of torch that has several elements, or is to be differentiated."""

    def __bool__(self) -> bool:
        raise RuntimeError("ambiguous")

    __gt__ = __float__ = __index__ = __array__ = __bool__


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
def test_any_kind_of_number_is_a_budget(number: Any) -> None:
    budget_ms = plain_budget(number)
    assert (type(budget_ms), budget_ms) == (float, float(number))
    assert type(limit_ms_of(number, OPTIONS)) is float
    assert to_wire("m", "x", budget_ms)


@pytest.mark.parametrize("number", [*NOT_NUMBERS, Unwilling()], ids=lambda value: type(value).__name__)
def test_what_is_no_budget_is_refused_in_one_line(number: Any) -> None:
    for check in (plain_budget, lambda value: limit_ms_of(value, OPTIONS)):
        with pytest.raises(
            InvalidInput, match=r"^budget_ms is .*; it must be a number of ms, over 0"
        ) as caught:
            check(number)
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("number", [*NOT_NUMBERS, Unwilling()], ids=lambda value: type(value).__name__)
def test_what_is_no_priority_is_refused_in_one_line(number: Any) -> None:
    if isinstance(number, int) and number == 0:
        assert checked_priority(number) == 0
        return
    with pytest.raises(
        InvalidInput, match=r"^priority is .*; it must be a whole number from 0 to 9"
    ) as caught:
        checked_priority(number)
    assert str(caught.value).isprintable()


class Colour(str, Enum):  # noqa: UP042  whose str() is "Colour.RED"
    RED = "red"


@pytest.mark.parametrize("name", ["red", np.str_("red"), Colour.RED, type("Text", (str,), {})("red")])
def test_a_name_of_any_class_of_text_travels_as_text(name: str) -> None:
    model = checked_model(name)
    (tensor,) = checked_inputs({name: [1.0]}, OPTIONS)
    assert (type(model), model, type(tensor.name), tensor.name) == (str, "red", str, "red")
    assert to_wire(model, tensor.name, None)


@pytest.mark.parametrize("name", ["\ud83d", "a\udcff", np.str_("\ud83d")])
def test_half_of_a_character_is_no_name(name: str) -> None:
    with pytest.raises(
        InvalidInput, match=r"^the model's name is '.*\\ud.*', which holds half of a character$"
    ):
        checked_model(name)
    with pytest.raises(
        InvalidInput, match=r"^an input's name is '.*\\ud.*', which holds half of a character$"
    ):
        checked_inputs({name: [1.0]}, OPTIONS)


GRID: Any = np.arange(12, dtype=np.float32).reshape(3, 4)
SINGLE: Any = np.array(5.0)


@pytest.mark.parametrize(
    ("buffer", "raw"),
    [
        (b"", b""),
        (b"abc", b"abc"),
        (bytearray(b"abc"), b"abc"),
        (memoryview(b""), b""),
        (memoryview(b"abcdef")[::2], b"ace"),
        (memoryview(b"abcdef")[::-1], b"fedcba"),
        (memoryview(b"abcdef")[4:4], b""),
        (memoryview(GRID), GRID.tobytes()),
        (memoryview(GRID.T), GRID.T.tobytes()),
        (memoryview(GRID)[::2], GRID[::2].tobytes()),
        (memoryview(SINGLE), SINGLE.tobytes()),
    ],
)
def test_a_buffer_is_sent_as_its_bytes(buffer: Any, raw: bytes) -> None:
    (tensor,) = checked_inputs({"x": buffer}, OPTIONS)
    assert (tensor.array.dtype, tensor.array.ndim, tensor.array.tobytes()) == (np.dtype(np.uint8), 1, raw)


@pytest.mark.parametrize("value", [[[1], [2, 3]], Unwilling(), released(), "x\ud83d", None, object()])
def test_what_is_no_array_is_refused_at_the_latest_when_it_is_packed(value: Any) -> None:
    def sent() -> None:
        (tensor,) = checked_inputs({"x": value}, OPTIONS)
        to_frame("x", tensor.array)

    with pytest.raises(
        (InvalidInput, LocalProtocolError), match=r"^(input|tensor) 'x' is (not an array|of dtype)"
    ):
        sent()


@pytest.mark.parametrize("priority", [-1, 10, 3.0, float("nan"), "3", [3]])
def test_a_priority_that_is_none_is_refused_with_what_would_be_right(priority: Any) -> None:
    with pytest.raises(InvalidInput, match="it must be a whole number from 0 to 9") as caught:
        checked_priority(priority)
    assert str(caught.value).startswith(f"priority is {priority!r};")


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        ([("x", 1)], r"the inputs are list; they must be a mapping: \{name: array\}"),
        ({3: [1]}, "an input is named 3; names are texts"),
        ({"n" * 600: [1]}, r"an input's name has 600 characters \('n{20}'…\); it may have at most 512"),
        ({f"x{number}": 0 for number in range(4_097)}, "4,097 inputs; there may be at most 4,096"),
        ({"x": [[1], [2, 3]]}, "input 'x' is not an array"),
    ],
)
def test_inputs_that_are_none_are_refused(inputs: Any, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason):
        checked_inputs(inputs, OPTIONS)


class Wordless(Exception):
    """Not even its text can be had."""

    def __str__(self) -> str:
        raise RuntimeError

    __repr__ = __str__


def _raise(*_: object, **__: object) -> Any:
    raise Wordless


OddMapping = type(
    "OddMapping",
    (Mapping,),
    dict.fromkeys(("__len__", "__iter__", "__getitem__", "__repr__", "__gt__"), _raise),
)
OddSequence = type(
    "OddSequence", (Sequence,), dict.fromkeys(("__len__", "__getitem__", "__repr__", "__index__"), _raise)
)
OddArray = type("OddArray", (), dict.fromkeys(("__array__", "__len__", "__repr__", "__float__"), _raise))


def _sent(inputs: Any) -> None:
    for tensor in checked_inputs(inputs, OPTIONS):
        to_frame(tensor.name, tensor.array)


ODD = pytest.mark.parametrize("odd", [OddMapping, OddSequence, OddArray], ids=lambda kind: kind.__name__)


@ODD
@pytest.mark.parametrize("check", [checked_priority, plain_budget, checked_model])
def test_what_raises_anything_at_every_turn_is_refused(check: Callable[[Any], object], odd: type) -> None:
    with pytest.raises(InvalidInput):
        check(odd())


@ODD
def test_inputs_that_raise_anything_at_every_turn_are_refused_or_cannot_be_sent(odd: type) -> None:
    with pytest.raises(InvalidInput):
        checked_inputs(odd(), OPTIONS)
    for value in (odd(), [odd()]):
        with pytest.raises((InvalidInput, LocalProtocolError)):
            _sent({"x": value})


def test_too_many_bytes_are_refused_with_the_limit_and_its_name() -> None:
    small = ClientOptions(payload_bytes_max=1_000)
    reason = r"1,008 bytes of inputs; this client sends at most 1,000 a request \(payload_bytes_max\)"
    with pytest.raises(TooLarge, match=reason):
        checked_inputs({"x": np.zeros(126)}, small)


FIRST = """
import sys
import numpy as np
import fabric.tensors
from fabric.client import ClientOptions
from fabric.client.request_checks import checked_inputs

before = set(sys.modules)
checked_inputs({"x": np.zeros(3, np.float32), "file": b"bytes"}, ClientOptions())
print(sorted(set(sys.modules) - before))
"""


def test_nothing_is_imported_for_a_first_request() -> None:
    """numpy imports its masked arrays, tens of milliseconds, where they are only mentioned."""
    took = subprocess.run(
        [sys.executable, "-c", FIRST], capture_output=True, text=True, check=True, timeout=60
    )
    assert took.stdout.strip() == "[]", took.stderr


def test_a_masked_array_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"input 'x' is a masked array; give its values"):
        checked_inputs({"x": np.ma.array([1, 2], mask=[False, True])}, OPTIONS)


@pytest.mark.parametrize("model", [None, 3, b"echo", "m" * 600])
def test_a_name_that_is_none_is_refused(model: Any) -> None:
    with pytest.raises(InvalidInput, match=r"must be a name|has 600 characters .* at most 512"):
        checked_model(model)


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (np.zeros((1,) * 9), "tensor 'x' has 9 dimensions; it may have 8"),
        (np.array([None]), "tensor 'x' is of dtype object; what can be sent is bool, int8, .*, complex128"),
        (np.array(["a"]), "tensor 'x' is of dtype <U1; what can be sent is bool"),
        (np.array(["2024-01-01"], "datetime64[D]"), r"tensor 'x' is of dtype datetime64\[D\]; what can be"),
    ],
)
def test_an_array_that_cannot_travel_is_refused_with_what_can(array: Any, reason: str) -> None:
    with pytest.raises(LocalProtocolError, match=reason):
        to_frame("x", array)
