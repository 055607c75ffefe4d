"""What a frontend's core hears and what it asks its shell to do. Plain values; payload only by handle."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from fabric.frames import REQUEST_BYTES_MAX
from fabric.ids import FrontendId, Incarnation, ModelId, PeerId, SliceId
from fabric.messages import (
    Answer,
    AnyMessage,
    Arrivals,
    FiguresListed,
    FrontendHello,
    ImagePreprocess,
    Infer,
    Inputs,
    Left,
    ModelsListed,
    Outputs,
    Pong,
    Refusal,
    RequestsRemembered,
    TensorSpec,
    Unready,
    Withdraw,
)
from roles.applications.served import ServedApplication
from roles.runtime.core import NO_PAYLOAD, Handle, Lost, Tick
from roles.runtime.process_events import StopAsked

ToScheduler = FrontendHello | Arrivals | Withdraw | Left


class FrontendSettings(Struct, frozen=True, gc=False):
    """Who a frontend is and what it takes on. `addresses` are where it pulls outputs, `memory` whose it can read."""

    frontend_id: FrontendId
    incarnation: Incarnation
    addresses: tuple[str, ...]
    request_bytes_max: int = REQUEST_BYTES_MAX
    pending_max: int = 65_536
    pending_bytes_max: int = 1 << 30
    memory: str = ""
    shards: int = 1
    applications: tuple[ServedApplication, ...] = ()
    fan_outs_from_ms: float | None = None
    """The moment from which the steps of drawn fan-outs count; None: its start."""
    hello_every_ms: float = 250.0  # while the scheduler does not list us; at most so often if in doubt


# ---------------------------------------------------------------- events


class Asked(Struct, frozen=True, gc=False):
    """A client's request came; its tensors are kept under `payload` and described by `specs`."""

    peer: PeerId
    message: Infer
    late_ms: float
    payload: Handle
    specs: Sequence[TensorSpec]
    size_bytes: int
    unread_ms: float = 0.0
    """So long it has waited to be read."""


class ClientSaid(Struct, frozen=True, gc=False):
    """Any other message of a client, whether it may say that or not."""

    peer: PeerId
    message: AnyMessage


class SchedulerSaid(Struct, frozen=True, gc=False):
    """A message of the scheduler with that number, whether it may say that or not; `epoch`: of its header."""

    message: AnyMessage
    epoch: int = 0
    scheduler: int = 0
    shard: int = 0


class Computed(Struct, frozen=True, gc=False):
    """A worker's outputs came; kept under `payload`, described by `specs`."""

    message: Outputs
    payload: Handle
    specs: Sequence[TensorSpec]


class WorkerSaid(Struct, frozen=True, gc=False):
    """Any other message of a worker: that requests ran into an error, or what it may not say."""

    message: AnyMessage


class Preprocessed(Struct, frozen=True, gc=False):
    """The tensors under `payload` are now what the model takes."""

    payload: Handle


class PreprocessFailed(Struct, frozen=True, gc=False):
    """They cannot be: `code` is a request error's wire code."""

    payload: Handle
    code: str
    reason: str


class MadeInputs(Struct, frozen=True, gc=False):
    """The inputs of one request of a stage; kept under `payload`, described by `specs`."""

    payload: Handle
    specs: Sequence[TensorSpec]
    size_bytes: int


class InputsMade(Struct, frozen=True, gc=False):
    """The answer to `MakeInputs`: of so many requests."""

    job: int
    made: Sequence[MadeInputs]


class InputsNotMade(Struct, frozen=True, gc=False):
    """The other answer to `MakeInputs`: `code` is a request error's wire code."""

    job: int
    code: str
    reason: str


class TurnEnded(Struct, frozen=True, gc=False):
    """The shell has handed over what one turn of its loop brought. Fed while `has_gathered`."""


class Unannounced(Struct, frozen=True, gc=False):
    """A scheduler's queue did not take this, or there is no connection to it."""

    message: Arrivals | Left
    shard: int = 0


class Unpushed(Struct, frozen=True, gc=False):
    """The slice's queue did not take these; or they can never be sent so: `code` is then a request error's wire code."""

    message: Inputs
    code: str = ""
    reason: str = ""


class SchedulerLost(Struct, frozen=True, gc=False):
    """Its connection is closed, or nothing has been heard of it for too long."""

    scheduler: int = 0
    shard: int = 0


FrontendEvent = (
    Asked
    | ClientSaid
    | SchedulerSaid
    | Computed
    | WorkerSaid
    | Preprocessed
    | PreprocessFailed
    | InputsMade
    | InputsNotMade
    | TurnEnded
    | Unannounced
    | Unpushed
    | SchedulerLost
    | StopAsked
    | Lost  # a client is gone
    | Tick
)

# ---------------------------------------------------------------- actions


class Reply(Struct, frozen=True, gc=False):
    """To a client. An `Answer` goes with row `row` of every tensor under `payload`."""

    peer: PeerId
    message: Answer | Refusal | ModelsListed | Pong | Unready | RequestsRemembered | FiguresListed
    payload: Handle = NO_PAYLOAD
    row: int = 0


class Report(Struct, frozen=True, gc=False):
    """To whoever asked for the status: the core's counters, to which the shell adds its links'."""

    peer: PeerId


class Tell(Struct, frozen=True, gc=False):
    """To a shard's active scheduler, a `FrontendHello` to all of the shard.

    `Arrivals` and `Left` that cannot be sent come back as `Unannounced`; the rest is counted and dropped.
    """

    message: ToScheduler
    shard: int = 0


class UseScheduler(Struct, frozen=True, gc=False):
    """That one is the shard's active scheduler from now on."""

    scheduler: int
    shard: int = 0


class PushInputs(Struct, frozen=True, gc=False):
    """To a slice: the tensors of `payloads`, request after request, each in the order of `names` if given."""

    message: Inputs
    payloads: Sequence[Handle]
    names: Sequence[str]


class OpenSlice(Struct, frozen=True, gc=False):
    """A slice is there and may be granted: be ready to push to it."""

    slice_id: SliceId
    incarnation: Incarnation
    addresses: Sequence[str]


class DropSlice(Struct, frozen=True, gc=False):
    """That incarnation of a slice is gone: close its connection at once, with whatever waits in it."""

    slice_id: SliceId
    incarnation: Incarnation


class Preprocess(Struct, frozen=True, gc=False):
    """Turn the encoded picture under `payload` into the model's input, on a thread of its own."""

    payload: Handle
    image: ImagePreprocess


class ReplyWithAll(Struct, frozen=True, gc=False):
    """To a client: the answer of an application, with all tensors of these payloads, each named after its result."""

    peer: PeerId
    message: Answer
    payloads: Sequence[Handle]


class KeepRow(Struct, frozen=True, gc=False):
    """Row `row` of every tensor under `payload` is wanted longer than the rest: keep it under `kept`."""

    payload: Handle
    row: int
    kept: Handle


class MakeInputs(Struct, frozen=True, gc=False):
    """Make the inputs of a stage's requests. Answered by `InputsMade` or `InputsNotMade`, unless `until_ms` is over.

    `after`: the answers they are made from, by stage. `request`: the tensors of the application's request. `names`: of the inputs that
    the model declares, if it does. `count`: so many are alike; None: the output `source` says how many, or a glue does.
    """

    job: int
    application: ModelId
    stage: str
    after: Sequence[tuple[str, Sequence[Handle]]]
    request: Handle
    names: Sequence[str]
    until_ms: float
    count: int | None = None
    source: str = ""


class Release(Struct, frozen=True, gc=False):
    """These tensors are wanted no more. `may_be_read`: but a worker may have them in a batch yet."""

    payload: Handle
    may_be_read: bool = False


FrontendAction = (
    Reply
    | ReplyWithAll
    | Report
    | Tell
    | UseScheduler
    | PushInputs
    | OpenSlice
    | DropSlice
    | Preprocess
    | KeepRow
    | MakeInputs
    | Release
)
