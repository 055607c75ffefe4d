"""A whole cluster on loopback: real processes, real sockets, real answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import zmq

from fabric.client import BlockingClient, Client, ClientOptions, InferResult, ask_status
from fabric.clock import MonotonicClock
from fabric.errors import InvalidInput, ModelNotFound, NoReplica, RequestError, TooLarge
from fabric.shared_memory import SWITCH, memory_address
from roles.benchmark.temporary_cluster import TemporaryCluster, temporary_cluster

pytestmark = pytest.mark.timeout(180)

TWO_MODELS = """
models:
 - {name: fast, slo_ms: 400, profile: {alpha_ms: 0.5, beta_ms: 2, max_batch: 32}}
 - {name: slow, slo_ms: 800, profile: {alpha_ms: 1, beta_ms: 10, max_batch: 32}}
cluster:
  nodes: [{host: one, gpus: 1, device: emulated}]
batching: eager  # these tests are about processes: no batch need wait for the last moment on a busy host
"""

ECHO = """
models:
 - name: echo
   slo_ms: 2000
   loader: {python: "tests.models.echo:Echo"}
 - name: broken
   slo_ms: 2000
   loader: {python: "tests.models.echo:CannotLoad"}
 - name: moody
   slo_ms: 2000
   loader: {python: "tests.models.echo:Raises"}
cluster:
  nodes: [{host: cpu, gpus: 3, device: cpu}]
batching: eager
placement:
  given:
    slices:
     - {gpu: 0, models: [{model: echo}]}
     - {gpu: 1, models: [{model: broken}]}
     - {gpu: 2, models: [{model: moody}]}
"""


@contextmanager
def cluster_of(tmp_path: Path, text: str) -> Iterator[TemporaryCluster]:
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    with temporary_cluster(path) as cluster:
        yield cluster
    assert not cluster.run_dir.exists()


def descendants(pid: int) -> dict[int, str]:
    """Every process below `pid`, with its command line."""
    parents: dict[int, int] = {}
    commands: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
                commands[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return {child: commands[child] for child in found - {pid}}


def worker_of(cluster: TemporaryCluster) -> int:
    (pid,) = [pid for pid, command in descendants(cluster.pid).items() if "roles.gpu_worker" in command]
    return pid


async def fate(client: Client, model: str, number: int) -> InferResult | RequestError:
    inputs = {"input": np.full(16, number, np.float32)}
    try:
        return await client.infer(model, inputs)
    except RequestError as error:
        return error


async def until_served(client: Client, model: str, limit_ms: float) -> float:
    """How long until the model answers again, in ms."""
    clock = MonotonicClock()
    began_ms = clock.now_ms()
    while not isinstance(await fate(client, model, 0), InferResult):
        assert clock.now_ms() - began_ms < limit_ms, f"{model} is not served again"
        await asyncio.sleep(0.05)
    return clock.now_ms() - began_ms


@pytest.mark.usefixtures("streams_or_not")
def test_every_request_gets_one_answer_although_the_worker_is_killed(tmp_path: Path) -> None:
    async def scenario(cluster: TemporaryCluster) -> None:
        async with Client(cluster.endpoints["client"]) as client:
            waves = [
                asyncio.create_task(fate(client, model, number))
                for number in range(100)
                for model in ("fast", "slow")
            ]
            await asyncio.sleep(0.03)
            os.kill(worker_of(cluster), signal.SIGKILL)
            fates = await asyncio.wait_for(asyncio.gather(*waves), timeout=30)
            assert len(fates) == 200
            await until_served(client, "fast", 10_000)
            await until_served(client, "slow", 10_000)
            again = await asyncio.gather(*(fate(client, "fast", number) for number in range(50)))
            assert all(isinstance(one, InferResult) for one in again)

    with cluster_of(tmp_path, TWO_MODELS) as cluster:
        asyncio.run(scenario(cluster))
        (frontend,) = [ask_status(cluster.endpoints["client"][:1])]
        counters = frontend.counters
        assert counters["accepted"] == counters["answers"] + counters.get("refusals", 0.0)


async def asked_and_maybe_cancelled(client: Client, draws: random.Random) -> str:
    """One request with a random model, budget and fate; the name of what became of it."""
    model = draws.choice(("fast", "fast", "slow", "nobody"))
    budget_ms = draws.choice((None, 0.5, 5.0, 30.0, 300.0))
    future = client.submit(model, {"input": np.zeros(draws.randint(1, 50), np.float32)}, budget_ms)
    if draws.random() < 0.2:
        await asyncio.sleep(draws.random() * 0.02)
        future.cancel()
    try:
        await future
    except RequestError as error:
        return error.code
    except asyncio.CancelledError:
        return "cancelled"
    return "answered"


@pytest.mark.usefixtures("streams_or_not")
def test_ten_thousand_requests_have_one_fate_each(tmp_path: Path) -> None:
    draws = random.Random(1)

    async def scenario(cluster: TemporaryCluster) -> Counter[str]:
        fates: Counter[str] = Counter()
        async with Client(cluster.endpoints["client"]) as client:
            for _ in range(100):
                wave = [asked_and_maybe_cancelled(client, draws) for _ in range(100)]
                fates.update(await asyncio.wait_for(asyncio.gather(*wave), timeout=30))
        return fates

    with cluster_of(tmp_path, TWO_MODELS) as cluster:
        fates = asyncio.run(scenario(cluster))
        assert fates.total() == 10_000
        assert fates["answered"] > 1_000
        assert fates["ModelNotFound"] > 1_000
        clock = MonotonicClock()
        until_ms = clock.now_ms() + 60_000
        while True:  # the last cancellations are still on their way
            counters = Counter(ask_status(cluster.endpoints["client"][:1]).counters)
            if not counters["pending"]:
                break
            assert clock.now_ms() < until_ms, counters
        assert counters["accepted"] + counters["refused_at_door"] == 10_000
        assert counters["accepted"] == counters["answers"] + counters["refusals"]
        assert counters["abandoned"] == 0


def test_garbage_on_every_socket_is_counted_and_the_rest_keeps_serving(tmp_path: Path) -> None:
    noise = random.Random(2)
    with cluster_of(tmp_path, TWO_MODELS) as cluster, BlockingClient(cluster.endpoints["client"]) as client:
        report = json.loads(tenuto("status", "--json", TENUTO_RUN_DIR=str(cluster.run_dir)).stdout)
        addresses = {
            address
            for process in report["processes"]
            for several in process["addresses"].values()
            for address in several
        } | {f"ipc://{path}" for path in cluster.run_dir.glob("*.sock")}
        assert len(addresses) >= 6
        for address in addresses:
            hurl(address, noise)
            assert client.infer("fast", {"input": np.zeros(4, np.float32)}).outputs
        for role in (cluster.endpoints["client"][:1], cluster.endpoints["control"]):
            counters = ask_status(role).counters
            assert sum(count for name, count in counters.items() if name.endswith("garbage_in")) > 0


def hurl(address: str, noise: random.Random) -> None:
    """Random bytes at the connection itself, then whole ZeroMQ messages of random frames."""
    kind = socket.AF_UNIX if address.startswith("ipc://") else socket.AF_INET
    place: str | tuple[str, int] = address.removeprefix("ipc://")
    if kind == socket.AF_INET:
        host, port = address.removeprefix("tcp://").split(":")
        place = (host, int(port))
    with socket.socket(kind, socket.SOCK_STREAM) as raw:
        raw.connect(place)
        raw.sendall(noise.randbytes(2_000))
    for kind_of_socket in (zmq.DEALER, zmq.PUSH):
        with zmq.Context() as context, context.socket(kind_of_socket) as peer:
            peer.setsockopt(zmq.LINGER, 500)
            peer.connect(address)
            for size in (0, 1, 7, 300, 70_000):
                frames = [noise.randbytes(size) for _ in range(noise.randint(1, 4))]
                with contextlib.suppress(zmq.Again):  # a kind of socket that this one does not talk to
                    peer.send_multipart(frames, zmq.NOBLOCK)


def test_nothing_is_left_of_a_cluster_whose_supervisor_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(TWO_MODELS, encoding="utf-8")
    clock = MonotonicClock()
    with temporary_cluster(path, ["--apart"]) as cluster:
        below = descendants(cluster.pid)
        assert len(below) >= 4
        os.kill(cluster.pid, signal.SIGKILL)
        until_ms = clock.now_ms() + 60_000
        while any(Path(f"/proc/{pid}/exe").exists() for pid in below):
            assert clock.now_ms() < until_ms, "processes outlive their supervisor"
            signal.sigtimedwait([], 0.02)


@pytest.mark.parametrize("is_sharing", [True, False])
def test_payload_arrives_bit_exact_and_not_through_the_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_sharing: bool
) -> None:
    rng = np.random.default_rng(1)
    if not is_sharing:
        monkeypatch.setenv(SWITCH, "0")  # for the roles; this process would share
    elif not memory_address():
        pytest.skip("this system has no memory to share")
    with cluster_of(tmp_path, ECHO) as cluster:
        ipc, tcp = cluster.endpoints["client"]
        # Whoever started it asked for its status until it served, in kilobytes a second.
        before = ask_status(cluster.endpoints["control"]).counters
        for address, shared_bytes_max in ((ipc, 1 << 20), (tcp, 1 << 20), (ipc, 0)):
            with BlockingClient(address, ClientOptions(shared_bytes_max=shared_bytes_max)) as client:
                for _ in range(5):
                    image = rng.standard_normal((3, 224, 224)).astype(np.float32)
                    same = client.infer("echo", {"image": image}).outputs["same"]
                    assert same.tobytes() == image.tobytes()
        counters = ask_status(cluster.endpoints["control"]).counters
        assert counters["requests_granted"] == 15
        control_bytes = sum(counters[name] - before[name] for name in ("bytes_in", "bytes_out"))
        assert control_bytes < 50_000, "15 payloads have 9 MB each way"
        counters = ask_status(ipc).counters
        assert counters["client_shared_bytes_in"] == (5 * image.nbytes if is_sharing else 0)
        assert counters["inputs_shared_bytes_out"] == (15 * image.nbytes if is_sharing else 0)


SENDER = """
import sys
import numpy as np
from fabric.client import BlockingClient

with BlockingClient(sys.argv[1]) as client:
    while True:
        client.infer("echo", {"image": np.zeros((3, 224, 224), np.float32)})
        print("answered", flush=True)
"""


def arenas_mapped(pid: int) -> int:
    """By a process that may have ended by now."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return sum("memfd:tenuto" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    return 0


def test_memory_shared_by_clients_that_were_killed_is_let_go(tmp_path: Path) -> None:
    if not memory_address():
        pytest.skip("this system has no memory to share")
    with cluster_of(tmp_path, ECHO) as cluster:
        for _ in range(4):
            with subprocess.Popen(
                [sys.executable, "-c", SENDER, cluster.endpoints["client"][0]],
                stdout=subprocess.PIPE,
                text=True,
            ) as sender:
                assert sender.stdout is not None
                assert sender.stdout.readline() == "answered\n"
                mapped = [arenas_mapped(pid) for pid in descendants(cluster.pid)]
                sender.kill()
            assert sum(count > 0 for count in mapped) == 2, "frontend and worker read it"
            assert max(mapped) <= 2, (
                "the next client's is opened, and all but the last of the dead's are let go"
            )


def test_a_model_that_cannot_load_or_run_hurts_only_itself(tmp_path: Path) -> None:
    ones = np.ones((3, 224, 224), np.float32)
    with cluster_of(tmp_path, ECHO) as cluster, BlockingClient(cluster.endpoints["client"]) as client:
        with pytest.raises(NoReplica):
            client.infer("broken", {"image": ones})
        with pytest.raises(RequestError, match="does not like"):
            client.infer("moody", {"image": ones})
        assert client.infer("echo", {"image": ones}).outputs["same"].shape == (3, 224, 224)
        (report,) = [
            one for one in ask_status(cluster.endpoints["control"]).slices if one.models == ("broken",)
        ]
        assert report.state == "failed"
        assert "no weights for cpu" in report.reason


def test_bad_requests_get_typed_refusals_and_the_rest_keeps_serving(tmp_path: Path) -> None:
    good = np.zeros((3, 224, 224), np.float32)
    with cluster_of(tmp_path, ECHO) as cluster, BlockingClient(cluster.endpoints["client"]) as client:
        with pytest.raises(ModelNotFound, match="echo"):
            client.infer("ecko", {"image": good})
        with pytest.raises(InvalidInput, match="float32"):
            client.infer("echo", {"image": good.astype(np.float64)})
        with pytest.raises(InvalidInput, match="224"):
            client.infer("echo", {"image": good[:, :100]})
        with pytest.raises(InvalidInput, match="image"):
            client.infer("echo", {"picture": good})
        with pytest.raises(InvalidInput):
            client.infer("echo", {})
        with pytest.raises(InvalidInput):
            client.infer("echo", {"image": good}, budget_ms=-1.0)
        with pytest.raises(TooLarge):
            client.infer("echo", {"image": np.zeros((18, 1000, 1000), np.float32)})
        assert client.infer("echo", {"image": good}).outputs["same"].shape == (3, 224, 224)


def tenuto(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "roles.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


def test_a_second_up_is_refused_and_the_first_serves_on(tmp_path: Path) -> None:
    with cluster_of(tmp_path, TWO_MODELS) as cluster:
        second = tenuto("up", str(tmp_path / "cluster.yaml"), "--run-dir", str(cluster.run_dir))
        assert second.returncode == 1
        assert "Traceback" not in second.stderr
        assert "already" in second.stderr
        with BlockingClient(cluster.endpoints["client"]) as client:
            assert client.infer("fast", {"input": np.zeros(1, np.float32)}).ledger.batch_size == 1


def test_a_lone_request_on_an_idle_cluster_is_answered_long_before_its_last_moment(tmp_path: Path) -> None:
    by_default = TWO_MODELS.replace("batching: eager", "# batching: the default").replace("400", "4000")
    with cluster_of(tmp_path, by_default) as cluster, BlockingClient(cluster.endpoints["client"]) as client:
        for _ in range(20):
            ledger = client.infer("fast", {"input": np.zeros(1, np.float32)}).ledger
            assert ledger.held_ms < 1_000


def test_status_lists_processes_slices_and_models(tmp_path: Path) -> None:
    with cluster_of(tmp_path, TWO_MODELS) as cluster:
        listed = tenuto("status", "--json", TENUTO_RUN_DIR=str(cluster.run_dir))
        assert listed.returncode == 0
        report = json.loads(listed.stdout)
        assert {"frontend-0", "node-one", "scheduler-0"} <= {one["role_id"] for one in report["processes"]}
        assert [one["state"] for one in report["slices"]] == ["ready"]
        assert {one["model_id"] for one in report["models"]} == {"fast", "slow"}
        for address in cluster.endpoints["client"]:
            assert address in report["endpoints"]["client"]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("models: [{name: a, slo: 5}]\ncluster: {gpus: 1}", "slo_ms"),
        ("models: [{name: a, slo_ms: 5, profile: {alpha_ms: 1, beta_ms: 1}}]", "cluster"),
        ("models: [{name: a, slo_ms: 5, profile: {alpha_ms: 1, beta_ms: 1}}]\ncluster: {gpu: 1}", "gpus"),
        ("models: [", "yaml"),
        (
            "models: [{name: a, slo_ms: fast, profile: {alpha_ms: 1, beta_ms: 1}}]\ncluster: {gpus: 1}",
            "slo_ms",
        ),
    ],
)
def test_a_wrong_file_ends_with_code_3_and_a_hint(tmp_path: Path, text: str, hint: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text, encoding="utf-8")
    ended = tenuto("up", str(path), "--run-dir", str(tmp_path / "run"))
    assert ended.returncode == 3, ended.stderr
    assert hint in ended.stderr.lower()
    assert "Traceback" not in ended.stderr
