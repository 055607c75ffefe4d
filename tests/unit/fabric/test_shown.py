"""How values are shown in messages (`fabric.policy_options`)."""

from __future__ import annotations

from collections import OrderedDict, UserList
from typing import Any

import pytest

from fabric.policy_options import shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5, "5"),
        ("a", "'a'"),
        (None, "None"),
        ([1, "b"], "[1, 'b']"),
        ({"a": [1, 2]}, "{'a': [1, 2]}"),
        ("x" * 100, f"'{'x' * 39}… (102 characters)"),
        (10**100, f"1{'0' * 39}… (101 characters)"),
    ],
)
def test_a_value_is_shown_as_it_is_and_cut_where_it_is_long(value: Any, text: str) -> None:
    assert shown(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"x" * 10**8, "<bytes of 100000000>"),
        (bytearray(10**8), "<bytearray of 100000000>"),
        (memoryview(bytes(10**8)), "<memoryview of 100000000>"),
        (OrderedDict(a=[1]), "<OrderedDict of 1>"),
        (UserList([[1]]), "<UserList of 1>"),
        ([OrderedDict(a=[1])], "[<OrderedDict of 1>]"),
        (list(range(100)), "[0, 1, 2, 3, 4, 5, ...]"),
        (["x" * 100] * 6, "['xxxxxxxxxxxxxxxxxxxxxxxxxxx...xxxxxxxx…"),
    ],
)
def test_what_may_be_of_any_length_is_not_written_whole(value: Any, text: str) -> None:
    assert shown(value) == text


def test_more_digits_than_python_writes_are_not_written() -> None:
    assert shown(10**5_000) == shown([10**5_000]) == "a number of thousands of digits"


@pytest.mark.parametrize("wrap", [lambda one: [one] * 10, lambda one: dict.fromkeys("abcdefghij", one)])
def test_of_what_would_fill_the_memory_only_the_beginning_is_written(wrap: Any) -> None:
    """Ten YAML aliases, each of ten of the one before: ten thousand million entries, in ten small lists."""
    value: Any = []
    for _ in range(10):
        value = wrap(value)
    assert len(shown(value)) < 80
