"""`tenuto models list|add|remove|set` and `tenuto drain`: another plan for a cluster that serves meanwhile."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from fabric.errors import ConfigError, FabricError, PeerLost
from fabric.ids import ModelId, NodeId
from fabric.messages import (
    Changed,
    DrainAsked,
    ModelsAdd,
    ModelSet,
    ModelsRemove,
    PlanChange,
    RoleDrain,
    RoleDrainDryRun,
)
from fabric.policy_options import brief, counted, shown
from roles.cli.json_output import as_plain, echo_json
from roles.cli.options import BUDGET_MS, RATE_RPS, IntRange, chosen_run_dir
from roles.cli.plan_changes import (
    Change,
    Cluster,
    carry_out,
    dry_run_option,
    known_shard,
    of_cluster,
    plain_answer,
    processes_of,
    schedulers_of,
    show,
)
from roles.cli.restart import (
    RequestRefused,
    ask_supervisor,
    ask_what_supervisor_would_answer,
    raise_refusal,
)
from roles.cli.status import print_models
from roles.cli.whole_help import WholeHelpGroup
from roles.config.documents import read_file, read_value
from roles.config.named_files import name_files
from roles.config.nodes import SHARDS_MAX
from roles.config.read_config import parse_config
from roles.runtime.live_figures import live_figures
from roles.runtime.model_move import STEPS_MAX, Refuse, next_step
from roles.runtime.operator_request import ask_change, new_request_no
from roles.runtime.running_cluster import ActiveScheduler, having, roomiest, shards_of
from roles.runtime.shard_reports import combined, merged

_ROLE: Final = re.compile(r"(frontend|gateway|scheduler)-[0-9]+|node-.+")
"""Of `tenuto up`, that can be drained."""


@click.group(cls=WholeHelpGroup)
def models() -> None:
    """List, add, remove and change models of a running cluster."""


@models.command("list")
@of_cluster
def list_(*, cluster: Cluster, as_json: bool) -> None:
    """List the models that are served: SLO, replicas, how they fare now, and what should be known of them."""
    with schedulers_of(cluster) as (schedulers, keyring):
        listed = merged([one.status for one in schedulers.values()])
        live = None if cluster.address else live_figures(processes_of(cluster), keyring)
    if as_json:
        figures = {} if live is None else live.models
        applications = [] if live is None else live.applications
        plain = {
            "models": listed.models,
            "live": figures,
            "warnings": listed.warnings,
            "applications": applications,
        }
        echo_json(as_plain(plain))
    else:
        print_models(listed, live)


@models.command()
@click.argument("source", metavar="FILE|YAML")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--shard", type=IntRange(0, SHARDS_MAX - 1), help="Which shard is to serve them.")
@dry_run_option
@of_cluster
def add(
    *, source: str, names: tuple[str, ...], shard: int | None, cluster: Cluster, is_dry: bool, as_json: bool
) -> None:
    """Serve the models of FILE too (all of them, or those NAMEd): one section, a list, or a file with `models`.

    Instead of a file, a section as YAML or JSON: '{name: resnet50, slo_ms: 50, profile: {ref: …}}'. Where neither --shard
    nor the section's `shard` says it, a model goes to the shard that has fewest models for its GPUs.
    """
    sections = _sections(source, names)

    def added(schedulers: Mapping[int, ActiveScheduler]) -> dict[int, Change]:
        parts: dict[int, list[dict[str, Any]]] = {}
        coming: list[int] = []
        for section in sections:
            said = section.pop("shard", None) if shard is None else shard
            section.pop("shard", None)
            coming.append(known_shard(roomiest(schedulers, coming) if said is None else said, schedulers))
            parts.setdefault(coming[-1], []).append(section)
        return {own: partial(_models_add, json.dumps(part)) for own, part in parts.items()}

    what = f"{', '.join(brief(section['name']) for section in sections)} added"
    carry_out(added, cluster, what=what, as_json=as_json, is_dry=is_dry)


@models.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@dry_run_option
@of_cluster
def remove(*, names: tuple[str, ...], cluster: Cluster, is_dry: bool, as_json: bool) -> None:
    """Serve these models no more: their requests are refused at once, their slices end."""

    def removed(schedulers: Mapping[int, ActiveScheduler]) -> dict[int, Change]:
        parts: dict[int, list[ModelId]] = {}
        for name in dict.fromkeys(names):
            for own in having(ModelId(name), schedulers):
                parts.setdefault(own, []).append(ModelId(name))
        return {own: partial(_models_remove, tuple(ids)) for own, ids in parts.items()}

    what = f"{', '.join(map(brief, dict.fromkeys(names)))} removed"
    carry_out(removed, cluster, what=what, as_json=as_json, is_dry=is_dry)


@models.command()
@click.argument("name")
@click.option(
    "--to", "target", type=IntRange(0, SHARDS_MAX - 1), required=True, help="The shard to serve it."
)
@dry_run_option
@of_cluster
def move(*, name: str, target: int, cluster: Cluster, is_dry: bool, as_json: bool) -> None:
    """Let another shard serve a model: it is loaded there, requests go there, and only then is it ended where it was.

    No request is refused for it. Repeat a move that was interrupted: it goes on where it was.
    """
    answers: list[tuple[int, Changed]] = []
    section = what = ""
    is_removed = False
    for _ in range(STEPS_MAX):
        with schedulers_of(cluster) as (schedulers, keyring):
            known_shard(target, schedulers)
            statuses = {shard: active.status for shard, active in schedulers.items()}
            step = next_step(ModelId(name), target, statuses, section, new_request_no())
            if isinstance(step, Refuse):
                raise ConfigError(step.reason)
            is_there = f"{name} is served by shard {target} already"
            if is_dry:
                would = f"nothing was done; this would move {name} to shard {target}"
                click.echo(is_there if step is None else would, err=True)
                return
            if step is None:
                silent = set(range(shards_of(statuses[target]))) - set(statuses)
                if silent and not is_removed and not cluster.address:  # addresses may be of some shards only
                    raise PeerLost(
                        f"{name} is served by shard {target}, but shard {', '.join(map(str, sorted(silent)))} does not answer"
                        " and may have it too: ask for the move again when it does"
                    )
                what = f"{brief(name)} moved to shard {target}"
                break
            is_removed = isinstance(step.request, ModelsRemove)
            answer = ask_change(schedulers[step.shard].addresses, step.request, keyring=keyring)
        section = answer.document or section
        answers.append((step.shard, answer))
        if answer.status != "ok" and not (is_removed and answer.status == "partial"):  # removed all the same
            what = f"{brief(name)} is not moved whole to shard {target}: ask for the move again when there is room"
            break
    else:
        raise FabricError(f"{name} is changed by somebody else meanwhile: it may be in two shards")
    if not answers:
        click.echo(is_there, err=True)
    if answers or as_json:
        show(combined(answers or [(target, Changed(0, "ok"))]), what=what, as_json=as_json)


@models.command("set")
@click.argument("name")
@click.option("--slo-ms", type=BUDGET_MS, help="Its SLO from now on.")
@click.option("--rate", "rate_rps", type=RATE_RPS, help="Requests per second to plan for at least.")
@click.option(
    "--force", "is_forced", is_flag=True, help="Also an SLO with which the model is served no more."
)
@dry_run_option
@of_cluster
def set_(
    *,
    name: str,
    slo_ms: float | None,
    rate_rps: float | None,
    is_forced: bool,
    cluster: Cluster,
    is_dry: bool,
    as_json: bool,
) -> None:
    """Change a model's SLO or the rate to plan for.

    An SLO with which a model that is served would have no place is refused, with the least that could be met where that is why.
    """
    if slo_ms is None and rate_rps is None:
        raise click.UsageError("nothing to set: give --slo-ms, --rate or both")

    def changed(schedulers: Mapping[int, ActiveScheduler]) -> dict[int, Change]:
        return {
            own: lambda number: ModelSet(number, ModelId(name), slo_ms, rate_rps, is_forced=is_forced)
            for own in having(ModelId(name), schedulers)
        }

    given = {"slo_ms": slo_ms, "rate_rps": rate_rps}
    told = ", ".join(f"{key} {shown(value)}" for key, value in given.items() if value is not None)
    carry_out(changed, cluster, what=f"{brief(name)}: {told}", as_json=as_json, is_dry=is_dry)


@click.command()
@click.argument("where", metavar="NODE|NODE/gpuN|ROLE")
@click.option("--back", "is_back", is_flag=True, help="Use it again.")
@dry_run_option
@of_cluster
def drain(*, where: str, is_back: bool, cluster: Cluster, is_dry: bool, as_json: bool) -> None:
    """Move everything off a node or one of its GPUs, and keep it empty; or end a ROLE when it has finished, and keep it down.

    A ROLE is named as in `tenuto status`, such as frontend-1 or node-local, and another one has to stand in for it.
    """
    if cluster.address is None and _is_role(where, cluster):
        _drain_role(where, cluster, is_back=is_back, is_dry=is_dry, as_json=as_json)
        return
    node, slash, gpu = where.rpartition("/")
    if slash and not re.fullmatch(r"(gpu)?[0-9]{1,5}", gpu):
        raise ConfigError(f"{shown(where)} is no GPU; write it like {brief(node or 'local')}/gpu0")
    node_id, local = (NodeId(node), int(gpu.removeprefix("gpu"))) if slash else (NodeId(where), None)

    def drained(schedulers: Mapping[int, ActiveScheduler]) -> dict[int, Change]:
        having = [
            own
            for own, active in schedulers.items()
            if any(report.node_id == node_id for report in active.status.gpus)
        ]
        return {
            own: lambda no: DrainAsked(no, node_id, local, is_back) for own in having or [*schedulers][:1]
        }

    what = f"{brief(where)} {'is used again' if is_back else 'drained'}"
    try:
        carry_out(drained, cluster, what=what, as_json=as_json, is_dry=is_dry)
    except RequestRefused as error:
        if cluster.address or error.code != "UnknownGpu" or str(error).endswith("?"):
            raise
        # A scheduler knows hardware only; what is no node may be meant as a role.
        roles = [one.role_id for one in processes_of(cluster) if _ROLE.fullmatch(one.role_id)]
        raise ConfigError(", ".join([str(error), *roles])) from error


def _is_role(where: str, cluster: Cluster) -> bool:
    """Whether it names a process that `tenuto up` keeps running, or kept before it was drained."""
    if "/" in where:
        return False
    with schedulers_of(cluster) as (schedulers, _):
        gpus = [gpu for one in schedulers.values() for gpu in one.status.gpus]
    is_node = any(where == report.node_id for report in gpus)
    return not is_node and bool(_ROLE.fullmatch(where))


def _drain_role(role_id: str, cluster: Cluster, *, is_back: bool, is_dry: bool, as_json: bool) -> None:
    home = chosen_run_dir(cluster.run_dir)
    try:
        if is_dry:
            answer = ask_what_supervisor_would_answer(
                home.path, RoleDrainDryRun(new_request_no(), role_id, is_back)
            )
        else:
            answer = ask_supervisor(home.path, RoleDrain(new_request_no(), role_id, is_back))
    finally:
        home.remove()
    if as_json:
        echo_json({**plain_answer(answer), **({"dry_run": True} if is_dry else {})})
    elif answer.status == "ok" and answer.reason:  # it is so already
        click.echo(answer.reason, err=True)
    elif answer.status != "refused" and is_dry:
        verb = "start" if is_back else "drain and end"
        click.echo(f"nothing was done; this would {verb} the role {role_id}", err=True)
    elif answer.status != "refused":
        click.echo(f"{counted(answer.started, 'role')} started, {answer.ended} ended", err=True)
    raise_refusal(answer)


def _models_add(document: str, number: int) -> PlanChange:
    return ModelsAdd(number, document)


def _models_remove(model_ids: tuple[ModelId, ...], number: int) -> PlanChange:
    return ModelsRemove(number, model_ids)


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
        known = {str(section.get("name")): section for section in sections}
        for name in names:
            if name not in known:
                raise ConfigError(f"{where}: has no model {name!r}")
        sections = [known[name] for name in names]
    base_dir = Path.cwd() if is_inline else path.absolute().parent
    # Whether there is such a shard the cluster knows.
    checked = [{key: value for key, value in one.items() if key != "shard"} for one in sections]
    parse_config({"models": checked, "cluster": {"gpus": 1}}, base_dir, source=where)
    for section in sections:  # the scheduler reads them from somewhere else
        name_files(section, lambda path, _: str((base_dir / path).absolute()))
    return sections
