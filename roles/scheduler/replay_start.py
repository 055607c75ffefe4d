"""A scheduler's journal: what it was made of, so that a replay starts from the very same core."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from fabric.errors import ConfigError, FabricError
from fabric.ids import ModelId, NodeId, SliceId
from fabric.json_files import as_json, as_struct
from fabric.limits import check
from fabric.messages import KeptSlice, ModelSpec, ReplicaHint, SliceSpec
from roles.config.cluster import PolicyChoice
from roles.scheduler.build import scheduler_core
from roles.scheduler.core import SchedulerCore
from roles.scheduler.planning.desired_state import ControllerSettings
from roles.scheduler.planning.former_plans import former_settings
from roles.scheduler.settings import SchedulerSettings

_DAMAGED = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)
ItemT = TypeVar("ItemT", bound=Hashable)
Target = tuple[ModelId, int | None, float]


class _Numbered(dict[ItemT, int]):
    """Items, each once, by the number of its place."""

    def __missing__(self, item: ItemT) -> int:
        number = self[item] = len(self)
        return number


class _About(Struct, frozen=True):
    """What is written down: whole structs, so that none of their fields is forgotten.

    What hundreds of slices may have in common is there once, and they have its number: `models`; lists of their numbers that
    are `hosted` together, the first of all that are served; and lists of `targets` (`SchedulerSettings.hints`) and of `hints`.
    """

    batching: PolicyChoice
    settings: SchedulerSettings
    """But for its models, slices and hints."""
    planning: ControllerSettings | None
    """But for its hints."""
    models: tuple[ModelSpec, ...]
    hosted: tuple[tuple[int, ...], ...]
    slices: tuple[tuple[NodeId, int, SliceSpec], ...]
    """Each with the number of what it hosts."""
    targets: tuple[tuple[Target, ...], ...]
    targets_of: tuple[tuple[SliceId, int], ...]
    hints: tuple[tuple[ReplicaHint, ...], ...]
    hints_of: tuple[tuple[SliceId, int], ...]
    role: str = "scheduler"


def about_scheduler(
    settings: SchedulerSettings, batching: PolicyChoice, planning: ControllerSettings | None = None
) -> bytes:
    """The settings and the discipline, for the head of a journal: ASCII, however large."""
    hosted: _Numbered[tuple[ModelSpec, ...]] = _Numbered({settings.models: 0})
    slices = tuple(
        (node_id, hosted[spec.models], replace(spec, models=())) for node_id, spec in settings.slices
    )
    models: _Numbered[ModelSpec] = _Numbered()
    numbers = tuple(tuple(models[model] for model in listed) for listed in hosted)
    targets: _Numbered[tuple[Target, ...]] = _Numbered()
    hints: _Numbered[tuple[ReplicaHint, ...]] = _Numbered()
    about = _About(
        batching,
        replace(settings, models=(), slices=(), hints={}),
        None if planning is None else replace(planning, hints=()),
        tuple(models),
        numbers,
        slices,
        targets_of=tuple((slice_id, targets[of]) for slice_id, of in _by_slice(settings.hints).items()),
        targets=tuple(targets),
        hints_of=tuple(
            (kept.slice_id, hints[kept.hints]) for kept in (() if planning is None else planning.hints)
        ),
        hints=tuple(hints),
    )
    return as_json(about).encode()


def scheduler_from(about: bytes) -> SchedulerCore:
    """The core that such a journal began with. Raises ConfigError for any other."""
    return scheduler_core(*settings_of(about))


def settings_of(about: bytes) -> tuple[SchedulerSettings, PolicyChoice, ControllerSettings | None]:
    """What `about_scheduler` wrote down, now or in an earlier version. Raises ConfigError for anything else."""
    try:
        read = json.loads(about)
        if read["role"] != "scheduler":
            raise ConfigError(f"a journal of a {read['role']}, which cannot be replayed")
        if "settings" in read:
            return _settings(as_struct(read, _About))
        settings, planning = former_settings(read)
        name, options = read["batching"]
    except (FabricError, *_DAMAGED) as error:
        raise ConfigError(f"the journal does not say what scheduler it is of: {error}") from error
    return settings, PolicyChoice(name, options), planning


def _settings(about: _About) -> tuple[SchedulerSettings, PolicyChoice, ControllerSettings | None]:
    bare = [spec for _, _, spec in about.slices]
    for struct in (*about.models, *bare, *(hint for listed in about.hints for hint in listed)):
        check(struct)
    hosted = [tuple(about.models[number] for number in listed) for listed in about.hosted]
    settings = replace(
        about.settings,
        models=hosted[0],
        slices=tuple(
            (node_id, replace(spec, models=hosted[number])) for node_id, number, spec in about.slices
        ),
        hints={
            (slice_id, model_id): (batch, weight)
            for slice_id, number in about.targets_of
            for model_id, batch, weight in about.targets[number]
        },
    )
    if about.planning is None:
        return settings, about.batching, None
    for unplaced in about.planning.unplaced:
        check(unplaced)
    hints = tuple(KeptSlice(slice_id, about.hints[number]) for slice_id, number in about.hints_of)
    return settings, about.batching, replace(about.planning, hints=hints)


def _by_slice(
    hints: Mapping[tuple[SliceId, ModelId], tuple[int | None, float]],
) -> dict[SliceId, tuple[Target, ...]]:
    found: dict[SliceId, list[Target]] = {}
    for (slice_id, model_id), (batch, weight) in hints.items():
        found.setdefault(slice_id, []).append((model_id, batch, weight))
    return {slice_id: tuple(targets) for slice_id, targets in found.items()}
