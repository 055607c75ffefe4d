"""Times as people write them, and which are too long for an SLO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

LATE_TIMERS_SHARE: Final = 0.08
"""Of the SLO: timers (p99) that are later than this cost batches their requests."""
LATE_TIMERS_MS: Final = 1.0


def late_host(late_timers_ms: Mapping[str, float], slo_ms: float) -> tuple[str, float] | None:
    """The process with the latest timers, and how late these are (p99, ms); None where that costs no requests with that SLO."""
    role_id, late_ms = max(late_timers_ms.items(), key=lambda one: one[1], default=("", 0.0))
    return None if late_ms < max(LATE_TIMERS_MS, LATE_TIMERS_SHARE * slo_ms) else (role_id, late_ms)


def shown_ms(value_ms: float) -> str:
    """A duration: `0.4 ms`, `31 ms`, `2.5 s`."""
    if abs(value_ms) >= 1_000:
        return f"{value_ms / 1e3:.3g} s"
    if abs(value_ms) >= 9.95:
        return f"{value_ms:.0f} ms"
    return f"{value_ms:.2g} ms" if abs(value_ms) < 0.95 else f"{value_ms:.1f} ms"
