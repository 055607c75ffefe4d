"""The client for threads: the one for asyncio on a background thread."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import threading
import weakref
from collections.abc import Coroutine, Sequence
from functools import cache
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from fabric.client.client import Client, InferResult, RunResult
from fabric.client.client_options import ClientOptions
from fabric.client.request_checks import Inputs, limit_ms_of
from fabric.errors import PeerLost, WrongThread
from fabric.messages import ModelInfo
from fabric.sockets.base import context, naming_descriptors

_JOIN_S: Final = 5.0
_T = TypeVar("_T")


class _Session:
    """A client, and the thread on which its loop runs."""

    def __init__(self, client: Client) -> None:
        with naming_descriptors():
            self.loop = asyncio.new_event_loop()
        self.client = client
        self.thread = threading.Thread(target=_run_loop, args=(self,), name="tenuto-client", daemon=True)
        self.thread.start()
        _SESSIONS.add(self)

    @property
    def is_on_its_thread(self) -> bool:
        """Whether the caller is: a callback of one of its futures. What waits for the loop there would wait for itself."""
        return threading.current_thread() is self.thread

    def end(self) -> None:
        """Give up what is pending and end the thread, within a bounded time: at once where it is this one, when it goes on."""
        self.begin_end()
        if not self.is_on_its_thread:
            self.thread.join(_JOIN_S)

    def begin_end(self) -> None:
        """The same, without waiting for the thread."""
        self.loop.call_soon_threadsafe(self.client.close)
        # Two turns of the loop: the first lets waiting tasks see their PeerLost, the second ends it.
        self.loop.call_soon_threadsafe(lambda: self.loop.call_later(0.01, self.loop.stop))


class BlockingClient:
    """The same for threads: an asyncio client on a background thread. May be used from several threads.

    A forked process has no such thread: there everything raises PeerLost until the client is opened anew, and the parent's
    goes on. Callbacks of futures that `submit` gave run on that thread: they may `submit` and `close`, but what waits for an answer
    raises WrongThread.
    """

    def __init__(self, address: str | Sequence[str], options: ClientOptions | None = None) -> None:
        self._options = options or ClientOptions()
        self._address = address
        self._session: _Session | None = None
        self._lock = threading.Lock()
        """Nothing is begun on a loop that is told to end."""
        self._is_parents = False  # it was open when this process was forked
        _CLIENTS.add(self)

    def open(self) -> None:
        """Connect, anew where it was open. Raises PeerLost when nobody answers in time, ConfigError for what is no address."""
        self._check_thread()
        self.close()
        client = Client(self._address, self._options)
        _end_at_exit()
        session = _Session(client)
        self._replace(session)
        try:
            self._call(session, session.client.open(), self._options.connect_timeout_ms)
        except BaseException:
            self._replace(None, only=session)
            raise

    def close(self) -> None:
        """Give up what is pending and end the thread, within a bounded time. Safe to call twice, and from callbacks."""
        self._replace(None)

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
        session = self._waitable()
        return self._call(session, session.client.infer(model, inputs, budget_ms, priority), limit_ms)

    def run(
        self, application: str, inputs: Inputs, budget_ms: float | None = None, priority: int | None = None
    ) -> RunResult:
        """Ask an application, all of its graph, and wait for its answer. Errors as `Client.run`."""
        limit_ms = limit_ms_of(budget_ms, self._options)
        session = self._waitable()
        return self._call(session, session.client.run(application, inputs, budget_ms, priority), limit_ms)

    def submit(
        self, model: str, inputs: Inputs, budget_ms: float | None = None, priority: int | None = None
    ) -> concurrent.futures.Future[InferResult]:
        """Send one request; the future's `cancel()` tells the frontend to forget it."""
        session = self._opened()
        return self._start(session, session.client.infer(model, inputs, budget_ms, priority))

    def models(self) -> tuple[ModelInfo, ...]:
        """What the frontend serves."""
        session = self._waitable()
        return self._call(session, session.client.models(), self._options.connect_timeout_ms)

    def _opened(self) -> _Session:
        session = self._session
        if session is None:
            raise PeerLost(
                "this process was forked from the one that opened the client: open it here too, or one of its own"
                if self._is_parents
                else "the client is not open"
            )
        return session

    def _waitable(self) -> _Session:
        """For what waits for an answer."""
        self._check_thread()
        return self._opened()

    def _check_thread(self) -> None:
        session = self._session
        if session is not None and session.is_on_its_thread:
            raise WrongThread(
                "this is the client's own thread, which runs the callbacks of its futures: an answer that is waited for here"
                " cannot come; use `submit`, or another thread"
            )

    def _replace(self, session: _Session | None, only: _Session | None = None) -> None:
        """End the session there is, or only that one, and have this one."""
        former = self._exchange(session, only)
        if former is not None:
            former.end()

    def _exchange(self, session: _Session | None = None, only: _Session | None = None) -> _Session | None:
        """Which one there was, and whose end is the caller's business: nothing is begun on it any more."""
        with self._lock:
            former = self._session
            if only is not None and former is not only:
                return None  # another thread has ended it
            self._session, self._is_parents = session, False
        return former

    def _leave_to_parent(self) -> None:
        """This process was just forked: it has this thread only, and none to answer what is asked."""
        self._lock = threading.Lock()
        if self._session is not None:
            self._session, self._is_parents = None, True

    def _start(self, session: _Session, work: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        with self._lock:
            if self._session is session:
                return asyncio.run_coroutine_threadsafe(work, session.loop)
        work.close()
        raise PeerLost("the client was closed")

    def _call(self, session: _Session, work: Coroutine[Any, Any, _T], limit_ms: float) -> _T:
        future = self._start(session, work)
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


def _run_loop(session: _Session) -> None:
    loop = session.loop
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        session.client.close()  # again: an opening may have ended since
    finally:
        _SESSIONS.discard(session)
        loop.close()


_CLIENTS: Final[weakref.WeakSet[BlockingClient]] = weakref.WeakSet()
_SESSIONS: Final[set[_Session]] = set()  # whose threads run: also of clients that nobody has any more
_INHERITED: Final[list[_Session]] = []  # kept, so that nothing of a parent's is ended in its fork


@cache
def _end_at_exit() -> None:
    """Before the context of their sockets is ended, which closes them under the threads that use them."""
    context()  # what is registered last is called first
    atexit.register(_end_all)


def _end_all() -> None:
    for client in list(_CLIENTS):
        client._exchange()  # noqa: SLF001  the class is this file's
    sessions = list(_SESSIONS)
    for session in sessions:
        with contextlib.suppress(RuntimeError):  # its loop has ended meanwhile
            session.begin_end()
    for session in sessions:
        session.thread.join(_JOIN_S)


def _leave_to_parent() -> None:
    for client in list(_CLIENTS):
        client._leave_to_parent()  # noqa: SLF001  the class is this file's
    _INHERITED.extend(_SESSIONS)
    _SESSIONS.clear()
    _end_at_exit.cache_clear()


os.register_at_fork(after_in_child=_leave_to_parent)
