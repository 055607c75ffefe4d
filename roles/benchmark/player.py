"""Sends requests at the moments a plan says, whatever has become of the earlier ones (open loop).

Latency counts from the *intended* send time: a sender that falls behind makes requests look slower, never
faster, and its own lateness is reported beside them.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fabric.client import InferResult
from fabric.clock import Clock
from fabric.errors import DeadlineExceeded, FabricError, PeerLost, RequestError
from fabric.link import Tensor
from roles.runtime.process import wake_exactly

ANSWER_GRACE_MS = 10_000.0  # after the last send, of requests whose deadline is the SDK's own
_DEADLINE_GRACE_MS = 2_000.0  # after a deadline: whoever answers then says that it is over
_HEAR_EVERY = 16  # a sender that is behind still hears its answers after so many sends

_T = TypeVar("_T")


class Submits(Protocol):
    """Where requests go: the SDK's client, or what stands in for it. Its futures fail with a FabricError only."""

    def submit(
        self,
        model: str,
        inputs: Mapping[str, Tensor],
        budget_ms: float | None = None,
        priority: int | None = None,
    ) -> asyncio.Future[InferResult]:
        """Send one request. Raises RequestError or PeerLost where it is refused at once."""
        ...


class HeldFuture(asyncio.Future[InferResult]):
    """Of a request that could not leave at once. `held_ms`: how long the sender itself kept it."""

    held_ms = 0.0


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a plan: `at_ms` from the start of the run."""

    at_ms: float
    model: str
    inputs: Mapping[str, Tensor]
    budget_ms: float | None = None
    priority: int | None = None


@dataclass(slots=True)
class PlayedRequest:
    """What became of it, both times from the intended moment. Exactly one of `result` and `error` is set."""

    planned: PlannedRequest
    late_ms: float
    latency_ms: float
    result: InferResult | None = None
    error: FabricError | None = None


def answer_grace_ms(longest_budget_ms: float) -> float:
    """How long after its last request a run of such budgets may still hear answers."""
    return max(ANSWER_GRACE_MS, longest_budget_ms + _DEADLINE_GRACE_MS)


def run_precisely(work: Coroutine[Any, Any, _T]) -> _T:
    """Run on an asyncio loop that sleeps microseconds: asyncio's epoll only sleeps whole milliseconds."""
    wake_exactly()
    with asyncio.Runner(loop_factory=_precise_loop) as runner:
        return runner.run(work)


async def play(
    client: Submits,
    plan: Iterable[PlannedRequest],
    began_at_ms: float,
    clock: Clock,
    on_done: Callable[[PlayedRequest], None],
    gather_ms: float = 0.0,
) -> None:
    """Play a plan in order of `at_ms`; returns when `on_done` has heard the fate of every request.

    What is not answered within `answer_grace_ms` of the last send has missed its deadline.

    What of a request's budget the sender itself has used up is taken off it. With `gather_ms` requests leave together
    at its multiples, as from a gateway that many clients share; what they waited for that counts as lateness.
    """
    pending: dict[asyncio.Future[InferResult], tuple[PlannedRequest, float]] = {}
    longest_ms = 0.0

    def finish(future: asyncio.Future[InferResult]) -> None:
        if future not in pending:  # it has missed its deadline
            return
        planned, late_ms = pending.pop(future)
        late_ms += _held_ms(future)
        latency_ms = clock.now_ms() - began_at_ms - planned.at_ms
        error = future.exception()
        if error is None:
            on_done(PlayedRequest(planned, late_ms, latency_ms, result=future.result()))
        else:
            assert isinstance(error, FabricError), "the SDK's errors are typed"
            on_done(PlayedRequest(planned, late_ms, latency_ms, error=error))

    for sent, planned in enumerate(plan):
        send_at_ms = math.ceil(planned.at_ms / gather_ms) * gather_ms if gather_ms else planned.at_ms
        ahead_ms = began_at_ms + send_at_ms - clock.now_ms()
        if ahead_ms > 0 or sent % _HEAR_EVERY == 0:
            await asyncio.sleep(max(0.0, ahead_ms) / 1e3)
        late_ms = max(0.0, clock.now_ms() - began_at_ms - planned.at_ms)
        budget_ms = None if planned.budget_ms is None else planned.budget_ms - late_ms
        if budget_ms is not None and budget_ms <= 0:
            spent = DeadlineExceeded("the sender was later than the whole budget")
            on_done(PlayedRequest(planned, late_ms, late_ms, error=spent))
            continue
        try:
            future = client.submit(planned.model, planned.inputs, budget_ms, planned.priority)
        except (RequestError, PeerLost) as error:
            on_done(PlayedRequest(planned, late_ms, late_ms, error=error))
        else:
            pending[future] = planned, late_ms
            longest_ms = max(longest_ms, budget_ms or 0.0)
            future.add_done_callback(finish)
    if pending:
        await asyncio.wait(set(pending), timeout=answer_grace_ms(longest_ms) / 1e3)
    unanswered, now_ms = list(pending.items()), clock.now_ms()
    pending.clear()
    for future, (planned, late_ms) in unanswered:
        silent = DeadlineExceeded("no answer came")
        on_done(
            PlayedRequest(
                planned, late_ms + _held_ms(future), now_ms - began_at_ms - planned.at_ms, error=silent
            )
        )


def _held_ms(future: asyncio.Future[InferResult]) -> float:
    return future.held_ms if isinstance(future, HeldFuture) else 0.0


def _precise_loop() -> asyncio.AbstractEventLoop:
    return asyncio.SelectorEventLoop(selectors.SelectSelector())
