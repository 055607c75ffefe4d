"""A small HTTP server on a thread beside a role's loop: for pages that people and Prometheus read, not for requests.

Whoever connects gets `REQUEST_S` for a head of at most `HEAD_BYTES_MAX`, and one answer; no more than `CONNECTIONS_MAX`
are served at once, and one more closes the oldest. So a client that says nothing keeps nobody out. No body is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final

from fabric.errors import ConfigError

CONNECTIONS_MAX: Final = 16
HEAD_BYTES_MAX: Final = 8 << 10
REQUEST_S: Final = 2.0
ANSWER_S: Final = 1.0
TRY_AGAIN_S: Final = 1.0
PLAIN: Final = "text/plain; charset=utf-8"

log = logging.getLogger("tenuto")


@dataclass(slots=True, frozen=True)
class Asked:
    """A request. `path` is without its `query`; names of headers are in small letters, and each has the last value that came."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]


@dataclass(slots=True, frozen=True)
class Answered:
    """What is said to it."""

    status: HTTPStatus
    body: bytes
    content_type: str = PLAIN
    headers: Sequence[tuple[str, str]] = field(default=())


Answer = Callable[[Asked], Awaitable[Answered]]


class SmallHttpServer:
    """`answer` is called on the server's thread; it takes at most `ANSWER_S`, or nothing is said.

    `on_taken` is called where another process is at that port: this one serves as soon as that has left it, which it tries once a
    `TRY_AGAIN_S`. Raises ConfigError for an address that cannot be bound, without `on_taken` for that reason too; `purpose` is the
    rest of that sentence.
    """

    def __init__(
        self,
        address: str,
        answer: Answer,
        name: str,
        purpose: str,
        connections_max: int = CONNECTIONS_MAX,
        on_taken: Callable[[], None] | None = None,
    ) -> None:
        self._asked_for = address
        self._answer = answer
        self._connections_max = connections_max
        self._open: dict[asyncio.Task[None], None] = {}
        self.loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._waiting: asyncio.Task[None] | None = None
        try:
            self._server = self.loop.run_until_complete(self._bound())
        except (OSError, UnicodeError) as error:  # the latter of what cannot be a host's name
            # asyncio puts a sentence of its own, with the address, around the reason; below 0: no such host.
            code = getattr(error, "errno", None) or 0
            if code != errno.EADDRINUSE or on_taken is None:
                self.loop.close()
                reason = (
                    os.strerror(code)
                    if code > 0
                    else getattr(error, "strerror", "no host can have that name")
                )
                raise ConfigError(f"{purpose} at {address}: {reason}") from error
            on_taken()
            self._waiting = self.loop.create_task(self._until_bound())
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where it listens, with the real port, or is to listen."""
        if self._server is None:
            return self._asked_for
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"{host}:{port}" if ":" not in host else f"[{host}]:{port}"

    def soon(self, call: Callable[[], object]) -> None:
        """Call it on the server's thread; nothing happens once that has ended."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(call)

    def close(self) -> None:
        """End the thread."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(REQUEST_S)

    # ------------------------------------------------------------ on its thread

    def _run(self) -> None:
        try:
            self.loop.run_forever()
        finally:
            self.loop.run_until_complete(self._end())
            self.loop.close()

    async def _bound(self) -> asyncio.Server:
        host, _, port = self._asked_for.rpartition(":")
        return await asyncio.start_server(self._accepted, host.strip("[]"), int(port), limit=HEAD_BYTES_MAX)

    async def _until_bound(self) -> None:
        while self._server is None:
            await asyncio.sleep(TRY_AGAIN_S)
            with contextlib.suppress(OSError):  # whatever it is by now: the role serves without
                self._server = await self._bound()

    async def _end(self) -> None:
        if self._server is not None:
            self._server.close()
        tasks = [*self._open, *([] if self._waiting is None else [self._waiting])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a server's callback runs as one"
        if len(self._open) >= self._connections_max:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.cancel()
        self._open[task] = None
        try:
            async with asyncio.timeout(REQUEST_S + ANSWER_S):
                async with asyncio.timeout(REQUEST_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                asked = _read(head)
                writer.write(_written(await self._answered(asked), is_head=asked.method == "HEAD"))
                writer.close()
                await writer.wait_closed()  # all of it is out; `drain` would leave what the transport keeps
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass  # no request, too large a one, or nobody reads the answer
        except asyncio.CancelledError:
            pass  # another one came instead, or the role ends: this task is over either way
        finally:
            self._open.pop(task, None)
            writer.close()
            if writer.transport.get_write_buffer_size():  # whoever does not read is waited for no longer
                writer.transport.abort()

    async def _answered(self, asked: Asked) -> Answered:
        if asked.method not in ("GET", "HEAD", ""):
            return Answered(HTTPStatus.METHOD_NOT_ALLOWED, b"GET or HEAD\n", headers=[("Allow", "GET, HEAD")])
        try:
            return await self._answer(asked)
        except Exception:  # a defect in one answer is told, and ends no page
            log.exception("page_failed path=%r", asked.path[:200])
            return Answered(HTTPStatus.INTERNAL_SERVER_ERROR, b"this page failed\n")


def _read(head: bytes) -> Asked:
    """Empty where it is no HTTP."""
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return Asked("", "", "", {})
    path, _, query = words[1].partition("?")
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
    }
    return Asked(words[0], path, query, headers)


def _written(answered: Answered, *, is_head: bool) -> bytes:
    status = answered.status
    more = "".join(f"{name}: {value}\r\n" for name, value in answered.headers)
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {answered.content_type}\r\n"
        f"Content-Length: {len(answered.body)}\r\n{more}Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (b"" if is_head else answered.body)
