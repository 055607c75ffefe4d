"""What any plan brings, whoever made it: slices with limits and without, one model each or many in turn.

The same view as `goodput.py`, for plans that are not made of its items. Under deferred batching a model whose
batches the plan does not bound runs the largest b with (1 + 1/N) f l(b) ≤ SLO on its N slices, or what arrives
within its SLO. Slices of the same models are a pool; those of fewer models are filled first, as the scheduler does
(ADR 0011), and an overloaded pool cuts all its models alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fabric.ids import ModelId
from policies.placement.common.base import (
    GpuSlot,
    PlacedModelInput,
    Placement,
    PlannedModel,
    PlannedSlice,
    Profiles,
    largest_batch,
)
from policies.placement.common.conditions import Conditions
from policies.placement.common.demands import rate_of
from policies.placement.tenuto.goodput import USABLE
from policies.placement.tenuto.task import forming_ms
from profiles.interference import Interference, NoInterference, Running
from profiles.model import ModelProfile

# Models that take turns disturb each other's stagger: played, a full pool of five brings 0.91 to 0.97 of the bound.
_USABLE_SHARED = 0.93
_ROUNDS = 6


@dataclass(slots=True)
class _Entry:
    """A model on a slice; `batch` as it will run and `capacity_rps` are found anew each round."""

    planned: PlannedModel
    model: PlacedModelInput
    profile: ModelProfile
    table: Sequence[float]
    replicas: int
    part: float
    batch: int = 1
    exec_ms: float = 0.0
    capacity_rps: float = 0.0
    served_rps: float = 0.0


@dataclass(slots=True)
class _Slice:
    """`busy` is what of the time it runs something."""

    planned: PlannedSlice
    entries: list[_Entry]
    interference: Interference
    neighbours: list[_Slice] = field(default_factory=list)
    busy: float = 1.0

    def running(self) -> Running:
        """What a neighbour most likely meets here."""
        entry = max(self.entries, key=lambda one: one.served_rps * one.exec_ms / one.batch)
        return Running(entry.model.model_id, entry.batch, self.planned.share_percent)


def forecast_of(
    plan: Placement,
    models: Sequence[PlacedModelInput],
    gpus: Sequence[GpuSlot],
    profiles: Profiles,
    conditions: Conditions,
) -> dict[ModelId, float]:
    """Requests per second in time, by model. A plan without batch sizes brings nothing where they are fixed."""
    slices = _slices(plan, models, gpus, profiles, conditions)
    for _ in range(_ROUNDS):
        for one in slices:
            _measure(one, conditions)
        loads = _route_fixed(slices, conditions) if conditions.has_fixed_batches else _route_pools(slices)
        for one, load in zip(slices, loads, strict=True):
            one.busy = (one.busy + min(1.0, load)) / 2
    served = dict.fromkeys((model.model_id for model in models), 0.0)
    for one in slices:
        for entry in one.entries:
            served[entry.model.model_id] += entry.served_rps
    return {model.model_id: min(served[model.model_id], rate_of(model)) for model in models}


def _slices(
    plan: Placement,
    models: Sequence[PlacedModelInput],
    gpus: Sequence[GpuSlot],
    profiles: Profiles,
    conditions: Conditions,
) -> list[_Slice]:
    inputs = {model.model_id: model for model in models}
    type_of = {gpu.index: gpu.gpu_type for gpu in gpus}
    hosted = [entry for planned in plan.slices for entry in planned.models]
    weights: dict[ModelId, float] = {}
    replicas: dict[ModelId, int] = {}
    for entry in hosted:
        weights[entry.model_id] = weights.get(entry.model_id, 0.0) + weight_of(entry)
        replicas[entry.model_id] = replicas.get(entry.model_id, 0) + 1
    slices = []
    for planned in plan.slices:
        gpu_type = type_of[planned.gpu]
        entries = []
        for entry in planned.models:
            profile = profiles[entry.model_id, gpu_type]
            table = profile.exec_table(planned.share_percent)
            part = weight_of(entry) / weights[entry.model_id]
            model = inputs[entry.model_id]
            entries.append(_Entry(entry, model, profile, table, replicas[entry.model_id], part))
        if entries:
            slices.append(_Slice(planned, entries, conditions.interference.get(gpu_type) or NoInterference()))
    for one in slices:
        one.neighbours = [
            other for other in slices if other is not one and other.planned.gpu == one.planned.gpu
        ]
    return slices


def weight_of(entry: PlannedModel) -> float:
    """A replica's part of its model's requests, beside its others': by the plan's rates, or by batch sizes."""
    return entry.rate_rps or float(entry.batch or 1)


def _measure(one: _Slice, conditions: Conditions) -> None:
    """How large its batches are and how long they take, beside its neighbours as busy as they are."""
    others = [other.running() for other in one.neighbours]
    busy = [other.busy for other in one.neighbours]
    for entry in one.entries:
        running = Running(entry.model.model_id, entry.batch, one.planned.share_percent)
        alone = one.interference.slowdown(running, ())
        factor = alone
        if others:
            parts = [one.interference.slowdown(running, (other,)) - alone for other in others]
            among = sum(map(float.__mul__, parts, busy)) / sum(parts) if sum(parts) else 0.0
            factor += (one.interference.slowdown(running, others) - alone) * among
        slo_ms = entry.model.slo_ms - conditions.delay_ms(1)
        if conditions.has_fixed_batches:
            filled = 1 + int(rate_of(entry.model) * conditions.max_wait_ms / 1000)
            size = min(entry.planned.batch or 0, filled, len(entry.table))
        else:
            size = largest_batch(entry.table, slo_ms / (1 + 1 / entry.replicas) / factor)
            size = min(
                size, entry.planned.batch_max or size, max(1, int(rate_of(entry.model) * slo_ms / 1000))
            )
        entry.batch = max(1, size)
        entry.exec_ms = factor * entry.table[entry.batch - 1]
        entry.capacity_rps = 1000 * size / entry.exec_ms if entry.exec_ms <= slo_ms else 0.0


def _route_fixed(slices: Sequence[_Slice], conditions: Conditions) -> list[float]:
    """Each replica gets its part of the rate, whatever it can carry."""
    loads = []
    for one in slices:
        parts = [rate_of(entry.model) * entry.part for entry in one.entries]
        load = sum(
            rps / entry.capacity_rps if entry.capacity_rps else 0.0
            for rps, entry in zip(parts, one.entries, strict=True)
        )
        longest_ms = max(entry.exec_ms for entry in one.entries)
        for rps, entry in zip(parts, one.entries, strict=True):
            needed_ms = (
                forming_ms(entry.model, entry.planned.batch or 1, conditions)
                + entry.exec_ms
                + min(1.0, load) * longest_ms
            )
            if not entry.capacity_rps or needed_ms > entry.model.slo_ms - conditions.delay_ms(entry.batch):
                entry.served_rps = 0.0
            elif load <= USABLE:
                entry.served_rps = rps
            else:  # as in `goodput.py`: nothing protects an overloaded replica's batches
                spread_ms = 1000 * entry.batch / rate_of(entry.model)
                growth_ms = entry.exec_ms * (1 - entry.table[0] / entry.table[entry.batch - 1])
                entry.served_rps = rps * USABLE / load * max(0.0, 1 - growth_ms / spread_ms)
        loads.append(load)
    return loads


def _route_pools(slices: Sequence[_Slice]) -> list[float]:
    """Pools of the fewest models first; what one cannot carry goes on to the next that hosts the model."""
    pools: dict[tuple[int, tuple[str, ...]], list[int]] = {}
    for place, one in enumerate(slices):
        names = tuple(sorted(str(entry.model.model_id) for entry in one.entries))
        pools.setdefault((len(names), names), []).append(place)
    left = {entry.model.model_id: rate_of(entry.model) for one in slices for entry in one.entries}
    loads = [0.0] * len(slices)
    for _, places in sorted(pools.items()):
        carried: dict[ModelId, float] = {}
        for place in places:
            for entry in slices[place].entries:
                carried[entry.model.model_id] = carried.get(entry.model.model_id, 0.0) + entry.capacity_rps
        load = math.fsum(left[model_id] / rps for model_id, rps in carried.items() if rps)
        usable = USABLE if len(carried) == 1 else _USABLE_SHARED
        kept = min(1.0, usable / load) if load else 0.0
        for place in places:
            loads[place] = load
            for entry in slices[place].entries:
                rps = carried[entry.model.model_id]
                part = entry.capacity_rps / rps if rps else 0.0
                entry.served_rps = left[entry.model.model_id] * kept * part
        for model_id, rps in carried.items():
            left[model_id] *= 1 - kept if rps else 1.0
    return loads


def worst_fraction(served: Mapping[ModelId, float], models: Sequence[PlacedModelInput]) -> float:
    """Served over asked of the model that fares worst."""
    return min((served[model.model_id] / rate_of(model) for model in models), default=1.0)
