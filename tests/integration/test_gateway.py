"""The gateway with its protocol's own clients, unmodified, and with bytes by hand."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import re
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_aio
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException

from fabric.client import ask_status
from fabric.messages import CancelRequest
from roles.runtime.metrics.catalog import METRICS
from tests.integration.gateway_stage import EC, RSA, GatewayProcess, Served, certified, gateway
from tests.integration.proc import until
from tests.integration.test_gateway_calls import NO_PATH

X = np.array([1.5, -2.0, 3.25], np.float32)
PNG = b"\x89PNG\r\n\x1a\n and more"


@pytest.fixture(scope="module")
def frontend() -> Iterator[Served]:
    running = Served()
    yield running
    running.end()


@pytest.fixture(scope="module")
def one(frontend: Served) -> Iterator[GatewayProcess]:
    home = Path(tempfile.mkdtemp(prefix="t-"))
    with gateway(home, [frontend.address]) as running:
        yield running
    shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def by_http(one: GatewayProcess) -> Iterator[Any]:
    client = triton_http.InferenceServerClient(one.http, connection_timeout=60, network_timeout=60)
    yield client
    client.close()


@pytest.fixture
def by_grpc(one: GatewayProcess) -> Iterator[Any]:
    client = triton_grpc.InferenceServerClient(one.grpc)
    yield client
    client.close()


def http_input(array: Any, datatype: str, *, is_binary: bool = True) -> Any:
    found = triton_http.InferInput("x", list(array.shape), datatype)
    found.set_data_from_numpy(array, binary_data=is_binary)
    return found


def grpc_input(array: Any, datatype: str) -> Any:
    found = triton_grpc.InferInput("x", list(array.shape), datatype)
    found.set_data_from_numpy(array)
    return found


ARRAYS = [
    (np.array([[True, False]]), "BOOL"),
    (np.array([-128, 127], np.int8), "INT8"),
    (np.array([0, 255], np.uint8), "UINT8"),
    (np.array([-(1 << 63), 7], np.int64), "INT64"),
    (np.array([(1 << 64) - 1], np.uint64), "UINT64"),
    (np.array([1.5, np.nan, np.inf], np.float16), "FP16"),
    (X.reshape(1, 3, 1), "FP32"),
    (np.array([1e300]), "FP64"),
    (np.zeros((0, 3), np.float32), "FP32"),
    (np.random.default_rng(1).random((3, 224, 224), np.float32), "FP32"),
]


# ---------------------------------------------------------------- tritonclient


def test_what_there_is(by_http: Any, by_grpc: Any) -> None:
    for client, plain in ((by_http, {}), (by_grpc, {"as_json": True})):
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("echo")
        assert client.is_model_ready("echo", "1")
        assert client.get_server_metadata(**plain)["name"] == "tenuto"
        described = client.get_model_metadata("fixed", **plain)
        assert described["inputs"][0]["datatype"] == "FP32"
        assert [int(one) for one in described["inputs"][0]["shape"]] == [3]
        index = client.get_model_repository_index(**plain)
        states = {one["name"]: one["state"] for one in (index["models"] if plain else index)}
        assert (states["echo"], states["idle"]) == ("READY", "UNAVAILABLE")
        with pytest.raises(InferenceServerException, match="not one"):
            client.get_model_metadata("not one")
    assert by_http.get_model_config("fixed")["max_batch_size"] == 0
    assert by_grpc.get_model_config("fixed", as_json=True)["config"]["input"][0]["data_type"] == "TYPE_FP32"
    assert not by_http.is_model_ready("idle")
    assert not by_grpc.is_model_ready("idle")


@pytest.mark.parametrize(
    ("array", "datatype"), ARRAYS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_datatype_comes_back_bit_by_bit(by_http: Any, by_grpc: Any, array: Any, datatype: str) -> None:
    for packing in (None, "gzip", "deflate"):
        given = {"request_compression_algorithm": packing, "response_compression_algorithm": packing}
        found = by_http.infer("echo", [http_input(array, datatype)], **given).as_numpy("x")
        assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())
    found = by_grpc.infer("echo", [grpc_input(array, datatype)], compression_algorithm="gzip").as_numpy("x")
    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_json_both_ways(by_http: Any) -> None:
    for array, datatype in ((X, "FP32"), (np.array([1, -2], np.int64), "INT64"), (np.array([True]), "BOOL")):
        wanted = [triton_http.InferRequestedOutput("x", binary_data=False)]
        answer = by_http.infer(
            "echo", [http_input(array, datatype, is_binary=False)], outputs=wanted, request_id="7"
        )
        assert answer.get_response()["id"] == "7"
        assert "data" in answer.get_output("x")
        np.testing.assert_array_equal(answer.as_numpy("x"), array)


def test_bf16_is_widened_and_bytes_are_a_file(by_http: Any, by_grpc: Any) -> None:
    narrow = X.astype(ml_dtypes.bfloat16)
    file = np.array([PNG], object)
    for client, put in ((by_http, http_input), (by_grpc, grpc_input)):
        np.testing.assert_array_equal(client.infer("echo", [put(narrow, "BF16")]).as_numpy("x"), X)
        assert client.infer("echo", [put(file, "BYTES")]).as_numpy("x").tobytes() == PNG


def test_rows_are_requests_of_their_own(by_http: Any, by_grpc: Any, frontend: Served) -> None:
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    for client, put in ((by_http, http_input), (by_grpc, grpc_input)):
        before = len(frontend.asked)
        np.testing.assert_array_equal(client.infer("fixed", [put(rows, "FP32")]).as_numpy("x"), rows)
        assert len(frontend.asked) == before + 4
        np.testing.assert_array_equal(client.infer("fixed", [put(X, "FP32")]).as_numpy("x"), X)


def test_options_reach_the_frontend(by_http: Any, by_grpc: Any, frontend: Served) -> None:
    for client, put in ((by_http, http_input), (by_grpc, grpc_input)):
        client.infer("echo", [put(X, "FP32")], timeout=3_000_000, priority=1)
        asked = frontend.asked[-1]
        assert asked.priority == 9
        assert asked.budget_ms is not None
        assert 1_000 < asked.budget_ms <= 3_000
    by_grpc.infer("echo", [grpc_input(X, "FP32")], client_timeout=2.0)
    assert frontend.asked[-1].budget_ms < 2_500  # type: ignore[operator]
    by_http.infer("echo", [http_input(X, "FP32")], parameters={"deadline_ms": 1_500})
    assert frontend.asked[-1].budget_ms < 1_500  # type: ignore[operator]


WRONG = [
    ("nix", X, {}, "404", "NOT_FOUND", "no model 'nix'"),
    ("fixed", X[:2], {}, "400", "INVALID_ARGUMENT", "must be float32 of shape"),
    ("fixed", X.astype(np.float64), {}, "400", "INVALID_ARGUMENT", "must be float32 of shape"),
    ("fixed", X, {"outputs": ["nix"]}, "400", "INVALID_ARGUMENT", "no output 'nix'"),
    ("busy", X, {}, "503", "UNAVAILABLE", "too much is asked"),
    ("soon", X, {}, "504", "DEADLINE_EXCEEDED", "too late"),
    ("never", X, {"timeout": 100_000}, "504", "DEADLINE_EXCEEDED", "no answer within the budget"),
    ("echo", X, {"sequence_id": 7}, "501", "UNIMPLEMENTED", "sequences"),
    ("echo", X, {"model_version": "3"}, "404", "NOT_FOUND", "version"),
]


@pytest.mark.parametrize(("model", "array", "more", "status", "code", "words"), WRONG)
def test_what_goes_wrong_is_said_by_status_and_words(
    by_http: Any,
    by_grpc: Any,
    model: str,
    array: Any,
    more: dict[str, Any],
    status: str,
    code: str,
    words: str,
) -> None:
    datatype = {"float32": "FP32", "float64": "FP64"}[array.dtype.name]
    for client, put, module, said in (
        (by_http, http_input, triton_http, status),
        (by_grpc, grpc_input, triton_grpc, f"StatusCode.{code}"),
    ):
        given = dict(more)
        if "outputs" in given:
            given["outputs"] = [module.InferRequestedOutput(name) for name in more["outputs"]]
        with pytest.raises(InferenceServerException, match=words) as caught:
            client.infer(model, [put(array, datatype)], **given)
        assert caught.value.status() == said


def test_the_asynchronous_client(one: GatewayProcess) -> None:
    async def run() -> None:
        async with triton_aio.InferenceServerClient(one.http) as client:
            assert await client.is_server_ready()
            arrays = [np.full(4, at, np.float32) for at in range(20)]
            asked = [client.infer("echo", [http_input(array, "FP32")]) for array in arrays]
            for array, answer in zip(arrays, await asyncio.gather(*asked), strict=True):
                np.testing.assert_array_equal(answer.as_numpy("x"), array)
            with pytest.raises(InferenceServerException, match="no model 'nix'"):
                await client.infer("nix", [http_input(X, "FP32")])

    asyncio.run(run())


def test_a_stream_answers_each_request_as_it_is_done(by_grpc: Any) -> None:
    heard: list[tuple[Any, Any]] = []
    came = threading.Semaphore(0)

    def hear(result: Any, error: Any) -> None:
        heard.append((result, error))
        came.release()

    by_grpc.start_stream(hear)
    for at in range(5):
        by_grpc.async_stream_infer(
            "echo", [grpc_input(np.full(2, at, np.float32), "FP32")], request_id=str(at)
        )
    by_grpc.async_stream_infer("nix", [grpc_input(X, "FP32")])
    for _ in range(6):
        assert came.acquire(timeout=60)
    by_grpc.stop_stream()
    answers = {result.get_response().id: result.as_numpy("x")[0] for result, error in heard if error is None}
    assert answers == {str(at): at for at in range(5)}
    (error,) = [error for _, error in heard if error is not None]
    assert "ModelNotFound" in str(error)


def test_statistics_count_what_was_answered(by_http: Any, by_grpc: Any) -> None:
    def counts() -> list[tuple[int, int]]:
        found = []
        for stats in (
            by_http.get_inference_statistics("echo"),
            by_grpc.get_inference_statistics("echo", as_json=True),
        ):
            (seen,) = stats["model_stats"]
            durations = seen["inference_stats"]
            found.append((int(seen["inference_count"]), int(durations["compute_infer"]["ns"])))
        return found

    before = counts()
    assert before[0] == before[1]
    by_http.infer("echo", [http_input(X, "FP32")])
    by_grpc.infer("echo", [grpc_input(X, "FP32")])
    after = counts()
    assert after[0] == after[1] == (before[0][0] + 2, before[0][1] + 3_000_000)


def test_models_are_not_changed_unless_the_file_says_so(by_http: Any, by_grpc: Any) -> None:
    for client, status in ((by_http, "403"), (by_grpc, "StatusCode.PERMISSION_DENIED")):
        for change in (client.load_model, client.unload_model):
            with pytest.raises(InferenceServerException, match="model_control") as caught:
                change("echo")
            assert caught.value.status() == status
    with pytest.raises(InferenceServerException, match="extension"):
        by_http.get_system_shared_memory_status()


# ---------------------------------------------------------------- HTTP by hand


def test_codes_retries_and_traces(one: GatewayProcess) -> None:
    status, document, headers = one.infer("busy")
    assert (status, document["code"], document["retryable"]) == (503, "Overloaded", True)
    assert (headers["retry-after"], document["retry_after_ms"]) == ("1", 120.0)
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    body = json.dumps({"inputs": {"x": [1]}}).encode()
    status, document, headers = one.ask("POST", "/v1/models/echo:predict", body, {"traceparent": trace})
    assert (status, document["outputs"], headers["traceparent"]) == (200, {"x": [1.0]}, trace)
    assert document["ledger"]["gpu_ms"] == 1.5
    assert "gpu;dur=1.500" in headers["server-timing"]
    assert one.ask("GET", "/v2/nix")[0] == 404
    assert one.ask("PUT", "/v2/models/echo/infer", b"{}")[0] == 405
    assert one.ask("POST", "/v2/models/echo/infer", b"{}")[0] == 400
    for path in ("/v2/models/nix/infer", "/v1/models/nix:predict"):  # that is said first
        status, document, headers = one.ask("POST", path, b"{}", {"traceparent": trace})
        assert (status, document["code"], headers["traceparent"]) == (404, "ModelNotFound", trace)
    assert one.ask("GET", "/v2/models/%ff/ready")[0] == 404
    assert one.ask("HEAD", "/v2/models/echo") == (200, b"", {**one.ask("HEAD", "/v2/models/echo")[2]})


def test_a_picture_is_posted_as_it_is(one: GatewayProcess) -> None:
    headers = {"Content-Type": "image/png"}
    status, document, _ = one.ask("POST", "/v1/models/pictures:predict?deadline_ms=4000", PNG, headers)
    assert (status, document["outputs"]) == (200, {"image": list(PNG)})
    instances = {"instances": [{"image": np.zeros((3, 8, 8)).tolist()}] * 3}
    status, document, _ = one.ask("POST", "/v1/models/pictures:predict", json.dumps(instances).encode())
    assert (status, len(document["predictions"])) == (200, 3)


def test_a_body_over_the_limit_is_refused_before_it_is_read(one: GatewayProcess, by_http: Any) -> None:
    with pytest.raises(InferenceServerException, match="there may be"):
        by_http.infer("echo", [http_input(np.zeros(17 << 20, np.float32), "FP32")])
    with one.connect() as connection:
        connection.sendall(
            b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99000000\r\n\r\n"
        )
        answer = connection.recv(4_096)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"Connection: close" in answer
    assert one.infer("echo")[0] == 200


def test_a_small_body_may_not_become_a_large_one(one: GatewayProcess) -> None:
    bomb = gzip.compress(bytes(100 << 20))
    status, document, _ = one.ask("POST", "/v2/models/echo/infer", bomb, {"Content-Encoding": "gzip"})
    assert (status, document["code"]) == (413, "TooLarge")


def test_nor_a_small_message_a_large_one(one: GatewayProcess) -> None:
    """gRPC stops at the limit as it decompresses. Older versions looked at the size only once there was as much memory."""

    def most_kb() -> int:
        found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{one.process.pid}/status").read_text())
        assert found is not None
        return int(found[1])

    Path(f"/proc/{one.process.pid}/clear_refs").write_text(
        "5", encoding="ascii"
    )  # what it had before is forgotten
    before_kb = most_kb()
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(one.grpc, options, compression=grpc.Compression.Gzip) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError) as caught:
            call(bytes(300 << 20), timeout=60)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert most_kb() - before_kb < 200 << 10


def test_a_strangers_path_that_is_no_text_ends_no_gateway(one: GatewayProcess, by_grpc: Any) -> None:
    before = one.ask("GET", "/metrics")[0], one.process.poll()
    host, port = one.grpc.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(NO_PATH)
        connection.recv(4_096)
        with contextlib.suppress(OSError):
            while connection.recv(4_096):  # until gRPC's server has ended the connection
                pass

    def is_live() -> bool:
        try:
            return bool(by_grpc.is_server_live())
        except InferenceServerException:
            return False

    until(is_live)
    assert (one.ask("GET", "/metrics")[0], one.process.poll()) == before
    assert not list(one.run_dir.glob("*.defect"))


def test_requests_behind_one_another_are_answered_in_order(one: GatewayProcess) -> None:
    wanted = [json.dumps({"inputs": {"x": [at]}}).encode() for at in range(5)]
    data = b"".join(
        b"POST /v1/models/echo:predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
        % (len(body), body)
        for body in wanted
    )
    with one.connect() as connection:
        connection.sendall(data + b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        with connection.makefile("rb") as answers:
            told = answers.read()
    parts = [part.partition(b"\r\n\r\n")[2] for part in told.split(b"HTTP/1.1 ")[1:]]
    assert [json.loads(part)["outputs"]["x"] for part in parts[:5]] == [[float(at)] for at in range(5)]
    assert json.loads(parts[5])["name"] == "tenuto"


def test_a_client_that_hangs_up_cancels_its_request(
    one: GatewayProcess, frontend: Served, by_grpc: Any
) -> None:
    def cancels() -> int:
        return sum(isinstance(received.message, CancelRequest) for received in frontend.seen)

    before, asked = cancels(), len(frontend.asked)
    body = b'{"inputs": {"x": [1]}}'
    with one.connect() as connection:
        connection.sendall(
            b"POST /v1/models/never:predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
            % (len(body), body)
        )
        until(lambda: len(frontend.asked) == asked + 1)
        assert cancels() == before
    until(lambda: cancels() == before + 1)
    call = by_grpc.async_infer("never", [grpc_input(X, "FP32")], lambda result, error: None)
    until(lambda: len(frontend.asked) == asked + 2)
    call.cancel()
    until(lambda: cancels() == before + 2)


def test_curl_sends_a_large_file_and_reads_a_compressed_answer(one: GatewayProcess, tmp_path: Path) -> None:
    """Over 1 MB curl asks first whether it may (`Expect: 100-continue`)."""
    body = tmp_path / "body"
    body.write_bytes(json.dumps({"inputs": {"x": [0.5] * 500_000}}).encode())
    command = [
        "curl",
        "-sS",
        "--compressed",
        "--data-binary",
        f"@{body}",
        f"http://{one.http}/v1/models/echo:predict",
    ]
    told = subprocess.run(command, capture_output=True, check=True, timeout=60)
    assert json.loads(told.stdout)["outputs"]["x"] == [0.5] * 500_000


def test_its_page_of_metrics_is_read_by_the_client_library(one: GatewayProcess) -> None:
    one.infer("echo")
    one.infer("soon")
    status, page, headers = one.ask("GET", "/metrics")
    assert (status, headers["content-type"].partition(";")[0]) == (200, "text/plain")
    found = {
        (sample.name, *(sample.labels.get(label, "") for label in ("model", "outcome", "code"))): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }
    assert {name for name, *_ in found} == {metric.name for metric in METRICS if "gateway" in metric.shown_by}
    assert found["tenuto_gateway_requests_total", "echo", "success", ""] >= 1
    assert found["tenuto_gateway_requests_total", "soon", "fail", ""] >= 1
    assert found["tenuto_gateway_failures_total", "", "", "DeadlineExceeded"] >= 1
    assert one.ask("POST", "/metrics")[2]["allow"] == "GET, HEAD"


def test_an_operator_may_ask_how_it_is(one: GatewayProcess) -> None:
    status = ask_status(f"ipc://{one.run_dir}/gateway-0.control")
    assert status.role_id == "gateway-0"
    assert status.counters["is_ready"] == 1
    assert status.counters["http_requests"] > 0


# ---------------------------------------------------------------- its life


def test_at_its_end_it_is_unready_finishes_and_leaves(frontend: Served, tmp_path: Path) -> None:
    body = b'{"inputs": {"x": [1]}, "deadline_ms": 1500}'
    with gateway(tmp_path, [frontend.address]) as one, one.connect() as connection, one.connect() as idle:
        asked = len(frontend.asked)
        idle.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert idle.recv(4_096).startswith(b"HTTP/1.1 200 ")
        connection.sendall(
            b"POST /v1/models/never:predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
            % (len(body), body)
        )
        until(lambda: len(frontend.asked) > asked)
        one.process.send_signal(signal.SIGTERM)
        assert idle.recv(4_096) == b""  # idle connections end
        with connection.makefile("rb") as answer:
            told = answer.read()
        assert told.startswith(b"HTTP/1.1 504 ")
        assert b"Connection: close" in told
        assert one.process.wait(30) == 0
    assert not (tmp_path / "gateway-0.json").exists()


def test_while_no_frontend_is_there_it_says_so_and_when_it_is_back_it_serves(tmp_path: Path) -> None:
    frontend = Served()
    with gateway(tmp_path, [frontend.address]) as one:
        assert one.ask("GET", "/v2/health/ready")[0] == 200
        frontend.end()
        until(lambda: one.ask("GET", "/v2/health/ready")[0] == 503)
        assert one.ask("GET", "/v2/health/live")[0] == 200
        status, document, headers = one.infer("echo")
        assert (status, document["code"], "retry-after" in headers) == (503, "PeerLost", True)
        frontend = Served(frontend.address)
        until(lambda: one.ask("GET", "/v2/health/ready")[0] == 200)
        assert one.infer("echo")[0] == 200
        frontend.end()


def test_tokens_and_tls(frontend: Served, tmp_path: Path) -> None:
    certificate, _ = certified(tmp_path)
    token = "a-token-of-some-length"
    (tmp_path / "tokens").write_text(token, encoding="utf-8")
    (tmp_path / "tokens").chmod(0o600)
    settings = {"token_file": "tokens", "tls_certificate": "c.pem", "tls_key": "k.pem"}
    document = {"cluster": {"gpus": 1, "gateway": settings}}
    with gateway(tmp_path, [frontend.address], document) as one:
        context = ssl.create_default_context(cafile=str(certificate))
        client = triton_http.InferenceServerClient(
            one.http, ssl=True, ssl_context_factory=lambda: context, insecure=False
        )
        assert client.is_server_ready()  # whoever looks after processes has no token
        with pytest.raises(InferenceServerException, match="token") as caught:
            client.infer("echo", [http_input(X, "FP32")])
        assert caught.value.status() == "401"
        headers = {"Authorization": f"Bearer {token}"}
        np.testing.assert_array_equal(
            client.infer("echo", [http_input(X, "FP32")], headers=headers).as_numpy("x"), X
        )
        client.close()
        rpc = triton_grpc.InferenceServerClient(one.grpc, ssl=True, root_certificates=str(certificate))
        assert rpc.is_server_ready()
        with pytest.raises(InferenceServerException, match="token"):
            rpc.infer("echo", [grpc_input(X, "FP32")])
        headers = {"authorization": f"Bearer {token}"}
        np.testing.assert_array_equal(
            rpc.infer("echo", [grpc_input(X, "FP32")], headers=headers).as_numpy("x"), X
        )
        rpc.close()
        with one.connect() as connection:  # without TLS
            connection.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert not connection.recv(4_096).startswith(b"HTTP/1.1 2")


def shown_at(address: str, name: str | None) -> tuple[str, str | None]:
    """Its certificate, and the protocol, to a client that calls it by that name."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    at = ("127.0.0.1", int(address.rpartition(":")[2]))
    with (
        socket.create_connection(at, timeout=30) as plain,
        context.wrap_socket(plain, server_hostname=name) as connection,
    ):
        found = connection.getpeercert(binary_form=True)
        assert found is not None
        return ssl.DER_cert_to_PEM_cert(found), connection.selected_alpn_protocol()


@pytest.mark.parametrize("key_types", [(EC, EC), (EC, RSA), (RSA, EC)])
def test_a_renewed_certificate_is_taken_over_and_one_of_no_use_is_not(
    frontend: Served, key_types: tuple[str, str], tmp_path: Path
) -> None:
    """By HTTP and gRPC, for connections that are made from then on."""
    certificate, key = certified(tmp_path, key_types[0])
    renewed = tmp_path / "renewed"
    renewed.mkdir()
    document = {"cluster": {"gpus": 1, "gateway": {"tls_certificate": "c.pem", "tls_key": "k.pem"}}}

    with gateway(tmp_path, [frontend.address], document) as one:

        def shown() -> set[str]:
            found = set()
            for address, protocol in ((one.http, "http/1.1"), (one.grpc, "h2")):
                for name in (None, "localhost"):
                    pem, chosen = shown_at(address, name)
                    assert chosen == protocol
                    found.add(pem)
            return found

        former = shown()
        assert former == {certificate.read_text()}
        new, new_key = certified(renewed, key_types[1])
        new.replace(certificate)  # its key comes later
        log = tmp_path / "gateway.log"
        until(lambda: "certificate_not_taken_over" in log.read_text(), what="the warning")
        assert shown() == former
        new_key.replace(key)
        until(lambda: "certificate_taken_over" in log.read_text(), what="the renewal")
        assert shown() == {certificate.read_text()} != former
        assert log.read_text().count("certificate_not_taken_over") == 1


def test_trailers_say_code_and_when_to_ask_again(one: GatewayProcess) -> None:
    from roles.gateway.rpc.messages import SERVICE, message_class

    with grpc.insecure_channel(one.grpc) as channel:
        request = message_class("ModelInferRequest")
        call = channel.unary_unary(
            f"/{SERVICE}/ModelInfer",
            request.SerializeToString,
            message_class("ModelInferResponse").FromString,
        )
        with pytest.raises(grpc.RpcError) as caught:
            call(request(model_name="busy"))
        trailing = dict(caught.value.trailing_metadata())
        assert (trailing["tenuto-code"], trailing["grpc-retry-pushback-ms"]) == ("Overloaded", "120")
        _, answered = call.with_call(request(model_name="echo"))
        assert "gpu;dur=1.500" in dict(answered.trailing_metadata())["server-timing"]
