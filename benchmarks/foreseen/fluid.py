"""What one server as fast as all devices together loses, which may cut requests up and take them in any order.

A request's share is the least that it adds to any batch that it may be in: l(b) / b of the largest. A batch takes at least its
members' shares, and takes them between each member's arrival and deadline. So whatever the devices serve, this server serves too. The most
work is done by earliest deadline first.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

from benchmarks.foreseen.asked import Asked
from benchmarks.foreseen.device_time import runs
from roles.lab.scheduler_only import Moments
from roles.workload.outcomes import ROUNDING_MS


def shares_ms(asked: Asked) -> Moments:
    """For each request the least device time that it adds."""
    length = runs(asked)
    largest = np.ones_like(length)
    for size in range(2, int(length.max(initial=1)) + 1):
        edges = np.zeros(length.size + 1, dtype=np.int64)
        (first,) = np.nonzero(length >= size)
        edges[first] += 1
        edges[first + size] -= 1
        largest[np.cumsum(edges[:-1]) > 0] = size
    return asked.alpha_ms + asked.beta_ms / largest


def loses_too_much(asked: Sequence[Asked], devices: int) -> bool:
    """Whether the server loses more than all of these may give up, of each the requests with the largest shares."""
    shares = [shares_ms(one) for one in asked]
    allowed_ms = ROUNDING_MS + sum(
        float(np.sort(share)[max(0, share.size - one.given_up_max) :].sum())
        for one, share in zip(asked, shares, strict=True)
    )
    at_ms = np.concatenate([one.arrived_at_ms for one in asked])
    deadline_ms = np.concatenate([one.arrived_at_ms + one.slo_ms + ROUNDING_MS for one in asked])
    there_ms = devices * float(deadline_ms.max() - at_ms.min())
    if sum(float(share.sum()) for share in shares) - there_ms > allowed_ms:
        return True
    order = np.argsort(at_ms, kind="stable")
    took_ms = np.concatenate(shares)[order] / devices
    lost_ms = _lost_ms(at_ms[order].tolist(), deadline_ms[order].tolist(), took_ms.tolist()) * devices
    return lost_ms > allowed_ms


def _lost_ms(at_ms: Sequence[float], deadline_ms: Sequence[float], took_ms: Sequence[float]) -> float:
    """What is left undone of work that comes at such moments, by earliest deadline first."""
    waiting: list[tuple[float, float]] = []
    now_ms = lost_ms = 0.0
    arriving = zip(at_ms, deadline_ms, took_ms, strict=True)
    for next_at_ms, next_deadline_ms, next_took_ms in (*arriving, (math.inf, math.inf, 0.0)):
        while waiting and now_ms < next_at_ms:
            due_ms, left_ms = waiting[0]
            if now_ms + left_ms <= min(due_ms, next_at_ms):
                now_ms += left_ms
                heapq.heappop(waiting)
            elif due_ms <= next_at_ms:
                lost_ms += left_ms - max(0.0, due_ms - now_ms)
                now_ms = max(now_ms, due_ms)
                heapq.heappop(waiting)
            else:
                waiting[0] = (due_ms, left_ms - (next_at_ms - now_ms))
                now_ms = next_at_ms
        now_ms = max(now_ms, next_at_ms)
        heapq.heappush(waiting, (next_deadline_ms, next_took_ms))
    return lost_ms
