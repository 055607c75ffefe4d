"""`tenuto plan`: what would run where, why, and at which cost; nothing is started."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from msgspec.structs import replace
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fabric.ids import ModelId
from fabric.messages import LoaderSpec
from policies.placement.common.base import Decision, Placement
from profiles.gpu import MIB
from roles.cli.console import plain_console
from roles.cli.json_output import echo_json
from roles.cli.options import file_argument, json_option, painters, plot_option, writing
from roles.cli.overrides import override_options
from roles.config.choices import placement_choices
from roles.config.cluster import ClusterConfig
from roles.config.read_config import Overrides, load_config
from roles.lab.plan import asked_rps, cost_per_hour, missed_rates, missed_slos, plan_json
from roles.runtime.exit_codes import EXIT_SLO_MISSED


@click.command()
@file_argument
@click.option(
    "--placement",
    "policy",
    metavar="POLICY",
    help="Instead of the file's: a name, or '{name: {option: value}}'.",
)
@click.option(
    "--why",
    is_flag=True,
    help="Also what was decided, what would have been next best, and what that lacked; with --json the numbers too.",
)
@click.option(
    "--heads",
    "with_heads",
    is_flag=True,
    help="Also which models could be heads of one: loads them all on this host's CPU, one by one, and compares their leading layers.",
)
@plot_option
@override_options
@click.option(
    "--check",
    is_flag=True,
    help="Exit 4 if a model, or a part of its rate, is unplaced, its expected latency is over its SLO, or the policy expects 1 % or more of the rates to be lost.",
)
@json_option
def plan(
    *,
    file: Path,
    policy: str | None,
    why: bool,
    with_heads: bool,
    plot_path: Path | None,
    overrides: Overrides,
    check: bool,
    as_json: bool,
) -> None:
    """Place the models of FILE on its cluster and show the plan.

    A model with heads is placed as one, and takes its memory once.
    """
    plots = None if plot_path is None else painters()
    config = load_config(file, overrides)
    if policy is not None:
        choices = placement_choices(policy, config, "--placement")
        if len(choices) > 1:
            raise click.UsageError("--placement takes one policy; `tenuto compare` takes several")
        config = replace(config, placement=choices[0].policy)
    name = config.placement.name
    placement = config.place()
    if plot_path is not None and plots is not None:
        models = [model.model_id for model in config.models]
        with writing(plot_path):
            plots.plot_placement(plot_path, placement, config.gpus, name, models)
    possible = _possible_heads(config) if with_heads else None
    if as_json:
        answer = plan_json(config, name, placement, with_why=why)
        echo_json(answer if possible is None else {**answer, "heads": possible})
    else:
        _print_plan(config, placement)
        if why:
            _print_why(placement)
        if possible is not None:
            _print_heads(possible)
    late, short = missed_slos(config, placement), missed_rates(config, placement)
    for line in late:
        click.echo(f"over its SLO: {line}", err=True)
    for line in short:
        click.echo(f"too few GPUs: {line}", err=True)
    if check and (placement.unplaced or late or short):
        sys.exit(EXIT_SLO_MISSED)


def _print_plan(config: ClusterConfig, placement: Placement) -> None:
    gpus = {gpu.index: gpu for gpu in config.gpus}
    table = Table(title=f"placement {config.placement.name}", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("GPU", no_wrap=True)
    table.add_column("share %", justify="right", no_wrap=True)
    table.add_column("model", overflow="fold")
    for column in ("batch", "r/s", "duty ms", "expected ms"):
        table.add_column(column, justify="right", no_wrap=True)
    last = None
    for planned in sorted(placement.slices, key=lambda one: one.gpu):
        gpu = gpus[planned.gpu]
        host = f"{'>'.join(map(str, planned.gpus))} {gpu.gpu_type}" if gpu.index != last else ""
        share = "-" if planned.share_percent is None else f"{planned.share_percent:g}"
        for model in planned.models:
            numbers = (model.rate_rps, model.duty_ms, model.predicted_ms)
            table.add_row(
                host,
                share,
                model.model_id,
                "-" if model.batch is None else str(model.batch),
                *("-" if value is None else f"{value:.2f}" for value in numbers),
            )
            host = share = ""
        last = gpu.index
    console = plain_console()
    console.print(table)
    open_ones = _left_open(config, placement)
    if open_ones:
        console.print(open_ones)
    console.print(f"GPUs used: {len(placement.gpus_used)} of {len(gpus)}{_totals(config, placement)}")
    for joint in (one for one in config.models if one.heads):
        console.print(
            f"{joint.name}: one model with {len(joint.heads)} heads ({', '.join(joint.head_names)}), memory counted once"
        )
    for one in placement.unplaced:
        rate = "" if one.rate_rps is None else f" ({one.rate_rps:.2f} r/s)"
        console.print(f"unplaced: {one.model_id}{rate}: {one.reason}")
    for violation in placement.violations:
        console.print(f"violation: {violation}")


def _possible_heads(config: ClusterConfig) -> dict[str, Any]:
    """Which models could be heads of one, and why others were not looked at."""
    try:
        grouping = importlib.import_module("roles.gpu_worker.executors.merging.grouping")
    except ImportError as error:
        raise click.ClickException(
            f"--heads needs the extra 'worker': pip install 'tenuto[worker]' ({error})"
        ) from error
    asked = {stage.model_id for application in config.applications for stage in application.plan.graph.stages}
    left_out: dict[ModelId, str] = {}
    models: list[tuple[ModelId, LoaderSpec]] = []
    for model in config.models:
        loader = model.loader
        if loader is None:
            left_out[model.model_id] = "it has heads already" if model.heads else "it has no loader"
        elif loader.stages or loader.ranks:
            left_out[model.model_id] = "it is cut, or runs in ranks"
        elif model.model_id in asked:
            left_out[model.model_id] = "stages of applications ask it"
        else:
            models.append((model.model_id, loader))
    sys.path.append(str(Path.cwd()))  # users' models, as for a worker
    groups, failed = grouping.possible_heads(models)
    return {"groups": [group.document() for group in groups], "left_out": {**left_out, **failed}}


def _print_heads(possible: dict[str, Any]) -> None:
    console = plain_console()
    for group in possible["groups"]:
        apart_mib, together_mib = group["apart_bytes"] / MIB, group["together_bytes"] / MIB
        console.print(
            f"{', '.join(group['models'])} could be heads of one model: {group['equal_leading_layers']} leading layers are "
            f"equal; their weights would take {together_mib:.3g} MiB instead of {apart_mib:.3g}"
        )
    if not possible["groups"]:
        console.print("no models could be heads of one: no two have equal leading layers")
    for model, reason in possible["left_out"].items():
        console.print(f"{model} cannot be a head: {reason}")


def _left_open(config: ClusterConfig, placement: Placement) -> str:
    """Why a figure of the table is a dash; empty where none is."""
    planned = [model for one in placement.slices for model in one.models]
    figures: Mapping[str, Sequence[float | None]] = {
        "batch": [model.batch for model in planned],
        "r/s": [model.rate_rps for model in planned],
        "duty ms": [model.duty_ms for model in planned],
        "expected ms": [model.predicted_ms for model in planned],
    }
    missing = [name for name, values in figures.items() if None in values]
    if not missing:
        return ""
    reasons = [f"{config.placement.name} plans no {', '.join(missing)}"]
    if "batch" in missing:
        reasons.append(f"{config.batching.name} batching forms batches as requests come")
    rateless = [model.name for model in config.models if model.rate_rps is None]
    if rateless:
        who = "no model has" if len(rateless) == len(config.models) else f"{', '.join(rateless)} without"
        reasons.append(f"{who} a rate_rps to plan for")
    return f"-: {'; '.join(reasons)}"


def _totals(config: ClusterConfig, placement: Placement) -> str:
    text = ""
    if placement.expected_goodput_rps is not None:
        text += f", expected goodput {placement.expected_goodput_rps:.1f} of {asked_rps(config):.1f} r/s"
    cost = cost_per_hour(config, placement)
    return text if cost is None else f"{text}, {cost:.2f} per hour"


def _print_why(placement: Placement) -> None:
    console = plain_console()
    if not placement.decisions:
        nothing = "this placement policy records no reasons" if placement.slices else "nothing is placed"
        console.print(f"why: {nothing}")
    for decision in placement.decisions:
        console.print(Text.assemble((f"{decision.subject}: ", "bold"), story_of(decision)))
    if any(decision.metrics or decision.rejected for decision in placement.decisions):
        console.print("The numbers behind it: --why --json", style="dim")


def story_of(decision: Decision) -> str:
    """What was chosen, what would have been next, and what that lacked; the others are only counted."""
    told = f"{decision.chosen}."
    if decision.rejected:
        nearest, *others = decision.rejected
        told += f" Next best was {nearest.option}, but {nearest.reason}."
        if others:
            told += f" {len(others)} more {'was' if len(others) == 1 else 'were'} worse."
    return told
