"""From a plan for one type of GPU to a placement on the cluster there is.

What `igniter`, `ffd`, `gslice` and `gpulets` share: which models can be planned on which type, the choice of the
type by price (iGniter section 5.3), best effort where the plan wants more GPUs than there are (thesis section
5.1.5: the plan's GPUs in their order until none is left), and what the model of section 3.1 predicts of it all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec.structs import replace

from fabric.ids import ModelId
from policies.placement.common.base import (
    Decision,
    GpuSlot,
    PlacedModelInput,
    Placement,
    Profiles,
    Rejected,
    Unplaced,
    cannot_host,
)
from policies.placement.common.request_checks import in_order, joined, rated, require_gpus, require_prices
from policies.placement.igniter.plan import KindPlan, PackedCluster, placement_of
from policies.placement.igniter.workload import IgniterGpuKind
from policies.rounding import ROUNDING
from profiles.igniter.performance_model import IgniterProfile


class Planner(Protocol):
    """A policy for GPUs of one kind, however many; every model has a rate over 0."""

    def __call__(
        self, models: Sequence[tuple[PlacedModelInput, IgniterProfile]], kind: IgniterGpuKind
    ) -> KindPlan:
        """Plan."""
        ...


def place_by_kind(
    models: Sequence[PlacedModelInput], gpus: Sequence[GpuSlot], profiles: Profiles, planner: Planner
) -> Placement:
    """Plan on each kind of GPU, take the cheapest plan, and say what the performance model expects of it.

    With several types, the plans compared are: everything on one type (what does not fit goes to the next
    cheaper plan's type), and each model on the type where it alone costs least. The one that serves most
    wins, among those the cheapest. Raises ConfigError where types must be compared and a price is missing, or
    where there is no GPU.
    """
    require_gpus(gpus)
    kinds = _kinds(models, gpus, profiles)
    if len({kind.gpu_type for kind in kinds}) > 1:
        slots = (slot for kind in kinds for slot in kind.slots)
        require_prices(slots, "with several types of GPU the placement compares prices")
    hosts = {(model.model_id, kind): _why_not_on(model, kind, profiles) for model in models for kind in kinds}
    planned, unrated = rated(models)
    orders = _orders(planned, kinds, profiles, hosts, planner)
    outcomes = [_follow(order, planned, profiles, hosts, planner) for order in orders]
    best = min(
        range(len(outcomes)),
        key=lambda i: (round(outcomes[i].missing_rps, 6), round(outcomes[i].price_per_hour, 9), i),
    )
    chosen = outcomes[best]
    if len(orders) > 1:
        chosen.decisions.append(_type_decision(orders, outcomes, best))
    no_data = {gpu.gpu_type: None for gpu in gpus if all(gpu.gpu_type != kind.gpu_type for kind in kinds)}
    missing = _unplaced(planned, chosen, tuple(no_data), profiles)
    return placement_of(chosen, in_order([*missing, *unrated], models))


# ---------------------------------------------------------------- which models on which kinds


def _kinds(
    models: Sequence[PlacedModelInput], gpus: Sequence[GpuSlot], profiles: Profiles
) -> tuple[IgniterGpuKind, ...]:
    """GPUs of one type and device belong together; a type without any iGniter profile has no hardware data."""
    slots: dict[tuple[str, str], list[GpuSlot]] = {}
    for gpu in gpus:
        slots.setdefault((gpu.gpu_type, gpu.device), []).append(gpu)
    kinds = []
    for (gpu_type, device), found in slots.items():
        known = (profiles.get((model.model_id, gpu_type)) for model in models)
        profile = next((p for p in known if isinstance(p, IgniterProfile)), None)
        if profile is not None:
            kinds.append(IgniterGpuKind(gpu_type, device, profile.hardware, tuple(found)))
    return tuple(kinds)


def _why_not_on(model: PlacedModelInput, kind: IgniterGpuKind, profiles: Profiles) -> str | None:
    reason = cannot_host(model, kind.slots[0], profiles)
    if reason is not None:
        return reason
    profile = profiles.get((model.model_id, kind.gpu_type))
    if not isinstance(profile, IgniterProfile):
        return _no_coefficients(model, kind.gpu_type, profiles)
    if profile.hardware != kind.hardware:
        return f"its iGniter coefficients are of other hardware than those of the models before it ({kind.gpu_type})"
    return None


def _no_coefficients(model: PlacedModelInput, gpu_type: str, profiles: Profiles) -> str:
    profile = profiles.get((model.model_id, gpu_type))
    if profile is None:
        return f"it has no profile for GPU type {gpu_type}"
    return f"its profile for GPU type {gpu_type} has no iGniter coefficients ({profile.source})"


def _unplaced(
    models: Sequence[PlacedModelInput], outcome: PackedCluster, no_data: Sequence[str], profiles: Profiles
) -> list[Unplaced]:
    """What found no place; `no_data` are the types of GPU without any coefficients."""
    unplaced = []
    for model in models:
        if model.model_id in outcome.missing:
            rate_rps, known = outcome.missing[model.model_id]
            more = [_no_coefficients(model, gpu_type, profiles) for gpu_type in no_data]
            unplaced.append(Unplaced(model.model_id, rate_rps, joined([*known, *more])))
    return unplaced


# ---------------------------------------------------------------- which kind first

_Order = tuple[str, tuple[IgniterGpuKind, ...], Mapping[ModelId, int]]
"""A name, kinds in the order they are filled, and at which of them each model starts (0 where absent)."""
_Hosts = Mapping[tuple[ModelId, IgniterGpuKind], str | None]


def _orders(
    models: Sequence[PlacedModelInput],
    kinds: tuple[IgniterGpuKind, ...],
    profiles: Profiles,
    hosts: _Hosts,
    planner: Planner,
) -> list[_Order]:
    if len(kinds) <= 1:
        return [("", kinds, {})]
    alone = {kind: _follow(("", (kind,), {}), models, profiles, hosts, planner) for kind in kinds}
    ranked = sorted(kinds, key=lambda k: (round(alone[k].missing_rps, 6), alone[k].price_per_hour))
    orders: list[_Order] = [
        (f"{kind.gpu_type} first", (kind, *(other for other in ranked if other is not kind)), {})
        for kind in ranked
    ]
    starts: dict[ModelId, int] = {}
    by_price = tuple(sorted(kinds, key=lambda kind: kind.slots[0].price_per_hour or 0.0))
    for model in models:
        costs = [_cost_alone(model, kind, profiles, hosts, planner) for kind in by_price]
        starts[model.model_id] = costs.index(min(costs))
    orders.append(("each model on its cheapest type", by_price, starts))
    return orders


def _cost_alone(
    model: PlacedModelInput, kind: IgniterGpuKind, profiles: Profiles, hosts: _Hosts, planner: Planner
) -> float:
    """What the shares that a model takes alone cost on that kind, infinite where it cannot be served."""
    profile = profiles.get((model.model_id, kind.gpu_type))
    if hosts[model.model_id, kind] is not None or not isinstance(profile, IgniterProfile):
        return math.inf
    plan = planner([(model, profile)], kind)
    if plan.unplaced:
        return math.inf
    percent = sum(replica.share_percent for gpu in plan.gpus for replica in gpu)
    return percent / 100 * (kind.slots[0].price_per_hour or 0.0)


def _follow(
    order: _Order, models: Sequence[PlacedModelInput], profiles: Profiles, hosts: _Hosts, planner: Planner
) -> PackedCluster:
    """Fill the kinds one after the other; what a kind cannot serve, or has no GPU left for, goes on."""
    _, kinds, starts = order
    outcome = PackedCluster()
    reasons: dict[ModelId, list[str]] = {model.model_id: [] for model in models}
    left = {model.model_id: model.rate_rps or 0.0 for model in models}
    for place, kind in enumerate(kinds):
        asked: list[tuple[PlacedModelInput, IgniterProfile]] = []
        for model in models:
            model_id = model.model_id
            if left[model_id] <= 0 or starts.get(model_id, 0) > place:
                continue
            reason = hosts[model_id, kind]
            profile = profiles.get((model_id, kind.gpu_type))
            if reason is not None:
                reasons[model_id].append(reason)
            elif isinstance(profile, IgniterProfile):
                asked.append((replace(model, rate_rps=left[model_id]), profile))
        plan = planner(asked, kind)
        outcome.decisions.extend(plan.decisions)
        for number, replicas in enumerate(plan.gpus[: len(kind.slots)]):
            outcome.slices.append((kind, number, replicas))
            for replica in replicas:
                left[replica.model.model_id] -= replica.rate_rps
        for model, _ in asked:
            if left[model.model_id] <= ROUNDING * (model.rate_rps or 0.0):
                left[model.model_id] = 0.0
        _explain(plan, kind, reasons)
    outcome.missing = {key: (rate_rps, reasons[key]) for key, rate_rps in left.items() if rate_rps > 0}
    return outcome


def _explain(plan: KindPlan, kind: IgniterGpuKind, reasons: dict[ModelId, list[str]]) -> None:
    for unplaced in plan.unplaced:
        reasons[unplaced.model_id].append(unplaced.reason)
    short = f"the plan takes {len(plan.gpus)} GPUs of type {kind.gpu_type}, there are {len(kind.slots)}"
    for replicas in plan.gpus[len(kind.slots) :]:
        for replica in replicas:
            if short not in reasons[replica.model.model_id]:
                reasons[replica.model.model_id].append(short)


def _type_decision(orders: Sequence[_Order], outcomes: Sequence[PackedCluster], best: int) -> Decision:
    def metrics(outcome: PackedCluster) -> dict[str, float]:
        return {
            "price_per_hour": outcome.price_per_hour,
            "gpus": len(outcome.slices),
            "unplaced_rps": outcome.missing_rps,
        }

    won = outcomes[best]
    rejected = tuple(
        Rejected(
            name,
            "it serves less" if other.missing_rps > won.missing_rps + ROUNDING else "it is not cheaper",
            metrics(other),
        )
        for i, ((name, _, _), other) in enumerate(zip(orders, outcomes, strict=True))
        if i != best
    )
    return Decision("GPU type", orders[best][0], metrics(won), rejected)
