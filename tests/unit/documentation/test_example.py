"""examples/cluster.yaml is complete: every key is in it, and what stands there as a comment may stand there as a key."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
import yaml

from docs.generate.file_keys import key_docstrings
from fabric.errors import ConfigError
from roles.config.read_config import load_config, parse_config
from roles.config.sections import SECTIONS, Document
from tests.documentation import ROOT

FILE = ROOT / "examples" / "cluster.yaml"
TEXT = FILE.read_text(encoding="utf-8")
LINES = TEXT.splitlines()
MARK = "#: "
BLOCKS = ("applications", "graph_deadlines", "deploy")
"""Whole sections that are comments."""
INSTEAD_OR_ABSENT = (
    "use one",
    "exactly one of",
    "goes with gpus",
    "goes with heads",
    "there is no file",
    "cannot be read",
)
"""Why a line may be refused all the same: it stands for another one of the file or goes with another comment, or names a file that is not here."""


def is_commented(line: str) -> bool:
    return line.lstrip().startswith(MARK)


def test_it_is_read_as_it_is() -> None:
    config = load_config(FILE)
    assert [model.name for model in config.models] == ["resnet50", "detector", "digits"]


def test_every_key_is_in_it() -> None:
    own = set(re.findall(r"(?<![\w.])([a-z_]+):", TEXT))
    keys = {key for section in SECTIONS.values() for key in section.__struct_encode_fields__}
    assert sorted(keys - own) == []


def test_every_key_says_what_it_means() -> None:
    for section in set(SECTIONS.values()):
        assert set(key_docstrings(section)) == set(section.__struct_fields__), section


def _in_blocks() -> tuple[list[int], list[int]]:
    """Numbers of commented lines: those of whole sections, and those that stand for themselves."""
    blocks: list[int] = []
    single: list[int] = []
    is_inside = False
    for number, line in enumerate(LINES):
        if not is_commented(line):
            is_inside = False
            continue
        name = re.match(r"#: (\w+):", line)
        if name is not None:
            is_inside = name[1] in BLOCKS
        (blocks if is_inside else single).append(number)
    return blocks, single


BLOCK_LINES, SINGLE_LINES = _in_blocks()


def uncommented(numbers: list[int]) -> Any:
    lines = [
        line.replace(MARK, "", 1) if number in numbers else "" if is_commented(line) else line
        for number, line in enumerate(LINES)
    ]
    return yaml.load("\n".join(lines), Loader=yaml.SafeLoader)


def test_the_sections_that_are_comments_may_stand_there() -> None:
    read = msgspec.convert(uncommented(BLOCK_LINES), Document)
    assert [one.name for one in read.applications] == ["shop"]
    assert read.deploy.user == "tenuto"
    parse_config(uncommented(BLOCK_LINES), FILE.parent)


def _refusal(document: Any) -> str:
    try:
        parse_config(document, FILE.parent)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("number", SINGLE_LINES, ids=lambda number: LINES[number].strip()[:40])
def test_each_line_that_is_a_comment_may_stand_there(number: int) -> None:
    document = uncommented([number])
    assert document != uncommented([]), "nothing comes of this line"
    msgspec.convert(document, Document)
    refusal = _refusal(document)
    assert not refusal or any(text in refusal for text in INSTEAD_OR_ABSENT), refusal


def test_a_key_that_is_not_there_is_refused() -> None:
    document = uncommented([])
    document["cluster"]["gpu"] = 1
    with pytest.raises((msgspec.ValidationError, ConfigError)):
        msgspec.convert(document, Document)
