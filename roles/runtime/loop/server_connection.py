"""A client's end of a control link: the one server behind a DEALER, as a source of the driver.

A server that has been silent for too long may only be unreachable by *this* connection, so each such `Lost` begins
a new one, and the server is watched again: until somebody answers, it is lost again and again. A connection that was
closed is a `Lost` at once, and ZeroMQ opens the next one.
"""

from __future__ import annotations

import logging
import select
from collections.abc import Mapping, Sequence

from fabric.clock import Clock
from fabric.curve import guarded
from fabric.errors import ConfigError, PeerLost
from fabric.heartbeats import HeartbeatTiming
from fabric.ids import PeerId
from fabric.inproc import ServerLink
from fabric.keys import Keyring
from fabric.messages import AnyMessage
from fabric.sockets import RECONNECT_AFTER_MS, new_counters
from fabric.transport import ZMQ, Transport
from roles.runtime.core import Heard, Lost
from roles.runtime.loop.sources import SILENT, WatchedLinkSource

log = logging.getLogger("tenuto")

_NO_COUNTERS: Mapping[str, float] = new_counters()


class ServerSource(WatchedLinkSource):
    """Hears the one server of a link: watched from the start, connected to anew when it is lost."""

    def __init__(
        self, link: ServerLink, server: PeerId, clock: Clock, heartbeats: HeartbeatTiming | None = None
    ) -> None:
        super().__init__(link, clock, heartbeats)
        self._server_link = link
        self.watch(server)

    def take(self, limit: int, now_ms: float) -> Sequence[Heard | Lost]:
        """That its connection was closed, at most `limit` messages, then that the server is silent."""
        events = super().take(limit, now_ms)
        # A message behind a closed connection's `Lost` came by the next one: the server is watched again by that.
        if events and isinstance(lost := events[-1], Lost):
            if lost.reason == SILENT:
                self._server_link.reconnect()
            self.watch(lost.peer)
        return events


class ServerConnection:
    """A server whose place may change.

    The driver knows one descriptor for ever, an epoll of ours, behind which connections come and go.
    """

    def __init__(
        self,
        own: PeerId,
        server: PeerId,
        clock: Clock,
        heartbeats: HeartbeatTiming | None = None,
        keyring: Keyring | None = None,
        transport: Transport = ZMQ,
    ) -> None:
        self._own = own
        self._guard = guarded(keyring)
        self._server = server
        self._clock = clock
        self._timing = heartbeats
        self._transport = transport
        self._epoll = select.epoll()
        self._addresses: Sequence[str] = ()
        self._open_at_ms: float | None = None
        self._link: ServerLink | None = None
        self._source: ServerSource | None = None
        self._said = ""

    def open(
        self, addresses: Sequence[str], heartbeats: HeartbeatTiming | None = None, *, is_patient: bool = False
    ) -> None:
        """Connect, instead of to where it was before.

        While this process has no descriptor left, the server is not there, and it is tried again and again. So it is, for the
        patient, while its key is not trusted, or where what they were told is no address; others get ConfigError for both.
        """
        self._close_link()
        self._addresses = addresses
        self._timing = heartbeats or self._timing
        self._connect(is_patient=is_patient)

    def _connect(self, *, is_patient: bool = True) -> None:
        self._open_at_ms = None
        passing = (PeerLost, ConfigError) if is_patient else (PeerLost,)
        try:
            self._link = self._transport.connect(self._own, self._server, self._addresses, self._guard)
        except passing as error:
            if str(error) != self._said:
                self._said = str(error)
                log.warning("server_not_reached server=%s reason=%r", self._server, self._said)
            self._open_at_ms = self._clock.now_ms() + RECONNECT_AFTER_MS
            return
        if self._link.fileno() >= 0:
            self._epoll.register(self._link.fileno(), select.EPOLLIN)
        self._source = ServerSource(self._link, self._server, self._clock, self._timing)

    @property
    def is_open(self) -> bool:
        """Whether it was ever said where the server is."""
        return bool(self._addresses)

    def send(self, message: AnyMessage) -> bool:
        """False: there is no connection, or its queue is full."""
        return self._link is not None and self._link.send(self._server, message)

    @property
    def counters(self) -> Mapping[str, float]:
        """The present connection's (see `fabric.link.Link`), heartbeats included."""
        return _NO_COUNTERS if self._link is None else self._link.counters

    def leave(self) -> None:
        """End it; the driver's descriptor stays."""
        self._open_at_ms = None
        self._close_link()

    def close(self) -> None:
        """Flush, and give the descriptors back."""
        self._close_link()
        self._epoll.close()

    # The driver's side.

    def fileno(self) -> int:
        """The same for all connections."""
        return self._epoll.fileno()

    @property
    def has_more(self) -> bool:
        """Whether a message is waiting."""
        return self._link is not None and self._link.has_more

    @property
    def wake_at_ms(self) -> float | None:
        """The next heartbeat, or attempt to connect."""
        return self._open_at_ms if self._source is None else self._source.wake_at_ms

    def take(self, limit: int, now_ms: float) -> Sequence[Heard | Lost]:
        """What it said, and what became of it."""
        if self._open_at_ms is not None and self._open_at_ms <= now_ms:
            self._connect()
        return () if self._source is None else self._source.take(limit, now_ms)

    def _close_link(self) -> None:
        if self._link is not None:
            if self._link.fileno() >= 0:
                self._epoll.unregister(self._link.fileno())
            self._link.close()
            self._link = self._source = None
