"""`tenuto logs`: what the roles of this host's cluster say, where nobody has a terminal with it."""

from __future__ import annotations

import re
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from deploy.moments import Ago, shown_moment
from deploy.ssh.on_host.logs import LogReader
from fabric.clock import WallClock
from fabric.errors import FabricError
from fabric.policy_options import suggestion
from roles.cli.options import chosen_run_dir, remark, run_dir_flag
from roles.runtime.run_directory import LOG_FILE, OLD_LOG_FILE, is_claimed, nothing_runs
from roles.runtime.running_cluster import processes_in

FOLLOW_EVERY_S: Final = 0.2
_WHO: Final = re.compile(r"level=\w+ role=(\S+) ")
_SUPERVISOR: Final = "up"


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Go on until Ctrl-C, or the cluster's end.")
@click.option(
    "--role", default="", help="Of this role only, such as frontend-0; up: the process that started them."
)
@click.option("--since", "since_ms", type=Ago(), help="No older lines: 90s, 10m, 2h, 1d.")
@run_dir_flag
def logs(*, follow: bool, role: str, since_ms: float | None, run_dir_option: Path | None) -> None:
    """Print what the roles of this host's cluster say, of one that runs in the background, or did until it was killed.

    The processes of several hosts: tenuto deploy logs.
    """
    home = chosen_run_dir(run_dir_option)
    try:
        is_running = is_claimed(home.path)
        if not (home.path / LOG_FILE).exists():
            if not is_running:
                raise nothing_runs(home.path)
            raise FabricError("this cluster was started without --detach: its roles speak in that terminal")
        if not is_running:
            remark([f"no cluster runs in {home.path} any more; this is what the last one said"])
        if role:
            _require_role(role, home.path)
        since = 0.0 if since_ms is None else WallClock().now_ms() - since_ms
        for at_ms, who, line in _lines(home.path, is_followed=follow):
            if at_ms >= since and role in ("", who):
                click.echo(f"{shown_moment(at_ms)} {line}")
    finally:
        home.remove()


def _require_role(role: str, run_dir: Path) -> None:
    """Raises UsageError for one that neither runs nor has said anything."""
    known = {_SUPERVISOR, *(process.role_id for process in processes_in(run_dir))}
    if role in known:
        return  # the log may be long, and is read for who has ended only
    known.update(who for _, who, _ in _lines(run_dir, is_followed=False))
    if role not in known:
        raise click.UsageError(f"there is no role {role!r}{suggestion(role, sorted(known))}")


def _lines(run_dir: Path, *, is_followed: bool) -> Iterator[tuple[float, str, str]]:
    """When, who and what. A line without a name, as of a traceback, is of who spoke before."""
    reader = LogReader(run_dir / LOG_FILE, [run_dir / OLD_LOG_FILE])
    who = _SUPERVISOR
    while True:
        is_over = not is_followed or not is_claimed(run_dir)
        for at_ms, line in reader.read():
            found = _WHO.match(line)
            if found is not None:
                who = found[1]
            elif line.startswith("tenuto"):
                who = _SUPERVISOR
            yield at_ms, who, line
        if is_over:
            return
        select.select([], [], [], FOLLOW_EVERY_S)
