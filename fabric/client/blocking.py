"""The client for threads: the one for asyncio on a background thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from fabric.client.client import Client, InferResult, RunResult
from fabric.client.client_options import ClientOptions
from fabric.client.request_checks import Inputs, limit_ms_of
from fabric.errors import PeerLost
from fabric.messages import ModelInfo
from fabric.sockets.base import naming_descriptors

_JOIN_S: Final = 5.0
_T = TypeVar("_T")


class BlockingClient:
    """The same for threads: an asyncio client on a background thread. May be used from several threads."""

    def __init__(self, address: str | Sequence[str], options: ClientOptions | None = None) -> None:
        self._options = options or ClientOptions()
        self._address = address
        self._client: Client | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        """Nothing is begun on a loop that is told to end."""

    def open(self) -> None:
        """Connect, anew where it was open. Raises PeerLost when nobody answers in time, ConfigError for what is no address."""
        self.close()
        self._client = Client(self._address, self._options)
        with naming_descriptors():
            loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run_loop, args=(loop,), name="tenuto-client", daemon=True)
        self._thread.start()
        self._loop = loop
        try:
            self._call(self._client.open(), self._options.connect_timeout_ms)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give up what is pending and end the thread, within a bounded time. Safe to call twice."""
        with self._lock:
            loop, self._loop = self._loop, None
            if loop is None or self._thread is None or self._client is None:
                return
            loop.call_soon_threadsafe(self._client.close)
            # Two turns of the loop: the first lets waiting tasks see their PeerLost, the second ends it.
            loop.call_soon_threadsafe(lambda: loop.call_later(0.01, loop.stop))
        self._thread.join(_JOIN_S)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def infer(
        self, model: str, inputs: Inputs, budget_ms: float | None = None, priority: int | None = None
    ) -> InferResult:
        """Send one request and wait for its answer. Errors as `Client.infer`."""
        limit_ms = limit_ms_of(budget_ms, self._options)
        return self._call(self._opened().infer(model, inputs, budget_ms, priority), limit_ms)

    def run(
        self, application: str, inputs: Inputs, budget_ms: float | None = None, priority: int | None = None
    ) -> RunResult:
        """Ask an application, all of its graph, and wait for its answer. Errors as `Client.run`."""
        limit_ms = limit_ms_of(budget_ms, self._options)
        return self._call(self._opened().run(application, inputs, budget_ms, priority), limit_ms)

    def submit(
        self, model: str, inputs: Inputs, budget_ms: float | None = None, priority: int | None = None
    ) -> concurrent.futures.Future[InferResult]:
        """Send one request; the future's `cancel()` tells the frontend to forget it."""
        return self._start(self._opened().infer(model, inputs, budget_ms, priority))

    def models(self) -> tuple[ModelInfo, ...]:
        """What the frontend serves."""
        return self._call(self._opened().models(), self._options.connect_timeout_ms)

    def _opened(self) -> Client:
        if self._client is None or self._loop is None:
            raise PeerLost("the client is not open")
        return self._client

    def _start(self, work: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        with self._lock:
            if self._loop is not None:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise PeerLost("the client was closed")

    def _call(self, work: Coroutine[Any, Any, _T], limit_ms: float) -> _T:
        future = self._start(work)
        try:
            return future.result(limit_ms / 1e3 + _JOIN_S)  # the work keeps its own, shorter limit
        except concurrent.futures.CancelledError as error:
            raise PeerLost("the client was closed") from error
        except TimeoutError as error:
            future.cancel()
            raise PeerLost("the client's thread is stuck") from error
        except BaseException:
            future.cancel()
            raise


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    finally:
        loop.close()
