"""Models that must be cut, or run in ranks, because a user says so: each gets several GPUs of its own, whatever the policy.

They come first. Such a slice is on one host, on equal GPUs that carry nothing else: it stays where it is while it can and all have a place,
else it goes to the host that has the fewest free GPUs left over. All other models are for the policy, on the other GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from fabric.ids import NodeId
from policies.placement.common.base import (
    GpuSlot,
    PlacedModelInput,
    Placement,
    PlacementPolicy,
    PlannedModel,
    PlannedSlice,
    Profiles,
    Unplaced,
    cannot_host,
    in_gib,
    slice_memory_bytes,
)
from policies.placement.common.gpu_kinds import gpu_classes


class CutFirst(Struct, frozen=True):
    """The pipelines, and what they leave: the models that need none, and the GPUs that carry none."""

    slices: tuple[PlannedSlice, ...]
    unplaced: tuple[Unplaced, ...]
    models: tuple[PlacedModelInput, ...]
    gpus: tuple[GpuSlot, ...]

    def with_others(
        self, policy: PlacementPolicy, profiles: Profiles, current: Placement | None
    ) -> Placement:
        """The pipelines, and what the policy makes of the rest; it hears of what runs now on its GPUs for its models."""
        current = self._of_others(current)
        if not self.slices and not self.unplaced:
            return policy.place(self.models, self.gpus, profiles, current)
        if not self.models:
            return Placement(self.slices, self.unplaced)
        if not self.gpus:
            reason = "models that need several GPUs have them all"
            left = (Unplaced(model.model_id, model.rate_rps, reason) for model in self.models)
            return Placement(self.slices, (*self.unplaced, *left))
        others = policy.place(self.models, self.gpus, profiles, current)
        return replace(
            others,
            slices=(*self.slices, *others.slices),
            unplaced=(*self.unplaced, *others.unplaced),
            expected_goodput_rps=None,  # the policy's own, of its models only
        )

    def _of_others(self, current: Placement | None) -> Placement | None:
        if current is None:
            return None
        cut = {model.model_id for planned in self.slices for model in planned.models}
        cut |= {one.model_id for one in self.unplaced}
        own = {gpu.index for gpu in self.gpus}
        slices = (
            planned
            for planned in current.slices
            if own.issuperset(planned.gpus) and not any(model.model_id in cut for model in planned.models)
        )
        return replace(current, slices=tuple(slices))


def cut_first(
    models: Sequence[PlacedModelInput], gpus: Sequence[GpuSlot], profiles: Profiles, current: Placement | None
) -> CutFirst:
    """A slice for each model with `stages` or `ranks` over 1, while there are GPUs for it.

    Those that can stay where they are come first, then the others, all in their order. Where that leaves more of them out than
    their order alone, a model that could stay moves for another one.
    """
    cut = [model for model in models if model.gpus > 1]

    def in_turn(order: Sequence[PlacedModelInput]) -> CutFirst:
        free = list(gpus)
        slices: list[PlannedSlice] = []
        unplaced: list[Unplaced] = []
        for model in order:
            found = _place_for(model, free, profiles, current)
            if isinstance(found, str):
                unplaced.append(Unplaced(model.model_id, model.rate_rps, found))
                continue
            first, *others = (gpu.index for gpu in found)
            planned = PlannedModel(model.model_id, rate_rps=model.rate_rps)
            slices.append(PlannedSlice(first, None, (planned,), tuple(others)))
            free = [gpu for gpu in free if gpu not in found]
        whole = tuple(one for one in models if one.gpus <= 1)
        return CutFirst(tuple(slices), tuple(unplaced), whole, tuple(free))

    def moves(model: PlacedModelInput) -> bool:
        alone = _place_for(model, gpus, profiles, current)
        return isinstance(alone, str) or tuple(gpu.index for gpu in alone) != _gpus_now(model, current)

    found = in_turn(sorted(cut, key=moves))
    return found if not found.unplaced else min(found, in_turn(cut), key=lambda one: len(one.unplaced))


def _place_for(
    model: PlacedModelInput,
    free: Sequence[GpuSlot],
    profiles: Profiles,
    current: Placement | None,
) -> Sequence[GpuSlot] | str:
    """GPUs for its stages or ranks, or why there are none."""
    stages, part = model.gpus, "stage" if model.ranks <= 1 else "rank"
    reasons: list[str] = []
    largest = 0
    fitting: list[list[GpuSlot]] = []
    for host in _by_host(free).values():
        for kind in gpu_classes(host):
            largest = max(largest, len(kind.gpus))
            if len(kind.gpus) < stages:
                continue
            slot = kind.slot
            reason = cannot_host(model, slot, profiles, stages=stages)
            needed = slice_memory_bytes([model], slot.gpu_type, profiles, stages)
            if reason is None and needed > slot.memory_bytes:
                reason = f"memory: a {part} needs {in_gib(needed)}, a GPU has {in_gib(slot.memory_bytes)}"
            if reason is None:
                fitting.append(list(kind.gpus))
            else:
                reasons.append(reason)
    if not fitting:
        return (
            "; ".join(dict.fromkeys(reasons))
            or f"it must {'be cut into' if part == 'stage' else 'run in'} {stages} {part}s, each on a GPU of its own; no host has {stages} equal GPUs free (the most: {largest})"
        )
    kept = _gpus_now(model, current)
    for gpus in fitting:
        here = {gpu.index: gpu for gpu in gpus}
        if len(kept) == stages and all(index in here for index in kept):
            return [here[index] for index in kept]
    return min(fitting, key=lambda gpus: (len(gpus), gpus[0].index))[:stages]


def _gpus_now(model: PlacedModelInput, current: Placement | None) -> tuple[int, ...]:
    """Those of the first slice that it has for itself."""
    for planned in current.slices if current is not None else ():
        if [one.model_id for one in planned.models] == [model.model_id]:
            return planned.gpus
    return ()


def _by_host(gpus: Sequence[GpuSlot]) -> Mapping[NodeId, list[GpuSlot]]:
    hosts: dict[NodeId, list[GpuSlot]] = {}
    for gpu in gpus:
        hosts.setdefault(gpu.node_id, []).append(gpu)
    return hosts
