"""What `--help` says is said to its end."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from roles.cli.group import COMMANDS, tenuto
from roles.cli.whole_help import MEANT


def groups(group: click.Group, *path: str) -> Iterator[tuple[str, ...]]:
    yield path
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from groups(command, *path, name)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("staus",), "No such command 'staus'; did you mean status?"),
        (("check",), "No such command 'check'; `tenuto plan FILE` checks a file, `tenuto doctor` a host"),
        (("models", "check"), "No such command 'check'; there is add, list, move, remove, set"),
        (("models", "lst"), "No such command 'lst'; did you mean list?"),
        (("models", "zzz"), "No such command 'zzz'; there is add, list, move, remove, set"),
    ],
)
def test_a_command_that_is_none_has_the_closest_one_beside_it(words: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(tenuto, list(words))
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize("path", list(groups(tenuto)), ids=" ".join)
def test_no_line_of_a_list_of_commands_is_cut(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(tenuto, [*path, "--help"], terminal_width=80)
    assert result.exit_code == 0
    listed = result.output.split("Commands:")[1]
    assert "..." not in listed
    assert max(map(len, listed.splitlines())) <= 80


def test_what_is_meant_by_another_name_is_no_command_of_ours() -> None:
    assert not set(MEANT) & set(COMMANDS)
