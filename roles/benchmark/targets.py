"""Where a load goes, and how many processes send it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from roles.config.cluster import ClusterConfig


def one_of_each(addresses: Sequence[str]) -> tuple[str, ...]:
    """One address of every frontend: on this host each has exactly one that is ipc; through a tunnel it is the only one."""
    by_ipc = tuple(address for address in addresses if address.startswith("ipc://"))
    return by_ipc or tuple(addresses)


def default_processes(config: ClusterConfig) -> int:
    """How many should send: half of the cores, and no fewer than there are frontends to send to."""
    return max(config.frontends, len(os.sched_getaffinity(0)) // 2)
