"""`tenuto reproduce`: experiments of the papers, their stated numbers beside ours."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from roles.command_parts import json_option, painters, plot_option
from roles.progress import progress
from roles.reproduce import EXPERIMENTS, run_experiment
from roles.reproduce.document import as_json as experiment_json
from roles.reproduce.document import markdown, rows_with_numbers, value_text
from roles.reproduce.report import Reproduction


@click.command()
@click.argument("name", required=False)
@click.option("--all", "is_all", is_flag=True, help="Every experiment, in the order of the document.")
@click.option(
    "--write",
    "write_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write what was run as a Markdown document.",
)
@plot_option
@json_option
def reproduce(
    *, name: str | None, is_all: bool, write_path: Path | None, plot_path: Path | None, as_json: bool
) -> None:
    """Run the experiment NAME, or all; without either, list the names."""
    if name is not None and is_all:
        raise click.UsageError("give NAME or --all, not both")
    if plot_path is not None and name is None:
        raise click.UsageError("--plot draws one experiment: give its NAME")
    if write_path is not None and name is None and not is_all:
        raise click.UsageError("--write needs something to run: give NAME or --all")
    plots = None if plot_path is None else painters()
    if name is None and not is_all:
        _list_names(as_json=as_json)
        return
    found = _run(list(EXPERIMENTS) if name is None else [name])
    if write_path is not None:
        write_path.write_text(markdown(found), encoding="utf-8")
    if plot_path is not None and plots is not None:
        if not rows_with_numbers(found[0]):
            raise click.ClickException(f"--plot: {found[0].name} has no numbers that a picture could show")
        plots.plot_reproduction(plot_path, found[0])
    if as_json:
        documents = [experiment_json(one) for one in found]
        click.echo(json.dumps(documents if is_all else documents[0]))
    else:
        for one in found:
            _print_experiment(one)


def _list_names(*, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(list(EXPERIMENTS)))
        return
    for name in EXPERIMENTS:
        click.echo(name)


def _run(names: list[str]) -> list[Reproduction]:
    found = []
    with progress("reproducing") as on_step:
        for number, name in enumerate(names, start=1):
            found.append(run_experiment(name))
            on_step(number / len(names))
    return found


def _print_experiment(found: Reproduction) -> None:
    table = Table(title=escape(found.title), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("what", overflow="fold")
    table.add_column("paper", justify="right", overflow="fold")
    table.add_column("ours", justify="right", overflow="fold")
    table.add_column("note", overflow="fold")
    for row in found.rows:
        table.add_row(
            *(escape(text) for text in (row.what, value_text(row.paper), value_text(row.ours), row.note))
        )
    console = Console()
    console.print(table)
    console.print(escape(found.source))
