"""`tenuto config show FILE`: every value, and where it came from; `tenuto config schema`: what a file may contain, for editors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from roles.cli.console import plain_console
from roles.cli.json_output import echo_json
from roles.cli.overrides import override_options
from roles.cli.whole_help import WholeHelpGroup
from roles.config.json_schema import json_schema
from roles.config.read_config import Overrides, config_origins, load_config
from roles.runtime.environment import run_dir


@click.group(cls=WholeHelpGroup)
def config() -> None:
    """Look at a configuration."""


@config.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@override_options
@click.option("--json", "is_json", is_flag=True, help="A list of {path, value, origin} on stdout.")
def show(file: Path, overrides: Overrides, is_json: bool) -> None:  # noqa: FBT001  click's flag
    """Print every value of FILE with its origin: a flag before the environment, before the file, before a default.

    Any value may be given by --set or $TENUTO_SET instead. The last lines are what the environment alone says.
    """
    settings = [*config_origins(load_config(file, overrides)), *of_environment(os.environ)]
    if is_json:
        echo_json([{"path": p, "value": v, "origin": o} for p, v, o in settings], default=str)
        return
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("path", "value", "origin"):
        table.add_column(column, overflow="fold")
    for path, value, origin in settings:
        table.add_row(path, str(value), origin)
    plain_console().print(table)


@config.command()
def schema() -> None:
    """Print the JSON Schema of the file: an editor with a YAML language server completes and checks by it.

    The file says where it is in its first line: # yaml-language-server: $schema=tenuto.schema.json
    """
    echo_json(json_schema())


def of_environment(environment: Mapping[str, str]) -> list[tuple[str, Any, str]]:
    """Where run files are and which key is shown, which no file says."""
    home = run_dir(environment)
    home.remove()
    places = (("TENUTO_RUN_DIR", ""), ("XDG_RUNTIME_DIR", "tenuto"))
    used = next(
        (
            name
            for name, inside in places
            if environment.get(name) and home.path == Path(environment[name], inside).absolute()
        ),
        None,
    )
    key = environment.get("TENUTO_KEY_FILE")
    return [
        ("--run-dir", str(home.path), f"${used}" if used else "default"),
        ("--key", key, "$TENUTO_KEY_FILE" if key else "default"),
    ]
