"""Which processes a cluster on one host has: their commands, and in which order they start and end."""

from __future__ import annotations

import os
from pathlib import Path

from deploy.local.events import RolePlan
from fabric.ids import PAGE_ID, frontend_id, gateway_id, role_id_of_node, scheduler_id
from roles.config.cluster import ClusterConfig
from roles.runtime.process import module_command

CORES_APART = 4  # client, frontend, scheduler, worker
# An agent's slices drain for 150 ms; then its workers have 2.5 s by message, 2 s by SIGTERM and 2 s by SIGKILL, and before each
# signal 5 s to leave a GPU that is shared through MPS; then its MPS daemons 8 s and 2 s (`AgentLimits`), and what they left 1 s. More is stuck.
# A frontend answers what it has for at most 5 s (`DRAIN_MS_MAX`). A scheduler waits up to 2 s for a standby that could be elected, and
# 0.8 s for it to be active (`HEIR_WITHIN_MS`, `HANDED_OVER_MS`, `SETTLED_MS`).
FRONTEND_STOP_MS, AGENT_STOP_MS, SCHEDULER_STOP_MS = 5_500.0, 28_000.0, 4_000.0
PAGE_STOP_MS = 6_000.0  # it may be looking at roles that end
GATEWAY_STOP_MS = 6_000.0  # likewise, and what its clients have sent when they could not know


def is_better_together(config: ClusterConfig) -> bool:
    """Whether the frontend is to share the scheduler's loop: on a host without a core for each busy process.

    With several frontends the scheduler is what they share, and stays apart. With a standby it may be lost alone.
    """
    return config.frontends == config.schedulers == 1 and len(os.sched_getaffinity(0)) < CORES_APART


def role_plans(
    config: ClusterConfig, config_path: Path, copy: Path, run_dir: Path, *, is_together: bool
) -> list[RolePlan]:
    """Every process of a cluster on this host, in the order of its start.

    `copy`: of what the file says, for roles that start when that has been moved or changed. `is_together`: the first frontend
    runs in the scheduler's process.
    """
    tenuto = module_command("roles.cli")
    common = (str(config_path.absolute()), "--here", "--copy", str(copy), "--run-dir", str(run_dir))
    beside = ("--with-frontend",) if is_together else ()
    schedulers = [
        RolePlan(
            scheduler_id(number),
            (*tenuto, "scheduler", *common, *_which(config, number, beside)),
            start_rank=0,
            stop_rank=2,
            stop_limit_ms=SCHEDULER_STOP_MS + (FRONTEND_STOP_MS if is_together else 0.0),
            restart_rank=2,
            kind="scheduler" if config.shards == 1 else f"scheduler of shard {place.shard}",
            frontend=frontend_id(0) if is_together and number == 0 else "",
        )
        for number, place in enumerate(config.places.schedulers)
    ]
    agents = [
        RolePlan(
            role_id_of_node(node.host),
            (*tenuto, "node-agent", "--node", node.host, *common),
            start_rank=1,
            stop_rank=1,
            stop_limit_ms=AGENT_STOP_MS,
            restart_rank=0,
            kind="node",
        )
        for node in config.nodes
    ]
    frontends = [
        RolePlan(
            frontend_id(index),
            (*tenuto, "frontend", "--index", str(index), *common),
            start_rank=1,
            stop_rank=0,
            stop_limit_ms=FRONTEND_STOP_MS,
            restart_rank=1,
            kind="frontend",
        )
        for index in range(1 if is_together else 0, config.frontends)
    ]
    clients = [  # of the others: last to start, first to stop
        RolePlan(
            role_id,
            (*tenuto, kind, *common),
            start_rank=2,
            stop_rank=-1,
            stop_limit_ms=stop_limit_ms,
            restart_rank=1,
            kind=kind,
        )
        for role_id, kind, stop_limit_ms, is_wanted in (
            (gateway_id(0), "gateway", GATEWAY_STOP_MS, config.gateway.is_wanted),
            (PAGE_ID, "page", PAGE_STOP_MS, config.listen.page is not None),
        )
        if is_wanted
    ]
    return [*schedulers, *agents, *frontends, *clients]


def _which(config: ClusterConfig, number: int, beside: tuple[str, ...]) -> tuple[str, ...]:
    """The arguments that say which scheduler it is."""
    if number == 0:
        return beside
    standby = ("--standby",) if config.places.schedulers[number].is_standby else ()
    return (*standby, "--index", str(number))
