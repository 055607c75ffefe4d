"""`tenuto restart --rolling`: every process of a host's cluster anew, one at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import click

from fabric.errors import ConfigError, FabricError, PeerLost
from fabric.ids import SCHEDULER_PREFIX, ModelId, NodeId, role_id_of_node
from fabric.messages import Changed, RestartRoles, RoleChange, RoleDrainDryRun, SliceReport, SliceState
from fabric.operator_questions import ask_status
from fabric.policy_options import counted
from roles.cli.json_output import echo_json
from roles.cli.options import (
    chosen_run_dir,
    json_option,
    remark,
    run_dir_flag,
    via_host,
    via_up_option,
)
from roles.runtime.core import SCHEDULER
from roles.runtime.environment import RunDir
from roles.runtime.operator_request import NotAnswered, ask_change, new_request_no
from roles.runtime.process_events import still_drained
from roles.runtime.run_directory import UP_SOCKET, drained_roles, is_claimed, nothing_runs
from roles.runtime.running_cluster import ROLE_LIMIT_MS, is_active, processes_in


@click.command()
@click.option(
    "--rolling",
    is_flag=True,
    required=True,
    help="One role at a time; clients notice nothing where another of each role stands in.",
)
@click.option("--dry-run", "is_dry", is_flag=True, help="Only say which processes would be restarted.")
@run_dir_flag
@via_up_option
@json_option
def restart(*, rolling: bool, is_dry: bool, run_dir_option: Path | None, as_json: bool) -> None:
    """Restart every process of a host's cluster: node agents, frontends, then the scheduler.

    Each ends when it has finished what it has, and the next one waits until it is as healthy as before. Exit 1 at the
    first that does not come back; the others are not touched then. Models that one node alone serves are away while that
    node's agent restarts: they are named before it begins.
    """
    assert rolling, "required"
    home = chosen_run_dir(run_dir_option)
    if is_dry:
        try:
            require_running(home.path)
            for role_id in drained_roles(home.path):
                raise FabricError(f"Busy: {still_drained(role_id)}")
            away = _tell_away(home.path)
            tell_processes(home.path, "restart", as_json=as_json, away=away)
        finally:
            home.remove()
        return
    try:
        require_running(home.path)
        away = _tell_away(home.path)
        before = _incarnations(home.path)
        try:
            answer = ask_supervisor(home.path, RestartRoles(new_request_no()))
        except KeyboardInterrupt:
            click.echo(f"tenuto: {_how_far(before, _incarnations(home.path))}", err=True)
            raise
    finally:
        home.remove()
    if as_json:
        echo_json(
            {
                "status": answer.status,
                "code": answer.code,
                "reason": answer.reason,
                "restarted": answer.started,
                "away": away,
            }
        )
    elif answer.status != "refused":
        click.echo(f"{counted(answer.started, 'role')} restarted", err=True)
    raise_refusal(answer)


def _incarnations(run_dir: Path) -> dict[str, tuple[int, str]]:
    """Which process each role is, by what tells it from its next one."""
    return {one.role_id: (one.pid, one.incarnation) for one in processes_in(run_dir) if one.alive}


def _how_far(before: Mapping[str, tuple[int, str]], now: Mapping[str, tuple[int, str]]) -> str:
    """What is told to who waits no longer for a restart."""
    done = [role_id for role_id, which in before.items() if now.get(role_id, which) != which]
    left = [role_id for role_id in before if role_id not in done]
    return (
        "this command waits no longer, but `tenuto up` goes on with the restart until all are done;"
        f" restarted: {', '.join(done) or 'none yet'}; to come or under way: {', '.join(left) or 'none'}."
        " `tenuto status` shows who serves, `tenuto down` ends all"
    )


def on_one_node(slices: Iterable[SliceReport]) -> dict[ModelId, NodeId]:
    """The models whose ready slices are all on one node, with that."""
    nodes: dict[ModelId, set[NodeId]] = {}
    for one in slices:
        if one.state == SliceState.READY:
            for model_id in one.models:
                nodes.setdefault(model_id, set()).add(NodeId(one.slice_id.partition("/")[0]))
    return {model_id: where.pop() for model_id, where in nodes.items() if len(where) == 1}


def _tell_away(run_dir: Path) -> list[ModelId]:
    """Name the models that a restart takes away for a while. A scheduler that does not answer at once is not waited for."""
    alive = [process for process in processes_in(run_dir) if process.alive]
    agents = {process.role_id for process in alive}
    slices: list[SliceReport] = []
    for process in alive:
        if process.role_id.startswith(SCHEDULER_PREFIX) and process.addresses.get("control"):
            with contextlib.suppress(PeerLost):
                status = ask_status(process.addresses["control"], ROLE_LIMIT_MS, server=SCHEDULER)
                slices += status.slices if is_active(status) else ()
    away = {name: node for name, node in on_one_node(slices).items() if role_id_of_node(node) in agents}
    for node in dict.fromkeys(away.values()):
        names = ", ".join(name for name in away if away[name] == node)
        remark([f"only node {node} serves {names}: requests for them fail while its agent restarts"])
    return list(away)


def require_running(run_dir: Path) -> None:
    """Raises PeerLost where no `tenuto up` runs."""
    if not is_claimed(run_dir):
        host = via_host()
        if host:
            raise PeerLost(
                f"no `tenuto up` runs in the run directory that was found on {host} (a deployed cluster's comes first)"
            )
        raise nothing_runs(run_dir)


def tell_processes(
    run_dir: Path, verb: str, *, as_json: bool = False, away: Sequence[ModelId] | None = None
) -> None:
    """What would happen to the processes that `tenuto up` keeps there, and to models. Raises PeerLost where none runs."""
    require_running(run_dir)
    roles = [process.role_id for process in processes_in(run_dir) if process.alive]
    if as_json:
        echo_json({"dry_run": True, "roles": roles, **({} if away is None else {"away": away})})
    else:
        click.echo(f"nothing was done; this would {verb} {', '.join(roles)}", err=True)


def ask_supervisor(run_dir: Path, change: RoleChange) -> Changed:
    """What `tenuto up` of that run directory answers when it is done. PeerLost where none runs."""
    return ask_change(_where_supervisor_listens(run_dir), change)


def ask_what_supervisor_would_answer(
    run_dir: Path, question: RoleDrainDryRun, limit_ms: float | None = None
) -> Changed:
    """What it would answer. Raises PeerLost where none runs, FabricError where it is of a version without dry runs of roles."""
    try:
        return ask_change(_where_supervisor_listens(run_dir), question, limit_ms=limit_ms)
    except NotAnswered as error:  # who does not know a message drops it, and answers pings as before
        raise FabricError(
            "the `tenuto up` that runs here does not know dry runs of roles, as it was started by an older version; nothing was"
            " done. `tenuto down` and then `tenuto up` start the present one"
        ) from error


def _where_supervisor_listens(run_dir: Path) -> list[str]:
    require_running(run_dir)
    return [RunDir(run_dir).ipc_address(UP_SOCKET)]


class RequestRefused(ConfigError):
    """It cannot be done as asked, now or later. `code`: as in `Changed`."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code


def raise_refusal(answer: Changed) -> None:
    """Raise what ends the command, unless all went well."""
    if answer.status == "refused":
        if answer.code in ("Busy", "NotActive"):  # passing
            raise FabricError(f"{answer.code}: {answer.reason}")
        raise RequestRefused(answer.code, answer.reason)
    if answer.status == "failed":
        raise FabricError(answer.reason)
