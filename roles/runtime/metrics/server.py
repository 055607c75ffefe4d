"""Serves a role's page to Prometheus, on a thread beside the role's loop.

The loop is asked for a snapshot and hands one over at the end of its turn: the cores keep counts and know nothing of
this, and no lock is taken. If the loop does not answer within `ANSWER_S`, the last snapshot is shown with its age.

Whoever connects gets `REQUEST_S` for a request of at most `HEAD_BYTES_MAX`, and one answer; no more than `CONNECTIONS_MAX`
are served at once, and one more closes the oldest. So a client that says nothing keeps nobody out.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from fabric.clock import Clock, MonotonicClock
from fabric.errors import ConfigError
from roles.runtime.loop.mailbox import Mailbox
from roles.runtime.metrics import catalog
from roles.runtime.metrics.snapshot import MS, Measured, Snapshot

CONNECTIONS_MAX: Final = 16
HEAD_BYTES_MAX: Final = 8 << 10
REQUEST_S: Final = 2.0
ANSWER_S: Final = 1.0
FRESH_MS: Final = 200.0
"""A snapshot that young is shown again: whoever asks more often costs the loop nothing."""
PATH: Final = "/metrics"

log = logging.getLogger("tenuto")


@dataclass(slots=True, frozen=True)
class SnapshotAsked:
    """The server's thread wants a snapshot: answer with `publish`."""


@dataclass(slots=True, frozen=True)
class _Published:
    at_ms: float
    snapshot: Snapshot


class MetricsServer:
    """One role's. `asked` is a source for the role's driver; whoever takes from it calls `publish`.

    Raises ConfigError for an address that cannot be bound, or without the library that writes the page.
    """

    def __init__(self, address: str, role_id: str, clock: Clock | None = None) -> None:
        try:
            from roles.runtime.metrics.page import page_of  # noqa: PLC0415  an extra: only whoever serves a page needs it
        except ImportError as error:
            raise ConfigError(
                f"{role_id} is to serve metrics: that needs the extra 'metrics': pip install 'tenuto[metrics]' ({error})"
            ) from error
        self.asked: Mailbox[SnapshotAsked] = Mailbox()
        self._page_of = page_of
        self._role_id = role_id
        self._clock = clock or MonotonicClock()
        self._published: _Published | None = None
        self._news: asyncio.Event = asyncio.Event()
        self._open: dict[asyncio.Task[None], None] = {}
        self._loop = asyncio.new_event_loop()
        host, _, port = address.rpartition(":")
        try:
            self._server = self._loop.run_until_complete(
                asyncio.start_server(self._accepted, host.strip("[]"), int(port), limit=HEAD_BYTES_MAX)
            )
        except OSError as error:
            self._loop.close()
            self.asked.close()
            raise ConfigError(f"{role_id} cannot serve metrics at {address}: {error.strerror}") from error
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where it listens, with the real port."""
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"{host}:{port}" if ":" not in host else f"[{host}]:{port}"

    def publish(self, snapshot: Snapshot) -> None:
        """Hand one over, from the role's loop. It is not changed any more."""
        self._published = _Published(self._clock.now_ms(), snapshot)
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._news.set)

    def close(self) -> None:
        """End the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(REQUEST_S)
        self.asked.close()

    # ------------------------------------------------------------ on its thread

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._end())
            self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        tasks = [*self._open]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a server's callback runs as one"
        if len(self._open) >= CONNECTIONS_MAX:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.cancel()
        self._open[task] = None
        try:
            async with asyncio.timeout(REQUEST_S + ANSWER_S):
                async with asyncio.timeout(REQUEST_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                writer.write(await self._answer(head))
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

    async def _answer(self, head: bytes) -> bytes:
        method, path, accept = _read(head)
        if path != PATH:
            return _response(HTTPStatus.NOT_FOUND, f"metrics are at {PATH}\n".encode())
        if method not in ("GET", "HEAD"):
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, b"GET or HEAD\n", extra="Allow: GET, HEAD\r\n")
        published = await self._fresh()
        if published is None:
            return _response(HTTPStatus.SERVICE_UNAVAILABLE, b"the role's loop does not answer\n")
        age = Measured(catalog.SNAPSHOT_AGE, (), (self._clock.now_ms() - published.at_ms) * MS)
        page, content_type = self._page_of(self._role_id, [*published.snapshot, age], accept)
        return _response(HTTPStatus.OK, page, content_type, is_head=method == "HEAD")

    async def _fresh(self) -> _Published | None:
        """A snapshot that is young enough, or the last one there is."""
        published = self._published
        if published is not None and self._clock.now_ms() - published.at_ms < FRESH_MS:
            return published
        self._news.clear()
        if not self.asked.has_more:
            self.asked.post(SnapshotAsked())
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._news.wait()
        except TimeoutError:
            log.warning("metrics_stale role=%s", self._role_id)
        return self._published


def _read(head: bytes) -> tuple[str, str, str]:
    """Method, path without its query, and what the reader accepts; empty where it is no HTTP."""
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return "", "", ""
    headers = dict(_headers(lines[1:]))
    return words[0], words[1].partition("?")[0], headers.get("accept", "")


def _headers(lines: Sequence[str]) -> list[tuple[str, str]]:
    return [
        (name.strip().lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)
    ]


def _response(
    status: HTTPStatus,
    body: bytes,
    content_type: str = "text/plain; charset=utf-8",
    *,
    extra: str = "",
    is_head: bool = False,
) -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\n{extra}Connection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (b"" if is_head else body)
