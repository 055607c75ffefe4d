"""Client <-> frontend, with tensors on the same connection; and the sign of life that anyone may ask for."""

from __future__ import annotations

import msgspec

from fabric.ids import Incarnation, ModelId, SliceId
from fabric.messages.base import Listed, Message, Value
from fabric.messages.models import ModelInfo


class Ledger(Value, frozen=True):
    """Where one request's time went, in ms."""

    network_ms: float = 0.0
    """Between client and frontend and back; the client fills it in."""
    preprocess_ms: float = 0.0
    """A picture was decoded."""
    held_ms: float = 0.0
    """Chosen by the scheduler: kept back so that the batch grows."""
    waited_ms: float = 0.0
    """Forced on it: no slice was free, or an earlier try came to nothing."""
    transfer_ms: float = 0.0
    """Inputs on their way from the frontend to the device."""
    queue_ms: float = 0.0
    """From complete inputs on the device to the start of the batch."""
    gpu_ms: float = 0.0
    """The batch ran."""
    return_ms: float = 0.0
    """Outputs on their way back to the frontend."""
    total_ms: float = 0.0
    """At the frontend from receipt to answer; in the client's hands from send to receipt."""
    batch_size: int = 0
    """Requests in the batch that it ran in."""
    slice_id: SliceId = SliceId("")
    """Where it ran: `NODE/gpuG/N`."""
    reason: str = ""
    """Why the batch left when it did: full, frontrun, slice_free, …"""
    request_id: str = ""
    """By which `tenuto explain` knows it."""

    def seen_by_client(self, total_ms: float) -> Ledger:
        """The frontend's ledger for one who waited `total_ms` in all: the difference was the network."""
        return msgspec.structs.replace(self, network_ms=max(0.0, total_ms - self.total_ms), total_ms=total_ms)


class Infer(Message, frozen=True, tag=1):
    """Client -> frontend, with input tensors: one request. `budget_ms` None means the model's SLO.

    The budget ends when the client has the answer: `way_ms` of it go by between client and frontend, as far
    as the client has measured, and are not the frontend's to spend. Of requests that cannot all be served those of a lower
    `priority` go first; None means the model's.
    """

    request_no: int
    model_id: ModelId
    budget_ms: float | None = None
    way_ms: float = 0.0
    priority: int | None = None
    spent_ms: float = 0.0
    """Of the budget, before it was sent here: on its way to another frontend that was lost, or on that one."""
    may_have_run: bool = False
    """Another frontend had it, and was lost before it answered."""


class CancelRequest(Message, frozen=True, tag=2):
    """Client -> frontend: forget it; answered by `Refusal(Cancelled)` unless the answer is already out."""

    request_no: int


class Answer(Message, frozen=True, tag=3):
    """Frontend -> client, with output tensors."""

    request_no: int
    ledger: Ledger


class Refusal(Message, frozen=True, tag=4):
    """Frontend -> client: the final answer when there are no outputs.

    `retry_after_ms`: more is asked than can be served; sooner than that the same request is hardly served either.
    """

    request_no: int
    code: str
    reason: str
    retryable: bool
    retry_after_ms: float | None = None


class ModelsAsked(Message, frozen=True, tag=5):
    """Client -> frontend: asks which models there are."""


class ModelsListed(Message, frozen=True, tag=6):
    """Frontend -> client."""

    models: Listed[ModelInfo]


class Ping(Message, frozen=True, tag=7):
    """Anyone -> anyone: asks for a sign of life, answered at once by `Pong` with the same number."""

    number: int


class Pong(Message, frozen=True, tag=8):
    """The answer to `Ping`. A round trip also measures the link's minimum RTT.

    `memory`: who shares memory with the sender may send tensors through it (see `fabric/shared_memory.py`).
    `incarnation`: of a frontend, so that a client sees which of its addresses lead to the same one.
    """

    number: int
    memory: str = ""
    incarnation: Incarnation = Incarnation("")


class Unready(Message, frozen=True, tag=9):
    """Frontend -> its clients: ask another one if you can; in place of a `Pong` too.

    It has no scheduler, or it will end when all it has is answered.
    """

    incarnation: Incarnation = Incarnation("")
