"""Malformed requests by HTTP: for what reads them, and for a gateway's process, whose end, growth or silence would be a finding."""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import random
import socket
import struct
import tempfile
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from fabric.client import ask_status
from fabric.errors import RequestError
from fabric.ids import ModelId
from fabric.messages import ImagePreprocess, ModelInfo, TensorInfo
from roles.gateway.http.limits import BodyBudget, HttpLimits
from roles.gateway.http.messages import Head, Request
from roles.gateway.http.predict import read_predict
from roles.gateway.http.protocol_v2 import LENGTH_HEADER, read_infer
from roles.gateway.http.reader import HttpReader
from roles.gateway.http.routes import route_of
from roles.gateway.inference import rows_of
from tests.integration.gateway_stage import GatewayProcess, Served, gateway
from tests.integration.proc import CLOCK, rss_mb, until
from tests.malformed.http_attacks import INFER, Attacks, post
from tests.malformed.mutations import Mutations

GROWTH_MB_MAX: Final = 48.0
ROUND: Final = 2_000
"""Inputs between two questions of the friend."""
OPEN_MAX: Final = 64
"""Connections at once: each stays open while so many others are begun, which is what it has for its answer."""
SLOW: Final = 40
"""Connections beside them that send a byte now and then."""
REQUEST_MB: Final = 8
_SLOW_LIMIT_MS: Final = 60_000.0  # the gateway ends them after 10 s of its own time
_ANSWER_S: Final = 0.005  # and as long as the connections before it took
_SEND_LIMIT_S: Final = 10.0
_MUTANTS: Final = 0.3
_BOMBS: Final = 0.002
_HALF_CLOSED: Final = 0.2
_INFO: Final = ModelInfo(
    ModelId("fixed"),
    5_000.0,
    (TensorInfo("x", "float32", (3,)), TensorInfo("image", "float32", (3, 8, 8))),
    image=ImagePreprocess("image", 8, 8, (0, 0, 0), (1, 1, 1)),
)


def examples() -> Sequence[bytes]:
    """Good requests of every kind."""
    values = {"name": "x", "shape": [3], "datatype": "FP32", "data": [1.5, None, 3]}
    plain = json.dumps(
        {"id": "7", "inputs": [values], "parameters": {"deadline_ms": 2000, "priority": 3}}
    ).encode()
    inputs = [
        {"name": "x", "shape": [1, 3], "datatype": "FP32", "parameters": {"binary_data_size": 12}},
        {"name": "y", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 5}},
        {"name": "z", "shape": [2], "datatype": "BF16", "parameters": {"binary_data_size": 4}},
    ]
    wanted = [{"name": "x", "parameters": {"binary_data": True}}]
    head = json.dumps({"inputs": inputs, "outputs": wanted}).encode()
    binary = head + struct.pack("<3f", 1, 2, 3) + struct.pack("<I1s", 1, b"a") + bytes(4)
    people = json.dumps({"instances": [{"x": [1, 2, 3]}, {"image": {"b64": "aGVsbG8="}}]}).encode()
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (plain[:20], plain[20:]))
    chunked = (
        b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        + chunks
        + b"0\r\n\r\n"
    )
    return [
        post("/v2/models/echo/infer", plain),
        post("/v2/models/fixed/versions/1/infer", binary, f"Inference-Header-Content-Length: {len(head)}"),
        post(
            "/v2/models/echo/infer", gzip.compress(plain), "Content-Encoding: gzip", "Accept-Encoding: gzip"
        ),
        chunked,
        post("/v1/models/echo:predict?deadline_ms=2000&priority=1", people, "Content-Type: application/json"),
        post(
            "/v1/models/pictures:predict",
            b"\x89PNG\r\n\x1a\n",
            "Content-Type: image/png",
            "Expect: 100-continue",
        ),
        post("/v2/repository/index", b'{"ready": true}'),
        post("/v2/repository/models/echo/load", b'{"parameters": {"config": "{}"}}'),
        b"GET /v2/models/echo/stats HTTP/1.1\r\nHost: localhost\r\n\r\nGET /v2 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        b"HEAD /v2/health/ready HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        b"GET /v2/models/echo HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n",
    ]


def read(data: bytes) -> object:
    """As far as a request comes before a frontend is asked. Raises RequestError."""
    limits = HttpLimits()
    reader = HttpReader(limits, BodyBudget(limits.bodies_bytes_max), route_of_any, 0.0)
    return [_inference(event) for event in reader.feed(data, 0.0) if isinstance(event, Request)]


def route_of_any(head: Head) -> None:
    """What screens a head. Raises RequestError."""
    route_of(head)


def _inference(request: Request) -> object:
    route = route_of(request.head)
    headers = request.head.headers
    if route.name == "predict":
        content_type = headers.get("content-type", "")
        return read_predict(route.model, request.body, content_type, request.head.query, _INFO)
    inference = read_infer(route.model, request.body, headers.get(LENGTH_HEADER))
    return rows_of(_INFO, inference.inputs)


ERRORS: Final = (RequestError,)


@dataclass
class _Open:
    """A connection that lives while the next ones are begun. `half_closed`: nothing more comes, and it says so."""

    socket: socket.socket
    sent: bytes
    rest: deque[bytes]
    half_closed: bool


class Attack:
    """Many connections to one gateway, the oldest of which is looked at and ended when there are too many."""

    def __init__(self, one: GatewayProcess, draws: random.Random) -> None:
        self._one = one
        self._draws = draws
        self._mutations = Mutations(draws, examples())
        self._attacks = Attacks(draws)
        self._open: deque[_Open] = deque()
        self._slow: list[tuple[socket.socket, float]] = []
        self.answered: Counter[str] = Counter()
        """By what the first answer's status is; "-": none came."""
        self.findings: list[str] = []

    def send(self) -> None:
        """One more input."""
        draws, chance = self._draws, self._draws.random()
        if chance < _MUTANTS:
            pieces: Sequence[bytes] = [self._mutations.one()]
        elif chance < 1 - _BOMBS:
            pieces = self._attacks.one()
        else:
            pieces = self._attacks.bomb()
        one = _Open(self._one.connect(), b"".join(pieces), deque(pieces), draws.random() < _HALF_CLOSED)
        self._open.append(one)
        self._push(one)
        while len(self._open) >= OPEN_MAX:
            self._look(self._open.popleft())

    def end(self) -> None:
        """Of all connections but the slow ones."""
        while self._open:
            self._look(self._open.popleft())

    def drip(self, now_ms: float) -> None:
        """Slow-loris: connections that send a byte now and then, each of which has to be ended by the gateway."""
        still = []
        for connection, began_at_ms in self._slow:
            try:
                connection.send(b"x")
                still.append((connection, began_at_ms))
                if now_ms - began_at_ms > _SLOW_LIMIT_MS:
                    self.findings.append(
                        f"HTTP: one that sends a byte now and then was kept for {now_ms - began_at_ms:.0f} ms"
                    )
                    still.pop()
            except OSError:
                self.answered["slow ones ended"] += 1
                connection.close()
        heads = (
            b"GET /v2?",
            b"POST /v2/models/fixed/infer HTTP/1.1\r\nHost: localhost\r\nX: ",
            post(INFER, b"", length="5000000"),
        )
        while len(still) < SLOW:
            connection = self._one.connect()
            connection.sendall(self._draws.choice(heads))
            connection.setblocking(False)
            still.append((connection, now_ms))
        self._slow = still

    def end_slow(self) -> None:
        """Of those too."""
        for connection, _ in self._slow:
            connection.close()

    def _push(self, one: _Open) -> None:
        """Its next piece."""
        with contextlib.suppress(OSError):  # it may have been refused by now
            one.socket.settimeout(_SEND_LIMIT_S)
            one.socket.sendall(one.rest.popleft())
            if one.half_closed and not one.rest:
                one.socket.shutdown(socket.SHUT_WR)

    def _look(self, one: _Open) -> None:
        if one.rest:
            self._push(one)
            self._open.append(one)
            return
        answer = b""
        with contextlib.suppress(OSError):
            one.socket.settimeout(_ANSWER_S)
            answer = one.socket.recv(65_536)
        with one.socket:
            one.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        status = answer[9:12].decode("latin-1") if answer.startswith(b"HTTP/1.1 ") else "-"
        self.answered[status] += 1
        if status == "500" or (answer and status == "-"):
            sent = base64.b64encode(one.sent[:3_000]).decode()
            self.findings.append(f"HTTP: {answer[:300]!r} by {sent}")


def attack(inputs: int, draws: random.Random) -> list[str]:
    """So many inputs for a gateway's process, one connection each; what went wrong."""
    began_ms = CLOCK.now_ms()
    findings: list[str] = []
    frontend = Served()
    document = {"cluster": {"gpus": 1, "gateway": {"request_mb": REQUEST_MB}}}
    try:
        with (
            tempfile.TemporaryDirectory(prefix="t-") as folder,
            gateway(Path(folder), [frontend.address], document) as one,
        ):
            run = Attack(one, draws)
            done, first_mb, longest_ms = 0, 0.0, 0.0
            while done < inputs:
                for _ in range(min(ROUND, inputs - done)):
                    run.send()
                    done += 1
                run.drip(CLOCK.now_ms())
                frontend.seen.clear()
                asked_at_ms = CLOCK.now_ms()
                if one.infer("echo")[0] != 200:
                    findings.append(f"HTTP: after {done} inputs a friend was not answered")
                    break
                longest_ms = max(longest_ms, CLOCK.now_ms() - asked_at_ms)
                if done >= inputs / 10:
                    first_mb = first_mb or rss_mb(one.process.pid)
            run.end()
            run.end_slow()
            findings += run.findings
            counters = _at_rest(one)
            grown_mb = rss_mb(one.process.pid) - first_mb
            if grown_mb > GROWTH_MB_MAX:
                findings.append(f"HTTP: memory grew by {grown_mb:.0f} MB")
            if counters["http_bytes_held"] or counters["under_way"]:
                findings.append(f"HTTP: something is kept: {counters}")
            seconds = (CLOCK.now_ms() - began_ms) / 1e3
            told = ", ".join(f"{status}: {count:,}" for status, count in sorted(run.answered.items()))
            click.echo(
                f"{'HTTP connections':24} {done:8,} inputs {done / seconds:9,.0f}/s  answered {told}; a friend within {longest_ms:.0f} ms"
                f"  refused {counters['http_refused']:,.0f}  memory {grown_mb:+6.1f} MB  findings {len(findings)}"
            )
    except (AssertionError, OSError) as error:
        findings.append(f"HTTP: {error!r:.2000}")
    finally:
        frontend.end()
    return findings


def _at_rest(one: GatewayProcess) -> dict[str, float]:
    """Its counters, when the connections of all that are over and what they asked is too."""
    address = f"ipc://{one.run_dir}/gateway-0.control"
    until(lambda: ask_status(address).counters["http_connections"] == 0, what="the end of all connections")
    return ask_status(address).counters
