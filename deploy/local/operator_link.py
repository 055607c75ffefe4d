"""Where operators ask `tenuto up` for changes of its processes, and how it asks those how they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from deploy.local.events import RoleAsked, RoleReported
from deploy.local.rolling import health_of
from fabric.errors import ConfigError, PeerLost
from fabric.ids import OPERATOR, PeerId, new_incarnation, peer_id
from fabric.link import Received
from fabric.messages import Ping, Pong, RestartRoles, RoleDrain, RoleDrainDryRun, StatusAsked, StatusListed
from fabric.sockets import DealerLink, RouterLink
from roles.runtime.environment import RunDir
from roles.runtime.loop.sources import LinkSource, TimedSource
from roles.runtime.process import read_run_file
from roles.runtime.run_directory import UP_SOCKET

ASK_EVERY_MS: Final = 100.0
HEAR_EVERY_MS: Final = 20.0
_ROLE: Final = PeerId("role")


def operator_link(run_dir: Path) -> RouterLink:
    """Listens in the run directory, which only its owner can enter."""
    return RouterLink.bind([RunDir(run_dir).ipc_address(UP_SOCKET)])


def operator_source(link: RouterLink, status: Callable[[], StatusListed]) -> LinkSource[RoleAsked]:
    """What operators ask for; their pings, and how this process is, are answered here."""

    def translate(received: Received) -> RoleAsked | None:
        match received.message:
            case RoleDrain() | RoleDrainDryRun() | RestartRoles() as request:
                return RoleAsked(received.peer, request)
            case Ping(number):
                link.send(received.peer, Pong(number))
            case StatusAsked():
                link.send(received.peer, status())
        return None

    return LinkSource(link, translate)


class RoleHealth(TimedSource[RoleReported]):
    """Asks one role how it is, again and again, for as long as `asks` names it.

    Roles come and go, and a look every 20 ms is soon enough.
    """

    def __init__(self, run_dir: Path, asks: Callable[[], str]) -> None:
        self._run_dir = run_dir
        self._asks = asks
        self._asked = ""
        self._link: DealerLink | None = None
        self._ask_at_ms = 0.0
        self._hear_at_ms = 0.0

    def close(self) -> None:
        """Ask nobody any more."""
        if self._link is not None:
            self._link.close()
        self._link, self._asked = None, ""

    @property
    def wake_at_ms(self) -> float | None:
        """The next look, while anybody is asked."""
        return self._hear_at_ms if self._asks() else None

    def take(self, limit: int, now_ms: float) -> Sequence[RoleReported]:
        """What it says."""
        self._hear_at_ms = now_ms + HEAR_EVERY_MS
        role_id = self._asks()
        if role_id != self._asked:
            self.close()
            self._asked, self._ask_at_ms = role_id, now_ms
        if not role_id:
            return ()
        if self._link is None:
            self._link = self._connect(role_id)
        if self._link is None:
            return ()
        if self._ask_at_ms <= now_ms and self._link.send(_ROLE, StatusAsked()):
            self._ask_at_ms = now_ms + ASK_EVERY_MS
        came = [one.message for one in self._link.receive(limit)]
        if self._link.take_lost():  # its next start may be elsewhere
            self._link.close()
            self._link = None
        return [
            RoleReported(role_id, health_of(message)) for message in came if isinstance(message, StatusListed)
        ]

    def _connect(self, role_id: str) -> DealerLink | None:
        found = read_run_file(self._run_dir / f"{role_id}.json")
        if found is None:
            return None
        addresses = found.addresses.get("control") or found.addresses.get("client")
        if not addresses:
            return None
        try:
            return DealerLink.connect(peer_id(OPERATOR, new_incarnation()), _ROLE, addresses)
        except (ConfigError, PeerLost):
            return None
