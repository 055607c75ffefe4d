"""`tenuto bench`: open-loop load at a living cluster."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from fabric.frames import PAYLOAD_BYTES_MAX
from policies.slo import BAD_RATE_ALLOWED
from roles.benchmark.run import run_load
from roles.benchmark.share import LoadPlan
from roles.benchmark.targets import default_processes
from roles.benchmark.verdict import LoadRun
from roles.cli.console import plain_console
from roles.cli.infer import running_frontends
from roles.cli.options import (
    PROCESSES_MAX,
    IntRange,
    check_live,
    duration_option,
    echo_json,
    file_argument,
    json_option,
    key_option,
    painters,
    plot_option,
    remark,
    seed_option,
    via_option,
    warmup_option,
)
from roles.cli.progress import progress
from roles.cli.simulate import print_outcome
from roles.config.read_config import load_config
from roles.runtime.exit_codes import EXIT_FAILURE, EXIT_SLO_MISSED
from roles.workload.arrivals import workload_of
from roles.workload.outcomes import Window


@click.command()
@file_argument
@click.option("--target", help="A frontend's tcp:// or ipc:// address (default: the cluster of this host).")
@via_option
@key_option
@duration_option
@warmup_option
@seed_option
@click.option(
    "--processes",
    type=IntRange(1, PROCESSES_MAX),
    help="That send.  [default: one per frontend, and per two cores]",
)
@click.option(
    "--payload-bytes",
    type=IntRange(0, PAYLOAD_BYTES_MAX),
    default=4096,
    show_default=True,
    help="Of a request to a model that declares no inputs.",
)
@plot_option
@json_option
def bench(
    *,
    file: Path,
    target: str | None,
    key_file: Path | None,
    duration_s: float,
    warmup_s: float,
    seed: int | None,
    processes: int | None,
    payload_bytes: int,
    plot_path: Path | None,
    as_json: bool,
) -> None:
    """Send the workload of FILE to a living cluster, each request at its moment, whatever became of the others.

    Latency counts from the moment a request was meant to leave. Exit 4 when a model's bad rate is 1 % or more, or 1
    when it is, and the senders themselves were so late that it may be their doing.
    """
    if target is not None and not target.startswith(("tcp://", "ipc://")):
        raise click.UsageError(f"--target is {target!r}; it must begin with tcp:// or ipc://")
    plots = None if plot_path is None else painters()
    config = check_live(load_config(file))
    window = Window(warmup_s * 1000, (warmup_s + duration_s) * 1000)
    workload = workload_of(config, seed)
    remark(workload.remarks(window.until_ms))
    plan = LoadPlan(
        config,
        workload,
        (target,) if target else tuple(running_frontends()),
        window.until_ms,
        processes or default_processes(config),
        payload_bytes,
        key_file=key_file,
    )
    with progress("sending") as on_step:
        run = run_load(plan, window, on_step)
    if plots is not None:
        plots.plot_load(plot_path, run)
    if as_json:
        echo_json(run.as_json())
    else:
        _print(run)
    if run.is_spoiled:
        click.echo(
            f"tenuto: the senders were {run.sender_late_p99_ms:.2f} ms late at their p99 "
            f"({run.late_allowed_ms:.2f} allowed): take more --processes or another host",
            err=True,
        )
        sys.exit(EXIT_FAILURE)
    if run.outcome.worst_bad_rate >= BAD_RATE_ALLOWED:
        sys.exit(EXIT_SLO_MISSED)


def _print(run: LoadRun) -> None:
    print_outcome(run.outcome, f"{run.outcome.duration_s:g} s of load")
    console = plain_console()
    table = Table(title="where the time went", box=SIMPLE_HEAD)
    table.add_column("stage")
    for name in ("mean ms", "p50 ms", "p99 ms"):
        table.add_column(name, justify="right")
    for stage, spent_ms in run.breakdown_ms().items():
        table.add_row(
            stage.removesuffix("_ms"),
            *("-" if value is None else f"{value:.3f}" for value in spent_ms.values()),
        )
    console.print(table)
    for code, count in run.record.errors.most_common():
        console.print(f"{code}: {count}")
    verdict = ": the run says more of the senders than of the cluster" if run.is_spoiled else ""
    console.print(f"senders late by {run.sender_late_p99_ms:.2f} ms at their p99{verdict}")
