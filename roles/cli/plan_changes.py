"""Changes of what a cluster serves: which shard's scheduler to ask for them, and what became of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import click
from msgspec.structs import replace

from fabric.errors import ConfigError, FabricError, PeerLost
from fabric.keys import Keyring
from fabric.messages import Changed, PlanChange
from fabric.policy_options import brief, counted
from roles.cli.cluster_tables import unplaced_line
from roles.cli.json_output import echo_json
from roles.cli.options import (
    chosen_run_dir,
    json_option,
    key_option,
    keyring_of,
    run_dir_flag,
    scheduler_option,
    via_option,
)
from roles.cli.restart import raise_refusal
from roles.runtime.exit_codes import EXIT_PARTIAL
from roles.runtime.operator_request import ask_change, new_request_no
from roles.runtime.running_cluster import (
    ActiveScheduler,
    ProcessReport,
    active_at,
    active_schedulers,
    processes_in,
    shards_of,
)
from roles.runtime.shard_reports import combined, did_its_part

Change = Callable[[int], PlanChange]
"""What to ask one shard for, as of a request's number."""


@dataclass(slots=True, frozen=True)
class Cluster:
    """Which one is meant: that of a run directory, or the one whose scheduler is at an address."""

    run_dir: Path | None
    address: str | None
    key_file: Path | None


def of_cluster(command: Callable[..., None]) -> Callable[..., None]:
    """The options that say which cluster, as the command's `cluster`."""

    @run_dir_flag
    @via_option
    @scheduler_option
    @key_option
    @json_option
    @wraps(command)
    def commanding(
        *,
        run_dir_option: Path | None,
        scheduler_address: str | None,
        key_file: Path | None,
        **rest: Any,
    ) -> None:
        command(cluster=Cluster(run_dir_option, scheduler_address, key_file), **rest)

    return commanding


dry_run_option = click.option(
    "--dry-run", "is_dry", is_flag=True, help="Only say what would be done: it is planned, and not done."
)


@contextmanager
def schedulers_of(cluster: Cluster) -> Iterator[tuple[Mapping[int, ActiveScheduler], Keyring | None]]:
    """The active scheduler of each shard, and the key for them. Those at given addresses stand for their own shards alone."""
    keyring = keyring_of(cluster.key_file)
    home = chosen_run_dir(cluster.run_dir)
    try:
        if cluster.address:
            yield active_at(cluster.address.split(","), keyring), keyring
        else:
            yield active_schedulers(home.path, keyring), keyring
    finally:
        home.remove()


def processes_of(cluster: Cluster) -> list[ProcessReport]:
    """The roles of its run directory."""
    home = chosen_run_dir(cluster.run_dir)
    try:
        return processes_in(home.path)
    finally:
        home.remove()


def known_shard(shard: int, schedulers: Mapping[int, ActiveScheduler]) -> int:
    """The shard, if a scheduler of it answers. Raises ConfigError where the cluster has none of that number, else PeerLost."""
    if shard in schedulers:
        return shard
    count = max(shards_of(active.status) for active in schedulers.values())
    if count == 1:
        raise ConfigError(f"there is no shard {brief(shard)}: the cluster has one, 0")
    if shard not in range(count):
        raise ConfigError(f"there is no shard {brief(shard)}: the cluster has {count}, 0 to {count - 1}")
    answering = ", ".join(map(str, schedulers))
    raise PeerLost(f"shard {shard}: no active scheduler of it answers; those of {answering} do")


def carry_out(
    asked: Callable[[Mapping[int, ActiveScheduler]], Mapping[int, Change]],
    cluster: Cluster,
    *,
    what: str,
    as_json: bool,
    is_dry: bool = False,
) -> None:
    """Ask each shard for its part of a change, one after the other, and say what became of all, or would.

    `what`: the change as its result is told, such as `vgg16 removed`.
    """
    answers: list[tuple[int, Changed]] = []
    with schedulers_of(cluster) as (schedulers, keyring):
        parts = {known_shard(own, schedulers): change for own, change in asked(schedulers).items()}
        for own, change in parts.items():
            request = replace(change(new_request_no()), dry_run=is_dry)
            try:
                answers.append((own, ask_change(schedulers[own].addresses, request, keyring=keyring)))
            except FabricError:
                if not is_dry and (done := did_its_part(answers)):
                    click.echo(f"{done}; it is not known whether shard {own} did", err=True)
                raise
    show(combined(answers), what=what, as_json=as_json, is_dry=is_dry)


def show(answer: Changed, *, what: str, as_json: bool, is_dry: bool = False) -> None:
    """Print it. Raises, or ends the command, unless all went well."""
    if as_json:
        echo_json({**plain_answer(answer), **({"dry_run": True} if is_dry else {})})
    elif answer.status in ("ok", "partial"):
        click.echo(
            f"{'nothing was done; this would be: ' if is_dry else ''}{what}; "
            f"{'not every model has a place; ' if answer.status == 'partial' else ''}"
            f"{counted(answer.started, 'slice')} started, {answer.ended} ended,"
            f" {answer.changed} serve on with other models, {answer.kept} not touched",
            err=True,
        )
        for one in answer.unplaced:
            click.echo(unplaced_line(one), err=True)
    if answer.status == "failed":
        raise FabricError(f"rolled back: {answer.reason}")
    raise_refusal(answer)
    if answer.status == "partial":
        sys.exit(EXIT_PARTIAL)


def plain_answer(answer: Changed) -> dict[str, Any]:
    """As `--json` prints it."""
    plain: dict[str, Any] = {
        name: getattr(answer, name)
        for name in answer.__struct_fields__
        if name not in ("request_no", "document")
    }
    plain["unplaced"] = [
        {"model": one.model_id, "rate_rps": one.rate_rps, "reason": one.reason} for one in answer.unplaced
    ]
    return plain
