"""`tenuto status`: the cluster of this host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from rich.table import Table

from fabric.messages import GpuReport, StatusListed
from roles.cli.console import plain_console
from roles.cli.options import (
    as_plain,
    chosen_run_dir,
    echo_json,
    json_option,
    key_option,
    keyring_of,
    run_dir_flag,
    scheduler_option,
    via_option,
)
from roles.runtime.running_cluster import ClusterReport, look, look_from_afar

LATELY_SHOWN = 5
MODELS_SHOWN = 4
LOOP_COLUMNS = (
    "timer_late_p50_ms",
    "timer_late_p99_ms",
    "timer_late_ms_max",
    "turn_ms_max",
    "collect_ms_max",
)


@click.command()
@click.option("--loops", "has_loops", is_flag=True, help="Also how late each process's timers were.")
@run_dir_flag
@via_option
@scheduler_option
@key_option
@json_option
def status(
    *,
    has_loops: bool,
    run_dir_option: Path | None,
    scheduler_address: str | None,
    key_file: Path | None,
    as_json: bool,
) -> None:
    """Show the cluster of this host, or what a scheduler elsewhere knows: what runs, and how its slices are."""
    if scheduler_address is not None:
        report = look_from_afar(scheduler_address.split(","), keyring_of(key_file))
    else:
        home = chosen_run_dir(run_dir_option)
        try:
            report = look(home.path, keyring_of(key_file))
        finally:
            home.remove()
    if as_json:
        listed = report.scheduler
        plain = {
            "endpoints": report.endpoints,
            "processes": report.processes,
            "slices": listed.slices,
            "models": listed.models,
            "gpus": listed.gpus,
            "plan": listed.plan,
            "scheduling": listed.standing,
            "shards": report.shards,
            "warnings": listed.warnings,
            "counters": listed.counters,
            "roles": report.counters,
        }
        echo_json(as_plain(plain))
    else:
        _print_status(report, has_loops=has_loops)


def _print_status(report: ClusterReport, *, has_loops: bool) -> None:
    console = plain_console()
    processes = Table("process", "pid", "state", "addresses", title="Processes", title_justify="left")
    for process in report.processes:
        addresses = "\n".join(a for several in process.addresses.values() for a in several)
        processes.add_row(process.role_id, str(process.pid), "alive" if process.alive else "dead", addresses)
    slices = Table("slice", "state", "models", "batches", "requests", title="Slices", title_justify="left")
    for item in report.scheduler.slices:
        state = f"{item.state}: {item.reason}" if item.reason else item.state
        slices.add_row(item.slice_id, state, ", ".join(item.models), str(item.batches), str(item.requests))
    console.print(processes)
    console.print(slices)
    print_models(report.scheduler)
    for table in ([_loop_table(report)] if has_loops else []) + gpu_tables(report.scheduler.gpus):
        console.print(table)
    standing = report.scheduler.standing
    if len(report.shards) > 1:
        console.print(_shard_table(report))
    elif standing is not None:
        console.print(
            f"Scheduling: {report.scheduler.role_id} is active, epoch {standing.epoch},"
            f" granted by {standing.agents_granted} of {standing.agents} agents"
        )
        for standby in standing.standbys:
            plan_state = "has the plan" if standby.has_plan else "has no plan yet"
            console.print(f"  {standby.scheduler_id} stands by, and {plan_state}")
    for role_id, refused in keys_refused(report).items():
        console.print(f"Refused for their key by {role_id}: {refused:.0f} connections and messages")
    plan = report.scheduler.plan
    if plan is not None:
        why = f" ({plan.reason})" if plan.reason else ""
        advised = f"the load asks for {plan.gpus_advised} of {plan.gpus} GPUs"
        console.print(f"Plan: {plan.state}{why}; {advised}")
        for line in plan.lately[-LATELY_SHOWN:]:
            console.print(f"  {line}")


def print_models(listed: StatusListed) -> None:
    """A row a model, and what should be known of it."""
    console = plain_console()
    table = Table("model", "SLO ms", "replicas", title="Models", title_justify="left")
    for model in listed.models:
        table.add_row(model.model_id, f"{model.slo_ms:g}", str(model.replicas))
    console.print(table)
    for warning in listed.warnings:
        console.print(f"{warning.model_id}: {warning.reason}")


def _shard_table(report: ClusterReport) -> Table:
    """Who schedules each shard, and what is in it."""
    columns = ("shard", "scheduler", "epoch", "stand by", "models", "slices", "GPUs")
    table = Table(*columns, title="Shards", title_justify="left")
    for one in report.shards:
        if not one.scheduler:
            table.add_row(str(one.shard), "none answers", *("?" * 5))
            continue
        models = f"{len(one.models)}: {', '.join(one.models[:MODELS_SHOWN])}" + (
            ", …" if len(one.models) > MODELS_SHOWN else ""
        )
        standbys = ", ".join(one.standbys) or "-"
        numbers = (str(one.slices), str(one.gpus))
        table.add_row(str(one.shard), one.scheduler, str(one.epoch), standbys, models, *numbers)
    return table


def _loop_table(report: ClusterReport) -> Table:
    """How late each role's timers were, its longest turn and its longest pause for collecting garbage."""
    columns = ("late p50", "late p99", "late max", "longest turn", "longest pause")
    table = Table("process", *columns, title="Loops (ms, since their start)", title_justify="left")
    for role_id, counters in report.counters.items():
        if LOOP_COLUMNS[0] in counters:
            table.add_row(role_id, *(f"{counters[name]:.3f}" for name in LOOP_COLUMNS))
    return table


def keys_refused(report: ClusterReport) -> dict[str, float]:
    """By role: connections and messages that a key did not cover, on all its links; roles that refused none are left out."""
    counted = {
        role_id: sum(value for name, value in counters.items() if name.endswith("keys_refused"))
        for role_id, counters in report.counters.items()
    }
    return {role_id: refused for role_id, refused in counted.items() if refused}


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
