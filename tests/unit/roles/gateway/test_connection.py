"""One HTTP connection on a transport that is none, in virtual time: a client that reads its answers when the test says so."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roles.gateway.failures import Failure, NotFound
from roles.gateway.http.connection import LOOK_EVERY_S, WAITING_BYTES_MAX, HttpConnection, HttpServer
from roles.gateway.http.limits import HttpLimits
from roles.gateway.http.messages import Answer, Cancellable, Head, Reply, Request
from tests.unit.roles.gateway.doors import Doors, StandIn, at_doors, model

LARGE = 100_000
LIMITS = HttpLimits(bodies_bytes_max=2 * LARGE + LARGE // 2)
PIECE = 1 << 20
"""Of an answer, compressed at a time."""
GZIP = "Accept-Encoding: gzip\r\n"


class Wire(asyncio.Transport):
    """Of a client. `is_slow`: it does not read what comes from now on, so that the connection is told to pause."""

    def __init__(self) -> None:
        super().__init__()
        self.connection: HttpConnection | None = None
        self.out = b""
        self.is_slow = self.is_closed = self.is_paused = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.out += data
        if self.is_slow and self.connection is not None:
            self.connection.pause_writing()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass


class Stand:
    """Answers at once, `/large` with a large body, of which two and a half have room, but `/later`: its answers are kept; `/refused` it refuses."""

    def __init__(self, large: int = LARGE) -> None:
        self.now_ms_ = 0.0
        self.later: list[Answer] = []
        self.reply = Reply(200, (b"0123456789",))
        self.defect: Exception | None = None
        """Raised for the path `/defect`, while its head is read."""
        self.told: list[tuple[str, str]] = []
        """Paths that were refused, and why."""
        self.large = large
        self.server = HttpServer(self, replace(LIMITS, bodies_bytes_max=large * 5 // 2), self)

    def now_ms(self) -> float:
        return self.now_ms_

    def screen(self, head: Head) -> None:
        if self.defect is not None and head.path == "/defect":
            raise self.defect
        if head.path == "/refused":
            raise NotFound("there is no such path")

    def refused(self, head: Head, failure: Failure) -> None:
        self.told.append((head.path, failure.code))

    def start(self, request: Request, answer: Answer) -> Cancellable | None:
        if request.head.path == "/later":
            self.later.append(answer)
        else:
            answer(Reply(200, (bytes(self.large),)) if request.head.path == "/large" else self.reply)
        return None

    def connected(self) -> tuple[HttpConnection, Wire]:
        wire = Wire()
        wire.connection = connection = self.server.connection()
        connection.connection_made(wire)
        return connection, wire

    def wait(self, for_s: float) -> None:
        for _ in range(round(for_s / LOOK_EVERY_S)):
            self.now_ms_ += LOOK_EVERY_S * 1e3
            for connection in list(self.server.connections):
                connection.tick(self.now_ms_)


def get(path: str, head: str = "", method: str = "GET") -> bytes:
    return f"{method} /{path} HTTP/1.1\r\nHost: a\r\n{head}\r\n".encode()


def statuses(wire: Wire) -> list[bytes]:
    return [part[:3] for part in wire.out.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize("between", [b"", get("between")], ids=["half a request", "a whole one and a half"])
@pytest.mark.parametrize("first", ["later", "now"])
@pytest.mark.parametrize(
    "part", [get("last")[:8], b"POST /last HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nabc"]
)
def test_what_waits_behind_an_answer_that_is_not_out_yet_is_not_too_slow(
    first: str, between: bytes, part: bytes
) -> None:
    """Also where it was begun meanwhile. Once the answer is out, its time counts."""
    stand = Stand()
    connection, wire = stand.connected()
    wire.is_slow = first == "now"
    connection.data_received(get(first))
    stand.wait(5)
    connection.data_received(between + part)
    stand.wait(15)
    wire.is_slow = False
    for answer in stand.later:
        answer(stand.reply)
    connection.resume_writing()
    before = [b"200"] * (2 if between else 1)
    stand.wait(9.5)
    assert statuses(wire) == before
    stand.wait(1)
    assert statuses(wire) == [*before, b"408"]


@pytest.mark.parametrize(
    ("part", "limit_s", "end"),
    [
        (b"", 10, b"408"),
        (get("last")[:8], 10, b"408"),
        (b"POST /last HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nabc", 10, b"408"),
        (get("large"), 36, b"closed"),
        (get("now"), 75, b"closed"),
    ],
)
def test_a_pause_of_our_own_is_held_against_nobody(part: bytes, limit_s: float, end: bytes) -> None:
    """The process was stopped, say, or its host was: what came meanwhile is read after the look that was due."""
    stand = Stand()

    async def run() -> None:
        connection, wire = stand.connected()
        stand.server.watch()
        wire.is_slow = part == get("large")
        connection.data_received(part)
        before = statuses(wire)

        def wait(for_s: float, looks: int) -> None:
            for _ in range(looks):
                stand.now_ms_ += 1e3 * for_s / looks
                stand.server.watch()

        def is_over() -> bool:
            return wire.is_closed or statuses(wire)[len(before) :] == [b"408"]

        wait(limit_s / 2, round(limit_s / 2 / LOOK_EVERY_S))
        wait(600, 1)
        wait(limit_s / 2 - 2, round(limit_s / 2 / LOOK_EVERY_S))
        assert not is_over()
        wait(4, round(4 / LOOK_EVERY_S))
        assert is_over()
        assert wire.is_closed or end == b"408"
        stand.server.close()

    asyncio.run(run())


CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("first", ["large", "later", "small"])
def test_who_waits_to_be_told_to_go_on_is_told_so_behind_the_answer_before(
    first: str, *, together: bool
) -> None:
    """Not within it. Once its body is here that is told nobody."""
    stand = Stand()
    connection, wire = stand.connected()
    wire.is_slow = True
    head, body = get("small", "Expect: 100-continue\r\nContent-Length: 3\r\n", "POST"), b"abc"
    if together:
        connection.data_received(get(first) + head)
    else:
        connection.data_received(get(first))
        connection.data_received(head)
    for answer in stand.later:
        answer(stand.reply)
    assert CONTINUE not in wire.out
    wire.is_slow = False
    connection.resume_writing()
    assert wire.out.endswith((bytes(10) if first == "large" else b"0123456789") + CONTINUE)
    connection.data_received(body)
    assert statuses(wire) == [b"200", b"100", b"200"]
    wire.is_slow = True
    connection.data_received(get(first))
    for answer in stand.later[1:]:
        answer(stand.reply)
    connection.data_received(head + body)
    wire.is_slow = False
    connection.resume_writing()
    assert statuses(wire) == [b"200", b"100", b"200", b"200", b"200"]


def test_who_waits_to_be_told_to_go_on_is_told_so_at_once_where_nothing_is_before() -> None:
    connection, wire = Stand().connected()
    connection.data_received(get("small", "Expect: 100-continue\r\nContent-Length: 3\r\n", "POST"))
    assert wire.out == CONTINUE


@pytest.mark.parametrize("head", ["", "Connection: close\r\n"])
@pytest.mark.parametrize("end", ["it reads on", "it is gone"])
def test_an_answer_that_is_not_read_has_its_bytes_of_the_budget_until_it_is(head: str, end: str) -> None:
    stand = Stand()
    connection, wire = stand.connected()
    wire.is_slow = True
    connection.data_received(get("large", head))
    assert stand.server.budget.used == LARGE
    if end == "it reads on":
        wire.is_slow = False
        connection.resume_writing()
        assert stand.server.budget.used == 0
    connection.connection_lost(None)
    assert stand.server.budget.used == 0


@pytest.mark.parametrize("request_", [get("large"), get("large", method="HEAD"), get("small")])
@pytest.mark.parametrize("is_slow", [False, True])
def test_what_is_read_at_once_and_what_is_small_is_held_against_nobody(
    request_: bytes, *, is_slow: bool
) -> None:
    stand = Stand()
    connection, wire = stand.connected()
    wire.is_slow = is_slow
    connection.data_received(request_)
    assert statuses(wire) == [b"200"]
    assert stand.server.budget.used == (LARGE if is_slow and request_ == get("large") else 0)


def test_a_large_answer_that_there_is_no_room_for_is_overloaded_and_small_ones_go_on() -> None:
    stand = Stand()
    slow = []
    for _ in range(2):
        connection, wire = stand.connected()
        wire.is_slow = True
        connection.data_received(get("large"))
        slow.append((connection, wire))
    connection, wire = stand.connected()
    connection.data_received(get("large") + get("small"))
    assert statuses(wire) == [b"503", b"200"]
    assert b'"code":"Overloaded"' in wire.out
    assert stand.server.budget.used == 2 * LARGE
    slow[0][1].is_slow = False
    slow[0][0].resume_writing()
    connection.data_received(get("large"))
    assert statuses(wire) == [b"503", b"200", b"200"]


@pytest.mark.parametrize("why", ["we end", "it closes its sending side"])
def test_an_answer_that_is_on_its_way_goes_out_before_the_connection_ends(why: str) -> None:
    stand = Stand()
    connection, wire = stand.connected()
    wire.is_slow = True
    connection.data_received(get("large"))
    assert len(wire.out) < LARGE
    if why == "we end":
        stand.server.drain()
    else:
        assert connection.eof_received()
    assert not wire.is_closed
    wire.is_slow = False
    connection.resume_writing()
    assert len(wire.out) > LARGE
    assert wire.is_closed


def test_what_our_reading_fails_on_ends_that_connection_only_and_is_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stand = Stand()
    stand.defect = ZeroDivisionError("ours")
    other, other_wire = stand.connected()
    for _ in range(3):
        connection, wire = stand.connected()
        connection.data_received(get("defect") + get("small"))
        assert statuses(wire) == [b"400"]
        assert b"ours" not in wire.out
        connection.connection_lost(None)
    other.data_received(get("small"))
    assert statuses(other_wire) == [b"200"]
    assert (stand.server.defects, stand.server.refused) == (3, 3)
    (line,) = caplog.records
    assert line.exc_info is not None
    assert line.exc_info[1] is stand.defect


@pytest.mark.parametrize("path", ["small", "later"])
def test_small_requests_in_one_piece_are_answered(path: str) -> None:
    """More of them where each is answered at once; else one is, and the others wait."""
    count = LIMITS.at_once_max if path == "small" else LIMITS.pipelined_max + 1
    stand = Stand()
    connection, wire = stand.connected()
    connection.data_received(get(path) * count)
    for at in range(count):
        if path == "later":
            stand.later[at](stand.reply)
    assert statuses(wire) == [b"200"] * count
    assert not wire.is_closed
    assert stand.server.refused == 0


@pytest.mark.parametrize("what", ["live", "ready"])
def test_as_many_may_ask_in_one_piece_how_it_is(what: str, tmp_path: Path) -> None:
    async def test(doors: Doors) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", doors.port)
        last = get(f"v2/health/{what}", "Connection: close\r\n")
        writer.write(get(f"v2/health/{what}") * (LIMITS.at_once_max - 1) + last)
        assert (await reader.read()).count(b"HTTP/1.1 200 ") == LIMITS.at_once_max
        writer.close()

    at_doors(tmp_path, StandIn(model()), test)


def test_health_is_told_in_json_as_well_as_by_the_status(tmp_path: Path) -> None:
    """KServe's client reads the body of the server's, and the status of a model's; Triton's reads the status of both."""

    async def test(doors: Doors) -> None:
        live, ready = {"live": True}, {"live": True, "ready": True}
        assert await doors.http_get("/v2/health/live") == (200, live)
        assert await doors.http_get("/v2/health/ready") == (200, ready)
        assert await doors.http_get("/v2/models/m/ready") == (200, {"name": "m", "ready": True})
        for path, code in (("models/idle/ready", "NoReplica"), ("models/nix/ready", "ModelNotFound")):
            status, told = await doors.http_get(f"/v2/{path}")
            assert (status, told["code"]) == ({"NoReplica": 503, "ModelNotFound": 404}[code], code)
        for body in (b'{"parameters": null}', b'{"parameters": {}}'):
            told = (await doors.http_post("/v2/repository/models/m/load", body))[1]
            assert "model_control" in told["error"]
        doors.service.is_draining = True
        status, told = await doors.http_get("/v2/health/ready")
        assert (status, told["code"]) == (503, "NoReplica")
        assert await doors.http_get("/v2/health/live") == (200, live)

    at_doors(tmp_path, StandIn(model(), model("idle", replicas=0)), test)


def test_of_more_the_last_answer_says_so_where_they_are_answered_at_once() -> None:
    stand = Stand()
    connection, wire = stand.connected()
    connection.data_received(get("small") * 1_000)
    assert statuses(wire) == [b"200"] * LIMITS.at_once_max + [b"503"]
    connection.data_received(get("small"))
    assert len(statuses(wire)) == LIMITS.at_once_max + 1
    stand.wait(LIMITS.linger_ms / 1e3 + 1)
    assert wire.is_closed


def test_over_the_bound_the_last_answer_says_so_behind_those_that_wait() -> None:
    stand = Stand()
    connection, wire = stand.connected()
    one = get("later", "Content-Length: 3\r\n", "POST") + b"abc"
    connection.data_received(one * (LIMITS.pipelined_max + 50) + one[:-1])
    assert stand.server.budget.used == 3 * (LIMITS.pipelined_max + 1)
    connection.data_received(one * 50)
    assert stand.server.budget.used == 3 * (LIMITS.pipelined_max + 1), "nothing more is read"
    assert statuses(wire) == []
    for at in range(LIMITS.pipelined_max + 1):
        stand.later[at](stand.reply)
    assert statuses(wire) == [b"200"] * (LIMITS.pipelined_max + 1) + [b"503"]
    assert b'"code":"Overloaded"' in wire.out
    assert wire.out.count(b"Connection: close") == 1
    assert stand.server.budget.used == 0
    assert len(stand.later) == LIMITS.pipelined_max + 1
    assert stand.server.refused == 1
    assert stand.told == [("/later", "Overloaded")] * 49, "whole requests, each refused by that answer"


def test_a_client_is_heard_to_go_while_requests_of_its_wait_behind_one_another() -> None:
    """Its connection is read until no more may wait, and again once there is room."""
    stand = Stand()
    connection, wire = stand.connected()
    paused = []
    for _ in range(LIMITS.pipelined_max + 1):
        connection.data_received(get("later"))
        paused.append(wire.is_paused)
    assert paused == [False] * LIMITS.pipelined_max + [True]
    stand.later[0](stand.reply)
    paused = [wire.is_paused]
    connection.data_received(get("later"))
    assert [*paused, wire.is_paused] == [False, True]
    assert stand.server.refused == 0


def test_behind_large_bodies_that_wait_nothing_more_is_read() -> None:
    """Else one connection could take the room of all others."""
    stand = Stand()
    connection, wire = stand.connected()
    size = WAITING_BYTES_MAX // 2
    one = get("later", f"Content-Length: {size}\r\n", "POST") + bytes(size)
    paused = []
    for _ in range(3):
        connection.data_received(one)
        paused.append(wire.is_paused)
    assert paused == [False, False, True]
    stand.later[0](stand.reply)
    assert not wire.is_paused


@pytest.mark.parametrize("head", ["", "Connection: close\r\n"])
def test_behind_a_last_refusal_that_waits_nothing_more_is_read(head: str) -> None:
    """It would be thrown away, as fast as it comes, for as long as the answer before is awaited."""
    stand = Stand()
    connection, wire = stand.connected()
    connection.data_received(get("later", head) + b"this is not HTTP\r\n\r\n")
    assert wire.is_paused
    stand.later[0](stand.reply)
    assert statuses(wire) == ([b"200"] if head else [b"200", b"400"])
    assert wire.is_closed or not wire.is_paused, "what comes then is thrown away for a while"


class Threads(Executor):
    """They begin and end what they are given when the test says so."""

    def __init__(self) -> None:
        self.works: list[Future[Any]] = []
        self.calls: list[Callable[[], Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.works.append(Future())
        self.calls.append(partial(fn, *args, **kwargs))
        return self.works[-1]

    def begin(self, at: int) -> None:
        self.works[at].set_running_or_notify_cancel()

    def end(self, at: int) -> None:
        self.works[at].set_result(self.calls[at]())


async def until_told() -> None:
    """What a thread has ended comes to the loop as a callback."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


def compressing() -> tuple[Stand, Threads]:
    """Its large answers are of two pieces: smaller ones are compressed also where there is no room."""
    stand, threads = Stand(2 * PIECE), Threads()
    stand.server.compressor._threads = threads  # type: ignore[assignment]
    return stand, threads


def test_an_answer_that_waits_to_be_compressed_has_its_bytes_of_the_budget_until_it_is() -> None:
    async def run() -> None:
        stand, threads = compressing()
        wires = []
        for _ in range(3):
            connection, wire = stand.connected()
            connection.data_received(get("large", GZIP))
            wires.append(wire)
        assert [statuses(wire) for wire in wires] == [[], [], [b"503"]]
        assert stand.server.budget.used == 2 * stand.large
        threads.begin(0)
        threads.end(0)
        await until_told()
        assert statuses(wires[0]) == [b"200"]
        assert stand.server.budget.used == stand.large, "compressed, it is small"

    asyncio.run(run())


@pytest.mark.parametrize("head", ["", GZIP])
def test_a_request_makes_room_for_its_own_answer(head: str) -> None:
    async def run() -> None:
        stand, threads = compressing()
        others = stand.large * 3 // 2
        stand.server.budget.take(others)
        connection, wire = stand.connected()
        body = bytes(stand.large)
        connection.data_received(get("large", f"{head}Content-Length: {len(body)}\r\n", "POST") + body)
        for at in range(len(threads.works)):
            assert stand.server.budget.used == others + stand.large
            threads.begin(at)
            threads.end(at)
        await until_told()
        assert statuses(wire) == [b"200"]
        assert stand.server.budget.used == others

    asyncio.run(run())


def test_an_answer_of_one_piece_is_compressed_also_where_there_is_no_room() -> None:
    """Such as the page of metrics, which is asked for most of all then."""

    async def run() -> None:
        stand, threads = compressing()
        stand.server.budget.take(stand.server.limits.bodies_bytes_max)
        for size, status in ((PIECE + 1, b"503"), (PIECE, b"200")):
            connection, wire = stand.connected()
            connection.data_received(get("later", GZIP))
            stand.later.pop()(Reply(200, (bytes(size),)))
            for at in range(len(threads.works)):
                threads.begin(at)
                threads.end(at)
            await until_told()
            assert statuses(wire) == [status]
            assert stand.server.budget.used == stand.server.limits.bodies_bytes_max
        assert b"Content-Encoding: gzip" in wire.out

    asyncio.run(run())


def test_without_room_one_answer_at_a_time_is_compressed() -> None:
    """Else there could be one for each connection, of which no budget knows."""

    async def run() -> None:
        stand, threads = compressing()
        stand.server.budget.take(stand.server.limits.bodies_bytes_max)
        wires = []
        for _ in range(2):
            connection, wire = stand.connected()
            connection.data_received(get("later", GZIP))
            stand.later.pop()(Reply(200, (bytes(PIECE),)))
            wires.append(wire)
        assert [statuses(wire) for wire in wires] == [[], [b"503"]]
        threads.begin(0)
        threads.end(0)
        await until_told()
        assert statuses(wires[0]) == [b"200"]

    asyncio.run(run())


def test_an_answer_whose_client_has_gone_is_let_go_of_and_not_compressed_any_more() -> None:
    """One that has a thread keeps its bytes until the thread has heard of it. The pool keeps what was to be done in any case."""

    async def run() -> None:
        stand, threads = compressing()
        bodies = []
        for at in range(2):
            connection, wire = stand.connected()
            connection.data_received(get("later", GZIP))
            body = np.zeros(stand.large, np.uint8)
            bodies.append(weakref.ref(body))
            stand.later.pop()(Reply(200, (body.data,)))
            del body
            if at == 0:
                threads.begin(0)
            lost(wire)
        await until_told()
        assert [work.cancelled() for work in threads.works] == [False, True]
        assert [body() is None for body in bodies] == [True, True]
        assert stand.server.budget.used == stand.large
        threads.end(0)
        await until_told()
        assert stand.server.budget.used == 0

    asyncio.run(run())


@pytest.mark.parametrize("why", ["its client goes", "the gateway ends"])
def test_an_answer_that_is_being_compressed_is_given_up_after_the_piece_that_it_is_at(why: str) -> None:
    """The process ends when its threads have."""

    async def run() -> None:
        stand, threads = compressing()
        connection, wire = stand.connected()
        taken = []

        class Parts(list[bytes]):
            """Of an answer. In the middle of the first one it is given up."""

            def __iter__(self) -> Iterator[bytes]:
                for part in super().__iter__():
                    if threads.works and threads.works[0].running():
                        taken.append(part)
                    yield part
                    if len(taken) == 1:
                        give_up()

        def give_up() -> None:
            if why == "its client goes":
                lost(wire)
            else:
                stand.server.close()

        connection.data_received(get("later", GZIP))
        stand.later.pop()(Reply(200, Parts([bytes(PIECE)] * 3)))
        threads.begin(0)
        threads.end(0)
        await until_told()
        assert len(taken) == 2, "the second one is not compressed any more"
        assert (statuses(wire), stand.server.budget.used) == ([], 0)

    asyncio.run(run())


def test_the_end_does_not_wait_for_answers_that_have_no_thread_yet() -> None:
    async def run() -> None:
        may_end = threading.Event()
        stand = Stand()
        threads = stand.server.compressor._threads
        for _ in range(threads._max_workers):
            threads.submit(may_end.wait, 60)
        connection, _ = stand.connected()
        connection.data_received(get("large", GZIP))
        stand.server.close()
        assert threads._work_queue.qsize() == 0 or threads._work_queue.get_nowait() is None
        await until_told()
        assert stand.server.budget.used == 0
        may_end.set()

    asyncio.run(run())


def test_what_comes_behind_a_last_answer_holds_nothing() -> None:
    stand = Stand()
    connection, wire = stand.connected()
    last = get("small", "Connection: close\r\n")
    connection.data_received(last + (get("small", "Content-Length: 3\r\n", "POST") + b"abc") * 50)
    assert statuses(wire) == [b"200"]
    assert wire.is_closed
    assert stand.server.budget.used == 0


@pytest.mark.parametrize("path", ["small", "refused", "large"])
def test_who_sends_on_and_on_and_reads_nothing_is_bounded_and_ended(path: str) -> None:
    stand = Stand()
    connection, wire = stand.connected()
    wire.is_slow = True
    for _ in range(10):
        connection.data_received(get(path) * 500)
    assert len(statuses(wire)) == 1
    assert len(connection._waiting) == LIMITS.pipelined_max + 1
    stand.wait((LIMITS.answer_ms + LARGE / LIMITS.bytes_per_s_min * 1e3) / 1e3 + 1)
    assert wire.is_closed


def test_empty_lines_keep_a_connection_neither_longer_nor_shorter_than_an_idle_one() -> None:
    stand = Stand()
    connection, wire = stand.connected()
    connection.data_received(get("small"))
    for _ in range(7):
        stand.wait(10)
        connection.data_received(b"\r\n")
        assert not wire.is_closed
    stand.wait(6)
    assert wire.is_closed
    assert statuses(wire) == [b"200"]


def lost(*wires: Wire) -> None:
    """As the loop says it of a transport that is closed."""
    for wire in wires:
        assert wire.connection is not None
        wire.connection.connection_lost(None)


def test_clients_that_are_refused_and_do_not_go_keep_nobody_out_and_are_bounded() -> None:
    stand = Stand()
    stand.server.limits = replace(LIMITS, connections_max=4)
    served = [stand.connected()[1] for _ in range(4)]
    refused = [stand.connected()[1] for _ in range(6)]
    assert [statuses(wire) for wire in refused] == [[b"503"]] * 6
    assert [wire.is_closed for wire in refused] == [False] * 4 + [True] * 2, "no more linger than are served"
    lost(*refused[4:], *served)
    for _ in range(4):
        connection, wire = stand.connected()
        connection.data_received(get("small"))
        assert statuses(wire) == [b"200"]
    stand.wait(2)
    assert all(wire.is_closed for wire in refused)
    lost(*refused[:4])
    assert (stand.server.served, stand.server.lingering) == (4, 0)
