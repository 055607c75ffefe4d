"""Sub-clusters for a placement: which models and which GPUs belong together (Symphony section 4.4).

Models are partitioned by the GPUs they keep busy and by the memory they take. GPUs of each kind are then
divided in proportion to what each sub-cluster keeps busy, so what the partition leaves uneven is evened out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fabric.ids import ModelId
from policies.connected_models import components
from policies.placement.common.base import (
    GpuSlot,
    PlacedModelInput,
    Placement,
    Profiles,
    cannot_host,
    largest_batch,
    slice_memory_bytes,
)
from policies.placement.common.gpu_kinds import gpu_classes
from policies.placement.symphony.hosting import Cost, Hosting
from policies.solver import SolverTime
from policies.subclusters import Bounds, Partition, PartitionModel, partition

# Of all the memory that models take, how much may be unloaded and loaded at one re-plan besides new models:
# while a GPU loads, it does not serve, and a tenth keeps that below a model's own rate of change.
_DISRUPTION_MAX = 0.1

# Where GPUs are of several kinds and nothing else is gained, by how much the busiest must be relieved for a change.
_RELIEF_MIN = 1.1


@dataclass(frozen=True, slots=True)
class Subclusters:
    """The sub-cluster of each model and of each GPU (by index); why a model has none; what is not as asked."""

    of_model: Mapping[ModelId, int]
    of_gpu: Mapping[int, int]
    reasons: Mapping[ModelId, str] = field(default_factory=dict)
    violations: tuple[str, ...] = ()


def subclusters_of(
    models: Sequence[PlacedModelInput],
    gpus: Sequence[GpuSlot],
    profiles: Profiles,
    current: Placement | None,
    wanted: int,
) -> Subclusters:
    """Divide models and GPUs into `wanted` sub-clusters, or into as many as there are GPUs and models to host.

    `current`: what runs now; its sub-clusters keep most of their models and, where the sizes allow, their GPUs.
    """
    classes = gpu_classes(gpus)
    kinds = [equal.slot for equal in classes]
    possible = {model.model_id: _hosts_of(model, kinds, profiles) for model in models} if wanted > 1 else {}
    hostable = [model for model in models if possible.get(model.model_id)]
    count = min(wanted, len(gpus), len(hostable))
    if count <= 1:
        violations = _fewer(1, wanted) if hostable else ()
        whole = {model.model_id: 0 for model in models}
        return Subclusters(whole, {gpu.index: 0 for gpu in gpus}, {}, violations)
    weights = _weights(hostable, possible, profiles)
    time = SolverTime()
    useful = [gpu for hosts in possible.values() for gpu in hosts]
    useless = sum(len(equal.gpus) for equal in classes if equal.slot not in useful)
    best: tuple[Cost, Subclusters] | None = None
    for fewer in range(count, 0, -1):
        cost, divided = _divided(hostable, gpus, possible, weights, profiles, current, fewer, wanted, time)
        if best is None or cost < best[0]:
            best = cost, divided
        if cost == (len(divided.reasons), useless):  # with fewer sub-clusters there is no more memory
            break
    assert best is not None
    divided = best[1]
    if current and len(kinds) > 1:
        # One kind of GPU hosts all models of its sub-cluster, so that a plan shows them, and few models change theirs. With several
        # a plan may not show which GPUs belong together: it stays unless the new one is better, so equal inputs settle.
        kept = _as_it_runs(hostable, gpus, current, wanted)
        was, would = (
            _worth(Hosting(hostable, gpus, possible, profiles, one.of_model, one.of_gpu), weights, count)
            for one in (kept, divided)
        )
        if (*would[:-1], would[-1] * _RELIEF_MIN) >= was:
            divided = kept
    # So that whoever can be hosted nowhere learns from the GPUs themselves why.
    nowhere = {model.model_id: 0 for model in models if not possible[model.model_id]}
    return replace(divided, of_model={**nowhere, **divided.of_model})


def _as_it_runs(
    models: Sequence[PlacedModelInput], gpus: Sequence[GpuSlot], current: Placement, wanted: int
) -> Subclusters:
    """Models and GPUs where they are; a GPU that hosts nothing goes on so."""
    groups = _connected({one.gpu: {model.model_id for model in one.models} for one in current.slices})
    of_gpu = {gpu: j for j, (_, own) in enumerate(groups) for gpu in own}
    of_model = {model_id: j for j, (inside, _) in enumerate(groups) for model_id in inside}
    return Subclusters(
        {model.model_id: of_model[model.model_id] for model in models if model.model_id in of_model},
        {gpu.index: of_gpu.get(gpu.index, len(groups)) for gpu in gpus},
        {model.model_id: _no_room(len(groups)) for model in models if model.model_id not in of_model},
        _fewer(len(groups), wanted),
    )


def _worth(hosting: Hosting, weights: Mapping[ModelId, float], count: int) -> tuple[int, int, int, float]:
    """Of two divisions the smaller is better: models and GPUs left out, how far from the number asked for, and the largest load per GPU."""
    hosted = hosting.hosted()
    groups = _connected(hosted)
    lost = len(weights) - sum(len(models) for models, _ in groups)
    busiest = max(
        (sum(weights[model_id] for model_id in models) / len(own) for models, own in groups), default=0.0
    )
    return lost, sum(not models for models in hosted.values()), abs(len(groups) - count), busiest


def _divided(
    models: Sequence[PlacedModelInput],
    gpus: Sequence[GpuSlot],
    possible: Mapping[ModelId, list[GpuSlot]],
    weights: Mapping[ModelId, float],
    profiles: Profiles,
    current: Placement | None,
    count: int,
    wanted: int,
    time: SolverTime,
) -> tuple[Cost, Subclusters]:
    """`count` sub-clusters where `wanted` were asked for, and what they leave out."""
    now = _Now.of(current, count)
    found = _partition(models, possible, weights, profiles, now.of_model, count, time)

    load = [0.0] * count
    for model_id, place in found.subcluster_of.items():
        load[place] += weights[model_id]
    hosting = Hosting(models, gpus, possible, profiles, found.subcluster_of, _divide(gpus, load, now.of_gpu))
    lost, empty = hosting.arranged()
    reasons = dict.fromkeys(found.unplaced, _no_room(count))
    said = _fewer(len(_connected(hosting.hosted())), wanted)
    return (lost + len(found.unplaced), empty), Subclusters(hosting.of_model, hosting.of_gpu, reasons, said)


def _no_room(count: int) -> str:
    return f"memory: none of {count} sub-clusters has room for it"


def partition_models(
    models: Sequence[PlacedModelInput], gpus: Sequence[GpuSlot], profiles: Profiles
) -> list[PartitionModel]:
    """What a partition must know of each model that some GPU could serve, were it alone."""
    kinds = [equal.slot for equal in gpu_classes(gpus)]
    possible = {model.model_id: _hosts_of(model, kinds, profiles) for model in models}
    hostable = [model for model in models if possible[model.model_id]]
    weights = _weights(hostable, possible, profiles)
    return [
        _partition_model(model, possible[model.model_id], weights[model.model_id], profiles)
        for model in hostable
    ]


def _fewer(count: int, wanted: int) -> tuple[str, ...]:
    if count >= wanted:
        return ()
    return (f"{wanted} sub-clusters were asked for; there are GPUs and models for {count}",)


def _hosts_of(model: PlacedModelInput, kinds: Sequence[GpuSlot], profiles: Profiles) -> list[GpuSlot]:
    """Of one GPU of each kind those that could serve the model, were it alone."""
    return [
        gpu
        for gpu in kinds
        if cannot_host(model, gpu, profiles) is None
        and slice_memory_bytes([model], gpu.gpu_type, profiles) <= gpu.memory_bytes
    ]


def _weights(
    models: Sequence[PlacedModelInput], possible: Mapping[ModelId, list[GpuSlot]], profiles: Profiles
) -> dict[ModelId, float]:
    """GPUs that each model keeps busy, in batches of the largest b with 2 l(b) ≤ SLO on its first kind.

    Where that is not known of all: their rates; without rates one model counts like another.
    """
    busy: dict[ModelId, float] = {}
    for model in models:
        profile = profiles.get((model.model_id, possible[model.model_id][0].gpu_type))
        if profile is None or model.rate_rps is None:
            break
        table = profile.exec_table()
        batch_size = max(1, largest_batch(table, model.slo_ms / 2))
        busy[model.model_id] = model.rate_rps / 1000 * table[batch_size - 1] / batch_size
    else:
        return busy
    if any(model.rate_rps is None for model in models):
        return {model.model_id: 1.0 for model in models}
    return {model.model_id: model.rate_rps or 0.0 for model in models}


def _partition(
    models: Sequence[PlacedModelInput],
    possible: Mapping[ModelId, list[GpuSlot]],
    weights: Mapping[ModelId, float],
    profiles: Profiles,
    now: Mapping[ModelId, int],
    count: int,
    time: SolverTime,
) -> Partition:
    """Keep within the smallest memory among the kinds, if that places them all, else within the next larger.

    In the latter case GPUs with less memory host as many of their sub-cluster's models as they can.
    """
    inputs = [
        _partition_model(model, possible[model.model_id], weights[model.model_id], profiles)
        for model in models
    ]
    moved = sum(one.move_cost * (_DISRUPTION_MAX if one.model_id in now else 1.0) for one in inputs)
    for memory_bytes in sorted({gpu.memory_bytes for hosts in possible.values() for gpu in hosts}):
        found = partition(inputs, count, now, Bounds(memory_bytes=memory_bytes, disruption=moved), time)
        if found.unplaced and now:  # too tight a fit to be kept: better moved than left out
            found = partition(inputs, count, now, Bounds(memory_bytes=memory_bytes), time)
        if not found.unplaced:
            break
    return found


def _partition_model(
    model: PlacedModelInput, hosts: Sequence[GpuSlot], load: float, profiles: Profiles
) -> PartitionModel:
    """Its memory is the largest it takes on any kind; what a batch needs on top is the dynamic part."""
    static_bytes, dynamic_bytes = 0, 0
    for gpu in hosts:
        whole = slice_memory_bytes([model], gpu.gpu_type, profiles)
        profile = profiles.get((model.model_id, gpu.gpu_type))
        resident = whole if model.memory_bytes is not None or profile is None else profile.memory_bytes(1)
        static_bytes, dynamic_bytes = max(static_bytes, resident), max(dynamic_bytes, whole - resident)
    # Loading takes as long as there is to load; a model of unknown size takes some time too.
    return PartitionModel(model.model_id, load, static_bytes, dynamic_bytes, max(1.0, static_bytes))


@dataclass(frozen=True, slots=True)
class _Now:
    """The sub-clusters that run now, numbered by their first GPU."""

    of_model: Mapping[ModelId, int]
    of_gpu: Mapping[int, int]

    @classmethod
    def of(cls, current: Placement | None, count: int) -> _Now:
        """Nothing, where there are more of them than there shall be: then all is divided anew, from the inputs alone.

        One whose kinds of GPU have no model in common looks like two in a plan, which does not tell that they belong together.
        """
        groups = _connected(
            {one.gpu: {model.model_id for model in one.models} for one in (current.slices if current else ())}
        )
        if len(groups) > count:
            return cls({}, {})
        return cls(
            {model_id: j for j, (models, _) in enumerate(groups) for model_id in models},
            {gpu: j for j, (_, gpus) in enumerate(groups) for gpu in gpus},
        )


def _connected(hosted: Mapping[int, Collection[ModelId]]) -> list[tuple[frozenset[ModelId], list[int]]]:
    """Models and the GPUs that host them, those together that have one in common, by their first GPU."""
    found = components(own for _, own in sorted(hosted.items()))
    return [(models, [gpu for gpu, own in hosted.items() if not models.isdisjoint(own)]) for models in found]


def _divide(gpus: Sequence[GpuSlot], load: Sequence[float], now: Mapping[int, int]) -> dict[int, int]:
    """How many GPUs each gets is by load; which ones, kind by kind.

    Within a kind sub-clusters take turns, so that the low ids of each, which are filled first, are low ids of
    the cluster too, and its high ids can be released.
    """
    lacking = _shares(len(gpus), load)
    of_gpu: dict[int, int] = {}
    for gpu in gpus:
        j = now.get(gpu.index)
        if j is not None and lacking[j]:
            of_gpu[gpu.index] = j
            lacking[j] -= 1
    free = gpu_classes(gpu for gpu in gpus if gpu.index not in of_gpu)
    # Smooth weighted round-robin: after all turns each has exactly what it lacked, and never much less on the way.
    credit = [0] * len(load)
    for gpu in (gpu for equal in free for gpu in equal.gpus):
        credit = [have + weight for have, weight in zip(credit, lacking, strict=True)]
        j = max(range(len(credit)), key=lambda j: (credit[j], -j))
        credit[j] -= sum(lacking)
        of_gpu[gpu.index] = j
    return of_gpu


def _shares(count: int, load: Sequence[float]) -> list[int]:
    """One GPU for each, and each further one to whoever has most load per GPU then; ties to the first."""
    even = load if any(load) else [1.0] * len(load)
    shares = [1] * len(even)
    for _ in range(count - len(even)):
        shares[max(range(len(even)), key=lambda j: (even[j] / shares[j], -j))] += 1
    return shares
