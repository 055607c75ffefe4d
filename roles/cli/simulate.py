"""`tenuto simulate`: a workload in virtual time."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from policies.slo import BAD_RATE_ALLOWED
from roles.cli.console import plain_console, print_with_whole_names
from roles.cli.json_output import echo_json
from roles.cli.options import (
    OutputPath,
    duration_option,
    file_argument,
    json_option,
    painters,
    plot_option,
    remark,
    seed_option,
    warmup_option,
    writing,
)
from roles.cli.overrides import RecordedArrivals, override_options
from roles.cli.progress import progress
from roles.config.overrides import Override
from roles.config.read_config import Overrides, load_document
from roles.lab.batch_trace import write_trace
from roles.runtime.exit_codes import EXIT_SLO_MISSED
from roles.simulator.load_sweep import play_loads
from roles.simulator.replanning import simulate_replanning
from roles.simulator.simulation import simulate as play
from roles.workload.arrivals import workload_of
from roles.workload.outcomes import Outcome, Window


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
@click.option(
    "--full",
    "is_full",
    is_flag=True,
    help="With the real frontends, node agents and workers too, much slower; without jitter the fates are the same (docs/operate/replay.md).",
)
@click.option(
    "--arrivals",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A trace (CSV with at_ms,model), such as `tenuto record` writes: every model's requests come as in it.",
)
@override_options
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
    is_full: bool,
    arrivals: Path | None,
    overrides: Overrides,
    check: bool,
    as_json: bool,
) -> None:
    """Play the workload of FILE on its cluster, in virtual time."""
    plots = None if plot_path is None else painters()
    recorded = None if arrivals is None else RecordedArrivals.read(arrivals)

    def given(document: Mapping[str, Any]) -> list[Override]:
        return [*overrides(document), *([] if recorded is None else recorded.overrides(document))]

    document, config = load_document(file, given)
    window = Window(warmup_s * 1000, (warmup_s + duration_s) * 1000)
    silent: frozenset[str] = frozenset() if recorded is None else recorded.silent(config)
    workload = workload_of(config, seed, silent)
    remark(workload.remarks(window.until_ms))
    if is_replanned:
        run = simulate_replanning(config, document, str(file.parent), workload, window, is_full=is_full)
        for line in run.log or ("the plan did not change",):
            click.echo(line, err=True)
    else:
        run = play(config, workload, window, is_full=is_full)
    remark(f"unplaced: {model_id}: {reason}" for model_id, reason in run.unplaced.items())
    if trace_path is not None:
        with writing(trace_path):
            write_trace(trace_path, run.batches, run.slices)
    if plot_path is not None and plots is not None:
        with progress("other loads") as on_step, writing(plot_path):
            plots.plot_run(plot_path, run, play_loads(config, workload, window, on_step))
    if as_json:
        replanning = {"replanning": list(run.log)} if is_replanned else {}
        echo_json({**run.outcome.as_json(), **replanning})
    else:
        print_outcome(run.outcome, f"{run.outcome.duration_s:g} s in virtual time")
    is_left_out = any(
        model_id not in silent and config.model(model_id).rate_rps != 0 for model_id in run.unplaced
    )
    if check and (is_left_out or run.outcome.worst_bad_rate >= BAD_RATE_ALLOWED):
        sys.exit(EXIT_SLO_MISSED)


def print_outcome(outcome: Outcome, title: str) -> None:
    """A run's verdict for people."""
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    table.add_column("model", overflow="fold")
    for name in (
        "offered",
        "good",
        "late",
        "drops",
        "bad\n%",
        "p50\nms",
        "p99\nms",
        "batch",
        "med.",
        "GPUs",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for name, model in outcome.told.items():
        figures = (model.p50_ms, model.p99_ms, model.batch_mean)
        table.add_row(
            name,
            *(str(count) for count in (model.offered, model.good, model.late, model.dropped)),
            f"{100 * model.bad_rate:.2f}",
            *("-" if value is None else f"{value:.2f}" for value in figures),
            "-" if model.batch_p50 is None else f"{model.batch_p50:g}",
            "-" if (gpus := outcome.gpus_of(name)) is None else f"{gpus:.2f}",
        )
    busy = outcome.gpus.busy_fraction
    advice = f"the load of this run asks for {outcome.advice_gpus}"
    if outcome.advice_gpus is None:
        advice = "not all of their work is known, so nothing says how many the load asks for"
    console = plain_console()
    print_with_whole_names(console, table, ("med.", "batch", "p50\nms", "good"))
    console.print(
        f"offered {outcome.offered / outcome.duration_s:.1f} r/s, "
        f"goodput {outcome.good / outcome.duration_s:.1f} r/s, bad rate {100 * outcome.bad_rate:.2f} %"
    )
    console.print(
        f"GPUs {len(busy)}, used {outcome.gpus.used}, busy {100 * sum(busy) / max(1, len(busy)):.1f} % on average; {advice}"
    )
