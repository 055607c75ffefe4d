"""The load tool's HTTP client against small servers on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fabric.errors import Internal, Overloaded, PeerLost
from fabric.messages import Ledger
from roles.benchmark import http_connections
from roles.benchmark.http_connections import HttpClient, HttpTarget

REQUEST = b"POST /m HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}"


def answer(status: int) -> bytes:
    return f"HTTP/1.1 {status} said\r\nContent-Length: 1\r\n\r\n1".encode()


class Server:
    """Answers with one status after another, then 200; counts requests and connections."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.connections = 0
        self.requests = 0
        self.gate = asyncio.Barrier(1)
        self.closes_after = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        served = 0
        try:
            while True:
                await reader.readexactly(len(REQUEST))
                self.requests += 1
                await self.gate.wait()
                writer.write(answer(self.statuses.pop(0) if self.statuses else 200))
                served += 1
                if served == self.closes_after:
                    # Read what is asked next and close without a word, as a server does whose heartbeats with
                    # an idle connection ended at that very moment.
                    await reader.readexactly(len(REQUEST))
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    @asynccontextmanager
    async def port(self) -> AsyncIterator[int]:
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        try:
            yield int(server.sockets[0].getsockname()[1])
        finally:
            server.close()


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await work()

    asyncio.run(bounded())


def test_one_connection_is_kept_for_requests_that_follow_each_other() -> None:
    async def work() -> None:
        server = Server()
        async with server.port() as port, HttpClient(HttpTarget({"m": [(port, REQUEST)]})) as client:
            for _ in range(5):
                assert (await client.submit("m", {})).ledger == Ledger()
        assert (server.connections, server.requests) == (1, 5)

    run(work)


def test_requests_at_the_same_time_have_a_connection_each() -> None:
    async def work() -> None:
        server = Server()
        server.gate = asyncio.Barrier(8)
        async with server.port() as port, HttpClient(HttpTarget({"m": [(port, REQUEST)]})) as client:
            for _ in range(2):
                await asyncio.gather(*(client.submit("m", {}) for _ in range(8)))
        assert server.connections == 8

    run(work)


def test_servers_of_a_model_take_turns() -> None:
    async def work() -> None:
        first, second, other = Server(), Server(), Server()
        async with first.port() as a, second.port() as b, other.port() as c:
            requests = {"m": [(a, REQUEST), (b, REQUEST)], "n": [(c, REQUEST)]}
            async with HttpClient(HttpTarget(requests)) as client:
                for _ in range(6):
                    await client.submit("m", {})
                await client.submit("n", {})
        assert (first.requests, second.requests, other.requests) == (3, 3, 1)

    run(work)


@pytest.mark.parametrize(("status", "error"), [(503, Overloaded), (429, Overloaded), (500, Internal)])
def test_a_refusal_is_typed_and_the_connection_is_kept(status: int, error: type[Exception]) -> None:
    async def work() -> None:
        server = Server(status)
        async with server.port() as port, HttpClient(HttpTarget({"m": [(port, REQUEST)]})) as client:
            with pytest.raises(error):
                await client.submit("m", {})
            await client.submit("m", {})
        assert server.connections == 1

    run(work)


def test_a_request_on_a_connection_that_was_closed_for_idleness_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_connections, "IDLE_S", 0.0)

    async def work() -> None:
        server = Server()
        server.closes_after = 1
        async with server.port() as port, HttpClient(HttpTarget({"m": [(port, REQUEST)]})) as client:
            await client.submit("m", {})
            await client.submit("m", {})
        assert server.connections == 2

    run(work)


def test_nobody_there_is_an_error_at_once() -> None:
    async def work() -> None:
        async with Server().port() as port:
            pass
        async with HttpClient(HttpTarget({"m": [(port, REQUEST)]})) as client:
            with pytest.raises(PeerLost):
                await client.submit("m", {})

    run(work)
