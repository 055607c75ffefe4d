"""`tenuto deploy status | logs | run`: looking at a cluster's hosts, and at what they say."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
from rich.table import Table

from deploy.moments import Ago, shown_moment
from deploy.ssh.facts import HostFacts, Unreachable
from deploy.ssh.inventory import Inventory
from deploy.ssh.rollout import HOSTS_AT_ONCE
from deploy.ssh.shell import Deployment
from fabric.clock import WallClock
from fabric.errors import FabricError
from roles.cli.console import plain_console
from roles.cli.json_output import echo_json
from roles.cli.options import file_argument, json_option
from roles.runtime.exit_codes import EXIT_FAILURE, EXIT_PARTIAL, EXIT_UNREACHABLE

HOLD_S: Final = 0.5
"""Lines of several hosts are put in order over so long."""
LINES_MAX: Final = 100_000
COMMAND_LIMIT_S: Final = 3_600.0


class _Line(NamedTuple):
    """Of a role's log."""

    at_ms: float
    host: str
    role: str
    text: str


@click.command()
@file_argument
@json_option
def status(file: Path, as_json: bool) -> None:  # noqa: FBT001  click's flag
    """Show each host and its roles, then the cluster as its scheduler sees it.

    Exit 6 when a host or a role is down, 5 when no host can be reached.
    """
    deployment = Deployment.of(file)
    facts = deployment.facts()
    rows = host_rows(deployment.inventory, facts)
    cluster: Mapping[str, Any] | None = None
    why = "no host of a scheduler can be reached"
    with contextlib.suppress(FabricError):  # its host is among the rows
        cluster, why = deployment.cluster.status()
    if as_json:
        echo_json({"hosts": rows, "cluster": cluster})
    else:
        _print(rows, cluster, why)
    if all(row["problem"] for row in rows):
        sys.exit(EXIT_UNREACHABLE)
    is_whole = cluster is not None and not any(
        row["problem"] or set(row["roles"].values()) != {"runs"} for row in rows
    )
    sys.exit(0 if is_whole else EXIT_PARTIAL)


@click.command()
@file_argument
@click.option("-f", "--follow", is_flag=True, help="Go on until Ctrl-C.")
@click.option("--role", default="", help="Of this role only, such as frontend-0.")
@click.option("--since", "since_ms", type=Ago(), help="No older lines: 90s, 10m, 2h, 1d.")
@json_option
def logs(file: Path, follow: bool, role: str, since_ms: float | None, as_json: bool) -> None:  # noqa: FBT001  click's flags
    """Print what the roles of all hosts say, in the order of time.

    Exit 6 when a host cannot be asked.
    """
    if follow and as_json:
        raise click.UsageError("--json is one answer at the end: not with --follow")
    deployment = Deployment.of(file)
    if role:
        deployment.require_roles([role])
    since = 0.0 if since_ms is None else WallClock().now_ms() - since_ms
    request = {"do": "logs", "since_ms": since, "role": role, "is_followed": follow}
    came: queue.Queue[_Line] = queue.Queue(LINES_MAX)
    failed: dict[str, str] = {}
    width = max(len(host) for host in deployment.connections)

    def read(host: str) -> None:
        def on_lines(said: Mapping[str, Any]) -> None:
            for at_ms, text in said["lines"]:
                came.put(_Line(at_ms, host, said["role"], text))

        try:
            deployment.connections[host].ask(request, limit_s=None if follow else 60.0, on_progress=on_lines)
        except FabricError as error:
            failed[host] = str(error)

    readers = [threading.Thread(target=read, args=(host,), daemon=True) for host in deployment.connections]
    for reader in readers:
        reader.start()
    told: dict[str, list[dict[str, Any]]] = {host: [] for host in deployment.connections}
    try:
        for one in _in_order(came, readers, is_followed=follow):
            if as_json:
                told[one.host].append({"at_ms": one.at_ms, "role": one.role, "line": one.text})
            else:
                click.echo(f"{shown_moment(one.at_ms)} {one.host:{width}} {one.role:12} {one.text}")
    finally:
        for connection in deployment.connections.values():
            connection.end()
    if as_json:
        echo_json({host: {"problem": failed.get(host, ""), "lines": lines} for host, lines in told.items()})
    for host, reason in failed.items():
        click.echo(f"tenuto: {host}: {reason}", err=True)
    if failed:
        sys.exit(EXIT_UNREACHABLE if len(failed) == len(readers) else EXIT_PARTIAL)


@click.command(context_settings={"ignore_unknown_options": True})
@file_argument
@click.option("--host", "hosts", multiple=True, help="Only there; may be repeated.")
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND")
@json_option
def run(file: Path, hosts: tuple[str, ...], words: tuple[str, ...], as_json: bool) -> None:  # noqa: FBT001
    """Run COMMAND in a shell on all hosts, side by side; as ssh does, its words are one line there, so quote it as a whole. Exit 6 when it fails on some, 1 when it fails on all."""
    deployment = Deployment.of(file)
    chosen = [deployment.inventory.host(host).host for host in hosts] or list(deployment.connections)

    def do(host: str) -> dict[str, Any]:
        command = deployment.connections[host].command(" ".join(words))
        try:
            done = subprocess.run(  # noqa: S603  ssh, and what the operator typed
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=COMMAND_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"host": host, "code": EXIT_FAILURE, "output": f"not over within {COMMAND_LIMIT_S:g} s"}
        return {"host": host, "code": done.returncode, "output": done.stdout.decode("utf-8", "replace")}

    with ThreadPoolExecutor(HOSTS_AT_ONCE, "host") as pool:
        found = list(pool.map(do, chosen))
    if as_json:
        echo_json(found)
    else:
        width = max(len(host) for host in chosen)
        for one in found:
            for line in one["output"].splitlines():
                click.echo(f"{one['host']:{width}}  {line}")
            if one["code"]:
                click.echo(f"{one['host']:{width}}  ended with code {one['code']}", err=True)
    failures = sum(one["code"] != 0 for one in found)
    sys.exit(0 if not failures else EXIT_FAILURE if failures == len(found) else EXIT_PARTIAL)


def host_rows(inventory: Inventory, facts: Mapping[str, HostFacts | Unreachable]) -> list[dict[str, Any]]:
    """A row for each host: what is wrong with it as a whole, what it runs, and how each role is."""
    rows = []
    for wanted in inventory.hosts:
        told = facts[wanted.host]
        roles = [role.role_id for role in wanted.roles]
        if isinstance(told, Unreachable):
            states = dict.fromkeys(roles, "unknown")
            rows.append(
                {"host": wanted.host, "problem": told.reason, "version": "", "config": "", "roles": states}
            )
            continue
        states = {
            one: "absent"
            if one not in told.roles
            else "down"
            if not told.roles[one]
            else "runs"
            if one in told.serving
            else "starting"
            for one in roles
        }
        row = {"host": wanted.host, "problem": "", "version": told.now.version, "config": told.now.config}
        rows.append({**row, "roles": states})
    return rows


def _print(rows: Iterable[Mapping[str, Any]], cluster: Mapping[str, Any] | None, why: str) -> None:
    console = plain_console()
    hosts = Table("host", "version", "configuration", "roles")
    for row in rows:
        roles = row["problem"] or ", ".join(
            one if state == "runs" else f"{one} ({state})" for one, state in row["roles"].items()
        )
        hosts.add_row(row["host"], row["version"], row["config"], roles)
    console.print(hosts)
    if cluster is None:
        click.echo(f"the scheduler does not answer: {why}", err=True)
        return
    slices = Table("slice", "state", "models", "requests")
    for one in cluster["slices"]:
        state = f"{one['state']}: {one['reason']}" if one["reason"] else one["state"]
        slices.add_row(one["slice_id"], state, ", ".join(one["models"]), str(one["requests"]))
    console.print(slices)


def _in_order(
    came: queue.Queue[_Line], readers: Iterable[threading.Thread], *, is_followed: bool
) -> Iterator[_Line]:
    """In the order of time: all of them at the end, or every half second what has come in it."""
    held: list[_Line] = []
    while True:
        is_over = not any(reader.is_alive() for reader in readers)
        with contextlib.suppress(queue.Empty):
            held.append(came.get(timeout=HOLD_S if not is_over else 0.0))
            while True:
                held.append(came.get_nowait())
        if is_over or is_followed:
            yield from sorted(held, key=lambda one: one.at_ms)
            held.clear()
        if is_over and came.empty():
            return
