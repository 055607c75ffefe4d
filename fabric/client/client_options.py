"""What a user may set of a client: its limits, its heartbeats, its key."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fabric.clock import Clock, MonotonicClock
from fabric.frames import ANSWER_BYTES_MAX
from fabric.heartbeats import HeartbeatTiming


@dataclass(slots=True, frozen=True)
class ClientOptions:
    """Limits and heartbeats of a client; times in ms."""

    connect_timeout_ms: float = 5_000.0
    """How long `open` waits for a frontend's sign of life."""
    grace_ms: float = 500.0
    """Added to a budget for the way there and back, before the client itself ends a request."""
    budget_unknown_ms: float = 60_000.0
    """Waited for a request without a budget of its own."""
    pending_max: int = 10_000
    """Requests without an answer; more are refused (`Overloaded`)."""
    payload_bytes_max: int = ANSWER_BYTES_MAX
    """Of a request's inputs, up to 256 MiB; more is `TooLarge`. A frontend takes less (see Limits)."""
    shared_bytes_max: int = 256 << 20
    """Of tensors in memory that is shared with a frontend of this host; what is over it travels. 0: none."""
    heartbeats: HeartbeatTiming = field(default_factory=lambda: HeartbeatTiming(200.0, 2_000.0))
    """When a silent frontend is asked, and when it is lost."""
    clock: Clock = field(default_factory=MonotonicClock)
    """For tests."""
    key_file: Path | None = None
    """From `tenuto keys add`, for frontends that are reached by TCP and ask for keys; a new one in its place is taken over
    within a second, and used for every connection that is made from then on."""
