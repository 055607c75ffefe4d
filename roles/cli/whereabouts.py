"""What a role needs to know of its place: its own address, where the scheduler is, and with which key to say so.

A file that places nothing (see `roles/config/hosts.py`) means this host: roles find each other in the run directory, and
their TCP addresses are on loopback.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from fabric.errors import ConfigError
from fabric.ids import (
    FRONTEND_NAME_BYTES_MAX,
    FRONTEND_PREFIX,
    frontend_id,
    role_id_of_node,
    scheduler_id,
)
from fabric.keys import FRONTEND, Keyring
from fabric.policy_options import shown
from roles.config.checks import name_like
from roles.config.cluster import ClusterConfig
from roles.config.gateway import GatewayConfig, check_listener
from roles.config.hosts import moved
from roles.config.metrics_pages import metrics_pages
from roles.config.read_config import listen_config
from roles.config.sections import ListenSection
from roles.runtime.environment import RunDir
from roles.runtime.host_address import host_named_here, own_address
from roles.runtime.process import read_run_file

if TYPE_CHECKING:
    from roles.frontend.shell import FrontendOptions
    from roles.node_agent.shell import AgentOptions
    from roles.scheduler.surroundings import SchedulerAddresses


class Whereabouts:
    """Of the roles in one run directory. `is_here`: everything is on this host, wherever the file places it.

    Raises ConfigError for a file that places roles on several hosts, with addresses that need keys, and has none.
    """

    def __init__(self, config: ClusterConfig, run_dir: Path, *, is_here: bool) -> None:
        self._config = config
        self._places = config.places
        self._run_dir = run_dir
        self._is_placed = self._places.is_written and not is_here
        if self._is_placed:
            require_keys(config)

    def _metrics(self, role_id: str, given: str | None) -> str | None:
        """Where a role serves its page of metrics: as the command line says, else the file; None: nowhere."""
        if given is not None:
            listen_config(ListenSection(metrics=given), has_keys=True, prefix="--")
            return given
        for page in metrics_pages(self._config):
            if page.role_id == role_id:
                if not self._is_placed or page.is_on_loopback:
                    return page.address
                return page.bound_at(self._address(page.host))
        return None

    def scheduler(self, number: int, metrics: str | None = None) -> SchedulerAddresses:
        """Where a scheduler serves beside the run directory, and where it finds those of other hosts.

        `metrics`: where its page of metrics is, instead of where the file says. Raises ConfigError where nobody can listen.
        """
        from roles.scheduler.surroundings import SchedulerAddresses  # noqa: PLC0415  not every role needs it

        page = self._metrics(scheduler_id(number), metrics)
        if not self._is_placed:
            return SchedulerAddresses(metrics=page)
        place = self._places.schedulers[number]
        own = (f"tcp://{self._address(place.host)}:{place.port}",)
        return SchedulerAddresses(own, self._schedulers_elsewhere(place.host), page)

    def frontend(
        self,
        index: int,
        scheduler_given: Sequence[str] = (),
        *,
        client: str | None = None,
        name: str | None = None,
        metrics: str | None = None,
        is_beside: bool = False,
    ) -> FrontendOptions:
        """How to run a frontend.

        `name`: its own, where several are at that one place of the file. `client`, `metrics`: where clients come in and its page of metrics
        is, instead of where the file says. `is_beside`: in the scheduler's process, so that no
        address of that is needed. Raises ConfigError for a `client` where nobody can listen.
        """
        from roles.frontend.shell import FrontendOptions  # noqa: PLC0415  not every role needs it

        keys = self._config.security.keys
        keyring = None if keys is None else Keyring.of_folder(keys, FRONTEND)
        heartbeats = self._config.heartbeats
        shards = tuple(place.shard for place in self._places.schedulers)
        own = FrontendOptions(
            frontend_id(index if name is None else name),
            self._run_dir,
            (),
            keyring=keyring,
            metrics=self._metrics(frontend_id(index), metrics),
            heartbeats=heartbeats,
            scheduler_shards=shards,
            applications=self._config.served_applications(),
        )
        if client is not None:
            given_client = ListenSection(client=client)
            client = listen_config(given_client, has_keys=keys is not None, prefix="--").client
        given = [(address,) for address in scheduler_given]
        if given and len(given) != len(shards) and self._config.shards > 1:
            raise ConfigError(
                f"--scheduler: is there {len(given)} times; FILE has {len(shards)} schedulers of"
                f" {self._config.shards} shards: give the address of each, in their order"
            )
        if given and self._config.shards == 1:
            own = replace(own, scheduler_shards=())
        if not self._is_placed:
            client = client or moved(self._config.listen.client, index)
            if not given and not is_beside:
                self._require_scheduler()
            found = given or self._running_schedulers()
            return replace(own, client_addresses=(client,), scheduler_addresses=found)
        host = self._places.frontends[index].host
        address = self._address(host)
        return replace(
            own,
            host=address,
            client_addresses=(client or self._places.client_address(index, address),),
            scheduler_addresses=given or self._schedulers_seen_from(host),
        )

    def clients(self, host: str | None, *, is_everywhere: bool) -> Sequence[str]:
        """The addresses of frontends as a client on that host reaches them: by ipc there, else by TCP.

        `host` None: one without roles. `is_everywhere`: of those on other hosts too.
        """
        run_dir, places = RunDir(self._run_dir), self._places
        found = []
        for index, place in enumerate(places.frontends):
            if not self._is_placed or place.host == host:
                found.append(run_dir.ipc_address(f"{frontend_id(index)}.client"))
            elif is_everywhere:
                found.append(places.client_address(index, places.addresses.get(place.host, place.host)))
        return found

    def gateway(self, host: str, given: Mapping[str, str]) -> GatewayConfig:
        """Where the gateway of a host with frontends listens, but for protocols whose address is `given`.

        Raises ConfigError for another host, and where others reach it and nobody needs a token.
        """
        hosts = dict.fromkeys(place.host for place in self._places.frontends)
        if host not in hosts:
            raise ConfigError(
                f"--node: the file has no frontend on {shown(host)}; it has some on {', '.join(hosts)}"
            )
        found = replace(self._config.gateway.at(self._address(host)), **given)
        for address in filter(None, (found.http, found.grpc)):
            check_listener(address, "--node", has_token=found.token_file is not None)
        return found

    def node(self, host: str, metrics: str | None = None) -> AgentOptions:
        """How to run the agent of a node. `metrics` as for a frontend."""
        from roles.node_agent.shell import AgentOptions  # noqa: PLC0415  likewise

        metrics = self._metrics(role_id_of_node(host), metrics)
        if not self._is_placed:
            return AgentOptions(metrics=metrics)
        return AgentOptions(
            address=self._address(host),
            scheduler_addresses=self._schedulers_elsewhere(host),
            metrics=metrics,
        )

    def _address(self, host: str) -> str:
        return own_address(host, self._places.addresses.get(host), self._config.deploy.interface)

    def _schedulers_seen_from(self, host: str) -> Sequence[Sequence[str]]:
        """Of each: by ipc on its own host, whether it runs already or not; else by TCP."""
        return [
            (self._by_ipc(number) if place.host == host else self._places.control_address(number),)
            for number, place in enumerate(self._places.schedulers)
        ]

    def _schedulers_elsewhere(self, host: str) -> Mapping[str, Sequence[str]]:
        return {
            scheduler_id(number): addresses
            for number, addresses in enumerate(self._schedulers_seen_from(host))
            if self._places.schedulers[number].host != host
        }

    def _by_ipc(self, number: int) -> str:
        return RunDir(self._run_dir).ipc_address(f"{scheduler_id(number)}.control")

    def _running_schedulers(self) -> Sequence[Sequence[str]]:
        """Of each; where one that does not run yet will listen."""
        return [
            found.addresses["control"]
            if (found := read_run_file(self._run_dir / f"{scheduler_id(number)}.json")) is not None
            else (self._by_ipc(number),)
            for number in range(self._config.schedulers)
        ]

    def _require_scheduler(self) -> None:
        names = [f"{scheduler_id(number)}.json" for number in range(self._config.schedulers)]
        if not any((self._run_dir / name).exists() for name in names):
            raise ConfigError(
                f"no scheduler serves in {self._run_dir} (there is no {names[0]}): start it first, or give --scheduler"
            )


def require_keys(config: ClusterConfig) -> None:
    """Raises ConfigError for a cluster on several hosts whose addresses others can reach, without keys."""
    addresses = config.places.addresses
    is_loopback = all(addresses.get(host, "").startswith("127.") for host in config.hosts)
    if config.security.keys is None and not is_loopback:
        raise ConfigError(
            f"the roles are on {', '.join(config.hosts)}, and others can reach them there: that needs keys"
            " (tenuto keys create DIRECTORY --config FILE, and security: {keys: DIRECTORY})"
        )


def chosen_host(given: str | None, hosts: Sequence[str], option: str) -> str:
    """The host that the option names, else the only one, else the one that this machine is called."""
    found = given or (hosts[0] if len(hosts) == 1 else host_named_here(hosts))
    if found is None:
        raise ConfigError(f"which host is this one? Give {option}: one of {', '.join(hosts)}")
    return found


def index_of_scheduler(config: ClusterConfig, given: int | None, *, is_standby: bool, is_here: bool) -> int:
    """Which scheduler is meant; ConfigError for one that the file does not have."""
    number = (config.shards if is_standby else 0) if given is None else given
    if given is None and config.places.is_written and not is_here:
        hosts = [one.host for one in config.places.schedulers]
        number = hosts.index(chosen_host(None, tuple(dict.fromkeys(hosts)), "--index"))
    if number >= config.schedulers:
        raise ConfigError(
            f"cluster.schedulers: is {config.schedulers}; with scheduler {number} it must be over {number}"
        )
    return number


def check_frontend_name(name: str) -> None:
    """Raises ConfigError for a name that a scheduler would refuse, or that another one's number is."""
    name_like(name, "--name")
    if name.isdigit():
        raise ConfigError(f"--name: is {name}, the number of a frontend of the file: give --index")
    if len(frontend_id(name)) > FRONTEND_NAME_BYTES_MAX:
        most = FRONTEND_NAME_BYTES_MAX - len(FRONTEND_PREFIX)
        raise ConfigError(f"--name: has {len(name)} letters; a frontend's name may have {most}")


def index_of_frontend(config: ClusterConfig, given: int | None, *, is_here: bool) -> int:
    """Which frontend is meant; ConfigError for one that the file does not have."""
    places = config.places.frontends
    if given is not None:
        if given >= len(places) and config.places.is_written and not is_here:
            raise ConfigError(f"there is no frontend {given}; the file has {len(places)}, the first one is 0")
        return given
    if not config.places.is_written or is_here:
        return 0
    host = chosen_host(None, tuple(dict.fromkeys(one.host for one in places)), "--index")
    own = [index for index, one in enumerate(places) if one.host == host]
    if len(own) > 1:
        raise ConfigError(f"{host} has {len(own)} frontends: give --index, one of {', '.join(map(str, own))}")
    return own[0]
