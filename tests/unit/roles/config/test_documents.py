"""What cannot be parsed is told with its line, its column and the problem."""

from __future__ import annotations

from pathlib import Path

import pytest

from fabric.errors import ConfigError
from roles.config.documents import read_file, read_value


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("c.yaml", "a: [1, 2\nb: 3\n", "line 2, column 2: expected ',' or ']', but got ':' (of what begins at line 1, column 4)"),
        ("c.yaml", "a: {b: 1", "line 1, column 9: expected ',' or '}', but got the end (of what begins at line 1, column 4)"),
        ("c.yaml", "models:\n - name: a\n  slo_ms: 5\n", "line 3, column 3: this does not go on what begins at line 2, column 2: look at the indentation"),
        ("c.yaml", "a: 1\n b: 2\n", "line 2, column 3: a colon that cannot be here: look at the indentation, and put a value with ': ' in it in quotes"),
        ("c.yaml", "a:\n\t- 1\n", "line 2, column 1: a tab, which YAML does not take: indent with spaces"),
        ("c.yaml", "a: 'x\nb: 1", "line 2, column 5: the end, with a quote still open that begins at line 1, column 4"),
        ("c.yaml", "a: 1\n---\nb: 2\n", "line 2, column 1: a second document: there may be one"),
        ("c.yaml", "a: 1\na: 2\n", "line 2, column 1: key 'a' is there twice (of what begins at line 1, column 1)"),
        ("c.yaml", "a:\n b: 2024-13-13\n", "line 2, column 5: '2024-13-13' needs quotes: without them YAML reads a date"),
        ("c.yaml", "a: !!set {b}", "line 1, column 4: there is nothing of the kind '!!set' here: values are text, numbers, true and false, lists and mappings"),
        ("c.yaml", "a: !!int ''", "line 1, column 4: '' cannot be here; it must be a whole number of ordinary size"),
        ("c.yaml", "a: !!bool maybe", "line 1, column 4: 'maybe' cannot be here; it must be true or false"),
        ("c.yaml", 'a: "\\ud83d"', "line 1, column 4: '\\ud83d' cannot be here; it must be text of whole characters"),
        ("c.yaml", "!!map a: 1", "line 1, column 1: a list or a mapping as a key: a key is text"),
        ("c.yaml", "a: b\nc: \x07", "line 2, column 4: a character that cannot be here, U+0007"),
        ("c.json", '{"a": 1,\n "b": 2 "c"}', "line 2, column 9: Expecting ',' delimiter"),
        ("c.json", '{"a": "\\\\ud83d",\n "\\ud83d": 1}', "line 2, column 3: '\\\\ud83d' is half of a character"),
    ],
)  # fmt: skip
def test_the_place_and_the_problem_are_told(tmp_path: Path, name: str, text: str, problem: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_file(path)
    assert str(caught.value) == f"{path}: cannot be parsed: {problem}"


def test_a_value_of_the_command_line_is_told_likewise() -> None:
    with pytest.raises(ConfigError) as caught:
        read_value("{a: 1", "--set x")
    assert str(caught.value).startswith("--set x: cannot be parsed: line 1, column 6: expected ',' or '}'")


@pytest.mark.parametrize("name", ["c.yaml", "c.json"])
def test_both_halves_of_a_character_are_one(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(r'{"a": "\ud83d\ude00", "\u00e9": 1}', encoding="utf-8")
    assert read_file(path) == {"a": "\U0001f600", "\u00e9": 1}
