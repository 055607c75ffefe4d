"""iGniter (IEEE TPDS 34(3), 2023): the least share that keeps half the SLO, neighbours included.

Theorem 1 gives each workload a batch and a share for itself (`workload.py`). Algorithm 1 takes them by
that share, largest first, to the GPU where all shares together grow least; algorithm 2 makes them grow, a unit
at a time, until the performance model of section 3.1 finds nobody late (`gpu.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fabric.ids import ModelId
from fabric.policy_options import Choice
from policies.placement.common.base import GpuSlot, PlacedModelInput, Placement, Profiles, Unplaced
from policies.placement.igniter.cluster import place_by_kind
from policies.placement.igniter.gpu import SharedGpu
from policies.placement.igniter.packing import Choose, least_growth, pack
from policies.placement.igniter.plan import KindPlan, Replica
from policies.placement.igniter.workload import IgniterGpuKind, IgniterWorkload, demand_of
from policies.registry import Registered
from profiles.igniter.performance_model import IgniterProfile


class Igniter:
    """Algorithms 1 and 2. `is_new_checked`: a workload on a new GPU goes through algorithm 2 as well.

    The paper gives it r_lower, which knows no power limit: 1 of 50 random workload sets is then predicted late.
    """

    def __init__(self, *, is_new_checked: bool = True) -> None:
        self._is_new_checked = is_new_checked

    def place(
        self,
        models: Sequence[PlacedModelInput],
        gpus: Sequence[GpuSlot],
        profiles: Profiles,
        current: Placement | None = None,  # noqa: ARG002  the paper plans anew
    ) -> Placement:
        """Place; needs `IgniterProfile`s, and prices where there are several types of GPU."""
        return place_by_kind(models, gpus, profiles, self.plan)

    def plan(
        self, models: Sequence[tuple[PlacedModelInput, IgniterProfile]], kind: IgniterGpuKind
    ) -> KindPlan:
        """The plan for one kind of GPU."""
        return shared_plan(models, kind, least_growth, is_new_checked=self._is_new_checked)


def shared_plan(
    models: Sequence[tuple[PlacedModelInput, IgniterProfile]],
    kind: IgniterGpuKind,
    choose: Choose,
    *,
    is_new_checked: bool,
) -> KindPlan:
    """Theorem 1 for every model, then packing by that rule."""
    workloads: list[IgniterWorkload] = []
    unplaced: list[Unplaced] = []
    profile_of = {model.model_id: profile for model, profile in models}
    for model, profile in models:
        demand = demand_of(model, profile, kind)
        if isinstance(demand, str):
            unplaced.append(Unplaced(model.model_id, model.rate_rps, demand))
            continue
        large = next((w for w in demand.workloads if w.memory_bytes > kind.memory_bytes), None)
        if large is not None:
            reason = f"memory: it needs {large.memory_bytes / 2**30:.2f} GB, a {kind.gpu_type} has less"
            unplaced.append(Unplaced(model.model_id, model.rate_rps, reason))
            continue
        if demand.missing_rps > 0:
            reason = f"it would take more than all {len(kind.slots)} GPUs of type {kind.gpu_type} for itself"
            unplaced.append(Unplaced(model.model_id, demand.missing_rps, reason))
        workloads.extend(demand.workloads)
    packing = pack(workloads, kind, choose, is_new_checked=is_new_checked)
    return KindPlan(
        tuple(_replicas(gpu, profile_of) for gpu in packing.gpus), tuple(unplaced), packing.decisions
    )


def _replicas(gpu: SharedGpu, profile_of: dict[ModelId, IgniterProfile]) -> tuple[Replica, ...]:
    return tuple(
        Replica(w.model, profile_of[w.model.model_id], w.rate_rps, w.batch_size, gpu.kind.percent(units))
        for w, units in zip(gpu.workloads, gpu.units, strict=True)
    )


REGISTERED: Final = Registered(
    {"new_gpu": Choice(("checked", "paper"))},
    lambda options: Igniter(is_new_checked=options["new_gpu"] == "checked"),
)
