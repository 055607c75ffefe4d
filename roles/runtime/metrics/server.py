"""Serves a role's page to Prometheus, on a thread beside the role's loop.

The loop is asked for a snapshot and hands one over at the end of its turn: the cores keep counts and know nothing of
this, and no lock is taken. If the loop does not answer within `ANSWER_S`, the last snapshot is shown with its age.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from fabric.clock import Clock, MonotonicClock
from fabric.errors import ConfigError
from roles.runtime.loop.mailbox import Mailbox
from roles.runtime.metrics import catalog
from roles.runtime.metrics.snapshot import MS, Measured, Snapshot, SnapshotAsked
from roles.runtime.small_http import ANSWER_S, Answered, Asked, SmallHttpServer

FRESH_MS: Final = 200.0
"""A snapshot that young is shown again: whoever asks more often costs the loop nothing."""
PATH: Final = "/metrics"

log = logging.getLogger("tenuto")


@dataclass(slots=True, frozen=True)
class _Published:
    at_ms: float
    snapshot: Snapshot


class MetricsServer:
    """One role's. `asked` is a source for the role's driver; whoever takes from it calls `publish`.

    Where another process is at its port, the role serves without its page until that has left. Raises ConfigError for an address that
    can never be bound, or without the library that writes the page.
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
        try:
            self._server = SmallHttpServer(
                address,
                self._answer,
                "metrics",
                f"listen.metrics: {role_id}'s page cannot be served",
                on_taken=lambda: log.warning("metrics_port_taken role=%s address=%s", role_id, address),
            )
        except ConfigError:
            self.asked.close()
            raise

    @property
    def address(self) -> str:
        """Where it listens, with the real port, or is to listen."""
        return self._server.address

    def publish(self, snapshot: Snapshot) -> None:
        """Hand one over, from the role's loop. It is not changed any more."""
        self._published = _Published(self._clock.now_ms(), snapshot)
        self._server.soon(self._news.set)

    def close(self) -> None:
        """End the thread."""
        self._server.close()
        self.asked.close()

    # ------------------------------------------------------------ on its thread

    async def _answer(self, asked: Asked) -> Answered:
        if asked.path != PATH:
            return Answered(HTTPStatus.NOT_FOUND, f"metrics are at {PATH}\n".encode())
        published = await self._fresh()
        if published is None:
            return Answered(HTTPStatus.SERVICE_UNAVAILABLE, b"the role's loop does not answer\n")
        age = Measured(catalog.SNAPSHOT_AGE, (), (self._clock.now_ms() - published.at_ms) * MS)
        accept = asked.headers.get("accept", "")
        page, content_type = self._page_of(self._role_id, [*published.snapshot, age], accept)
        return Answered(HTTPStatus.OK, page, content_type)

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
