"""Whether one device can answer one model's requests: exact, with every arrival known beforehand.

Requests of one model with one SLO have deadlines in the order of their arrivals. So an optimal plan serves them in
that order, and where it gives some of a stretch up, it may as well give up the first of them: a batch is then an
unbroken run of arrivals. What is left is a dynamic program over (requests decided, requests given up), whose value
is the earliest moment at which the device is free again. Batches end when they end: no network, no lateness.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def is_schedulable(
    arrivals_ms: Sequence[float], exec_ms: Sequence[float], slo_ms: float, given_up_max: int
) -> bool:
    """Whether one device can answer all but `given_up_max` of the requests in time.

    `arrivals_ms` in order; `exec_ms[b - 1]`: of a batch of b, growing with b.
    """
    count = len(arrivals_ms)
    never = np.full(given_up_max + 1, np.inf)
    free_ms = [never.copy() for _ in range(min(len(exec_ms), count) + 1)]  # a ring: of the next requests only
    free_ms[0][0] = 0.0
    for first in range(count):
        now_ms = free_ms[first % len(free_ms)]
        after_one = free_ms[(first + 1) % len(free_ms)]
        np.minimum(after_one[1:], now_ms[:-1], out=after_one[1:])
        deadline_ms = arrivals_ms[first] + slo_ms
        for size, run_ms in enumerate(exec_ms[: count - first], 1):
            last_ms = arrivals_ms[first + size - 1]
            if last_ms + run_ms > deadline_ms:
                break
            ends_ms = np.maximum(now_ms, last_ms) + run_ms
            ends_ms[ends_ms > deadline_ms] = np.inf
            after = free_ms[(first + size) % len(free_ms)]
            np.minimum(after, ends_ms, out=after)
        now_ms[:] = np.inf  # its place in the ring is that of a later request from here on
    return bool(np.isfinite(free_ms[count % len(free_ms)]).any())
