"""`Content-Encoding` and `Accept-Encoding`: gzip and deflate. A small body may become a large one, so sizes are watched."""

from __future__ import annotations

import asyncio
import re
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

from fabric.errors import InvalidInput, TooLarge
from fabric.policy_options import shown
from roles.gateway.failures import Unsupported
from roles.gateway.http.limits import BodyBudget
from roles.gateway.http.messages import Cancellable, Reply

_WINDOW: Final = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
ENCODED_FROM_BYTES: Final = 512
"""Less is not worth it."""
_NO: Final = re.compile(r"q=0(\.0*)?")
"""The weight of what is not wanted (RFC 9110, 12.4.2)."""
_LEVEL: Final = 1  # tensors hardly get smaller at higher ones, and take five times as long
_THREADS: Final = 4
_PIECE_BYTES: Final = 1 << 20
"""Compressed at a time: some 20 ms, by which the process's end may wait for it."""


class Decoder:
    """Takes a body apart as it comes. `bytes_max`: of what comes out."""

    def __init__(self, encoding: str, bytes_max: int) -> None:
        window = _WINDOW.get(encoding)
        if window is None:
            raise Unsupported(
                f"Content-Encoding {shown(encoding)} cannot be read; there are gzip and deflate"
            )
        self._stream = zlib.decompressobj(window)
        self._left = bytes_max

    def feed(self, data: bytes) -> bytes:
        """What it becomes. Raises InvalidInput where it is no such stream, TooLarge where it becomes too much."""
        if self._stream.eof:
            raise InvalidInput("bytes follow the end of the compressed body")
        try:
            found = self._stream.decompress(data, self._left + 1)
        except zlib.error as error:
            raise InvalidInput(f"the compressed body: {error}") from error
        self._left -= len(found)
        if self._left < 0:
            raise TooLarge("the body is too large once it is decompressed")
        if self._stream.unused_data:
            raise InvalidInput("bytes follow the end of the compressed body")
        return found

    def end(self) -> None:
        """Raises InvalidInput where the stream is not over."""
        if not self._stream.eof:
            raise InvalidInput("the compressed body ends too early")


class Compressor:
    """Compresses answers on threads of its own. Each has its bytes of the budget for as long as it waits for a thread and has one.

    Where there is no room, one at a time of no more than a piece is compressed all the same, and may be small enough then to need none:
    so the page of metrics is told also then.
    """

    def __init__(self, budget: BodyBudget) -> None:
        self._budgets = (budget, BodyBudget(_PIECE_BYTES))
        self._threads = ThreadPoolExecutor(_THREADS, "compressing")
        self._is_over = threading.Event()

    def start(self, reply: Reply, encoding: str, done: Callable[[Reply], None]) -> Cancellable | None:
        """`done` hears the answer, compressed, on the running loop, unless it is cancelled before. None: there is no room for it."""
        size_bytes = reply.size_bytes
        budget = next((one for one in self._budgets if one.take(size_bytes)), None)
        if budget is None:
            return None
        loop = asyncio.get_running_loop()
        ended = partial(self._ended, budget, size_bytes, done)

        def tell(work: Future[Reply | None]) -> None:
            with suppress(RuntimeError):  # the loop is closed: the gateway has ended
                loop.call_soon_threadsafe(ended, work)

        job = _Job(reply, encoding, self._is_over)
        job.begin(self._threads).add_done_callback(tell)
        return job

    def close(self) -> None:
        """Give up all: those that have a thread after the piece that they are at, for the process ends when its threads have."""
        self._is_over.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _ended(
        self, budget: BodyBudget, size_bytes: int, done: Callable[[Reply], None], work: Future[Reply | None]
    ) -> None:
        budget.give_back(size_bytes)
        reply = None if work.cancelled() else work.result()
        if reply is not None and not self._is_over.is_set():
            done(reply)


class _Job:
    """One answer. The pool keeps what was cancelled until it has a thread for it: so that is this, without the answer."""

    def __init__(self, reply: Reply, encoding: str, is_over: threading.Event) -> None:
        self._reply: Reply | None = reply
        self._encoding = encoding
        self._is_over = is_over
        self._work: Future[Reply | None] | None = None

    def begin(self, threads: ThreadPoolExecutor) -> Future[Reply | None]:
        """Its end, in time."""
        self._work = threads.submit(self._run)
        return self._work

    def cancel(self) -> None:
        """Let go of the answer: at once, or after the piece that a thread is at."""
        self._reply = None
        if self._work is not None:
            self._work.cancel()

    def _run(self) -> Reply | None:
        # An error that got out of here would be kept, and by its frames the answer.
        with suppress(CancelledError):
            if (reply := self._reply) is not None:
                return compressed(reply, self._encoding, self._is_given_up)
        return None

    def _is_given_up(self) -> bool:
        return self._reply is None or self._is_over.is_set()


def chosen(accepted: str, size_bytes: int) -> str | None:
    """The encoding for an answer of that size, from the header field `Accept-Encoding`; None: as it is."""
    if not accepted or size_bytes < ENCODED_FROM_BYTES:
        return None
    for one in accepted.lower().split(","):
        name, _, weight = one.strip().partition(";")
        if name.strip() in ("gzip", "deflate") and not _NO.fullmatch("".join(weight.split())):
            return name.strip()
    return None


def compressed(reply: Reply, encoding: str, is_given_up: Callable[[], bool] = lambda: False) -> Reply:
    """The same answer, with its body in that encoding. Raises CancelledError when nobody wants it any more."""
    stream = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW[encoding])
    found = []
    for piece in _pieces(reply.body):
        if is_given_up():
            raise CancelledError
        found.append(stream.compress(piece))
    body = b"".join([*found, stream.flush()])
    headers = (*reply.headers, ("Content-Encoding", encoding), ("Vary", "Accept-Encoding"))
    return replace(reply, body=(body,), headers=headers)


def _pieces(body: Sequence[bytes | memoryview]) -> Iterator[memoryview]:
    for part in body:
        view = memoryview(part)
        for at in range(0, len(view), _PIECE_BYTES):
            yield view[at : at + _PIECE_BYTES]
