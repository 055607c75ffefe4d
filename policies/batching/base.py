"""The shape every batching discipline has: request runs in, decisions out, the time passed in.

A discipline owns the queues of request *metadata* and its estimate of when each slice is free. It is a sans-IO
state machine like a core, one level smaller: it knows models, slices and frontends by name only, and never a
message or a socket. The scheduler core (live and simulated alike) translates its decisions into messages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, Protocol

from msgspec import Struct

from fabric.ids import FrontendId, ModelId, SliceId

NEVER_MS = float("inf")


class RequestRun(Struct, gc=False):
    """Requests of one frontend and model that arrived together (design section 4).

    The i-th (from 0) of `count` has deadline `deadline_at_ms + span_ms * i / (count - 1)`: the tightest
    first. Cutting a run keeps the tightest bound for the first piece. `ready_at_ms`: when its inputs are expected to be ready.
    Where that is later than its arrival it waits apart until then, in no queue, and then has arrived at that moment (`preparing.py`).
    Deadlines are already less the return path. A result up to `slack_ms` later may still be of use. Of requests that cannot
    all be served those of a lower `priority` go first; None: the model's.
    """

    frontend_id: FrontendId
    first_seq: int
    count: int
    deadline_at_ms: float
    arrived_at_ms: float
    span_ms: float = 0.0
    ready_at_ms: float = 0.0
    slack_ms: float = 0.0
    priority: int | None = None


class Delay(Struct, frozen=True):
    """delay(b) = control + data per item (Symphony appendix D): from the decision to inputs on the device."""

    control_ms: float = 0.0
    data_ms_per_item: float = 0.0


class BatchModel(Struct, frozen=True):
    """A model to schedule. `priority`: of its requests that name none; a batch of a higher one is served first among equals."""

    model_id: ModelId
    slo_ms: float
    delay: Delay = Delay()
    priority: int = 0


class HostedModel(Struct, frozen=True):
    """A model on a slice: `exec_ms[b - 1]` is l(b) there, for b = 1 … batch_size_max; never falling."""

    model_id: ModelId
    exec_ms: Sequence[float]
    batch_size_target: int | None = None  # the plan's batch hint, for disciplines with a fixed target
    weight: float = 1.0  # the plan's share of the model's rate, for weighted round-robin
    interval_ms: Sequence[float] = ()
    """Of a pipeline: when the next batch can start behind one of b, at index b - 1; empty: when it has ended, after l(b)."""
    may_stop: bool = True
    """Whether a batch that runs may be stopped: the device can, and the model may run its requests again."""


class BatchSlice(Struct, frozen=True):
    """A slice to schedule on. `order` is the rank by which low ids are filled first."""

    slice_id: SliceId
    order: int
    hosted: tuple[HostedModel, ...]
    free_at_ms: float = 0.0


class Dispatch(Struct, frozen=True, gc=False):
    """Run this batch on that slice at `start_at_ms`, at the latest at `latest_at_ms`.

    `waited_ms`: since the discipline first wanted the batch to go, a free slice was missing (forced, not
    chosen). `reason` is a short constant word: full, frontrun, slice_free, eager, timeout, …
    """

    slice_id: SliceId
    model_id: ModelId
    runs: list[RequestRun]
    batch_size: int
    start_at_ms: float
    latest_at_ms: float
    exec_ms: float
    waited_ms: float
    reason: str
    interval_ms: float | None = None
    """After so long its slice can start the next one; None: when this one has ended."""

    @property
    def occupied_ms(self) -> float:
        """How long its slice starts nothing else."""
        return self.exec_ms if self.interval_ms is None else self.interval_ms


class Drop(Struct, frozen=True, gc=False):
    """These will not run. `is_expired`: could no longer finish; else given up to protect a batch, or never taken on.

    `retry_after_ms`: they were not taken on, as more is asked than can be served; from then on they may be.
    """

    model_id: ModelId
    runs: list[RequestRun]
    is_expired: bool
    retry_after_ms: float | None = None


class Preempt(Struct, frozen=True, gc=False):
    """Stop that batch (Shepherd), unless it has ended. Only of a model that `may_stop` there.

    Only the caller knows what is still under way, so it hands the requests back: see `Discipline.arrive_again`.
    """

    dispatch: Dispatch


BatchDecision = Dispatch | Drop | Preempt

QUIET: Final[Sequence[BatchDecision]] = []
"""What `arrive` answers where nothing came of it and `wake_at_ms` is what it was. Known by its identity; stays empty."""


class Discipline(Protocol):
    """When to run which requests where. Calls pass a `now_ms` that never goes backwards."""

    def add_model(self, model: BatchModel, now_ms: float) -> None:
        """Start scheduling a model; again with the same id: change its SLO, delay or priority."""
        ...

    def remove_model(self, model_id: ModelId, now_ms: float) -> Sequence[BatchDecision]:
        """Forget a model; what it had queued comes back as `Drop`s of it. What runs is not touched."""
        ...

    def add_slice(self, slice_: BatchSlice, now_ms: float) -> Sequence[BatchDecision]:
        """A slice can be used from its `free_at_ms`; the same id again replaces it."""
        ...

    def remove_slices(self, slice_ids: Collection[SliceId], now_ms: float) -> Sequence[BatchDecision]:
        """Use them no more, from before the first decision on. Their running batches are the caller's business."""
        ...

    def arrive(self, model_id: ModelId, run: RequestRun, now_ms: float) -> Sequence[BatchDecision]:
        """A run of requests of a known model wants to be served. Nearly always that is `QUIET` business."""
        ...

    def arrive_again(
        self, model_id: ModelId, runs: Sequence[RequestRun], now_ms: float
    ) -> Sequence[BatchDecision]:
        """What a `Preempt` stopped, or a `Dispatch` for which the slice had no place left, waits again.

        All of a batch at once, after the decisions that came with it. It was taken on before, so none of it is refused.
        """
        ...

    def withdraw(
        self, model_id: ModelId, frontend_id: FrontendId, spans: Sequence[tuple[int, int]], now_ms: float
    ) -> None:
        """Forget these (first seq and count of each span) if they are still queued; silently nothing if they are not.

        It costs a look at every run that is queued, however many spans there are.
        """
        ...

    def forget_frontend(self, frontend_id: FrontendId, now_ms: float) -> Mapping[ModelId, int]:
        """Forget all that a frontend has queued; how many requests of each model that was."""
        ...

    def slice_free(self, slice_id: SliceId, free_at_ms: float, now_ms: float) -> Sequence[BatchDecision]:
        """Correct the estimate: the slice is (or will be) free at that moment (a `Done` came, or a delay).

        Infinite: nobody knows. It has as many batches as it may; or, if it should be free by now, it is late.
        """
        ...

    def set_guard_ms(self, guard_ms: float) -> None:
        """How much earlier than its moment a batch must be sent off: the measured p99 dispatch lateness."""
        ...

    def tick(self, now_ms: float) -> Sequence[BatchDecision]:
        """Do what is due by now."""
        ...

    @property
    def wake_at_ms(self) -> float | None:
        """The next moment worth a tick; None: nothing is pending."""
        ...

    def queued(self, model_id: ModelId) -> int:
        """How many requests of the model are waiting."""
        ...
