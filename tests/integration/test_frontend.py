"""A real frontend and real clients; scheduler and worker are stood in for, over real sockets."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq
from PIL import Image

from fabric.client import BlockingClient, Client, ClientOptions, ask_status
from fabric.clock import MonotonicClock
from fabric.codec import encode
from fabric.errors import (
    DeadlineExceeded,
    InvalidInput,
    ModelNotFound,
    NoReplica,
    RequestError,
    TooLarge,
    WorkerLost,
)
from fabric.ids import FrontendId, ModelId
from fabric.messages import (
    WIRE_VERSION,
    Envelope,
    ImagePreprocess,
    ModelInfo,
    ModelsAsked,
    Parcel,
    TensorInfo,
)
from roles.frontend.shell import FrontendOptions, run_frontend
from roles.runtime.process import RunFile, StopSignal, read_run_file
from tests.integration.proc import CLOCK, until
from tests.integration.stand_in_cluster import StandInCluster

SLOW_MS = 5_000.0  # a budget that nothing here should come near
DIGITS = ModelInfo(
    ModelId("digits"), SLOW_MS, (TensorInfo("image", "float32", (1, 8, 8)),), (), None, replicas=1
)
PLAIN = ImagePreprocess("input", 8, 8, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
VISION = ModelInfo(
    ModelId("vision"), SLOW_MS, (TensorInfo("input", "float32", (3, 8, 8)),), (), PLAIN, replicas=1
)
ANYTHING = ModelInfo(ModelId("anything"), SLOW_MS, replicas=1)
ABSENT = ModelInfo(ModelId("absent"), SLOW_MS)
MODELS = (DIGITS, VISION, ANYTHING, ABSENT)


class Running:
    """A frontend on a thread of its own."""

    def __init__(self, run_dir: Path, control: str) -> None:
        self._stop = StopSignal()
        self._path = run_dir / "frontend-0.json"
        options = FrontendOptions(FrontendId("frontend-0"), run_dir, [[control]], request_bytes_max=4 << 20)
        self._thread = threading.Thread(target=run_frontend, args=(options, self._stop), name="frontend")
        self._thread.start()
        until(self._path.exists, what="the frontend's run file")

    @property
    def run_file(self) -> RunFile:
        found = read_run_file(self._path)
        assert found is not None
        return found

    @property
    def addresses(self) -> list[str]:
        return list(self.run_file.addresses["client"])

    def counter(self, name: str) -> float:
        return ask_status(self.addresses).counters.get(name, 0.0)

    def stop(self) -> None:
        self._stop.is_set = True
        self._stop._write.send(b"x")
        self._thread.join(10.0)
        assert not self._thread.is_alive()
        self._stop.__exit__()
        assert not self._path.exists()


@pytest.fixture
def run_dir() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="tn-"))  # pytest's own are too long for ipc
    yield path
    shutil.rmtree(path)


@pytest.fixture
def control(run_dir: Path) -> str:
    return f"ipc://{run_dir}/control"


@pytest.fixture
def cluster(control: str) -> Iterator[StandInCluster]:
    with StandInCluster(control, MODELS) as made:
        yield made


@pytest.fixture
def frontend(run_dir: Path, control: str, cluster: StandInCluster) -> Iterator[Running]:
    made = Running(run_dir, control)
    until(lambda: cluster.seen["FrontendHello"] > 0, what="the frontend's hello")
    with BlockingClient(made.addresses) as client:
        until(lambda: len(client.models()) == len(MODELS), what="the directory")
    yield made
    made.stop()


def with_client(frontend: Running, work: Callable[[Client], Awaitable[None]]) -> None:
    async def run() -> None:
        async with Client(frontend.addresses) as client:
            await work(client)

    asyncio.run(run())


def test_two_hundred_concurrent_requests_for_two_models_are_each_answered_with_their_own_output(
    frontend: Running,
) -> None:
    async def work(client: Client) -> None:
        draws = np.random.default_rng(1)
        asked = []
        for number in range(200):
            digits = number % 2 == 0
            shape = (1, 8, 8) if digits else (3, 8, 8)
            array = draws.random(shape, dtype=np.float32)
            name, model = ("image", "digits") if digits else ("input", "vision")
            asked.append((array, client.submit(model, {name: array})))
        for array, future in asked:
            result = await future
            np.testing.assert_array_equal(result.outputs["output"], 2 * array + 1)
            assert result.ledger.batch_size >= 1
            assert result.ledger.reason == "eager"
            assert 0 < result.ledger.gpu_ms < result.ledger.total_ms

    with_client(frontend, work)
    assert frontend.counter("answers") == 200
    assert frontend.counter("pending") == frontend.counter("pending_bytes") == 0
    assert frontend.counter("runs_announced") < 200, "what came in one turn was announced as runs"


def test_a_payload_of_0_6_mb_is_bit_exact_and_the_scheduler_sees_none_of_it(
    frontend: Running, cluster: StandInCluster
) -> None:
    array = np.random.default_rng(2).integers(0, 1 << 30, (3, 224, 224), dtype=np.int32)

    async def work(client: Client) -> None:
        results = await asyncio.gather(*(client.infer("anything", {"x": array + n}) for n in range(8)))
        for number, result in enumerate(results):
            np.testing.assert_array_equal(result.outputs["output"], 2 * (array + number) + 1)

    with_client(frontend, work)
    assert frontend.counter("inputs_bytes_out") > 8 * array.nbytes
    cluster.__exit__()
    assert cluster.control_bytes < 20_000


@pytest.mark.parametrize(
    ("model", "inputs", "budget_ms", "error", "words"),
    [
        ("digitz", {"image": np.zeros((1, 8, 8), np.float32)}, None, ModelNotFound, "'digits'"),
        ("digits", {"image": np.zeros((1, 8, 8), np.float64)}, None, InvalidInput, "float32"),
        ("digits", {"image": np.zeros((8, 8), np.float32)}, None, InvalidInput, "shape"),
        ("digits", {}, None, InvalidInput, "image"),
        ("digits", {"picture": np.zeros((1, 8, 8), np.float32)}, None, InvalidInput, "picture"),
        ("anything", {"x": np.zeros(5 << 20, np.uint8)}, None, TooLarge, "at most 4,194,304 a request"),
        ("absent", {}, None, NoReplica, "absent"),
        ("vision", {"input": b"not a picture"}, None, InvalidInput, "not a picture"),
        ("anything", {"x": np.zeros(3)}, 0.001, DeadlineExceeded, "budget"),
    ],
)
def test_bad_requests_get_typed_answers_and_the_rest_is_served(
    frontend: Running,
    model: str,
    inputs: dict[str, np.ndarray | bytes],
    budget_ms: float | None,
    error: type[RequestError],
    words: str,
) -> None:
    with BlockingClient(frontend.addresses) as client:
        with pytest.raises(error, match=words):
            client.infer(model, inputs, budget_ms)
        good = np.ones((1, 8, 8), np.float32)
        np.testing.assert_array_equal(client.infer("digits", {"image": good}).outputs["output"], 2 * good + 1)


def test_a_picture_is_decoded_in_the_frontend(frontend: Running) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (32, 16), (255, 0, 0)).save(buffer, "PNG")
    with BlockingClient(frontend.addresses) as client:
        result = client.infer("vision", {"input": buffer.getvalue()})
    assert result.outputs["output"].shape == (3, 8, 8)
    assert result.outputs["output"][:, 4, 4].tolist() == [3.0, 1.0, 1.0]
    assert result.ledger.preprocess_ms > 0


def test_a_silent_worker_costs_the_budget_and_no_more(frontend: Running, cluster: StandInCluster) -> None:
    cluster.is_worker_silent = True
    with BlockingClient(frontend.addresses) as client:
        began_ms = CLOCK.now_ms()
        with pytest.raises(DeadlineExceeded):
            client.infer("anything", {"x": np.zeros(3)}, budget_ms=100.0)
        assert 100.0 <= CLOCK.now_ms() - began_ms < 1_000.0


def test_a_cancelled_request_is_forgotten(frontend: Running, cluster: StandInCluster) -> None:
    cluster.is_worker_silent = True

    async def work(client: Client) -> None:
        future = client.submit("anything", {"x": np.zeros(3)})
        await asyncio.sleep(0)
        future.cancel()
        await asyncio.sleep(0)  # the client tells the frontend in the loop's next turn
        assert future.cancelled()
        # A client that left before its cancel is read has its requests abandoned, which is not what is tried here.
        await asyncio.to_thread(until, lambda: frontend.counter("refused_Cancelled") == 1, what="the cancel")

    with_client(frontend, work)
    assert frontend.counter("pending") == 0


def test_requests_of_a_lost_worker_are_answered_by_the_next_one(
    frontend: Running, cluster: StandInCluster
) -> None:
    cluster.is_worker_silent = True
    with BlockingClient(frontend.addresses) as client:
        futures = [client.submit("anything", {"x": np.full(3, n)}) for n in range(20)]
        until(lambda: frontend.counter("pending") == 20 and cluster.seen["Inputs"] > 0, what="the push")
        before = cluster.seen["Inputs"]
        until(lambda: cluster.seen["Inputs"] >= before, what="all inputs")
        cluster.restart_worker()
        for number, future in enumerate(futures):
            assert future.result(10.0).outputs["output"].tolist() == [2 * number + 1] * 3


def test_a_worker_lost_twice_is_an_error(frontend: Running, cluster: StandInCluster) -> None:
    cluster.is_worker_silent = True
    with BlockingClient(frontend.addresses) as client:
        future = client.submit("anything", {"x": np.zeros(3)})
        until(lambda: cluster.seen["Inputs"] == 1, what="the first try")
        cluster._is_restart_asked.set()
        until(lambda: cluster.seen["Inputs"] == 2, what="the second try")
        cluster._is_restart_asked.set()
        with pytest.raises(WorkerLost):
            future.result(10.0)


def test_while_the_scheduler_is_gone_deadlines_hold_and_on_its_return_all_is_served(
    run_dir: Path, control: str
) -> None:
    array = np.arange(3)
    with StandInCluster(control, MODELS) as first:
        frontend = Running(run_dir, control)
        until(lambda: first.seen["FrontendHello"] > 0, what="hello")
        with BlockingClient(frontend.addresses) as client:
            until(lambda: len(client.models()) == len(MODELS), what="the directory")
    try:
        with BlockingClient(frontend.addresses) as client:
            with pytest.raises(DeadlineExceeded):
                client.infer("anything", {"x": array}, budget_ms=50.0)
            waiting = client.submit("anything", {"x": array})
            until(lambda: frontend.counter("pending") == 1, what="the waiting request")
            with StandInCluster(control, MODELS):
                assert waiting.result(10.0).outputs["output"].tolist() == [1, 3, 5]
                assert client.infer("anything", {"x": array}).outputs["output"].tolist() == [1, 3, 5]
    finally:
        frontend.stop()


def test_a_scheduler_that_never_was_there_means_no_replica(run_dir: Path, control: str) -> None:
    frontend = Running(run_dir, control)
    try:
        with BlockingClient(frontend.addresses) as client, pytest.raises(NoReplica):
            client.infer("digits", {"image": np.zeros((1, 8, 8), np.float32)})
    finally:
        frontend.stop()


def test_garbage_on_every_socket_is_counted_and_the_rest_is_served(frontend: Running) -> None:
    context = zmq.Context()
    addresses = frontend.run_file.addresses
    for kind, address in ((zmq.DEALER, addresses["client"][-1]), (zmq.PUSH, addresses["payload"][-1])):
        with context.socket(kind) as socket:
            socket.setsockopt(zmq.LINGER, 1_000)
            socket.connect(address)
            for size in (0, 1, 10, 1_000):
                socket.send_multipart([os.urandom(size), os.urandom(size)])
    context.term()
    until(lambda: frontend.counter("client_garbage_in") == 4, what="garbage among clients")
    until(lambda: frontend.counter("outputs_garbage_in") == 4, what="garbage among outputs")
    with BlockingClient(frontend.addresses) as client:
        assert client.infer("anything", {"x": np.arange(2)}).outputs["output"].tolist() == [1, 3]


def test_a_second_frontend_of_the_same_name_is_refused_and_the_first_serves_on(
    frontend: Running, run_dir: Path, control: str
) -> None:
    options = FrontendOptions(FrontendId("frontend-0"), run_dir, [[control]])
    stop = StopSignal()
    with pytest.raises(Exception, match="in use"):
        run_frontend(options, stop)
    stop.__exit__()
    with BlockingClient(frontend.addresses) as client:
        assert client.infer("anything", {"x": np.arange(2)}).outputs["output"].tolist() == [1, 3]


def test_a_client_that_does_not_read_loses_answers_and_nobody_else_does(frontend: Running) -> None:
    context = zmq.Context()
    with context.socket(zmq.DEALER) as deaf:
        deaf.setsockopt(zmq.LINGER, 0)
        deaf.setsockopt(zmq.RCVHWM, 1)
        deaf.setsockopt(zmq.SNDTIMEO, 10_000)
        deaf.setsockopt(zmq.IDENTITY, b"client/deaf")
        deaf.connect(frontend.addresses[0])  # ipc: the kernel keeps far less of what is unread than for tcp
        header = encode(Envelope(WIRE_VERSION, 0, 0.0, (Parcel((), ModelsAsked()),)))
        sent = 0
        with BlockingClient(frontend.addresses) as client:
            while frontend.counter("answers_dropped") == 0:
                for _ in range(1_000):
                    deaf.send(header)
                sent += 1_000
                result = client.infer("anything", {"x": np.arange(2)})
                assert result.outputs["output"].tolist() == [1, 3]
                until(lambda: frontend.counter("client_messages_in") >= sent, what="the end of the flood")  # noqa: B023  called at once
    context.term()


class BehindClock(MonotonicClock):
    """Of a host that slept for a while."""

    slept_ms = 0.0

    def now_ms(self) -> float:
        return super().now_ms() - self.slept_ms


def test_a_client_whose_host_slept_is_served_again_within_two_seconds(frontend: Running) -> None:
    clock = BehindClock()
    image = {"image": np.zeros((1, 8, 8), np.float32)}

    async def run() -> None:
        async with Client(frontend.addresses[1:], ClientOptions(clock=clock)) as client:
            await client.infer("digits", image, budget_ms=SLOW_MS)
            clock.slept_ms = (
                900.0  # less than what a client is lost after, or a clock that begins anew is known by
            )
            with pytest.raises(DeadlineExceeded, match="on the way here"):
                await client.infer("digits", image, budget_ms=500.0)
            async with asyncio.timeout(2.0):
                while True:
                    await asyncio.sleep(0.1)
                    try:
                        await client.infer("digits", image, budget_ms=500.0)
                    except DeadlineExceeded:
                        continue
                    return

    asyncio.run(run())
