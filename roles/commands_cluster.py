"""`tenuto up`, `down`, `status` and `node-agent`: a cluster on this host."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from fabric.errors import ConfigError, FabricError
from fabric.messages import GpuReport, SliceReport
from roles.cluster import role_id_of_node
from roles.command_parts import EXIT_PARTIAL, echo_json
from roles.config import load_config
from roles.console import plain_console
from roles.environment import RunDir, run_dir
from roles.node_agent.shell import run_node_agent
from roles.process import (
    StopSignal,
    die_with_parent,
    log,
    set_up_descriptors,
    set_up_logging,
    speak_to_nobody,
)
from roles.supervisor.control import ClusterReport, look, processes_in, start_detached, stop_running
from roles.supervisor.core import EXIT_CONFIG, Outcome
from roles.supervisor.home import CONFIG_FILE, LOG_FILE, UpFile, claim, write_up_file
from roles.supervisor.shell import Started, is_better_together, problems_of, role_plans, supervise

DEFAULT_CONFIG = """\
# One emulated GPU with one emulated model, of the size of a ResNet50 on a GTX 1080 Ti (Symphony, table 2).
models:
 - name: resnet50
   slo_ms: 100
   profile: {alpha_ms: 1.053, beta_ms: 5.072, max_batch: 64}
cluster: {gpus: 1}
"""

LATELY_SHOWN = 5
LOOP_COLUMNS = (
    "timer_late_p50_ms",
    "timer_late_p99_ms",
    "timer_late_ms_max",
    "turn_ms_max",
    "collect_ms_max",
)

_RUN_DIR = click.option(
    "--run-dir",
    "run_dir_option",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where run files and local sockets live (default: $TENUTO_RUN_DIR, then $XDG_RUNTIME_DIR/tenuto).",
)
_JSON = click.option("--json", "is_json", is_flag=True, help="Print JSON on stdout, and nothing else there.")


@click.command()
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
@_RUN_DIR
@_JSON
@click.option("--detach", is_flag=True, help="Run in the background; return when everything is ready.")
@click.option(
    "--together/--apart",
    default=None,
    help="One process for the scheduler and the first frontend, or one for each"
    " (default: together on a host with fewer than four cores, with one frontend).",
)
@click.option("--remove-run-dir", is_flag=True, hidden=True)  # from --detach, which had to make it first
def up(
    file: Path | None,
    run_dir_option: Path | None,
    is_json: bool,  # noqa: FBT001  click's flags
    detach: bool,  # noqa: FBT001  click's flags
    together: bool | None,  # noqa: FBT001  click's flags
    remove_run_dir: bool,  # noqa: FBT001  click's flags
) -> None:
    """Run a whole cluster on this host, as FILE says; without FILE, one emulated GPU with one model.

    Exit 6 when a model of FILE could not be loaded and the others are served, 1 when nothing is.
    """
    die_with_parent()
    home = _home(run_dir_option)
    if file is not None:
        load_config(file)
    if detach:
        arguments = [
            *([str(file)] if file else []),
            *(["--run-dir", str(home.path)] if run_dir_option else []),
            *([] if together is None else ["--together" if together else "--apart"]),
        ]
        up_file = start_detached(arguments, home.path, is_removed=home.is_temporary)
        _show_start(up_file, (), home.path, is_json=is_json)
        sys.exit(EXIT_PARTIAL if up_file.problems else 0)
    # From here on a signal is a wish to end in order, so it is listened to before the first file is written.
    with StopSignal() as stop:
        set_up_descriptors()
        set_up_logging("up")
        with claim(home.path, is_removed=remove_run_dir or home.is_temporary):
            outcome, problems = _run(file, home.path, stop, together=together, is_json=is_json)
            if outcome.exit_code == 0:
                (home.path / LOG_FILE).unlink(missing_ok=True)
    if outcome.exit_code:
        raise (ConfigError if outcome.exit_code == EXIT_CONFIG else FabricError)(outcome.reason)
    if problems:
        sys.exit(EXIT_PARTIAL)


@click.command()
@_RUN_DIR
def down(run_dir_option: Path | None) -> None:
    """End the cluster that `tenuto up` runs on this host."""
    home = _home(run_dir_option)
    try:
        stop_running(home.path)
    finally:
        home.remove()


@click.command()
@_RUN_DIR
@_JSON
def status(run_dir_option: Path | None, is_json: bool) -> None:  # noqa: FBT001  click's flags
    """Show the cluster of this host: where it is, what runs, and how its slices are."""
    home = _home(run_dir_option)
    try:
        report = look(home.path)
    finally:
        home.remove()
    if is_json:
        listed = report.scheduler
        plain = {
            "endpoints": report.endpoints,
            "processes": report.processes,
            "slices": listed.slices,
            "models": listed.models,
            "gpus": listed.gpus,
            "plan": listed.plan,
            "counters": listed.counters,
            "roles": report.counters,
        }
        echo_json(_plain(plain))
    else:
        _print_status(report)


@click.command("node-agent")
@click.option("--config", type=click.Path(dir_okay=False, path_type=Path), required=True)
@click.option("--node", required=True, help="The host's name in cluster.nodes.")
@_RUN_DIR
def node_agent(config: Path, node: str, run_dir_option: Path | None) -> None:
    """Run the agent of one node: it starts, watches and ends the workers of this host."""
    die_with_parent()
    with StopSignal() as stop:
        set_up_descriptors()
        set_up_logging(role_id_of_node(node))
        home = _home(run_dir_option)
        run_node_agent(load_config(config), node, home.path, stop)
        home.remove()


def _home(option: Path | None) -> RunDir:
    return run_dir() if option is None else RunDir(option.absolute())


def _run(
    file: Path | None, path: Path, stop: StopSignal, *, together: bool | None, is_json: bool
) -> tuple[Outcome, Sequence[str]]:
    """How it ended, and what could not be served at its start."""
    try:
        if file is None:
            file = path / CONFIG_FILE
            file.write_text(DEFAULT_CONFIG, encoding="utf-8")
        write_up_file(path, UpFile(os.getpid(), is_ready=False, endpoints={}))
    except OSError as error:
        raise FabricError(f"cannot write in the run directory {path}: {error.strerror}") from error

    problems: list[str] = []

    def on_started(started: Started) -> None:
        problems.extend(problems_of(started.slices))
        up_file = UpFile(os.getpid(), is_ready=True, endpoints=started.endpoints, problems=problems)
        # A full disk, or nobody who reads any more: what serves goes on serving.
        try:
            write_up_file(path, up_file)
        except OSError as error:
            log.error("start_not_written_down path=%s reason=%r", path, error.strerror)
        try:
            _show_start(up_file, started.slices, path, is_json=is_json)
        except OSError as error:
            log.warning("start_not_shown reason=%r", error.strerror)
            speak_to_nobody()

    config = load_config(file)
    is_together = is_better_together(config) if together is None else together
    plans = role_plans(config, file, path, is_together=is_together)
    return supervise(plans, path, stop, on_started), problems


def _show_start(up_file: UpFile, slices: Sequence[SliceReport], path: Path, *, is_json: bool) -> None:
    for problem in up_file.problems:
        click.echo(f"tenuto: {problem}", err=True)
    if is_json:
        plain = {
            "endpoints": up_file.endpoints,
            "run_dir": str(path),
            "pid": up_file.pid,
            "processes": processes_in(path),
            "slices": slices,
            "problems": up_file.problems,
        }
        echo_json(_plain(plain))
        return
    clients = " ".join(up_file.endpoints.get("client", ()))
    click.echo(f"tenuto is up (process {up_file.pid}); clients connect to {clients}", err=True)


def _plain(value: Any) -> Any:
    """Structs and dataclasses with their field names, for JSON."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if names := getattr(value, "__struct_fields__", ()):
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


def _print_status(report: ClusterReport) -> None:
    console = plain_console()
    processes = Table("process", "pid", "state", "addresses", title="Processes", title_justify="left")
    for process in report.processes:
        addresses = "\n".join(a for several in process.addresses.values() for a in several)
        processes.add_row(process.role_id, str(process.pid), "alive" if process.alive else "dead", addresses)
    slices = Table("slice", "state", "models", "batches", "requests", title="Slices", title_justify="left")
    for item in report.scheduler.slices:
        state = f"{item.state}: {item.reason}" if item.reason else item.state
        slices.add_row(item.slice_id, state, ", ".join(item.models), str(item.batches), str(item.requests))
    models = Table("model", "SLO ms", "replicas", title="Models", title_justify="left")
    for model in report.scheduler.models:
        models.add_row(model.model_id, f"{model.slo_ms:g}", str(model.replicas))
    for table in (processes, slices, models, _loop_table(report), *gpu_tables(report.scheduler.gpus)):
        console.print(table)
    plan = report.scheduler.plan
    if plan is not None:
        why = f" ({plan.reason})" if plan.reason else ""
        advised = f"the load asks for {plan.gpus_advised} of {plan.gpus} GPUs"
        console.print(f"Plan: {plan.state}{why}; {advised}")
        for line in plan.lately[-LATELY_SHOWN:]:
            console.print(f"  {line}")


def _loop_table(report: ClusterReport) -> Table:
    """How late each role's timers were, its longest turn and its longest pause for collecting garbage."""
    columns = ("late p50", "late p99", "late max", "longest turn", "longest pause")
    table = Table("process", *columns, title="Loops (ms, since their start)", title_justify="left")
    for role_id, counters in report.counters.items():
        if LOOP_COLUMNS[0] in counters:
            table.add_row(role_id, *(f"{counters[name]:.3f}" for name in LOOP_COLUMNS))
    return table


def gpu_tables(gpus: Sequence[GpuReport]) -> list[Table]:
    """Real GPUs, with how they are shared and what their sensors said; nothing where there is none."""
    real = [gpu for gpu in gpus if gpu.info.device == "cuda"]
    if not real:
        return []
    columns = ("gpu", "type", "shared by", "busy", "memory GB", "W", "SM MHz", "°C", "throttled by", "age s")
    table = Table(*columns, title="GPUs", title_justify="left")
    for gpu in real:
        sharing, sample, info = gpu.sharing, gpu.sample, gpu.info
        shared = "?" if sharing is None else sharing.mode
        if sharing is not None and sharing.reason:
            shared = f"{shared}: {sharing.reason}"
        measured = ["?"] * 6
        if sample is not None:
            used = None if sample.memory_used_bytes is None else sample.memory_used_bytes / 1e9
            measured = [
                _figure(sample.busy_percent, " %"),
                f"{_figure(used)} of {info.memory_bytes / 1e9:.0f}",
                _figure(sample.power_w),
                _figure(sample.sm_mhz),
                _figure(sample.temperature_c),
                ", ".join(sample.throttle),
            ]
        age_s = None if gpu.sampled_ago_ms is None else gpu.sampled_ago_ms / 1e3
        table.add_row(
            f"{gpu.node_id}/gpu{info.gpu}", info.name or info.gpu_type, shared, *measured, _figure(age_s)
        )
    return [table]


def _figure(value: float | None, unit: str = "") -> str:
    return "?" if value is None else f"{value:.0f}{unit}"
