"""A gateway as a target: what is sent is read by the gateway's own reader, what is answered by ours."""

from __future__ import annotations

import json
import multiprocessing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fabric.client import InferResult
from fabric.errors import ConfigError
from fabric.ids import SliceId
from fabric.link import Tensor
from fabric.messages import Ledger
from roles.benchmark.gateway_target import (
    GATEWAY_SCHEMES,
    GatewayClient,
    GatewayError,
    check_target,
    gateway_address,
    gateway_client,
    ledger_of,
)
from roles.benchmark.http_connections import HttpAnswer
from roles.benchmark.share import STAGES
from roles.gateway.http.limits import BodyBudget, HttpLimits
from roles.gateway.http.messages import Request
from roles.gateway.http.protocol_v2 import LENGTH_HEADER, read_infer
from roles.gateway.http.reader import HttpReader
from roles.gateway.timing import server_timing


@pytest.mark.parametrize("priority", [None, 0, 3, 9])
def test_a_request_is_what_a_gateway_reads(priority: int | None) -> None:
    inputs: dict[str, Tensor] = {
        "x": np.arange(6, dtype=np.float32).reshape(2, 3),
        "y": np.array([7], np.int64),
    }
    client = GatewayClient("http://127.0.0.1:8000", "a-token-of-some-length")
    port, written = client.written("a model/1", inputs, 24.5, priority)
    assert written(24.5) is None, "there is nothing left of its budget"
    raw = written(4.25)
    assert raw is not None
    reader = HttpReader(HttpLimits(), BodyBudget(1 << 20), lambda head: None, 0.0)
    (request,) = reader.feed(raw, 0.0)
    assert isinstance(request, Request)
    assert (port, request.head.path) == (8000, "/v2/models/a%20model%2F1/infer")
    assert request.head.headers["authorization"] == "Bearer a-token-of-some-length"
    inference = read_infer("m", request.body, request.head.headers[LENGTH_HEADER])
    assert (inference.budget_ms, inference.priority) == (20.25, priority)
    for one, (name, array) in zip(inference.inputs, inputs.items(), strict=True):
        assert one.name == name
        np.testing.assert_array_equal(one.data, array)


stage = st.floats(0, 1e4).map(lambda value: round(value, 3))


@given(st.lists(stage, min_size=8, max_size=8), st.integers(1, 512), st.floats(0, 1e3))
def test_the_ledger_comes_back_with_what_http_took(stages: list[float], size: int, beyond_ms: float) -> None:
    total_ms = sum(stages)
    named = dict(zip(STAGES, stages, strict=True))
    sent = replace(
        Ledger(total_ms=total_ms, batch_size=size, slice_id=SliceId("a-b/gpu0/1"), reason="frontrun"), **named
    )
    found = ledger_of(server_timing([sent]), total_ms + beyond_ms)
    assert (found.batch_size, found.slice_id, found.reason) == (size, "a-b/gpu0/1", "frontrun")
    assert found.gpu_ms == pytest.approx(sent.gpu_ms, abs=1e-3)
    assert found.network_ms == pytest.approx(sent.network_ms + beyond_ms, abs=5e-3)


def test_an_answer_without_a_ledger_has_none() -> None:
    assert ledger_of("", 5.0) == Ledger(total_ms=5.0)


def test_what_went_wrong_has_the_gateways_code() -> None:
    client = GatewayClient("http://127.0.0.1:8000")
    body = json.dumps({"error": "too much", "code": "Overloaded", "retryable": True}).encode()
    error = client.read(HttpAnswer(503, {}, body), "m", 1.0)
    assert isinstance(error, GatewayError)
    assert (error.code, error.reason) == ("Overloaded", "too much")
    for body in (b"", b"nonsense", b"[]"):
        error = client.read(HttpAnswer(502, {}, body), "m", 1.0)
        assert isinstance(error, GatewayError)
        assert error.code == "HTTP502"
    assert isinstance(client.read(HttpAnswer(200, {}, b"{}"), "m", 1.0), InferResult)


def test_an_error_of_a_sender_is_the_same_in_the_commands_process() -> None:
    here, there = multiprocessing.Pipe()
    there.send(GatewayError("Unauthorised", "give a token"))
    told = here.recv()
    assert isinstance(told, GatewayError)
    assert (told.code, told.reason) == ("Unauthorised", "give a token")


@pytest.mark.parametrize(
    "rest",
    [
        *("", "[::1", "::1", "[]", "[::1]x", "a b:1", " a:1", "a:1 ", "a\tb:1", "a\nb:1", "a\0:1", "é:1", "日本:1", "a:x", "a:"),
        *("a:0", "a:99999", "a:123456", "a:-1", "a:\u0661", "a:1/path", "a:1?b=c", "a:1#c", "me@a:1", ":1", "a:1:2", "\ud83d:1"),
    ],
)  # fmt: skip
def test_an_address_that_is_none_is_refused_before_anything_is_sent(rest: str) -> None:
    for scheme in GATEWAY_SCHEMES:
        for check in (check_target, lambda address: gateway_client(address, "", 100.0)):
            with pytest.raises(ConfigError) as caught:
                check(f"{scheme}{rest}")
            right = "grpc://127.0.0.1:8001" if "grpc" in scheme else "http://127.0.0.1:8000"
            assert str(caught.value).endswith(f" is no gateway's address; it must be like {right}")
            assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("http://a", ("http", "a", 80, "a")),
        ("https://a-b.example/", ("https", "a-b.example", 443, "a-b.example")),
        ("http://[::1]:8000", ("http", "::1", 8000, "[::1]:8000")),
        ("grpc://127.0.0.1:8001", ("grpc", "127.0.0.1", 8001, "127.0.0.1:8001")),
        ("grpcs://[fe80::1%eth0]:1", ("grpcs", "fe80::1%eth0", 1, "[fe80::1%eth0]:1")),
    ],
)
def test_an_address_is_taken_apart(address: str, found: tuple[str, str, int, str]) -> None:
    assert gateway_address(address) == found
    check_target(address)


def test_grpc_has_no_port_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"grpc://127\.0\.0\.1:8001$"):
        gateway_address("grpc://a")
