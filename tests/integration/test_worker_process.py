"""A real worker process over real sockets; agent, scheduler and frontend are played by the test."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from deploy.local.demo.digits_model import HELD_OUT
from fabric.clock import MonotonicClock
from fabric.ids import BatchId, FrontendId, Incarnation, ModelId, NodeId, PeerId, SliceId
from fabric.link import Link, NamedTensor, Received
from fabric.messages import (
    BatchFailed,
    Directory,
    Done,
    FrontendInfo,
    Host,
    Inputs,
    LoaderSpec,
    Outputs,
    Part,
    Ping,
    Pong,
    RunBatch,
    SeqRun,
    SliceFailed,
    SliceReady,
    SliceSpec,
    StatusAsked,
    StatusListed,
    Stop,
    WorkerHello,
)
from fabric.sockets import PullLink, PushPool, RouterLink
from roles.runtime.exit_codes import EXIT_HUNG
from roles.runtime.process import child_environment
from tests.worker_builders import model_spec, slice_spec

MessageT = TypeVar("MessageT")

WITHIN_MS = 60_000.0  # importing torch on a busy machine; everything else takes milliseconds
CODE = """
import sys
from pathlib import Path
from roles.gpu_worker.shell import run_worker
sys.exit(run_worker(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
"""
EMULATED = SliceId("node-0/gpu0/0")
DIGITS = SliceId("node-0/cpu0/0")
FRONTEND = FrontendId("frontend-0")
FRONTEND_BOOT = Incarnation("f0f0f0f0")

USER = "tests.unit.roles.gpu_worker.executors.models_for_tests"


def digits_slice(name: str = "deploy.local.demo.digits_model:Digits", slice_id: str = DIGITS) -> SliceSpec:
    spec = model_spec("digits", (), 8, LoaderSpec(python=name), slo_ms=60_000.0)
    return slice_spec(slice_id, [spec], device="cpu")


class Cluster:
    """Everything around one worker."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.clock = MonotonicClock()
        self.agent = RouterLink.bind([f"ipc://{run_dir}/agent.sock"])
        self.scheduler = RouterLink.bind([f"ipc://{run_dir}/scheduler.sock"])
        self.outputs = PullLink.bind([f"ipc://{run_dir}/frontend.sock"])
        self.push = PushPool()
        self.worker = PeerId("")
        self.process: subprocess.Popen[bytes] | None = None
        self.ready: dict[SliceId, SliceReady] = {}
        self.heard: list[tuple[Link, Received]] = []

    def start(self, *slices: SliceSpec) -> None:
        command = [sys.executable, "-c", CODE, self.agent.addresses[0], "worker-0", str(self.run_dir)]
        self.process = subprocess.Popen(command, env=child_environment(), stderr=subprocess.DEVNULL)
        hello = self.hear(self.agent, WorkerHello)
        assert isinstance(hello.message, WorkerHello)
        assert hello.message.pid == self.process.pid
        self.worker = hello.peer
        assert self.agent.send(self.worker, Host(NodeId("node-0"), slices, tuple(self.scheduler.addresses)))

    def introduce(self, slices: int) -> None:
        """Until the scheduler knows that many slices; then the directory goes out."""
        while len(self.ready) < slices:
            ready = self.hear(self.scheduler, SliceReady).message
            assert isinstance(ready, SliceReady)
            self.ready[ready.slice_id] = ready
            self.push.know(PeerId(ready.slice_id), ready.incarnation, ready.addresses)
        frontend = FrontendInfo(FRONTEND, FRONTEND_BOOT, tuple(self.outputs.addresses))
        assert self.scheduler.send(self.worker, Directory(1, (), (), (frontend,)))

    def run(
        self, slice_id: SliceId, batch_id: int, seqs: Sequence[int], latest_in_ms: float = 5_000.0
    ) -> None:
        ready = self.ready[slice_id]
        parts = (Part(FRONTEND, tuple(SeqRun(seq, 1) for seq in seqs)),)
        message = RunBatch(
            BatchId(batch_id),
            slice_id,
            ready.incarnation,
            ready.replicas[0].model_id,
            parts,
            0.0,
            latest_in_ms,
            latest_in_ms,
        )
        assert self.scheduler.send(self.worker, message)

    def feed(
        self, slice_id: SliceId, batch_id: int, seqs: Sequence[int], tensors: Sequence[NamedTensor]
    ) -> None:
        ready = self.ready[slice_id]
        message = Inputs(
            BatchId(batch_id),
            slice_id,
            ready.incarnation,
            ready.replicas[0].model_id,
            FRONTEND,
            0,
            tuple(seqs),
        )
        assert self.push.send(PeerId(slice_id), message, tensors)

    def hear(self, link: Link, kind: type[MessageT], within_ms: float = WITHIN_MS) -> Received:
        """The next message of a kind on that link; a scheduler answers pings all the while."""
        until_ms = self.clock.now_ms() + within_ms
        while (left_ms := until_ms - self.clock.now_ms()) > 0:
            for heard in (self.scheduler, link):
                for received in heard.receive(64):
                    if isinstance(received.message, Ping):
                        heard.send(received.peer, Pong(received.message.number))
                    else:
                        self.heard.append((heard, received))
            for index, (heard, received) in enumerate(self.heard):
                if heard is link and isinstance(received.message, kind):
                    del self.heard[index]
                    return received
            if not (link.has_more or self.scheduler.has_more):
                select.select([link, self.scheduler], [], [], min(left_ms, 20.0) / 1e3)
        raise AssertionError(f"no {kind.__name__} within {within_ms} ms")

    def end(self, within_s: float = 10.0) -> int:
        assert self.process is not None
        return self.process.wait(within_s)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        for link in (self.agent, self.scheduler, self.outputs, self.push):
            link.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    try:
        yield made
    finally:
        made.close()


def rows(received: Received) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]:
    return {tensor.name: tensor.array for tensor in received.tensors}


def picture(value: float = 0.0) -> NamedTensor:
    return NamedTensor("image", np.full((1, 8, 8), value, np.float32))


def test_an_emulated_slice_answers_zeros_after_its_run_time(cluster: Cluster) -> None:
    cluster.start(slice_spec(EMULATED, [model_spec(exec_ms=(20.0, 30.0))]))
    cluster.introduce(1)
    assert cluster.process is not None
    assert "libtorch" not in Path(f"/proc/{cluster.process.pid}/maps").read_text(encoding="utf-8")
    for batch_id in range(3):
        granted_ms = cluster.clock.now_ms()
        cluster.run(EMULATED, batch_id, [1, 2])
        cluster.feed(EMULATED, batch_id, [1, 2], [])
        answer = cluster.hear(cluster.outputs, Outputs)
        assert isinstance(answer.message, Outputs)
        assert (answer.message.seqs, answer.message.gpu_ms) == ((1, 2), 30.0)
        assert rows(answer)["output"].tolist() == [[0.0], [0.0]]
        assert cluster.clock.now_ms() - granted_ms >= 30.0
        done = cluster.hear(cluster.scheduler, Done).message
        assert isinstance(done, Done)
        assert (done.batch_id, done.status, done.ran) == (batch_id, "ok", 2)
    assert cluster.agent.send(cluster.worker, Stop(1_000.0))
    assert cluster.end() == 0
    assert sorted(path.name for path in cluster.run_dir.glob("worker*")) == []


def test_digits_are_recognised_on_a_cpu(cluster: Cluster) -> None:
    cluster.start(digits_slice())
    cluster.introduce(1)
    with np.load(HELD_OUT) as held_out:
        images, labels = held_out["images"][:8], held_out["labels"][:8]
    cluster.feed(DIGITS, 1, range(8), [NamedTensor("image", image) for image in images])
    cluster.run(DIGITS, 1, range(8))
    answer = cluster.hear(cluster.outputs, Outputs)
    assert rows(answer)["digit"].tolist() == labels.tolist()
    assert rows(answer)["scores"].shape == (8, 10)
    replica = cluster.ready[DIGITS].replicas[0]
    assert [(info.name, info.shape) for info in replica.inputs] == [("image", (1, 8, 8))]
    assert len(replica.exec_ms) == 8
    # One picture of the wrong size hurts nobody else.
    big = NamedTensor("image", np.zeros((1, 9, 9), np.float32))
    cluster.run(DIGITS, 2, [20, 21, 22])
    cluster.feed(DIGITS, 2, [20, 21, 22], [picture(), big, picture()])
    heard = [
        cluster.hear(cluster.outputs, Outputs).message,
        cluster.hear(cluster.outputs, BatchFailed).message,
    ]
    assert isinstance(heard[0], Outputs)
    assert heard[0].seqs == (20, 22)
    assert isinstance(heard[1], BatchFailed)
    assert (heard[1].seqs, heard[1].code) == ((21,), "InvalidInput")


def test_a_loader_that_raises_fails_its_slice_and_the_other_serves(cluster: Cluster) -> None:
    bad = digits_slice("tests.unit.roles.gpu_worker.executors.models_for_tests:RaisesInLoad", "node-0/cpu1/0")
    cluster.start(slice_spec(EMULATED), bad)
    cluster.introduce(1)
    failed = cluster.hear(cluster.agent, SliceFailed).message
    assert isinstance(failed, SliceFailed)
    assert (failed.slice_id, failed.reason) == (bad.slice_id, "RuntimeError: no weights today")
    cluster.run(EMULATED, 1, [1])
    cluster.feed(EMULATED, 1, [1], [])
    assert cluster.hear(cluster.outputs, Outputs)


def test_outputs_that_cannot_be_sent_are_refused_and_the_worker_serves_on(cluster: Cluster) -> None:
    fickle = "tests.unit.roles.gpu_worker.executors.models_for_tests:Fickle"
    cluster.start(digits_slice(fickle))
    cluster.introduce(1)
    for batch_id, (value, code, reason) in enumerate(
        (
            (9.0, "Internal", "has 9 dimensions; it may have 8"),
            (257.0, "TooLarge", "269484032 bytes for one request"),
        )
    ):
        x = NamedTensor("x", np.full(3, value, np.float32))
        cluster.run(DIGITS, 10 + batch_id, [batch_id])
        cluster.feed(DIGITS, 10 + batch_id, [batch_id], [x])
        failed = cluster.hear(cluster.outputs, BatchFailed).message
        assert isinstance(failed, BatchFailed)
        assert (failed.seqs, failed.code) == ((batch_id,), code)
        assert reason in failed.reason
    cluster.run(DIGITS, 20, [20])
    cluster.feed(DIGITS, 20, [20], [NamedTensor("x", np.ones(3, np.float32))])
    assert rows(cluster.hear(cluster.outputs, Outputs))["x"].tolist() == [[2.0] * 3]


@pytest.mark.parametrize(
    ("name", "reason"), [("Deep", "output 'deep' has 8 axes"), ("Vast", "269484032 bytes a request")]
)
def test_warming_up_notices_outputs_that_cannot_be_sent(cluster: Cluster, name: str, reason: str) -> None:
    cluster.start(digits_slice(f"tests.unit.roles.gpu_worker.executors.models_for_tests:{name}"))
    failed = cluster.hear(cluster.agent, SliceFailed).message
    assert isinstance(failed, SliceFailed)
    assert reason in failed.reason


def test_a_model_of_many_inputs_offers_only_batches_that_can_be_sent(cluster: Cluster) -> None:
    broad = LoaderSpec(python="tests.unit.roles.gpu_worker.executors.models_for_tests:Broad")
    spec = model_spec("broad", (), 64, broad, slo_ms=60_000.0)
    cluster.start(slice_spec(DIGITS, [spec], device="cpu"))
    cluster.introduce(1)
    replica = cluster.ready[DIGITS].replicas[0]
    assert (replica.batch_size_max, len(replica.exec_ms)) == (31, 31)
    one = [NamedTensor(f"x{number}", np.ones(1, np.float32)) for number in range(130)]
    cluster.run(DIGITS, 1, range(31))
    cluster.feed(DIGITS, 1, range(31), one * 31)
    assert rows(cluster.hear(cluster.outputs, Outputs))["sum"].tolist() == [[130.0]] * 31


def loader_slice(name: str, loader: LoaderSpec) -> SliceSpec:
    return slice_spec(f"node-0/cpu0/{name}", [model_spec(name, (), 8, loader, slo_ms=60_000.0)], device="cpu")


def test_every_kind_of_bad_model_fails_with_its_reason(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "cut.safetensors").write_bytes(b"\x08\x00\x00\x00")
    (tmp_path / "empty").mkdir()
    bad = {
        "no-example": (LoaderSpec(python=f"{USER}:NoExample"), "no method 'example'"),
        "wrong-batch": (LoaderSpec(python=f"{USER}:WrongBatch"), "the first axis must be the batch"),
        "missing": (
            LoaderSpec(zoo="torchvision", arch="alexnet", weights=str(tmp_path / "gone.pt")),
            "there is no weights file",
        ),
        "truncated": (
            LoaderSpec(zoo="torchvision", arch="squeezenet1_1", weights=str(tmp_path / "cut.safetensors")),
            "truncated or not a weights file",
        ),
        "no-directory": (
            LoaderSpec(zoo="transformers", weights=str(tmp_path / "empty")),
            "it is no model's directory",
        ),
    }
    cluster.start(*(loader_slice(name, loader) for name, (loader, _) in bad.items()))
    reasons: dict[str, str] = {}
    while len(reasons) < len(bad):
        failed = cluster.hear(cluster.agent, SliceFailed).message
        assert isinstance(failed, SliceFailed)
        reasons[failed.slice_id.rpartition("/")[2]] = failed.reason
    for name, (_, reason) in bad.items():
        assert reason in reasons[name], name


def test_a_batch_without_memory_is_answered_and_the_scheduler_hears_of_smaller_ones(cluster: Cluster) -> None:
    hungry = LoaderSpec(python=f"{USER}:Hungry")
    spec = loader_slice("hungry", hungry)
    cluster.start(spec)
    cluster.introduce(1)
    assert cluster.ready[spec.slice_id].replicas[0].batch_size_max == 8

    def ask(batch_id: int, seqs: Sequence[int]) -> None:
        cluster.run(spec.slice_id, batch_id, seqs)
        ones = [NamedTensor("x", np.full(3, seq + 1, np.float32)) for seq in seqs]
        cluster.feed(spec.slice_id, batch_id, seqs, ones)

    ask(1, range(4))
    for seqs in ((0, 1), (2, 3)):  # the halves of what there was no memory for
        received = cluster.hear(cluster.outputs, Outputs)
        assert isinstance(received.message, Outputs)
        assert received.message.seqs == seqs
        assert rows(received)["total"].tolist() == [3 * (seq + 1) for seq in seqs]
    again = cluster.ready[spec.slice_id]
    while again.replicas[0].batch_size_max == 8:  # it introduces itself anew until it is listed
        message = cluster.hear(cluster.scheduler, SliceReady).message
        assert isinstance(message, SliceReady)
        again = message
    assert again.replicas[0].batch_size_max == len(again.replicas[0].exec_ms) == 2
    for batch_id in (2, 3, 4):  # granted ahead, still larger: in pieces, staged while the one before runs
        ask(batch_id, range(10 * batch_id, 10 * batch_id + 5))
    for batch_id in (2, 3, 4):
        received = cluster.hear(cluster.outputs, Outputs)
        assert isinstance(received.message, Outputs)
        assert rows(received)["total"].tolist() == [3 * (seq + 1) for seq in received.message.seqs]
        assert received.message.batch_id == batch_id


def test_a_poisonous_request_fails_alone(cluster: Cluster) -> None:
    spec = loader_slice("doubler", LoaderSpec(python=f"{USER}:Doubler"))
    cluster.start(spec)
    cluster.introduce(1)
    cluster.run(spec.slice_id, 1, range(8))
    values = [np.full(3, np.nan if seq == 5 else seq, np.float32) for seq in range(8)]
    cluster.feed(spec.slice_id, 1, range(8), [NamedTensor("x", value) for value in values])
    done = cluster.hear(cluster.scheduler, Done).message
    assert isinstance(done, Done)
    assert (done.status, done.ran) == ("failed", 7)
    totals: dict[int, float] = {}
    while len(totals) < 7:
        received = cluster.hear(cluster.outputs, Outputs)
        assert isinstance(received.message, Outputs)
        totals |= dict(zip(received.message.seqs, rows(received)["total"].tolist(), strict=True))
    assert totals == {seq: 3.0 * seq for seq in range(8) if seq != 5}
    failed = cluster.hear(cluster.outputs, BatchFailed).message
    assert isinstance(failed, BatchFailed)
    assert (failed.seqs, failed.code, failed.reason) == ((5,), "Internal", "ValueError: not a number")


def test_a_hung_model_ends_the_process_and_is_named(cluster: Cluster) -> None:
    spec = loader_slice("hangs", LoaderSpec(python=f"{USER}:HangsOnMinusThree"))
    cluster.start(spec)
    cluster.introduce(1)
    cluster.run(spec.slice_id, 1, [1])
    cluster.feed(spec.slice_id, 1, [1], [NamedTensor("x", np.full(3, -3, np.float32))])
    failed = cluster.hear(cluster.agent, SliceFailed).message
    assert isinstance(failed, SliceFailed)
    assert failed.model_id == "hangs"
    assert failed.reason == "model 'hangs' hung: a batch of 1 did not end within 2000 ms"
    assert isinstance(cluster.hear(cluster.outputs, BatchFailed).message, BatchFailed)
    assert cluster.end() == EXIT_HUNG


def test_garbage_and_strangers_on_the_payload_socket_are_counted_and_the_rest_is_served(
    cluster: Cluster,
) -> None:
    cluster.start(slice_spec(EMULATED))
    cluster.introduce(1)
    ready = cluster.ready[EMULATED]
    stale = Inputs(BatchId(1), EMULATED, Incarnation("dead"), ModelId("m"), FRONTEND, 0, (1,))
    assert cluster.push.send(PeerId(EMULATED), stale)
    assert cluster.push.send(PeerId(EMULATED), Ping(1))
    cluster.run(EMULATED, 1, [1], latest_in_ms=30.0)
    done = cluster.hear(cluster.scheduler, Done).message
    assert isinstance(done, Done)
    assert done.missing == (Part(FRONTEND, (SeqRun(1, 1),)),)
    assert cluster.agent.send(cluster.worker, StatusAsked())
    status = cluster.hear(cluster.agent, StatusListed).message
    assert isinstance(status, StatusListed)
    assert status.counters["inputs_for_another_incarnation"] == 1
    assert status.counters["offences_wrong_type"] == 1
    assert ready.addresses[0].startswith("ipc://")
    assert ready.addresses[1].startswith("tcp://127.0.0.1:")


def test_a_scheduler_that_restarts_at_its_place_is_told_again_what_is_ready(cluster: Cluster) -> None:
    cluster.start(slice_spec(EMULATED))
    cluster.introduce(1)
    cluster.scheduler.close()
    select.select([], [], [], 0.5)  # a process takes longer to start
    cluster.scheduler = RouterLink.bind([f"ipc://{cluster.run_dir}/scheduler.sock"])
    cluster.ready.clear()
    cluster.introduce(1)
    cluster.run(EMULATED, 7, [1])
    cluster.feed(EMULATED, 7, [1], [])
    assert cluster.hear(cluster.outputs, Outputs)


def test_a_signal_ends_the_process_in_order(cluster: Cluster) -> None:
    cluster.start(slice_spec(EMULATED))
    cluster.introduce(1)
    assert cluster.process is not None
    os.kill(cluster.process.pid, signal.SIGTERM)
    assert cluster.end() == 0
    assert list(cluster.run_dir.glob("worker*")) == []
