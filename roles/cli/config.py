"""`tenuto config show FILE`: every value, and where it came from."""

from __future__ import annotations

from pathlib import Path

import click
from rich.table import Table

from roles.cli.console import plain_console
from roles.cli.options import echo_json
from roles.cli.whole_help import WholeHelpGroup
from roles.config.read_config import config_origins, load_config


@click.group(cls=WholeHelpGroup)
def config() -> None:
    """Look at a configuration."""


@config.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--json", "is_json", is_flag=True, help="A list of {path, value, origin} on stdout.")
def show(file: Path, is_json: bool) -> None:  # noqa: FBT001  click's flag
    """Print every value of FILE with its origin: the file, or a default."""
    settings = config_origins(load_config(file))
    if is_json:
        echo_json([{"path": p, "value": v, "origin": o} for p, v, o in settings], default=str)
        return
    table = Table("path", "value", "origin")
    for path, value, origin in settings:
        table.add_row(path, str(value), origin)
    plain_console().print(table)
