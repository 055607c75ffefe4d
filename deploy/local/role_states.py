"""One role of `tenuto up`: the states of its process, and what is remembered of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from deploy.local.events import RolePlan
from roles.runtime.restarts import Restarts


class RoleState(Enum):
    """Where a role's process is in its life."""

    WAITING = auto()  # no process: for its rank, or for its next start
    STARTING = auto()  # no run file yet
    SERVING = auto()
    DRAINING = auto()  # asked to end, to be started again or kept down
    TERMINATING = auto()
    KILLED = auto()
    GONE = auto()  # for good


class RoleTransition(Enum):
    """What moves a role on."""

    START = auto()
    SERVES = auto()
    DRAIN = auto()
    END = auto()
    OVERDUE = auto()
    EXITED = auto()


NEXT: Final[Mapping[tuple[RoleState, RoleTransition], RoleState]] = {
    (RoleState.WAITING, RoleTransition.START): RoleState.STARTING,
    (RoleState.WAITING, RoleTransition.END): RoleState.GONE,
    (RoleState.STARTING, RoleTransition.SERVES): RoleState.SERVING,
    (RoleState.STARTING, RoleTransition.EXITED): RoleState.WAITING,
    (RoleState.STARTING, RoleTransition.DRAIN): RoleState.DRAINING,
    (RoleState.STARTING, RoleTransition.END): RoleState.TERMINATING,
    (RoleState.STARTING, RoleTransition.OVERDUE): RoleState.KILLED,
    (RoleState.SERVING, RoleTransition.EXITED): RoleState.WAITING,
    (RoleState.SERVING, RoleTransition.END): RoleState.TERMINATING,
    (RoleState.SERVING, RoleTransition.DRAIN): RoleState.DRAINING,
    (RoleState.DRAINING, RoleTransition.EXITED): RoleState.WAITING,
    (RoleState.DRAINING, RoleTransition.OVERDUE): RoleState.KILLED,
    (RoleState.DRAINING, RoleTransition.END): RoleState.TERMINATING,
    (RoleState.TERMINATING, RoleTransition.OVERDUE): RoleState.KILLED,
    (RoleState.TERMINATING, RoleTransition.EXITED): RoleState.GONE,
    (RoleState.KILLED, RoleTransition.EXITED): RoleState.WAITING,  # GONE when everything ends
    (RoleState.KILLED, RoleTransition.END): RoleState.KILLED,
    (
        RoleState.KILLED,
        RoleTransition.OVERDUE,
    ): RoleState.GONE,  # stuck in the kernel: nothing more can be done
    (RoleState.GONE, RoleTransition.EXITED): RoleState.GONE,
}


@dataclass(slots=True)
class SupervisedRole:
    """A role, its process, and what an operator wants of it."""

    plan: RolePlan
    restarts: Restarts
    state: RoleState = RoleState.WAITING
    limit_at_ms: float | None = None
    spawned_at_ms: float = 0.0
    has_served: bool = False
    is_kept_down: bool = False
    """Drained by an operator."""
    is_told_to_end: bool = False
    """Its present process is to end by an operator's wish, so its end is no failure."""

    @property
    def is_missing(self) -> bool:
        """Whether it does not serve though it is wanted."""
        return self.state is not RoleState.SERVING and not self.is_kept_down
