"""Connections on asyncio: bytes to the reader, requests to whoever answers them, one at a time, answers back in order.

There is no task for a request: what asks a frontend is a callback from beginning to end. That and llhttp alone cost a quarter of
the processor time of a server that runs an application (ADR 0230).
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final, cast

from fabric.clock import Clock
from fabric.errors import Overloaded
from roles.gateway.failures import failure_of
from roles.gateway.http.compression import Compressor, chosen, compressed
from roles.gateway.http.limits import NO_ROOM_FOR_ANSWER, BodyBudget, HttpLimits
from roles.gateway.http.messages import Cancellable, Handler, Reply, Request, head_of
from roles.gateway.http.protocol_v2 import failed
from roles.gateway.http.reader import ContinueWanted, HttpReader, ReaderEvent, Refused
from roles.runtime.process import log

LOOK_EVERY_S: Final = 0.25
_THREAD_FROM_BYTES: Final = 64 << 10  # compressing more than that takes over a millisecond
_PIECE_BYTES: Final = 64 << 10
"""Of an answer: as much as a transport buffers before it says that its client does not read."""
WAITING_BYTES_MAX: Final = 64 << 10
"""Of the bodies that wait behind a request: with so many nothing more is read."""
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class HttpServer:
    """All connections of one gateway."""

    def __init__(self, handler: Handler, limits: HttpLimits, clock: Clock) -> None:
        self.handler = handler
        self.limits = limits
        self.clock = clock
        self.budget = BodyBudget(limits.bodies_bytes_max)
        self.connections: set[HttpConnection] = set()
        self.lingering = 0  # of them, those that were refused and are closed soon: they keep nobody out
        self.is_draining = False
        self.requests = self.refused = 0
        """Counted since the start; refused ones were not whole, or not HTTP."""
        self.defects = 0  # of ours, in reading what strangers sent
        self.compressor = Compressor(self.budget)
        self._looking: asyncio.TimerHandle | None = None
        self._look_at_ms = math.inf

    def connection(self) -> HttpConnection:
        """For asyncio's `create_server`."""
        return HttpConnection(self)

    @property
    def served(self) -> int:
        """Connections that count towards the limit."""
        return len(self.connections) - self.lingering

    def watch(self) -> None:
        """From now on whoever is too slow is refused. For how long we look too late, as after a pause of the process, nobody is."""
        now_ms = self.clock.now_ms()
        late_ms = max(0.0, now_ms - self._look_at_ms)
        for connection in list(self.connections):
            connection.tick(now_ms, late_ms)
        self._look_at_ms = now_ms + LOOK_EVERY_S * 1e3
        self._looking = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self.watch)

    def note_defect(self, defect: BaseException) -> None:
        """Reading failed by ours. The first is logged: whoever has found one may send it as often as they like."""
        if not self.defects:
            log.error("request_not_read", exc_info=defect)
        self.defects += 1

    def drain(self) -> None:
        """Answers are the last ones of their connections from now on, and idle connections end."""
        self.is_draining = True
        for connection in list(self.connections):
            connection.end_if_idle()

    def close(self) -> None:
        """End every connection at once."""
        if self._looking is not None:
            self._looking.cancel()
        for connection in list(self.connections):
            connection.abort()
        self.compressor.close()


class HttpConnection(asyncio.Protocol):
    """One of them."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._reader: HttpReader | None = None
        self._waiting: deque[Request | Refused] = deque()
        self._request: Request | None = None  # that is being answered
        self._cancellable: Cancellable | None = None
        self._compressing: Cancellable | None = None  # of its answer
        self._is_starting = self._is_over = self._is_continue_wanted = False
        self._is_reading = True
        self._is_lingering = False
        self._held_up_at_ms: float | None = None
        """Since when an answer is awaited or on its way: what comes behind it has its time afterwards."""
        self._is_writing = True  # the client reads
        self._unsent = memoryview(b"")  # of an answer
        self._unread_bytes = 0
        """Of the budget, for an answer that it has not read."""
        self._limit_at_ms: float | None = None
        """When it is ended: it reads too slowly, or is idle, or was told to end."""

    # ------------------------------------------------------------ asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is there."""
        server = self._server
        now_ms = server.clock.now_ms()
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by what it can do only
        self._transport.set_write_buffer_limits(_PIECE_BYTES)
        self._reader = HttpReader(server.limits, server.budget, server.handler.screen, now_ms)
        is_full = server.served >= server.limits.connections_max
        server.connections.add(self)
        if is_full:
            self._waiting.append(
                Refused(Overloaded(f"there are {server.limits.connections_max} connections"))
            )
            self._go_on()

    def data_received(self, data: bytes) -> None:
        """Something came."""
        assert self._reader is not None, "it is connected"
        if not self._is_over:
            events = self._reader.feed(data, self._server.clock.now_ms())
            if self._is_writing and (events or not self._reader.is_idle):
                self._limit_at_ms = None
            self._take(events)

    def eof_received(self) -> bool | None:
        """The client has closed its side: whether it still reads nobody can tell, so it is taken for gone once no answer is on its way."""
        self._is_over = True
        if self._transport is not None and self._transport.get_extra_info("sslcontext") is not None:
            # TLS ends the connection whatever is returned, and sends before that only what it has by now.
            self._transport.write(self._unsent)
            self._unsent = memoryview(b"")
        return bool(self._unsent)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        del exc
        self._server.connections.discard(self)
        self._server.lingering -= self._is_lingering
        self._transport = None
        for going_on in (self._cancellable, self._compressing):
            if going_on is not None:
                going_on.cancel()
        self._cancellable = self._compressing = None
        if self._reader is not None:
            self._reader.close()
        for one in (self._request, *self._waiting):
            if isinstance(one, Request):
                self._server.budget.give_back(len(one.body))
        self._give_back_unread()
        self._unsent = memoryview(b"")
        self._request = None
        self._waiting.clear()

    def pause_writing(self) -> None:
        """The client does not read as fast as we write."""
        self._is_writing = False

    def resume_writing(self) -> None:
        """It does again."""
        self._is_writing = True
        if self._transport is None or self._transport.is_closing():
            return  # what is written and not sent yet keeps its room until the connection is gone
        self._send()
        if self._is_writing and not self._is_over:
            self._limit_at_ms = None
            self._rest()
            self._go_on()

    # ------------------------------------------------------------ from the server

    def tick(self, now_ms: float, late_ms: float = 0.0) -> None:
        """Time goes by. `late_ms`: in which nothing was read or written, by our own doing."""
        if self._limit_at_ms is not None:
            self._limit_at_ms += late_ms
        if self._limit_at_ms is not None and now_ms >= self._limit_at_ms:
            self.abort()
        elif self._reader is not None and self._held_up_at_ms is None:
            self._reader.held_up(now_ms - late_ms, now_ms)
            self._take(self._reader.tick(now_ms))

    def end_if_idle(self) -> None:
        """Close, unless a request is being read or answered."""
        is_idle = self._reader is not None and self._reader.is_idle
        if is_idle and self._request is None and not self._waiting and self._transport is not None:
            self._is_over = True
            if not self._unsent:
                self._transport.close()

    def abort(self) -> None:
        """End it now."""
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------ requests, one after the other

    def _take(self, events: Sequence[ReaderEvent]) -> None:
        for event in events:
            match event:
                case ContinueWanted():
                    self._is_continue_wanted = True
                case Request() | Refused():
                    self._is_continue_wanted = False  # it was that of this one
                    self._waiting.append(event)
        limits = self._server.limits
        self._keep(limits.at_once_max)
        self._go_on()
        self._keep(limits.pipelined_max)

    def _keep(self, count: int) -> None:
        """Of what waits keep so many; what comes behind them is refused, and nothing more is read. So whoever sends on and on is bounded."""
        if len(self._waiting) <= count:
            return
        kept = 0 if self._is_over else count
        error = Overloaded(f"over {count} requests wait on this connection")
        while len(self._waiting) > kept:
            one = self._waiting.pop()
            if isinstance(one, Request):
                self._server.budget.give_back(len(one.body))
            if one.head is not None and not self._is_over:
                self._server.handler.refused(one.head, failure_of(error))
        self._is_continue_wanted = False
        if self._reader is not None:
            self._reader.close()
        if not self._is_over:
            self._waiting.append(Refused(error))

    def _go_on(self) -> None:
        """Answer what can be answered now."""
        while self._waiting and self._is_free:
            one = self._waiting.popleft()
            if isinstance(one, Refused):
                self._refuse(one)
                continue
            self._server.requests += 1
            self._request = one
            self._is_starting = True
            cancellable = None
            try:
                cancellable = self._server.handler.start(one, self._answer)
            except Exception as error:  # noqa: BLE001  strangers' words must not end everybody's gateway
                log.exception("request_failed path=%r", one.head.path[:200])
                self._answer(failed(failure_of(error)))
            self._is_starting = False
            self._cancellable = None if self._request is None else cancellable  # it may be answered by now
        if self._is_continue_wanted and self._is_free and self._transport is not None:
            self._is_continue_wanted = False
            self._transport.write(_CONTINUE)
        # Who has gone is heard by reading; what comes over the bound is refused, so it is not read before there is room. Nor is
        # more read behind large bodies: one connection would take all others' room. Nor behind a last refusal that waits.
        waiting_bytes = sum(len(one.body) for one in self._waiting if isinstance(one, Request))
        has_room = (
            len(self._waiting) < self._server.limits.pipelined_max
            and waiting_bytes < WAITING_BYTES_MAX
            and not (self._reader is not None and self._reader.is_closed)
        )
        self._read_on(has_room or self._is_over)
        self._hold_up(self._request is not None or bool(self._waiting) or not self._is_writing)

    def _answer(self, reply: Reply) -> None:
        """From whoever answers, once."""
        request = self._request
        if request is None or self._transport is None or self._transport.is_closing():
            return
        encoding = chosen(request.head.headers.get("accept-encoding", ""), reply.size_bytes)
        if encoding is None:
            self._write(request, reply)
        elif reply.size_bytes < _THREAD_FROM_BYTES:
            self._write(request, compressed(reply, encoding))
        else:
            # It makes room for its own answer, as in `_write`.
            self._server.budget.give_back(len(request.body))
            self._request = request = replace(request, body=b"")
            done = partial(self._write, request)
            self._compressing = self._server.compressor.start(reply, encoding, done)
            if self._compressing is None:
                self._write(request, _without_room(reply))

    def _write(self, request: Request, reply: Reply) -> None:
        if self._transport is None:
            return
        budget = self._server.budget
        budget.give_back(len(request.body))
        self._request = self._cancellable = self._compressing = None
        is_head_only = request.head.method == "HEAD"
        # A small answer needs no room: health is told also where there is none.
        held_bytes = 0 if is_head_only or reply.size_bytes < _PIECE_BYTES else reply.size_bytes
        if budget.take(held_bytes):
            reply.on_written(None)
        else:
            reply, held_bytes = _without_room(reply), 0
        is_last = not request.keep_alive or self._server.is_draining
        head = head_of(reply, is_last=is_last)
        self._unsent = memoryview(head if is_head_only else b"".join((head, *reply.body)))
        self._unread_bytes += held_bytes
        self._is_over = is_last
        self._send()
        if is_last or not self._is_writing:
            now_ms = self._server.clock.now_ms()
            self._limit_at_ms = now_ms + self._server.limits.answer_limit_ms(reply.size_bytes)
        else:
            self._rest()
            self._go_on()

    def _send(self) -> None:
        """Write on while the client reads. In pieces: TLS passes on whatever it has, and does not say what waits below it."""
        assert self._transport is not None, "it is connected"
        while self._unsent and self._is_writing:
            piece, self._unsent = self._unsent[:_PIECE_BYTES], self._unsent[_PIECE_BYTES:]
            self._transport.write(piece)
            if not self._unsent and self._is_over:
                self._transport.close()
        if self._is_writing:
            self._give_back_unread()

    def _give_back_unread(self) -> None:
        self._server.budget.give_back(self._unread_bytes)
        self._unread_bytes = 0

    @property
    def _is_free(self) -> bool:
        """The next one may be begun: all answers are written, none of them the last, and nothing is just being begun."""
        is_written = self._request is None and self._is_writing
        return is_written and not self._is_starting and not self._is_over

    def _rest(self) -> None:
        """It may be idle for a while."""
        if not self._waiting and self._request is None and self._reader is not None and self._reader.is_idle:
            self._limit_at_ms = self._server.clock.now_ms() + self._server.limits.idle_ms

    def _refuse(self, refused: Refused) -> None:
        assert self._transport is not None, "it is connected"
        self._server.refused += 1
        if refused.defect is not None:
            self._server.note_defect(refused.defect)
        failure = failure_of(refused.error)
        if refused.head is not None:
            self._server.handler.refused(refused.head, failure)
        reply = failed(failure)
        is_last = refused.is_last or self._server.is_draining
        head = head_of(reply, is_last=is_last)
        is_head_only = refused.head is not None and refused.head.method == "HEAD"
        self._transport.write(head if is_head_only else b"".join((head, *reply.body)))
        if not is_last:
            if self._is_writing:
                self._rest()
            else:
                now_ms = self._server.clock.now_ms()
                self._limit_at_ms = now_ms + self._server.limits.answer_limit_ms(reply.size_bytes)
            return
        self._is_over = True
        # What still comes is thrown away for a while: closing now would reset the connection under the answer.
        limits = self._server.limits
        self._limit_at_ms = self._server.clock.now_ms() + limits.linger_ms
        self._is_lingering = self._server.lingering < limits.connections_max
        self._server.lingering += self._is_lingering
        if not self._is_lingering:
            self._transport.close()
        elif self._transport.can_write_eof():
            self._transport.write_eof()

    def _read_on(self, is_wanted: bool) -> None:  # noqa: FBT001  as the transport has it
        if self._transport is None or self._transport.is_closing() or is_wanted == self._is_reading:
            return
        self._is_reading = is_wanted
        if is_wanted:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _hold_up(self, is_held_up: bool) -> None:  # noqa: FBT001  likewise
        if is_held_up == (self._held_up_at_ms is not None):
            return
        now_ms = self._server.clock.now_ms()
        if self._held_up_at_ms is not None and self._reader is not None:
            self._reader.held_up(self._held_up_at_ms, now_ms)
        self._held_up_at_ms = now_ms if is_held_up else None


def _without_room(reply: Reply) -> Reply:
    """What goes out instead of it."""
    failure = failure_of(Overloaded(NO_ROOM_FOR_ANSWER))
    reply.on_written(failure)
    return failed(failure)
