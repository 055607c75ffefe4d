"""The page of the file names keys as they are written in the file."""

from __future__ import annotations

from docs.generate.file_keys import file_page


def test_a_key_is_named_as_it_is_written() -> None:
    """`from` is a word of Python, so the field has another name."""
    rows = file_page().split("stages.NAME.fan_out`\n")[1].split("\n## ")[0]
    assert "| `from` |" in rows
    assert "`source`" not in rows
