"""Each fenced block is one that a test runs, or says why not; files in blocks are read, commands in them exist."""

from __future__ import annotations

import copy
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from roles.cli.group import tenuto
from roles.config.read_config import parse_config
from roles.config.sections import SECTIONS
from tests.documentation import LANGUAGES, PAGES, ROOT, Block, all_blocks, blocks, inline_code

BLOCKS = list(all_blocks())
BASE: dict[str, Any] = {
    "models": [{"name": "m", "slo_ms": 100, "rate_rps": 10, "profile": {"alpha_ms": 1, "beta_ms": 5}}],
    "cluster": {"gpus": 4},
}
"""What a block of a few keys is laid over."""
OTHERS_OPTIONS = {"--model-control-mode", "--ignore-daemonsets", "--server-side", "--help"}
"""Options of programs that are not ours."""


def where(block: Block) -> str:
    return block.where


@pytest.mark.parametrize("block", BLOCKS, ids=where)
def test_a_block_says_what_it_is_and_who_runs_it(block: Block) -> None:
    assert block.language in LANGUAGES
    if block.mark is None:
        return
    kind, text = block.mark
    if kind == "run by":
        runner = ROOT / text
        assert runner.is_file(), f"there is no {text}"
        told = runner.read_text(encoding="utf-8")
        assert block.page.name in told, f"{text} does not speak of {block.page.name}"
    else:
        assert len(text.split()) >= 3, "say why"
        named = re.findall(r"tests/[\w/]+(?:\.py)?", text)
        assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("block", [one for one in BLOCKS if one.language == "yaml"], ids=where)
def test_a_file_is_taken_as_it_is(block: Block, tmp_path: Path) -> None:
    document = yaml.safe_load(block.text)
    if block.mark is not None:
        return
    if not set(document) <= set(SECTIONS[""].__struct_fields__):
        pytest.fail("this is no file of ours; say who reads it")
    (tmp_path / "trace.csv").write_text("at_ms\n0\n10\n")
    for found in re.findall(r"[\w-]+\.json", block.text):
        profile = {"version": 1, "source": "here", "exec_ms": {"100": {"1": 3, "8": 9}}, "memory_bytes": {}}
        (tmp_path / found).write_text(json.dumps(profile))
    whole = copy.deepcopy(BASE) | {key: value for key, value in document.items() if key != "cluster"}
    cluster = document.get("cluster") or {}
    whole["cluster"] = cluster if {"gpus", "nodes"} & set(cluster) else BASE["cluster"] | cluster
    if whole["cluster"].get("shards", 1) > 1 and len(whole["models"]) == 1:
        whole["models"] = [{**BASE["models"][0], "name": f"m{n}"} for n in range(whole["cluster"]["shards"])]
    parse_config(whole, tmp_path, is_whole="models" in document)


@pytest.mark.parametrize("block", [one for one in BLOCKS if one.language == "toml"], ids=where)
def test_toml_is_toml(block: Block) -> None:
    assert tomllib.loads(block.text)


@pytest.mark.parametrize("block", [one for one in BLOCKS if one.language == "python"], ids=where)
def test_python_can_be_compiled(block: Block) -> None:
    compile(block.text, block.where, "exec")


def commands_of(page: Path) -> Iterator[str]:
    """Calls of `tenuto` in blocks, and in the text."""
    for block in blocks(page):
        if block.language in {"console", "text", ""}:
            for line in block.commands:
                for part in re.split(r"&&|\|\||[|;]|--(?= tenuto)", line):
                    if found := re.match(r"(?:\w+=\S+ )*(tenuto .*)", part.strip(" '")):
                        text = found[1].partition(" #")[0].strip()
                        yield (
                            text if text.count("'") % 2 == 0 else text.rpartition("'")[0]
                        )  # the end of sh -c '…'
    for code in inline_code(page):
        if re.match(r"tenuto [a-z]", code) and "…" not in code:
            yield code.partition(" && ")[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_that_is_named_exists_with_its_options(page: Path) -> None:
    if page.name == "CHANGELOG.md":  # what was once
        return
    wrong = []
    for text in commands_of(page):
        try:
            _check(shlex.split(text)[1:])
        except click.BadOptionUsage:  # one that is only named, without its value
            continue
        except (click.UsageError, ValueError) as error:
            wrong.append(f"{text}: {error}")
    assert wrong == []


def _check(words: list[str]) -> None:
    """The words as click reads them, without their values' checks, which may ask for files. Raises click.UsageError."""
    command: click.Command = tenuto
    context = click.Context(tenuto, info_name="tenuto")
    while isinstance(command, click.Group):
        if not words:
            return
        name, *words = words
        if "|" in name or name.isupper():  # any of several
            return
        found = command.get_command(context, name)
        if found is None:
            raise click.UsageError(f"there is no command {name}")
        command, context = found, click.Context(found, info_name=name, parent=context)
    command.make_parser(context).parse_args([word for word in words if "[" not in word])


def _options(command: click.Command) -> Iterator[str]:
    context = click.Context(command, info_name="x")
    for parameter in command.get_params(context):
        yield from (*parameter.opts, *parameter.secondary_opts)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _options(inner)


def test_every_option_that_a_guide_names_exists() -> None:
    ours = set(_options(tenuto))
    benchmarks = "".join(
        path.read_text(encoding="utf-8")
        for folder in ("benchmarks", "tests")
        for path in (ROOT / folder).rglob("*.py")
    )
    wrong = [
        f"{page.relative_to(ROOT)}: {code}"
        for page in PAGES
        if page.name != "CHANGELOG.md"
        for code in inline_code(page)
        for option in re.findall(r"(?:^|\s)(--[a-z][\w-]*)", code)
        if option not in ours | OTHERS_OPTIONS and f'"{option}"' not in benchmarks
    ]
    assert wrong == []
