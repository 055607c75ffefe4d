"""Connections of the gateway on loopback, with limits so small that a test can wait for them."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop

from fabric.clock import MonotonicClock
from fabric.errors import InvalidInput
from roles.gateway.failures import Failure
from roles.gateway.http.connection import HttpServer
from roles.gateway.http.limits import HttpLimits
from roles.gateway.http.messages import Answer, Cancellable, Head, Reply, Request
from tests.integration.gateway_stage import certified

LoopFactory = Callable[[], asyncio.AbstractEventLoop]

LIMITS = HttpLimits(body_bytes_max=1 << 20, bodies_bytes_max=4 << 20, head_ms=60_000, body_ms=60_000)
WAIT_S = 60
GET = b"GET /%s HTTP/1.1\r\nHost: a\r\n\r\n"


class Stand:
    """Answers `/a` at once, `/large` with 64 MB, `/raise` not at all, and keeps `/never`."""

    def __init__(self) -> None:
        self.kept: list[Answer] = []
        self.cancelled = 0

    def screen(self, head: Head) -> None:
        if head.path == "/wrong":
            raise InvalidInput("so it is")

    def refused(self, head: Head, failure: Failure) -> None:
        """It counts nothing."""

    def start(self, request: Request, answer: Answer) -> Cancellable | None:
        match request.head.path:
            case "/never":
                self.kept.append(answer)
                return self
            case "/large":
                answer(Reply(200, (bytes(64 << 20),)))
            case "/raise":
                raise ValueError("a defect")
            case path:
                answer(Reply(200, (path.encode(),)))
        return None

    def cancel(self) -> None:
        self.cancelled += 1


@asynccontextmanager
async def serving(
    limits: HttpLimits = LIMITS, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[HttpServer, Stand, int]]:
    stand = Stand()
    server = HttpServer(stand, limits, MonotonicClock())
    listener = await asyncio.get_running_loop().create_server(server.connection, "127.0.0.1", 0, ssl=tls)
    server.watch()
    try:
        yield server, stand, listener.sockets[0].getsockname()[1]
        assert server.budget.used == 0
    finally:
        listener.close()
        server.close()


async def connected(
    port: int, stack: AsyncExitStack, tls: ssl.SSLContext | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that is gone at the end of the test, whatever is left in it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)

    async def abort() -> None:
        writer.transport.abort()
        with suppress(OSError):  # and TLS' own errors
            await writer.wait_closed()

    stack.push_async_callback(abort)
    return reader, writer


async def ended(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the other side closes."""
    found = b""
    async with asyncio.timeout(WAIT_S):
        try:
            while data := await reader.read(65_536):
                found += data
        except ConnectionResetError:
            pass
    return found


async def until(claim: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not claim():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await test()

    asyncio.run(bounded())


@pytest.mark.parametrize(
    ("limits", "sent", "told"),
    [
        (replace(LIMITS, head_ms=50), b"", b"408"),
        (replace(LIMITS, head_ms=50), b"GET /a HT", b"408"),
        (
            replace(LIMITS, body_ms=50, bytes_per_s_min=1e9),
            b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nabc",
            b"408",
        ),
        (replace(LIMITS, idle_ms=50), GET % b"a", b"200"),
        (LIMITS, b"nonsense\r\n\r\n", b"400"),
        (LIMITS, GET % b"raise" + b"GET /a HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", b"500"),
    ],
    ids=["silent", "slow head", "slow body", "idle", "no HTTP", "a defect"],
)
def test_who_takes_too_long_or_speaks_nonsense_is_told_and_ended(
    limits: HttpLimits, sent: bytes, told: bytes
) -> None:
    async def test() -> None:
        async with serving(limits) as (server, _, port), AsyncExitStack() as stack:
            reader, writer = await connected(port, stack)
            writer.write(sent)
            answer = await ended(reader)
            assert answer.startswith(b"HTTP/1.1 " + told)
            writer.close()
            await until(lambda: not server.connections)

    run(test)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("is_tls", [False, True])
def test_who_does_not_read_holds_room_and_is_ended(
    loop: LoopFactory, tmp_path: Path, *, is_tls: bool
) -> None:
    ours = theirs = None
    if is_tls:
        certificate, key = certified(tmp_path)
        ours = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        ours.load_cert_chain(certificate, key)
        theirs = ssl.create_default_context(cafile=certificate)

    async def test() -> None:
        limits = replace(LIMITS, bodies_bytes_max=65 << 20, answer_ms=1_000, bytes_per_s_min=1e12)
        async with serving(limits, ours) as (server, _, port), AsyncExitStack() as stack:
            _, writer = await connected(port, stack, theirs)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(GET % b"large")
            await until(lambda: server.budget.used == 64 << 20)
            await until(lambda: not server.connections)
            writer.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(test())


class HalfClosing:
    """A client by TLS that closes its sending side and reads on; Python's own `ssl` transports cannot."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tls: ssl.SSLContext
    ) -> None:
        self._reader, self._writer = reader, writer
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = tls.wrap_bio(self._in, self._out, server_hostname="localhost")

    async def ask(self, sent: bytes) -> None:
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._writer.write(self._out.read())
                self._in.write(await self._reader.read(65_536))
        self._tls.write(sent)
        self._writer.write(self._out.read())

    def close_sending(self, *, is_eof: bool) -> None:
        """`is_eof`: that of TCP too, as Node.js does."""
        with suppress(ssl.SSLWantReadError):
            self._tls.unwrap()
        self._writer.write(self._out.read())
        if is_eof:
            self._writer.write_eof()

    async def read(self, at_least: int) -> int:
        """So many bytes and no more than a piece over, or those until the other side ends."""
        found = 0
        async with asyncio.timeout(WAIT_S):
            while found < at_least:
                try:
                    found += len(self._tls.read(1 << 20))
                except ssl.SSLZeroReturnError:
                    return found
                except ssl.SSLWantReadError:
                    came = await self._reader.read(65_536)
                    if not came:
                        return found
                    self._in.write(came)
        return found


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("is_eof", [False, True])
@pytest.mark.parametrize("reads_on", [True, False])
def test_by_tls_who_closes_its_sending_side_is_sent_the_whole_answer(
    loop: LoopFactory, tmp_path: Path, *, is_eof: bool, reads_on: bool
) -> None:
    """And holds room of the budget until it has it, or is ended."""
    certificate, key = certified(tmp_path)
    ours = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ours.load_cert_chain(certificate, key)

    async def test() -> None:
        limits = replace(LIMITS, bodies_bytes_max=65 << 20)
        async with serving(limits, ours) as (server, _, port), AsyncExitStack() as stack:
            reader, writer = await connected(port, stack)
            client = HalfClosing(reader, writer, ssl.create_default_context(cafile=certificate))
            await client.ask(GET % b"large")
            await until(lambda: server.budget.used == 64 << 20)
            (connection,) = server.connections
            client.close_sending(is_eof=is_eof)
            await until(lambda: connection._is_over)
            await client.read(8 << 20)
            await asyncio.sleep(0.1)
            assert server.budget.used == 64 << 20
            if reads_on:
                assert await client.read(65 << 20) > 56 << 20
                writer.close()
            else:
                connection.tick(server.clock.now_ms() + limits.answer_limit_ms(64 << 20))
            await until(lambda: not server.connections)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(test())


def test_who_sends_on_and_on_is_bounded_and_told_so_last() -> None:
    async def test() -> None:
        async with (
            serving(replace(LIMITS, pipelined_max=4)) as (server, stand, port),
            AsyncExitStack() as stack,
        ):
            reader, writer = await connected(port, stack)
            writer.write(GET % b"never")
            await until(lambda: bool(stand.kept))
            (connection,) = server.connections
            writer.write(GET % b"never" * 50)
            await until(lambda: len(connection._waiting) == 5)
            for at in range(5):
                writer.write(GET % b"never" * 50)
                stand.kept[at](Reply(200, (b"late",)))
            found = await ended(reader)
            assert [part[:3] for part in found.split(b"HTTP/1.1 ")[1:]] == [b"200"] * 5 + [b"503"]
            assert len(stand.kept) == 5
            writer.close()
            await until(lambda: not server.connections)

    run(test)


def test_one_connection_too_many_is_told_so_and_the_others_go_on() -> None:
    async def test() -> None:
        async with serving(replace(LIMITS, connections_max=1)) as (_, _, port), AsyncExitStack() as stack:
            first_reader, first = await connected(port, stack)
            first.write(GET % b"a")
            assert (await first_reader.readuntil(b"/a")).startswith(b"HTTP/1.1 200")
            reader, writer = await connected(port, stack)
            assert (await ended(reader)).startswith(b"HTTP/1.1 503")
            writer.close()
            first.write(GET % b"a")
            assert (await first_reader.readuntil(b"/a")).startswith(b"HTTP/1.1 200")
            first.close()

    run(test)


def test_a_client_that_is_gone_cancels_and_a_late_answer_goes_nowhere() -> None:
    async def test() -> None:
        async with serving() as (server, stand, port), AsyncExitStack() as stack:
            _, writer = await connected(port, stack)
            writer.write(b"POST /never HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello")
            await until(lambda: bool(stand.kept))
            assert server.budget.used == 5
            writer.close()
            await until(lambda: stand.cancelled == 1)
            stand.kept[0](Reply(200, (b"late",)))

    run(test)


def test_at_the_end_answers_are_the_last_and_idle_connections_end() -> None:
    async def test() -> None:
        async with serving() as (server, stand, port), AsyncExitStack() as stack:
            idle_reader, idle = await connected(port, stack)
            reader, writer = await connected(port, stack)
            writer.write(GET % b"never")
            await until(lambda: bool(stand.kept) and len(server.connections) == 2)
            server.drain()
            assert await ended(idle_reader) == b""
            stand.kept[0](Reply(200, (b"at last",)))
            answer = await ended(reader)
            assert b"Connection: close" in answer
            assert answer.endswith(b"at last")
            for one in (idle, writer):
                one.close()
            await until(lambda: not server.connections)

    run(test)


def test_after_a_wrong_path_without_a_body_the_connection_goes_on() -> None:
    async def test() -> None:
        async with serving() as (_, _, port), AsyncExitStack() as stack:
            reader, writer = await connected(port, stack)
            writer.write(GET % b"wrong" + b"HEAD /a HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            answer = await ended(reader)
            assert answer.startswith(b"HTTP/1.1 400")
            assert answer.endswith(
                b"Content-Length: 2\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
            )
            writer.close()

    run(test)


def test_what_comes_behind_a_slow_answer_is_not_too_slow() -> None:
    async def test() -> None:
        limits = replace(LIMITS, head_ms=400)
        async with serving(limits) as (_, stand, port), AsyncExitStack() as stack:
            reader, writer = await connected(port, stack)
            # The second waits, so nothing more is read; of the third a part has come.
            writer.write(GET % b"never" + GET % b"a" + b"GET /b HTT")
            await until(lambda: bool(stand.kept))
            await asyncio.sleep(1)
            stand.kept[0](Reply(200, (b"at last",)))
            writer.write(b"P/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            answer = await ended(reader)
            assert answer.count(b"HTTP/1.1 200") == 3, answer

    run(test)
