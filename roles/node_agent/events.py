"""What the node agent's core hears and does, and its settings."""

from __future__ import annotations

from dataclasses import dataclass, field

from fabric.messages import SliceSpec
from roles.core import Heard, Lost, Send, Tick
from roles.restarts import RestartRule
from roles.upkeep import ProcessExited, SchedulerFound, StopAsked


@dataclass(slots=True, frozen=True)
class AgentLimits:
    """How long a worker may take for each step of its life, in ms."""

    hello_ms: float = 30_000.0  # an interpreter and torch from a cold disk
    load_ms: float = 120_000.0
    grace_ms: float = 2_000.0  # for the batch that runs
    terminate_ms: float = 2_000.0
    kill_ms: float = 2_000.0
    restart: RestartRule = field(default_factory=RestartRule)


@dataclass(slots=True, frozen=True)
class Spawn:
    """Start a worker process for these slices (they are of one device)."""

    worker_id: str
    slices: tuple[SliceSpec, ...]


@dataclass(slots=True, frozen=True)
class Terminate:
    """SIGTERM."""

    worker_id: str


@dataclass(slots=True, frozen=True)
class Kill:
    """SIGKILL."""

    worker_id: str


AgentEvent = Heard | Lost | SchedulerFound | ProcessExited | StopAsked | Tick
AgentAction = Spawn | Terminate | Kill | Send
