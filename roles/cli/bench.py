"""`tenuto bench`: open-loop load at a living cluster."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from fabric.errors import ConfigError
from fabric.frames import PAYLOAD_BYTES_MAX
from policies.slo import BAD_RATE_ALLOWED
from roles.benchmark.gateway_target import check_target
from roles.benchmark.run import run_load
from roles.benchmark.share import LoadPlan, asked_of
from roles.benchmark.targets import default_processes
from roles.benchmark.verdict import LoadRun, planned_slices
from roles.cli.cluster_tables import brief
from roles.cli.console import plain_console
from roles.cli.infer import running_frontends
from roles.cli.json_output import echo_json
from roles.cli.options import (
    PROCESSES_MAX,
    ConnectAddress,
    IntRange,
    duration_option,
    file_argument,
    json_option,
    key_option,
    painters,
    plot_option,
    remark,
    seed_option,
    via_option,
    warmup_option,
    writing,
)
from roles.cli.progress import progress
from roles.cli.simulate import print_outcome
from roles.config.read_config import load_config
from roles.runtime.exit_codes import EXIT_FAILURE, EXIT_SLO_MISSED
from roles.workload.arrivals import workload_of
from roles.workload.outcomes import Window


@click.command()
@file_argument
@click.option(
    "--target",
    type=ConnectAddress(check=check_target),
    help="A frontend's tcp:// or ipc:// address, or a gateway's http://, https://, grpc:// or grpcs:// (default: the frontends of this host).",
)
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    envvar="TENUTO_TOKEN_FILE",
    help="For a gateway that asks for one: its first line (or $TENUTO_TOKEN_FILE).",
)
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
    token_file: Path | None,
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

    Latency counts from the moment a request was meant to leave. A frontend refuses at the deadline: percentiles are of answers in
    time, and late requests count as dropped. Exit 4 when a model's bad rate is 1 % or more, or 1
    when it is, and the senders themselves were so late that it may be their doing.
    """
    plots = None if plot_path is None else painters()
    config = load_config(file)
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
        token=_token_in(token_file),
    )
    planned = planned_slices(config)
    remark([planned.remark] if planned.remark else [])
    with progress("sending") as on_step:
        run = run_load(plan, window, on_step, planned)
    remark(run.remarks())
    if plot_path is not None and plots is not None:
        with writing(plot_path):
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


def _token_in(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        words = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file: {path} cannot be read: {error}") from error
    if not words:
        raise ConfigError(f"--token-file: {path} is empty")
    return words[0]


def _print(run: LoadRun) -> None:
    print_outcome(run.outcome, f"{run.outcome.duration_s:g} s of load")
    console = plain_console()
    console.print(_stages_of_all(run))
    if len(run.config.models) > 1:
        console.print(_stages_by_model(run))
    for name, _ in asked_of(run.config):
        errors = ", ".join(f"{code} {count}" for code, count in run.errors(name).most_common())
        if errors:
            console.print(f"{name}, warm-up included: {errors}")
    verdict = ": the run says more of the senders than of the cluster" if run.is_spoiled else ""
    console.print(f"senders late by {run.sender_late_p99_ms:.2f} ms at their p99{verdict}")


def _stages_of_all(run: LoadRun) -> Table:
    table = Table(title="where the time went, ms", box=SIMPLE_HEAD)
    table.add_column("stage")
    for name in ("mean", "p50", "p99"):
        table.add_column(name, justify="right", no_wrap=True)
    for stage, spent_ms in run.breakdown_ms().items():
        table.add_row(
            stage.removesuffix("_ms"),
            *("-" if value is None else f"{value:.3f}" for value in spent_ms.values()),
        )
    return table


def _stages_by_model(run: LoadRun) -> Table:
    """A row a model; stages that took no time anywhere are left out, so that it fits."""
    of_all = run.breakdown_ms()
    stages = [stage for stage, spent_ms in of_all.items() if spent_ms["p99"]]
    table = Table(title="each model: mean, p99 ms", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("model", overflow="fold")
    for stage in stages:
        table.add_column(stage.removesuffix("_ms"), justify="right", no_wrap=True)
    for model in run.config.models:
        breakdown = run.breakdown_ms(model.model_id)
        for name in ("mean", "p99"):
            cells = (brief(breakdown[stage][name]) for stage in stages)
            table.add_row(model.model_id if name == "mean" else f"  {name}", *cells)
    return table
