"""The MPS daemons of a node, one for each GPU that has one, each through its guard process.

```
 WAITING ──START──▶ STARTING ──ANSWERS──▶ UP          EXITED leads from every state with a process to WAITING,
                       │ └──OVERDUE──┐    │ └─SICK─┐  or to GIVEN_UP after repeated failure, or to GONE when the
                      END            ▼   END       ▼  node stops
                       └─▶ ENDING ─▶ KILLED ◀──────┘
                             OVERDUE
```

END leads from every state to ENDING, KILLED or GONE: a stop may come at any moment. A daemon under a guard that was taken
over begins with START at the first event.

No worker may start on a GPU whose daemon is not UP: it would run without its share and nobody would know. A
server that is gone takes its clients' contexts with it and is followed by another one, so its daemon counts as sick at
once, and one that has clients but no server does too; a daemon that does not answer does when it has not done so repeatedly. Time without
an answer is no part of the minute in which failures count (`Restarts`): one that hangs each time would be started for ever. A GPU whose
daemon is given up is shared in time, which is said; what its guards left is ended, as no further guard does that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from fabric.ids import NodeId
from fabric.messages import GpuSharing
from roles.node_agent.events import (
    AgentAction,
    AgentLimits,
    CheckDaemon,
    DaemonChecked,
    EndLeftovers,
    Kill,
    SharingPlan,
    StartDaemon,
    Terminate,
)
from roles.runtime.exit_codes import EXIT_GUARD_REFUSED
from roles.runtime.process_events import Warn
from roles.runtime.restarts import Restarts
from roles.runtime.time_limits import is_looked_at_late

MPS, TIME_SHARING, STARTING = "mps", "time-sharing", "starting"


class DaemonState(Enum):
    """Where a GPU's daemon is in its life."""

    WAITING = auto()  # no process: the next start is due at the limit
    STARTING = auto()  # does not answer yet
    UP = auto()
    ENDING = auto()  # its guard was told to end
    KILLED = auto()
    GIVEN_UP = auto()  # for good: this GPU is shared in time
    GONE = auto()  # the node stops


class DaemonTransition(Enum):
    """What moves a daemon on."""

    START = auto()
    ANSWERS = auto()
    SICK = auto()
    END = auto()
    OVERDUE = auto()
    EXITED = auto()
    HOPELESS = auto()


NEXT: Final[Mapping[tuple[DaemonState, DaemonTransition], DaemonState]] = {
    (DaemonState.WAITING, DaemonTransition.START): DaemonState.STARTING,
    (DaemonState.WAITING, DaemonTransition.END): DaemonState.GONE,
    (DaemonState.GIVEN_UP, DaemonTransition.END): DaemonState.GONE,
    (DaemonState.GONE, DaemonTransition.END): DaemonState.GONE,  # that one has not died of SIGKILL
    (DaemonState.STARTING, DaemonTransition.ANSWERS): DaemonState.UP,
    (DaemonState.STARTING, DaemonTransition.OVERDUE): DaemonState.KILLED,
    (DaemonState.STARTING, DaemonTransition.END): DaemonState.ENDING,
    (DaemonState.UP, DaemonTransition.SICK): DaemonState.KILLED,
    (DaemonState.UP, DaemonTransition.END): DaemonState.ENDING,
    (DaemonState.ENDING, DaemonTransition.OVERDUE): DaemonState.KILLED,
    (DaemonState.KILLED, DaemonTransition.END): DaemonState.KILLED,
    (
        DaemonState.KILLED,
        DaemonTransition.OVERDUE,
    ): DaemonState.GONE,  # stuck in the kernel: nothing more can be done
    **{
        (state, DaemonTransition.EXITED): DaemonState.WAITING
        for state in (DaemonState.STARTING, DaemonState.UP, DaemonState.ENDING, DaemonState.KILLED)
    },
    (DaemonState.GONE, DaemonTransition.EXITED): DaemonState.WAITING,
    (DaemonState.WAITING, DaemonTransition.HOPELESS): DaemonState.GIVEN_UP,
}


@dataclass(slots=True)
class _Daemon:
    gpu: int
    name: str
    plan: SharingPlan
    restarts: Restarts
    state: DaemonState = DaemonState.WAITING
    limit_at_ms: float | None = 0.0
    check_at_ms: float | None = None
    asked_at_ms: float = 0.0
    silent_since_ms: float | None = None
    """When it was started, or asked for the first answer that did not come; None: it answers."""
    misses: int = 0
    servers: frozenset[int] = frozenset()
    has_clients: bool = False
    was_asked_with_clients: bool = False
    reason: str = ""
    starts: int = 0
    is_taken_over: bool = False
    """A former agent's, which has not failed since: workers of that agent are its clients."""


def guard_name(node_id: NodeId, gpu: int) -> str:
    """The name of a guard among the agent's processes."""
    return f"mps-{node_id}-{gpu}"


class Daemons:
    """Starts, checks, restarts and ends them. What to do goes to `actions`, the core's own list."""

    def __init__(
        self,
        node_id: NodeId,
        plans: Mapping[int, SharingPlan],
        limits: AgentLimits,
        actions: list[AgentAction],
        adopted: Iterable[int] = (),
    ) -> None:
        self._limits = limits
        self._actions = actions
        self._plans = plans
        self._adopted = tuple(adopted)
        self._remarks: dict[int, str] = {}
        self._is_stopping = False
        self._all = {
            gpu: _Daemon(gpu, guard_name(node_id, gpu), plan, Restarts(limits.restart))
            for gpu, plan in plans.items()
            if plan.mode == MPS
        }

    # ------------------------------------------------------------ what others ask

    def is_held(self, gpu: int) -> bool:
        """Whether no worker may start there now."""
        daemon = self._all.get(gpu)
        return daemon is not None and daemon.state not in (DaemonState.UP, DaemonState.GIVEN_UP)

    def is_mps(self, gpu: int) -> bool:
        """Whether a worker that starts there is a client of MPS."""
        daemon = self._all.get(gpu)
        return daemon is not None and daemon.state is DaemonState.UP

    def may_stay(self, gpu: int, *, is_mps: bool) -> bool:
        """Whether a former agent's worker on that GPU alone serves on as it should: as a client of the daemon that it came with, or of none while none answers."""
        daemon = self._all.get(gpu)
        if is_mps:
            return daemon is not None and daemon.is_taken_over
        return daemon is None or daemon.state is not DaemonState.UP

    def enforces_shares(self, gpu: int) -> bool:
        """Whether a slice's share is more than a word there."""
        return self.is_mps(gpu) and self._plans[gpu].has_shares

    def gpu_of(self, name: str) -> int | None:
        """Whose guard that process is; None: no guard."""
        return next((daemon.gpu for daemon in self._all.values() if daemon.name == name), None)

    def remark(self, gpu: int, text: str) -> bool:
        """Something people should know of a GPU, beside its mode; True when it is new."""
        if self._remarks.get(gpu, "") == text:
            return False
        self._remarks[gpu] = text
        return True

    def why_not(self, gpu: int) -> str:
        """Why shares are not enforced."""
        daemon = self._all.get(gpu)
        own = self._plans[gpu].reason if gpu in self._plans else ""
        return own if daemon is None or not daemon.reason else daemon.reason

    def listed(self) -> Sequence[GpuSharing]:
        """How each GPU is shared now."""
        return [self._sharing(gpu) for gpu in self._plans]

    @property
    def are_gone(self) -> bool:
        """Whether there is no daemon left to wait for."""
        return all(daemon.state is DaemonState.GONE for daemon in self._all.values())

    @property
    def wake_at_ms(self) -> float | None:
        """The next start, check or time limit."""
        moments = [d.limit_at_ms for d in self._all.values() if d.limit_at_ms is not None]
        moments += [d.check_at_ms for d in self._all.values() if d.check_at_ms is not None]
        return min(moments, default=None)

    # ------------------------------------------------------------ their lives

    def begin(self, now_ms: float) -> None:
        """To be called before anything else at each event: guards that were taken over run already."""
        for gpu in self._adopted:
            self._start(self._all[gpu], now_ms)
            self._all[gpu].is_taken_over = True
        self._adopted = ()

    def tick(self, now_ms: float) -> list[int]:
        """Do what is due; the GPUs whose daemon went down over it."""
        down = []
        for daemon in self._all.values():
            if daemon.limit_at_ms is not None and daemon.limit_at_ms <= now_ms:
                self._on_limit(daemon, now_ms)
                if daemon.state is DaemonState.KILLED:
                    down.append(daemon.gpu)
            if daemon.check_at_ms is not None and daemon.check_at_ms <= now_ms:
                daemon.check_at_ms, daemon.asked_at_ms = None, now_ms
                daemon.was_asked_with_clients = daemon.has_clients
                self._actions.append(CheckDaemon(daemon.gpu, daemon.starts))
        return down

    def joined(self, gpu: int, now_ms: float) -> None:
        """A worker there is a client now, so there is a server: ask for it at once, before it can end unknown."""
        daemon = self._all.get(gpu)
        if daemon is None or daemon.state is not DaemonState.UP or daemon.servers:
            return
        daemon.has_clients = True
        if daemon.check_at_ms is not None:  # else an answer is on its way, of before
            daemon.check_at_ms = now_ms

    def checked(self, answer: DaemonChecked, now_ms: float) -> bool:
        """What the daemon said to our question; True when the GPU's state is another one now.

        A late answer of a former start says nothing: neither whether this one answers, nor which servers it has.
        """
        daemon, problem, servers = self._all[answer.gpu], answer.problem, answer.servers
        if answer.start != daemon.starts:
            return False
        if daemon.state is DaemonState.STARTING:
            if problem:
                daemon.reason = problem
                daemon.check_at_ms = now_ms + self._limits.daemon_look_ms
                return False
            self._step(daemon, DaemonTransition.ANSWERS, now_ms)
            daemon.reason, daemon.misses, daemon.servers = "", 0, frozenset(servers)
            daemon.silent_since_ms = None
            daemon.has_clients = daemon.was_asked_with_clients = False
            daemon.check_at_ms = now_ms + self._limits.daemon_check_ms
            return True
        if daemon.state is not DaemonState.UP:
            return False
        daemon.check_at_ms = now_ms + self._limits.daemon_check_ms
        if problem:
            daemon.misses += 1
            if daemon.silent_since_ms is None:
                daemon.silent_since_ms = daemon.asked_at_ms
            if daemon.misses < self._limits.daemon_misses_max:
                return False
            lost = problem
        else:
            found, known = frozenset(servers), daemon.servers
            daemon.misses, daemon.silent_since_ms, daemon.servers = 0, None, found
            if not known <= found:
                lost = f"its server (process {min(known - found)}) ended"
            elif not found and daemon.was_asked_with_clients:
                lost = "it has clients and no server"
            else:
                if not found and daemon.has_clients:
                    daemon.check_at_ms = now_ms
                return False
        daemon.reason = f"its MPS daemon is sick: {lost}"
        daemon.check_at_ms = None
        self._step(daemon, DaemonTransition.SICK, now_ms)
        self._actions.append(Kill(daemon.name))
        return True

    def exited(self, gpu: int, code: int, said: str, now_ms: float) -> None:
        """Its guard is gone, and the daemon with it: start it again, or give up."""
        daemon = self._all[gpu]
        was_killed = daemon.state is DaemonState.KILLED
        self._step(daemon, DaemonTransition.EXITED, now_ms)
        daemon.check_at_ms = None
        if self._is_stopping:
            self._step(daemon, DaemonTransition.END, now_ms)
            return
        if not was_killed:
            how = f"was killed by signal {-code}" if code < 0 else "ended"
            daemon.reason = said or f"the guard of its MPS daemon {how}"
        silent_ms = 0.0 if daemon.silent_since_ms is None else now_ms - daemon.silent_since_ms
        next_at_ms = None if code == EXIT_GUARD_REFUSED else daemon.restarts.note_failure(now_ms, silent_ms)
        if next_at_ms is None:
            self._step(daemon, DaemonTransition.HOPELESS, now_ms)
            self._actions.append(
                Warn(f"mps_given_up gpu={gpu} sharing={TIME_SHARING} reason={daemon.reason!r}")
            )
            self._actions.append(EndLeftovers(gpu))
        else:
            daemon.limit_at_ms = next_at_ms
            self._actions.append(Warn(f"mps_lost gpu={gpu} reason={daemon.reason!r}"))

    def stop(self, now_ms: float) -> None:
        """End all of them in order; they may be asked more than once."""
        if self._is_stopping:
            return
        self._is_stopping = True
        for daemon in self._all.values():
            daemon.check_at_ms = None
            self._step(daemon, DaemonTransition.END, now_ms)
            if daemon.state is DaemonState.ENDING:
                self._actions.append(Terminate(daemon.name))

    # ------------------------------------------------------------ small things

    def _on_limit(self, daemon: _Daemon, now_ms: float) -> None:
        if daemon.state is DaemonState.WAITING:
            self._start(daemon, now_ms)
            self._actions.append(StartDaemon(daemon.gpu))
            return
        if daemon.limit_at_ms is not None and is_looked_at_late(daemon.limit_at_ms, now_ms):
            self._give_time(daemon, now_ms)
            return
        if daemon.state is DaemonState.STARTING:
            limit_s = self._limits.daemon_start_ms / 1e3
            daemon.reason = f"its MPS daemon did not answer within {limit_s:g} s: {daemon.reason}"
        self._step(daemon, DaemonTransition.OVERDUE, now_ms)
        daemon.check_at_ms = None
        if daemon.state is DaemonState.KILLED:
            self._actions.append(Kill(daemon.name))

    def _start(self, daemon: _Daemon, now_ms: float) -> None:
        self._step(daemon, DaemonTransition.START, now_ms)
        daemon.starts += 1
        daemon.silent_since_ms = now_ms
        daemon.check_at_ms = now_ms + self._limits.daemon_look_ms

    def _step(self, daemon: _Daemon, step: DaemonTransition, now_ms: float) -> None:
        daemon.state = NEXT[daemon.state, step]
        daemon.is_taken_over = daemon.is_taken_over and daemon.state in (DaemonState.STARTING, DaemonState.UP)
        self._give_time(daemon, now_ms)

    def _give_time(self, daemon: _Daemon, now_ms: float) -> None:
        limits_ms = {
            DaemonState.STARTING: self._limits.daemon_start_ms,
            DaemonState.ENDING: self._limits.daemon_end_ms,
            DaemonState.KILLED: self._limits.kill_ms,
        }
        limit_ms = limits_ms.get(daemon.state)
        daemon.limit_at_ms = None if limit_ms is None else now_ms + limit_ms

    def _sharing(self, gpu: int) -> GpuSharing:
        plan, daemon = self._plans[gpu], self._all.get(gpu)
        mode, reason = plan.mode, plan.reason
        if daemon is not None:
            reason = daemon.reason or plan.reason
            if daemon.state is DaemonState.GIVEN_UP:
                mode = TIME_SHARING
            elif daemon.state is not DaemonState.UP:
                mode = STARTING
        return GpuSharing(gpu, mode, "; ".join(part for part in (reason, self._remarks.get(gpu, "")) if part))
