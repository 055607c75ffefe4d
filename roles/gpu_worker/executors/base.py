"""What a worker expects of a device: load slices, run jobs, tell how it went.

An executor never blocks its caller. `load` and `run` only hand work over; what came of it is taken as events,
so an executor is a source of the driver (`roles/runtime/loop/driver.py`). It runs a slice's jobs one after the other, each as soon as
the one before has ended (in a pipeline, has left the first stage); the core gives it one ahead, and what failed and is run apart whenever that is known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, Protocol

import numpy as np
from msgspec import Struct

from fabric.ids import BatchId, ModelId, SliceId
from fabric.link import NamedTensor, Tensor
from fabric.messages import LeftOut, ReplicaInfo, SliceSpec, TensorInfo

HEAD_INPUT: Final = "__head__"
"""Among the inputs of a model with heads, as its executor stacks them: the number of each row's head."""


class JobPart(Struct, frozen=True, weakref=True):
    """What one frontend sent: the tensors of `count` requests, grouped by request. `heads`: which one each is for, where the model has any."""

    count: int
    tensors: Sequence[NamedTensor]
    heads: Sequence[ModelId] = ()


class Job(Struct, frozen=True):
    """One batch for one slice. *Row* i of a job is its i-th request, counted over the parts in order."""

    slice_id: SliceId
    batch_id: BatchId
    model_id: ModelId
    parts: Sequence[JobPart]
    expires_at_ms: float = math.inf
    """Begun from then on it is of no use to anybody."""


class Part(Struct, frozen=True):
    """Which part of a cut model a process has: all begin at `first_layers` and, the first one, at 0. `digest`: of the whole.

    Of a model in ranks `stage` is the rank, and the rest is empty.
    """

    stage: int
    first_layers: tuple[int, ...]
    digest: str


class RejectedRow(Struct, frozen=True):
    """A row that did not fit the model's signature and was left out."""

    row: int
    reason: str


class Loaded(Struct, frozen=True):
    """The slice is warm: one replica for every model on it but those `left_out`, which could not be loaded."""

    slice_id: SliceId
    replicas: tuple[ReplicaInfo, ...]
    left_out: tuple[LeftOut, ...] = ()


class LoadBegins(Struct, frozen=True):
    """The slice's next model is being loaded."""

    slice_id: SliceId
    model_id: ModelId


class LoadFailed(Struct, frozen=True):
    """The slice cannot be served: none of its models can be loaded."""

    slice_id: SliceId
    reason: str


class ModelLoaded(Struct, frozen=True):
    """That load beside what a slice serves has ended; without a replica it failed, for that reason."""

    slice_id: SliceId
    number: int
    replica: ReplicaInfo | None
    reason: str = ""


class Warming(Struct, frozen=True):
    """The device is at a run that warms up a model beside what its slice serves; `is_over`: and no longer."""

    slice_id: SliceId
    model_id: ModelId
    is_over: bool


class JobRan(Struct, frozen=True):
    """Outputs of the rows that were not rejected, stacked in their order; `exec_ms` is the device's time, `began_at_ms` when it began.

    `spans`, of an emulated pipeline: from when until when each stage had it.
    """

    slice_id: SliceId
    batch_id: BatchId
    outputs: Sequence[NamedTensor]
    rejected: tuple[RejectedRow, ...]
    exec_ms: float
    began_at_ms: float
    spans: Sequence[tuple[float, float]] = ()


class LeftFirstStage(Struct, frozen=True):
    """A pipeline's first stage is done with that batch and can take the next one."""

    slice_id: SliceId
    batch_id: BatchId


class RunFailed(Struct, frozen=True):
    """The model raised, answered nonsense, or the device had no memory; the slice serves on."""

    slice_id: SliceId
    batch_id: BatchId
    reason: str


class RunExpired(Struct, frozen=True):
    """A later stage of a pipeline got the batch too late for all its deadlines, and did not begin it."""

    slice_id: SliceId
    batch_id: BatchId
    reason: str


class Shrunk(Struct, frozen=True):
    """The device had no memory for a batch: larger ones than `batch_size_max` are not worth granting any more."""

    slice_id: SliceId
    model_id: ModelId
    batch_size_max: int


class RunAborted(Struct, frozen=True):
    """The batch was stopped or had not begun when somebody asked for it back, or it was too late to begin."""

    slice_id: SliceId
    batch_id: BatchId


class DeviceBroken(Struct, frozen=True):
    """Nothing will ever run on this device again (a poisoned CUDA context): the process must end."""

    reason: str


ExecutorEvent = (
    LoadBegins
    | Loaded
    | LoadFailed
    | ModelLoaded
    | Warming
    | LeftFirstStage
    | JobRan
    | RunFailed
    | RunExpired
    | Shrunk
    | RunAborted
    | DeviceBroken
)


def loaded(
    spec: SliceSpec, replicas: Sequence[ReplicaInfo], left_out: Sequence[LeftOut]
) -> Loaded | LoadFailed:
    """What came of loading a slice: a model that cannot be loaded leaves only itself out."""
    if replicas or not left_out:
        return Loaded(spec.slice_id, tuple(replicas), tuple(left_out))
    if len(left_out) == 1:
        return LoadFailed(spec.slice_id, left_out[0].reason)
    return LoadFailed(spec.slice_id, "; ".join(f"{one.model_id}: {one.reason}" for one in left_out))


class Executor(Protocol):
    """A device, or its stand-in. The last four members make it a driver's source."""

    def load(self, spec: SliceSpec) -> None:
        """Start to load and warm the models of a slice: `LoadBegins` for each, then `Loaded` or `LoadFailed`."""
        ...

    def unload(self, slice_id: SliceId) -> None:
        """Forget a slice on which nothing runs."""
        ...

    def load_model(self, spec: SliceSpec, number: int) -> None:
        """Load and warm the one model of `spec` beside what that slice serves: `ModelLoaded` with that number follows.

        Where that takes the device from batches, `Warming` says when.
        """
        ...

    def unload_model(self, slice_id: SliceId, model_id: ModelId) -> None:
        """Forget a model of which nothing runs, or give up loading it."""
        ...

    def run(self, job: Job, now_ms: float) -> None:
        """Start a job when those before it have ended: `JobRan`, `RunFailed` or `DeviceBroken` follows; on a pipeline, if its first stage can do it, `LeftFirstStage` before.

        One that is not begun by its `expires_at_ms` is not begun at all: `RunAborted` follows.
        """
        ...

    def recall(self, slice_id: SliceId, batch_id: BatchId, now_ms: float) -> None:
        """Give back a job that has not begun: `RunAborted` follows; one that has runs on."""
        ...

    def abort(self, slice_id: SliceId, batch_id: BatchId, now_ms: float) -> None:
        """The same, and stop what runs if the device can; a device that cannot lets it run on."""
        ...

    def close(self) -> None:
        """Stop within a second; what runs is given up."""
        ...

    def fileno(self) -> int:
        """Readable when `take` may have something; -1: no descriptor."""
        ...

    @property
    def has_more(self) -> bool:
        """Whether `take` would give something now."""
        ...

    @property
    def wake_at_ms(self) -> float | None:
        """When `take` will have something by itself."""
        ...

    def take(self, limit: int, now_ms: float) -> Sequence[ExecutorEvent]:
        """At most `limit` events, without blocking."""
        ...


def sort_out(
    parts: Sequence[JobPart],
    inputs: Sequence[TensorInfo],
    bounds: Mapping[str, tuple[int, int]] = MappingProxyType({}),
    head_bounds: Mapping[ModelId, Mapping[str, tuple[int, int]]] = MappingProxyType({}),
) -> tuple[list[dict[str, Tensor]], list[RejectedRow]]:
    """Rows that fit the signature, and the others with what is wrong.

    The frontend has checked the same before; this guards the neighbours in the batch against a frontend that
    is older, newer or broken. `bounds`: the smallest and largest value of an input, which only we know; `head_bounds`: those of
    each head's rows, for a model that has heads: each row has the number of its own as `HEAD_INPUT`.
    """
    numbers = {head: np.array(number) for number, head in enumerate(head_bounds)}
    fitting: list[dict[str, Tensor]] = []
    rejected: list[RejectedRow] = []
    row = 0
    for part in parts:
        width, odd = divmod(len(part.tensors), part.count)
        for index in range(part.count):
            tensors = part.tensors[index * width : (index + 1) * width]
            reason = (
                f"{len(part.tensors)} tensors for {part.count} requests"
                if odd
                else _no_head(part, index, numbers)
                or _misfit(tensors, inputs, head_bounds[part.heads[index]] if numbers else bounds)
            )
            if reason is None:
                fitting.append({tensor.name: tensor.array for tensor in tensors})
                if numbers:
                    fitting[-1][HEAD_INPUT] = numbers[part.heads[index]]
            else:
                rejected.append(RejectedRow(row, reason))
            row += 1
    return fitting, rejected


def _no_head(part: JobPart, index: int, numbers: Mapping[ModelId, Tensor]) -> str | None:
    """Why this request is for no head of a model that has some, in words; None: it is for one, or there are none."""
    if not numbers:
        return None
    if len(part.heads) != part.count:
        return "it does not say which head it is for"
    return None if part.heads[index] in numbers else f"the model has no head {part.heads[index]!r}"


def _misfit(
    tensors: Sequence[NamedTensor], inputs: Sequence[TensorInfo], bounds: Mapping[str, tuple[int, int]]
) -> str | None:
    """What is wrong with one request's tensors, in words; None: they fit."""
    by_name = {tensor.name: tensor.array for tensor in tensors}
    wanted = {info.name for info in inputs}
    if by_name.keys() != wanted or len(by_name) != len(tensors):
        return f"inputs {sorted(tensor.name for tensor in tensors)} are not {sorted(wanted)}"
    for info in inputs:
        array = by_name[info.name]
        if array.dtype.name != info.dtype:
            return f"input {info.name!r} has dtype {array.dtype.name}, not {info.dtype}"
        if array.shape != info.shape:
            return f"input {info.name!r} has shape {list(array.shape)}, not {list(info.shape)}"
        low, high = bounds.get(info.name, (0, 0))
        if info.name in bounds and array.size and not (low <= array.min() and array.max() <= high):
            return f"input {info.name!r} holds {array.min()} to {array.max()}, not {low} to {high}"
    return None
