"""docs/wire.md against the structs: every message has its row, every row its fields."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fabric import codec
from tests.strategies import message_types

TEXT = (Path(__file__).parents[3] / "docs" / "wire.md").read_text(encoding="utf-8")
ROWS = {
    match["name"]: match
    for match in re.finditer(
        r"^\| (?P<tag>\d+) \| `(?P<name>\w+)`(?P<rest>.*)\|$",
        TEXT,
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


def test_the_messages_that_may_be_long_are_listed() -> None:
    [row] = re.findall(r"^\| header \| (128 KiB[^;]*;.*)\|$", TEXT, re.MULTILINE)
    _, long, bulky = row.split(";")
    assert re.findall(r"`(\w+)`", long) == sorted(kind.__name__ for kind in codec.LONG)
    assert re.findall(r"`(\w+)`", bulky) == sorted(kind.__name__ for kind in codec.BULKY)
