"""Scheduler <-> its planner, which computes placements in a process of its own (docs/operate/dynamic-placement.md)."""

from __future__ import annotations

import msgspec

from fabric.ids import ModelId, NodeId, SliceId
from fabric.messages.base import Listed, Message, Value
from fabric.messages.gpus import GpuRef
from fabric.messages.models import ModelSpec, SliceSpec
from fabric.messages.operator import UnplacedInfo


class ReplicaHint(Value, frozen=True):
    """What a plan says of a model on a slice: batch and promised run time (None: nothing), weight and rate.

    `batch_max` binds: the slice must be replaced for another one.
    """

    model_id: ModelId
    batch: int | None = None
    weight: float = 1.0
    rate_rps: float | None = None
    predicted_ms: float | None = None
    batch_max: int | None = None
    digest: int = 0
    """Of what the configuration said of the model when it came to the slice; 0: not known."""


class CurrentSlice(Value, frozen=True):
    """A slice that runs, as a planner sees it."""

    slice_id: SliceId
    node_id: NodeId
    gpu: int
    share_percent: float | None
    hints: Listed[ReplicaHint]
    memory_bytes: int
    following: Listed[int] = ()


class KeptSlice(Value, frozen=True):
    """A slice that stays as it is, with the new plan's hints."""

    slice_id: SliceId
    hints: Listed[ReplicaHint]


class NewSlice(Value, frozen=True):
    """A slice to start once all of `after` have ended: there is no memory for both."""

    node_id: NodeId
    spec: SliceSpec
    hints: Listed[ReplicaHint]
    after: Listed[SliceId] = ()


class ChangedSlice(Value, frozen=True):
    """A slice that serves on, with these models in the end: what is new is loaded beside the others."""

    slice_id: SliceId
    models: Listed[ModelSpec]
    hints: Listed[ReplicaHint]


class MoveInfo(Value, frozen=True):
    """All `starts` become ready and `changes` load, then `ends` and what `changes` leave out are drained.

    An earlier `wave` is over before it begins.
    """

    wave: int
    starts: Listed[NewSlice]
    ends: Listed[SliceId]
    changes: Listed[ChangedSlice] = ()


class PlanAsked(Message, frozen=True, tag=70):
    """Scheduler core -> its planner: place this `document` (JSON; paths relative to `base_dir`).

    `rates_rps` override the document's; `gpus_out` are not to be used. With a `grown` slice: change
    nothing but its share, to `share_percent`.
    """

    number: int
    document: str
    base_dir: str
    current: Listed[CurrentSlice]
    rates_rps: dict[str, float]
    gpus_out: Listed[GpuRef] = ()
    grown: SliceId = SliceId("")
    share_percent: float | None = None


class PlanMade(Message, frozen=True, tag=71):
    """The planner's answer, with the rates it planned for. With a `reason` there is no plan.

    `priorities` are those of `models`, in their order; slices of `moves` have no names of their own yet.
    """

    number: int
    reason: str = ""
    models: Listed[ModelSpec] = ()
    priorities: Listed[float] = ()
    kept: Listed[KeptSlice] = ()
    moves: Listed[MoveInfo] = ()
    unplaced: Listed[UnplacedInfo] = ()
    rates_rps: dict[str, float] = msgspec.field(default_factory=dict)
