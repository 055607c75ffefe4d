"""Squishy bin packing (Nexus): which models share which slice, each with which batch size.

A model with rate r on a slice either saturates it (batches of the largest size B with 2·l(B) within the SLO, as a
request may just miss one batch and wait for it) or leaves a residue. A residue alone runs batches of b, the largest
with l(b) + b/r within the SLO, once per duty cycle b/r. Residues are merged while, at the shorter duty cycle d, their
batches of ⌈d·r⌉ fit into d and d + l is within every SLO. Unlike gpulet's packing (`policies/placement/gpulet/sharing.py`)
it tries that one cycle alone, asks for a request's own batch within the SLO instead of the whole round, and scales all
rates to the slices there are.

Nexus' own slices are all alike. Where some host other models than others do, a model takes those first that no other
model depends on, and what one model's slices cannot carry holds back only those that share them. Where some are slower,
a residue that finds only these free saturates them like a load.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fabric.ids import ModelId, SliceId
from policies.batching.batch_moments import Table
from policies.duty_cycle import Sharer, nexus_in_time, round_of

FACTOR_STEPS = 16
ROUNDS_MAX = 8  # of raising the load of those that still find room: one where all slices host the same models


@dataclass(slots=True, frozen=True)
class ModelLoad:
    """A model's demand; `budget_ms` is the SLO less the delay of getting a batch to a slice."""

    model_id: ModelId
    budget_ms: float
    per_ms: float


@dataclass(slots=True, frozen=True)
class Bin:
    """A slice to be filled, and the run times of the models it hosts."""

    slice_id: SliceId
    tables: Mapping[ModelId, Table]


Homes = Mapping[ModelId, Sequence[Bin]]
"""The slices that can serve a model in time, those first that others need least."""


@dataclass(slots=True)
class Share:
    """What one slice does for one model."""

    load: ModelLoad
    table: Table
    per_ms: float
    batch_size: int


@dataclass(slots=True)
class PackedPlan:
    """Per slice its models, in the order of their turns. `left`: the models for which no slice was left."""

    shares: dict[SliceId, list[Share]] = field(default_factory=dict)
    left: set[ModelId] = field(default_factory=set)


def spread(loads: Sequence[ModelLoad], bins: Sequence[Bin]) -> PackedPlan:
    """Fill all the bins with the given proportions of load, at the largest common factor that bisection finds to fit.

    So a cluster that is too small is used as well as it can be, and one that is too large keeps no slice back. Whoever
    can get no more than that stays there, and the others' load is raised further. Where models fit at no factor, their slices are
    left out, with all models that have no others: batches planned for some of them would be wrong beside the rest.
    """
    homes = homes_of([load for load in loads if load.per_ms > 0], bins)
    served = [load for load in loads if homes.get(load.model_id)]
    slices_of = {load.model_id: _slices(homes, load.model_id) for load in served}
    open_ = set(slices_of)
    settled: dict[ModelId, float] = {}
    plan, factor = PackedPlan(), 0.0
    for _ in range(ROUNDS_MAX):
        if not open_:
            break
        plan, factor, stuck = _raised(served, homes, settled, plan, factor)
        contested = frozenset[SliceId]().union(*(slices_of[model_id] for model_id in stuck))
        if not factor:
            return spread(loads, [bin_ for bin_ in bins if bin_.slice_id not in contested])
        sets = {slices_of[model_id] for model_id in stuck & open_}
        held = {model_id for model_id in open_ if slices_of[model_id] in sets}
        if not held:  # those that cannot get more are held back by others on their slices
            held = {model_id for model_id in open_ if slices_of[model_id] & contested} or open_
        settled.update(dict.fromkeys(held, factor))
        open_ = open_ - held
    _give_rest(plan, served, homes, bins)
    return plan


def _slices(homes: Homes, model_id: ModelId) -> frozenset[SliceId]:
    return frozenset(bin_.slice_id for bin_ in homes[model_id])


def _occupancy(bin_: Bin, load: ModelLoad) -> float:
    table = bin_.tables[load.model_id]
    size, duty_ms = _residue(table, load.budget_ms, load.per_ms)
    return table[size] / duty_ms


def _raised(
    loads: Sequence[ModelLoad],
    homes: Homes,
    settled: Mapping[ModelId, float],
    plan: PackedPlan,
    factor: float,
) -> tuple[PackedPlan, float, set[ModelId]]:
    """The largest factor at which all but the settled models still fit, its plan, and who would be left with more.

    `plan` is the one for `factor`, which fits.
    """
    low, high = factor, 2 * factor or 1.0

    def tried(factor: float) -> PackedPlan:
        return pack(
            [replace(load, per_ms=load.per_ms * settled.get(load.model_id, factor)) for load in loads], homes
        )

    while not (found := tried(high)).left and high < 1e9:
        plan, low, high = found, high, high * 2
    stuck = found.left
    for _ in range(FACTOR_STEPS):
        middle = (low + high) / 2
        found = tried(middle)
        if found.left:
            high, stuck = middle, found.left
        else:
            plan, low = found, middle
    return plan, low, stuck


def _give_rest(plan: PackedPlan, loads: Sequence[ModelLoad], homes: Homes, bins: Sequence[Bin]) -> None:
    """Slices that are too few for a larger factor still serve whoever has least of what it asks for."""
    given = {load.model_id: 0.0 for load in loads}
    for shares in plan.shares.values():
        for share in shares:
            given[share.load.model_id] += share.per_ms
    able = {load.model_id: _slices(homes, load.model_id) for load in loads}
    for bin_ in bins:
        takers = [load for load in loads if bin_.slice_id in able[load.model_id]]
        if bin_.slice_id in plan.shares or not takers:
            continue
        load = min(takers, key=lambda taker: given[taker.model_id] / taker.per_ms)
        table = bin_.tables[load.model_id]
        size = saturated_size(table, load.budget_ms)
        plan.shares[bin_.slice_id] = [Share(load, table, size / table[size], size)]
        given[load.model_id] += size / table[size]


def homes_of(loads: Sequence[ModelLoad], bins: Sequence[Bin]) -> Homes:
    """Of equals the first in the order of `bins`."""
    able = {
        load.model_id: [
            bin_
            for bin_ in bins
            if load.model_id in bin_.tables and bin_.tables[load.model_id][1] <= load.budget_ms
        ]
        for load in loads
    }
    hosted = Counter(bin_.slice_id for own in able.values() for bin_ in own)
    only = Counter(own[0].slice_id for own in able.values() if len(own) == 1)
    return {
        model_id: sorted(own, key=lambda bin_: (only[bin_.slice_id] > 0, hosted[bin_.slice_id]))
        for model_id, own in able.items()
    }


def pack(loads: Sequence[ModelLoad], homes: Homes) -> PackedPlan:
    """A plan for these loads, as far as they fit. Models that cannot meet their SLO are not in it."""
    plan = PackedPlan()
    residues: list[tuple[float, ModelLoad, float]] = []
    for load in loads:
        per_ms = load.per_ms
        bin_: Bin | None
        for bin_ in _free(plan, homes[load.model_id]):
            table = bin_.tables[load.model_id]
            size = saturated_size(table, load.budget_ms)
            if per_ms < size / table[size]:
                break
            per_ms -= size / table[size]
            plan.shares[bin_.slice_id] = [Share(load, table, size / table[size], size)]
        else:
            bin_ = None
        if per_ms > 1e-12 and homes[load.model_id]:
            if bin_ is None:
                plan.left.add(load.model_id)
                continue
            residues.append((_occupancy(bin_, replace(load, per_ms=per_ms)), load, per_ms))
    residues.sort(key=lambda residue: (-residue[0], residue[1].model_id))
    shared: dict[SliceId, Bin] = {}
    for _, load, rest_per_ms in residues:
        if _merge(plan, shared, load, rest_per_ms):
            continue
        per_ms = rest_per_ms
        for bin_ in _free(plan, homes[load.model_id]):
            table = bin_.tables[load.model_id]
            full = saturated_size(table, load.budget_ms)
            if per_ms <= full / table[full]:
                size, duty_ms = _residue(table, load.budget_ms, per_ms)
                # Just below saturation the batch that waits for all its requests can be one too small to keep up.
                size = size if table[size] <= duty_ms else full
                shared[bin_.slice_id] = bin_
                plan.shares[bin_.slice_id] = [Share(load, table, per_ms, size)]
                break
            # Slower than the slice that it would have been a residue on, which another took.
            per_ms -= full / table[full]
            plan.shares[bin_.slice_id] = [Share(load, table, full / table[full], full)]
        else:
            plan.left.add(load.model_id)
    return plan


def saturated_size(table: Table, budget_ms: float) -> int:
    """The largest batch that may run back to back: 2·l(b) within the budget, else 1 if that alone is; 0: none."""
    size = bisect_right(table, budget_ms / 2, 0, len(table) - 1) - 1
    return size or int(table[1] <= budget_ms)


def _residue(table: Table, budget_ms: float, per_ms: float) -> tuple[int, float]:
    """Batch size and duty cycle of a residue alone; at low rates the cycle is cut so that one request is in time."""
    sizes = range(1, len(table) - 1)
    size = bisect_right(sizes, budget_ms, key=lambda size: table[size] + size / per_ms)
    if size == 0:
        return 1, max(budget_ms - table[1], table[1])
    return size, size / per_ms


def _merge(plan: PackedPlan, shared: Mapping[SliceId, Bin], load: ModelLoad, per_ms: float) -> bool:
    """Best fit: into the slice that is the fullest afterwards."""
    best: tuple[float, SliceId, list[Share]] | None = None
    for slice_id, bin_ in shared.items():
        if load.model_id not in bin_.tables:
            continue
        table = bin_.tables[load.model_id]
        shares = [*plan.shares[slice_id], Share(load, table, per_ms, 1)]
        duty_ms = min(_residue(share.table, share.load.budget_ms, share.per_ms)[1] for share in shares)
        found = round_of(
            duty_ms, (Sharer(share.per_ms, len(share.table) - 2, share.table.__getitem__) for share in shares)
        )
        if found is None or sum(found.exec_ms) > duty_ms:
            continue
        runs = zip(found.exec_ms, shares, strict=True)
        if not all(nexus_in_time(duty_ms, exec_ms, share.load.budget_ms) for exec_ms, share in runs):
            continue
        occupancy = sum(found.exec_ms) / duty_ms
        if best is None or occupancy > best[0]:
            merged = [
                Share(share.load, share.table, share.per_ms, size)
                for size, share in zip(found.batches, shares, strict=True)
            ]
            best = (occupancy, slice_id, merged)
    if best is None:
        return False
    plan.shares[best[1]] = best[2]
    return True


def _free(plan: PackedPlan, homes: Sequence[Bin]) -> Iterator[Bin]:
    return (bin_ for bin_ in homes if bin_.slice_id not in plan.shares)
