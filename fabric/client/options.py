"""What a user may set of a client: its limits, its heartbeats, its key."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fabric.clock import Clock, MonotonicClock
from fabric.frames import ANSWER_BYTES_MAX
from fabric.heartbeats import HeartbeatTiming


@dataclass(slots=True, frozen=True)
class ClientOptions:
    """Limits and heartbeats of a client, in ms. `grace_ms` is added to a budget for the way there and back.

    `shared_bytes_max`: of tensors that lie in memory shared with a frontend of this host; 0 for none, and what is
    over it travels. `key_file`: from `tenuto keys add`, for frontends that are reached by TCP and ask for keys; a new one in its
    place is taken over by a client that runs.
    """

    connect_timeout_ms: float = 5_000.0
    grace_ms: float = 500.0
    budget_unknown_ms: float = 60_000.0  # waited for a request without a budget of its own
    pending_max: int = 10_000
    payload_bytes_max: int = ANSWER_BYTES_MAX
    shared_bytes_max: int = 256 << 20
    heartbeats: HeartbeatTiming = field(default_factory=lambda: HeartbeatTiming(200.0, 2_000.0))
    clock: Clock = field(default_factory=MonotonicClock)
    key_file: Path | None = None
