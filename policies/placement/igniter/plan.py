"""A plan of one kind of GPU, and what the performance model expects of it on the cluster."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from fabric.ids import ModelId
from policies.placement.common.base import (
    Decision,
    PlacedModelInput,
    Placement,
    PlannedModel,
    PlannedSlice,
    Unplaced,
    in_gib,
    share_violations,
)
from policies.placement.igniter.workload import IgniterGpuKind, memory_of, throughput_rps
from policies.rounding import ROUNDING
from profiles.igniter.performance_model import IgniterProfile, Resident, predict_ms


@dataclass(frozen=True, slots=True)
class Replica:
    """A model on a share of a planned GPU. `rate_rps` is the part of its rate that it is planned for."""

    model: PlacedModelInput
    profile: IgniterProfile
    rate_rps: float
    batch_size: int
    share_percent: float

    @property
    def resident(self) -> Resident:
        """As the performance model sees it."""
        return Resident(self.profile.coefficients, self.batch_size, self.share_percent)


@dataclass(frozen=True, slots=True)
class KindPlan:
    """A plan for one kind of GPU: its GPUs in order, as many as it wants; what it cannot serve, and why."""

    gpus: tuple[tuple[Replica, ...], ...]
    unplaced: tuple[Unplaced, ...] = ()
    decisions: tuple[Decision, ...] = ()


@dataclass(slots=True)
class PackedCluster:
    """A plan on the cluster: its GPUs with their places among the slots, and what rate is missing, and why."""

    slices: list[tuple[IgniterGpuKind, int, tuple[Replica, ...]]] = field(default_factory=list)
    missing: dict[ModelId, tuple[float, list[str]]] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)

    @property
    def missing_rps(self) -> float:
        """Of all models."""
        return sum(rate_rps for rate_rps, _ in self.missing.values())

    @property
    def price_per_hour(self) -> float:
        """Of the GPUs used, where they have prices."""
        return sum(kind.slots[place].price_per_hour or 0.0 for kind, place, _ in self.slices)


def placement_of(outcome: PackedCluster, unplaced: Iterable[Unplaced]) -> Placement:
    """The placement with every replica's latency beside its neighbours, and the promises that breaks."""
    slices: list[PlannedSlice] = []
    violations: list[str] = []
    goodput_rps = 0.0
    for kind, place, replicas in outcome.slices:
        gpu = kind.slots[place].index
        needed = sum(memory_of(r.model, r.profile, r.batch_size) for r in replicas)
        if needed > kind.slots[place].memory_bytes:
            violations.append(
                f"GPU {gpu}: needs {in_gib(needed)}, has {in_gib(kind.slots[place].memory_bytes)}"
            )
        predicted_ms = predict_ms(kind.hardware, [replica.resident for replica in replicas])
        for replica, latency_ms in zip(replicas, predicted_ms, strict=True):
            rps = throughput_rps(replica.profile, replica.batch_size, latency_ms)
            model = replica.model
            violations.extend(_violations(replica, gpu, latency_ms, rps))
            goodput_rps += min(replica.rate_rps, rps) if latency_ms <= model.slo_ms else 0.0
            entry = PlannedModel(
                model.model_id, replica.batch_size, replica.rate_rps, predicted_ms=latency_ms
            )
            slices.append(PlannedSlice(gpu, replica.share_percent, (entry,)))
    slices.sort(key=lambda planned: planned.gpu)
    return Placement(
        tuple(slices),
        tuple(unplaced),
        share_violations(slices) + tuple(violations),
        goodput_rps,
        tuple(outcome.decisions),
    )


def _violations(replica: Replica, gpu: int, latency_ms: float, rps: float) -> list[str]:
    """Half the SLO and the rate, against the performance model (constraints 13 and 14)."""
    found = []
    objective_ms = replica.model.slo_ms / 2
    where = f"GPU {gpu}: {replica.model.model_id}"
    if latency_ms > objective_ms * (1 + ROUNDING):
        found.append(f"{where} takes {latency_ms:.2f} ms, over half its SLO, {objective_ms:g} ms")
    if rps < replica.rate_rps * (1 - ROUNDING):
        found.append(f"{where} carries {rps:.1f} requests per second of {replica.rate_rps:g}")
    return found
