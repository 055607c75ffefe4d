"""`tenuto models list|add|remove|set` and `tenuto drain`: another plan for a cluster that serves meanwhile."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import click

from fabric.client import ask_status
from fabric.errors import ConfigError, FabricError
from fabric.ids import ModelId, NodeId
from fabric.keys import Keyring
from fabric.messages import (
    Changed,
    DrainAsked,
    GpuReport,
    ModelsAdd,
    ModelSet,
    ModelsRemove,
    PlanChange,
    RoleChange,
    RoleDrain,
)
from fabric.policy_options import brief, shown
from roles.cli.options import (
    BUDGET_MS,
    RATE_RPS,
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
from roles.cli.restart import ask_supervisor, raise_refusal
from roles.cli.status import print_models
from roles.cli.whole_help import WholeHelpGroup
from roles.config.documents import read_file, read_value
from roles.config.read_config import parse_config
from roles.runtime.core import SCHEDULER
from roles.runtime.exit_codes import EXIT_PARTIAL
from roles.runtime.operator_request import ask_change, new_request_no
from roles.runtime.running_cluster import scheduler_addresses


@dataclass(slots=True, frozen=True)
class _Cluster:
    """Which one is meant: that of a run directory, or the one whose scheduler is at an address."""

    run_dir: Path | None
    address: str | None
    key_file: Path | None


def _of_cluster(command: Callable[..., None]) -> Callable[..., None]:
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
        command(cluster=_Cluster(run_dir_option, scheduler_address, key_file), **rest)

    return commanding


@contextmanager
def _addresses(cluster: _Cluster) -> Iterator[tuple[Sequence[str], Keyring | None]]:
    """Where its scheduler is, and the key for it."""
    keyring = keyring_of(cluster.key_file)
    home = chosen_run_dir(cluster.run_dir)
    try:
        yield [cluster.address] if cluster.address else scheduler_addresses(home.path, keyring), keyring
    finally:
        home.remove()


@click.group(cls=WholeHelpGroup)
def models() -> None:
    """List, add, remove and change models of a running cluster."""


@models.command("list")
@_of_cluster
def list_(*, cluster: _Cluster, as_json: bool) -> None:
    """List the models that are served, with SLO, replicas and what should be known of them."""
    with _addresses(cluster) as (addresses, keyring):
        listed = ask_status(addresses, server=SCHEDULER, keyring=keyring)
    if as_json:
        echo_json(as_plain({"models": listed.models, "warnings": listed.warnings}))
    else:
        print_models(listed)


@models.command()
@click.argument("source", metavar="FILE|YAML")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@_of_cluster
def add(*, source: str, names: tuple[str, ...], cluster: _Cluster, as_json: bool) -> None:
    """Serve the models of FILE too (all of them, or those NAMEd): one section, a list, or a file with `models`.

    Instead of a file, a section as YAML or JSON: '{name: resnet50, slo_ms: 50, profile: {ref: …}}'.
    """
    sections = _sections(source, names)
    _carry_out(lambda number: ModelsAdd(number, json.dumps(sections)), cluster, as_json=as_json)


@models.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@_of_cluster
def remove(*, names: tuple[str, ...], cluster: _Cluster, as_json: bool) -> None:
    """Serve these models no more: their requests are refused at once, their slices end."""
    ids = tuple(ModelId(name) for name in dict.fromkeys(names))
    _carry_out(lambda number: ModelsRemove(number, ids), cluster, as_json=as_json)


@models.command("set")
@click.argument("name")
@click.option("--slo-ms", type=BUDGET_MS, help="Its SLO from now on.")
@click.option("--rate", "rate_rps", type=RATE_RPS, help="Requests per second to plan for at least.")
@_of_cluster
def set_(
    *, name: str, slo_ms: float | None, rate_rps: float | None, cluster: _Cluster, as_json: bool
) -> None:
    """Change a model's SLO or the rate to plan for."""
    if slo_ms is None and rate_rps is None:
        raise click.UsageError("nothing to set: give --slo-ms, --rate or both")
    _carry_out(lambda number: ModelSet(number, ModelId(name), slo_ms, rate_rps), cluster, as_json=as_json)


@click.command()
@click.argument("where", metavar="NODE|NODE/gpuN|ROLE")
@click.option("--back", "is_back", is_flag=True, help="Use it again.")
@_of_cluster
def drain(*, where: str, is_back: bool, cluster: _Cluster, as_json: bool) -> None:
    """Move everything off a node or one of its GPUs, and keep it empty; or end a ROLE when it has finished, and keep it down.

    A ROLE is named as in `tenuto status`, such as frontend-1 or node-local, and another one has to stand in for it.
    """
    if cluster.address is None and _is_role(where, cluster):
        _carry_out(lambda no: RoleDrain(no, where, is_back), cluster, as_json=as_json)
        return
    node, slash, gpu = where.rpartition("/")
    if slash and not re.fullmatch(r"(gpu)?[0-9]{1,5}", gpu):
        raise ConfigError(f"{shown(where)} is no GPU; write it like {brief(node or 'local')}/gpu0")
    node_id, local = (NodeId(node), int(gpu.removeprefix("gpu"))) if slash else (NodeId(where), None)
    _carry_out(lambda no: DrainAsked(no, node_id, local, is_back), cluster, as_json=as_json)


def _is_role(where: str, cluster: _Cluster) -> bool:
    """Whether it names a process that `tenuto up` keeps running, or kept before it was drained."""
    if "/" in where:
        return False
    with _addresses(cluster) as (addresses, keyring):
        gpus: Sequence[GpuReport] = ask_status(addresses, server=SCHEDULER, keyring=keyring).gpus
    is_node = any(where == report.node_id for report in gpus)
    return not is_node and bool(re.fullmatch(r"(frontend|gateway|scheduler)-[0-9]+|node-.+", where))


def _carry_out(change: Callable[[int], PlanChange | RoleChange], cluster: _Cluster, *, as_json: bool) -> None:
    asked = change(new_request_no())
    if isinstance(asked, RoleChange):
        home = chosen_run_dir(cluster.run_dir)
        try:
            answer = ask_supervisor(home.path, asked)
        finally:
            home.remove()
    else:
        with _addresses(cluster) as (addresses, keyring):
            answer = ask_change(addresses, asked, keyring=keyring)
    if as_json:
        echo_json(_plain(answer))
    elif isinstance(asked, RoleChange):
        click.echo(f"{answer.started} roles started, {answer.ended} ended", err=True)
    elif answer.status in ("ok", "partial"):
        click.echo(
            f"{answer.started} slices started, {answer.ended} ended, {answer.changed} serve on with other models,"
            f" {answer.kept} not touched",
            err=True,
        )
        for one in answer.unplaced:
            rate = "" if one.rate_rps is None else f" ({one.rate_rps:.2f} r/s)"
            click.echo(f"unplaced: {one.model_id}{rate}: {one.reason}", err=True)
    if answer.status == "failed" and not isinstance(asked, RoleChange):
        raise FabricError(f"rolled back: {answer.reason}")
    raise_refusal(answer)
    if answer.status == "partial":
        sys.exit(EXIT_PARTIAL)


def _plain(answer: Changed) -> dict[str, Any]:
    plain: dict[str, Any] = {
        name: getattr(answer, name) for name in answer.__struct_fields__ if name != "request_no"
    }
    plain["unplaced"] = [
        {"model": one.model_id, "rate_rps": one.rate_rps, "reason": one.reason} for one in answer.unplaced
    ]
    return plain


# ---------------------------------------------------------------- sections


def _sections(source: str, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """The sections to add, checked as far as that needs no cluster, with absolute paths."""
    path = Path(source)
    is_inline = source.lstrip().startswith(("{", "["))
    written = read_value(source, "models add") if is_inline else read_file(path)
    if isinstance(written, Mapping) and "models" in written:
        written = written["models"]
    sections = list(written) if isinstance(written, list) else [written]
    where = "models add" if is_inline else str(path)
    for section in sections:
        if not isinstance(section, dict):
            raise ConfigError(f"{where}: holds {type(section).__name__}; a model is a mapping")
    if names:
        known = {section.get("name"): section for section in sections}
        for name in names:
            if name not in known:
                raise ConfigError(f"{where}: has no model {name!r}")
        sections = [known[name] for name in names]
    base_dir = Path.cwd() if is_inline else path.absolute().parent
    parse_config({"models": sections, "cluster": {"gpus": 1}}, base_dir, source=where)
    return [_with_absolute_paths(section, base_dir) for section in sections]


def _with_absolute_paths(section: dict[str, Any], base_dir: Path) -> dict[str, Any]:
    """The scheduler reads it from somewhere else."""

    def profile(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        found = dict(value)
        if str(found.get("ref", "")).endswith(".json"):
            found["ref"] = str((base_dir / found["ref"]).absolute())
        if "by_type" in found:
            found["by_type"] = {gpu_type: profile(inner) for gpu_type, inner in found["by_type"].items()}
        return found

    whole = dict(section)
    if "profile" in whole:
        whole["profile"] = profile(whole["profile"])
    for key, inner in (("loader", "weights"), ("arrival", "path")):
        if isinstance(whole.get(key), dict) and isinstance(whole[key].get(inner), str):
            whole[key] = {**whole[key], inner: str((base_dir / whole[key][inner]).absolute())}
    return whole
