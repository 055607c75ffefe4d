"""Client <-> frontend, with tensors on the same connection; and the sign of life that anyone may ask for."""

from __future__ import annotations

from fabric.ids import Incarnation, ModelId
from fabric.messages.applications import StageLine, StageResult
from fabric.messages.base import Listed, Message
from fabric.messages.models import ModelInfo
from fabric.messages.records import Ledger


class Infer(Message, frozen=True, tag=1):
    """Client -> frontend, with input tensors: one request to a model, or to an application by its name. `budget_ms` None means its SLO.

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
    """Frontend -> client, with output tensors.

    Of an application: a line of each stage, and whose the tensors are; their names are then `STAGE.PLACE.NAME`, such as ``cars.0.1.scores``.
    `may_be_read`: another worker may have its inputs in a batch yet, so where they lie in shared memory nothing else is to lie for a second.
    """

    request_no: int
    ledger: Ledger
    stages: Listed[StageLine] = ()
    results: Listed[StageResult] = ()
    may_be_read: bool = False


class Refusal(Message, frozen=True, tag=4):
    """Frontend -> client: the final answer when there are no outputs.

    `retry_after_ms`: more is asked than can be served, or a slice of the model is on its way; sooner than that the same request is hardly served either.
    `may_be_read`: as `Answer`, by any worker.
    """

    request_no: int
    code: str
    reason: str
    retryable: bool
    retry_after_ms: float | None = None
    may_be_read: bool = False


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
