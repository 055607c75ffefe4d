"""What a host lacks, in one line each with what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from deploy.ssh.facts import HostFacts
from deploy.ssh.inventory import HostWanted, Inventory, Rank
from deploy.ssh.steps import Goods, megabytes
from fabric.ids import AGENT_PREFIX, FRONTEND_PREFIX, GATEWAY_PREFIX, SCHEDULER_PREFIX
from roles.config.hosts import DeployConfig

CLOCK_OFF_MS_MAX: Final = 2_000.0
OPEN_FILES_MIN: Final = 4_096
INSTALLED_TIMES: Final = 5
"""An installed wheel takes so many times its size, compiled code included; with room to spare."""
FREE_MIN: Final = 200 << 20
FREE_ONLINE: Final = 1 << 30
FREE_TORCH: Final = 8 << 30
_RANKS: Final = {
    AGENT_PREFIX: Rank.AGENT,
    SCHEDULER_PREFIX: Rank.SCHEDULER,
    FRONTEND_PREFIX: Rank.FRONTEND,
    GATEWAY_PREFIX: Rank.GATEWAY,
}


def problems_of_host(
    wanted: HostWanted, facts: HostFacts, goods: Goods, deploy: DeployConfig
) -> Iterator[str]:
    """What has to be mended first, each with what would mend it."""
    if not facts.machine.startswith("Linux"):
        yield f"runs {facts.machine}; Tenuto needs Linux"
    if not facts.has_venv:
        yield f"its Python {facts.python} makes no environments: install python3-venv there (or set deploy.python)"
    if not facts.is_writable:
        yield f"{facts.base} cannot be written there: set deploy.directory"
    if abs(facts.clock_off_ms) > CLOCK_OFF_MS_MAX:
        ahead = "ahead of" if facts.clock_off_ms > 0 else "behind"
        yield f"its clock is {abs(facts.clock_off_ms) / 1e3:.1f} s {ahead} this host's: start an NTP client on it"
    if not facts.has_installed(goods.own.version, wanted.extras):
        needed = _room_needed(wanted, facts, goods, deploy)
        if facts.free_bytes < needed:
            yield f"{megabytes(facts.free_bytes)} are free in {facts.base}; it needs {megabytes(needed)}: make room there"
    for role_id, taken in facts.taken.items():
        is_gateway = role_id.startswith(GATEWAY_PREFIX)
        keys = "listen.http, listen.grpc" if is_gateway else "cluster.schedulers[].port, listen.client"
        for port, holder in taken:
            if holder not in facts.roles:
                yield f"port {port} of {role_id} is taken by {holder}: end that, or choose another port ({keys})"
            elif _rank(holder) > _rank(role_id):
                yield (
                    f"port {port} of {role_id} is that of {holder}, which leaves it only after that: first run"
                    f" `tenuto deploy up` with another port for {role_id}, then with this one ({keys})"
                )
    if wanted.needs_driver and not facts.has_driver:
        yield "it has no NVIDIA driver, and the file gives it cuda devices: install one, or say device: emulated"
    if facts.open_files < OPEN_FILES_MIN:
        yield f"a process may open {facts.open_files} files there: allow {OPEN_FILES_MIN} or more (ulimit -Hn)"
    address = goods.addresses.get(wanted.host)
    if address is None:
        return
    same = next(host for host, one in goods.addresses.items() if one == address)
    if same != wanted.host:
        yield (
            f"its address {address} is that of {same}: are these two names of one host? Leave one of them out,"
            " or say with cluster.addresses where each is"
        )
    several = len(goods.addresses) > 1
    others = [one for host, one in goods.addresses.items() if host != wanted.host]
    if several and address.startswith("127.") and not all(one.startswith("127.") for one in others):
        yield f"its address is {address}, which other hosts cannot reach: set deploy.interface, or cluster.addresses"


def warnings_of_host(wanted: HostWanted, facts: HostFacts) -> Iterator[str]:
    """What goes without, but would be better with."""
    if wanted.needs_mps and not facts.has_mps:
        yield "nvidia-cuda-mps-control is not there: slices share its GPUs by time"
    if facts.manager == "supervisor" and not facts.has_cron:
        yield "it has neither systemd nor cron: after a reboot, run `tenuto deploy up` again"


def warnings_of_election(inventory: Inventory, wanted: HostWanted) -> Iterator[str]:
    """At the first scheduler's host: whether the loss of any one node leaves nobody who may schedule."""
    roles = [role for host in inventory.hosts for role in host.roles]
    schedulers, nodes = (sum(role.rank is rank for role in roles) for rank in (Rank.SCHEDULER, Rank.AGENT))
    if schedulers > 1 and nodes == 2 and wanted.host == inventory.scheduler_hosts[0]:
        yield (
            "with a standby more than half of the nodes have to be there, so of two both: list a third one,"
            " or no standby (docs/operate/availability.md)"
        )


def _rank(role_id: str) -> Rank:
    """By which roles start, and leave the ports that they had before."""
    return next(rank for prefix, rank in _RANKS.items() if role_id.startswith(prefix))


def _room_needed(wanted: HostWanted, facts: HostFacts, goods: Goods, deploy: DeployConfig) -> int:
    """Of an environment; of what it lacks, where it is there without an extra."""
    there = facts.versions.get(goods.own.version)
    if deploy.wheelhouse is None:
        return FREE_TORCH if "worker" in set(wanted.extras) - set(there or ()) else FREE_ONLINE
    wheels = [wheel for wheel in goods.wheels[wanted.host] if there is None or facts.lacks(wheel)]
    return FREE_MIN + INSTALLED_TIMES * sum(wheel.size for wheel in wheels)
