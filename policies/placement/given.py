"""Given: the slices are written in the configuration; this only checks them.

    placement:
      given: {slices: [{gpu: 0, share_percent: 40, models: [{model: resnet50, batch: 8}]}]}

What cannot be (an unknown key, a GPU that does not exist) is a ConfigError; what is merely unwise (shares over
100 %) is a violation in the plan, because a user may want to see what happens. `following: [1, 2]` beside `gpu: 0` makes a
pipeline: each model is cut into as many stages as there are GPUs, or, with `loader.ranks`, runs in so many ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec.structs import replace

from fabric.errors import ConfigError, ProfileError
from fabric.ids import ModelId
from fabric.policy_options import Free, Number, Schema, checked_options, shown, suggestion
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
    share_violations,
    slice_memory_bytes,
)
from policies.placement.common.request_checks import joined, require_gpus, require_pipelines
from policies.registry import Registered
from profiles.model import BATCH_SIZE_LIMIT

_BATCH = Number(None, minimum=1, maximum=BATCH_SIZE_LIMIT, is_minimum_allowed=True, is_whole=True)
_SLICE: Schema = {
    "gpu": Number(None, minimum=0, is_minimum_allowed=True, is_whole=True),
    "following": Free(),
    "share_percent": Number(None, maximum=100),
    "models": Free(),
}
_MODEL: Schema = {
    "model": Free(),
    "batch": _BATCH,
    "batch_max": _BATCH,
    "rate_rps": Number(None, minimum=0, is_minimum_allowed=True),
}


class Given:
    """The slices of the configuration, in its order."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._slices = _read_slices(options.get("slices"), "placement.given.slices")

    def place(
        self,
        models: Sequence[PlacedModelInput],
        gpus: Sequence[GpuSlot],
        profiles: Profiles,
        current: Placement | None = None,  # noqa: ARG002  the file decides
    ) -> Placement:
        """Place as written, but for models and GPUs that are not asked for. A slice over its GPU's memory loses its last models.

        Raises ConfigError for a pipeline that cannot be, or no GPU at all.
        """
        require_gpus(gpus)
        by_id = {model.model_id: model for model in models}
        by_index = {gpu.index: gpu for gpu in gpus}
        memory_left = {gpu.index: gpu.memory_bytes for gpu in gpus}
        kept: list[PlannedSlice] = []
        reasons: dict[ModelId, list[str]] = {}
        usable: list[PlannedSlice] = []
        for planned in self._slices:
            asked = tuple(entry for entry in planned.models if entry.model_id in by_id)
            missing = [index for index in planned.gpus if index not in by_index]
            if not missing:
                usable.append(replace(planned, models=asked))
            for entry in asked if missing else ():
                reasons.setdefault(entry.model_id, []).append(f"GPU {missing[0]} is not in use")
        require_pipelines(usable, gpus)
        for planned in usable:
            gpu, stages = by_index[planned.gpu], len(planned.gpus)
            hosted: list[PlannedModel] = []
            inputs: list[PlacedModelInput] = []
            bounds = {entry.model_id: entry.batch_max for entry in planned.models}
            needed = 0
            for written in planned.models:
                entry, model = written, by_id[written.model_id]
                reason = cannot_host(model, gpu, profiles, stages=stages)
                with_it = slice_memory_bytes([*inputs, model], gpu.gpu_type, profiles, stages, bounds)
                if reason is None and with_it > memory_left[gpu.index]:
                    reason = (
                        f"memory: its slice on GPU {gpu.index} would need {in_gib(with_it)}, "
                        f"{in_gib(memory_left[gpu.index])} are left"
                    )
                if reason is None:
                    entry, reason = _predicted(entry, planned, gpu, profiles, model.ranks)
                if reason is not None:
                    reasons.setdefault(entry.model_id, []).append(reason)
                    continue
                hosted.append(entry)
                inputs.append(model)
                needed = with_it
            for index in planned.gpus:
                memory_left[index] -= needed
            if hosted:
                kept.append(replace(planned, models=tuple(hosted)))
        placed = {entry.model_id for planned in kept for entry in planned.models}
        unplaced = [
            Unplaced(m.model_id, m.rate_rps, joined(reasons.get(m.model_id, ["no given slice hosts it"])))
            for m in models
            if m.model_id not in placed
        ]
        return Placement(tuple(kept), tuple(unplaced), share_violations(kept))

    def check_names(self, models: Sequence[PlacedModelInput], gpus: int) -> None:
        """Raise ConfigError for a GPU or a model that the configuration does not have."""
        model_ids = [model.model_id for model in models]
        for place, planned in enumerate(self._slices):
            where = f"placement.given.slices[{place}]"
            for key, index in [("gpu", planned.gpu), *(("following", one) for one in planned.following)]:
                if index >= gpus:
                    raise ConfigError(f"{where}.{key} is {index}; GPUs are numbered 0 to {gpus - 1}")
            for entry in planned.models:
                if entry.model_id not in model_ids:
                    hint = suggestion(entry.model_id, model_ids)
                    raise ConfigError(f"{where}.models: there is no model {entry.model_id!r}{hint}")


def _predicted(
    entry: PlannedModel, planned: PlannedSlice, gpu: GpuSlot, profiles: Profiles, ranks: int
) -> tuple[PlannedModel, str | None]:
    """The entry with its solo run time at that share and batch, or why its profile says it cannot be."""
    profile = profiles.get((entry.model_id, gpu.gpu_type))
    if profile is None:
        return entry, None
    is_cut = bool(planned.following) and ranks <= 1
    if not gpu.is_emulated and is_cut and len(planned.gpus) not in profile.cuts:
        return entry, None  # it will be measured
    try:
        if is_cut:
            exec_ms = sum(table[(entry.batch or 1) - 1] for table in profile.stage_tables(len(planned.gpus)))
        else:
            exec_ms = profile.exec_ms(entry.batch or 1, planned.share_percent)
    except ProfileError as error:
        return entry, str(error)
    return replace(entry, predicted_ms=exec_ms if entry.batch else None), None


def _read_slices(value: Any, where: str) -> tuple[PlannedSlice, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ConfigError(
            f"{where} must list the slices: [{{gpu: 0, share_percent: 40, models: [{{model: NAME}}]}}]"
        )
    slices = []
    for place, entry in enumerate(value):
        here = f"{where}[{place}]"
        options = _read_mapping(entry, _SLICE, ("gpu", "models"), here)
        listed = options["models"]
        if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
            raise ConfigError(f"{here}.models must list at least one model: [{{model: NAME, batch: 8}}]")
        models = tuple(_read_model(model, f"{here}.models[{i}]") for i, model in enumerate(listed))
        names = [model.model_id for model in models]
        if len(set(names)) < len(names):
            raise ConfigError(f"{here}.models lists a model twice; a slice hosts each model once")
        following = _read_following(options.get("following", ()), f"{here}.following")
        slices.append(PlannedSlice(options["gpu"], options.get("share_percent"), models, following))
    return tuple(slices)


def _read_following(value: Any, where: str) -> tuple[int, ...]:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    if not is_list or not all(type(gpu) is int and gpu >= 0 for gpu in value):
        raise ConfigError(
            f"{where} is {shown(value)}; it must list the GPUs of the other stages, such as [1, 2]"
        )
    return tuple(value)


def _read_model(value: Any, where: str) -> PlannedModel:
    options = _read_mapping(value, _MODEL, ("model",), where)
    if not isinstance(options["model"], str):
        raise ConfigError(f"{where}.model is {shown(options['model'])}; it must be a model's name")
    batch, batch_max = options.get("batch"), options.get("batch_max")
    if batch is not None and batch_max is not None and batch > batch_max:
        raise ConfigError(f"{where}.batch is {batch}; it must be at most batch_max, {batch_max}")
    return PlannedModel(ModelId(options["model"]), batch, options.get("rate_rps"), batch_max=batch_max)


def _read_mapping(value: Any, schema: Schema, needed: Sequence[str], where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} is {shown(value)}; it must be a mapping with {', '.join(schema)}")
    # `tenuto plan --json` says null for what its plan does not: here that is the same as not saying it.
    given = {key: item for key, item in value.items() if item is not None}
    options = checked_options(schema, given, where)
    for name in needed:
        if name not in options:
            raise ConfigError(f"{where}.{name} is missing")
    return options


REGISTERED: Final = Registered({"slices": Free()}, Given)
