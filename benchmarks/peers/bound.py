"""What no server can beat on one device, not even one that knows every arrival beforehand.

Requests of one model with one SLO have deadlines in the order of their arrivals. So an optimal plan serves them in
that order, and where it gives some of a stretch up, it may as well give up the first of them: a batch is then an
unbroken run of arrivals. What is left is a dynamic program over (requests decided, requests given up), whose value
is the earliest moment at which the device is free again. Batches end when they end: no network, no lateness.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from benchmarks.peers.catalog import ALPHA_MS, BETA_MS, MAX_BATCH, Case
from benchmarks.peers.search import highest_good_rps
from fabric.ids import ModelId
from policies.slo import BAD_RATE_ALLOWED
from roles.workload.arrivals import ArrivalSource

_ARRIVALS_MS = 20_000.0
_PRECISION = 0.01


def foreseen_rps(case: Case, seeds: Sequence[int]) -> float | None:
    """The median over `seeds` of the highest rate that who knows all arrivals serves; None for several devices."""
    if case.devices > 1:
        return None
    (model,) = case.model_names
    exec_ms = [ALPHA_MS * size + BETA_MS for size in range(1, MAX_BATCH + 1)]

    def highest_rps(seed: int) -> float:
        def is_good(rate_rps: float) -> bool:
            source = ArrivalSource(ModelId(model), "poisson", ((0.0, rate_rps),))
            arrivals_ms = source.arrivals(seed, _ARRIVALS_MS).tolist()
            given_up_max = int(BAD_RATE_ALLOWED * len(arrivals_ms))
            return is_schedulable(arrivals_ms, exec_ms, case.slo_ms, given_up_max)

        return highest_good_rps(is_good, case.bound_rps, _PRECISION)

    return statistics.median(map(highest_rps, seeds))


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
