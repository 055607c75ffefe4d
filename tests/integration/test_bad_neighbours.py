"""One client or worker misbehaves: memory stays bounded, it gets typed refusals, and the others lose nothing.

A real frontend in a process of its own, so that its memory is its own; scheduler and workers are stood in for.
A steady client of another model is served meanwhile, and the frontend's memory is the peak over what it was before.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from fabric.client import BlockingClient, Client, ask_status
from fabric.codec import encode
from fabric.errors import RequestError, TooLarge
from fabric.ids import ModelId, PeerId, new_incarnation, peer_id
from fabric.link import NamedTensor
from fabric.messages import WIRE_VERSION, Envelope, Infer, ModelInfo, Parcel, Refusal, TensorSpec
from fabric.sockets import DealerLink, LinkOptions
from roles.benchmark.temporary_cluster import temporary_cluster
from roles.runtime.process import child_environment, read_run_file
from tests.integration.proc import forget_peak, peak_rss_mb, processes_naming, rss_mb, until
from tests.integration.raw_zmtp import frame_start, header, shake_hands
from tests.integration.stand_in_cluster import StandInCluster
from tests.integration.steady_load import steady_load

MB = 1 << 20
_ESTABLISHED = 1  # of Linux's `tcpi_state`
START_MS = 60_000.0
SLOW_MS = 20_000.0  # a budget that nobody who behaves should come near
NAMES = ("good", "bad", "deaf", "vast")
GOOD, BAD, DEAF, VAST = (ModelInfo(ModelId(name), SLOW_MS, replicas=1) for name in NAMES)
FRONTEND = PeerId("frontend")
CONFIG = """
models: [{name: good, slo_ms: 20000, profile: {alpha_ms: 1, beta_ms: 1}}]
cluster: {gpus: 1}
"""


@dataclass
class Frontend:
    """A frontend's process: where clients come in by ipc and by tcp."""

    ipc: str
    tcp: str
    pid: int

    def counter(self, name: str) -> float:
        return ask_status(self.ipc, timeout_ms=10_000.0).counters.get(name, 0.0)


@pytest.fixture(scope="module")
def frontend() -> Iterator[Frontend]:
    run_dir = Path(tempfile.mkdtemp(prefix="tn-"))  # pytest's own are too long for ipc
    control = f"ipc://{run_dir}/control"
    (run_dir / "config.yaml").write_text(CONFIG, encoding="utf-8")
    command = [sys.executable, "-m", "roles.cli", "frontend", str(run_dir / "config.yaml")]
    command += ["--run-dir", str(run_dir), "--scheduler", control]
    with StandInCluster(control, (GOOD, BAD, DEAF, VAST), DEAF.model_id, VAST.model_id):
        process = subprocess.Popen(command, env=child_environment(), stderr=subprocess.DEVNULL)
        try:
            run_file = run_dir / "frontend-0.json"
            until(run_file.exists, START_MS, what="the frontend's run file")
            found = read_run_file(run_file)
            assert found is not None
            ipc, tcp = found.addresses["client"]
            with BlockingClient(ipc) as client:
                until(lambda: len(client.models()) == 4, START_MS, what="the directory")
                client.infer("bad", {"x": np.zeros(MB, np.uint8)})
            yield Frontend(ipc, tcp, process.pid)
        finally:
            process.terminate()
            process.wait(10)
            shutil.rmtree(run_dir)


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest, frontend: Frontend) -> str:
    return frontend.ipc if request.param == "ipc" else frontend.tcp


@contextmanager
def unharmed(frontend: Frontend, growth_mb: float) -> Iterator[None]:
    """What happens in the block costs the frontend at most so much memory, and a steady client nothing."""
    before_mb = rss_mb(frontend.pid)
    forget_peak(frontend.pid)
    with steady_load([frontend.ipc], {"good": 100}) as fates:
        yield
        until(lambda: len(fates.of["good"]) >= 10, what="answers to the steady client")
    assert fates.refused("good") == []
    assert peak_rss_mb(frontend.pid) - before_mb < growth_mb
    until(lambda: frontend.counter("pending") == frontend.counter("pending_bytes") == 0, what="the end")


def test_payload_over_the_limit_is_refused_and_not_kept(frontend: Frontend, address: str) -> None:
    too_large = np.zeros(65 * MB, np.uint8)
    with unharmed(frontend, 200.0), BlockingClient(address) as client:
        for _ in range(4):
            with pytest.raises(TooLarge, match="at most 67,108,864 a request"):
                client.infer("bad", {"x": too_large})


def test_an_answer_over_the_limit_is_refused_and_the_frontend_serves_on(
    frontend: Frontend, address: str
) -> None:
    """It ended the frontend: what a model gives is no bug of ours."""
    with (
        unharmed(frontend, 600.0),
        BlockingClient(address) as client,
        pytest.raises(TooLarge, match="269484032 bytes"),
    ):
        client.infer("vast", {"x": np.zeros(1, np.uint8)})


def test_a_frame_over_the_limit_of_a_link_costs_its_sender_the_connection(
    frontend: Frontend, address: str
) -> None:
    announced = 1 << 40
    infer = header(Infer(1, BAD.model_id), (TensorSpec("x", "uint8", (announced,)),))
    with unharmed(frontend, 50.0):
        for number in range(10):
            with shake_hands(address, f"client/huge{number}") as connection:
                with contextlib.suppress(ConnectionError):  # it may be closed before all of this is out
                    connection.sendall(infer + frame_start(announced) + bytes(MB))
                with contextlib.suppress(ConnectionError):
                    assert connection.recv(1) == b"", "it was closed"


def test_a_client_that_sends_and_never_reads_loses_answers_beyond_a_byte_budget(
    frontend: Frontend, address: str
) -> None:
    array = np.ones((600, 1_000), np.float32)
    dropped, came_bytes = frontend.counter("answers_dropped"), frontend.counter("client_bytes_in")
    asked = 0
    with zmq.Context() as context, context.socket(zmq.DEALER) as unread, unharmed(frontend, 450.0):
        unread.setsockopt(zmq.LINGER, 0)
        unread.setsockopt(zmq.RCVHWM, 1)
        unread.setsockopt(zmq.SNDTIMEO, 10_000)
        unread.setsockopt(zmq.IDENTITY, b"client/unread-" + address[:3].encode())
        with unread.get_monitor_socket(zmq.EVENT_CONNECTED) as monitor:
            unread.connect(address)
            own = int(recv_monitor_message(monitor)["value"])
        spec = TensorSpec("x", "float32", array.shape)
        # By TCP who takes nothing for five seconds is hung up on, which on a busy host comes first.
        while frontend.counter("answers_dropped") == dropped and _stands(own):
            assert asked < 300, "700 MB of answers are kept for somebody who does not read"
            for _ in range(10):
                parcel = Parcel((spec,), Infer(asked, BAD.model_id))
                unread.send_multipart(
                    [encode(Envelope(WIRE_VERSION, 0, 0.0, (parcel,))), array.data], copy=False
                )
                asked += 1
            came_bytes += 10 * array.nbytes

            until(
                lambda: frontend.counter("client_bytes_in") >= came_bytes or not _stands(own),  # noqa: B023  called at once
                what="the requests",
            )
            until(lambda: frontend.counter("pending_bytes") < array.nbytes, what="their answers")


def _stands(descriptor: int) -> bool:
    """Whether a connection does. ZeroMQ does not look at one whose messages nobody takes."""
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        return (
            connection.family == socket.AF_UNIX
            or connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED
        )


def test_a_client_that_dies_in_the_middle_of_a_frame_leaves_nothing(frontend: Frontend, address: str) -> None:
    size = 60 * MB
    infer = header(Infer(1, BAD.model_id), (TensorSpec("x", "uint8", (size,)),))
    half = infer + frame_start(size) + bytes(20 * MB)
    gone = _answered_nobody(frontend)
    with unharmed(frontend, 150.0):
        for end in [len(half)] * 8 + [1, len(infer) // 2, len(infer), len(infer) + 5]:
            with shake_hands(address, f"client/dies-{end}") as connection:
                connection.sendall(half[:end])
        with shake_hands(address, "client/dies-whole") as connection:
            connection.sendall(
                half + bytes(size - 20 * MB)
            )  # dies right after it: nobody is left to be answered
        until(lambda: _answered_nobody(frontend) > gone, what="the request of nobody")


def _answered_nobody(frontend: Frontend) -> float:
    """Requests whose client was gone: noticed before the answer, or by it."""
    return frontend.counter("abandoned") + frontend.counter("client_unroutable_out")


def test_a_worker_that_takes_nothing_costs_its_own_requests_and_no_others(frontend: Frontend) -> None:
    refused = frontend.counter("pushes_refused")
    link = DealerLink.connect(peer_id("client", new_incarnation()), FRONTEND, [frontend.tcp], LinkOptions())
    tensors = [NamedTensor("x", np.zeros(MB, np.uint8))]
    codes: Counter[str] = Counter()
    asked = 0
    with unharmed(frontend, 450.0):
        until(lambda: link.send(FRONTEND, Infer(0, DEAF.model_id, 2_000.0), tensors), what="a connection")
        while frontend.counter("pushes_refused") == refused:
            asked += 1
            assert asked < 400, "all of them wait for a worker that takes nothing"
            assert link.send(FRONTEND, Infer(asked, DEAF.model_id, 2_000.0), tensors)

        def are_all_refused() -> bool:
            codes.update(
                received.message.code
                for received in link.receive(64)
                if isinstance(received.message, Refusal)
            )
            return codes.total() == asked + 1

        until(are_all_refused, what="an answer to each request")
    link.close()
    assert set(codes) == {"DeadlineExceeded", "Overloaded"}


def test_requests_at_once_for_a_worker_that_takes_nothing_end_with_their_budget(frontend: Frontend) -> None:
    async def flood() -> Counter[str]:
        async with Client(frontend.ipc) as client:

            async def fate() -> str:
                try:
                    await client.infer("deaf", {"x": np.zeros(MB, np.uint8)}, budget_ms=1_000.0)
                except RequestError as error:
                    return error.code
                return "ok"

            return Counter(await asyncio.gather(*(fate() for _ in range(200))))

    with unharmed(frontend, 450.0):
        codes = asyncio.run(flood())
    assert codes.total() == 200
    assert set(codes) <= {"DeadlineExceeded", "Overloaded"}


TWO_WORKERS = """
models:
 - {name: good, slo_ms: 20000, profile: {alpha_ms: 0.5, beta_ms: 2, max_batch: 32}}
 - {name: bad, slo_ms: 500, profile: {alpha_ms: 0.5, beta_ms: 2, max_batch: 32}}
cluster:
  nodes: [{host: one, gpus: 1, device: emulated}, {host: two, gpus: 1, device: emulated}]
batching: eager
placement:
  given:
    slices:
     - {gpu: 0, models: [{model: good}]}
     - {gpu: 1, models: [{model: bad}]}
"""


def test_a_worker_that_is_stopped_costs_its_own_model_and_serves_when_it_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(TWO_WORKERS, encoding="utf-8")
    codes: Counter[str] = Counter()
    with temporary_cluster(path) as cluster, BlockingClient(cluster.endpoints["client"]) as client:
        until(lambda: code_of(client, "bad") == "ok", START_MS, what="the first answer")
        of_cluster = processes_naming(str(cluster.run_dir))
        (worker,) = [pid for pid, command in of_cluster.items() if " worker-two-" in command]
        with steady_load(cluster.endpoints["client"], {"good": 100}) as fates:
            os.kill(worker, signal.SIGSTOP)
            try:
                while "NoReplica" not in codes:
                    codes.update([code_of(client, "bad")])
                    assert codes.total() < 100, codes
            finally:
                os.kill(worker, signal.SIGCONT)
            until(lambda: code_of(client, "bad") == "ok", what="its return")
        assert fates.refused("good") == []
    assert set(codes) <= {"DeadlineExceeded", "WorkerLost", "NoReplica"}


def code_of(client: BlockingClient, model: str) -> str:
    """What becomes of one request of a megabyte."""
    try:
        client.infer(model, {"x": np.zeros(MB, np.uint8)})
    except RequestError as error:
        return error.code
    return "ok"
