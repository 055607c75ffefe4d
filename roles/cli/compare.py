"""`tenuto compare`: placements and batching disciplines, all on one workload, in virtual time."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from roles.cli.console import plain_console
from roles.cli.json_output import echo_json
from roles.cli.options import (
    duration_option,
    file_argument,
    json_option,
    painters,
    plot_option,
    remark,
    seed_option,
    warmup_option,
    workers_option,
    writing,
)
from roles.cli.progress import progress
from roles.config.choices import batching_choices, placement_choices
from roles.config.read_config import load_config
from roles.lab.compare import Compared
from roles.lab.compare import compare as play_all
from roles.lab.parallel import executor_of
from roles.runtime.exit_codes import EXIT_CONFIG
from roles.workload.arrivals import workload_of
from roles.workload.outcomes import Window

COLUMNS = 7  # combinations beside each other in 80 characters


@click.command()
@file_argument
@click.option(
    "--placements",
    required=True,
    metavar="A,B,…",
    help="Names, or names with options: 'exclusive,{symphony: {subclusters: 2}}'.",
)
@click.option("--batching", metavar="A,B,…", help="Names as for --placements.  [default: the file's]")
@duration_option
@warmup_option
@seed_option
@workers_option
@plot_option
@json_option
def compare(
    *,
    file: Path,
    placements: str,
    batching: str | None,
    duration_s: float,
    warmup_s: float,
    seed: int | None,
    workers: int | None,
    plot_path: Path | None,
    as_json: bool,
) -> None:
    """Play the workload of FILE with every placement under every batching; the same requests each time.

    Exits 3 if no combination can be played.
    """
    plots = None if plot_path is None else painters()
    config = load_config(file)
    placed = placement_choices(placements, config, "--placements")
    batched = batching_choices(batching or config.batching.name, config.batching, "--batching")
    workload = workload_of(config, seed)
    window = Window(warmup_s * 1000, (warmup_s + duration_s) * 1000)
    remark(workload.remarks(window.until_ms))
    with executor_of(workers) as (executor, _), progress("comparing") as on_step:
        rows = play_all(config, workload, window, (placed, batched), executor, on_step)
    if plot_path is not None and plots is not None:
        with writing(plot_path):
            plots.plot_comparison(plot_path, rows)
    if as_json:
        echo_json([row.as_json() for row in rows])
    else:
        _print_rows(rows)
    if all(row.error is not None for row in rows):
        sys.exit(EXIT_CONFIG)


def _print_rows(rows: Sequence[Compared]) -> None:
    played = [row for row in rows if row.outcome is not None]
    console = plain_console()
    if played:
        console.print(_summary(played))
        for first in range(0, len(played), COLUMNS):
            console.print(_by_model(played[first : first + COLUMNS], first + 1))
    for row in rows:
        if row.error is not None:
            console.print(f"{row.placement} with {row.batching}: {row.error}")
    unplaced = {
        (row.placement, one.model_id, one.reason): None
        for row in rows
        if row.plan is not None
        for one in row.plan.unplaced
    }
    for placement, model_id, reason in unplaced:
        console.print(f"{placement}: unplaced: {model_id}: {reason}")


def _summary(rows: Sequence[Compared]) -> Table:
    table = Table(title="goodput, requests/s", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("placement", overflow="ellipsis")
    table.add_column("batching", overflow="ellipsis")
    for column in ("offered", "good", "least\ngood %", "expected", "GPUs", "per\nhour"):
        table.add_column(column, justify="right", no_wrap=True)
    for number, row in enumerate(rows, start=1):
        worst, expected = (
            row.worst_served_fraction,
            None if row.plan is None else row.plan.expected_goodput_rps,
        )
        table.add_row(
            str(number),
            row.placement,
            row.batching,
            f"{sum(row.offered_by_model_rps.values()):.1f}",
            f"{sum(row.goodput_by_model_rps.values()):.1f}",
            "-" if worst is None else f"{100 * worst:.1f}",
            "-" if expected is None else f"{expected:.1f}",
            "-" if row.plan is None else str(len(row.plan.gpus_used)),
            "-" if row.cost_per_hour is None else f"{row.cost_per_hour:.2f}",
        )
    return table


def _by_model(rows: Sequence[Compared], first: int) -> Table:
    """A row a model, a column a combination by its number in the summary."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("model", overflow="fold")
    for column in ("offered", *(f"#{number}" for number, _ in enumerate(rows, start=first))):
        table.add_column(column, justify="right", no_wrap=True)
    for name, offered_rps in rows[0].offered_by_model_rps.items():
        good = (f"{row.goodput_by_model_rps[name]:.1f}" for row in rows)
        table.add_row(name, f"{offered_rps:.1f}", *good)
    return table
