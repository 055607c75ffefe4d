"""What the search may place: models with rates on classes of equal GPUs, and the batch sizes worth a thought."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from policies.placement.common.base import PlacedModelInput, Profiles, cannot_host
from policies.placement.common.conditions import Conditions
from policies.placement.common.demands import rate_of
from policies.placement.common.gpu_kinds import GpuClass
from profiles.interference import Interference, Running

# Less than this longer, and twice the requests: the smaller batch has nothing for it.
_FREE_GROWTH = 1.05


@dataclass(frozen=True, slots=True)
class Item:
    """A slice with one model, in batches of `batch` at most: `exec_ms` and `single_ms` are without neighbours.

    `model` is the model's place in the task.
    """

    model: int
    batch: int
    exec_ms: float
    single_ms: float
    memory_bytes: int
    running: Running


@dataclass(frozen=True, slots=True)
class PlacementTask:
    """Models, GPUs, and by class of GPUs the items that may run there."""

    models: tuple[PlacedModelInput, ...]
    classes: tuple[GpuClass, ...]
    items: tuple[tuple[Item, ...], ...]
    interference: tuple[Interference, ...]
    conditions: Conditions
    slices_max: int

    @property
    def rates_rps(self) -> list[float]:
        """What comes of each model."""
        return [rate_of(model) for model in self.models]


def task_of(
    models: Sequence[PlacedModelInput],
    classes: Sequence[GpuClass],
    profiles: Profiles,
    conditions: Conditions,
    slices_max: int,
) -> PlacementTask | None:
    """The task of sharing GPUs in space, or None where nobody knows what that costs.

    The items have no share limit, so the interference law of each class must cover such slices: `sm` does. `none` would
    let any number run at full speed, and iGniter's and gpulet's models speak of slices with limits.
    """
    laws = (conditions.interference.get(gpus.slot.gpu_type) for gpus in classes)
    known = tuple(law for law in laws if law is not None and law.covers_unlimited_slices)
    if len(known) < len(classes) or not classes or any(not gpus.slot.is_emulated for gpus in classes):
        return None
    items = tuple(_items(models, gpus, profiles, conditions) for gpus in classes)
    return PlacementTask(tuple(models), tuple(classes), items, known, conditions, slices_max)


def worthwhile_batches(exec_ms: Sequence[float], limit_ms: float, size_max: float) -> list[int]:
    """Powers of two, and the largest size, that run within `limit_ms` and are not as slow as twice as many.

    `exec_ms[b - 1]` is l(b); `size_max`: see `fillable`. Empty where a single request takes longer.
    """
    table = exec_ms[: int(max(1.0, min(size_max, len(exec_ms))))]
    sizes = [1]
    while sizes[-1] * 2 <= len(table):
        sizes.append(sizes[-1] * 2)
    if sizes[-1] != len(table):
        sizes.append(len(table))
    sizes = [size for size in sizes if table[size - 1] <= limit_ms]
    return [
        size
        for size, larger in zip_longest(sizes, sizes[1:])
        if larger is None or table[larger - 1] > _FREE_GROWTH * table[size - 1]
    ]


def fillable(model: PlacedModelInput, conditions: Conditions) -> float:
    """The largest batch that the model's rate fills before MAX_WAIT closes it; deferred ones have no such end."""
    if not conditions.has_fixed_batches:
        return math.inf
    return 1 + rate_of(model) * conditions.max_wait_ms / 1000


def forming_ms(model: PlacedModelInput, batch: int, conditions: Conditions) -> float:
    """How long the first request of a fixed batch of `batch`, as it is planned, waits for the others, one gap for chance.

    A batch of one is full at once; one that the rate does not fill waits until MAX_WAIT closes it.
    """
    if batch == 1:
        return 0.0
    return min(1000 * batch / rate_of(model), conditions.max_wait_ms)


def _items(
    models: Sequence[PlacedModelInput], gpus: GpuClass, profiles: Profiles, conditions: Conditions
) -> tuple[Item, ...]:
    found: list[Item] = []
    slot = gpus.slot
    for place, model in enumerate(models):
        profile = profiles.get((model.model_id, slot.gpu_type))
        if profile is None or cannot_host(model, slot, profiles) is not None:
            continue
        table = profile.exec_table()
        size_max = fillable(model, conditions)
        for batch in worthwhile_batches(table, model.slo_ms - conditions.delay_ms(1), size_max):
            needed = profile.memory_bytes(batch) if model.memory_bytes is None else model.memory_bytes
            if needed <= slot.memory_bytes:
                running = Running(model.model_id, batch)
                found.append(Item(place, batch, table[batch - 1], table[0], needed, running))
    return tuple(found)
