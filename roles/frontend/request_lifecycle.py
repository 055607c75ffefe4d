"""What becomes of one request, from its acceptance to its one final answer: decoded, gathered, announced, granted, given back, refused.

The core says what a message means; the steps, and what follows from each for queues, counts and records, are here. What is to be
done goes to the list that `begin` gave for this event.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from fabric.errors import (
    REQUEST_ERRORS,
    DeadlineExceeded,
    Internal,
    ModelNotFound,
    NoReplica,
    Overloaded,
    RequestError,
    WorkerLost,
)
from fabric.ids import BatchId, ModelId
from fabric.messages import ModelInfo, Refusal, SeqRun, TensorSpec
from roles.frontend.admission import bytes_kept, encoded_image, unheard_reason
from roles.frontend.arrivals import Gatherer
from roles.frontend.estimates import Estimates
from roles.frontend.events import FrontendAction, Preprocess, Release, Reply, Tell
from roles.frontend.graphs.applications import Applications
from roles.frontend.recorder import RequestRecorder
from roles.frontend.requests import Pending, Request, RequestState, RequestTransition
from roles.frontend.shards import ShardLink, Shards


class RequestLifecycle:
    """Of all requests of a frontend, and of those for the stages of its applications."""

    def __init__(
        self,
        shards: Shards,
        pending: Pending,
        applications: Applications,
        estimates: Estimates,
        recorder: RequestRecorder,
        counts: Counter[str],
    ) -> None:
        self._shards = shards
        self._pending = pending
        self._applications = applications
        self._estimates = estimates
        self._recorder = recorder
        self._counts = counts
        self.gatherer = Gatherer()
        """What `announce` will say."""
        self._decoding: dict[int, Request] = {}  # by payload handle
        self._now_ms = 0.0
        self._out: list[FrontendAction] = []

    def begin(self, now_ms: float) -> list[FrontendAction]:
        """Another event: what follows from it goes to this list."""
        self._now_ms = now_ms
        self._out = []
        return self._out

    # ------------------------------------------------------------ until the scheduler knows

    def take_on(self, request: Request, info: ModelInfo, specs: Sequence[TensorSpec]) -> None:
        """A request for a model: its picture is decoded, if it has one, and its scheduler is told."""
        image = encoded_image(info, specs)
        request.size_bytes = bytes_kept(request.size_bytes, image)
        self._pending.add(request)
        if image is not None:
            request.is_ready = False
            self._decoding[request.payload] = request
            self._out.append(Preprocess(request.payload, image))
        self.gather(request)

    def preprocessed(self, payload: int) -> None:
        """Its picture is decoded."""
        request = self._decoding.pop(payload, None)
        if request is None:
            return
        request.is_ready = True
        request.preprocess_ms = self._now_ms - request.asked_at_ms
        self._estimates.note_preprocessed(request)
        if request.drop_reason:
            self.refuse(request, DeadlineExceeded, request.drop_reason)
        elif request.stage is RequestState.DECODING:
            request.step(RequestTransition.DECODED)
            self.gather(request)

    def preprocess_failed(self, payload: int, code: str, reason: str) -> None:
        """Its picture cannot be decoded."""
        request = self._decoding.get(payload)
        if request is not None:
            self.refuse(request, REQUEST_ERRORS.get(code, Internal), reason)

    def gather(self, request: Request) -> None:
        """Announce it when the turn ends."""
        # Unlinked there is nobody to tell: the request waits in `_pending` for the link or its deadline.
        if self._shards.open_to(request.model_id) is not None:
            self.gatherer.add(request)

    def forget_gathered(self, model_ids: Iterable[ModelId]) -> None:
        """Announce nothing of these models: there is nobody to tell."""
        self.gatherer.forget(model_ids)

    def announce(self) -> None:
        """The turn has ended."""
        for shard, arrivals in self.gatherer.announce(
            self._pending, self._estimates, self._shards.open_to, self._now_ms
        ):
            self._counts["runs_announced"] += 1
            self._counts["requests_announced"] += arrivals.count
            self._out.append(Tell(arrivals, shard))

    # ------------------------------------------------------------ those that are spoken of

    def announced(self, model_id: ModelId, runs: Sequence[SeqRun], link: ShardLink) -> list[Request]:
        """Those that wait at that shard: it can speak of no others."""
        return [one for one in self._at(model_id, runs, link) if one.stage is RequestState.ANNOUNCED]

    def queued(self, model_id: ModelId, runs: Sequence[SeqRun], link: ShardLink) -> list[Request]:
        """Those its scheduler decides about: of granted ones it speaks again when their batch was stopped."""
        stages = (RequestState.ANNOUNCED, RequestState.GRANTED)
        return [one for one in self._at(model_id, runs, link) if one.stage in stages]

    def granted(
        self, batch_id: BatchId, model_id: ModelId, runs: Sequence[SeqRun], link: ShardLink | None = None
    ) -> list[Request]:
        """Those whose newest grant is that batch. `link`: of the shard that says so; None: we do."""
        found = self._pending.at(model_id, runs) if link is None else self._at(model_id, runs, link)
        return [one for one in found if one.place is not None and one.place.batch_id == batch_id]

    def _at(self, model_id: ModelId, runs: Sequence[SeqRun], link: ShardLink) -> list[Request]:
        return [one for one in self._pending.at(model_id, runs) if one.shard == link.number]

    # ------------------------------------------------------------ back, or to the end

    def take_back(self, requests: Iterable[Request]) -> list[Request]:
        """What a scheduler does not have, or not any more: it waits to be announced."""
        taken = [one for one in requests if one.stage is RequestState.ANNOUNCED]
        for request in taken:
            self.leave_queue(request)
            request.step(RequestTransition.GIVE_BACK)
        return taken

    def give_back(
        self,
        request: Request,
        error: type[RequestError],
        reason: str,
        *,
        may_have_run: bool = False,
        was_late: bool = False,
    ) -> None:
        """Its grant came to nothing: announce it once more, or refuse it."""
        self.leave_queue(request)
        request.has_lost_worker |= error is WorkerLost
        if may_have_run and not self._is_idempotent(request.model_id):
            self.refuse(request, error, f"{reason}, and its model must not run it twice")
        elif self._shards.of(request.model_id) is None:
            self.refuse_forgotten(request)
        elif request.may_try_again(was_late=was_late):
            self._counts["announced_again"] += 1
            if request.stage is RequestState.GRANTED:
                self._pending.keep_former(request)
            self._pending.leave_slice(request)
            request.step(RequestTransition.GIVE_BACK)
            self.gather(request)
        else:
            self.refuse(request, error, reason)

    def returned(self, request: Request, reason: str) -> None:
        """Its batch did not run, through no fault of its own."""
        self.give_back(request, Overloaded, f"its batch did not run: {reason}", was_late=True)

    def leave_queue(self, request: Request) -> None:
        """Its scheduler does not have it any more."""
        if request.run is not None:
            request.run.note_left()
            request.run = None

    def dropped(self, request: Request, code: str, reason: str, retry_after_ms: float | None) -> None:
        """Its scheduler gave it up."""
        self.leave_queue(request)
        error = REQUEST_ERRORS.get(code, Internal)
        if error is DeadlineExceeded and not request.is_ready:
            request.step(RequestTransition.MISS)
            request.drop_reason = reason
        elif error is DeadlineExceeded and request.has_lost_worker:
            self.refuse(request, WorkerLost, "its worker was lost and the budget did not allow another try")
        else:
            self.refuse(request, error, reason, retry_after_ms)

    def refuse_forgotten(self, request: Request) -> None:
        """Its model was removed; but a shard that does not answer may have it: that is worth another try."""
        unheard = self._shards.unheard
        error = NoReplica if unheard else ModelNotFound
        reason = unheard_reason(unheard) if unheard else f"model {request.asked_name!r} was removed"
        self.refuse(request, error, reason)

    def refuse(
        self,
        request: Request,
        error: type[RequestError],
        reason: str,
        retry_after_ms: float | None = None,
    ) -> None:
        """Its one final answer is an error."""
        self._recorder.refused(request, error.code, reason, self._now_ms)  # while it has its place
        self.finish(request)
        if request.task is not None:
            self._counts["tasks_refused"] += 1
            self._applications.dropped(request.task, error.code, reason, retry_after_ms)
            return
        self._counts["refusals"] += 1
        self._counts[f"refused_{error.code}"] += 1
        refused = refusal(request.number, error, reason, retry_after_ms, may_be_read=request.may_be_read)
        self._out.append(Reply(request.client, refused))

    def finish(self, request: Request) -> None:
        """Its one final answer goes out with this step; the table has none after it."""
        request.step(RequestTransition.ANSWER)
        self._pending.remove(request)
        self._decoding.pop(request.payload, None)
        self._out.append(Release(request.payload, request.may_be_read))
        if request.is_application:
            self._applications.left(request)
        if request.run is not None and self._shards.links[request.shard].is_linked:
            withdraw = request.run.note_dead(request.seq)
            if withdraw is not None:
                self._counts["withdraws"] += 1
                self._out.append(Tell(withdraw, request.shard))

    def _is_idempotent(self, model_id: ModelId) -> bool:
        info = self._shards.models.get(model_id)
        return info is None or info.is_idempotent


def refusal(
    number: int,
    error: type[RequestError],
    reason: str,
    retry_after_ms: float | None,
    *,
    may_be_read: bool = False,
) -> Refusal:
    """The answer to a client's request of that number."""
    return Refusal(number, error.code, reason, error.retryable, retry_after_ms, may_be_read)
