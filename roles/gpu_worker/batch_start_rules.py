"""When a granted batch may start, and when it has expired: the one place that says so, live and simulated.

The first in line may start once all its parts are in: its start only says when the scheduler thought they would be. One
behind it may once its own start has come as well, so that a batch whose inputs are late is not held up, nor holds up the
others. From its latest start on a batch goes with the requests that came; when the device has been busy until even its loosest
deadline is lost, it has expired.
"""

from __future__ import annotations

from fabric.messages import RunBatch

LATE_TOLERANCE_MS = 1.0  # our own timers wake up to this late; a batch must not expire by its own alarm


def start_moments(run: RunBatch, sent_at_ms: float) -> tuple[float, float, float]:
    """Start, latest start and end of use of a batch that was sent at that moment, in this order on the same clock."""
    latest_at_ms = sent_at_ms + run.latest_in_ms
    expires_at_ms = sent_at_ms + run.expires_in_ms
    expires_at_ms = max(expires_at_ms, latest_at_ms)
    start_at_ms = sent_at_ms + run.start_in_ms
    return (
        min(latest_at_ms, start_at_ms),
        latest_at_ms,
        expires_at_ms + LATE_TOLERANCE_MS,
    )


def may_start_at_ms(
    start_at_ms: float, latest_at_ms: float, expires_at_ms: float, *, is_complete: bool, has_live: bool
) -> float:
    """When a batch goes with the parts that are in, where it is not the first in line. `has_live`: there is a request in them."""
    if is_complete:
        return start_at_ms
    # Without any request there is nothing to go with: what comes late may still be in time.
    return latest_at_ms if has_live else expires_at_ms


def begins_at_ms(
    start_at_ms: float, latest_at_ms: float, expires_at_ms: float, first_in_at_ms: float, all_in_at_ms: float
) -> float:
    """The same where it is known when the first and the last of its parts will be in."""
    complete_at_ms = max(start_at_ms, all_in_at_ms)
    partial_at_ms = max(latest_at_ms, first_in_at_ms)
    return min(complete_at_ms, partial_at_ms, expires_at_ms)
