"""What cannot be parsed is told with its line, its column and the problem."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from fabric.errors import ConfigError
from roles.config.documents import as_yaml, read_file, read_value


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


CORE_SCHEMA: Final = (
    r"null|Null|NULL|~|",
    r"true|True|TRUE|false|False|FALSE",
    r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?",
    r"[-+]?(\.inf|\.Inf|\.INF)|\.nan|\.NaN|\.NAN",
)
"""What a reader of YAML 1.2 takes a plain scalar for that is no text (the specification, 10.3.2)."""
YAML_1_1: Final = (
    r"y|Y|yes|Yes|YES|n|N|no|No|NO|on|On|ON|off|Off|OFF",
    r"[-+]?(0b[01_]+|0[0-7_]+|0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|[1-9][0-9_]*(:[0-5]?[0-9])+)",
    r"[-+]?([0-9][0-9_]*)?\.[0-9.]*([eE][-+][0-9]+)?|[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+\.[0-9_]*",
    r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt \t].*)?",
    r"<<|=",
)
"""And one of YAML 1.1 (yaml.org/type), as Kubernetes' reader also takes `y` and `n`."""
OTHER_KINDS: Final = re.compile("|".join(f"(?:{one})" for one in (*CORE_SCHEMA, *YAML_1_1)))
AS_NUMBERS: Final = st.from_regex(OTHER_KINDS, fullmatch=True)
HEX: Final = st.text("0123456789abcdef", min_size=12, max_size=12)


@example("123456789e12").via("a configuration's mark on pods")
@example("0o17")
@example("y")
@example("+.5e3")
@example("089456789012")
@given(AS_NUMBERS | HEX | st.text("0123456789abcdefox.+-_:eE ", max_size=12) | st.text(max_size=20))
def test_text_is_text_for_every_reader_of_what_is_written(text: str) -> None:
    written = as_yaml({"value": text, "list": [text]})
    assert yaml.safe_load(written) == {"value": text, "list": [text]}
    root = yaml.compose(written, yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    (_, value), (_, listed) = root.value
    for node in (value, *listed.value):
        assert node.style is not None or not OTHER_KINDS.fullmatch(node.value), written
