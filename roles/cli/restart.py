"""`tenuto restart --rolling`: every process of this host's cluster anew, one at a time."""

from __future__ import annotations

from pathlib import Path

import click

from fabric.errors import ConfigError, FabricError, PeerLost
from fabric.messages import Changed, RestartRoles, RoleChange
from roles.cli.options import chosen_run_dir, echo_json, json_option, run_dir_flag
from roles.runtime.environment import RunDir
from roles.runtime.operator_request import ask_change, new_request_no
from roles.runtime.run_directory import UP_SOCKET, is_claimed


@click.command()
@click.option("--rolling", is_flag=True, required=True, help="One role at a time; clients notice nothing.")
@run_dir_flag
@json_option
def restart(*, rolling: bool, run_dir_option: Path | None, as_json: bool) -> None:
    """Restart every process of this host's cluster: node agents, frontends, then the scheduler.

    Each ends when it has finished what it has, and the next one waits until it is as healthy as before. Exit 1 at the
    first that does not come back; the others are not touched then.
    """
    assert rolling, "required"
    home = chosen_run_dir(run_dir_option)
    try:
        answer = ask_supervisor(home.path, RestartRoles(new_request_no()))
    finally:
        home.remove()
    if as_json:
        echo_json(
            {
                "status": answer.status,
                "code": answer.code,
                "reason": answer.reason,
                "restarted": answer.started,
            }
        )
    else:
        click.echo(f"{answer.started} roles restarted", err=True)
    raise_refusal(answer)


def ask_supervisor(run_dir: Path, change: RoleChange) -> Changed:
    """What `tenuto up` of that run directory answers when it is done. PeerLost where none runs."""
    if not run_dir.is_dir() or not is_claimed(run_dir):
        raise PeerLost(f"no cluster runs in {run_dir}")
    return ask_change([RunDir(run_dir).ipc_address(UP_SOCKET)], change)


def raise_refusal(answer: Changed) -> None:
    """Raise what ends the command, unless all went well."""
    if answer.status == "refused":
        is_passing = answer.code in ("Busy", "NotActive")
        raise (FabricError if is_passing else ConfigError)(f"{answer.code}: {answer.reason}")
    if answer.status == "failed":
        raise FabricError(answer.reason)
