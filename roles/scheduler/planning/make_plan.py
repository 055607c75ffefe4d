"""A placement computed anew, as a value: what runs and what is wanted in, the moves between them out.

It may take seconds (a MILP has 10), so a live scheduler has it done in a process of its own (`plan_launcher.py`); the
simulator calls it as it is. Question and answer are messages, so a journal has both.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from zlib import crc32

from msgspec.structs import replace

from fabric.errors import ConfigError, FabricError
from fabric.ids import ModelId, SliceId
from fabric.messages import (
    ChangedSlice,
    CurrentSlice,
    GpuRef,
    KeptSlice,
    MoveInfo,
    NewSlice,
    PlanAsked,
    PlanMade,
    ReplicaHint,
    UnplacedInfo,
)
from policies.placement.common.base import (
    GpuSlot,
    PlacedModelInput,
    Placement,
    PlannedModel,
    PlannedSlice,
    Unplaced,
    cannot_host,
    slice_memory_bytes,
)
from policies.placement.common.differ import (
    MemoryOf,
    Move,
    Reorganisation,
    key_of,
    reorganised,
    started_anew,
)
from roles.config.cluster import ClusterConfig, placed_models
from roles.config.documents import through_json
from roles.config.read_config import parse_config
from roles.scheduler.settings import SchedulerSettings, settings_from

SOURCE = "the running configuration"
_NOT_HOSTED: Final = {"slo_ms", "rate_rps", "weight", "arrival", "priority", "shard", "term"}
"""Keys of a model's section that are nothing to the slices that host it."""
_NAMES_SHOWN: Final = 4
"""Of GPUs and nodes in a reason."""
_OUTDATED: Final = 0
"""As a bound on batches, which no plan has: what a slice hosts is not what is wanted under that name."""


def make_plan(asked: PlanAsked) -> PlanMade:
    """Answer a question; where there is no plan, `reason` says why. Raises nothing that a configuration can cause."""
    try:
        return _made(asked)
    except FabricError as error:
        return PlanMade(asked.number, reason=str(error))


def plan_document(document: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without rates, which travel beside it: a model more or less changes no other one's rate."""
    plain = {key: value for key, value in document.items() if key not in ("rate_rps", "popularity")}
    plain["models"] = [
        {key: value for key, value in section.items() if key not in ("rate_rps", "weight")}
        for section in document["models"]
    ]
    return plain


def replica_hints(
    placement: Placement,
    settings: SchedulerSettings,
    slice_ids: Iterable[SliceId],
    sections: Iterable[Mapping[str, Any]],
) -> dict[SliceId, tuple[ReplicaHint, ...]]:
    """What a placement says of each of its slices, which have these ids in the order of `in_gpu_order`."""
    digests = _digests(sections)
    hints: dict[SliceId, tuple[ReplicaHint, ...]] = {}
    for slice_id, planned in zip(slice_ids, in_gpu_order(placement.slices), strict=True):
        hints[slice_id] = tuple(
            ReplicaHint(
                model.model_id,
                *settings.hints.get((slice_id, model.model_id), (None, 1.0)),
                model.rate_rps,
                model.predicted_ms,
                model.batch_max,
                digests[model.model_id],
            )
            for model in planned.models
        )
    return hints


def _digests(sections: Iterable[Mapping[str, Any]]) -> dict[ModelId, int]:
    """Of all that a slice is told of each model, the same of a file and of its JSON, in which every key is a text. Never 0."""
    digests = {}
    for section in sections:
        hosted = {key: value for key, value in section.items() if key not in _NOT_HOSTED}
        said = json.dumps(through_json(hosted), sort_keys=True)
        digests[ModelId(section["name"])] = crc32(said.encode()) or 1
    return digests


def in_gpu_order(slices: Iterable[PlannedSlice]) -> list[PlannedSlice]:
    """The order in which `settings_from` numbers the slices of a GPU."""
    return sorted(slices, key=lambda planned: planned.gpu)


def slice_ids_of(placement: Placement, config: ClusterConfig) -> list[SliceId]:
    """The ids that `settings_from` gives the slices of a placement, in the order of `in_gpu_order`."""
    gpus = {gpu.index: gpu for gpu in config.gpus}
    seen: Counter[int] = Counter()
    ids = []
    for planned in in_gpu_order(placement.slices):
        gpu = gpus[planned.gpu]
        ids.append(SliceId(f"{gpu.node_id}/gpu{gpu.local_index}/{seen[planned.gpu]}"))
        seen[planned.gpu] += 1
    return ids


# ---------------------------------------------------------------- one plan


def _made(asked: PlanAsked) -> PlanMade:
    document = json.loads(asked.document)
    if not document["models"]:
        ends = tuple(one.slice_id for one in asked.current)
        return PlanMade(asked.number, moves=(MoveInfo(0, (), ends),) if ends else ())
    config = _config(document, asked)
    gpus = [gpu for gpu in config.gpus if GpuRef(gpu.node_id, gpu.local_index) not in asked.gpus_out]
    if not gpus:
        raise ConfigError("no GPU is left to plan with")
    index_of = {(gpu.node_id, gpu.local_index): gpu.index for gpu in config.gpus}
    current = {
        one.slice_id: _planned(one, [index_of[one.node_id, gpu] for gpu in (one.gpu, *one.following)])
        for one in asked.current
        if all((one.node_id, gpu) in index_of for gpu in (one.gpu, *one.following))
    }
    wanted = _digests(document["models"])
    running = {
        one.slice_id: _with_outdated(current[one.slice_id], one.hints, wanted)
        for one in asked.current
        if one.slice_id in current
    }
    memory_of = _memory_of(config, gpus, asked.current, running)
    unplaced: tuple[Unplaced, ...] = ()
    if not asked.grown:
        now = Placement(tuple(planned for planned in current.values() if planned.models))
        placed = config.place(current=now, gpus=gpus)
        may_swap = config.placement.name != "given"
        found = reorganised(running, placed.slices, gpus, memory_of, may_swap=may_swap)
        unplaced = _with_gpus_out(placed.unplaced, config, gpus)
    else:
        hosted = tuple(model for model in current[asked.grown].models if model.model_id in wanted)
        if not hosted:
            raise ConfigError("it hosts nothing that is wanted")
        grown = replace(current[asked.grown], share_percent=asked.share_percent, models=hosted)
        found = started_anew(running, asked.grown, grown, gpus, memory_of)
        if any(start.after for move in found.moves for start in move.starts):
            raise ConfigError("its GPU has no memory for a larger slice while this one serves")
    return _as_message(asked, config, document["models"], found, unplaced)


def _with_gpus_out(
    unplaced: Iterable[Unplaced], config: ClusterConfig, gpus: Sequence[GpuSlot]
) -> tuple[Unplaced, ...]:
    """Policies see `gpus` alone: where only others of the cluster could host a model, it is for these that it has no place."""
    models = {
        model.model_id: model for model in placed_models(config.models, has_real_gpus=config.has_real_gpus)
    }
    profiles = config.profiles()
    sizes = Counter(gpu.node_id for gpu in config.gpus)

    def could_host(model: PlacedModelInput, gpu: GpuSlot) -> bool:
        if cannot_host(model, gpu, profiles, stages=model.stages) is not None:
            return False
        bound = {model.model_id: 1}
        return slice_memory_bytes([model], gpu.gpu_type, profiles, model.stages, bound) <= gpu.memory_bytes

    def able(model: PlacedModelInput, among: Iterable[GpuSlot]) -> list[GpuSlot]:
        """Those that could host it; none where no host has as many as it needs."""
        found = [gpu for gpu in among if could_host(model, gpu)]
        hosts = Counter(gpu.node_id for gpu in found)
        return found if max(hosts.values(), default=0) >= model.gpus else []

    def reason(one: Unplaced) -> str:
        model = models[one.model_id]
        lacking = (
            []
            if model.rate_rps == 0 or able(model, gpus)
            else [gpu for gpu in able(model, config.gpus) if gpu not in gpus]
        )
        if not lacking:
            return one.reason
        counts = Counter(gpu.node_id for gpu in lacking)
        whole = {node_id for node_id, count in counts.items() if count == sizes[node_id]}
        names = list(
            dict.fromkeys(
                gpu.node_id if gpu.node_id in whole else GpuRef(gpu.node_id, gpu.local_index).name
                for gpu in lacking
            )
        )
        more = f", … {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        return f"its GPUs are drained or away: {', '.join(names[:_NAMES_SHOWN])}{more}"

    return tuple(replace(one, reason=reason(one)) for one in unplaced)


def _config(document: Mapping[str, Any], asked: PlanAsked) -> ClusterConfig:
    config = parse_config(document, Path(asked.base_dir), source=SOURCE, is_whole=False)
    rates = asked.rates_rps
    # Those of sections that were added just now are still in the document, and hold where nothing else is known.
    models = tuple(
        replace(model, rate_steps=((0.0, rates[model.name]),), stage_rps=0.0)
        if model.name in rates
        else model
        for model in config.models
    )
    return replace(config, models=models)


def _planned(one: CurrentSlice, gpus: Sequence[int]) -> PlannedSlice:
    models = tuple(
        PlannedModel(
            hint.model_id, hint.batch, hint.rate_rps, None, hint.predicted_ms, batch_max=hint.batch_max
        )
        for hint in one.hints
    )
    return PlannedSlice(gpus[0], one.share_percent, models, tuple(gpus[1:]))


def _with_outdated(
    planned: PlannedSlice, hints: Iterable[ReplicaHint], wanted: Mapping[ModelId, int]
) -> PlannedSlice:
    """A slice that hosts another model than is wanted under its name is as little of use as one of another bound on batches."""
    outdated = {one.model_id for one in hints if one.digest not in (0, wanted.get(one.model_id))}
    models = (
        replace(model, batch_max=_OUTDATED) if model.model_id in outdated else model
        for model in planned.models
    )
    return replace(planned, models=tuple(models)) if outdated else planned


def _memory_of(
    config: ClusterConfig,
    gpus: Sequence[GpuSlot],
    running: Sequence[CurrentSlice],
    current: Mapping[SliceId, PlannedSlice],
) -> MemoryOf:
    """Memory by the profiles; of what hosts a model that is not configured any more, or otherwise, what its worker was told."""
    models = {
        model.model_id: model for model in placed_models(config.models, has_real_gpus=config.has_real_gpus)
    }
    profiles = config.profiles()
    type_of = {gpu.index: gpu.gpu_type for gpu in gpus}
    told = {key_of(current[one.slice_id]): one.memory_bytes for one in running if one.slice_id in current}

    def memory_of(planned: PlannedSlice) -> int:
        known = [models[model.model_id] for model in planned.models if model.model_id in models]
        size = 0
        if planned.gpu in type_of:
            bounds = {model.model_id: model.batch_max for model in planned.models}
            size = slice_memory_bytes(known, type_of[planned.gpu], profiles, len(planned.gpus), bounds)
        is_as_wanted = all(
            model.model_id in models and model.batch_max != _OUTDATED for model in planned.models
        )
        return size if is_as_wanted else max(size, told.get(key_of(planned), 0))

    return memory_of


def _as_message(
    asked: PlanAsked,
    config: ClusterConfig,
    sections: Iterable[Mapping[str, Any]],
    found: Reorganisation,
    unplaced: Iterable[Unplaced],
) -> PlanMade:
    """With the specifications of new slices. Where one grows the others stay as they are, whatever they host."""
    new = [
        planned
        for move in found.moves
        for planned in (*(start.planned for start in move.starts), *(one.planned for one in move.changes))
    ]
    known = {model.model_id for model in config.models}
    kept = [
        replace(
            planned,
            models=tuple(m for m in planned.models if m.model_id in known and m.batch_max != _OUTDATED),
        )
        for planned in found.kept.values()
    ]
    everything = (*kept, *new)
    placement = Placement(everything)
    settings = settings_from(config, placement)
    specs = {spec.slice_id: (node_id, spec) for node_id, spec in settings.slices}
    ids = slice_ids_of(placement, config)
    hints = replica_hints(placement, settings, ids, sections)
    by_gpu = sorted(range(len(everything)), key=lambda place: everything[place].gpu)
    id_at = dict(zip(by_gpu, ids, strict=True))
    places = iter(range(len(kept), len(everything)))

    def new_slice(after: tuple[SliceId, ...]) -> NewSlice:
        slice_id = id_at[next(places)]
        node_id, spec = specs[slice_id]
        unnamed = replace(spec, slice_id=SliceId(""))
        return NewSlice(node_id, unnamed, hints[slice_id], after)

    def changed_slice(running: SliceId) -> ChangedSlice:
        slice_id = id_at[next(places)]
        return ChangedSlice(running, specs[slice_id][1].models, hints[slice_id])

    def as_told(move: Move) -> MoveInfo:
        starts = tuple(new_slice(start.after) for start in move.starts)
        changes = tuple(changed_slice(change.slice_id) for change in move.changes)
        return MoveInfo(move.wave, starts, move.ends, changes)

    if asked.grown:
        said = {one.slice_id: one.hints for one in asked.current}
    else:
        said = {slice_id: hints[id_at[place]] for place, slice_id in enumerate(found.kept)}
    return PlanMade(
        asked.number,
        models=settings.models,
        priorities=tuple(float(settings.priorities[model.model_id]) for model in settings.models),
        kept=tuple(KeptSlice(slice_id, said[slice_id]) for slice_id in found.kept),
        moves=tuple(map(as_told, found.moves)),
        unplaced=tuple(UnplacedInfo(one.model_id, one.rate_rps, one.reason) for one in unplaced),
        rates_rps={model.name: model.rate_rps for model in config.models if model.rate_rps is not None},
    )
