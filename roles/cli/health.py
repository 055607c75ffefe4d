"""`tenuto health`: whether the roles of this host do their part. For probes of whoever runs them."""

from __future__ import annotations

from pathlib import Path

import click

from fabric.errors import FabricError, PeerLost
from fabric.ids import GATEWAY_PREFIX
from fabric.messages import SliceState, StatusListed
from fabric.operator_questions import ask_status
from roles.cli.json_output import echo_json
from roles.cli.options import chosen_run_dir, json_option, run_dir_flag
from roles.runtime.run_directory import is_claimed
from roles.runtime.running_cluster import ProcessReport, processes_in

_ANSWER_LIMIT_MS = 2_000.0
_IN_ORDER = (SliceState.READY, SliceState.DRAINING, SliceState.STOPPED)


@click.command()
@click.option("--live", "is_live", is_flag=True, help="Only whether they answer.")
@run_dir_flag
@json_option
def health(*, is_live: bool, run_dir_option: Path | None, as_json: bool) -> None:
    """Say whether every role of this run directory answers and is ready; exit 1 when one is not, 5 when none runs.

    Ready is a frontend that the active scheduler knows, a gateway with a frontend that wants requests, a scheduler that is active
    or stands by, and a node agent whose slices all serve.
    """
    home = chosen_run_dir(run_dir_option)
    try:
        processes = processes_in(home.path)
        found = {process.role_id: _trouble(process, is_live=is_live) for process in processes}
        # A supervisor starts again what has died.
        is_there = any(process.alive for process in processes) or (bool(found) and is_claimed(home.path))
    finally:
        home.remove()
    if as_json and found:
        echo_json({role_id: {"ready": not reason, "reason": reason} for role_id, reason in found.items()})
    if not is_there:
        gone = f" any more: {', '.join(found)} {'is' if len(found) == 1 else 'are'} gone" if found else ""
        raise PeerLost(f"no role runs in {home.path}{gone}")
    unready = [f"{role_id} {reason}" for role_id, reason in found.items() if reason]
    if unready:
        raise FabricError("; ".join(unready))
    if not as_json:
        click.echo(f"{', '.join(found)}: {'answering' if is_live else 'ready'}")


def _trouble(process: ProcessReport, *, is_live: bool) -> str:
    """Why a role is not as it should be; empty: it is."""
    addresses = process.addresses.get("control") or process.addresses.get("client") or ()
    if not process.alive or not addresses:
        return "is gone"
    try:
        status = ask_status(addresses, _ANSWER_LIMIT_MS)
    except PeerLost:
        return "does not answer"
    return "" if is_live else why_unready(status)


def why_unready(status: StatusListed) -> str:
    """What keeps a role from doing its part, by what it says of itself; empty: nothing."""
    standing = status.standing
    if standing is not None:
        granted = f"{standing.agents_granted} of {standing.agents} agents"
        return f"asks to be active, and has {granted}" if standing.state == "candidate" else ""
    if not status.counters.get("is_ready", 1.0):
        if status.role_id.startswith(GATEWAY_PREFIX):
            return "has no frontend that wants requests, or ends"
        return "is not connected to the active scheduler"
    waiting = [f"{one.slice_id} is {one.state}" for one in status.slices if one.state not in _IN_ORDER]
    return ", ".join(waiting)
