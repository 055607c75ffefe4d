"""What earlier versions wrote down of a scheduler, in journals and saved plans, read as `../replay_start.py` reads its own."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import Any

from fabric.errors import ConfigError
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
from roles.runtime.journal import unpacked
from roles.scheduler.planning.desired_state import ControllerSettings, Desired
from roles.scheduler.settings import SchedulerSettings


def former_settings(read: Mapping[str, Any]) -> tuple[SchedulerSettings, ControllerSettings | None]:
    """Of the document, which may be damaged in any way.

    Raises ConfigError, beside what damage may raise, for one with pipelines: their GPUs were not written down.
    """
    planning = None if read.get("planning") is None else _planning(read["planning"])
    lists = [_models(models) for models in read["models"]]
    if any(model.stages_ms for models in lists for model in models):
        raise ConfigError("an earlier version did not write down the GPUs of pipelines")
    settings = SchedulerSettings(
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
    return settings, planning


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


def _models(header: str) -> tuple[ModelSpec, ...]:
    want = unpacked(b64decode(header))
    if not isinstance(want, DesiredSlices):
        raise ConfigError("a list of models was expected")
    return want.slices[0].models


def _planning(read: Mapping[str, Any]) -> ControllerSettings:
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
