"""Where each role serves its page of metrics: `listen.metrics` for the first role, and one port further for each next one.

The order is schedulers, frontends, node agents, each in file order, so that a port says which role it is on whatever host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fabric.curve import host_of, is_loopback
from fabric.errors import ConfigError
from fabric.ids import frontend_id, role_id_of_node, scheduler_id
from roles.config.cluster import ClusterConfig
from roles.config.hosts import PORT_MAX, moved


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """A role's page. `address`: HOST:PORT as the file says it, at another host to be bound there."""

    role_id: str
    kind: str
    host: str
    address: str

    @property
    def is_on_loopback(self) -> bool:
        """Whether only its own host reaches it."""
        return is_loopback(host_of(self.address))

    def bound_at(self, own_address: str) -> str:
        """Where to listen on a host that others reach by that address."""
        return self.address if self.is_on_loopback else f"{own_address}:{self.address.rpartition(':')[2]}"


def metrics_pages(config: ClusterConfig) -> Iterator[MetricsPage]:
    """Of every role that has one. Raises ConfigError where the ports do not suffice."""
    first, places = config.listen.metrics, config.places
    roles = [
        *(("scheduler", scheduler_id(at), one.host, None) for at, one in enumerate(places.schedulers)),
        *(("frontend", frontend_id(at), one.host, one.metrics) for at, one in enumerate(places.frontends)),
        *(("node-agent", role_id_of_node(node.host), node.host, None) for node in config.nodes),
    ]
    for by, (kind, role_id, host, own) in enumerate(roles):
        if own is None and first is None:
            continue
        address = own or moved(first or "", by)
        port = int(address.rpartition(":")[2])
        if port > PORT_MAX:
            raise ConfigError(
                f"listen.metrics: is {first}; {role_id} would be at port {port}, and there are {PORT_MAX}: begin lower"
            )
        yield MetricsPage(role_id, kind, host, address)
