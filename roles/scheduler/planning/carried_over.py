"""The plan that runs, taken over into a changed file: what serves goes on, and the controller moves it to what the file wants.

A scheduler that began with the new file's own plan would have slices end while they serve, and their models loaded anew elsewhere.
A model that the new file gives to another shard is served here, in the lowest term, until every frontend has gone there with it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from fabric.errors import ConfigError
from fabric.ids import ModelId
from fabric.messages import LEAVING_TERM, KeptSlice, ModelSpec, SliceSpec
from policies.placement.common.base import GpuSlot, Placement, PlannedModel, PlannedSlice
from roles.config.cluster import ClusterConfig
from roles.scheduler.planning.desired_state import ControllerSettings, Desired, controller_settings
from roles.scheduler.settings import SchedulerSettings, settings_from, slice_spec

NOTHING = Placement(())


def carried_over(
    config: ClusterConfig,
    document: Mapping[str, Any],
    base_dir: Path,
    ran: tuple[SchedulerSettings, ControllerSettings],
    whole_file: Collection[ModelId] = (),
) -> tuple[SchedulerSettings, ControllerSettings] | None:
    """What to begin with under this configuration where another one was served until now; None: nothing of that is of use.

    A slice goes on if its GPUs are still in the file and the file says the same of its models, but for their SLOs. A model that is
    not in the file any more is on its slices until the first plan is carried out. `whole_file`: all of its models, those of other shards too.
    """
    before, planned = ran
    settings = settings_from(config, NOTHING)
    planning = controller_settings(config, document, str(base_dir.absolute()), NOTHING, settings)
    gpus = {(gpu.node_id, gpu.local_index): gpu for gpu in config.gpus}
    slices = tuple(
        (node_id, spec)
        for node_id, spec in before.slices
        if all((node_id, gpu) in gpus for gpu in spec.gpus)
        and _is_as_ever(spec, gpus[node_id, spec.gpu], config)
    )
    if not slices:
        return None
    slice_ids = {spec.slice_id for _, spec in slices}
    known = {model.model_id for model in settings.models}
    hosted = {model.model_id for _, spec in slices for model in spec.models}
    leaving = (hosted - known).intersection(whole_file, planned.desired.model_ids)
    gone = (
        replace(model, term=LEAVING_TERM) if model.model_id in leaving else model
        for model in before.models
        if model.model_id not in known
    )
    terms = {model.model_id: model.term for model in before.models}
    desired = _with_terms(_with_leaving(planning.desired, planned.desired, leaving), terms)
    declared_before_rps, served = planned.desired.declared_rps, set(desired.model_ids)
    return (
        replace(
            settings,
            models=(*(_in_term(model, terms) for model in settings.models), *gone),
            slices=slices,
            hints={key: hint for key, hint in before.hints.items() if key[0] in slice_ids},
        ),
        replace(
            planning,
            desired=replace(desired, drained=planned.desired.drained & set(desired.gpus)),
            hints=tuple(_as_wanted(kept, known) for kept in planned.hints if kept.slice_id in slice_ids),
            is_carried_over=True,
            absent=planned.absent & set(desired.gpus),
            rates={
                model_id: rate
                for model_id, rate in planned.rates.items()
                if model_id in served
                and rate.outlasts(declared_before_rps.get(model_id), desired.declared_rps.get(model_id))
            },
        ),
    )


def _as_wanted(kept: KeptSlice, known: Collection[ModelId]) -> KeptSlice:
    """What is in the file is hosted as it says, however it says it now."""
    hints = (replace(hint, digest=0) if hint.model_id in known else hint for hint in kept.hints)
    return replace(kept, hints=tuple(hints))


def _in_term(model: ModelSpec, terms: Mapping[ModelId, int]) -> ModelSpec:
    """A term only grows, whatever the file says: another shard may list the model in the one before."""
    return replace(model, term=max(model.term, terms.get(model.model_id, 0)))


def _with_terms(desired: Desired, terms: Mapping[ModelId, int]) -> Desired:
    for section in desired.sections:
        term = terms.get(section["name"], 0)
        if term > section.get("term", 0) >= 0:
            desired = desired.with_value(ModelId(section["name"]), "term", term)
    return desired


def _with_leaving(desired: Desired, before: Desired, leaving: Collection[ModelId]) -> Desired:
    """Planned with as long as they are served."""
    sections = [{**one, "term": LEAVING_TERM} for one in before.sections if one["name"] in leaving]
    declared = {one: rate for one, rate in before.declared_rps.items() if one in leaving}
    return replace(
        desired,
        sections=(*desired.sections, *sections),
        declared_rps={**desired.declared_rps, **declared},
    )


def _is_as_ever(spec: SliceSpec, gpu: GpuSlot, config: ClusterConfig) -> bool:
    """Whether the file would have that slice as it is."""
    names = {model.model_id for model in config.models}
    kept = [model for model in spec.models if model.model_id in names]
    models = tuple(PlannedModel(model.model_id, batch_max=model.batch_size_max) for model in kept)
    try:
        first = gpu.index - gpu.local_index
        following = tuple(first + local_index for local_index in spec.following)
        planned = PlannedSlice(gpu.index, spec.share_percent, models, following)
        wanted = slice_spec(config, planned, gpu, config.device_model(gpu.gpu_type), spec.slice_id)
    except ConfigError:
        return False
    alike = [replace(one, slo_ms=was.slo_ms) for one, was in zip(wanted.models, kept, strict=True)]
    return alike == kept and spec.is_same_but_models(replace(wanted, models=tuple(alike)))
