"""What holds for all commands: `--json` on every read, that and `--dry-run` on every write; the exceptions are here, each with its reason.

A new command fails here until somebody says what it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from roles.cli.group import tenuto

READS = """
    bench, compare, config show, deploy logs, deploy plan, deploy status, doctor, explain, goodput, health, infer, keys show, models list, plan,
    profile, record, replay, reproduce, simulate, status, top, trace, what-if, why
"""
"""They tell something, of a file or of a cluster. Those that write a file too write where the caller says, and nothing else."""
WRITES = """
    dashboards, deploy down, deploy restart, deploy rollback, deploy up, deploy upgrade, down, drain, keys add, keys create, keys revoke,
    keys rotate, models add, models move, models remove, models set, restart, up
"""
"""They change a cluster, its hosts or its keys, or write files of their own naming."""
EXCEPTIONS = {
    "completion": "prints a script for a shell",
    "config schema": "prints JSON anyway",
    "demo": "a cluster of its own, which is gone when it ends; it has --json",
    "deploy k8s": "prints what it would write, unless --output says where to",
    "deploy run": "does what its caller's command does",
    "logs": "prints lines until it is interrupted",
    "page": "serves until it is interrupted",
    "spans": "sends until it is interrupted",
    **dict.fromkeys(("frontend", "gateway", "node-agent", "scheduler", "worker"), "a role in the foreground"),
}


def names(text: str) -> set[str]:
    return {name.strip() for name in text.split(",")}


def commands(group: click.Group, *path: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)
        else:
            yield " ".join((*path, name)), command


COMMANDS = dict(commands(tenuto))


def options(command: click.Command) -> set[str]:
    return {option for parameter in command.params for option in parameter.opts}


def test_each_command_is_a_read_or_a_write_or_an_exception_with_a_reason() -> None:
    kinds = [names(READS), names(WRITES), set(EXCEPTIONS)]
    assert set(COMMANDS) == set().union(*kinds)
    assert len(COMMANDS) == sum(map(len, kinds)), "one that is two kinds"


@pytest.mark.parametrize("name", sorted(names(READS)))
def test_every_read_has_json(name: str) -> None:
    assert "--json" in options(COMMANDS[name])


@pytest.mark.parametrize("name", sorted(names(WRITES)))
def test_every_write_has_a_dry_run_and_json(name: str) -> None:
    assert {"--dry-run", "--json"} <= options(COMMANDS[name])


@pytest.mark.parametrize(
    "name",
    sorted(
        {one for one in names(WRITES) if one.startswith("models ")}
        | {"drain", "restart", "explain", "why", "trace", "top"}
    ),
)
def test_a_running_cluster_is_reached_by_ssh_too(name: str) -> None:
    assert "--via" in options(COMMANDS[name])


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_and_each_of_its_options_says_what_it_is_in_80_columns(name: str) -> None:
    result = CliRunner().invoke(tenuto, [*name.split(), "--help"], terminal_width=80, prog_name="tenuto")
    assert result.exit_code == 0
    told = result.output.partition("\n\n")[2]
    assert max(map(len, told.splitlines())) <= 80
    command = COMMANDS[name]
    bare = [
        parameter.opts[-1]
        for parameter in command.params
        if isinstance(parameter, click.Option) and not parameter.hidden and not parameter.help
    ]
    assert bare == []


def test_a_start_that_is_only_said_starts_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    result = CliRunner().invoke(tenuto, ["up", "--dry-run", "--json", "--run-dir", str(run_dir)])
    assert result.exit_code == 0, result.output
    assert re.search(r'"roles": \[\s*"scheduler-0"', result.output)
    assert not run_dir.exists()
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("models: []\n", encoding="utf-8")
    assert CliRunner().invoke(tenuto, ["up", str(wrong), "--dry-run"]).exit_code != 0
