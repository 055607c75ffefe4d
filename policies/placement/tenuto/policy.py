"""The thesis' conclusions as a policy (sections 6.2, 6.3 and 7.1).

Thesis: metrics of a batch alone do not say how batches bear each other; queues inside the cluster eat the SLO;
batches must not be larger than it takes; goodput alone starves heavy models. So goodput is counted here with
interference, batch forming and queueing, smaller batches win among equals, and of plans that bring about the
same the fairest is taken.

Where the cluster's interference model knows what slices without limits do to each other (`sm`), plans are made of
such slices with one model each and bounded batches: an integer program where the cluster is small, then local
search, once for goodput alone and once with fairness in it. All end by counts, never by the clock. Other policies' plans
are candidates too, judged by the same model. Where nobody knows what sharing in space costs, or a rate is not known, GPUs are shared in
time, as `symphony` does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from msgspec.structs import replace

from fabric.errors import ConfigError, ProfileError
from fabric.ids import ModelId
from fabric.policy_options import Number, Schema
from policies.placement.common.base import (
    Decision,
    GpuSlot,
    PlacedModelInput,
    Placement,
    PlacementPolicy,
    PlannedModel,
    PlannedSlice,
    Profiles,
    Rejected,
    Unplaced,
    cannot_host,
    in_gib,
    slice_memory_bytes,
)
from policies.placement.common.conditions import Conditions
from policies.placement.common.demands import rate_of
from policies.placement.common.gpu_kinds import gpu_classes
from policies.placement.common.request_checks import in_order, joined, rated
from policies.placement.milp import Milp
from policies.placement.registry import placement_policy
from policies.placement.symphony.policy import Symphony
from policies.placement.tenuto.exact import exact_cluster
from policies.placement.tenuto.forecast import forecast_of, weight_of, worst_fraction
from policies.placement.tenuto.goodput import GoodputModel
from policies.placement.tenuto.plans import placement_of, with_batches
from policies.placement.tenuto.search import Search, empty_cluster
from policies.placement.tenuto.task import PlacementTask, task_of
from policies.registry import Registered

OPTIONS: Schema = {
    "fairness_cost": Number(0.01, maximum=1.0, is_minimum_allowed=True),
    "floor": Number(0.0, maximum=1.0, is_minimum_allowed=True),
    "slices_max": Number(8, minimum=1, maximum=48, is_minimum_allowed=True, is_whole=True),
    "forecasts_max": Number(20_000, minimum=1, is_minimum_allowed=True, is_whole=True),
}
_FAIRNESS = (0.0, 0.3)
_RIVALS_GPUS_MAX = 16  # Usher's groups and the program of the thesis take seconds beyond


@dataclass(frozen=True, slots=True)
class _Candidate:
    name: str
    plan: Placement
    served: Mapping[ModelId, float]
    worst: float

    @property
    def total_rps(self) -> float:
        return math.fsum(self.served.values())

    def metrics(self) -> dict[str, float]:
        return {"expected_goodput_rps": self.total_rps, "worst_served_fraction": self.worst}


class Tenuto:
    """Options: see `OPTIONS`; `rivals` are policies whose plans are candidates too.

    `fairness_cost`: of the best goodput, how much may go for a better served worst model. `floor`: a served
    fraction that each model should reach, whatever it costs. `slices_max`: per GPU. `forecasts_max` bounds
    each search.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        rivals: Mapping[str, PlacementPolicy],
        conditions: Conditions | None = None,
    ) -> None:
        self._options = options
        self._rivals = rivals
        self._conditions = conditions or Conditions()

    def under(self, conditions: Conditions) -> Tenuto:
        """The same for what the plan will run under."""
        return Tenuto(self._options, self._rivals, conditions)

    def place(
        self,
        models: Sequence[PlacedModelInput],
        gpus: Sequence[GpuSlot],
        profiles: Profiles,
        current: Placement | None = None,
    ) -> Placement:
        """Place; what the plan cannot serve in time is unplaced as a part of its rate.

        Raises ConfigError where there is no GPU.
        """
        if any(model.rate_rps is None for model in models):
            return Symphony().place(models, gpus, profiles, current)
        asked, idle = rated(models)
        whole = Symphony().place(asked, gpus, profiles, current)
        whole = replace(whole, unplaced=in_order((*whole.unplaced, *idle), models))
        reasons = {one.model_id: one.reason for one in idle}
        reasons |= _reasons(asked, gpus, profiles)
        wanted = [model for model in models if model.model_id not in reasons]
        task = task_of(wanted, gpu_classes(gpus), profiles, self._conditions, self._options["slices_max"])
        is_fixed = self._conditions.has_fixed_batches and all(gpu.is_emulated for gpu in gpus)
        if not wanted or (task is None and not is_fixed):
            return whole
        plans = {"shared in time": self._shared(wanted, gpus, profiles)}
        if task is not None:
            searched = {
                name: self._filled(plan, wanted, gpus, profiles)
                for name, plan in self._searched(task).items()
            }
            plans = {**searched, **plans, **self._rival_plans(wanted, gpus, profiles)}
        candidates = [
            _Candidate(name, plan, served, worst_fraction(served, wanted))
            for name, plan in plans.items()
            for served in (forecast_of(plan, wanted, gpus, profiles, self._conditions),)
        ]
        return self._answer(candidates, models, reasons)

    def _shared(
        self, models: Sequence[PlacedModelInput], gpus: Sequence[GpuSlot], profiles: Profiles
    ) -> Placement:
        shared = Symphony().place(models, gpus, profiles)
        if self._conditions.has_fixed_batches:
            shared = with_batches(shared, models, gpus, profiles, self._conditions)
        return shared

    def _filled(
        self,
        plan: Placement,
        models: Sequence[PlacedModelInput],
        gpus: Sequence[GpuSlot],
        profiles: Profiles,
    ) -> Placement:
        """With the models that have no place on the GPUs that are idle: there they take nothing from others, and some requests are in time."""
        hosted = _hosted_by(plan)
        idle = [gpu for gpu in gpus if gpu.index not in plan.gpus_used]
        left = [model for model in models if model.model_id not in hosted]
        if not idle or not left:
            return plan
        return replace(plan, slices=(*plan.slices, *self._shared(left, idle, profiles).slices))

    def _searched(self, task: PlacementTask) -> dict[str, Placement]:
        model = GoodputModel(task)
        found = {}
        for fairness in _FAIRNESS:
            for how in ("", "from the program's optimum, "):
                start = exact_cluster(task, model) if how else empty_cluster(task)
                if start is None:
                    continue
                search = Search(task, model, fairness, self._options["floor"])
                cluster = search.improve(start, self._options["forecasts_max"])
                aim = "fair goodput" if fairness else "goodput"
                found[f"shared in space, {how}searched for {aim}"] = placement_of(task, model, cluster)
                if model.forecast(cluster).worst_fraction >= 1:
                    return found  # all is served: there is nothing that is better or fairer
        return found

    def _rival_plans(
        self, models: Sequence[PlacedModelInput], gpus: Sequence[GpuSlot], profiles: Profiles
    ) -> dict[str, Placement]:
        found: dict[str, Placement] = {}
        for name, policy in self._rivals.items() if len(gpus) <= _RIVALS_GPUS_MAX else ():
            try:
                found[name] = policy.place(models, gpus, profiles)
            except (ConfigError, ProfileError):
                continue  # it lacks something that this workload need not have: prices, a solver
        return found

    def _answer(
        self,
        candidates: Sequence[_Candidate],
        models: Sequence[PlacedModelInput],
        reasons: Mapping[ModelId, str],
    ) -> Placement:
        floor: float = self._options["floor"]
        reached = max(min(candidate.worst, floor) for candidate in candidates)
        fair = [candidate for candidate in candidates if candidate.worst >= reached]
        best_rps = max(candidate.total_rps for candidate in fair)
        enough_rps = (1 - self._options["fairness_cost"]) * best_rps
        near = [candidate for candidate in fair if candidate.total_rps >= enough_rps]
        # In steps that matter, so that among equals the first stays first: our own, with the shortest batches.
        near.sort(key=lambda one: (-round(one.worst, 2), -round(one.total_rps / (best_rps or 1.0), 3)))
        chosen = near[0]
        hosted = _hosted_by(chosen.plan)
        missing = {
            model.model_id: rate_of(model) - chosen.served.get(model.model_id, 0.0) for model in models
        }
        unplaced = tuple(
            Unplaced(
                model.model_id,
                missing[model.model_id],
                reasons.get(model.model_id) or _shortfall(model, hosted),
            )
            for model in models
            if missing[model.model_id] > 1e-9 * rate_of(model) or model.model_id in reasons
        )
        rejected = tuple(
            Rejected(
                candidate.name,
                _why_not(candidate, reached, enough_rps),
                candidate.metrics(),
            )
            for candidate in sorted(candidates, key=lambda one: -one.total_rps)
            if candidate is not chosen
        )
        decision = Decision("placement", chosen.name, chosen.metrics(), rejected)
        return Placement(
            _with_rates(chosen.plan.slices, chosen.served),
            unplaced,
            chosen.plan.violations,
            chosen.total_rps,
            (decision, *chosen.plan.decisions),
        )


def _hosted_by(plan: Placement) -> set[ModelId]:
    return {entry.model_id for planned in plan.slices for entry in planned.models}


def _with_rates(slices: Sequence[PlannedSlice], served: Mapping[ModelId, float]) -> tuple[PlannedSlice, ...]:
    """Where the plan has rates: what is forecast, in the parts that it has them in, so that they and what is unplaced make the whole."""
    weights = dict.fromkeys(served, 0.0)
    for planned in slices:
        for entry in planned.models:
            weights[entry.model_id] += weight_of(entry)

    def at_forecast(entry: PlannedModel) -> PlannedModel:
        if entry.rate_rps is None:
            return entry
        return replace(entry, rate_rps=served[entry.model_id] * weight_of(entry) / weights[entry.model_id])

    return tuple(replace(planned, models=tuple(map(at_forecast, planned.models))) for planned in slices)


def _why_not(candidate: _Candidate, reached: float, enough_rps: float) -> str:
    if candidate.worst < reached:
        return "under the floor"
    return "less goodput" if candidate.total_rps < enough_rps else "no fairer"


def _shortfall(model: PlacedModelInput, hosted: set[ModelId]) -> str:
    if model.model_id in hosted:
        return "its slices carry no more within its SLO, beside their neighbours"
    return (
        "other models bring more goodput on these GPUs"
        if hosted
        else "no GPU has room for the batches that its SLO allows"
    )


def _reasons(
    models: Sequence[PlacedModelInput], gpus: Sequence[GpuSlot], profiles: Profiles
) -> dict[ModelId, str]:
    """Why no GPU can ever serve them, for those models for which that is so."""
    kinds = [equal.slot for equal in gpu_classes(gpus)]
    found: dict[ModelId, str] = {}
    for model in models:
        why = [cannot_host(model, gpu, profiles) or _too_large(model, gpu, profiles) for gpu in kinds]
        known = [reason for reason in why if reason is not None]
        if len(known) == len(why):
            found[model.model_id] = joined(known)
    return found


def _too_large(model: PlacedModelInput, gpu: GpuSlot, profiles: Profiles) -> str | None:
    needed = slice_memory_bytes([model], gpu.gpu_type, profiles, batch_max={model.model_id: 1})
    if needed <= gpu.memory_bytes:
        return None
    return f"memory: a single request needs {in_gib(needed)} of a GPU's {in_gib(gpu.memory_bytes)}"


_RIVALS = ("exclusive", "usher", "wsm-usher", "ao-milp", "wsm-milp")
"""Policies whose plans are considered beside its own."""
# About what their 10 s bring: of 28 random programs on up to 16 GPUs all stages were proven, by 84 nodes at most.
_RIVAL_NODES_MAX = 1_000


def _rivals() -> dict[str, PlacementPolicy]:
    """They look at no clock, so that `tenuto` plans alike on every machine."""
    found = {name: placement_policy(name) for name in _RIVALS}
    return {
        name: policy.within_nodes(_RIVAL_NODES_MAX) if isinstance(policy, Milp) else policy
        for name, policy in found.items()
    }


REGISTERED: Final = Registered(OPTIONS, lambda options: Tenuto(options, _rivals()))
