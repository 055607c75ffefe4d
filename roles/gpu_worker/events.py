"""What the worker's core hears and answers beside plain messages."""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec import Struct, field

from fabric.heartbeats import HeartbeatTiming
from fabric.ids import BatchId, FrontendId, ModelId, SliceId
from fabric.messages import BatchFailed, FrontendInfo, Inputs, InputsReturned, Outputs, RunBatch, SliceSpec
from roles.gpu_worker.batches import PartInputs
from roles.gpu_worker.executors.base import (
    DeviceBroken,
    LeftFirstStage,
    LoadBegins,
    Loaded,
    LoadFailed,
    ModelLoaded,
    RejectedRow,
    RunAborted,
    RunExpired,
    RunFailed,
    Shrunk,
    Warming,
)
from roles.runtime.core import NO_PAYLOAD, Handle, Heard, Lost, Send, Tick
from roles.runtime.process_events import StopAsked


class SchedulerAnswers(Struct, frozen=True, gc=False):
    """The scheduler speaks for the first time, or again after it may have missed something of ours."""


class AgentGone(Struct, frozen=True, gc=False):
    """The agent's process has ended, and this worker may outlive it."""


class AgentUntold(Struct, frozen=True, gc=False):
    """The agent may not have heard how our slices are: its queue was full, or the connection broke. By the next connection it cannot reach us before we have spoken."""


class InputsCame(Struct, frozen=True, gc=False):
    """One part's inputs, whose tensors the shell keeps as `payload`."""

    inputs: Inputs
    payload: Handle
    size_bytes: int


class NoRoom(Struct, frozen=True, gc=False):
    """One part's inputs came, and their tensors could not be kept."""

    inputs: Inputs


class BatchRan(Struct, frozen=True, gc=False):
    """The device finished a batch; `outputs` are stacked over the rows that were not rejected."""

    slice_id: SliceId
    batch_id: BatchId
    outputs: Handle
    rejected: tuple[RejectedRow, ...]
    exec_ms: float
    began_at_ms: float
    """On our clock."""


WorkerEvent = (
    Heard
    | Lost
    | Tick
    | SchedulerAnswers
    | AgentGone
    | AgentUntold
    | StopAsked
    | InputsCame
    | NoRoom
    | LeftFirstStage
    | BatchRan
    | LoadBegins
    | Loaded
    | LoadFailed
    | ModelLoaded
    | Warming
    | RunFailed
    | RunExpired
    | Shrunk
    | RunAborted
    | DeviceBroken
)


# ---------------------------------------------------------------- actions of the worker alone


class LoadSlice(Struct, frozen=True, gc=False):
    """Start to load a slice."""

    spec: SliceSpec


class UnloadSlice(Struct, frozen=True, gc=False):
    """Forget a slice on which nothing runs."""

    slice_id: SliceId


class LoadModel(Struct, frozen=True, gc=False):
    """Start to load the one model of `spec` beside what its slice serves."""

    spec: SliceSpec
    number: int


class UnloadModel(Struct, frozen=True, gc=False):
    """Forget a model of which nothing runs, or give up loading it. Its slice serves on."""

    slice_id: SliceId
    model_id: ModelId


class JoinScheduler(Struct, frozen=True, gc=False):
    """Connect to the scheduler, instead of the one before if there was one."""

    addresses: tuple[str, ...]
    heartbeats: HeartbeatTiming = field(default_factory=HeartbeatTiming)


class WatchAgent(Struct, frozen=True, gc=False):
    """This process is the agent from now on."""

    pid: int


class KnowFrontends(Struct, frozen=True, gc=False):
    """These frontends exist, and no others: where outputs are pushed to."""

    frontends: tuple[FrontendInfo, ...]


class Execute(Struct, frozen=True, gc=False):
    """Run a batch, now or as soon as what runs has ended; each part brings the tensors of so many requests. A row is a request, over all parts.

    Begun from `expires_at_ms` on it would be of no use to anybody.
    """

    run: RunBatch
    parts: tuple[PartInputs, ...]
    expires_at_ms: float = math.inf


class Recall(Struct, frozen=True, gc=False):
    """Give a batch back that has not begun: `RunAborted` follows then, else it ends as it would have."""

    slice_id: SliceId
    batch_id: BatchId


class Abort(Struct, frozen=True, gc=False):
    """The same, and stop it where it runs and the device can."""

    slice_id: SliceId
    batch_id: BatchId


class HeadRows(Struct, frozen=True, gc=False):
    """The rows of one head in a batch, and what each of its outputs has of their padded shape."""

    rows: tuple[int, ...]
    shapes: Mapping[str, tuple[int, ...]]


class PushOutputs(Struct, frozen=True, gc=False):
    """Push to a frontend rows `first_row` … `first_row + len(message.seqs) - 1` of the outputs, or those of one head."""

    frontend_id: FrontendId
    message: Outputs | BatchFailed | InputsReturned
    outputs: Handle = NO_PAYLOAD
    first_row: int = 0
    head: HeadRows | None = None


class Release(Struct, frozen=True, gc=False):
    """Nobody needs these tensors any more."""

    payloads: tuple[Handle, ...]


class End(Struct, frozen=True, gc=False):
    """End the process, after what was sent is out."""

    exit_code: int
    reason: str


WorkerAction = (
    Send
    | LoadSlice
    | UnloadSlice
    | LoadModel
    | UnloadModel
    | JoinScheduler
    | WatchAgent
    | KnowFrontends
    | Execute
    | Recall
    | Abort
    | PushOutputs
    | Release
    | End
)
