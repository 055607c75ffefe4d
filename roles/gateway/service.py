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
    InvalidInput,
    ModelNotFound,
    NoReplica,
    PeerLost,
    RequestError,
    TooLarge,
    error_text,
    nothing_ready,
)
from fabric.ids import ModelId
from fabric.messages import Ledger, ModelInfo
from fabric.policy_options import shown
from roles.gateway.failures import Failure, failure_of
from roles.gateway.inference import Inference, Rows
from roles.gateway.statistics import Statistics
from roles.runtime.process import log

REFRESH_S: Final = 1.0
RECONNECT_S: Final = 1.0
_FRESH_MS: Final = 100.0
_WALL: Final = WallClock()
_BY_SHAPES: Final = (InvalidInput.code, TooLarge.code)
"""What a request is refused with whose tensors are not those that its model takes."""


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
        futures: Sequence[asyncio.Future[InferResult]],
        done: Done,
    ) -> None:
        self._service = service
        self._futures = futures
        self._left = len(futures)
        self._done: Done | None = done
        for future in futures:
            future.add_done_callback(self._on_end)

    def cancel(self) -> None:
        """Nobody waits for it any more: the frontends are told."""
        if self._done is not None:
            self._done = None
            self._service.ended(self)
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
        self._service.ended(self)
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

    async def models(self, since_ms: float | None = None) -> Mapping[ModelId, ModelInfo]:
        """As a frontend says now, or has said `since_ms` or later (None: a moment ago). Raises PeerLost.

        However many ask, and however often, a frontend is asked at most once in `_FRESH_MS`, for all that wait by then.
        """
        since_ms = self.clock.now_ms() - _FRESH_MS if since_ms is None else since_ms
        while self._known_at_ms < since_ms:
            if self._listing is None or self._listing.done():
                self._listing = asyncio.ensure_future(self._listed())
                # All who wait for it may have gone: an error that nobody heard of would be taken for a defect.
                self._listing.add_done_callback(_looked_at)
            await asyncio.shield(self._listing)
        return self._known

    async def served(self, since_ms: float | None = None) -> Mapping[ModelId, ModelInfo]:
        """As `models`, and of each model with heads, which clients do not ask and no listing has, one of them by its name."""
        models = await self.models(since_ms)
        return {one.head_of: one for one in models.values() if one.head_of} | dict(models)

    def may_be_outdated(self, info: ModelInfo | None, failure: Failure) -> bool:
        """Whether a request may have been refused for what its model was thought to be: then ask what has `changed`."""
        is_missed = info is None and failure.code != ModelNotFound.code
        return is_missed or failure.code in _BY_SHAPES

    async def changed(self, model: str, info: ModelInfo | None, failure: Failure) -> ModelInfo | None:
        """Of a request that was refused going by `info`: what the model is, where that is something else by now; None: it is not.

        Raises ModelNotFound, whatever else is wrong, of a model that there is not.
        """
        try:
            found = (await self.served(self.clock.now_ms())).get(ModelId(model))
        except PeerLost:  # then nobody knows
            return None
        if found is None:
            raise not_served(model)
        if found.head_of == model:  # the frontend has said by which heads it is asked
            return None
        return found if failure.code in _BY_SHAPES and _shapes(info) != _shapes(found) else None

    async def until_ready(self, model: str, limit_ms: float) -> None:
        """Until a frontend says that a slice serves it. Raises NoReplica where none does by then, PeerLost."""
        limit_at_ms = self.clock.now_ms() + limit_ms
        while True:
            info = (await self.served(self.clock.now_ms())).get(ModelId(model))
            if info is not None and info.replicas:
                return
            if self.clock.now_ms() >= limit_at_ms:
                raise NoReplica(nothing_ready(model), None if info is None else info.coming_in_ms)
            await asyncio.sleep(_FRESH_MS / 1e3)

    async def until_gone(self, model: str, limit_ms: float) -> None:
        """Until a frontend knows of it no more, or the time is over. Raises PeerLost."""
        limit_at_ms = self.clock.now_ms() + limit_ms
        while ModelId(model) in await self.served(self.clock.now_ms()):
            if self.clock.now_ms() >= limit_at_ms:
                return
            await asyncio.sleep(_FRESH_MS / 1e3)

    async def model_now(self, name: str) -> ModelInfo:
        """What clients ask by that name, as a frontend says now. Raises ModelNotFound, PeerLost."""
        models = await self.models()
        info = models.get(ModelId(name))
        if info is not None:
            return info
        heads = ", ".join(one.model_id for one in models.values() if one.head_of == name)
        if heads:
            raise ModelNotFound(f"model {shown(name)} is asked by its heads: {heads:.500}")
        raise not_served(name)

    async def _listed(self) -> Mapping[ModelId, ModelInfo]:
        early_ms = self._known_at_ms + _FRESH_MS - self.clock.now_ms()
        if early_ms > 0:
            await asyncio.sleep(early_ms / 1e3)
        began_at_ms = self.clock.now_ms()
        infos = await self._client.models()
        self._known = {info.model_id: info for info in infos}
        self._known_at_ms = began_at_ms
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
        except (RequestError, PeerLost):
            for future in futures:
                future.cancel()
            raise
        asking = Asking(self, futures, done)
        self._under_way.add(asking)
        return asking

    def ended(self, asking: Asking) -> None:
        """It has outputs, or none, or nobody waits for it."""
        self._under_way.discard(asking)

    def count(self, model: str, asked_at_ms: float, outcome: Sequence[Ledger] | Failure) -> None:
        """One inference has its answer, or its client has gone. `outcome`: the ledgers of its rows, where its answer has outputs."""
        total_ms = self.clock.now_ms() - asked_at_ms
        if isinstance(outcome, Failure):
            is_known = ModelId(model) in self._known
            self.statistics.note_failure(model, outcome.code, total_ms, is_known=is_known)
        else:
            self.statistics.note_success(model, outcome, total_ms, _WALL.now_ms())


def not_served(name: str) -> ModelNotFound:
    """What to raise of a model that no frontend lists."""
    return ModelNotFound(f"no model {shown(name)} is served")


def _shapes(info: ModelInfo | None) -> object:
    return None if info is None else (info.inputs, info.outputs, info.image)


def _looked_at(done: asyncio.Future[Any]) -> None:
    if not done.cancelled():
        done.exception()


def _failure(error: BaseException) -> Failure:
    failure = failure_of(error)
    if not isinstance(error, FabricError):
        log.error("request_failed error=%r", error_text(error))
    return failure
