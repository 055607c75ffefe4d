"""What the node agent's core hears and does, and its settings."""

from __future__ import annotations

from msgspec import Struct, field

from fabric.heartbeats import HeartbeatTiming
from fabric.ids import Incarnation, PeerId
from fabric.messages import GpuSample, SliceSpec
from roles.node_agent.lease import KeepLease, LeaseKept
from roles.runtime.core import Heard, Lost, Send, Tick
from roles.runtime.process_events import ProcessExited, SchedulerFound, StopAsked, Warn
from roles.runtime.restarts import RestartRule


class AgentLimits(Struct, frozen=True):
    """How long a worker may take for each step of its life, in ms."""

    hello_ms: float = 30_000.0  # an interpreter and torch from a cold disk
    load_ms: float = (
        120_000.0  # for each model of a slice, one after the other; of a pipeline again for its later stages
    )
    silence_ms: float = 10_000.0  # of a worker that serves: a loop that is stuck for so long serves nobody
    unready_ms: float = (
        150.0  # from the scheduler's hearing that slices drain until the last batch granted before is here
    )
    grace_ms: float = 2_000.0  # for the batch that runs
    terminate_ms: float = 2_000.0
    kill_ms: float = 2_000.0
    restart: RestartRule = field(default_factory=RestartRule)
    heartbeats: HeartbeatTiming = field(default_factory=HeartbeatTiming)  # of its workers and the scheduler
    adopt_ms: float = 3_000.0  # for the workers of a former agent to say hello to this one
    sample_ms: float = 1_000.0
    daemon_start_ms: float = 15_000.0  # its guard may have to wait for the end of a former one
    daemon_look_ms: float = 100.0
    daemon_check_ms: float = 2_000.0
    daemon_misses_max: int = 3
    daemon_end_ms: float = 8_000.0
    client_end_ms: float = 5_000.0  # for a worker to leave its GPU through the daemon, before its signal

    def further_load_ms(self, models: int) -> float:
        """How much longer a slice may take to be ready that has so many models than one that has a single one."""
        return max(0, models - 1) * self.load_ms


class SharingPlan(Struct, frozen=True):
    """How a GPU should be shared. `mode`: mps | time-sharing | mig; `reason` says why not mps, or no shares."""

    mode: str
    reason: str = ""
    has_shares: bool = False


class Orphan(Struct, frozen=True):
    """A worker of a former agent of this host that still runs, as that agent wrote it down."""

    worker_id: str
    pid: int
    incarnation: Incarnation
    is_mps: bool


class DaemonChecked(Struct, frozen=True):
    """A GPU's MPS daemon was asked for its servers (their pids); `problem` is empty if it answered. `start`: which of its starts was."""

    gpu: int
    start: int
    problem: str
    servers: tuple[int, ...] = ()


class StrangerGreeted(Struct, frozen=True):
    """Who said hello under a worker's name is another process than the one that runs under it: a former agent's, which was not written down."""

    peer: PeerId


class WorkerUntold(Struct, frozen=True):
    """A worker may not have heard what to host or whom to obey: its queue was full, or its connection broke with what was under way."""

    peer: PeerId


class GpusSampled(Struct, frozen=True):
    """What the GPUs' sensors said."""

    samples: tuple[GpuSample, ...]


class Spawn(Struct, frozen=True):
    """Start a worker process for these slices (they are of one device), as a client of MPS or not.

    `beside`: the other slices of its GPU, if it is a client of MPS.
    """

    worker_id: str
    slices: tuple[SliceSpec, ...]
    is_mps: bool = False
    beside: tuple[SliceSpec, ...] = ()


class Terminate(Struct, frozen=True):
    """SIGTERM."""

    worker_id: str


class Kill(Struct, frozen=True):
    """SIGKILL. `at_once`: there is no daemon any more through which it could leave its GPU first."""

    worker_id: str
    at_once: bool = False


class Remember(Struct, frozen=True):
    """Write a worker down, so that the next agent can tell it from a stranger."""

    worker: Orphan


class StartDaemon(Struct, frozen=True):
    """Start the guard of a GPU's MPS daemon."""

    gpu: int


class CheckDaemon(Struct, frozen=True):
    """Ask a GPU's MPS daemon for a sign of life: `DaemonChecked` follows, of that start."""

    gpu: int
    start: int


class EndLeftovers(Struct, frozen=True):
    """End what guards of a GPU that were killed have left: no other guard follows that would."""

    gpu: int


class SampleGpus(Struct, frozen=True):
    """Read the GPUs' sensors: `GpusSampled` follows."""


class FollowScheduler(Struct, frozen=True):
    """From now on what goes to `SCHEDULER` goes to that one."""

    peer: PeerId


AgentEvent = (
    Heard
    | Lost
    | SchedulerFound
    | ProcessExited
    | StopAsked
    | DaemonChecked
    | GpusSampled
    | LeaseKept
    | StrangerGreeted
    | WorkerUntold
    | Tick
)
AgentAction = (
    Spawn
    | Terminate
    | Kill
    | Send
    | Remember
    | StartDaemon
    | CheckDaemon
    | EndLeftovers
    | SampleGpus
    | Warn
    | KeepLease
    | FollowScheduler
)
