"""GSLICE+: iGniter's placement, then every workload tunes its own share and batch (iGniter section 5.1).

A tuner sees its workload's average latency and throughput, here from the performance model of section 3.1 at
what everybody has at that moment, and aims at half the SLO and at the rate. It starts from batch 1 at 30 % and
leaves alone what is better than its target by less than 10 %. It knows of nobody else: shares may sum to over
100 % on a GPU, which is what the paper holds against it. Such sums stay, and are listed under the violations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from fabric.policy_options import Number
from policies.placement.common.base import Decision, GpuSlot, PlacedModelInput, Placement, Profiles
from policies.placement.igniter.cluster import place_by_kind
from policies.placement.igniter.plan import KindPlan, Replica
from policies.placement.igniter.policy import Igniter
from policies.placement.igniter.workload import IgniterGpuKind, throughput_rps
from policies.registry import Registered
from profiles.igniter.performance_model import IgniterProfile, predict_ms

BATCH_START = 1
SHARE_START_PERCENT = 30.0
THRESHOLD_PERCENT = 10.0
_BATCH_STEPS = 5  # between two adjustments of the share
_SHARE_PERCENT_MIN, _SHARE_PERCENT_MAX = 1.0, 100.0


class Gslice:
    """The plan after `adjustments` adjustments of the shares (five in the paper's evaluation)."""

    def __init__(self, *, adjustments: int = 5) -> None:
        self._adjustments = adjustments

    def place(
        self,
        models: Sequence[PlacedModelInput],
        gpus: Sequence[GpuSlot],
        profiles: Profiles,
        current: Placement | None = None,  # noqa: ARG002  it starts from the beginning
    ) -> Placement:
        """Place; needs `IgniterProfile`s, and prices where there are several types of GPU."""
        return place_by_kind(models, gpus, profiles, self._plan)

    def _plan(
        self, models: Sequence[tuple[PlacedModelInput, IgniterProfile]], kind: IgniterGpuKind
    ) -> KindPlan:
        plan = Igniter().plan(models, kind)
        gpus = tuple(tuned(replicas, self._adjustments) for replicas in plan.gpus)
        pairs = [
            (kind.name(place), before, after)
            for place, (old, new) in enumerate(zip(plan.gpus, gpus, strict=True))
            for before, after in zip(old, new, strict=True)
        ]
        tuning = tuple(
            Decision(
                str(after.model.model_id),
                f"{name}, tuned to {after.share_percent:.1f} % and batch {after.batch_size}",
                {"igniter_share_percent": before.share_percent, "igniter_batch": before.batch_size},
            )
            for name, before, after in pairs
        )
        return KindPlan(gpus, plan.unplaced, plan.decisions + tuning)


def tuned(replicas: Sequence[Replica], adjustments: int) -> tuple[Replica, ...]:
    """The workloads of one GPU after that many adjustments, or when no share moves any more."""
    now = [
        replace(
            r,
            batch_size=BATCH_START,
            share_percent=max(SHARE_START_PERCENT, r.profile.share_percent_min),
        )
        for r in replicas
    ]
    for _ in range(adjustments):
        for place in range(len(now)):
            _tune_batch(now, place)
        before = [replica.share_percent for replica in now]
        for place in range(len(now)):
            _tune_share(now, place)
        if before == [replica.share_percent for replica in now]:
            break
    for place in range(len(now)):
        _tune_batch(now, place)
    return tuple(now)


def _tune_batch(now: list[Replica], place: int) -> None:
    """Up to five steps in proportion to the distance from half the SLO."""
    for _ in range(_BATCH_STEPS):
        own = now[place]
        objective_ms, latency_ms = own.model.slo_ms / 2, _latency_ms(now, place)
        spare_ms = objective_ms - latency_ms
        if 0 < spare_ms / objective_ms * 100 < THRESHOLD_PERCENT:
            return
        wanted = math.ceil(own.batch_size + own.batch_size * spare_ms / latency_ms)
        batch_size = min(own.profile.batch_size_max, max(1, wanted))
        if batch_size == own.batch_size:
            return
        now[place] = replace(own, batch_size=batch_size)


def _tune_share(now: list[Replica], place: int) -> None:
    """One step: up if latency or throughput misses its target, down if both are better by 10 % or more.

    Exactly on one target and better than the other it stays; the authors' code falls through to 1 % there.
    """
    own = now[place]
    objective_ms, latency_ms = own.model.slo_ms / 2, _latency_ms(now, place)
    rps = throughput_rps(own.profile, own.batch_size, latency_ms)
    latency_spare = (objective_ms - latency_ms) / objective_ms * 100
    rate_spare = (rps - own.rate_rps) / own.rate_rps * 100
    if 0 < latency_spare < THRESHOLD_PERCENT and 0 < rate_spare < THRESHOLD_PERCENT:
        return
    factor = max(abs(objective_ms - latency_ms) / latency_ms, abs(rps - own.rate_rps) / rps)
    share_percent = own.share_percent
    if latency_spare < 0 or rate_spare < 0:
        share_percent *= 1 + factor
    elif latency_spare > 0 and rate_spare > 0:
        share_percent *= 1 - factor
    least_percent = max(_SHARE_PERCENT_MIN, own.profile.share_percent_min)
    share_percent = min(_SHARE_PERCENT_MAX, max(least_percent, share_percent))
    now[place] = replace(own, share_percent=share_percent)


def _latency_ms(now: Sequence[Replica], place: int) -> float:
    return predict_ms(now[place].profile.hardware, [replica.resident for replica in now])[place]


REGISTERED: Final = Registered(
    {"adjustments": Number(5, maximum=10_000, is_minimum_allowed=True, is_whole=True)},
    lambda options: Gslice(adjustments=options["adjustments"]),
)
