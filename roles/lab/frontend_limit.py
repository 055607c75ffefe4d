"""What a rate found in virtual time, where deciding takes no time, asks of the frontends that are to pass it on."""

from __future__ import annotations

import math
from typing import Final

from fabric.policy_options import counted
from roles.config.cluster import ClusterConfig

FRONTEND_RPS_MAX: Final = 14_000
"""Where a frontend's core is full, at 70 µs a request: docs/operate/scaling.md."""


def remarks_on_frontends(config: ClusterConfig, total_rps: float) -> list[str]:
    """Says that the file's frontends do not carry such a total; empty where they do. A smaller rate may be too much for slower cores."""
    count = len(config.places.frontends)
    if total_rps <= count * FRONTEND_RPS_MAX:
        return []
    needed = math.ceil(total_rps / FRONTEND_RPS_MAX)
    told = (
        f"{total_rps:,.0f} r/s is more than the file's {counted(count, 'frontend')} can pass on: one fills a core at about"
        f" {FRONTEND_RPS_MAX:,} r/s (docs/operate/scaling.md), so this takes {needed:,}, each on a core of its own"
    )
    return [told]
