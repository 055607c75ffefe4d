"""`tenuto simulate` and `tenuto goodput`: questions answered in virtual time."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fabric.errors import PeerLost
from policies.scaling import BAD_RATE_ALLOWED
from roles.batch_trace import write_trace
from roles.config import load_config
from roles.goodput import DURATION_S_MIN, Goodput, find_goodput, question_of
from roles.outcomes import Outcome, Window
from roles.process import PARENT_VARIABLE, child_environment, die_with_parent
from roles.progress import progress
from roles.sim.loads import AtLoad, play_loads
from roles.sim.simulation import SimulatedRun
from roles.sim.simulation import simulate as play
from roles.workload import workload_of

EXIT_SLO_MISSED = 4
DASK_TIMEOUT_S = 10

_FILE = click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
_JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, and nothing else.")
_POSITIVE = click.FloatRange(min=0, min_open=True)


@click.command()
@_FILE
@click.option(
    "--duration", "duration_s", type=_POSITIVE, default=60.0, show_default=True, help="Window in s."
)
@click.option(
    "--warmup",
    "warmup_s",
    type=click.FloatRange(min=0),
    default=5.0,
    show_default=True,
    help="Before it, in s.",
)
@click.option("--seed", type=click.IntRange(min=0), help="Instead of the file's.")
@click.option("--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path), help="Draw a PNG.")
@click.option(
    "--trace",
    "trace_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write every batch, for chrome://tracing or Perfetto.",
)
@click.option("--check", is_flag=True, help="Exit 4 if a model's bad rate is 1 % or more.")
@_JSON
def simulate(
    *,
    file: Path,
    duration_s: float,
    warmup_s: float,
    seed: int | None,
    plot_path: Path | None,
    trace_path: Path | None,
    check: bool,
    as_json: bool,
) -> None:
    """Play the workload of FILE on its cluster, in virtual time."""
    plot_run = None if plot_path is None else _plotter()
    config = load_config(file)
    window = Window(warmup_s * 1000, (warmup_s + duration_s) * 1000)
    workload = workload_of(config, seed)
    run = play(config, workload, window)
    if trace_path is not None:
        write_trace(trace_path, run.batches, run.slices)
    if plot_path is not None and plot_run is not None:
        with progress("other loads") as on_step:
            plot_run(plot_path, run, play_loads(config, workload, window, on_step))
    if as_json:
        click.echo(json.dumps(run.outcome.as_json()))
    else:
        _print_outcome(run.outcome)
    if check and run.outcome.worst_bad_rate >= BAD_RATE_ALLOWED:
        sys.exit(EXIT_SLO_MISSED)


@click.command()
@_FILE
@click.option(
    "--seeds",
    type=click.IntRange(min=1, max=1000),
    default=3,
    show_default=True,
    help="How many, from the file's.",
)
@click.option(
    "--duration",
    "duration_s",
    type=_POSITIVE,
    default=DURATION_S_MIN,
    show_default=True,
    help="Shortest window in s; it grows to 2,000 arrivals of the rarest model.",
)
@click.option(
    "--warmup",
    "warmup_s",
    type=click.FloatRange(min=0),
    default=5.0,
    show_default=True,
    help="Before it, in s.",
)
@click.option("--workers", type=click.IntRange(min=1), help="Processes.  [default: one per core]")
@click.option("--dask", metavar="ADDRESS", help="Run on this Dask cluster instead (extra: sweep).")
@click.option("--check", is_flag=True, help="Exit 4 if the file's own total is over the goodput.")
@_JSON
def goodput(
    *,
    file: Path,
    seeds: int,
    duration_s: float,
    warmup_s: float,
    workers: int | None,
    dask: str | None,
    check: bool,
    as_json: bool,
) -> None:
    """Find the highest total rate at which every model's bad rate stays under 1 %."""
    config = load_config(file)
    question = question_of(config, warmup_s, duration_s)
    wanted = [config.seed + number for number in range(seeds)]
    with _executor(workers, dask) as (executor, size), progress("bisecting") as on_step:
        found = find_goodput(question, wanted, executor, size, on_step)
    if as_json:
        click.echo(json.dumps(found.as_json()))
    else:
        _print_goodput(found)
    if check and question.total_rps > found.goodput_rps:
        sys.exit(EXIT_SLO_MISSED)


def _plotter() -> Callable[[Path, SimulatedRun, Sequence[AtLoad]], None]:
    """The picture's painter, asked for before the run: a missing package is said at once."""
    try:
        from roles.plots import plot_run  # noqa: PLC0415  matplotlib is an extra, and slow to import
    except ImportError as error:
        raise click.ClickException(
            f"--plot needs the extra 'plots': pip install 'tenuto[plots]' ({error})"
        ) from error
    return plot_run


@contextmanager
def _executor(workers: int | None, dask: str | None) -> Iterator[tuple[Executor, int]]:
    """Where probes run, and how many at once: a Dask cluster, or processes of this machine."""
    if dask is not None:
        with _dask_executor(dask) as found:
            yield found
        return
    size = workers or len(os.sched_getaffinity(0))
    os.environ.update(child_environment())
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(size, mp_context=context, initializer=die_with_parent)
    try:
        yield pool, size
    finally:
        pool.shutdown(cancel_futures=True)
        os.environ.pop(PARENT_VARIABLE, None)


@contextmanager
def _dask_executor(address: str) -> Iterator[tuple[Executor, int]]:
    try:
        from distributed import Client  # noqa: PLC0415  an extra, and slow to import
    except ImportError as error:
        raise click.ClickException("--dask needs the extra 'sweep': pip install 'tenuto[sweep]'") from error
    try:
        client = Client(address, timeout=DASK_TIMEOUT_S)
    except (OSError, ValueError) as error:  # a time-out is an OSError too
        raise PeerLost(f"no Dask scheduler answers at {address}: {error}") from error
    with client:
        workers = len(client.nthreads())  # a probe is pure Python and fills a core, so one each
        if workers == 0:
            raise PeerLost(f"the Dask cluster at {address} has no workers")
        yield client.get_executor(pure=False), workers


def _print_outcome(outcome: Outcome) -> None:
    table = Table(title=f"{outcome.duration_s:g} s in virtual time", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
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
    console = Console()
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
    console = Console()
    console.print(table)
    low, high = min(found.per_seed_rps), max(found.per_seed_rps)
    console.print(f"over {len(found.per_seed_rps)} seeds: {low:.1f} to {high:.1f} r/s")
    for model_id, reason in found.unserved:
        console.print(f"unserved: {model_id}: {reason}")
