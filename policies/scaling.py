"""How many GPUs the load asks for (Symphony section 3.5).

Two signals of one window suffice when batches keep their size whatever the load: requests that go bad say how
many GPUs are missing, idle time says how many are too many.
"""

from __future__ import annotations

import math

BAD_RATE_ALLOWED = 0.01  # p99 within the SLO
_ROUNDING = 1e-9


def advised_gpus(gpus: int, bad_rate: float, idle_fraction: float) -> int:
    """The recommended total for a cluster of `gpus`, at least 1 if there is one.

    Over 1 % bad, N r / (1 - r) more are asked for; else N f are released, f being the idle fraction of all
    GPUs together. Asking rounds up and releasing rounds down. `bad_rate` is below 1: where
    nothing at all is served, more of the same would not help.
    """
    if gpus == 0:
        return 0
    if bad_rate >= BAD_RATE_ALLOWED:
        return gpus + math.ceil(gpus * bad_rate / (1 - bad_rate) - _ROUNDING)
    return max(1, gpus - math.floor(gpus * idle_fraction + _ROUNDING))
