"""Exclusive: a GPU belongs to one model. The placement without any sharing that the papers compare with."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from policies.placement.common.base import (
    GpuSlot,
    PlacedModelInput,
    Placement,
    PlannedModel,
    PlannedSlice,
    Profiles,
    Unplaced,
    cannot_host,
    in_gib,
    largest_batch,
    slice_memory_bytes,
)
from policies.placement.common.gpu_kinds import GpuKind, gpu_classes, gpu_kind
from policies.placement.common.request_checks import joined, require_gpus
from policies.registry import Registered


@dataclass(slots=True)
class _Owner:
    """A model and the GPUs it has been given, each with its batch, run time and capacity (None: unknown)."""

    model: PlacedModelInput
    replicas: list[tuple[GpuSlot, int | None, float | None, float | None]] = field(default_factory=list)

    @property
    def capacity_rps(self) -> float:
        return sum(math.inf if rps is None else rps for _, _, _, rps in self.replicas)

    @property
    def unmet_rps(self) -> float:
        return max(0.0, (self.model.rate_rps or 0.0) - self.capacity_rps)


class Exclusive:
    """First one GPU for as many models as can have one, those first in file order, then the free ones to whoever lacks most requests per second.

    A replica's batch is the largest with 2 l(b) ≤ SLO: a request may wait for a whole batch before its own
    (Symphony section 3.2, no coordination), or 1 where not even that fits. GPUs nobody needs stay empty.
    """

    def place(
        self,
        models: Sequence[PlacedModelInput],
        gpus: Sequence[GpuSlot],
        profiles: Profiles,
        current: Placement | None = None,  # noqa: ARG002  nothing is kept: the rule alone decides
    ) -> Placement:
        """Place; what a model's replicas cannot carry is unplaced as a part of its rate.

        Raises ConfigError where there is no GPU.
        """
        require_gpus(gpus)
        owners = [_Owner(model) for model in models]
        free = list(gpus)
        first = _first_kinds(models, gpus, profiles)
        for owner, kind in zip(owners, first, strict=True):
            if kind is not None:
                own = [gpu for gpu in free if gpu_kind(gpu) == kind]
                _take_one(owner, own, profiles)
                free.remove(owner.replicas[0][0])
        waiting = [owner for owner in owners if owner.replicas and owner.unmet_rps > 0]
        while waiting and free:
            owner = max(waiting, key=lambda candidate: candidate.unmet_rps)  # the first of equals
            if not _take_one(owner, free, profiles) or owner.unmet_rps <= 0:
                waiting.remove(owner)
        slices = [planned for owner in owners for planned in _slices(owner)]
        slices.sort(key=lambda planned: planned.gpu)
        unplaced = _unplaced(owners, gpus, profiles)
        return Placement(tuple(slices), tuple(unplaced), (), _goodput_rps(owners))


def _first_kinds(
    models: Sequence[PlacedModelInput], gpus: Sequence[GpuSlot], profiles: Profiles
) -> list[GpuKind | None]:
    """The kind of GPU that each model's first one is of: a matching, so that none goes without if that is possible.

    In file order a model takes the first free GPU that can host it; where there is none, others change to other kinds for it.
    """
    left = {gpu_kind(equal.slot): list(equal.gpus) for equal in gpu_classes(gpus)}
    able = [
        [kind for kind, own in left.items() if _why_not_on(model, own[0], profiles) is None]
        for model in models
    ]
    taken: list[GpuKind | None] = [None] * len(models)
    for place in range(len(models)):
        came_from: dict[GpuKind, int] = {}  # who would go to that kind
        asking = deque([place])
        while asking:
            asks = asking.popleft()
            reached = [kind for kind in able[asks] if kind not in came_from]
            came_from.update(dict.fromkeys(reached, asks))
            free = [kind for kind in reached if left[kind]]
            if free:
                kind: GpuKind | None = min(free, key=lambda one: left[one][0].index)
                left[kind].pop(0)  # type: ignore[index]
                while kind is not None:
                    goes = came_from[kind]
                    taken[goes], kind = kind, taken[goes]
                break
            asking.extend(other for other, kind in enumerate(taken) if kind in reached)
    return taken


def _take_one(owner: _Owner, free: list[GpuSlot], profiles: Profiles) -> bool:
    """Give the model the first free GPU that can host it."""
    model = owner.model
    for gpu in free:
        if _why_not_on(model, gpu, profiles) is not None:
            continue
        free.remove(gpu)
        profile = profiles.get((model.model_id, gpu.gpu_type))
        if profile is None:
            owner.replicas.append((gpu, None, None, None))
        else:
            table = profile.exec_table()
            batch_size = max(1, largest_batch(table, model.slo_ms / 2))
            exec_ms = table[batch_size - 1]
            owner.replicas.append((gpu, batch_size, exec_ms, 1000 * batch_size / exec_ms))
        return True
    return False


def _why_not_on(model: PlacedModelInput, gpu: GpuSlot, profiles: Profiles) -> str | None:
    reason = cannot_host(model, gpu, profiles)
    needed = slice_memory_bytes([model], gpu.gpu_type, profiles)
    if reason is None and needed > gpu.memory_bytes:
        return f"memory: it needs {in_gib(needed)}, a GPU has {in_gib(gpu.memory_bytes)}"
    return reason


def _slices(owner: _Owner) -> list[PlannedSlice]:
    """The model's rate is shared in proportion to what each replica can carry."""
    rate_rps, capacity_rps = owner.model.rate_rps, owner.capacity_rps
    planned = []
    for gpu, batch_size, exec_ms, rps in owner.replicas:
        share_rps = None
        if rate_rps is not None:
            if rps is None or math.isinf(capacity_rps):
                share_rps = rate_rps / len(owner.replicas)
            else:
                share_rps = min(rate_rps, capacity_rps) * rps / capacity_rps
        model = PlannedModel(owner.model.model_id, batch_size, share_rps, None, exec_ms)
        planned.append(PlannedSlice(gpu.index, None, (model,)))
    return planned


def _unplaced(owners: Sequence[_Owner], gpus: Sequence[GpuSlot], profiles: Profiles) -> list[Unplaced]:
    unplaced = []
    for owner in owners:
        if not owner.replicas:
            why_not = [_why_not_on(owner.model, gpu, profiles) for gpu in gpus]
            could = "all GPUs that could host it are taken by the models before it"
            reason = could if None in why_not else joined(one for one in why_not if one is not None)
            unplaced.append(Unplaced(owner.model.model_id, owner.model.rate_rps, reason))
        elif owner.unmet_rps > 0:
            reason = f"its {len(owner.replicas)} GPUs carry {owner.capacity_rps:.1f} requests per second"
            unplaced.append(Unplaced(owner.model.model_id, owner.unmet_rps, reason))
    return unplaced


def _goodput_rps(owners: Sequence[_Owner]) -> float | None:
    if any(owner.model.rate_rps is None for owner in owners):
        return None
    return sum(min(owner.model.rate_rps or 0.0, owner.capacity_rps) for owner in owners)


REGISTERED: Final = Registered({}, lambda _: Exclusive())
