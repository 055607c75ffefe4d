"""docs/wire.md against the structs: every message has its row, every row its fields."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.strategies import message_types

ROWS = {
    match["name"]: match
    for match in re.finditer(
        r"^\| (?P<tag>\d+) \| `(?P<name>\w+)`(?P<rest>.*)\|$",
        (Path(__file__).parents[3] / "docs" / "wire.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
}


@pytest.mark.parametrize("message", message_types(), ids=lambda message: message.__name__)
def test_every_message_is_documented_with_its_tag_and_fields(message: type) -> None:
    row = ROWS[message.__name__]
    assert int(row["tag"]) == message.__struct_config__.tag  # type: ignore[attr-defined]  # msgspec's own
    missing = [name for name in message.__struct_fields__ if f"`{name}`" not in row["rest"]]  # type: ignore[attr-defined]  # msgspec's own
    assert missing == []


def test_nothing_is_documented_that_does_not_exist() -> None:
    assert set(ROWS) == {message.__name__ for message in message_types()}
