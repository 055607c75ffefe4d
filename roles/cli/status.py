"""`tenuto status`: the cluster of this host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import click

from fabric.messages import StatusListed
from roles.cli.cluster_tables import (
    advice_line,
    application_table,
    drained_line,
    gpu_tables,
    loop_table,
    model_table,
    process_table,
    shard_table,
    slice_table,
    unplaced_line,
)
from roles.cli.console import plain_console, print_with_whole_names
from roles.cli.json_output import as_plain, echo_json
from roles.cli.options import (
    chosen_run_dir,
    json_option,
    key_option,
    keyring_of,
    remark,
    run_dir_flag,
    scheduler_option,
    via_option,
)
from roles.observability.units import late_host, shown_ms
from roles.runtime.live_figures import LiveFigures, live_figures
from roles.runtime.running_cluster import ClusterReport, look, look_from_afar

LATELY_SHOWN = 5


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
    live: LiveFigures | None = None
    if scheduler_address is not None:
        report = look_from_afar(scheduler_address.split(","), keyring_of(key_file))
    else:
        home = chosen_run_dir(run_dir_option)
        try:
            report = look(home.path, keyring_of(key_file))
            live = live_figures(report.processes, keyring_of(key_file))
        finally:
            home.remove()
    if as_json:
        listed = report.scheduler
        plain = {
            "endpoints": report.endpoints,
            "processes": report.processes,
            "drained_roles": report.drained_roles,
            "workers": report.workers,
            "slices": listed.slices,
            "models": listed.models,
            "live": {} if live is None else live.models,
            "applications": [] if live is None else live.applications,
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
        _print_status(report, live, has_loops=has_loops)


def _print_status(report: ClusterReport, live: LiveFigures | None, *, has_loops: bool) -> None:
    console = plain_console()
    if report.processes:
        console.print(process_table(report))
    console.print(slice_table(report.scheduler.slices))
    print_models(report.scheduler, live)
    for table in ([loop_table(report)] if has_loops else []) + gpu_tables(report.scheduler.gpus):
        console.print(table)
    if drained := drained_line(report.scheduler, report.drained_roles):
        console.print(drained)
    standing = report.scheduler.standing
    if len(report.shards) > 1:
        console.print(shard_table(report))
    elif standing is not None:
        console.print(
            f"Scheduling: {report.scheduler.role_id} is active, epoch {standing.epoch},"
            f" granted by {standing.agents_granted} of {standing.agents} agents"
        )
        for standby in standing.standbys:
            plan_state = "has the plan" if standby.has_plan else "has no plan yet"
            lacks = "" if standby.is_electable else ", but not enough agents are connected to it"
            console.print(f"  {standby.scheduler_id} stands by, and {plan_state}{lacks}")
    for role_id, refused in keys_refused(report).items():
        console.print(f"Refused for their key by {role_id}: {refused:.0f} connections and messages")
    for role_id, looks in keys_not_taken_over(report).items():
        console.print(
            f"Keys not taken over by {role_id}, at {looks:.0f} looks since its start, a second apart: whom they revoke gets in until they are; its log says why"
        )
    console.print(local_streams_line(report))
    plan = report.scheduler.plan
    if plan is not None:
        why = f" ({plan.reason})" if plan.reason else ""
        console.print(f"Plan: {plan.state}{why}; {advice_line(plan, late_host_of(report))}")
        for line in plan.lately[-LATELY_SHOWN:]:
            console.print(f"  {line}")


def print_models(listed: StatusListed, live: LiveFigures | None) -> None:
    """A row a model, and what should be known of it. `live`: what its frontends say; None: they were not asked."""
    console = plain_console()
    table = model_table(listed, {} if live is None else live.models)
    if live is not None and live.models:
        table.caption = "of the last 10 s; from a frontend's receipt to its answer"
        table.caption_justify = "left"
    print_with_whole_names(console, table, ("good/s", "late", "p50 ms", "drops"))
    if live is not None and live.applications:
        console.print(application_table(live.applications, live.models))
    for warning in listed.warnings:
        console.print(f"{warning.model_id}: {warning.reason}")
    for one in () if listed.plan is None else listed.plan.unplaced:
        console.print(unplaced_line(one))
    remark(silent_lines(live))


def late_host_of(report: ClusterReport) -> str:
    """The process whose timers are so late that requests of the tightest SLO are lost by it, in words; empty: there is none."""
    slos_ms = [one.slo_ms for one in report.scheduler.models]
    late = late_host(report.late_timers_ms, min(slos_ms)) if slos_ms else None
    return "" if late is None else f"timers of {late[0]} are {shown_ms(late[1])} late (p99)"


def silent_lines(live: LiveFigures | None) -> list[str]:
    """What is missing in the figures."""
    return (
        []
        if live is None
        else [f"{role_id} does not answer: its requests are left out" for role_id in live.silent]
    )


def local_streams_line(report: ClusterReport) -> str:
    """By what the roles of one host speak: docs/wire.md."""
    connected = _over_links(report, "local_streams", sum)
    shown = ", ".join(f"{count:.0f} at {role_id}" for role_id, count in connected.items())
    return f"Local streams: {shown or 'none, all goes by ZeroMQ'}"


def keys_refused(report: ClusterReport) -> dict[str, float]:
    """By role: connections and messages that a key did not cover, on all its links; roles that refused none are left out."""
    return _over_links(report, "keys_refused", sum)


def keys_not_taken_over(report: ClusterReport) -> dict[str, float]:
    """By role: looks at a changed list of keys that was refused or could not be read; roles without are left out.

    All links of a role have one list.
    """
    return _over_links(report, "keys_not_taken_over", max)


def _over_links(
    report: ClusterReport, counter: str, of: Callable[[Sequence[float]], float]
) -> dict[str, float]:
    """By role: what all its links counted by that name, put together; roles with nothing are left out."""
    found = {}
    for role_id, counters in report.counters.items():
        counted = of([0.0, *(value for name, value in counters.items() if name.endswith(counter))])
        if counted:
            found[role_id] = counted
    return found
