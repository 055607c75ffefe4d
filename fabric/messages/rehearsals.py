"""Scheduler <-> its rehearser, which plays the last arrivals under other rules in a process of its own (ADR 0270)."""

from __future__ import annotations

from fabric.ids import ModelId, SliceId
from fabric.messages.base import Listed, Message, Value


class RehearsalModel(Value, frozen=True):
    """A model, its delay to the devices, and what its scheduler knows of it."""

    model_id: ModelId
    slo_ms: float
    control_ms: float
    data_ms_per_item: float
    priority: int
    rate_rps: float
    lost_share: float
    openings_ms: float
    expected_ms: float
    is_over_share: bool = False


class RehearsalReplica(Value, frozen=True):
    """A model on a slice: run times of batches of 1, 2, …, and of a pipeline when it can start the next one."""

    model_id: ModelId
    exec_ms: Listed[float]
    interval_ms: Listed[float] = ()


class RehearsalSlice(Value, frozen=True):
    """A slice; `kind` is the place of what it hosts in `RehearsalAsked.kinds`."""

    slice_id: SliceId
    order: int
    kind: int


class RehearsalRun(Value, frozen=True):
    """Requests that arrived together, `at_ms` after the first; `model` is a place in `RehearsalAsked.models`."""

    at_ms: float
    model: int
    count: int
    budget_ms: float
    span_ms: float


class RehearsalAsked(Message, frozen=True, tag=72):
    """Scheduler core -> its rehearser: count what each of these `variants` loses of the `runs`, by block from `from_ms` on."""

    number: int
    models: Listed[RehearsalModel]
    kinds: Listed[Listed[RehearsalReplica]]
    slices: Listed[RehearsalSlice]
    lost_share: float
    runs: Listed[RehearsalRun]
    variants: Listed[int]
    from_ms: float
    blocks: int
    is_lowest_id: bool = True


class RehearsalMade(Message, frozen=True, tag=73):
    """The rehearser's answer: requests lost, by variant and block. With a `reason` there is none."""

    number: int
    lost: Listed[Listed[int]] = ()
    reason: str = ""
