"""What a configuration wants of each host: its roles with their commands, their ports, their keys and their extras."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from fabric.curve import host_of, is_loopback
from fabric.errors import ConfigError
from fabric.ids import frontend_id, gateway_id, role_id_of_node, scheduler_id
from fabric.keys import FRONTEND, SCHEDULER, key_file, principal_of_node
from roles.cli.whereabouts import require_keys
from roles.config.cluster import ClusterConfig
from roles.config.gateway import NO_GATEWAY
from roles.config.hosts import moved
from roles.config.listeners import check_apart
from roles.config.metrics_pages import metrics_pages

CONFIG_FILE: Final = "cluster.json"
_SOLVED: Final = ("ao-milp", "wsm-milp", "tenuto", "usher", "wao-usher", "wsm-usher")


class Rank(IntEnum):
    """The order in which roles start; they end the other way round."""

    AGENT = 0
    SCHEDULER = 1
    FRONTEND = 2
    GATEWAY = 3


@dataclass(frozen=True, slots=True)
class RoleOnHost:
    """One role. `principal`: whose key it has; None: none, it asks roles of its host alone. `arguments`: of the `tenuto` command, in the folder of its configuration.

    `ports`: others reach it there. `page`: the address of its page of metrics, which depends on the roles before it.
    """

    role_id: str
    rank: Rank
    principal: str | None
    arguments: tuple[str, ...]
    ports: tuple[int, ...] = ()
    page: str | None = None


@dataclass(frozen=True, slots=True)
class HostWanted:
    """What one host is to run and to have. `keys`: files of the keys folder; `secrets`: those of a gateway, as they are called beside these; `extras`: of the distribution.

    `needs_driver`: it has real GPUs; `needs_mps`: they are to be shared by NVIDIA's MPS.
    """

    host: str
    roles: tuple[RoleOnHost, ...]
    keys: tuple[str, ...]
    extras: tuple[str, ...]
    secrets: tuple[str, ...] = ()
    needs_driver: bool = False
    needs_mps: bool = False

    @property
    def ports(self) -> Mapping[str, Sequence[int]]:
        """By role id."""
        return {role.role_id: role.ports for role in self.roles if role.ports}

    @property
    def gateway(self) -> RoleOnHost | None:
        """The one that asks its frontends."""
        return next((role for role in self.roles if role.rank is Rank.GATEWAY), None)


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
    hosts = tuple(_wanted(config, host) for host in config.hosts)
    for one in hosts:
        if one.gateway is not None:
            address = places.addresses.get(one.host, one.host)
            check_apart(_listeners(config, one, address))
    return Inventory(hosts, scheduler_hosts)


def gateway_file(key: str) -> str:
    """What a file that `cluster.gateway` names is called in a host's keys folder."""
    return f"gateway.{key}"


def not_started(config: ClusterConfig) -> Iterator[str]:
    """What `tenuto up` runs of this file and `tenuto deploy` does not: on which host it should be, the file does not say."""
    if config.gateway.is_wanted and not config.gateway.may_be_reached:
        yield (
            "not started on any host: a gateway (listen.http, listen.grpc), which others would reach there; give"
            " cluster.gateway a token_file (docs/operate/deploy.md)"
        )
    if config.listen.page is not None:
        yield "not started on any host: the page (listen.page); docs/operate/deploy.md says how to run it there"


def _listeners(config: ClusterConfig, wanted: HostWanted, address: str) -> Iterator[tuple[str, str, str]]:
    """What listens on a host with that address, for `check_apart`."""
    of_gateway = [f"listen.{name}" for name in config.gateway.ports]
    for at, place in enumerate(config.places.schedulers):
        if place.host == wanted.host and config.listen.control is not None:
            yield f"listen.control of {scheduler_id(at)}", wanted.host, moved(config.listen.control, at)
    for role in wanted.roles:
        whats = of_gateway if role.rank is Rank.GATEWAY else [f"the port of {role.role_id}"]
        for what, port in zip(whats, role.ports, strict=False):  # a frontend may have none
            yield what, wanted.host, f"{address}:{port}"
        if role.page is not None:
            is_near = is_loopback(host_of(role.page))
            page = role.page if is_near else f"{address}:{role.page.rpartition(':')[2]}"
            yield f"the page of metrics of {role.role_id}", wanted.host, page


def _wanted(config: ClusterConfig, host: str) -> HostWanted:
    places, nodes = config.places, [node for node in config.nodes if node.host == host]
    pages = {page.role_id: page.address for page in metrics_pages(config)}
    ports = {role_id: (port,) for role_id, port in places.ports(host).items()}
    schedulers = [at for at, one in enumerate(places.schedulers) if one.host == host]
    frontends = [at for at, one in enumerate(places.frontends) if one.host == host]
    gateway = config.gateway if frontends and config.gateway.may_be_reached else NO_GATEWAY
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
                ports[scheduler_id(at)],
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
                ports.get(frontend_id(at), ()),
                pages.get(frontend_id(at)),
            )
            for at in frontends
        ),
    ]
    if gateway.is_wanted:
        arguments = ("gateway", CONFIG_FILE, "--node", host)
        roles.append(
            RoleOnHost(gateway_id(host), Rank.GATEWAY, None, arguments, tuple(gateway.ports.values()))
        )
    is_real = any(node.device != "emulated" and node.gpus for node in nodes)
    is_solved = bool(schedulers) and (
        config.placement.name in _SOLVED or config.placement.options.get("subclusters", 1) != 1
    )
    principals = dict.fromkeys(role.principal for role in roles if role.principal is not None)
    on_cuda = [node for node in nodes if node.device == "cuda" and node.gpus]
    return HostWanted(
        host,
        tuple(roles),
        () if config.security.keys is None else tuple(key_file(one) for one in principals),
        (
            *(("worker",) if is_real else ()),
            *(("plan",) if is_solved else ()),
            *(("metrics",) if any(role.page is not None for role in roles) else ()),
            *(("gateway",) if gateway.is_wanted else ()),
        ),
        tuple(map(gateway_file, gateway.files)),
        needs_driver=bool(on_cuda),
        needs_mps=any(node.mps for node in on_cuda),
    )
