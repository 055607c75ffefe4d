"""Keep-alive HTTP/1.1 for loads, as light as it gets: no client of a server should cost it goodput.

Of an answer only status and length are read, unless a subclass wants more. A free connection is the one used
last, so that as many are open as are needed at once; where there is none, one more is opened, up to a limit.
What a request waits at the limit is the sender's doing: it is told as lateness, and taken off the budget.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from types import TracebackType
from typing import Final, Self

from fabric.client import InferResult
from fabric.errors import (
    DeadlineExceeded,
    FabricError,
    Internal,
    Overloaded,
    PeerLost,
    RemoteProtocolError,
)
from fabric.link import Tensor
from fabric.messages import Ledger
from roles.benchmark.player import HeldFuture

CONNECTIONS_MAX: Final = 768  # of one client: select(), which sleeps precisely, takes no descriptor over 1023
ANSWER_LIMIT_S: Final = 3.0  # long over any SLO: whoever waits so long has lost
HEAD_BYTES_MAX: Final = 65_536
OK: Final = 200
BUSY: Final = (429, 503)
IDLE_S: Final = 1.0
"""A server that closes an idle connection may do so just as we send: one that was used within that time ended with the request."""
_ANSWERED: Final = InferResult({}, Ledger())  # what it says is not looked at
Written = Callable[[float], bytes | None]


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A whole one. Names of `fields` are in small letters; `body` is empty where it came in chunks."""

    status: int
    fields: Mapping[bytes, bytes]
    body: bytes


class AnswerReader:
    """Finds the end of each answer on one connection, sans-IO."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._status = 0
        self._body_at = -1  # where it begins in what was received; -1: the head is not complete
        self._length: int | None = None  # of the body; None: in chunks
        self.is_last = False  # the server said that it closes the connection
        self._fields: Mapping[bytes, bytes] = {}
        self.answer = HttpAnswer(0, {}, b"")
        """The one that was completed last."""

    @property
    def is_untouched(self) -> bool:
        """Whether nothing of an answer has come yet."""
        return not self._received

    def feed(self, data: bytes) -> int | None:
        """The status when the answer is complete, None before. Raises RemoteProtocolError for what it can't read."""
        self._received += data
        if self._body_at < 0 and not self._read_head():
            return None
        ends_at = self._chunks_end_at() if self._length is None else self._body_at + self._length
        if ends_at is None or len(self._received) < ends_at:
            return None
        if len(self._received) > ends_at:
            raise RemoteProtocolError("more came than one answer")
        body = b"" if self._length is None else bytes(self._received[self._body_at :])
        self.answer = HttpAnswer(self._status, self._fields, body)
        self._received.clear()
        self._body_at = -1
        return self._status

    def _read_head(self) -> bool:
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            if len(self._received) > HEAD_BYTES_MAX:
                raise RemoteProtocolError("a head without end")
            return False
        first, *lines = bytes(self._received[:end]).split(b"\r\n")
        fields = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)
        }
        try:
            self._status = int(first.split(b" ", 2)[1])
            is_chunked = fields.get(b"transfer-encoding", b"").lower() == b"chunked"
            self._length = None if is_chunked else int(fields[b"content-length"])
        except (IndexError, KeyError, ValueError) as error:
            raise RemoteProtocolError(f"a head without status or length: {first!r}") from error
        self._fields = fields
        self.is_last = fields.get(b"connection", b"").lower() == b"close"
        self._body_at = end + 4
        return True

    def _chunks_end_at(self) -> int | None:
        """Where the empty chunk ends, once it is there; answers are small, so we look from the start each time."""
        at = self._body_at
        while (line_end := self._received.find(b"\r\n", at)) >= 0:
            try:
                size = int(self._received[at:line_end].partition(b";")[0], 16)
            except ValueError as error:
                raise RemoteProtocolError("a chunk without a size") from error
            at = line_end + 2 + size + 2
            if size == 0:
                return at
        return None


@dataclass(frozen=True, slots=True)
class HttpTarget:
    """Where requests of each model go: ports of `host`, each in its turn, and the bytes of a request, which a subclass of the client may make itself."""

    requests: Mapping[str, Sequence[tuple[int, bytes]]]
    host: str = "127.0.0.1"
    tls: ssl.SSLContext | None = None


@dataclass(slots=True, eq=False)
class _Asked:
    """A request that has no answer yet. `written`: its bytes where so much of the budget was used up here; None: there is none left."""

    written: Written
    future: HeldFuture
    gives_up_at_s: float
    model: str
    submitted_at_s: float
    asked_at_s: float
    connection: _Connection | None = None
    held_from_s: float | None = None

    def hold_ends(self, now_s: float) -> None:
        """What it was held for is no time of the server's."""
        if self.held_from_s is not None:
            self.future.held_ms += 1e3 * (now_s - self.held_from_s)
            self.asked_at_s += now_s - self.held_from_s
            self.held_from_s = None


class _Connection(asyncio.Protocol):
    def __init__(self, server: _Server) -> None:
        self._server = server
        self._reader = AnswerReader()
        self._asked: _Asked | None = None
        self._answered_at_s = math.inf  # last; infinite: it has never been used
        self._was_idle = False
        """Before the last request: for so long that the server may have closed it then."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._server.connections.add(self)
        self._server.is_free(self)

    def ask(self, asked: _Asked) -> bool:
        """Send it, and be busy until the answer; False: it is too late for that."""
        now_s = asyncio.get_running_loop().time()
        asked.hold_ends(now_s)
        request = asked.written(1e3 * (now_s - asked.submitted_at_s))
        if request is None:
            asked.future.set_exception(DeadlineExceeded("the sender was later than the whole budget"))
            return False
        self._asked, asked.connection = asked, self
        self._was_idle = now_s - self._answered_at_s >= IDLE_S
        self.transport.write(request)
        return True

    def data_received(self, data: bytes) -> None:
        try:
            status = self._reader.feed(data)
        except RemoteProtocolError as error:
            self._finish(error)
            self.transport.abort()
            return
        if status is None:
            return
        now_s = self._answered_at_s = asyncio.get_running_loop().time()
        asked = self._asked
        if asked is not None:
            took_ms = 1e3 * (now_s - asked.asked_at_s)
            self._finish(self._server.read(self._reader.answer, asked.model, took_ms))
        if self._reader.is_last:
            self.transport.close()
        else:
            self._server.is_free(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.is_gone(self)
        asked = self._asked
        is_stale = self._was_idle and self._reader.is_untouched and not self._server.is_closing
        if asked is not None and is_stale and not asked.future.done():
            self._asked = None
            self._server.ask(asked)
        self._finish(PeerLost(f"the server closed the connection: {exc}"))

    def _finish(self, outcome: InferResult | FabricError) -> None:
        asked, self._asked = self._asked, None
        if asked is None or asked.future.done():
            return
        if isinstance(outcome, FabricError):
            asked.future.set_exception(outcome)
        else:
            asked.future.set_result(outcome)


@dataclass(slots=True, eq=False)
class _Server:
    """One port: its free connections, the last used at the end, and who waits for one."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    connections_max: int
    read: Callable[[HttpAnswer, str, float], InferResult | FabricError]
    free: list[_Connection] = field(default_factory=list)
    waiting: deque[_Asked] = field(default_factory=deque)
    connections: set[_Connection] = field(default_factory=set)
    opening: set[asyncio.Task[None]] = field(default_factory=set)
    is_closing: bool = False

    def ask(self, asked: _Asked) -> None:
        if self.free:
            if self.free[-1].ask(asked):
                self.free.pop()
            return
        self.waiting.append(asked)
        self.open_for_waiting()
        if len(self.opening) < len(self.waiting):
            asked.held_from_s = asyncio.get_running_loop().time()

    def open_for_waiting(self) -> None:
        """As many as wait, and the limit allows."""
        while len(self.opening) < len(self.waiting):
            if len(self.connections) + len(self.opening) >= self.connections_max:
                return
            task = asyncio.get_running_loop().create_task(self._open())
            self.opening.add(task)
            task.add_done_callback(self._is_opened)

    def _is_opened(self, task: asyncio.Task[None]) -> None:
        """Or it failed, and who waits for another one has that place."""
        self.opening.discard(task)
        self.open_for_waiting()

    async def _open(self) -> None:
        try:
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: _Connection(self), self.host, self.port, ssl=self.tls)
        except (OSError, UnicodeError) as error:  # the latter of what cannot be a host's name
            if self.waiting:
                asked = self.waiting.popleft()
                if not asked.future.done():
                    asked.future.set_exception(
                        PeerLost(f"cannot connect to {self.host}:{self.port}: {error}")
                    )

    def is_free(self, connection: _Connection) -> None:
        while self.waiting:
            asked = self.waiting.popleft()
            if not asked.future.done() and connection.ask(asked):
                return
        self.free.append(connection)

    def is_gone(self, connection: _Connection) -> None:
        self.connections.discard(connection)
        if connection in self.free:
            self.free.remove(connection)
        self.open_for_waiting()


class HttpClient:
    """Submits like the SDK's client; inputs and budget are not looked at, the target's bytes are sent as they are."""

    limit_s = ANSWER_LIMIT_S

    def __init__(self, target: HttpTarget) -> None:
        ports = {port for requests in target.requests.values() for port, _ in requests}
        each = CONNECTIONS_MAX // max(1, len(ports))
        self._servers = {port: _Server(target.host, port, target.tls, each, self.read) for port in ports}
        self._turns = {model: cycle(requests) for model, requests in target.requests.items()}
        self._pending: deque[_Asked] = deque()
        self._alarm: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close every connection; what is pending fails."""
        if self._alarm is not None:
            self._alarm.cancel()
        for server in self._servers.values():
            server.is_closing = True
            for task in server.opening:
                task.cancel()
            server.waiting.clear()
            for connection in server.connections:
                connection.transport.abort()
        await asyncio.sleep(0)

    def submit(
        self,
        model: str,
        inputs: Mapping[str, Tensor],
        budget_ms: float | None = None,
        priority: int | None = None,
    ) -> HeldFuture:
        """Send one request. The future has a RequestError or PeerLost where there is no good answer."""
        port, written = self.written(model, inputs, budget_ms, priority)
        now_s = self._loop.time()
        future = HeldFuture(loop=self._loop)
        asked = _Asked(written, future, now_s + self.limit_s, model, now_s, now_s)
        self._pending.append(asked)
        if self._alarm is None:
            self._alarm = self._loop.call_later(self.limit_s, self._give_up)
        while self._pending[0].future.done():
            self._pending.popleft()
        self._servers[port].ask(asked)
        return asked.future

    def written(
        self, model: str, inputs: Mapping[str, Tensor], budget_ms: float | None, priority: int | None
    ) -> tuple[int, Written]:
        """Which port, and the bytes of the request: here those of the target, whatever the inputs are."""
        del inputs, budget_ms, priority
        port, request = next(self._turns[model])
        return port, lambda _: request

    def read(self, answer: HttpAnswer, model: str, took_ms: float) -> InferResult | FabricError:
        """What an answer says: here its status alone."""
        del model, took_ms
        if answer.status == OK:
            return _ANSWERED
        return Overloaded("shed") if answer.status in BUSY else Internal(f"HTTP {answer.status}")

    def _give_up(self) -> None:
        now_s = self._loop.time()
        pending, self._alarm = self._pending, None
        while pending and (pending[0].future.done() or pending[0].gives_up_at_s <= now_s):
            asked = pending.popleft()
            if not asked.future.done():
                asked.hold_ends(now_s)
                asked.future.set_exception(DeadlineExceeded(f"no answer in {self.limit_s:g} s"))
                if asked.connection is not None:
                    asked.connection.transport.abort()
        if pending:
            self._alarm = self._loop.call_later(pending[0].gives_up_at_s - now_s, self._give_up)
