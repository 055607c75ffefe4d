"""gpu-lets+: gpulet as iGniter's evaluation has it (sections 2.3, 5.1 and 5.3), to compare with.

Five shares (20, 40, 50, 60, 80 %), at most two workloads on a GPU. A workload takes its most efficient share:
the upper end of the step with the largest gain of throughput per percent, each share at the largest batch
within half the SLO, steps that gain less than 5 % left out; a larger one only where that does not carry its
rate. What even 80 % does not carry is split off as a saturated gpulet. The batch is the smallest that meets the
rate. Placed by best fit, largest rate first.

Interference is looked at for the newcomer only, linear in its neighbour's use of the cache; who was there
before keeps batch and share, and throughputs are those of workloads alone. What comes of that by the whole
performance model is listed under the violations. The paper does not give its code's p_eff; this rule yields
its stated 40 % for W2 and W9 and the batch of 2 for W4 (there at 40 %, where the paper has 60 %).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from policies.placement.common.base import (
    WHOLE_PERCENT,
    Decision,
    GpuSlot,
    PlacedModelInput,
    Placement,
    Profiles,
    Rejected,
    Unplaced,
)
from policies.placement.igniter.cluster import place_by_kind
from policies.placement.igniter.plan import KindPlan, Replica
from policies.placement.igniter.workload import IgniterGpuKind, memory_of, modelled_ms
from policies.registry import Registered
from policies.rounding import ROUNDING
from profiles.igniter.performance_model import IgniterProfile

SHARES_PERCENT = (20.0, 40.0, 50.0, 60.0, 80.0)
WORKLOADS_PER_GPU = 2
_GAIN_MIN = 0.05
_SHOWN = 4  # rejected GPUs in a decision


@dataclass(slots=True)
class _Gpu:
    """A planned GPU with its one or two gpulets."""

    place: int
    replicas: list[Replica] = field(default_factory=list)

    @property
    def free_percent(self) -> float:
        return WHOLE_PERCENT - sum(replica.share_percent for replica in self.replicas)


class Gpulets:
    """gpu-lets+."""

    def place(
        self,
        models: Sequence[PlacedModelInput],
        gpus: Sequence[GpuSlot],
        profiles: Profiles,
        current: Placement | None = None,  # noqa: ARG002  it plans anew
    ) -> Placement:
        """Place; needs `IgniterProfile`s, and prices where there are several types of GPU."""
        return place_by_kind(models, gpus, profiles, _plan)


def _plan(models: Sequence[tuple[PlacedModelInput, IgniterProfile]], kind: IgniterGpuKind) -> KindPlan:
    gpus: list[_Gpu] = []
    unplaced: list[Unplaced] = []
    decisions: list[Decision] = []
    for model, profile in sorted(models, key=lambda pair: -(pair[0].rate_rps or 0.0)):
        wanted, reason = _gpulets_of(model, profile, kind)
        if reason is not None:
            missing_rps = (model.rate_rps or 0.0) - sum(replica.rate_rps for replica in wanted)
            unplaced.append(Unplaced(model.model_id, missing_rps, reason))
        for replica in wanted:
            gpu, rejected = _best_fit(replica, gpus, kind)
            if gpu is None:
                gpu = _Gpu(len(gpus))
                gpus.append(gpu)
            gpu.replicas.append(replica)
            decisions.append(
                Decision(
                    str(model.model_id),
                    kind.name(gpu.place),
                    {"share_percent": replica.share_percent, "batch": replica.batch_size},
                    tuple(rejected[:_SHOWN]),
                )
            )
    return KindPlan(tuple(tuple(gpu.replicas) for gpu in gpus), tuple(unplaced), tuple(decisions))


def efficient_share_percent(profile: IgniterProfile, objective_ms: float) -> float:
    """The share with the largest gain of throughput per percent over the one before it."""
    best_gain, best = 0.0, SHARES_PERCENT[0]
    before_rps = _saturated(profile, SHARES_PERCENT[0], objective_ms)[1]
    for smaller, share in pairwise(SHARES_PERCENT):
        rps = _saturated(profile, share, objective_ms)[1]
        gain = (rps - before_rps) / (share - smaller)
        if rps - before_rps >= _GAIN_MIN * before_rps and gain > best_gain * (1 + ROUNDING):
            best_gain, best = gain, share
        before_rps = rps
    return best


def _gpulets_of(
    model: PlacedModelInput, profile: IgniterProfile, kind: IgniterGpuKind
) -> tuple[list[Replica], str | None]:
    """Saturated gpulets of the largest share while one is not enough, then one that meets the rest of the rate."""
    left_rps, objective_ms = model.rate_rps or 0.0, model.slo_ms / 2
    largest = SHARES_PERCENT[-1]
    if profile.share_percent_min > largest:
        least = profile.share_percent_min
        return [], f"its profile knows no share under {least:g} %, a gpulet has {largest:g} % at most"
    batch_size, most_rps = _saturated(profile, largest, objective_ms)
    if batch_size == 0:
        return [], (
            f"half its SLO, {objective_ms:g} ms, is below the {modelled_ms(profile, 1, largest):.2f} ms of a single "
            f"request on {largest:g} % of a {kind.gpu_type}"
        )
    if memory_of(model, profile, batch_size) > kind.memory_bytes:
        return [], f"memory: a {kind.gpu_type} has less than a batch of {batch_size} needs"
    wanted: list[Replica] = []
    while left_rps > most_rps:
        if len(wanted) == len(kind.slots):
            return wanted, f"it would take more than all {len(kind.slots)} GPUs of type {kind.gpu_type}"
        wanted.append(Replica(model, profile, most_rps, batch_size, largest))
        left_rps -= most_rps
    least = max(efficient_share_percent(profile, objective_ms), profile.share_percent_min)
    for share in (s for s in SHARES_PERCENT if s >= least):
        size = _just_enough(profile, share, objective_ms, left_rps)
        if size:
            wanted.append(Replica(model, profile, left_rps, size, share))
            break
    return wanted, None


def _saturated(profile: IgniterProfile, share: float, objective_ms: float) -> tuple[int, float]:
    """The largest batch within the objective, alone, and its throughput; (0, 0) where none is."""
    for size in range(profile.batch_size_max, 0, -1):
        latency_ms = modelled_ms(profile, size, share)
        if latency_ms <= objective_ms:
            return size, 1000 * size / latency_ms
    return 0, 0.0


def _just_enough(profile: IgniterProfile, share: float, objective_ms: float, rate_rps: float) -> int:
    """The smallest batch whose throughput, alone, meets the rate within the objective; 0 where none does."""
    for size in range(1, profile.batch_size_max + 1):
        latency_ms = modelled_ms(profile, size, share)
        if latency_ms > objective_ms:
            return 0
        if 1000 * size / latency_ms >= rate_rps * (1 - ROUNDING):
            return size
    return 0


def _best_fit(
    newcomer: Replica, gpus: Sequence[_Gpu], kind: IgniterGpuKind
) -> tuple[_Gpu | None, list[Rejected]]:
    """The GPU with the least share left over, the first of equals, of those where the newcomer is in time."""
    best: _Gpu | None = None
    rejected: list[Rejected] = []
    for gpu in gpus:
        reason = _why_not(newcomer, gpu, kind)
        if reason is None and (best is None or gpu.free_percent < best.free_percent):
            best = gpu
        elif reason is not None:
            metrics = {"free_percent": gpu.free_percent}
            rejected.append(Rejected(kind.name(gpu.place), reason, metrics))
    return best, rejected


def _why_not(newcomer: Replica, gpu: _Gpu, kind: IgniterGpuKind) -> str | None:
    if len(gpu.replicas) >= WORKLOADS_PER_GPU:
        return "it has two workloads"
    if gpu.free_percent < newcomer.share_percent:
        return f"{gpu.free_percent:g} % are free"
    everybody = [*gpu.replicas, newcomer]
    if any(other.model.model_id == newcomer.model.model_id for other in gpu.replicas):
        return "it has another gpulet of this model"
    if sum(memory_of(r.model, r.profile, r.batch_size) for r in everybody) > kind.memory_bytes:
        return "its memory is full"
    alone_ms = modelled_ms(newcomer.profile, newcomer.batch_size, newcomer.share_percent)
    own = newcomer.profile.coefficients
    cache_percent = sum(replica.resident.cache_percent for replica in gpu.replicas)
    latency_ms = alone_ms * (1 + own.cache_slowdown_per_percent * cache_percent)
    if latency_ms > newcomer.model.slo_ms / 2:
        return f"beside what is there it would take {latency_ms:.2f} ms"
    return None


REGISTERED: Final = Registered({}, lambda _: Gpulets())
