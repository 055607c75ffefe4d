"""Which stage of a graph limits how many requests a placement can serve, end to end.

A request needs d of a stage's model; slice s serves T(s, i) requests/s of stage i if it does nothing else. Slices share their time
among the stages that they host, so that the smallest ratio of what a stage gets to its d is largest: a linear program. Its dual gives each stage a
part q of 1 and looks for the parts at which

    sum over slices of max over stages of q(i) · T(s, i) / d(i)

is smallest. That is the rate; any other q gives more, so what a search finds is an upper bound (within a few percent, a fifth too high at worst where
slices differ by orders of magnitude). q says how much each stage has of what limits it: where all slices host all models, its
part of the GPU time; where a stage has slices of its own that are too few, all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

_ROUNDS = 2_000
_STEP = 4.0  # of multiplicative weights, over the square root of the round


class Bottleneck(Struct, frozen=True):
    """The stage that limits most, at most so many requests/s of the application, and the part of each stage in that."""

    stage: str
    rate_rps: float
    parts: Mapping[str, float]


def bottleneck(demand: Mapping[str, float], slices: Sequence[Mapping[str, float]]) -> Bottleneck:
    """`slices`: by stage, what each could serve alone in requests/s; a stage that it does not host is not there."""
    stages = [stage for stage, needed in demand.items() if needed > 0]
    able = np.array([[one.get(stage, 0.0) for stage in stages] for one in slices]).reshape(-1, len(stages))
    unserved = next((stage for place, stage in enumerate(stages) if not able[:, place].any()), None)
    if unserved is not None:
        return Bottleneck(unserved, 0.0, {stage: float(stage == unserved) for stage in stages})
    kinds, counts = np.unique(
        able / np.array([demand[stage] for stage in stages]), axis=0, return_counts=True
    )
    if len(kinds) == 1:  # all slices are alike: no stage is worth more than another
        best = 1.0 / kinds[0] / (1.0 / kinds[0]).sum()
        best_rps = float(counts[0] / (1.0 / kinds[0]).sum())
    else:
        best, best_rps = _searched(kinds, counts)
    found = {stage: float(part) for stage, part in zip(stages, best, strict=True)}
    return Bottleneck(max(found, key=found.__getitem__), best_rps, found)


def _searched(kinds: NDArray[np.float64], counts: NDArray[np.int64]) -> tuple[NDArray[np.float64], float]:
    """The parts of the stages, and a bound of the rate, by multiplicative weights. A row of `kinds` for slices that are alike."""
    stages = kinds.shape[1]
    parts = np.full(stages, 1.0 / stages)
    best, best_rps = parts, np.inf
    for number in range(1, _ROUNDS + 1):
        worth = parts * kinds
        chosen = worth.argmax(axis=1)
        rate_rps = float(counts @ worth.max(axis=1))
        if rate_rps < best_rps:
            best, best_rps = parts, rate_rps
        gets = np.bincount(
            chosen, counts * kinds[np.arange(len(kinds)), chosen], minlength=stages
        )  # the gradient: whoever gets much is worth less
        moved = parts * np.exp(-_STEP / np.sqrt(number) * gets / max(gets.max(), 1e-9))
        parts = moved / moved.sum()
    return best, best_rps
