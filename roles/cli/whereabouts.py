"""What a role needs to know of its place: its own address, where the scheduler is, and with which key to say so.

A file that places nothing (see `roles/config/hosts.py`) means this host: roles find each other in the run directory, and
their TCP addresses are on loopback.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fabric.errors import ConfigError
from fabric.ids import frontend_id
from fabric.keys import FRONTEND, Keyring
from roles.config.cluster import ClusterConfig
from roles.config.hosts import moved
from roles.runtime.core import SCHEDULER_ID
from roles.runtime.environment import RunDir
from roles.runtime.host_address import host_named_here, own_address
from roles.runtime.loop.local_scheduler import RUN_FILE
from roles.runtime.process import read_run_file

if TYPE_CHECKING:
    from roles.frontend.shell import FrontendOptions
    from roles.node_agent.shell import AgentOptions

LOOPBACK = "127.0.0.1"


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

    def scheduler(self, host: str | None) -> Sequence[str]:
        """The control addresses beside the run directory's."""
        if not self._is_placed:
            return ()
        hosts = [one.host for one in self._places.schedulers]
        own = chosen_host(host, hosts, "--host")
        port = self._places.control_address(own).rpartition(":")[2]
        return (f"tcp://{self._address(own)}:{port}",)

    def frontend(
        self, index: int, scheduler_address: str | None = None, *, is_beside: bool = False
    ) -> FrontendOptions:
        """How to run a frontend. `is_beside`: in the scheduler's process, so that no address of that is needed."""
        from roles.frontend.shell import FrontendOptions  # noqa: PLC0415  not every role needs it

        keys = self._config.security.keys
        keyring = None if keys is None else Keyring.of_folder(keys, FRONTEND)
        own = FrontendOptions(frontend_id(index), self._run_dir, (), keyring=keyring)
        given = (scheduler_address,) if scheduler_address else ()
        if not self._is_placed:
            client = moved(self._config.listen.client, index)
            scheduler = given or (() if is_beside else self._running_scheduler())
            return replace(own, client_addresses=(client,), scheduler_addresses=scheduler)
        host = self._places.frontends[index].host
        address = self._address(host)
        return replace(
            own,
            host=address,
            client_addresses=(self._places.client_address(index, address),),
            scheduler_addresses=given or self._scheduler_seen_from(host),
        )

    def node(self, host: str) -> AgentOptions:
        """How to run the agent of a node."""
        from roles.node_agent.shell import AgentOptions  # noqa: PLC0415  likewise

        if not self._is_placed:
            return AgentOptions()
        is_beside = host == self._places.schedulers[0].host
        return AgentOptions(
            address=self._address(host),
            scheduler_addresses=() if is_beside else self._scheduler_seen_from(host),
        )

    def _address(self, host: str) -> str:
        return own_address(host, self._places.addresses.get(host), self._config.deploy.interface)

    def _scheduler_seen_from(self, host: str) -> Sequence[str]:
        """By ipc on its own host, whether it runs already or not; else by TCP."""
        active = self._places.schedulers[0].host
        if host == active:
            return (RunDir(self._run_dir).ipc_address(f"{SCHEDULER_ID}.control"),)
        return (self._places.control_address(active),)

    def _running_scheduler(self) -> Sequence[str]:
        path = self._run_dir / RUN_FILE
        run_file = read_run_file(path)
        if run_file is None:
            raise ConfigError(
                f"no scheduler serves in {self._run_dir} (there is no {path.name}): start it first, or give --scheduler"
            )
        return run_file.addresses["control"]


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
