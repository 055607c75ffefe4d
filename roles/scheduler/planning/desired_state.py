"""What the operators want served, and each change of it: values, checked before anything moves."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from fabric.ids import ModelId
from fabric.messages import (
    DrainAsked,
    GpuRef,
    KeptSlice,
    ModelsAdd,
    ModelSet,
    ModelsRemove,
    PlanChange,
    UnplacedInfo,
)
from fabric.policy_options import suggestion
from policies.placement.common.base import Placement
from roles.config.cluster import ClusterConfig
from roles.scheduler.planning.make_plan import plan_document, replica_hints, slice_ids_of
from roles.scheduler.settings import SchedulerSettings

UNKNOWN_MODEL, NAME_TAKEN, INVALID_CONFIG, UNKNOWN_GPU, BUSY = (
    "UnknownModel",
    "NameTaken",
    "InvalidConfig",
    "UnknownGpu",
    "Busy",
)
"""Codes of a `Changed` that was refused."""
NESTED_MAX = 64
"""Levels of a model's section: what is read must also be written again, and deeper in a document than it came."""


class ChangeRefused(Struct, frozen=True):
    """Why a change cannot be."""

    code: str
    reason: str


class Desired(Struct, frozen=True):
    """Model sections of the configuration (as in the file, without rates), declared rates, and GPUs.

    `rest` is the document without its models; `drained` GPUs are not planned with.
    """

    sections: tuple[Mapping[str, Any], ...]
    rest: Mapping[str, Any]
    base_dir: str
    gpus: tuple[GpuRef, ...]
    declared_rps: Mapping[ModelId, float] = field(default_factory=dict)
    drained: frozenset[GpuRef] = frozenset()

    @property
    def document(self) -> str:
        """For a planner."""
        return json.dumps({**self.rest, "models": list(self.sections)})

    @property
    def model_ids(self) -> tuple[ModelId, ...]:
        """What is served."""
        return tuple(ModelId(section["name"]) for section in self.sections)

    def changed(self, change: PlanChange) -> Desired | ChangeRefused:
        """What is wanted after it."""
        match change:
            case ModelsAdd(document=document):
                return self._added(document)
            case ModelsRemove(model_ids=model_ids):
                return self._removed(model_ids)
            case ModelSet():
                return self._set(change)
            case DrainAsked():
                return self._drained(change)

    def without(self, model_ids: Iterable[ModelId]) -> Desired:
        """The same but for these models."""
        gone = set(model_ids)
        return replace(
            self,
            sections=tuple(section for section in self.sections if section["name"] not in gone),
            declared_rps={m: rate for m, rate in self.declared_rps.items() if m not in gone},
        )

    def _removed(self, model_ids: Sequence[ModelId]) -> Desired | ChangeRefused:
        known = set(self.model_ids)
        unknown = [model_id for model_id in model_ids if model_id not in known]
        if unknown:
            return self._unknown(unknown[0])
        for application in self.rest.get("applications") or ():
            for stage, section in application["stages"].items():
                if section["model"] in model_ids:
                    reason = f"stage {stage} of application {application['name']!r} asks {section['model']!r}"
                    return ChangeRefused(INVALID_CONFIG, f"{reason}; applications change with the file")
        return self.without(model_ids)

    def _added(self, document: str) -> Desired | ChangeRefused:
        try:
            sections = json.loads(document)
        except (ValueError, RecursionError) as error:
            return ChangeRefused(INVALID_CONFIG, f"cannot be parsed: {error}")
        if not isinstance(sections, list) or not all(isinstance(section, dict) for section in sections):
            return ChangeRefused(INVALID_CONFIG, "it is not a list of models")
        if any(_is_deeper_than(NESTED_MAX, section) for section in sections):
            return ChangeRefused(INVALID_CONFIG, f"a model is nested deeper than {NESTED_MAX} levels")
        known = set(self.model_ids)
        for section in sections:
            name = section.get("name")
            if not isinstance(name, str):
                return ChangeRefused(INVALID_CONFIG, "a model has no name")
            if name in known:
                return ChangeRefused(NAME_TAKEN, f"there is a model {name!r} already")
            known.add(ModelId(name))
        return replace(self, sections=(*self.sections, *sections))

    def _set(self, change: ModelSet) -> Desired | ChangeRefused:
        if change.model_id not in self.model_ids:
            return self._unknown(change.model_id)
        desired = self
        if change.term is not None:
            present = next(one for one in self.sections if one["name"] == change.model_id).get("term", 0)
            if change.term <= present:
                return ChangeRefused(INVALID_CONFIG, f"its term is {present}, and only grows")
            desired = desired.with_value(change.model_id, "term", change.term)
        if change.slo_ms is not None:
            desired = desired.with_value(change.model_id, "slo_ms", change.slo_ms)
        if change.rate_rps is not None:
            declared = {**self.declared_rps, change.model_id: change.rate_rps}
            desired = replace(desired, declared_rps=declared)
        return desired

    def section(self, model_id: ModelId) -> Mapping[str, Any] | ChangeRefused:
        """A model's section."""
        found = next((one for one in self.sections if one["name"] == model_id), None)
        return self._unknown(model_id) if found is None else found

    def with_value(self, model_id: ModelId, key: str, value: object) -> Desired:
        """The same, with another value in one model's section."""
        sections = tuple(
            {**section, key: value} if section["name"] == model_id else section for section in self.sections
        )
        return replace(self, sections=sections)

    def _drained(self, change: DrainAsked) -> Desired | ChangeRefused:
        meant = {
            ref
            for ref in self.gpus
            if ref.node_id == change.node_id and (change.gpu is None or ref.gpu == change.gpu)
        }
        if not meant:
            name = change.node_id if change.gpu is None else f"{change.node_id}/gpu{change.gpu}"
            return ChangeRefused(UNKNOWN_GPU, f"there is no {name}{suggestion(name, self._hardware)}")
        drained = self.drained - meant if change.is_back else self.drained | meant
        if drained == set(self.gpus):
            return ChangeRefused(INVALID_CONFIG, "no GPU would be left")
        return replace(self, drained=drained)

    @property
    def _hardware(self) -> Sequence[str]:
        """What can be drained here: GPUs, and nodes."""
        return [*dict.fromkeys(ref.node_id for ref in self.gpus), *(ref.name for ref in self.gpus)]

    def _unknown(self, model_id: ModelId) -> ChangeRefused:
        return ChangeRefused(
            UNKNOWN_MODEL, f"there is no model {model_id!r}{suggestion(model_id, self.model_ids)}"
        )


def _is_deeper_than(levels: int, value: object) -> bool:
    if not isinstance(value, dict | list):
        return False
    within = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper_than(levels - 1, one) for one in within)


class PlannedRate(Struct, frozen=True):
    """Of a model: what the plan has room for, and the rate that this followed, measured or declared."""

    placed_rps: float
    followed_rps: float

    def outlasts(self, declared_before_rps: float | None, declared_rps: float | None) -> bool:
        """Whether it holds where another rate is declared. One that only followed the former declaration is replaced with it."""
        return declared_before_rps is None or declared_rps is None or self.followed_rps > declared_before_rps


class ControllerSettings(Struct, frozen=True):
    """What a controller starts with: what is wanted, and what the first plan said of each slice.

    `is_rate_blind`: the placement policy gives the same plan at every rate. `is_carried_over`: the slices were planned for another
    file, so the first thing to do is to plan. `rates`: what they were planned for, where that is not what is declared.
    `absent`: GPUs that they were planned without, as these were away. `is_given_up`: the next plan came to nothing, and is due again.
    """

    desired: Desired
    hints: tuple[KeptSlice, ...]
    is_rate_blind: bool
    unplaced: tuple[UnplacedInfo, ...] = ()
    is_carried_over: bool = False
    rates: Mapping[ModelId, PlannedRate] = field(default_factory=dict)
    absent: frozenset[GpuRef] = frozenset()
    is_given_up: bool = False


def controller_settings(
    config: ClusterConfig,
    document: Mapping[str, Any],
    base_dir: str,
    placement: Placement,
    settings: SchedulerSettings,
) -> ControllerSettings:
    """Of a configuration that was read from `document`, and placed."""
    rest = plan_document(document)
    sections = rest.pop("models")
    declared = {model.model_id: model.rate_rps for model in config.models if model.rate_rps is not None}
    desired = Desired(
        tuple(sections),
        rest,
        base_dir,
        tuple(GpuRef(gpu.node_id, gpu.local_index) for gpu in config.gpus),
        declared,
    )
    hints = replica_hints(placement, settings, slice_ids_of(placement, config), sections)
    chosen = config.placement
    is_rate_blind = chosen.name == "given" or (
        chosen.name == "symphony" and chosen.options.get("subclusters", 1) == 1
    )
    return ControllerSettings(
        desired,
        tuple(KeptSlice(slice_id, of) for slice_id, of in hints.items()),
        is_rate_blind,
        tuple(UnplacedInfo(one.model_id, one.rate_rps, one.reason) for one in placement.unplaced),
    )
