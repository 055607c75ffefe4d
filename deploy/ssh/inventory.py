"""What a configuration wants of each host: its roles with their commands, their ports, their keys and their extras."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from fabric.errors import ConfigError
from fabric.ids import frontend_id, role_id_of_node, scheduler_id
from fabric.keys import FRONTEND, SCHEDULER, key_file, principal_of_node
from roles.cli.whereabouts import require_keys
from roles.config.cluster import ClusterConfig
from roles.config.metrics_pages import metrics_pages

CONFIG_FILE: Final = "cluster.json"
_SOLVED: Final = ("ao-milp", "wsm-milp", "tenuto", "usher", "wao-usher", "wsm-usher")


class Rank(IntEnum):
    """The order in which roles start; they end the other way round."""

    AGENT = 0
    SCHEDULER = 1
    FRONTEND = 2


@dataclass(frozen=True, slots=True)
class RoleOnHost:
    """One role. `principal`: whose key it has. `arguments`: of the `tenuto` command, in the folder of its configuration.

    `port`: others reach it there. `page`: the address of its page of metrics, which depends on the roles before it.
    """

    role_id: str
    rank: Rank
    principal: str
    arguments: tuple[str, ...]
    port: int | None = None
    page: str | None = None


@dataclass(frozen=True, slots=True)
class HostWanted:
    """What one host is to run and to have. `keys`: files of the keys folder; `extras`: of the distribution.

    `needs_driver`: it has real GPUs; `needs_mps`: they are to be shared by NVIDIA's MPS.
    """

    host: str
    roles: tuple[RoleOnHost, ...]
    keys: tuple[str, ...]
    extras: tuple[str, ...]
    needs_driver: bool = False
    needs_mps: bool = False

    @property
    def ports(self) -> Mapping[str, int]:
        """By role id."""
        return {role.role_id: role.port for role in self.roles if role.port is not None}


@dataclass(frozen=True, slots=True)
class Inventory:
    """All hosts, in file order. `scheduler_hosts`: one of them knows whether the cluster is ready."""

    hosts: tuple[HostWanted, ...]
    scheduler_hosts: tuple[str, ...]

    @property
    def names(self) -> frozenset[str]:
        """Of the hosts."""
        return frozenset(one.host for one in self.hosts)

    def host(self, name: str) -> HostWanted:
        """Raises ConfigError for a host that the file does not have."""
        for one in self.hosts:
            if one.host == name:
                return one
        raise ConfigError(
            f"the file has no host {name!r}; it has {', '.join(one.host for one in self.hosts)}"
        )


def inventory_of(config: ClusterConfig) -> Inventory:
    """What each host is to be. Raises ConfigError for a file that names no hosts, or needs keys and has none."""
    if [node.host for node in config.nodes] == ["local"]:
        raise ConfigError("cluster.gpus is this host alone: list cluster.nodes, each with its host")
    require_keys(config)
    places = config.places
    scheduler_hosts = tuple(dict.fromkeys(one.host for one in places.schedulers))
    return Inventory(tuple(_wanted(config, host) for host in config.hosts), scheduler_hosts)


def not_started(config: ClusterConfig) -> Iterator[str]:
    """What `tenuto up` runs of this file and `tenuto deploy` does not: on which host it should be, the file does not say."""
    left = [
        *(["a gateway (cluster.gateway, listen.http, listen.grpc)"] if config.gateway.is_wanted else []),
        *(["the page (listen.page)"] if config.listen.page is not None else []),
    ]
    if left:
        yield f"not started on any host: {' and '.join(left)}; docs/operate/deploy.md says how to run it there"


def _wanted(config: ClusterConfig, host: str) -> HostWanted:
    places, nodes = config.places, [node for node in config.nodes if node.host == host]
    pages = {page.role_id: page.address for page in metrics_pages(config)}
    ports = places.ports(host)
    schedulers = [at for at, one in enumerate(places.schedulers) if one.host == host]
    frontends = [at for at, one in enumerate(places.frontends) if one.host == host]
    roles = [
        *(
            RoleOnHost(
                role_id_of_node(host),
                Rank.AGENT,
                principal_of_node(host),
                ("node-agent", CONFIG_FILE, "--node", host),
                page=pages.get(role_id_of_node(host)),
            )
            for _ in nodes
        ),
        *(
            RoleOnHost(
                scheduler_id(at),
                Rank.SCHEDULER,
                SCHEDULER,
                (
                    "scheduler",
                    CONFIG_FILE,
                    "--index",
                    str(at),
                    *(["--standby"] if places.schedulers[at].is_standby else []),
                ),
                places.schedulers[at].port,
                pages.get(scheduler_id(at)),
            )
            for at in schedulers
        ),
        *(
            RoleOnHost(
                frontend_id(at),
                Rank.FRONTEND,
                FRONTEND,
                ("frontend", CONFIG_FILE, "--index", str(at)),
                ports.get(frontend_id(at)),
                pages.get(frontend_id(at)),
            )
            for at in frontends
        ),
    ]
    is_real = any(node.device != "emulated" and node.gpus for node in nodes)
    is_solved = bool(schedulers) and (
        config.placement.name in _SOLVED or config.placement.options.get("subclusters", 1) != 1
    )
    principals = dict.fromkeys(role.principal for role in roles)
    on_cuda = [node for node in nodes if node.device == "cuda" and node.gpus]
    return HostWanted(
        host,
        tuple(roles),
        () if config.security.keys is None else tuple(key_file(one) for one in principals),
        (
            *(("worker",) if is_real else ()),
            *(("plan",) if is_solved else ()),
            *(("metrics",) if any(role.page is not None for role in roles) else ()),
        ),
        needs_driver=bool(on_cuda),
        needs_mps=any(node.mps for node in on_cuda),
    )
