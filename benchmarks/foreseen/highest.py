"""The highest rate that no proof refutes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.foreseen import device_time, fluid
from benchmarks.foreseen.asked import Asked
from benchmarks.foreseen.one_device import is_schedulable
from policies.slo import BAD_RATE_ALLOWED
from roles.lab.scheduler_only import BATCH_MAX, GRID, HIGHEST, LOWEST, Case
from roles.workload.outcomes import ROUNDING_MS, Window


def foreseen_rps(case: Case, seed: int, window: Window) -> float:
    """The highest rate of the disciplines' grid at which these arrivals might lose under 1 % of every model; all above are refuted."""
    bound_rps = case.bound_rps
    for step in range(math.ceil(math.log(HIGHEST, GRID)) - 1, math.floor(math.log(LOWEST, GRID)), -1):
        rate_rps = float(bound_rps * GRID**step)
        if may_be_served(asked_of(case, seed, rate_rps, window), case.gpus, window.until_ms):
            return rate_rps
    return 0.0


def asked_of(case: Case, seed: int, rate_rps: float, window: Window) -> list[Asked]:
    """The requests that count, of every model that has any. Those before and after the window may all be lost."""
    found = []
    for model, at_ms in zip(case.models, case.arrivals(seed, rate_rps, window.until_ms), strict=True):
        inside = at_ms[at_ms >= window.from_ms]
        if inside.size:
            size_max = min(BATCH_MAX, max(1, int((model.slo_ms - model.beta_ms) / model.alpha_ms)))
            allowed = math.ceil(BAD_RATE_ALLOWED * inside.size) - 1
            found.append(Asked(inside, model.slo_ms, model.alpha_ms, model.beta_ms, size_max, allowed))
    return found


def may_be_served(asked: Sequence[Asked], devices: int, until_ms: float) -> bool:
    """False where no schedule on so many equal devices gives up no more than it may.

    `until_ms` ends the span in which device time is counted; it begins with the first arrival. What is due later is left out there.
    """
    if not asked:
        return True
    if fluid.loses_too_much(asked, devices):  # first, for it is quicker
        return False
    from_ms = min(float(one.arrived_at_ms[0]) for one in asked)
    left_ms = devices * max(0.0, until_ms - from_ms) * (1 + 1e-9) + ROUNDING_MS
    for one in asked:
        is_due = one.arrived_at_ms + one.slo_ms <= until_ms
        left_ms -= device_time.least_ms(replace(one, arrived_at_ms=one.arrived_at_ms[is_due]))
        if left_ms < 0:
            return False
    if len(asked) > 1 or devices > 1:
        return True
    (alone,) = asked
    exec_ms = [alone.exec_ms(size) for size in range(1, alone.size_max + 1)]
    return is_schedulable(
        alone.arrived_at_ms.tolist(), exec_ms, alone.slo_ms + ROUNDING_MS, alone.given_up_max
    )
