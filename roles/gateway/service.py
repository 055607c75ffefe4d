"""The gateway's end of the SDK: which models there are, inferences submitted, and whether it is ready.

HTTP and gRPC both ask here. One inference is one or more requests of the SDK (`inference.py`), and has one end: the outputs of all of
them, or the first failure, which cancels the others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fabric.client import Client, InferResult
from fabric.clock import Clock, WallClock
from fabric.errors import (
    Cancelled,
    DeadlineExceeded,
    FabricError,
    ModelNotFound,
    PeerLost,
    RequestError,
    error_text,
)
from fabric.ids import ModelId
from fabric.messages import ModelInfo
from fabric.policy_options import shown
from roles.gateway.failures import Failure, failure_of
from roles.gateway.inference import Inference, Rows
from roles.gateway.statistics import Statistics
from roles.runtime.process import log

REFRESH_S: Final = 1.0
RECONNECT_S: Final = 1.0
_FRESH_MS: Final = 100.0
_WALL: Final = WallClock()


@dataclass(slots=True, frozen=True)
class Answered:
    """Outputs of all rows."""

    results: Sequence[InferResult]


Outcome = Answered | Failure
Done = Callable[[Outcome], None]


class Asking:
    """One inference under way. `done` is called once, unless it is cancelled before."""

    def __init__(
        self,
        service: Service,
        inference: Inference,
        futures: Sequence[asyncio.Future[InferResult]],
        done: Done,
    ) -> None:
        self._service = service
        self._model = inference.model
        self._futures = futures
        self._left = len(futures)
        self._done: Done | None = done
        self._began_at_ms = service.clock.now_ms()
        for future in futures:
            future.add_done_callback(self._on_end)

    def cancel(self) -> None:
        """Nobody waits for it any more: the frontends are told."""
        if self._done is not None:
            self._done = None
            self._service.ended(self, self._model, self._began_at_ms, None)
            self._cancel_rest()

    def _on_end(self, future: asyncio.Future[InferResult]) -> None:
        if self._done is None:
            if not future.cancelled():
                future.exception()  # looked at: it is of no interest
            return
        error = None if future.cancelled() else future.exception()
        self._left -= 1
        if error is None and not future.cancelled() and self._left:
            return
        done, self._done = self._done, None
        outcome: Outcome
        if future.cancelled():
            outcome = Failure(Cancelled.code, "it was cancelled")
        elif error is not None:
            outcome = _failure(error)
        else:
            outcome = Answered([one.result() for one in self._futures])
        self._cancel_rest()
        self._service.ended(self, self._model, self._began_at_ms, outcome)
        done(outcome)

    def _cancel_rest(self) -> None:
        for future in self._futures:
            future.cancel()


class Service:
    """What the gateway's doors ask. Belongs to the running loop."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self.clock = clock
        self.statistics = Statistics()
        self.is_draining = False
        self._client = client
        self._under_way: set[Asking] = set()
        self._known: Mapping[ModelId, ModelInfo] = {}
        self._known_at_ms = -1e18
        self._listing: asyncio.Task[Mapping[ModelId, ModelInfo]] | None = None

    # ------------------------------------------------------------ models

    def model(self, name: str) -> ModelInfo | None:
        """As it was known a second ago; None: not known, which only a frontend can say for sure."""
        return self._known.get(ModelId(name))

    async def models(self) -> Mapping[ModelId, ModelInfo]:
        """As a frontend says now. Raises PeerLost."""
        if self.clock.now_ms() - self._known_at_ms < _FRESH_MS:
            return self._known
        if self._listing is None or self._listing.done():
            self._listing = asyncio.ensure_future(self._listed())
            # All who wait for it may have gone: an error that nobody heard of would be taken for a defect.
            self._listing.add_done_callback(_looked_at)
        return await asyncio.shield(self._listing)

    async def model_now(self, name: str) -> ModelInfo:
        """As a frontend says now. Raises ModelNotFound, PeerLost."""
        info = (await self.models()).get(ModelId(name))
        if info is None:
            raise ModelNotFound(f"no model {shown(name)} is served")
        return info

    async def _listed(self) -> Mapping[ModelId, ModelInfo]:
        infos = await self._client.models()
        self._known = {info.model_id: info for info in infos}
        self._known_at_ms = self.clock.now_ms()
        return self._known

    async def keep_connected(self) -> None:
        """Connect, again and again until a frontend answers, and know the models from then on. Ends when it is cancelled."""
        is_told = False
        while True:
            try:
                await self._client.open()
                break
            except FabricError as error:
                if not is_told:
                    log.warning("no_frontend reason=%r", str(error))
                    is_told = True
            await asyncio.sleep(RECONNECT_S)
        while True:
            with contextlib.suppress(FabricError):  # not ready then, and it is asked again
                await self.models()
            await asyncio.sleep(REFRESH_S)

    def close(self) -> None:
        """Give up what is under way, and the connections."""
        if self._listing is not None:
            self._listing.cancel()
        self._client.close()

    # ------------------------------------------------------------ readiness

    @property
    def is_ready(self) -> bool:
        """Whether requests are welcome: a frontend is there that wants them, and the end has not begun."""
        return self._client.is_ready and not self.is_draining

    @property
    def under_way(self) -> int:
        """Inferences without an answer."""
        return len(self._under_way)

    def is_model_ready(self, info: ModelInfo) -> bool:
        """Whether a slice serves it."""
        return self.is_ready and info.replicas > 0

    # ------------------------------------------------------------ inferences

    def budget_left_ms(self, inference: Inference, began_at_ms: float) -> float | None:
        """Of its deadline, or its model's SLO, which count from its first byte on; None: only a frontend knows it."""
        budget_ms = inference.budget_ms
        if budget_ms is None:
            info = self.model(inference.model)
            if info is None:
                return None
            budget_ms = info.slo_ms
        return max(0.0, budget_ms - (self.clock.now_ms() - began_at_ms))

    def submit(self, inference: Inference, rows: Rows, budget_ms: float | None, done: Done) -> Asking:
        """Ask the frontends. Raises RequestError or PeerLost for what can be told at once; then `done` is not called."""
        futures: list[asyncio.Future[InferResult]] = []
        try:
            if budget_ms is not None and budget_ms <= 0:
                raise DeadlineExceeded("the budget was spent before the request was here")
            for row in rows.rows:
                future = self._client.submit(inference.model, row, budget_ms, inference.priority)
                futures.append(future)
        except (RequestError, PeerLost) as error:
            for future in futures:
                future.cancel()
            self.failed(inference.model, _failure(error), 0.0)
            raise
        asking = Asking(self, inference, futures, done)
        self._under_way.add(asking)
        return asking

    def ended(self, asking: Asking, model: str, began_at_ms: float, outcome: Outcome | None) -> None:
        """Count it. `outcome` None: it was cancelled."""
        self._under_way.discard(asking)
        total_ms = self.clock.now_ms() - began_at_ms
        match outcome:
            case Answered(results):
                ledgers = [result.ledger for result in results]
                self.statistics.note_success(model, ledgers, total_ms, _WALL.now_ms())
            case Failure():
                self.failed(model, outcome, total_ms)
            case None:
                self.failed(model, Failure(Cancelled.code, "the client has gone"), total_ms)

    def failed(self, model: str, failure: Failure, total_ms: float) -> None:
        """Count one that has no outputs."""
        is_known = ModelId(model) in self._known
        self.statistics.note_failure(model, failure.code, total_ms, is_known=is_known)


def _looked_at(done: asyncio.Future[Any]) -> None:
    if not done.cancelled():
        done.exception()


def _failure(error: BaseException) -> Failure:
    failure = failure_of(error)
    if not isinstance(error, FabricError):
        log.error("request_failed error=%r", error_text(error))
    return failure
