"""Frontend <-> scheduler; workers get the directory too."""

from __future__ import annotations

from fabric.ids import BatchId, FrontendId, Incarnation, ModelId, NodeId, SliceId
from fabric.messages.base import Addresses, Listed, Message, Runs, Value
from fabric.messages.models import ModelInfo


class SliceInfo(Value, frozen=True):
    """Where a ready slice takes its inputs; `addresses` are tried in order (ipc first, for the same host)."""

    slice_id: SliceId
    incarnation: Incarnation
    node_id: NodeId
    addresses: Addresses


class FrontendInfo(Value, frozen=True):
    """Where a frontend takes outputs."""

    frontend_id: FrontendId
    incarnation: Incarnation
    addresses: Addresses


class FrontendHello(Message, frozen=True, tag=10):
    """Frontend -> scheduler: first message, and again after a reconnect, or in doubt whether it is still listed.

    `is_linked`: it was listed when it last heard. A scheduler that does not list it sends it a directory without it first, so
    that it announces again what is queued.
    """

    frontend_id: FrontendId
    incarnation: Incarnation
    addresses: Addresses
    is_linked: bool = False


class Directory(Message, frozen=True, tag=11):
    """Scheduler -> frontends and workers: everything that exists now. A slice not listed is gone."""

    version: int
    models: Listed[ModelInfo]
    slices: Listed[SliceInfo]
    frontends: Listed[FrontendInfo]


class Arrivals(Message, frozen=True, tag=12):
    """Frontend -> scheduler: a run of requests for one model wants places in batches.

    Budgets never fall along a run: `budget_ms` is the tightest, `span_ms` (at most 1) the spread to the
    loosest. `ready_in_ms` covers preprocessing. `slack_ms`: was kept back for what cannot be known, so that a result
    up to so much later may still be of use. `priority` is that of all of them; None means the model's.
    """

    model_id: ModelId
    first_seq: int
    count: int
    budget_ms: float
    span_ms: float = 0.0
    ready_in_ms: float = 0.0
    slack_ms: float = 0.0
    priority: int | None = None


class Withdraw(Message, frozen=True, tag=13):
    """Frontend -> scheduler: these are dead (cancelled or expired); sent when half a run is."""

    model_id: ModelId
    runs: Runs


class Left(Message, frozen=True, tag=17):
    """Frontend -> scheduler: no more requests of this model come from here, another shard serves it; `is_back`: they do again."""

    model_id: ModelId
    is_back: bool = False


class Grant(Message, frozen=True, tag=14):
    """Scheduler -> frontend: push the inputs of `runs` to that slice as part `part` of the batch.

    `waited_ms` is what the batch waited although the discipline wanted to go (no slice was free).
    """

    batch_id: BatchId
    slice_id: SliceId
    incarnation: Incarnation
    model_id: ModelId
    part: int
    runs: Runs
    batch_size: int
    start_in_ms: float
    waited_ms: float
    reason: str


class Dropped(Message, frozen=True, tag=15):
    """Scheduler -> frontend: these will not run. `code` is a request error's wire code; `retry_after_ms` as in `Refusal`."""

    model_id: ModelId
    runs: Runs
    code: str
    reason: str
    retry_after_ms: float | None = None


class Returned(Message, frozen=True, tag=16):
    """Scheduler -> frontend: granted, but not run, through no fault of theirs. Announce again if budgets allow."""

    batch_id: BatchId
    model_id: ModelId
    runs: Runs
    reason: str
