"""What the SDK refuses before it sends anything: each refusal says what was given and what would be right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fabric.client import ClientOptions
from fabric.client.request_checks import checked_inputs, checked_model, checked_priority, limit_ms_of
from fabric.errors import InvalidInput, LocalProtocolError, TooLarge
from fabric.tensors import to_frame

OPTIONS = ClientOptions()


@pytest.mark.parametrize("budget_ms", [-5, 0, float("nan"), float("inf"), 1e12, "5", [1, 2], np.zeros(2)])
def test_a_budget_that_is_none_is_refused_with_what_would_be_right(budget_ms: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        limit_ms_of(budget_ms, OPTIONS)
    assert str(caught.value) == (
        f"budget_ms is {budget_ms!r}; it must be a number of ms, over 0 and at most 1,000,000,000 (None: the model's SLO)"
    )


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


def test_too_many_bytes_are_refused_with_the_limit_and_its_name() -> None:
    small = ClientOptions(payload_bytes_max=1_000)
    reason = r"1,008 bytes of inputs; this client sends at most 1,000 a request \(payload_bytes_max\)"
    with pytest.raises(TooLarge, match=reason):
        checked_inputs({"x": np.zeros(126)}, small)


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
