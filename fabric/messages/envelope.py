"""The closed union of all messages, and the header frame that carries them."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from fabric.messages.agent_scheduler import DesiredSlices, NodeHello, SliceChanged, Telemetry
from fabric.messages.agent_worker import Host, Loading, SliceFailed, Stop, WorkerHello
from fabric.messages.applications import GlueAsked, GlueMade
from fabric.messages.base import Value
from fabric.messages.client_frontend import (
    Answer,
    CancelRequest,
    Infer,
    ModelsAsked,
    ModelsListed,
    Ping,
    Pong,
    Refusal,
    Unready,
)
from fabric.messages.frontend_scheduler import (
    Arrivals,
    Directory,
    Dropped,
    FrontendHello,
    Grant,
    Left,
    Returned,
    Withdraw,
)
from fabric.messages.frontend_worker import BatchFailed, Inputs, InputsReturned, Outputs
from fabric.messages.leases import EpochGranted, LeaseAsked, LeaseReport, PlanCopy, SchedulerHello, TakeOver
from fabric.messages.operator import (
    Changed,
    DrainAsked,
    ModelsAdd,
    ModelSet,
    ModelsRemove,
    RestartRoles,
    RoleDrain,
    RoleDrainDryRun,
    SectionAsked,
    StatusAsked,
    StatusListed,
)
from fabric.messages.planner import PlanAsked, PlanMade
from fabric.messages.records import (
    BatchesRemembered,
    FiguresAsked,
    FiguresListed,
    RecordsAsked,
    RequestsRemembered,
)
from fabric.messages.rehearsals import RehearsalAsked, RehearsalMade
from fabric.messages.stages import Activations, LoadStage, StageFailed, StageLoaded, UnloadStage
from fabric.messages.tensors import TENSORS_MAX, TensorSpec
from fabric.messages.worker_scheduler import Done, PreemptBatch, RunBatch, SliceReady

PARCELS_MAX: Final = 64
"""Messages that may travel as one."""
AnyMessage = (
    Infer
    | CancelRequest
    | Answer
    | Refusal
    | ModelsAsked
    | ModelsListed
    | Ping
    | Pong
    | Unready
    | FrontendHello
    | Directory
    | Arrivals
    | Withdraw
    | Left
    | Grant
    | Dropped
    | Returned
    | SliceReady
    | RunBatch
    | Done
    | PreemptBatch
    | Inputs
    | Outputs
    | BatchFailed
    | InputsReturned
    | NodeHello
    | DesiredSlices
    | SliceChanged
    | Telemetry
    | WorkerHello
    | Host
    | SliceFailed
    | Loading
    | Stop
    | StatusAsked
    | StatusListed
    | ModelsAdd
    | ModelsRemove
    | ModelSet
    | DrainAsked
    | SectionAsked
    | RoleDrain
    | RoleDrainDryRun
    | RestartRoles
    | Changed
    | PlanAsked
    | PlanMade
    | RehearsalAsked
    | RehearsalMade
    | LeaseAsked
    | LeaseReport
    | SchedulerHello
    | PlanCopy
    | TakeOver
    | EpochGranted
    | RecordsAsked
    | RequestsRemembered
    | BatchesRemembered
    | FiguresAsked
    | FiguresListed
    | GlueAsked
    | GlueMade
    | LoadStage
    | UnloadStage
    | StageLoaded
    | Activations
    | StageFailed
)


class Parcel(Value, frozen=True):
    """One message and the tensors that ride with it, described in their order."""

    tensors: Annotated[tuple[TensorSpec, ...], msgspec.Meta(max_length=TENSORS_MAX)]
    body: AnyMessage


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """The header frame: what was sent to one peer at one moment, in order.

    `sent_at_ms` is on the sender's clock and measures queueing only, never a deadline.
    """

    version: int
    epoch: int
    sent_at_ms: float
    parcels: Annotated[tuple[Parcel, ...], msgspec.Meta(max_length=PARCELS_MAX)]


WIRE_VERSION = 1
