"""`tenuto reproduce`: experiments of the papers, their stated numbers beside ours."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from fabric.errors import error_text
from roles.cli.console import plain_console
from roles.cli.json_output import echo_json
from roles.cli.options import OutputPath, json_option, painters, plot_option, writing
from roles.cli.progress import progress
from roles.lab.reproduce import EXPERIMENTS, check_name, run_experiment
from roles.lab.reproduce.document import as_json as experiment_json
from roles.lab.reproduce.document import (
    chapter,
    chapters_of,
    failed_chapter,
    in_order,
    is_failed,
    markdown,
    ratio_text,
    rows_with_numbers,
    value_text,
)
from roles.lab.reproduce.report import Reproduction
from roles.runtime.exit_codes import EXIT_PARTIAL


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--all", "is_all", is_flag=True, help="Every experiment, in the order of the document.")
@click.option(
    "--write",
    "write_path",
    type=OutputPath(),
    help="Write each result into a Markdown document as soon as it is there; other chapters stay.",
)
@click.option(
    "--missing", "is_missing", is_flag=True, help="With --all --write: only what the document lacks."
)
@click.option(
    "--full",
    "is_full",
    is_flag=True,
    help="The whole of what is sampled otherwise: hours instead of minutes.",
)
@plot_option
@json_option
def reproduce(
    *,
    names: tuple[str, ...],
    is_all: bool,
    is_full: bool,
    write_path: Path | None,
    is_missing: bool,
    plot_path: Path | None,
    as_json: bool,
) -> None:
    """Run the experiments NAME, or all; without either, list the names.

    One that fails does not stop the others: exit code 6, and the message names it.
    """
    if names and is_all:
        raise click.UsageError("give NAME or --all, not both")
    if plot_path is not None and len(names) != 1:
        raise click.UsageError("--plot draws one experiment: give its NAME")
    if write_path is not None and not names and not is_all:
        raise click.UsageError("--write needs something to run: give NAME or --all")
    if is_missing and (write_path is None or not is_all):
        raise click.UsageError("--missing goes with --all and --write")
    plots = None if plot_path is None else painters()
    if not names and not is_all:
        _list_names(as_json=as_json)
        return
    for name in names:
        check_name(name)
    chapters = {} if write_path is None else _read_chapters(write_path)
    wanted = [
        name
        for name in (EXPERIMENTS if is_all else names)
        if not is_missing or name not in chapters or is_failed(chapters[name])
    ]

    def keep(name: str, text: str) -> None:
        if write_path is not None:
            chapters[name] = text
            draft = write_path.with_name(f"{write_path.name}.tmp")
            missing = [other for other in EXPERIMENTS if other not in chapters]
            with writing(write_path):
                draft.write_text(markdown(in_order(chapters, list(EXPERIMENTS)), missing), encoding="utf-8")
                draft.replace(write_path)

    found, failed = _run(wanted, keep, is_full=is_full)
    if plot_path is not None and plots is not None and found:
        if not rows_with_numbers(found[0]):
            raise click.ClickException(f"--plot: {found[0].name} has no numbers that a picture could show")
        with writing(plot_path):
            plots.plot_reproduction(plot_path, found[0])
    if as_json:
        documents = [experiment_json(one) for one in found]
        echo_json(documents[0] if len(names) == 1 and documents else documents)
    else:
        for one in found:
            _print_experiment(one)
    for name, reason in failed.items():
        click.echo(f"tenuto: {name} failed: {reason}", err=True)
    if failed:
        sys.exit(EXIT_PARTIAL)


def _list_names(*, as_json: bool) -> None:
    if as_json:
        echo_json(list(EXPERIMENTS))
        return
    for name in EXPERIMENTS:
        click.echo(name)


def _read_chapters(path: Path) -> dict[str, str]:
    """What a document has so far; a file that is something else is not overwritten."""
    if not path.exists():
        return {}
    chapters = chapters_of(path.read_text(encoding="utf-8"))
    if chapters is None:
        raise click.UsageError(f"--write: {path} is there and was not written by this command")
    return chapters


def _run(
    names: Sequence[str], keep: Callable[[str, str], None], *, is_full: bool
) -> tuple[list[Reproduction], dict[str, str]]:
    """The results, and by name why there is none; `keep` gets each chapter at once: some take minutes."""
    day = date.today().isoformat()  # noqa: DTZ011  the day of whoever reads the document
    found, failed = [], {}
    with progress("reproducing") as on_step:
        for number, name in enumerate(names, start=1):
            try:
                one = run_experiment(name, is_full=is_full)
            except Exception as error:  # noqa: BLE001  # top of process: each experiment is a run of its own
                failed[name] = error_text(error)
                keep(name, failed_chapter(name, failed[name], day))
            else:
                found.append(one)
                keep(name, chapter(one, day))
            on_step(number / len(names))
    return found, failed


def _print_experiment(found: Reproduction) -> None:
    table = Table(title=found.title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("what", overflow="fold")
    table.add_column("paper", justify="right", overflow="fold")
    table.add_column("ours", justify="right", overflow="fold")
    table.add_column("ours / paper", justify="right")
    table.add_column("note", overflow="fold")
    for row in found.rows:
        numbers = (value_text(row.paper), value_text(row.ours), ratio_text(row.ratio))
        table.add_row(row.what, *numbers, row.note)
    console = plain_console()
    console.print(table)
    for grid in found.grids:
        bars = Table(title=grid.title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        bars.add_column("")
        for column in grid.columns:
            bars.add_column(column, justify="right")
        for name, values in grid.rows:
            bars.add_row(name, *(value_text(value) for value in values))
        console.print(bars)
    console.print(found.source)
