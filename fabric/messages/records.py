"""Where a request's time went; and what frontends and the scheduler remember of the last minute: asked by an operator, for `tenuto explain`, `why` and `trace`."""

from __future__ import annotations

import msgspec

from fabric.ids import BatchId, ModelId, SliceId
from fabric.messages.base import Listed, Message, Value


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


class RecordsAsked(Message, frozen=True, tag=80):
    """Operator -> frontend or scheduler: what it remembers of a model (empty: of all).

    `before`: only records with lower numbers, newest first, as many as an answer holds; `after`: only those with higher ones.
    `request_id`: that request only. `bad_only`: of a frontend's, only those of requests that were late or refused.
    """

    model_id: ModelId
    before: int
    request_id: str = ""
    bad_only: bool = False
    after: int = 0


class RequestRecord(Value, frozen=True):
    """A request that has had its answer `ended_ago_ms` ago.

    `outcome`: good | late | abandoned, or the code of its refusal with its `reason`. `ledger`: of a refused one only what is
    known: the slice of its last grant, and how long it was queued in `waited_ms`. `budget_ms`: what it had at the frontend. `tries`: grants that came to nothing.
    """

    number: int
    request_id: str
    model_id: ModelId
    outcome: str
    reason: str
    ended_ago_ms: float
    budget_ms: float
    ledger: Ledger
    batch_id: BatchId
    tries: int = 0


class RequestsRemembered(Message, frozen=True, tag=81):
    """Frontend -> operator. `arrivals`: of the model that was asked for, how many came in each `bin_ms` of the last minute, the last bin is of now.

    `bad`: how many of it were late or refused in that minute, through no fault of their client's. `newest_bin`: the number of the last bin,
    counted from the zero of the frontend's clock, so that what is asked later can be joined to it. `unserved`: how many of the bad ones found no
    slice, or lost theirs (NoReplica, WorkerLost). `bad_by_second`, `unserved_by_second`: the same of each second of that clock, the last is of now.
    """

    requests: Listed[RequestRecord]
    arrivals: Listed[int] = ()
    bin_ms: float = 0.0
    bad: int = 0
    newest_bin: int = 0
    unserved: int = 0
    bad_by_second: Listed[int] = ()
    unserved_by_second: Listed[int] = ()


class FiguresAsked(Message, frozen=True, tag=84):
    """Operator -> frontend: how models fare now. `after`: those whose names come after it, as many as an answer holds."""

    after: ModelId


class ModelFigures(Value, frozen=True):
    """What became of a model's requests in the last `window_ms`: `asked` came, `good` and `late` ones were answered.

    `refused`: the others by code. `answered`: how many of the answered ones took up to each of `bounds_ms`, and more than the last.
    `stage_asked`, `stage_good`: of `asked` and `good` those that stages of applications asked, and no client.
    """

    model_id: ModelId
    slo_ms: float
    window_ms: float
    asked: int
    good: int
    late: int
    refused: dict[str, float]
    bounds_ms: Listed[float]
    answered: Listed[int]
    stage_asked: int = 0
    stage_good: int = 0


class FiguresListed(Message, frozen=True, tag=85):
    """Frontend -> operator. `has_more`: ask again, with `after` the last name of these."""

    models: Listed[ModelFigures]
    has_more: bool = False


class BatchEntry(Value, frozen=True):
    """A batch that ended `ended_ago_ms` ago, as the scheduler saw it.

    It was sent `sent_ago_ms` ago. `planned_ms` is l(b) as the scheduler had corrected it, `table_ms` as the worker's table says.
    Times of the run are the worker's. `reason`: why it left then.
    """

    number: int
    batch_id: BatchId
    model_id: ModelId
    slice_id: SliceId
    batch_size: int
    status: str
    reason: str
    sent_ago_ms: float
    ended_ago_ms: float
    planned_ms: float
    table_ms: float
    exec_ms: float
    transfer_ms: float
    queue_ms: float
    waited_ms: float


class SliceAbsence(Value, frozen=True):
    """A slice that had been ready took no batches from `began_ago_ms` to `ended_ago_ms` ago (None: it does not yet), and why.

    `models`: what it should have hosted, as it may not exist any more.
    """

    slice_id: SliceId
    reason: str
    began_ago_ms: float
    ended_ago_ms: float | None = None
    models: Listed[ModelId] = ()


class BatchesRemembered(Message, frozen=True, tag=82):
    """Scheduler -> operator. `document`: with the newest batches also the plan, as JSON, to play it in a simulator.

    `after`: as it was asked; who asked for what is new has the plan already. `absences`: with the newest batches also when slices were away.
    """

    batches: Listed[BatchEntry]
    document: str = ""
    after: int = 0
    absences: Listed[SliceAbsence] = ()
