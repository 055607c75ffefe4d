"""What agents of a run directory have left behind there, for whoever ends the whole cluster: no agent comes any more that would take it over."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

from fabric.ids import role_id_of_node
from roles.node_agent.mps.control import MpsPlace
from roles.node_agent.workers.adoption import WorkerRecords
from roles.runtime.identities import (
    ProcessIdentity,
    end,
    identity_in,
    is_over,
    open_handle,
    read_record,
    send_signal,
)
from roles.runtime.process import read_run_file

GUARD_WITHIN_S = 8.0  # to end its daemon in order, then by force
KILL_WITHIN_S = 1.0

log = logging.getLogger("tenuto")


def end_what_agents_left(run_dir: Path) -> None:
    """End workers that outlive their agent, then the guards of its MPS daemons and what these left, and remove their files; what an agent has that lives stays.

    Takes a moment; of those that are stuck, a second for each worker and ten for each guard.
    """
    for directory in run_dir.glob("workers-*"):
        host = directory.name.removeprefix("workers-")
        if not _has_agent(run_dir, host):
            WorkerRecords(run_dir, host).end_all()
    places = [
        place
        for place in map(MpsPlace, run_dir.glob("mps-*/gpu*"))
        if place.owner_file.exists()
        and not _has_agent(run_dir, place.directory.parent.name.removeprefix("mps-"))
    ]
    guards = [identity_in(read_record(place.record_file), "guard") for place in places]
    for guard in guards:  # all at once, as each takes its time
        if guard is not None:
            send_signal(guard, signal.SIGTERM)
    for place, guard in zip(places, guards, strict=True):
        if guard is not None:
            _see_it_end(guard)
        place.clear_away()


def _has_agent(run_dir: Path, host: str) -> bool:
    run_file = read_run_file(run_dir / f"{role_id_of_node(host)}.json")
    return run_file is not None and run_file.is_alive


def _see_it_end(guard: ProcessIdentity) -> None:
    handle = open_handle(guard)
    if handle is None:
        return
    try:
        if not is_over(handle, GUARD_WITHIN_S) and not end(guard, KILL_WITHIN_S):
            log.error("guard_stuck pid=%d", guard.pid)
    finally:
        os.close(handle)
