"""What a scheduler must know before it starts: the models, the planned slices, the batching options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fabric.ids import ModelId, NodeId, SliceId
from fabric.messages import ModelSpec, SliceSpec
from policies.batching.base import Delay

NO_DELAY = Delay()


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """`slices` in order of rank: low ones are filled first. `hints`: the plan's target batch and weight."""

    models: tuple[ModelSpec, ...]
    slices: tuple[tuple[NodeId, SliceSpec], ...]
    delay: Delay = NO_DELAY
    priorities: Mapping[ModelId, int] = field(default_factory=dict)
    hints: Mapping[tuple[SliceId, ModelId], tuple[int | None, float]] = field(default_factory=dict)
    role_id: str = "scheduler-0"
    pid: int = 0
