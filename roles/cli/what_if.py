"""`tenuto what-if`: the last minute with another SLO, rate or number of GPUs, beside the minute as it was."""

from __future__ import annotations

from pathlib import Path

import click
from rich.table import Table

from fabric.errors import FabricError
from fabric.ids import ModelId
from roles.cli.console import plain_console
from roles.cli.json_output import echo_json
from roles.cli.options import (
    IntRange,
    chosen_run_dir,
    json_option,
    key_option,
    keyring_of,
    remark,
    run_dir_flag,
    via_option,
)
from roles.cli.records import Remembered, models_beside, remembered, require_model
from roles.cli.why import situation_of
from roles.observability.last_minute import MINUTE_MS
from roles.observability.what_if import Change, WhatIf
from roles.observability.what_if import what_if as asked
from roles.runtime.process import die_with_parent
from roles.runtime.running_cluster import look

GPUS_MORE_MAX = 1_024
FACTOR_MAX = 1_000.0
SLO_MS_MAX = 1e9


class _OfModel(click.ParamType[tuple[ModelId, float]]):
    """MODEL=NUMBER. The last `=` counts: names may have some."""

    name = "model=number"

    def __init__(self, most: float) -> None:
        self._most = most

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[ModelId, float]:
        """Both, or a usage error."""
        model, mark, text = str(value).rpartition("=")
        try:
            number = float(text)
        except ValueError:
            number = 0.0
        if not mark or not 0 < number <= self._most:
            self.fail(f"{value!r}: it must be MODEL=NUMBER, over 0 and up to {self._most:g}", param, ctx)
        return ModelId(model), number


@click.command("what-if")
@click.option(
    "--slo", "slos", type=_OfModel(SLO_MS_MAX), multiple=True, metavar="MODEL=MS", help="Another SLO, in ms."
)
@click.option(
    "--rate",
    "rates",
    type=_OfModel(FACTOR_MAX),
    multiple=True,
    metavar="MODEL=FACTOR",
    help="So many times as many requests, when its own came: 1.5.",
)
@click.option(
    "--gpus", type=IntRange(0, GPUS_MORE_MAX), default=0, help="So many more; models are placed anew."
)
@run_dir_flag
@via_option
@key_option
@json_option
def what_if(
    *,
    slos: tuple[tuple[ModelId, float], ...],
    rates: tuple[tuple[ModelId, float], ...],
    gpus: int,
    run_dir_option: Path | None,
    key_file: Path | None,
    as_json: bool,
) -> None:
    """Play the running cluster's last minute in the simulator: as it was, and with a change. Nothing of the cluster is changed."""
    die_with_parent()
    change = Change(dict(slos), dict(rates), gpus)
    if not change.text:
        raise click.UsageError("give --slo, --rate or --gpus")
    home = chosen_run_dir(run_dir_option)
    try:
        found = _minute(home.path, change, key_file)
    finally:
        home.remove()
    remark(found.remarks)
    situation = situation_of(found)
    answer = asked(situation.like_live(), change, situation.bad_rates)
    if as_json:
        echo_json(answer.as_plain())
    else:
        _print(answer)


def _minute(run_dir: Path, change: Change, key_file: Path | None) -> Remembered:
    keyring = keyring_of(key_file)
    report = look(run_dir, keyring)
    models = tuple(one.model_id for one in report.scheduler.models)
    changed = dict.fromkeys((*change.slos_ms, *change.rates))
    for model_id in changed:
        require_model(report, model_id, "tenuto what-if --rate {}=1.5", keyring)
    beside = {model_id: models_beside(model_id, report) for model_id in changed or models[:1]}
    if len(set(beside.values())) > 1:
        raise FabricError(
            f"{' and '.join(changed)} are of several shards, which plan for themselves: ask of one at a time"
        )
    models = next(iter(beside.values()), ())
    if not changed and len(models) < len(report.scheduler.models):
        raise FabricError(
            "GPUs are of one shard: say of which by the name of a model, such as --rate MODEL=1"
        )
    return remembered(run_dir, models, report=report, last_ms=MINUTE_MS, keyring=keyring)


def _print(answer: WhatIf) -> None:
    if answer.doubt:
        click.echo(answer.doubt)
    click.echo(answer.sentence)
    columns = ("model", "", "r/s", "good r/s", "bad %", "p50 ms", "p99 ms")
    table = Table(*columns)
    for model_id, both in answer.as_plain()["models"].items():
        for when, one in both.items():
            figures = (
                one["rate_rps"],
                one["goodput_rps"],
                100 * one["bad_rate"],
                one["p50_ms"],
                one["p99_ms"],
            )
            shown = ("-" if figure is None else f"{figure:.1f}" for figure in figures)
            table.add_row(model_id if when == "today" else "", when, *shown)
    plain_console().print(table)
    click.echo(f"{answer.today.offered} requests of the last {answer.span_ms / 1e3:.0f} s, played twice.")
