"""Profiles with Usher's requirements, and random cases of models and GPUs to place."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace

from fabric.ids import ModelId, NodeId
from policies.placement.common.base import GpuSlot, PlacedModelInput, Placement, Profiles
from profiles.model import ModelProfile, TableProfile
from profiles.requirements import Requirements, Usage

GPU_BYTES = 16 * 2**30


@dataclass(frozen=True)
class Cell:
    """One profiled batch: run time, and Creq and Mreq in percent of a GPU of 16 GB (None: not known)."""

    exec_ms: float
    compute: float | None
    memory: float | None = 1.0


class Case(Struct, frozen=True):
    models: tuple[PlacedModelInput, ...]
    gpus: tuple[GpuSlot, ...]
    profiles: Profiles


def profile(cells: Mapping[int, Cell]) -> TableProfile:
    """All three metrics have the cell's Creq."""
    return TableProfile(
        {100.0: {batch: cell.exec_ms for batch, cell in cells.items()}},
        memory_by_batch={b: c.memory / 100 * GPU_BYTES for b, c in cells.items() if c.memory is not None},
        is_padded=True,
        usage=Usage({b: Requirements(c.compute, c.compute, c.compute, c.memory) for b, c in cells.items()}),
    )


def v100s(
    count: int, gpu_type: str = "v100", first: int = 0, price: float | None = None
) -> tuple[GpuSlot, ...]:
    return tuple(
        GpuSlot(first + i, gpu_type, GPU_BYTES, NodeId("node0"), first + i, price_per_hour=price)
        for i in range(count)
    )


def case(
    models: Mapping[str, tuple[float, float, Mapping[int, Cell]]], gpus: Sequence[GpuSlot] | int = 1
) -> Case:
    """Models as name: (slo_ms, rate_rps, cells), the same on every type of GPU."""
    slots = v100s(gpus) if isinstance(gpus, int) else tuple(gpus)
    inputs = tuple(PlacedModelInput(ModelId(n), slo, rate) for n, (slo, rate, _) in models.items())
    types = {slot.gpu_type for slot in slots}
    return Case(
        inputs, slots, {(ModelId(n), t): profile(cells) for n, (_, _, cells) in models.items() for t in types}
    )


def by_share(of: Case, least_percent: float) -> Case:
    """The same, where each profile was also measured at that share, the least one that it knows, and was half as fast there."""
    return replace(
        of,
        profiles={key: measured_by_share(known, least_percent) for key, known in of.profiles.items()},
    )


def measured_by_share(known: ModelProfile, least_percent: float) -> TableProfile:
    """See `by_share`."""
    whole = {size: known.exec_ms(size) for size in range(1, known.batch_size_max + 1)}
    columns = {least_percent: {size: 2 * exec_ms for size, exec_ms in whole.items()}, 100.0: whole}
    memory = {size: float(known.memory_bytes(size)) for size in whole}
    return TableProfile(columns, memory_by_batch=memory, usage=known.usage)


def random_case(draw: random.Random, models: int, gpus: int, batches: Sequence[int]) -> Case:
    """Requirements of all sizes, rates from easy to hopeless."""
    made = {}
    for place in range(models):
        exec_ms, memory, cells = 0.0, 0.0, {}
        for batch in batches:
            exec_ms += draw.uniform(2, 20)
            compute = draw.choice((draw.uniform(5, 100), draw.uniform(5, 45), 50.0, 100.0))
            memory = max(memory, draw.uniform(0.5, 70))  # as profiles take it: a larger batch needs no less
            cells[batch] = Cell(round(exec_ms, 1), round(compute, 2), round(memory, 2))
        made[f"m{place}"] = (draw.uniform(10, 80), round(draw.uniform(50, 2500), 1), cells)
    return case(made, gpus)


def check_sound(placement: Placement, of: Case) -> None:
    """No GPU over 100 % of compute or memory, no model twice on one, batches within the SLO, goodput as placed."""
    inputs = {model.model_id: model for model in of.models}
    types = {gpu.index: gpu.gpu_type for gpu in of.gpus}
    compute: dict[int, float] = {}
    memory: dict[int, float] = {}
    seen: set[tuple[int, ModelId]] = set()
    carried: dict[ModelId, float] = {}
    rates: dict[ModelId, float] = {}
    for planned in placement.slices:
        (entry,) = planned.models
        known = of.profiles[(entry.model_id, types[planned.gpu])]
        assert entry.batch is not None
        assert entry.rate_rps is not None
        needed = known.requirements[entry.batch]
        assert needed.weighted_sm_percent is not None
        assert needed.memory_percent is not None
        assert planned.share_percent in (None, needed.weighted_sm_percent)
        assert entry.predicted_ms == known.exec_ms(entry.batch)
        assert entry.predicted_ms <= inputs[entry.model_id].slo_ms
        compute[planned.gpu] = compute.get(planned.gpu, 0.0) + needed.weighted_sm_percent
        memory[planned.gpu] = memory.get(planned.gpu, 0.0) + needed.memory_percent
        assert (planned.gpu, entry.model_id) not in seen
        seen.add((planned.gpu, entry.model_id))
        throughput_rps = 1000 * entry.batch / entry.predicted_ms
        carried[entry.model_id] = carried.get(entry.model_id, 0.0) + throughput_rps
        rates[entry.model_id] = rates.get(entry.model_id, 0.0) + entry.rate_rps
        assert entry.rate_rps <= throughput_rps * (1 + 1e-9)
    assert all(value <= 100 + 1e-6 for value in (*compute.values(), *memory.values()))
    missing = {entry.model_id: entry.rate_rps for entry in placement.unplaced}
    total = 0.0
    for model in of.models:
        assert model.rate_rps is not None
        served = min(model.rate_rps, carried.get(model.model_id, 0.0))
        assert abs(rates.get(model.model_id, 0.0) - served) < 1e-6
        assert abs((missing.get(model.model_id) or 0.0) - (model.rate_rps - served)) < 1e-6
        total += served
    assert placement.expected_goodput_rps is not None
    assert abs(placement.expected_goodput_rps - total) < 1e-6
    assert placement.violations == ()
