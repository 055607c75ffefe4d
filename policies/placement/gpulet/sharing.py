"""Temporal sharing: several models take turns on one gpulet (squishy bin packing, Nexus and gpulet's Algorithm 1).

In every duty cycle each model runs one batch of what arrived meanwhile. A request waits for at most one duty
cycle, and for at most one round of all batches, its own among them: duty + sum of L' ≤ every SLO. The round must
fit into the cycle, and every batch holds all that arrives in one cycle, so nobody falls behind. Unlike Nexus' packing
(`policies/batching/baselines/squishy.py`) it tries every cycle at which a batch shrinks, cuts a cycle that is too long to what the
SLO leaves, and knows what neighbours add to a batch's run time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from policies.duty_cycle import Sharer, gpulet_in_time, round_of
from policies.placement.gpulet.board import Gpulet, GpuletLoad, ModelDemand
from policies.placement.gpulet.quantities import NO_PRESSURE, SizeCosts
from policies.rounding import ROUNDING


class Member(NamedTuple):
    """A model that takes part, and the rate it brings."""

    demand: ModelDemand
    costs: SizeCosts
    rps: float


def shared(
    size: int,
    members: Sequence[Member],
    duty_max_ms: float,
    pressure: float = NO_PRESSURE,
    slack: float = 1.0,
) -> Gpulet | None:
    """The gpulet that serves all members at the longest duty cycle up to `duty_max_ms`; None: at none.

    The cycles tried are those in which a whole number of some member's requests arrives: only there a batch
    shrinks.
    """
    duties = {duty_max_ms}
    for member in members:
        one_ms = 1000 / member.rps
        count = min(member.costs.batch_max, int(duty_max_ms / one_ms + ROUNDING))
        duties.update(one_ms * batch for batch in range(1, count + 1))
    for duty_ms in sorted(duties, reverse=True):
        gpulet = one_round(size, members, duty_ms, pressure, slack)
        if gpulet is not None:
            return gpulet
    return None


def one_round(
    size: int, members: Sequence[Member], duty_ms: float, pressure: float = NO_PRESSURE, slack: float = 1.0
) -> Gpulet | None:
    """The gpulet with that duty cycle; None where the round does not fit or an SLO breaks.

    A cycle that is too long by itself is shortened to what its round leaves of the SLO: the low-rate rule.
    """
    limit_ms = min(member.demand.slo_ms for member in members) * slack
    found = _loads(members, duty_ms, pressure)
    if found is not None and not gpulet_in_time(duty_ms, found[1], limit_ms):
        duty_ms = limit_ms - found[1]
        found = _loads(members, duty_ms, pressure) if duty_ms > 0 else None
    if found is None or found[1] > duty_ms:
        return None
    return Gpulet(size, duty_ms, found[0])


def _loads(
    members: Sequence[Member], duty_ms: float, pressure: float
) -> tuple[tuple[GpuletLoad, ...], float] | None:
    """What each member runs per cycle, and what a round takes; None where a batch is too large."""
    found = round_of(
        duty_ms,
        (
            Sharer(rps / 1000, costs.batch_max, partial(costs.exec_ms, pressure=pressure))
            for _, costs, rps in members
        ),
    )
    if found is None:
        return None
    loads = (
        GpuletLoad(demand, costs, batch, exec_ms, rps)
        for (demand, costs, rps), batch, exec_ms in zip(members, *found, strict=True)
    )
    return tuple(loads), sum(found.exec_ms)


def joined(gpulet: Gpulet, newcomer: Member, pressure: float = NO_PRESSURE) -> Gpulet | None:
    """The gpulet with one more model, at the longest duty cycle that suits the newcomer's whole batches.

    Its batch is what arrives in the present cycle, or less; the cycle then lasts until that many have come, so it
    is never longer than before.
    """
    members = [*(Member(load.demand, load.costs, load.rps) for load in gpulet.loads), newcomer]
    one_ms = 1000 / newcomer.rps
    count = min(newcomer.costs.batch_max, max(1, int(gpulet.duty_ms / one_ms + ROUNDING)))
    for batch in range(count, 0, -1):
        found = one_round(gpulet.size, members, min(gpulet.duty_ms, batch * one_ms), pressure)
        if found is not None:
            return found
    return None
