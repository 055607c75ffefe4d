"""Malformed requests by HTTP: for what reads them, and for a gateway's process, whose end, growth or silence would be a finding."""

from __future__ import annotations

import gzip
import json
import random
import socket
import struct
import tempfile
from collections.abc import Sequence
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
from tests.malformed.mutations import Mutations

GROWTH_MB_MAX: Final = 48.0
ROUND: Final = 2_000
"""Inputs between two questions of the friend."""
_LISTENS_S: Final = 0.01  # for an answer to what may be the beginning of a request
_INFO: Final = ModelInfo(
    ModelId("fixed"),
    5_000.0,
    (TensorInfo("x", "float32", (3,)), TensorInfo("image", "float32", (3, 8, 8))),
    image=ImagePreprocess("image", 8, 8, (0, 0, 0), (1, 1, 1)),
)


def post(path: str, body: bytes, *fields: str) -> bytes:
    """A request."""
    lines = [f"POST {path} HTTP/1.1", "Host: a", f"Content-Length: {len(body)}", *fields]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


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
    people = json.dumps({"instances": [{"x": [1, 2, 3]}, {"x": {"b64": "aGVsbG8="}}]}).encode()
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (plain[:20], plain[20:]))
    chunked = (
        b"POST /v2/models/echo/infer HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
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
        b"GET /v2/models/echo/stats HTTP/1.1\r\nHost: a\r\n\r\nGET /v2 HTTP/1.1\r\nConnection: close\r\n\r\n",
        b"HEAD /v2/health/ready HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        b"GET /v2/models/echo HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n",
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


def attack(inputs: int, draws: random.Random) -> list[str]:
    """So many inputs for a gateway's process, one connection each; what went wrong."""
    mutations = Mutations(draws, examples())
    began_ms = CLOCK.now_ms()
    findings: list[str] = []
    frontend = Served()
    try:
        with (
            tempfile.TemporaryDirectory(prefix="t-") as folder,
            gateway(Path(folder), [frontend.address]) as one,
        ):
            done, answered = 0, 0
            first_mb = 0.0
            while done < inputs:
                for _ in range(min(ROUND, inputs - done)):
                    answered += _send(one, mutations.one(), is_patient=draws.random() < 0.05)
                    done += 1
                frontend.seen.clear()
                if one.infer("echo")[0] != 200:
                    findings.append(f"HTTP: after {done} inputs a friend was not answered")
                    break
                first_mb = first_mb or rss_mb(one.process.pid)
            counters = _at_rest(one)
            grown_mb = rss_mb(one.process.pid) - first_mb
            if grown_mb > GROWTH_MB_MAX:
                findings.append(f"HTTP: memory grew by {grown_mb:.0f} MB")
            if counters["http_bytes_held"] or counters["under_way"]:
                findings.append(f"HTTP: something is kept: {counters}")
            seconds = (CLOCK.now_ms() - began_ms) / 1e3
            click.echo(
                f"{'HTTP connections':24} {done:8,} inputs {done / seconds:9,.0f}/s  answered {answered:,}"
                f"  refused {counters['http_refused']:,.0f}  memory {grown_mb:+6.1f} MB  findings {len(findings)}"
            )
    except (AssertionError, OSError) as error:
        findings.append(f"HTTP: {error!r:.2000}")
    finally:
        frontend.end()
    return findings


def _send(one: GatewayProcess, data: bytes, *, is_patient: bool) -> bool:
    """Whether anything was answered. `is_patient`: the connection stays open for a while."""
    with one.connect() as connection:
        try:
            connection.sendall(data)
            if is_patient:
                connection.settimeout(_LISTENS_S)
            else:
                connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(65_536)
        except (TimeoutError, OSError):
            return False
        finally:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        return answer.startswith(b"HTTP/1.1 ")


def _at_rest(one: GatewayProcess) -> dict[str, float]:
    """Its counters, when the connections of all that are over and what they asked is too."""
    address = f"ipc://{one.run_dir}/gateway-0.control"
    until(lambda: ask_status(address).counters["http_connections"] == 0, what="the end of all connections")
    return ask_status(address).counters
