"""Time limits by which a process judges others, though it may be stopped itself: suspended, frozen with its container, starved."""

from __future__ import annotations

from typing import Final

OWN_GAP_MS: Final = 500.0


def is_looked_at_late(limit_at_ms: float, now_ms: float) -> bool:
    """Whether a limit that is over is looked at so late that this process was stopped itself.

    What it waits for may have come meanwhile, unheard, or have been stopped too: it is given its time anew.
    """
    return now_ms - limit_at_ms >= OWN_GAP_MS
