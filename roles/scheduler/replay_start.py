"""A scheduler's journal: what it was made of, so that a replay starts from the very same core."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import Any

from fabric.errors import ConfigError, FabricError
from fabric.ids import BatchId, ModelId, NodeId, SliceId
from fabric.messages import (
    DesiredSlices,
    GpuRef,
    InterferenceOption,
    InterferenceSpec,
    ModelSpec,
    PlanMade,
    SliceSpec,
)
from policies.batching.base import Delay
from roles.config.cluster import PolicyChoice
from roles.runtime.journal import packed, unpacked
from roles.scheduler.build import scheduler_core
from roles.scheduler.core import SchedulerCore
from roles.scheduler.planning.desired_state import ControllerSettings, Desired
from roles.scheduler.settings import SchedulerSettings

_DAMAGED = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)


def about_scheduler(
    settings: SchedulerSettings, batching: PolicyChoice, planning: ControllerSettings | None = None
) -> bytes:
    """The settings and the discipline, for the head of a journal.

    Slices that host the same models share one list of them: with every l(b) it is by far the largest part.
    """
    lists: dict[tuple[ModelSpec, ...], int] = {settings.models: 0}
    slices: list[list[object]] = []
    for node_id, spec in settings.slices:
        number = lists.setdefault(spec.models, len(lists))
        felt = None
        if spec.interference is not None:
            options = {option.name: option.value for option in spec.interference.options}
            felt = [spec.interference.name, options]
        slices.append([node_id, spec.slice_id, spec.gpu, spec.device, spec.share_percent, number, felt])
    about = {
        "role": "scheduler",
        "batching": [batching.name, dict(batching.options)],
        "models": [_packed_models(models) for models in lists],
        "slices": slices,
        "delay": [settings.delay.control_ms, settings.delay.data_ms_per_item],
        "priorities": dict(settings.priorities),
        "hints": [[*key, *hint] for key, hint in settings.hints.items()],
        "guard_ms": settings.guard_ms,
        "transfer_ms": settings.transfer_ms,
        "role_id": settings.role_id,
        "pid": settings.pid,
        "first_batch_id": settings.first_batch_id,
        "planning": None if planning is None else _packed_planning(planning),
    }
    return json.dumps(about).encode()


def scheduler_from(about: bytes) -> SchedulerCore:
    """The core that such a journal began with. Raises ConfigError for any other."""
    return scheduler_core(*settings_of(about))


def settings_of(about: bytes) -> tuple[SchedulerSettings, PolicyChoice, ControllerSettings | None]:
    """What `about_scheduler` wrote down. Raises ConfigError for anything else."""
    try:
        read = json.loads(about)
        if read["role"] != "scheduler":
            raise ConfigError(f"a journal of a {read['role']}, which cannot be replayed")
        settings = _settings(read)
        planning = None if read.get("planning") is None else _planning(read["planning"])
        name, options = read["batching"]
    except (FabricError, *_DAMAGED) as error:
        raise ConfigError(f"the journal does not say what scheduler it is of: {error}") from error
    return settings, PolicyChoice(name, options), planning


def _settings(read: dict[str, Any]) -> SchedulerSettings:
    lists = [_unpacked_models(models) for models in read["models"]]
    return SchedulerSettings(
        models=lists[0],
        slices=tuple((NodeId(node_id), _slice(lists, *slice_)) for node_id, *slice_ in read["slices"]),
        delay=Delay(*read["delay"]),
        priorities={ModelId(model_id): priority for model_id, priority in read["priorities"].items()},
        hints={
            (SliceId(slice_id), ModelId(model_id)): (target, weight)
            for slice_id, model_id, target, weight in read["hints"]
        },
        guard_ms=read["guard_ms"],
        transfer_ms=read["transfer_ms"],
        role_id=read["role_id"],
        pid=read["pid"],
        first_batch_id=BatchId(read.get("first_batch_id", 1)),
    )


def _slice(
    lists: Sequence[tuple[ModelSpec, ...]],
    slice_id: str,
    gpu: int,
    device: str,
    share_percent: float | None,
    number: int,
    felt: tuple[str, Mapping[str, float]] | None = None,
) -> SliceSpec:
    interference = None
    if felt is not None:
        name, options = felt
        interference = InterferenceSpec(
            name, tuple(InterferenceOption(*option) for option in options.items())
        )
    return SliceSpec(SliceId(slice_id), gpu, device, share_percent, lists[number], interference)


def _packed_models(models: tuple[ModelSpec, ...]) -> str:
    return b64encode(
        packed(DesiredSlices(0, (SliceSpec(SliceId("all"), 0, "emulated", None, models),)))
    ).decode()


def _unpacked_models(header: str) -> tuple[ModelSpec, ...]:
    want = unpacked(b64decode(header))
    if not isinstance(want, DesiredSlices):
        raise ConfigError("a list of models was expected")
    return want.slices[0].models


def _packed_planning(planning: ControllerSettings) -> dict[str, Any]:
    desired = planning.desired
    made = PlanMade(0, kept=planning.hints, unplaced=planning.unplaced)
    return {
        "sections": list(desired.sections),
        "rest": dict(desired.rest),
        "base_dir": desired.base_dir,
        "gpus": [[ref.node_id, ref.gpu] for ref in desired.gpus],
        "declared_rps": dict(desired.declared_rps),
        "drained": sorted([ref.node_id, ref.gpu] for ref in desired.drained),
        "made": b64encode(packed(made)).decode(),
        "is_rate_blind": planning.is_rate_blind,
        "is_carried_over": planning.is_carried_over,
    }


def _planning(read: dict[str, Any]) -> ControllerSettings:
    made = unpacked(b64decode(read["made"]))
    if not isinstance(made, PlanMade):
        raise ConfigError("a plan was expected")
    desired = Desired(
        tuple(read["sections"]),
        read["rest"],
        read["base_dir"],
        tuple(GpuRef(NodeId(node_id), gpu) for node_id, gpu in read["gpus"]),
        {ModelId(model_id): rate_rps for model_id, rate_rps in read["declared_rps"].items()},
        frozenset(GpuRef(NodeId(node_id), gpu) for node_id, gpu in read["drained"]),
    )
    is_carried_over = bool(read.get("is_carried_over"))
    return ControllerSettings(desired, made.kept, read["is_rate_blind"], made.unplaced, is_carried_over)
