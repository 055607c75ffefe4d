"""What a scheduler counts of requests and batches, for `tenuto status`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """What has happened since the start, each shown under its name."""

    requests_announced: float = 0.0
    requests_granted: float = 0.0
    requests_dropped: float = 0.0
    requests_expired: float = 0.0
    requests_returned: float = 0.0
    batches_sent: float = 0.0
    batches_lost: float = 0.0
    rehearsals: float = 0.0
    rehearsals_failed: float = 0.0
    guard_ms: float = 0.0
