"""A cluster that runs on this host, as its run directory and its scheduler show it."""

from __future__ import annotations

import select
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fabric.client import ask_status
from fabric.errors import PeerLost
from fabric.ids import FRONTEND_PREFIX, GATEWAY_PREFIX, SCHEDULER_PREFIX, PeerId
from fabric.keys import Keyring
from fabric.messages import StatusListed
from roles.runtime.core import SCHEDULER
from roles.runtime.process import is_alive
from roles.runtime.run_directory import run_files

ROLE_LIMIT_MS = 1_000.0
SCHEDULER_LIMIT_MS = 2_000.0
_TOLD: Mapping[str, Sequence[str]] = {
    FRONTEND_PREFIX: ("client", "metrics"),
    GATEWAY_PREFIX: ("http", "grpc"),
    SCHEDULER_PREFIX: ("control",),
}
"""By whose it is: what others may want to reach."""
TAKE_OVER_TRIES, TAKE_OVER_LOOK_S = 40, 0.1


@dataclass(slots=True, frozen=True)
class ProcessReport:
    """One role of the run directory."""

    role_id: str
    pid: int
    alive: bool
    addresses: Mapping[str, Sequence[str]]


@dataclass(slots=True, frozen=True)
class ClusterReport:
    """What `tenuto status` shows."""

    endpoints: Mapping[str, Sequence[str]]
    processes: Sequence[ProcessReport]
    scheduler: StatusListed
    counters: Mapping[str, Mapping[str, float]]
    """By role: what it counted and what its loop measured; workers too, as their agent tells it."""


def look(run_dir: Path, keyring: Keyring | None = None) -> ClusterReport:
    """The cluster of a run directory as its active scheduler sees it. PeerLost when none answers that is.

    `keyring`: the operator's, for roles that are reached by TCP.
    """
    _, scheduler = _active_scheduler(run_dir, keyring)
    processes = processes_in(run_dir)
    counters: dict[str, Mapping[str, float]] = {scheduler.role_id: scheduler.counters}
    for process in processes:
        if process.alive and process.role_id not in counters:
            counters |= _counters(process, keyring)
    return ClusterReport(endpoints_in(run_dir), processes, scheduler, counters)


def is_active(scheduler: StatusListed) -> bool:
    """Whether it is the active scheduler that says how it is."""
    return scheduler.standing is None or scheduler.standing.state == "active"


def look_from_afar(address: str, keyring: Keyring | None) -> ClusterReport:
    """What the scheduler at that control address knows. Raises PeerLost, and Unauthorised where the key does not permit it."""
    scheduler = ask_status(address, server=SCHEDULER, keyring=keyring)
    return ClusterReport({"control": [address]}, (), scheduler, {scheduler.role_id: scheduler.counters})


def _counters(process: ProcessReport, keyring: Keyring | None) -> dict[str, dict[str, float]]:
    """Its own and, of an agent, its workers'; nothing of one that ends or hangs just now."""
    addresses = process.addresses.get("control") or process.addresses.get("client")
    if not addresses:
        return {}
    try:
        listed = ask_status(addresses, ROLE_LIMIT_MS, server=PeerId(process.role_id), keyring=keyring)
    except PeerLost:
        return {}
    counters: dict[str, dict[str, float]] = {process.role_id: {}}
    for name, value in listed.counters.items():
        worker_id, _, own = name.rpartition("/")
        counters.setdefault(worker_id or process.role_id, {})[own] = value
    return counters


def scheduler_addresses(run_dir: Path, keyring: Keyring | None = None) -> Sequence[str]:
    """Where the active scheduler of a run directory listens. PeerLost where there is none."""
    return _active_scheduler(run_dir, keyring)[0]


def _active_scheduler(run_dir: Path, keyring: Keyring | None) -> tuple[Sequence[str], StatusListed]:
    """The one with the highest epoch. While one takes over there is none: so they are asked again for a while."""
    alive = [
        process.addresses.get("control", ())
        for process in processes_in(run_dir)
        if process.role_id.startswith(SCHEDULER_PREFIX) and process.alive
    ]
    if not alive:
        raise PeerLost(f"no cluster runs in {run_dir}")
    limit_ms = SCHEDULER_LIMIT_MS if len(alive) == 1 else ROLE_LIMIT_MS
    answers: list[tuple[Sequence[str], StatusListed]] = []
    for _ in range(TAKE_OVER_TRIES):
        answers = [
            (addresses, status) for addresses in alive if (status := _asked(addresses, limit_ms, keyring))
        ]
        active = [answer for answer in answers if is_active(answer[1])]
        if active:
            return max(
                active, key=lambda answer: 0 if answer[1].standing is None else answer[1].standing.epoch
            )
        if len(alive) == 1 and not answers:
            break
        select.select([], [], [], TAKE_OVER_LOOK_S)
    if not answers:
        raise PeerLost(f"no active scheduler answers in {run_dir}")
    names = " and ".join(status.role_id for _, status in answers)
    raise PeerLost(
        f"{names} of this host stand by: ask on the host of the active one, or by --scheduler and --key"
    )


def _asked(addresses: Sequence[str], limit_ms: float, keyring: Keyring | None) -> StatusListed | None:
    try:
        return ask_status(addresses, limit_ms, server=SCHEDULER, keyring=keyring)
    except PeerLost:
        return None


def processes_in(run_dir: Path) -> list[ProcessReport]:
    """Every role that has a run file there."""
    found = run_files(run_dir) if run_dir.is_dir() else []
    return [
        ProcessReport(run_file.role_id, run_file.pid, is_alive(run_file.pid), run_file.addresses)
        for run_file in found
    ]


def endpoints_in(run_dir: Path) -> dict[str, list[str]]:
    """Where the living cluster can be reached: client, http, … of all frontends and gateways, control of the scheduler."""
    endpoints: dict[str, list[str]] = {}
    for run_file in run_files(run_dir):
        for purpose, addresses in run_file.addresses.items():
            told = next((_TOLD[prefix] for prefix in _TOLD if run_file.role_id.startswith(prefix)), ())
            if purpose in told:
                endpoints.setdefault(purpose, []).extend(addresses)
    return endpoints
