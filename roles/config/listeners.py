"""Where a file says that something listens: no two at one port of a host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fabric.curve import host_of
from fabric.errors import ConfigError
from fabric.ids import frontend_id, scheduler_id
from fabric.policy_options import shown
from roles.config.cluster import ClusterConfig
from roles.config.hosts import moved
from roles.config.metrics_pages import metrics_pages


def check_listeners(config: ClusterConfig) -> None:
    """Raises ConfigError where two of a file's listeners would be at one port of a host."""
    check_apart(_listeners(config))


def check_apart(listeners: Iterable[tuple[str, str, str]]) -> None:
    """The same of any: what each is called, its host and its address."""
    taken: dict[tuple[str, str, str], str] = {}
    for what, host, address in listeners:
        port = address.rpartition(":")[2]
        if address.startswith("ipc://") or port == "0":
            continue
        by = host_of(address)
        place = (host, "127.0.0.1" if by in ("localhost", "lo") else by, port)
        if place in taken:
            raise ConfigError(f"{what}: is {shown(address)}, where {taken[place]} is")
        taken[place] = what


def _listeners(config: ClusterConfig) -> Iterator[tuple[str, str, str]]:
    """What the file calls it, its host and its address. Without places all is on one host, whatever its nodes are called."""
    places, listen = config.places, config.listen

    def on(host: str) -> tuple[str, str]:
        return (host, places.addresses.get(host, host)) if places.is_written else ("", "")

    for page in metrics_pages(config):
        host, own = on(page.host)
        address = page.bound_at(own) if places.is_written else page.address
        yield f"{page.role_id}'s page of metrics (listen.metrics and the ports above)", host, address
    for index, place in enumerate(places.frontends):
        host, own = on(place.host)
        address = places.client_address(index, own) if places.is_written else moved(listen.client, index)
        yield f"listen.client of {frontend_id(index)}", host, address
    for number, one in enumerate(places.schedulers):
        host = on(one.host)[0]
        if places.is_written:
            yield f"cluster.schedulers[{number}].port", host, places.control_address(number)
        if listen.control is not None:
            yield f"listen.control of {scheduler_id(number)}", host, moved(listen.control, number)
    if places.is_written and len(config.hosts) > 1:
        return  # on which one these are, the file does not say
    host = on(config.hosts[0])[0]
    for key, given in (
        ("http", config.gateway.http),
        ("grpc", config.gateway.grpc),
        ("page", listen.page),
    ):
        if given is not None:
            yield f"listen.{key}", host, given
