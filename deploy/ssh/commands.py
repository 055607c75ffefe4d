"""`tenuto deploy`: a cluster on several hosts, through ssh."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NoReturn

import click
from rich.table import Table
from rich.text import Text

from deploy.k8s.commands import k8s
from deploy.ssh.deployed_cluster import Say
from deploy.ssh.inventory import not_started
from deploy.ssh.operations import logs, run, status
from deploy.ssh.shell import Deployment, Result, RolloutInterrupted, exit_code_of
from deploy.ssh.steps import Plan
from fabric.errors import FabricError, PeerLost
from fabric.policy_options import counted
from roles.cli.console import plain_console
from roles.cli.json_output import echo_json
from roles.cli.options import file_argument, json_option, remark
from roles.cli.whole_help import WholeHelpGroup
from roles.runtime.exit_codes import EXIT_UNREACHABLE

NOTHING_TO_CHANGE: Final = "nothing to do: all hosts are as the file says"
NOTHING_THERE: Final = "nothing to do: there is nothing of it on any host"


@click.group(cls=WholeHelpGroup)
def deploy() -> None:
    """Run a cluster on the hosts that a file names, through ssh."""


dry_run_option = click.option(
    "--dry-run", "is_dry", is_flag=True, help="Only say what would be done on which host."
)


@deploy.command()
@file_argument
@json_option
def plan(file: Path, as_json: bool) -> None:  # noqa: FBT001  click's flag
    """Say what `up` would do on which host, in order; change nothing.

    Exit 6 when some hosts cannot be done, 5 when none can be reached, 1 when the scheduler's cannot be done.
    """
    _tell(_opened(file).plan(), as_json=as_json)


@deploy.command()
@file_argument
@click.option(
    "--forget",
    "forgotten",
    multiple=True,
    metavar="HOST",
    help="It is not in FILE any more and cannot be reached: leave it as it is; may be repeated.",
)
@dry_run_option
@json_option
def up(file: Path, forgotten: tuple[str, ...], is_dry: bool, as_json: bool) -> None:  # noqa: FBT001  click's flag
    """Make the hosts' cluster what FILE says: carry, install, start, wait until it serves.

    What is so already is left alone. A host that FILE does not have any more is drained, ended and cleared. Exit 6 when a host or a model is left out, 5 when no host can be reached, 1 when nothing is served.
    """
    deployment = _opened(file)
    _change(deployment, deployment.plan(forgotten), as_json=as_json, is_dry=is_dry)


@deploy.command()
@file_argument
@dry_run_option
@json_option
def upgrade(file: Path, is_dry: bool, as_json: bool) -> None:  # noqa: FBT001  click's flag
    """As `up`, but roles start again one after the other: a node is drained first, and each has to serve before the next ends."""
    deployment = _opened(file)
    _change(deployment, deployment.plan(), as_json=as_json, is_dry=is_dry, is_rolling=True)


@deploy.command()
@file_argument
@click.option(
    "--rolling", is_flag=True, help="One after the other; stops at the first that does not come back."
)
@click.option(
    "--role",
    "roles",
    multiple=True,
    metavar="ROLE",
    help="Only this one, such as frontend-0; may be repeated.",
)
@dry_run_option
@json_option
def restart(file: Path, rolling: bool, roles: tuple[str, ...], is_dry: bool, as_json: bool) -> None:  # noqa: FBT001  click's flags
    """Start the roles again with what their hosts were told to run last, whatever FILE says by now: agents, schedulers, frontends, gateways."""
    deployment = Deployment.of(file)
    found = deployment.plan_restart(roles)
    try:
        _change(deployment, found, as_json=as_json, is_dry=is_dry, is_rolling=rolling)
    except RolloutInterrupted as interrupted:  # the same command again would begin with those that are done
        left = [step.request["role_id"] for step in interrupted.left if step.what == "start"]
        words = [*(["--rolling"] if rolling else []), *(f"--role {role_id}" for role_id in left)]
        if left:
            click.echo(f"tenuto: to restart those: tenuto deploy restart {file} {' '.join(words)}", err=True)
        raise


@deploy.command()
@file_argument
@dry_run_option
@json_option
def rollback(file: Path, is_dry: bool, as_json: bool) -> None:  # noqa: FBT001  click's flag
    """Go back to the version and the configuration that ran before the last change; roles that are the same in both go on."""
    deployment = Deployment.of(file)
    _change(deployment, deployment.plan_rollback(), as_json=as_json, is_dry=is_dry)


@deploy.command()
@file_argument
@dry_run_option
@json_option
def down(file: Path, is_dry: bool, as_json: bool) -> None:  # noqa: FBT001  click's flag
    """End the cluster, and remove from its hosts all that was made there: units, environments, configurations, keys, logs."""
    deployment = Deployment.of(file)
    found = deployment.plan_down()
    if is_dry:
        _tell(found, as_json=as_json, nothing=NOTHING_THERE)
    with _telling_interrupt():
        result = deployment.tear_down(found, _speaker(found))
    if as_json:
        echo_json(_done(found, result))
    if not found.steps and not found.problems:
        click.echo(NOTHING_THERE, err=True)
    code = exit_code_of(found)
    sys.exit(code if code == EXIT_UNREACHABLE else result.exit_code)


def _opened(file: Path) -> Deployment:
    """For what makes hosts as the file says: what of it stays undone is said first."""
    deployment = Deployment.of(file)
    remark(not_started(deployment.source.config))
    return deployment


def _tell(found: Plan, *, as_json: bool, nothing: str = NOTHING_TO_CHANGE) -> NoReturn:
    """Say it, and exit. `nothing`: what a plan without steps means."""
    if as_json:
        echo_json(plain_plan(found))
    else:
        print_plan(found, nothing)
    sys.exit(exit_code_of(found))


def _change(
    deployment: Deployment, found: Plan, *, as_json: bool, is_dry: bool, is_rolling: bool = False
) -> None:
    """Do a plan, say how it went, and exit; a dry run only says it."""
    if is_dry:
        _tell(found, as_json=as_json)
    with _telling_interrupt():
        result = deployment.carry_out(found, _speaker(found), is_rolling=is_rolling)
    if as_json:
        echo_json(_done(found, result))
    for problem in result.problems:
        click.echo(f"tenuto: {problem}", err=True)
    if deployment.source.is_changed:
        source = deployment.source.path
        click.echo(
            f"tenuto: {source} was changed meanwhile; this did what it said before: run it again", err=True
        )
    if result.status is None:
        reason = "; ".join(f"{host}: {problem}" for host, problem in result.failed.items())
        error = PeerLost if exit_code_of(found) == EXIT_UNREACHABLE else FabricError
        # A cluster whose scheduler could not be reached, or prepared, may serve as before.
        how = "nothing was started or ended" if result.is_untouched else "the cluster is not up"
        raise error(f"{how}: {reason or '; '.join(result.problems)}")
    if not result.done and not result.failed:
        click.echo(NOTHING_TO_CHANGE, err=True)
    sys.exit(result.exit_code)


@contextmanager
def _telling_interrupt() -> Iterator[None]:
    """After Ctrl-C, what is done and what is not. A plan is made of what hosts have, so that the next command begins with the rest."""
    try:
        yield
    except RolloutInterrupted as interrupted:
        names = [f"{step.host}: {step.what}: {step.detail}" for step in interrupted.done]
        click.echo(f"tenuto: interrupted; done: {', '.join(names) or 'nothing'}", err=True)
        names = [f"{step.host}: {step.what}: {step.detail}" for step in interrupted.left]
        click.echo(f"tenuto: not done: {', '.join(names) or 'nothing'}", err=True)
        raise


def _speaker(found: Plan) -> Say:
    """Says a line of a host on stderr; the plan's warnings at once."""
    width = max(len(host) for host in found.hosts)
    lock = threading.Lock()

    def say(host: str, line: str) -> None:
        with lock:
            click.echo(f"{host:{width}}  {line}", err=True)

    for host, lines in found.warnings.items():
        for line in lines:
            say(host, f"warning: {line}")
    return say


def _done(found: Plan, result: Result) -> Mapping[str, Any]:
    return plain_plan(found) | {
        "done": [_row(step.host, step.what, step.detail) for step in result.done],
        "failed": dict(result.failed),
        "problems_of_models": list(result.problems),
        "endpoints": (result.status or {}).get("endpoints", {}),
    }


def plain_plan(found: Plan) -> dict[str, Any]:
    """For `--json`."""
    return {
        "hosts": list(found.hosts),
        "steps": [
            _row(step.host, step.what, step.detail, phase=step.phase.name.lower()) for step in found.steps
        ],
        "problems": {host: list(lines) for host, lines in found.problems.items()},
        "warnings": {host: list(lines) for host, lines in found.warnings.items()},
    }


def print_plan(found: Plan, nothing: str) -> None:
    """For people."""
    console = plain_console()
    table = Table("", "host", "step", "what")
    for number, step in enumerate(found.steps, start=1):
        table.add_row(str(number), step.host, step.what, Text(step.detail))
    if found.steps:
        console.print(table)
    for word, lines_of in (("problem", found.problems), ("warning", found.warnings)):
        for host, lines in lines_of.items():
            for line in lines:
                click.echo(
                    f"{word}: {host} {line}" if word == "problem" else f"{word}: {host}: {line}", err=True
                )
    if not found.steps and not found.problems:
        click.echo(nothing, err=True)
    elif found.steps:
        hosts = len({step.host for step in found.steps})
        click.echo(f"{counted(len(found.steps), 'step')} on {counted(hosts, 'host')}", err=True)


def _row(host: str, what: str, detail: str, **more: str) -> Mapping[str, str]:
    return {"host": host, "what": what, "detail": detail, **more}


for command in (status, logs, run, k8s):
    deploy.add_command(command)
