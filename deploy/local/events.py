"""What `tenuto up` hears and does: the events and actions of its core, and the plan of a role."""

from __future__ import annotations

from msgspec import Struct, field

from deploy.local.rolling import Health
from fabric.ids import PeerId
from fabric.messages import Changed, RoleRequest
from roles.runtime.core import Tick
from roles.runtime.process_events import ProcessExited, StopAsked, Warn
from roles.runtime.restarts import RestartRule


class RolePlan(Struct, frozen=True):
    """A role to run. `start_rank`: lower ones first; `stop_limit_ms`: from SIGTERM to SIGKILL.

    `restart_rank`: lower ones first in a rolling restart. What another one of its kind stands in for goes first: node
    agents, then frontends, and schedulers last.
    """

    role_id: str
    command: tuple[str, ...]
    start_rank: int
    stop_rank: int
    stop_limit_ms: float
    restart_rank: int = 0
    kind: str = ""
    """What the role is, such as `frontend` or `scheduler of shard 1`. Roles of one kind stand in for one another while
    one of them is down; empty: nobody needs to stand in for this one."""
    frontend: str = ""
    """The frontend that runs in the same process: it comes and goes with this role."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """All kinds of which its process is one, and for which another has to stand in when it ends."""
        return tuple(kind for kind in (self.kind, "frontend" if self.frontend else "") if kind)


class SupervisorLimits(Struct, frozen=True):
    """Bounds, in ms."""

    serve_ms: float = 60_000.0  # from spawn to run file
    kill_ms: float = 2_000.0
    restart: RestartRule = field(default_factory=RestartRule)


class RoleServes(Struct, frozen=True):
    """The living process of that role has written its run file."""

    role_id: str


class Settled(Struct, frozen=True):
    """Every slice is ready or has failed. `nothing_serves`: why no model is served, where none is."""

    nothing_serves: str = ""


class SpawnRole(Struct, frozen=True):
    """Start that role's process."""

    role_id: str
    command: tuple[str, ...]


class TerminateRole(Struct, frozen=True):
    """SIGTERM."""

    role_id: str


class KillRole(Struct, frozen=True):
    """SIGKILL."""

    role_id: str


class Announce(Struct, frozen=True):
    """Everything serves: say so, once."""


class AnnounceEnd(Struct, frozen=True):
    """Everything ends: say so, that nobody who wants that too hurries it."""


class SupervisorOutcome(Struct, frozen=True):
    """How it ended. `reason` is empty for a stop that was asked for."""

    exit_code: int
    reason: str


class RoleAsked(Struct, frozen=True):
    """An operator asks for a change of the processes, or what would become of one."""

    peer: PeerId
    request: RoleRequest


class RoleReported(Struct, frozen=True):
    """A role says how it is."""

    role_id: str
    health: Health


class Reply(Struct, frozen=True):
    """To an operator: what became of what was asked for."""

    peer: PeerId
    message: Changed


SupervisorEvent = ProcessExited | RoleServes | RoleAsked | RoleReported | Settled | StopAsked | Tick
SupervisorAction = SpawnRole | TerminateRole | KillRole | Announce | AnnounceEnd | Reply | Warn
