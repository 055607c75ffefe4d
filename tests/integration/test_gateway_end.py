"""What a gateway that is told to end still does by gRPC: a message that is coming in, an answer on its way, and streams."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
import pytest

from roles.gateway.rpc.messages import SERVICE, message_class
from tests.integration.gateway_stage import GatewayProcess, Served, gateway
from tests.integration.proc import until

Asked = message_class("ModelInferRequest")
Response = message_class("ModelInferResponse")
Streamed = message_class("ModelStreamInferResponse")
LIMIT_S: Final = 5.0
PASSED_BYTES: Final = 300_000
"""On the way that stops, before it does."""
SMALL_WINDOW: Final = [
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 64 << 10),
    ("grpc.max_receive_message_length", 1 << 30),
    ("grpc.enable_retries", 0),
]
"""Such a client takes what it has read: not all of an answer is in the sockets' buffers."""


class Wire:
    """Passes on what comes, but on one way only so much of it until `goes_on`. One connection."""

    def __init__(self, address: str, *, stops_upwards: bool) -> None:
        self._to = address
        self._stops_upwards = stops_upwards
        self.has_stopped, self.goes_on = threading.Event(), threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        """The channel is closed by now."""
        self.goes_on.set()
        self._thread.join(30)

    def _serve(self) -> None:
        host, _, port = self._to.rpartition(":")
        with (
            self._listener,
            self._listener.accept()[0] as client,
            socket.create_connection((host, int(port))) as server,
        ):
            ways = ((client, server, self._stops_upwards), (server, client, not self._stops_upwards))
            threads = [threading.Thread(target=self._pass, args=way) for way in ways]
            for one in threads:
                one.start()
            for one in threads:
                one.join()

    def _pass(self, one: socket.socket, other: socket.socket, stops: bool) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := one.recv(32 << 10):
                passed += len(data)
                if stops and passed > PASSED_BYTES:
                    self.has_stopped.set()
                    self.goes_on.wait(30)
                other.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def asked(name: str, count: int = 3, **fields: Any) -> Any:
    request = Asked(model_name=name, **fields)
    request.inputs.add(name="x", datatype="FP32", shape=[count])
    request.raw_input_contents.append(np.zeros(count, np.float32).tobytes())
    request.parameters["deadline_ms"].double_param = 30_000
    return request


def page(found: GatewayProcess) -> str:
    text: bytes = found.ask("GET", "/metrics")[1]
    return text.decode()


@pytest.fixture
def frontend() -> Iterator[Served]:
    served = Served()
    yield served
    served.end()


@contextmanager
def ended(found: GatewayProcess) -> Iterator[None]:
    """Told to end; once the block is through it does so, in time."""
    found.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    time.sleep(0.5)  # it listens no more: now its calls are what keeps it
    assert found.process.poll() is None
    yield
    found.process.wait(30)
    assert time.monotonic() - began < LIMIT_S


@pytest.mark.parametrize("stops_upwards", [True, False], ids=["a message", "an answer"])
def test_what_is_on_its_way_arrives(frontend: Served, tmp_path: Path, *, stops_upwards: bool) -> None:
    with gateway(tmp_path, [frontend.address]) as found:
        wire = Wire(found.grpc, stops_upwards=stops_upwards)
        with contextlib.closing(wire), grpc.insecure_channel(wire.address, SMALL_WINDOW) as channel:
            infer = channel.unary_unary(
                f"/{SERVICE}/ModelInfer", Asked.SerializeToString, Response.FromString
            )
            call = infer.future(asked("echo", 500_000), timeout=60)
            assert wire.has_stopped.wait(30)
            with ended(found):
                wire.goes_on.set()
                assert len(call.result().raw_output_contents[0]) == 2_000_000


@pytest.mark.parametrize("before", [0, 1])
def test_a_stream_on_which_nothing_is_asked_keeps_nobody_up(
    frontend: Served, tmp_path: Path, before: int
) -> None:
    with gateway(tmp_path, [frontend.address]) as found, grpc.insecure_channel(found.grpc) as channel:
        goes_on = threading.Event()

        def requests() -> Iterator[Any]:
            for _ in range(before):
                yield asked("echo")
            goes_on.wait(60)

        infer = channel.stream_stream(
            f"/{SERVICE}/ModelStreamInfer", Asked.SerializeToString, Streamed.FromString
        )
        stream = infer(requests())
        for _ in range(before):
            next(stream)
        until(lambda: 'grpc_under_way{role_id="gateway-0"} 1.0' in page(found), what="the stream")
        found.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)
        assert (caught.value.code(), caught.value.details()) == (
            grpc.StatusCode.UNAVAILABLE,
            "the gateway ends: open another stream",
        )
        found.process.wait(30)
        assert time.monotonic() - began < LIMIT_S / 2
        goes_on.set()
