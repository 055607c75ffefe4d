"""Which role runs on which host, by which address others reach it there, and how the hosts are set up.

A file that lists `cluster.schedulers` or `cluster.frontends` *places* its roles: they are on several hosts, or at least
say on which one. Without these lists everything is on one host, `frontends` is a number, and addresses stay on it.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct, field

from fabric.errors import ConfigError
from fabric.policy_options import shown
from roles.config.checks import SCHEDULERS_MAX, check_endpoint, name_like, one_of, whole
from roles.config.sections import ClusterSection, DeploySection, FrontendSection, SchedulerSection

CONTROL_PORT: Final = 5550
CLIENT_PORT: Final = 5555
"""Of a host's first frontend; its next ones follow."""
FRONTENDS_MAX: Final = 1024
PORT_MAX: Final = 65_535
UNITS: Final = ("auto", "systemd", "supervisor")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_INTERFACE = re.compile(r"[A-Za-z0-9._@-]{1,15}")


class FrontendPlace(Struct, frozen=True):
    """A frontend's host, and where its clients come in. `client` None: the host's own address, at the usual port."""

    host: str
    client: str | None = None
    http: str | None = None
    metrics: str | None = None


class SchedulerPlace(Struct, frozen=True):
    """A scheduler's host, and the port of its control address. A standby takes over when the other one is gone."""

    host: str
    is_standby: bool = False
    port: int = CONTROL_PORT
    shard: int = 0


class Places(Struct, frozen=True):
    """Where the schedulers and frontends run. `is_written`: the file says so, else all of it is a default.

    `addresses`: by host, as the others reach it; who is not in it is found by its name.
    """

    schedulers: tuple[SchedulerPlace, ...]
    frontends: tuple[FrontendPlace, ...]
    addresses: Mapping[str, str] = field(default_factory=dict)
    is_written: bool = False

    def schedulers_of(self, shard: int) -> tuple[int, ...]:
        """The numbers of a shard's schedulers; the first one is the active one at a start."""
        return tuple(number for number, place in enumerate(self.schedulers) if place.shard == shard)

    def control_address(self, number: int) -> str:
        """Where other hosts reach a scheduler."""
        place = self.schedulers[number]
        return f"tcp://{self.addresses.get(place.host, place.host)}:{place.port}"

    def client_address(self, index: int, own_address: str) -> str:
        """Where frontend `index` listens for clients, on a host with that address."""
        place = self.frontends[index]
        earlier = sum(other.host == place.host for other in self.frontends[:index])
        return moved(place.client or f"tcp://{own_address}:{CLIENT_PORT}", earlier)

    def ports(self, host: str) -> dict[str, int]:
        """The TCP ports that must be free on a host, by role id's first part and number."""
        found = {f"scheduler-{at}": one.port for at, one in enumerate(self.schedulers) if one.host == host}
        for index, place in enumerate(self.frontends):
            address = self.client_address(index, "")
            port = int(address.rpartition(":")[2]) if address.startswith("tcp://") else 0
            if place.host == host and port:
                found[f"frontend-{index}"] = port
        return found


ONE_HOST: Final = Places((SchedulerPlace("local"),), (FrontendPlace("local"),))


class DeployConfig(Struct, frozen=True):
    """How `tenuto deploy` sets hosts up.

    `user`, `port`: of ssh, None: what ssh itself says. `directory`: on the host, relative to the user's home.
    `wheelhouse`: a folder of wheels here; None: hosts fetch what they need from their package index.
    `interface`: whose address roles bind; None: the one by which ssh reached the host, by hand that of the host's name. `env`: of every role.
    """

    user: str | None = None
    port: int | None = None
    python: str = "python3"
    directory: str = ".tenuto"
    wheelhouse: Path | None = None
    units: str = "auto"
    interface: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)


DEPLOY_DEFAULT: Final = DeployConfig()


def checked_places(section: ClusterSection, first_host: str, client: str | None) -> Places:
    """The places that a file says. `client`: its `listen.client`, None where it says none."""
    schedulers = _schedulers(section.schedulers, first_host, section.shards)
    frontends = _frontends(section.frontends, schedulers[0].host, client)
    for host, address in section.addresses.items():
        where = f"cluster.addresses.{name_like(host, 'cluster.addresses')}"
        try:
            found = ipaddress.IPv4Address(address)
        except ValueError as error:
            raise ConfigError(f"{where}: is {shown(address)}; it must be an IPv4 address") from error
        if found.is_unspecified or found.is_multicast:
            raise ConfigError(f"{where}: is {shown(address)}; it must be the address of one host")
    is_written = not (isinstance(section.schedulers, int) and isinstance(section.frontends, int))
    places = Places(schedulers, frontends, section.addresses, is_written)
    placed = [*(one.host for one in schedulers), *(one.host for one in frontends)]
    for host in dict.fromkeys(placed):
        ports = places.ports(host)
        for role_id, port in ports.items():
            other = next(one for one, its in ports.items() if its == port)
            if other != role_id:
                raise ConfigError(f"{role_id} and {other} are both at port {port} of {host}")
            if port > PORT_MAX:
                raise ConfigError(f"{role_id}: would be at port {port} of {host}; there are {PORT_MAX}")
    return places


def checked_deploy(section: DeploySection, base_dir: Path) -> DeployConfig:
    """The values of `deploy`, checked."""
    if section.user is not None:
        name_like(section.user, "deploy.user")
    if section.port is not None:
        whole(section.port, "deploy.port", 1, PORT_MAX)
    for key, text in (("python", section.python), ("directory", section.directory)):
        if (
            not re.fullmatch(r"[A-Za-z0-9_./~+-]{1,200}", text)
            or text.startswith("-")
            or ".." in text.split("/")
        ):
            raise ConfigError(
                f"deploy.{key}: is {shown(text)}; it must be a path of letters, digits, '.', '_', '-'"
            )
    wheelhouse = None
    if section.wheelhouse is not None:
        wheelhouse = base_dir / Path(section.wheelhouse).expanduser()
    one_of(section.units, UNITS, "deploy.units")
    if section.interface is not None and not _INTERFACE.fullmatch(section.interface):
        raise ConfigError(f"deploy.interface: is {shown(section.interface)}; it must be a name such as eth0")
    for name, value in section.env.items():
        if not _VARIABLE.fullmatch(name):
            raise ConfigError(f"deploy.env: {shown(name)} is no name of a variable")
        if any(ord(letter) < 32 for letter in value):
            raise ConfigError(f"deploy.env.{name}: has a line end or another control character in it")
    return DeployConfig(
        section.user,
        section.port,
        section.python,
        section.directory,
        wheelhouse,
        section.units,
        section.interface,
        dict(section.env),
    )


def moved(address: str, by: int) -> str:
    """An address `by` ports (or names) further, so that several fit on one host; port 0 stays 0."""
    if by == 0:
        return address
    if address.startswith("ipc://"):
        return f"{address}.{by}"
    host, _, port = address.rpartition(":")
    return address if port == "0" else f"{host}:{int(port) + by}"


def _schedulers(
    written: int | Sequence[SchedulerSection], first_host: str, shards: int
) -> tuple[SchedulerPlace, ...]:
    """A number is of each shard: the active ones first, so that shard k begins with scheduler k."""
    where = "cluster.schedulers"
    if isinstance(written, int):
        count = whole(written, where, 1, SCHEDULERS_MAX)
        return tuple(
            SchedulerPlace(first_host, at >= shards, CONTROL_PORT - at, at % shards)
            for at in range(count * shards)
        )
    whole(len(written), f"the length of {where}", 1, SCHEDULERS_MAX * shards)
    places: list[SchedulerPlace] = []
    seen: Counter[int] = Counter()
    for at, one in enumerate(written):
        whole(one.shard, f"{where}[{at}].shard", 0, shards - 1)
        if one.standby != (seen[one.shard] > 0):
            of_shard = "" if shards == 1 else f" of shard {one.shard}"
            right = (
                f"only the first one{of_shard} is active"
                if seen[one.shard]
                else f"the first one{of_shard} is the active one at a start"
            )
            raise ConfigError(f"{where}[{at}].standby: is {shown(one.standby)}; {right}")
        seen[one.shard] += 1
        if seen[one.shard] > SCHEDULERS_MAX:
            raise ConfigError(f"{where}: shard {one.shard} has more than {SCHEDULERS_MAX}")
        whole(one.port, f"{where}[{at}].port", 1, PORT_MAX)
        host = name_like(one.host, f"{where}[{at}].host")
        places.append(SchedulerPlace(host, one.standby, one.port, one.shard))
    lacking = next((shard for shard in range(shards) if not seen[shard]), None)
    if lacking is not None:
        raise ConfigError(f"{where}: none is of shard {lacking}; each of the {shards} shards needs one")
    return tuple(places)


def _frontends(
    written: int | Sequence[FrontendSection], scheduler_host: str, client: str | None
) -> tuple[FrontendPlace, ...]:
    if isinstance(written, int):
        return (FrontendPlace(scheduler_host, client),) * whole(
            written, "cluster.frontends", 1, FRONTENDS_MAX
        )
    whole(len(written), "the number of cluster.frontends", 1, FRONTENDS_MAX)
    places = []
    for at, one in enumerate(written):
        where = f"cluster.frontends[{at}]"
        listen = one.listen
        if listen.client is not None:
            check_endpoint(listen.client, f"{where}.listen.client", schemes=("tcp", "ipc"))
        for key, value in (("http", listen.http), ("metrics", listen.metrics)):
            if value is not None:
                check_endpoint(value, f"{where}.listen.{key}", schemes=())
        host = name_like(one.host, f"{where}.host")
        places.append(FrontendPlace(host, listen.client or client, listen.http, listen.metrics))
    return tuple(places)
