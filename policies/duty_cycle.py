"""Squishy bin packing as far as Nexus and gpulet agree on it: what models that share a slice run in one duty cycle.

In every cycle each model runs one batch of what arrives meanwhile, and the round of all batches fits into the cycle. A
request waits for at most one cycle; how long it then takes at most, the two papers answer differently (`nexus_in_time`,
`gpulet_in_time`). Which cycles are tried differs as well, so each packs by itself: `policies/batching/baselines/squishy.py` and
`policies/placement/gpulet/sharing.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from policies.rounding import ROUNDING


class Sharer(NamedTuple):
    """A model that takes part: its requests per ms, the largest batch it may run, and l(b) in ms."""

    per_ms: float
    batch_max: int
    exec_ms: Callable[[int], float]


class Round(NamedTuple):
    """By sharer, the batch of one cycle and its run time."""

    batches: Sequence[int]
    exec_ms: Sequence[float]


def round_of(duty_ms: float, sharers: Iterable[Sharer]) -> Round | None:
    """What runs in a cycle of that length; None where more arrives than one batch holds."""
    batches: list[int] = []
    times_ms: list[float] = []
    for per_ms, batch_max, exec_ms in sharers:
        batch = max(1, math.ceil(duty_ms * per_ms - ROUNDING))
        if batch > batch_max:
            return None
        batches.append(batch)
        times_ms.append(exec_ms(batch))
    return Round(batches, times_ms)


def nexus_in_time(duty_ms: float, exec_ms: float, slo_ms: float) -> bool:
    """Nexus: each model has its place in the cycle, so a request waits for a cycle at most and then for its own batch."""
    return duty_ms + exec_ms <= slo_ms + ROUNDING


def gpulet_in_time(duty_ms: float, round_ms: float, slo_ms: float) -> bool:
    """gpulet: no model has a place in the round, so a request waits for a cycle at most and then for a whole round."""
    return duty_ms + round_ms <= slo_ms
