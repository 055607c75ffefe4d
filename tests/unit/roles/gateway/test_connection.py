"""One HTTP connection on a transport that is none, in virtual time: a client that reads its answers when the test says so."""

from __future__ import annotations

import asyncio

import pytest

from roles.gateway.http.connection import LOOK_EVERY_S, Answer, Cancellable, HttpConnection, HttpServer
from roles.gateway.http.limits import HttpLimits
from roles.gateway.http.messages import Head, Reply, Request

LIMITS = HttpLimits()


class Wire(asyncio.Transport):
    """Of a client. `is_slow`: it does not read what comes from now on, so that the connection is told to pause."""

    def __init__(self) -> None:
        super().__init__()
        self.connection: HttpConnection | None = None
        self.out = b""
        self.is_slow = self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.out += data
        if self.is_slow and self.connection is not None:
            self.connection.pause_writing()

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass


class Stand:
    """Answers every path at once but `/later`, whose answers it keeps."""

    def __init__(self) -> None:
        self.now_ms_ = 0.0
        self.later: list[Answer] = []
        self.reply = Reply(200, (b"0123456789",))
        self.server = HttpServer(self, LIMITS, self)

    def now_ms(self) -> float:
        return self.now_ms_

    def screen(self, head: Head) -> None:
        pass

    def start(self, request: Request, answer: Answer) -> Cancellable | None:
        if request.head.path == "/later":
            self.later.append(answer)
        else:
            answer(self.reply)
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


def get(path: str) -> bytes:
    return f"GET /{path} HTTP/1.1\r\n\r\n".encode()


def statuses(wire: Wire) -> list[bytes]:
    return [part[:3] for part in wire.out.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize("between", [b"", get("between")], ids=["half a request", "a whole one and a half"])
@pytest.mark.parametrize("first", ["later", "now"])
@pytest.mark.parametrize("part", [get("last")[:8], b"POST /last HTTP/1.1\r\nContent-Length: 9\r\n\r\nabc"])
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
