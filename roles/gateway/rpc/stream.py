"""One stream of inferences: every request is answered when it is done, in whatever order that is; its `id` says which it was."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, Final

from fabric.clock import Clock
from fabric.errors import PeerLost
from roles.gateway.failures import Failure, TooSlow, failure_of
from roles.gateway.http.limits import BodyBudget, HttpLimits
from roles.gateway.rpc.ends import failure_of_call, told
from roles.gateway.rpc.held import Held

STREAM_MAX: Final = 64
"""Inferences that one stream has under way, or whose answers its client has not taken; one more is read, and waits for room."""

Answering = Callable[[Held, float, Failure | None], Awaitable[tuple[Any, int]]]
"""With a request, when it was read, and why it is refused, if it is: the message that answers it, and the bytes of the budget that it has taken."""


class InferStream:
    """Of one call. `failure`: what it is to end with once there are no more answers. Belongs to the running loop."""

    def __init__(
        self,
        requests: AsyncIterator[Held],
        answering: Answering,
        clock: Clock,
        silent_ms_max: float,
        budget: BodyBudget,
    ) -> None:
        self.failure: Failure | None = None
        self._requests = requests
        self._answering = answering
        self._clock = clock
        self._silent_ms_max = silent_ms_max
        self._moved_at_ms = clock.now_ms()
        self._budget = budget
        self._answers: asyncio.Queue[tuple[Any, int] | None] = asyncio.Queue()
        """That are not sent, and how many bytes of the budget each has until it is; None: there are no more."""
        self._room = asyncio.Semaphore(STREAM_MAX)
        self._working: set[asyncio.Task[None]] = set()
        self._unanswered = 0
        """Requests that were read, and whose answers are not sent."""
        self._is_whole = self._is_draining = False
        self._reading: asyncio.Task[None] | None = None
        self._looking: asyncio.TimerHandle | None = None

    async def answers(self) -> AsyncGenerator[Any, None]:
        """As they come, until the client has ended its side and has all of them, or until `failure` is there."""
        self._reading = reading = asyncio.ensure_future(self._read())
        reading.add_done_callback(self._over)
        self._look()
        self._end_if_drained()
        try:
            while (finished := await self._answers.get()) is not None:
                answer, size = finished
                unread = self._unread_timer(size)
                try:
                    yield answer
                finally:
                    unread.cancel()
                    self._budget.give_back(size)
                self._moved_at_ms = self._clock.now_ms()
                self._unanswered -= 1
                self._room.release()  # not before it is sent: who does not read is not read from
                self._end_if_drained()
            if not reading.cancelled():
                await reading
        finally:
            if self._looking is not None:
                self._looking.cancel()
            reading.cancel()
            self._reading = None  # with it goes a request that it waited with for room
            self._drop()

    def drain(self) -> None:
        """Answer what was asked, refuse what is read from now on, and end when nothing is left."""
        self._is_draining = True
        self._end_if_drained()

    async def _read(self) -> None:
        async for held in self._requests:
            read_at_ms = self._moved_at_ms = self._clock.now_ms()
            is_late = self._is_draining
            self._unanswered += 1
            await self._room.acquire()
            task = asyncio.ensure_future(self._work(held, read_at_ms, is_late=is_late))
            del held  # a stream that waits for its next request holds none
            self._working.add(task)
            task.add_done_callback(self._working.discard)
        self._is_whole = True
        await asyncio.gather(*self._working)

    async def _work(self, held: Held, read_at_ms: float, *, is_late: bool) -> None:
        try:
            answer, size = await self._answering(held, read_at_ms, _ending() if is_late else None)
        except Exception as error:  # noqa: BLE001  every request is answered
            answer, size = told(held, failure_of_call(error)), 0
        self._answers.put_nowait((answer, size))

    def _over(self, reading: asyncio.Task[None]) -> None:
        if not reading.cancelled():
            reading.exception()  # looked at, also where nobody reads the stream to its end
        self._answers.put_nowait(None)

    def _look(self) -> None:
        limit_ms = self._silent_ms_max
        left_ms = limit_ms if self._unanswered else self._moved_at_ms + limit_ms - self._clock.now_ms()
        if left_ms > 0:
            self._looking = asyncio.get_running_loop().call_later(left_ms / 1e3, self._look)
        else:
            silent = f"nothing was asked on this stream for {limit_ms / 1e3:g} s: open another one"
            self._end(failure_of(TooSlow(silent)))

    def _unread_timer(self, size: int) -> asyncio.TimerHandle:
        """Unless it is cancelled while the client may still take an answer of that size, it drops what is under way and not sent.

        The call ends when its client reads on: gRPC ends none while an answer is on its way, so that one answer is held until then.
        """
        limit_s = HttpLimits().answer_limit_ms(size) / 1e3

        def end() -> None:
            self.failure = failure_of(TooSlow(f"an answer on this stream was not read for {limit_s:.0f} s"))
            self._end(self.failure)
            self._drop()
            self._answers.put_nowait(None)

        return asyncio.get_running_loop().call_later(limit_s, end)

    def _drop(self) -> None:
        """What is under way, and what is not sent."""
        for task in self._working:
            task.cancel()
        while not self._answers.empty():
            finished = self._answers.get_nowait()
            self._budget.give_back(0 if finished is None else finished[1])

    def _end_if_drained(self) -> None:
        if self._is_draining and not self._unanswered and not self._is_whole:
            self._end(_ending())

    def _end(self, failure: Failure) -> None:
        if self._reading is not None and not self._reading.done():
            self.failure = failure
            self._reading.cancel()


def _ending() -> Failure:
    return failure_of(PeerLost("the gateway ends: open another stream"))
