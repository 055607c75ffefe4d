"""What no server can beat in a case, not even one that knows every arrival beforehand (`benchmarks/foreseen`)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from benchmarks.foreseen.asked import Asked
from benchmarks.foreseen.highest import may_be_served
from benchmarks.peers.cases import MAX_BATCH, Case
from benchmarks.peers.search import highest_good_rps
from fabric.ids import ModelId
from policies.slo import BAD_RATE_ALLOWED
from roles.workload.arrivals import ArrivalSource

_ARRIVALS_MS = 20_000.0
_PRECISION = 0.01


def foreseen_rps(case: Case, seeds: Sequence[int]) -> float:
    """The median over `seeds` of the highest rate that is not refuted; on one device with one model, of what can be served."""

    def asked(model: str, seed: int, rate_rps: float) -> Asked:
        source = ArrivalSource(ModelId(model), "poisson", ((0.0, rate_rps / case.models),))
        at_ms = source.arrivals(seed, _ARRIVALS_MS)
        return Asked(
            at_ms,
            case.slo_ms,
            case.alpha_ms,
            case.beta_ms,
            MAX_BATCH,
            math.floor(BAD_RATE_ALLOWED * at_ms.size),
        )

    def highest_rps(seed: int) -> float:
        def is_good(rate_rps: float) -> bool:
            models = [asked(model, seed, rate_rps) for model in case.model_names]
            return may_be_served(
                [one for one in models if one.arrived_at_ms.size], case.devices, _ARRIVALS_MS
            )

        return highest_good_rps(is_good, case.bound_rps, _PRECISION)

    return statistics.median(map(highest_rps, seeds))
