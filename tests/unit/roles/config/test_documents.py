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
        ("c.yaml", "a:\n b: 2024-13-13\n", "line 2, column 5: month must be in 1..12"),
        ("c.yaml", "a: b\nc: \x07", "line 2, column 4: a character that cannot be here, U+0007"),
        ("c.json", '{"a": 1,\n "b": 2 "c"}', "line 2, column 9: Expecting ',' delimiter"),
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
