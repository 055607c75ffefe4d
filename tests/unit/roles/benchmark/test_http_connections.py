from __future__ import annotations

import asyncio
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.errors import DeadlineExceeded, PeerLost, RemoteProtocolError
from roles.benchmark.gateway_target import GatewayClient
from roles.benchmark.http_connections import AnswerReader, HttpClient, HttpTarget, _Connection, _Server
from roles.benchmark.player import PlannedRequest, PlayedRequest, play
from tests.unit.roles.benchmark.test_player import LeapingLoop

WITH_LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nserver: x\r\n\r\n[1.0]"
IN_CHUNKS = b"HTTP/1.1 503 Busy\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n[1.\r\n2;x=1\r\n0]\r\n0\r\n\r\n"


@pytest.mark.parametrize(("answer", "status"), [(WITH_LENGTH, 200), (IN_CHUNKS, 503)])
@given(data=st.data())
def test_an_answer_is_complete_with_its_last_byte_however_it_is_cut(
    answer: bytes, status: int, data: st.DataObject
) -> None:
    reader = AnswerReader()
    for _ in range(2):  # a connection is kept
        cuts = sorted(data.draw(st.sets(st.integers(1, len(answer) - 1), max_size=6)))
        pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
        assert reader.is_untouched
        for piece in pieces[:-1]:
            assert reader.feed(piece) is None
        assert reader.feed(pieces[-1]) == status
    assert not reader.is_last


def test_an_empty_body_is_an_answer() -> None:
    assert AnswerReader().feed(b"HTTP/1.1 500 x\r\ncontent-length: 0\r\n\r\n") == 500


def test_a_server_may_say_that_it_closes() -> None:
    reader = AnswerReader()
    assert reader.feed(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n") == 200
    assert reader.is_last


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: five\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        WITH_LENGTH + b"and more",
        b"x" * 70_000,
    ],
)
def test_what_cannot_be_read_is_an_error(said: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        AnswerReader().feed(said)


class Wire(asyncio.Transport):
    """One connection to a gateway that answers each request so long after it was written."""

    def __init__(self, loop: LeapingLoop, takes_ms: float) -> None:
        super().__init__()
        self.loop, self.takes_ms = loop, takes_ms
        self.written: list[tuple[float, bytes]] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append((self.loop.now_ms(), bytes(data)))
        answer = b"HTTP/1.1 200 OK\r\nServer-Timing: total;dur=1000\r\nContent-Length: 0\r\n\r\n"
        self.loop.call_later(self.takes_ms / 1e3, self.protocol.data_received, answer)

    def abort(self) -> None:
        pass

    def connects(self, server: _Server) -> None:
        self.protocol = _Connection(server)
        self.protocol.connection_made(self)


def test_what_a_request_waits_for_a_connection_is_the_senders_lateness_and_off_its_budget() -> None:
    """A limit of one connection: those behind the first wait for its answer, and the last one for too long."""
    loop = LeapingLoop()
    wire, played = Wire(loop, 1_000.0), list[PlayedRequest]()
    plan = [PlannedRequest(10.0 * number, "m", {}, 2_500.0) for number in range(4)]

    async def sent() -> None:
        async with GatewayClient("http://127.0.0.1:9", "", 2_500.0) as client:
            (server,) = client._servers.values()
            server.connections_max = 1
            wire.connects(server)
            await play(client, plan, 0.0, loop, played.append)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(sent())
    left = [
        float(found[1]) for _, data in wire.written if (found := re.search(rb'deadline_ms":([0-9.]+)', data))
    ]
    assert [at_ms for at_ms, _ in wire.written] == pytest.approx([0.0, 1_000.0, 2_000.0])
    assert left == pytest.approx([2_500.0, 1_510.0, 520.0])
    by_moment = sorted(played, key=lambda one: one.planned.at_ms)
    assert [one.late_ms for one in by_moment] == pytest.approx([0.0, 990.0, 1_980.0, 2_970.0])
    assert [one.latency_ms for one in by_moment] == pytest.approx([1_000.0, 1_990.0, 2_980.0, 2_970.0])
    assert [one.result.ledger.total_ms for one in by_moment if one.result] == pytest.approx([1_000.0] * 3)
    assert isinstance(by_moment[3].error, DeadlineExceeded)


def test_opening_a_connection_is_no_lateness_of_the_sender() -> None:
    loop = LeapingLoop()
    wire, played = Wire(loop, 100.0), list[PlayedRequest]()

    async def sent() -> None:
        async with HttpClient(HttpTarget({"m": [(9, b"a request")]})) as client:
            (server,) = client._servers.values()
            server.opening.add(loop.create_task(asyncio.sleep(0.05)))
            loop.call_later(0.05, wire.connects, server)
            await play(client, [PlannedRequest(0.0, "m", {}, 500.0)], 0.0, loop, played.append)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(sent())
    (one,) = played
    assert (one.late_ms, one.latency_ms) == pytest.approx((0.0, 150.0))


def test_who_waits_at_the_limit_is_served_where_every_answer_ends_its_connection() -> None:
    """And is late by what it waited."""
    answer = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async def run() -> None:
        served = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = served.sockets[0].getsockname()[1]
        async with served, HttpClient(HttpTarget({"m": [(port, b"GET / HTTP/1.1\r\n\r\n")]})) as client:
            (server,) = client._servers.values()
            server.connections_max = 2
            futures = [client.submit("m", {}) for _ in range(9)]
            await asyncio.gather(*futures)
            assert [future.held_ms > 0 for future in futures] == [False] * 2 + [True] * 7

    asyncio.run(run())


def test_who_waits_at_the_limit_hears_it_where_nobody_listens_any_more() -> None:
    async def run() -> None:
        async with HttpClient(HttpTarget({"m": [(1, b"GET / HTTP/1.1\r\n\r\n")]})) as client:
            (server,) = client._servers.values()
            server.connections_max = 1
            told = await asyncio.gather(*(client.submit("m", {}) for _ in range(3)), return_exceptions=True)
            assert [type(one) for one in told] == [PeerLost] * 3

    asyncio.run(run())


class Ending(Wire):
    """Answers one request, and ends so long after the next one was written."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self.written:
            self.written.append((self.loop.now_ms(), bytes(data)))
            self.loop.call_later(self.takes_ms / 1e3, self.protocol.connection_lost, None)
        else:
            takes_ms, self.takes_ms = self.takes_ms, 0.0
            super().write(data)
            self.takes_ms = takes_ms


@pytest.mark.parametrize(("idle_s", "is_asked_again"), [(2.0, True), (0.5, False)])
@pytest.mark.parametrize("ends_after_ms", [1.0, 500.0])
def test_a_request_is_asked_again_only_where_its_connection_was_idle_before_and_has_ended(
    ends_after_ms: float, idle_s: float, *, is_asked_again: bool
) -> None:
    """One that was in use ends with its server, which had the request."""
    loop = LeapingLoop()
    ending, other = Ending(loop, ends_after_ms), Wire(loop, 1.0)

    async def run() -> None:
        async with HttpClient(HttpTarget({"m": [(9, b"a request")]})) as client:
            (server,) = client._servers.values()
            ending.connects(server)
            await client.submit("m", {})
            await asyncio.sleep(idle_s)
            server.opening.add(loop.create_task(asyncio.sleep(5)))  # it takes longer than the test
            loop.call_later(1.0, other.connects, server)
            future = client.submit("m", {})
            if is_asked_again:
                await future
            else:
                with pytest.raises(PeerLost):
                    await future

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(run())
    assert (len(ending.written), len(other.written)) == (2, int(is_asked_again))


def test_what_is_pending_at_the_end_is_not_asked_again() -> None:
    loop = LeapingLoop()
    ending = Ending(loop, 500.0)

    async def run() -> None:
        async with HttpClient(HttpTarget({"m": [(9, b"a request")]})) as client:
            (server,) = client._servers.values()
            ending.connects(server)
            await client.submit("m", {})
            future = client.submit("m", {})
            ending.abort = lambda: loop.call_soon(ending.protocol.connection_lost, None)  # type: ignore[assignment, method-assign]
        assert isinstance(future.exception(), PeerLost)
        assert not server.opening

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(run())
