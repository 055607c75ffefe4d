"""`tenuto simulate` and `tenuto goodput`: questions answered in virtual time."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from policies.scaling import BAD_RATE_ALLOWED
from roles.batch_trace import write_trace
from roles.command_parts import (
    EXIT_SLO_MISSED,
    POSITIVE_S,
    IntRange,
    OutputPath,
    duration_option,
    echo_json,
    file_argument,
    json_option,
    painters,
    plot_option,
    remark,
    seed_option,
    warmup_option,
    workers_option,
)
from roles.config import load_config, parse_config
from roles.console import plain_console
from roles.documents import read_document
from roles.goodput import DURATION_S_MIN, Goodput, Question, find_goodput, question_of
from roles.outcomes import Outcome, Window
from roles.pool import executor_of
from roles.progress import progress
from roles.sim.loads import play_loads
from roles.sim.replanning import simulate_replanning
from roles.sim.simulation import simulate as play
from roles.workload import workload_of


@click.command()
@file_argument
@duration_option
@warmup_option
@seed_option
@plot_option
@click.option(
    "--trace",
    "trace_path",
    type=OutputPath(),
    help="Write every batch, for chrome://tracing or Perfetto.",
)
@click.option(
    "--replan",
    "is_replanned",
    is_flag=True,
    help="Let the placement follow the load, as a live cluster does; what it did goes to stderr, and into --json.",
)
@click.option("--check", is_flag=True, help="Exit 4 if a model is unplaced or its bad rate is 1 % or more.")
@json_option
def simulate(
    *,
    file: Path,
    duration_s: float,
    warmup_s: float,
    seed: int | None,
    plot_path: Path | None,
    trace_path: Path | None,
    is_replanned: bool,
    check: bool,
    as_json: bool,
) -> None:
    """Play the workload of FILE on its cluster, in virtual time."""
    plots = None if plot_path is None else painters()
    document = read_document(file)
    config = parse_config(document, file.parent, source=str(file))
    window = Window(warmup_s * 1000, (warmup_s + duration_s) * 1000)
    workload = workload_of(config, seed)
    remark(workload.remarks(window.until_ms))
    if is_replanned:
        run = simulate_replanning(config, document, str(file.parent), workload, window)
        for line in run.log or ("the plan did not change",):
            click.echo(line, err=True)
    else:
        run = play(config, workload, window)
    remark(f"unplaced: {model_id}: {reason}" for model_id, reason in run.unplaced.items())
    if trace_path is not None:
        write_trace(trace_path, run.batches, run.slices)
    if plot_path is not None and plots is not None:
        with progress("other loads") as on_step:
            plots.plot_run(plot_path, run, play_loads(config, workload, window, on_step))
    if as_json:
        replanning = {"replanning": list(run.log)} if is_replanned else {}
        echo_json({**run.outcome.as_json(), **replanning})
    else:
        print_outcome(run.outcome, f"{run.outcome.duration_s:g} s in virtual time")
    is_left_out = any(config.model(model_id).rate_rps != 0 for model_id in run.unplaced)
    if check and (is_left_out or run.outcome.worst_bad_rate >= BAD_RATE_ALLOWED):
        sys.exit(EXIT_SLO_MISSED)


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
    type=POSITIVE_S,
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
    remark(question.workload.remarks())
    wanted = [config.seed + number for number in range(seeds)]
    if is_live:
        found = _live_goodput(file, question, wanted)
    else:
        with executor_of(workers, dask) as (executor, size), progress("bisecting") as on_step:
            found = find_goodput(question, wanted, executor, size, on_step)
    if as_json:
        echo_json(found.as_json())
    else:
        _print_goodput(found)
    if check and (question.total_rps > found.goodput_rps or question.is_anybody_left_out):
        sys.exit(EXIT_SLO_MISSED)


def _live_goodput(file: Path, question: Question, seeds: Sequence[int]) -> Goodput:
    """The same search at a cluster of its own, started for it."""
    from roles.load.live_goodput import InlineExecutor, LiveProbe  # noqa: PLC0415  only --live needs these
    from roles.load.targets import default_processes, one_of_each  # noqa: PLC0415  see above
    from roles.supervisor.temporary import temporary_cluster  # noqa: PLC0415  see above

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


def print_outcome(outcome: Outcome, title: str) -> None:
    """A run's verdict for people."""
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("model", overflow="fold")
    for name in (
        "offered",
        "good",
        "late",
        "dropped",
        "bad %",
        "p50 ms",
        "p99 ms",
        "batch",
        "median",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for model_id, model in outcome.models.items():
        times = (model.p50_ms, model.p99_ms, model.batch_mean, model.batch_p50)
        table.add_row(
            model_id,
            *(str(count) for count in (model.offered, model.good, model.late, model.dropped)),
            f"{100 * model.bad_rate:.2f}",
            *("-" if value is None else f"{value:.2f}" for value in times),
        )
    busy = outcome.busy_fraction
    console = plain_console()
    console.print(table)
    console.print(
        f"offered {outcome.offered / outcome.duration_s:.1f} r/s, "
        f"goodput {outcome.good / outcome.duration_s:.1f} r/s, bad rate {100 * outcome.bad_rate:.2f} %"
    )
    console.print(
        f"GPUs {len(busy)}, used {outcome.used_gpus}, busy {100 * sum(busy) / max(1, len(busy)):.1f} % on average; "
        f"advised {outcome.advice_gpus}"
    )


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
