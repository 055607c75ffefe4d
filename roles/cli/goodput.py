"""`tenuto goodput`: the highest rate that keeps every SLO, in virtual time or live."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from roles.cli import importing
from roles.cli.console import plain_console
from roles.cli.json_output import echo_json
from roles.cli.options import (
    WINDOW_S,
    IntRange,
    file_argument,
    json_option,
    remark,
    warmup_option,
    workers_option,
)
from roles.cli.progress import progress
from roles.config.read_config import load_config
from roles.lab.frontend_limit import remarks_on_frontends
from roles.lab.goodput import DURATION_S_MIN, Goodput, Question, find_goodput, question_of
from roles.lab.parallel import executor_of
from roles.runtime.exit_codes import EXIT_SLO_MISSED


@click.command()
@file_argument
@click.option(
    "--seeds",
    type=IntRange(1, 1000),
    default=3,
    show_default=True,
    help="How many, from the file's.",
)
@click.option(
    "--duration",
    "duration_s",
    type=WINDOW_S,
    default=DURATION_S_MIN,
    show_default=True,
    help="Shortest window in s; it grows to 2,000 arrivals of the rarest model.",
)
@warmup_option
@workers_option
@click.option("--dask", metavar="ADDRESS", help="Run on this Dask cluster instead (extra: sweep).")
@click.option("--live", "is_live", is_flag=True, help="Start the cluster on this host and really send.")
@click.option(
    "--check",
    is_flag=True,
    help="Exit 4 if the file's own total is over the goodput, or a model with a rate is unserved.",
)
@json_option
def goodput(
    *,
    file: Path,
    seeds: int,
    duration_s: float,
    warmup_s: float,
    workers: int | None,
    dask: str | None,
    is_live: bool,
    check: bool,
    as_json: bool,
) -> None:
    """Find the highest total rate at which every model's bad rate stays under 1 %."""
    if is_live and (workers or dask):
        raise click.UsageError("--live sends one load at a time: it takes neither --workers nor --dask")
    config = load_config(file)
    question = question_of(config, warmup_s, duration_s)
    remark([*question.workload.remarks(), *question.remarks()])
    wanted = [config.seed + number for number in range(seeds)]
    if is_live:
        found = _live_goodput(file, question, wanted)
    else:
        with executor_of(workers, dask) as (executor, size), progress("bisecting") as on_step:
            found = find_goodput(question, wanted, executor, size, on_step)
        remark(remarks_on_frontends(config, found.goodput_rps))
    if as_json:
        echo_json(found.as_json())
    else:
        _print_goodput(found)
    if check and (question.total_rps > found.goodput_rps or question.is_anybody_left_out):
        sys.exit(EXIT_SLO_MISSED)


def _live_goodput(file: Path, question: Question, seeds: Sequence[int]) -> Goodput:
    """The same search at a cluster of its own, started for it."""
    with importing():
        from roles.benchmark.targets import default_processes, one_of_each  # noqa: PLC0415  only --live needs these
        from roles.benchmark.temporary_cluster import temporary_cluster  # noqa: PLC0415  see above
        from roles.lab.live_goodput import InlineExecutor, LiveProbe  # noqa: PLC0415  see above

    def on_late(total_rps: float, late_ms: float) -> None:
        click.echo(
            f"tenuto: at {total_rps:.0f} r/s the senders were {late_ms:.1f} ms late at their p99: "
            "this host cannot send that much",
            err=True,
        )

    with temporary_cluster(file) as cluster, progress("bisecting") as on_step:
        targets = one_of_each(cluster.endpoints["client"])
        probe = LiveProbe(targets, default_processes(question.config), on_late)
        return find_goodput(question, seeds, InlineExecutor(), 1, on_step, probe)


def _print_goodput(found: Goodput) -> None:
    table = Table(
        title=f"goodput {found.goodput_rps:.1f} r/s, windows of {found.duration_s:.0f} s", box=SIMPLE_HEAD
    )
    table.add_column("model")
    table.add_column("r/s", justify="right")
    for model_id, rate_rps in found.rates_rps.items():
        table.add_row(model_id, f"{rate_rps:.1f}")
    console = plain_console()
    console.print(table)
    low, high = min(found.per_seed_rps), max(found.per_seed_rps)
    console.print(f"over {len(found.per_seed_rps)} seeds: {low:.1f} to {high:.1f} r/s")
    for model_id, reason in found.unserved:
        console.print(f"unserved: {model_id}: {reason}")
