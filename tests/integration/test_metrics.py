"""Pages of metrics as Prometheus sees them: real roles, real sockets, and clients that behave badly."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fabric.client import BlockingClient
from fabric.errors import ConfigError, FabricError, RequestError
from roles.benchmark.temporary_cluster import TemporaryCluster, temporary_cluster
from roles.runtime import small_http
from roles.runtime.metrics import catalog, server
from roles.runtime.metrics.catalog import METRICS
from roles.runtime.metrics.server import MetricsServer
from roles.runtime.metrics.snapshot import Measured
from roles.runtime.running_cluster import processes_in
from roles.runtime.small_http import CONNECTIONS_MAX, HEAD_BYTES_MAX
from tests.integration.proc import CLOCK, until

CLUSTER = """
models:
 - {name: fast, slo_ms: 4000, profile: {alpha_ms: 0.5, beta_ms: 2, max_batch: 32}}
 - {name: slow, slo_ms: 8000, profile: {alpha_ms: 1, beta_ms: 10, max_batch: 32}}
cluster: {gpus: 2, frontends: 2, schedulers: 2}
listen: {metrics: "127.0.0.1:0"}
batching: eager
"""
SENSORS = {
    metric.name
    for metric in METRICS
    if metric.name.startswith("tenuto_gpu_") and "node-agent" in metric.shown_by
}
ONCE_THERE = {  # a metric without a time series until something happens
    catalog.DROPS.name,
    catalog.SLICE_SLOWDOWN.name,
    catalog.PLANNED_RATE.name,
    catalog.TASKS_PENDING.name,  # with applications
} | SENSORS - {catalog.GPU_MEMORY_TOTAL.name}

Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]


def get(address: str, path: str = "/metrics", method: str = "GET") -> tuple[int, bytes]:
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def read(page: bytes) -> Samples:
    """By the metric's name with its suffix, and labels."""
    found: Samples = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def names_of(page: bytes) -> set[str]:
    families = text_string_to_metric_families(page.decode())
    return {family.name + "_total" * (family.type == "counter") for family in families}


def total(samples: Samples, name: str, **labels: str) -> float:
    return sum(value for its, value in samples.get(name, {}).items() if set(labels.items()) <= set(its))


def test_every_role_shows_its_metrics_and_they_add_up(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER, encoding="utf-8")
    with temporary_cluster(path) as cluster:
        assert len(cluster.endpoints["metrics"]) == 5
        with BlockingClient([one for one in cluster.endpoints["client"] if "frontend-0" in one]) as client:
            for _ in range(20):
                client.infer("fast", {"input": np.zeros(4, np.float32)})
            with pytest.raises(RequestError):
                client.infer("fast", {"input": np.zeros(4, np.float32)}, budget_ms=1e-3)
        pages = {
            process.role_id: get(process.addresses["metrics"][0])[1]
            for process in processes_in(cluster.run_dir)
            if "metrics" in process.addresses
        }
        assert set(pages) == {"scheduler-0", "scheduler-1", "frontend-0", "frontend-1", "node-local"}
        kinds = {"scheduler-0": "scheduler", "frontend-0": "frontend", "node-local": "node-agent"}
        for role_id, kind in kinds.items():
            wanted = {metric.name for metric in METRICS if kind in metric.shown_by}
            shown = names_of(pages[role_id])
            assert shown <= wanted
            assert wanted - shown <= ONCE_THERE
        frontend, scheduler = read(pages["frontend-0"]), read(pages["scheduler-0"])
        assert total(frontend, catalog.REQUESTS.name, model="fast", outcome="good") == 20
        assert total(frontend, catalog.REQUESTS.name, outcome="DeadlineExceeded") == 1
        assert total(frontend, f"{catalog.LATENCY.name}_count", model="fast") == 20
        assert total(frontend, f"{catalog.LATENCY.name}_bucket", model="fast", le="4") == 20
        in_stages = total(frontend, catalog.STAGES.name, model="fast")
        assert in_stages == pytest.approx(
            total(frontend, f"{catalog.LATENCY.name}_sum", model="fast"), rel=0.2
        )
        assert total(scheduler, f"{catalog.BATCH_SIZE.name}_sum", model="fast") == 20
        assert total(scheduler, catalog.BATCHES.name, model="fast") == total(
            scheduler, f"{catalog.BATCH_SIZE.name}_count"
        )
        assert total(scheduler, catalog.SLICE_BUSY.name) == pytest.approx(
            total(scheduler, catalog.GPU_BUSY.name)
        )
        assert total(scheduler, catalog.SLICE_BATCHES.name, status="ok") == total(
            scheduler, catalog.BATCHES.name
        )
        assert total(scheduler, catalog.SLICES.name, state="ready") == 2
        assert total(scheduler, catalog.ACTIVE.name) == 1
        assert total(read(pages["scheduler-1"]), catalog.ACTIVE.name) == 0
        node = read(pages["node-local"])
        assert total(node, catalog.WORKERS.name) == 1
        assert total(node, catalog.WORKER_CPU.name) > 0
        assert total(node, catalog.WORKER_EVENTS.name, event="requests_ran") == 20


APPLICATION = """
applications:
 - {name: both, slo_ms: 8000, stages: {one: {model: fast}, two: {model: slow, after: one}}}
"""


def counted(cluster: TemporaryCluster) -> dict[tuple[Any, ...], float]:
    """All counters of all processes that have a page, each process by itself."""
    return {
        (process.role_id, process.pid, sample.name, *sorted(sample.labels.items())): sample.value
        for process in processes_in(cluster.run_dir)
        if "metrics" in process.addresses
        for family in text_string_to_metric_families(get(process.addresses["metrics"][0])[1].decode())
        if family.type == "counter"
        for sample in family.samples
    }


def test_what_is_shown_as_a_counter_never_falls_whatever_ends_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER + APPLICATION, encoding="utf-8")
    with temporary_cluster(path) as cluster:

        def serves() -> bool:
            try:
                with BlockingClient(cluster.endpoints["client"]) as client:
                    client.infer("both", {"input": np.zeros(4, np.float32)})
            except FabricError:
                return False
            return True

        looks = []
        with contextlib.ExitStack() as opened:
            addresses = cluster.endpoints["client"]
            clients = [opened.enter_context(BlockingClient([one])) for one in addresses for _ in range(3)]
            inputs = {"input": np.zeros(4, np.float32)}
            many = [client.submit("both", inputs) for client in clients for _ in range(20)]
            looks.append(counted(cluster))
            for one in many:
                one.result()
            looks.append(counted(cluster))
        for role_id in ("frontend-1", "scheduler-0"):
            (lost,) = (one for one in processes_in(cluster.run_dir) if one.role_id == role_id)
            os.kill(lost.pid, signal.SIGKILL)
            until(serves, 60_000.0)
            looks.append(counted(cluster))
        fallen = {
            name: (before[name], after[name])
            for before, after in pairwise(looks)
            for name in before.keys() & after.keys()
            if after[name] < before[name]
        }
        # A new connection counts from zero, which Prometheus takes for what it is.
        assert {
            name for name in fallen if not dict(name[3:]).get("event", "").startswith("scheduler_")
        } == set()
        assert len(looks[0].keys() & looks[-1].keys()) > 100


# ---------------------------------------------------------------- the server alone


@contextmanager
def serving(address: str = "127.0.0.1:0", *, is_answering: bool = True) -> Iterator[MetricsServer]:
    """A server with a stand-in for a role's loop."""
    opened = MetricsServer(address, "frontend-0")
    stop = threading.Event()

    def loop() -> None:
        while not stop.wait(0.001):
            for _ in opened.asked.take(64, 0.0):
                opened.publish([Measured(catalog.PENDING, (), 7.0)])

    thread = threading.Thread(target=loop, daemon=True)
    if is_answering:
        thread.start()
    try:
        yield opened
    finally:
        stop.set()
        if is_answering:
            thread.join()
        opened.close()


def connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def test_only_get_and_head_of_the_page_are_answered_with_it() -> None:
    with serving() as opened:
        status, page = get(opened.address)
        assert (status, total(read(page), catalog.PENDING.name, role_id="frontend-0")) == (200, 7.0)
        assert get(opened.address, method="HEAD") == (200, b"")
        assert get(opened.address, path="/metrics?name=x")[0] == 200
        assert get(opened.address, path="/")[0] == 404
        assert get(opened.address, path="/metrics/../etc/passwd")[0] == 404
        assert get(opened.address, method="POST")[0] == 405


@pytest.mark.parametrize(
    "said",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"\x00\xff\x80\r\n\r\n",
        b"GET /metrics SMTP\r\n\r\n",
        b"GET  /metrics HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_no_request_is_not_found(said: bytes) -> None:
    with serving() as opened, connected(opened.address) as talking:
        talking.sendall(said)
        assert talking.recv(64).startswith(b"HTTP/1.1 404 ")


def test_a_head_without_end_is_cut_off() -> None:
    with serving() as opened, connected(opened.address) as talking:
        with contextlib.suppress(OSError):
            talking.sendall(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * (16 * HEAD_BYTES_MAX))
            assert talking.recv(64) == b""
        assert get(opened.address)[0] == 200


def test_those_who_say_nothing_keep_nobody_out_and_are_sent_away() -> None:
    with serving() as opened, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connected(opened.address)) for _ in range(4 * CONNECTIONS_MAX)]
        assert get(opened.address)[0] == 200
        for one in silent[: 2 * CONNECTIONS_MAX]:
            one.settimeout(20)
            with contextlib.suppress(ConnectionResetError):
                assert one.recv(1) == b""


def test_one_who_says_nothing_is_sent_away_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_http, "REQUEST_S", 0.05)
    with serving() as opened, connected(opened.address) as silent:
        silent.sendall(b"GET /metrics HT")
        assert silent.recv(1) == b""


def test_a_loop_that_does_not_answer_is_shown_as_it_was_with_its_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "ANSWER_S", 0.05)
    with serving(is_answering=False) as opened:
        assert get(opened.address)[0] == 503
        opened.publish([Measured(catalog.PENDING, (), 7.0)])
        began_ms = CLOCK.now_ms()
        until(lambda: CLOCK.now_ms() - began_ms > 2 * server.FRESH_MS)
        status, page = get(opened.address)
        age = total(read(page), catalog.SNAPSHOT_AGE.name)
        assert (status, total(read(page), catalog.PENDING.name)) == (200, 7.0)
        assert age * 1e3 > server.FRESH_MS


def test_the_loop_is_asked_at_most_five_times_a_second() -> None:
    asked = 0
    with serving() as opened:
        publish = opened.publish

        def counted(snapshot: list[Measured]) -> None:
            nonlocal asked
            asked += 1
            publish(snapshot)

        opened.publish = counted  # type: ignore[method-assign, assignment]  # the stand-in's own
        began_ms = CLOCK.now_ms()
        for _ in range(50):
            assert get(opened.address)[0] == 200
        assert asked <= 1 + (CLOCK.now_ms() - began_ms) / server.FRESH_MS


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """To bind an address, each time; with hardly any time in between."""
    tried: list[str] = []
    bound = small_http.SmallHttpServer._bound

    async def counted(self: small_http.SmallHttpServer) -> asyncio.Server:
        tried.append("")
        return await bound(self)

    monkeypatch.setattr(small_http, "TRY_AGAIN_S", 0.005)
    monkeypatch.setattr(small_http.SmallHttpServer, "_bound", counted)
    return tried


def answers(address: str) -> bool:
    try:
        return get(address)[0] == 200
    except OSError:
        return False


def test_a_page_whose_port_is_taken_is_there_once_it_is_free(
    tries: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        opening = serving(address)
        opened = opening.__enter__()
        until(lambda: len(tries) > 3)
        assert opened.address == address
    try:
        until(lambda: answers(address))
        assert opened.address == address
    finally:
        opening.__exit__(None, None, None)
    told = [record.getMessage() for record in caplog.records if "metrics_port" in record.getMessage()]
    assert told == [f"metrics_port_taken role=frontend-0 address={address}"]


def test_a_page_that_waits_for_its_port_ends_with_its_role(tries: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with serving(address) as opened:
            until(lambda: len(tries) > 1)
        assert not opened._server._thread.is_alive()
        assert opened._server.loop.is_closed()
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
        pass  # nobody is there


def test_an_address_that_can_never_be_bound_is_a_configuration_error() -> None:
    where = "listen.metrics: frontend-1's page cannot be served at 192.0.2.1:8002"
    with pytest.raises(ConfigError, match=f"^{where}: Cannot assign requested address$"):
        MetricsServer("192.0.2.1:8002", "frontend-1")


def test_a_long_page_comes_whole_over_a_slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page may be larger than what the kernel takes at once; its reader may be slower than its writer."""
    monkeypatch.setattr(small_http, "REQUEST_S", 20.0)  # whatever else runs on this host
    models = [Measured(catalog.QUEUE, (f"model-{at}",), 1.0) for at in range(2_000)]
    opened = MetricsServer("127.0.0.1:0", "scheduler-0")
    assert opened._server._server is not None
    listening = opened._server._server.sockets[0]  # a slow link in small: what the kernel keeps for each end
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
    host, _, port = opened.address.rpartition(":")
    opened.publish(models)
    try:
        with socket.socket() as reading:
            reading.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            reading.settimeout(20)
            reading.connect((host, int(port)))
            reading.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            head, _, body = until_closed(reading).partition(b"\r\n\r\n")
    finally:
        opened.close()
    length = int(head.partition(b"Content-Length: ")[2].split(b"\r\n")[0])
    assert (len(body), body.count(b"tenuto_queue_requests{")) == (length, len(models))


def until_closed(reading: socket.socket) -> bytes:
    found = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while more := reading.recv(1 << 14):
            found += more
    return bytes(found)
