"""Squishy bin packing (Nexus): which models share which slice, each with which batch size.

A model with rate r on a slice either saturates it (batches of the largest size B with 2·l(B) within the SLO, as a
request may just miss one batch and wait for it) or leaves a residue. A residue alone runs batches of b, the largest
with l(b) + b/r within the SLO, once per duty cycle b/r. Residues are merged while, at the shorter duty cycle d, their
batches of ⌈d·r⌉ fit into d and d + l is within every SLO. Unlike gpulet's packing (`policies/placement/gpulet/sharing.py`)
it tries that one cycle alone, asks for a request's own batch within the SLO instead of the whole round, and scales all
rates to the slices there are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fabric.ids import ModelId, SliceId
from policies.batching.batch_moments import Table
from policies.duty_cycle import Sharer, nexus_in_time, round_of

FACTOR_STEPS = 16


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


@dataclass(slots=True)
class Share:
    """What one slice does for one model."""

    load: ModelLoad
    table: Table
    per_ms: float
    batch_size: int


@dataclass(slots=True)
class PackedPlan:
    """Per slice its models, in the order of their turns."""

    shares: dict[SliceId, list[Share]] = field(default_factory=dict)


def spread(loads: Sequence[ModelLoad], bins: Sequence[Bin]) -> PackedPlan:
    """Fill all the bins with the given proportions of load, at the largest common factor that bisection finds to fit.

    So a cluster that is too small is used as well as it can be, and one that is too large keeps no slice back.
    """
    served = [
        load for load in loads if load.per_ms > 0 and any(load.model_id in bin_.tables for bin_ in bins)
    ]
    if not served:
        return PackedPlan()
    low, high = 0.0, 1.0
    best = PackedPlan()
    while (plan := pack(served, bins, high)) is not None and high < 1e9:
        best, low, high = plan, high, high * 2
    for _ in range(FACTOR_STEPS):
        middle = (low + high) / 2
        plan = pack(served, bins, middle)
        if plan is None:
            high = middle
        else:
            best, low = plan, middle
    return best


def pack(loads: Sequence[ModelLoad], bins: Sequence[Bin], factor: float) -> PackedPlan | None:
    """The plan for `factor` times the load; None if it does not fit. Models that cannot meet their SLO are left out."""
    plan = PackedPlan()
    free = list(bins)
    residues: list[tuple[float, ModelLoad, float]] = []
    for load in loads:
        per_ms = load.per_ms * factor
        while (bin_ := _first_hosting(free, load.model_id)) is not None:
            table = bin_.tables[load.model_id]
            size = saturated_size(table, load.budget_ms)
            if size == 0:
                per_ms = 0.0
                break
            if per_ms < size / table[size]:
                break
            per_ms -= size / table[size]
            free.remove(bin_)
            plan.shares[bin_.slice_id] = [Share(load, table, size / table[size], size)]
        if per_ms > 1e-12:
            if bin_ is None:
                return None
            table = bin_.tables[load.model_id]
            size, duty_ms = _residue(table, load.budget_ms, per_ms)
            residues.append((table[size] / duty_ms, load, per_ms))
    residues.sort(key=lambda residue: (-residue[0], residue[1].model_id))
    shared: dict[SliceId, Bin] = {}
    for _, load, per_ms in residues:
        if not _merge(plan, shared, load, per_ms):
            bin_ = _first_hosting(free, load.model_id)
            if bin_ is None:
                return None
            free.remove(bin_)
            shared[bin_.slice_id] = bin_
            table = bin_.tables[load.model_id]
            size, _ = _residue(table, load.budget_ms, per_ms)
            plan.shares[bin_.slice_id] = [Share(load, table, per_ms, size)]
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


def _first_hosting(free: Sequence[Bin], model_id: ModelId) -> Bin | None:
    return next((bin_ for bin_ in free if model_id in bin_.tables), None)
