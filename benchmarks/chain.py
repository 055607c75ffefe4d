"""A bare ZeroMQ chain of four processes that carries the fabric's own frames, and nothing around them.

    client ──Infer──▶ FRONTEND ──Arrivals──▶ SCHEDULER
      ▲                │  ▲ ▲ ◀───Grant────────┘
      └────Answer──────┘  │ └──Outputs (PUSH → PULL)── WORKER
                          └───Inputs (PUSH → PULL)────▶

Six hops on the way of a request: client to frontend and back, frontend to scheduler and back (DEALER and ROUTER),
frontend to worker and back (PUSH and PULL). The client is the process that measures. Headers are encoded messages of
the fabric with values of a lone request; they travel with the payload, and are not read. A frontend keeps its payloads
in order, as grants come back in order.
"""

from __future__ import annotations

import select
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np
import zmq

from benchmarks.stage import free_ports, processes
from fabric import frames
from fabric.ids import BatchId, Epoch, FrontendId, Incarnation, ModelId, SliceId
from fabric.link import NamedTensor
from fabric.messages import Answer, AnyMessage, Arrivals, Grant, Infer, Inputs, Ledger, Outputs, SeqRun

COPY_BELOW_BYTES = frames.SMALL_BELOW_BYTES
ANSWER_S_MAX = 10
_MODEL, _SLICE, _FRONTEND = ModelId("noop"), SliceId("local/gpu0/0"), FrontendId("frontend-0")
_BOOT = Incarnation("0123456789abcdef")
_ROW = np.zeros((1, 1), np.float32)


def header(message: AnyMessage, payload: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = None) -> bytes:
    """What the fabric sends before the tensors."""
    named = () if payload is None else (NamedTensor("input", payload),)
    parts = frames.join((frames.pack(message, named),), epoch=Epoch(0), sent_at_ms=12_345_678.901)
    return bytes(parts[0])


def answer_frames(message: AnyMessage) -> tuple[bytes, bytes]:
    """Header and the one small output."""
    packed = frames.pack(message, (NamedTensor("output", _ROW),))
    first, second = frames.join((packed,), epoch=Epoch(0), sent_at_ms=12_345_678.901)
    return bytes(first), bytes(second)


@dataclass(frozen=True, slots=True)
class Places:
    """Where the hops lead; ipc or tcp addresses."""

    client: str
    control: str
    inputs: str
    outputs: str


def frontend(places: Places, arrivals: bytes, inputs: bytes, answer: tuple[bytes, bytes]) -> None:
    """Client to scheduler, grant to worker, output to client."""
    with zmq.Context() as ctx:
        clients, scheduler = ctx.socket(zmq.ROUTER), ctx.socket(zmq.DEALER)
        worker, outputs = ctx.socket(zmq.PUSH), ctx.socket(zmq.PULL)
        clients.bind(places.client)
        outputs.bind(places.outputs)
        scheduler.connect(places.control)
        worker.connect(places.inputs)
        poller = zmq.Poller()
        for one in (clients, scheduler, outputs):
            poller.register(one, zmq.POLLIN)
        held: deque[zmq.Frame] = deque()
        asking: deque[bytes] = deque()
        while True:
            for ready, _ in poller.poll():
                if ready is clients:
                    who, _, payload = clients.recv_multipart(copy=False)
                    asking.append(who.bytes)
                    held.append(payload)
                    scheduler.send(arrivals)
                elif ready is scheduler:
                    scheduler.recv()
                    worker.send(inputs, zmq.SNDMORE)
                    worker.send(held.popleft(), copy=False)
                else:
                    outputs.recv_multipart()
                    clients.send_multipart([asking.popleft(), *answer])


def scheduler(places: Places, grant: bytes) -> None:
    """Every run of requests is granted at once."""
    with zmq.Context() as ctx:
        frontends = ctx.socket(zmq.ROUTER)
        frontends.bind(places.control)
        while True:
            who, _ = frontends.recv_multipart()
            frontends.send_multipart([who, grant])


def worker(places: Places, outputs: tuple[bytes, bytes]) -> None:
    """Every input is answered at once."""
    with zmq.Context() as ctx:
        pull, push = ctx.socket(zmq.PULL), ctx.socket(zmq.PUSH)
        pull.bind(places.inputs)
        push.connect(places.outputs)
        while True:
            pull.recv_multipart(copy=False)
            push.send_multipart(outputs)


@dataclass(slots=True)
class BareClient:
    """The client's end: one request at a time, or open loop."""

    socket: zmq.Socket[bytes]
    payloads: dict[int, memoryview] = field(default_factory=dict)
    headers: dict[int, bytes] = field(default_factory=dict)

    def one_by_one(self, size: int, count: int) -> list[float]:
        """Latencies in ms."""
        found_ms = []
        for _ in range(count):
            began_s = time.perf_counter()
            self._send(size)
            if not self.socket.poll(ANSWER_S_MAX * 1_000):
                raise TimeoutError("the bare chain does not answer")
            self.socket.recv_multipart()
            found_ms.append((time.perf_counter() - began_s) * 1e3)
        return found_ms

    def open_loop(self, size: int, at_ms: Sequence[float]) -> tuple[list[float], list[float]]:
        """Latency from the intended moment, and lateness of the send, in ms; answers come in order."""
        found_ms: list[float] = []
        late_ms: list[float] = []
        descriptor = int(self.socket.getsockopt(zmq.FD))
        began_s = time.perf_counter()
        ends_s = began_s + at_ms[-1] / 1e3 + ANSWER_S_MAX
        while len(found_ms) < len(at_ms):
            now_s = time.perf_counter()
            if now_s > ends_s:
                raise TimeoutError("the bare chain does not answer")
            if len(late_ms) < len(at_ms) and began_s + at_ms[len(late_ms)] / 1e3 <= now_s:
                late_ms.append((now_s - began_s) * 1e3 - at_ms[len(late_ms)])
                self._send(size)
            while int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self.socket.recv_multipart()
                found_ms.append((time.perf_counter() - began_s) * 1e3 - at_ms[len(found_ms)])
            next_s = began_s + at_ms[len(late_ms)] / 1e3 if len(late_ms) < len(at_ms) else ends_s
            wait_s = min(next_s - time.perf_counter(), 0.2)
            if wait_s > 0:
                select.select([descriptor], [], [], wait_s)
        return found_ms, late_ms

    def _send(self, size: int) -> None:
        if size not in self.payloads:
            payload = np.random.default_rng(0).integers(0, 256, size, np.uint8)
            self.payloads[size] = payload.data
            self.headers[size] = header(Infer(1_000, _MODEL, None, 0.123), payload)
        self.socket.send(self.headers[size], zmq.SNDMORE)
        self.socket.send(self.payloads[size], 0, copy=size < COPY_BELOW_BYTES)


@contextmanager
def bare_chain(client_transport: str, inner_transport: str) -> Iterator[BareClient]:
    """The chain: ipc or tcp for the client's hop, and for the others."""
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        ports = iter(free_ports(4))
        found = [
            f"ipc://{directory}/{number}" if kind == "ipc" else f"tcp://127.0.0.1:{next(ports)}"
            for number, kind in enumerate((client_transport, *(inner_transport,) * 3))
        ]
        places = Places(*found)
        batch, seqs = BatchId(1_000), (1_000,)
        payload = np.zeros(4_096, np.uint8)
        arrivals = header(Arrivals(_MODEL, 1_000, 1, 99.123, 0.0, 0.0))
        grant = header(
            Grant(batch, _SLICE, _BOOT, _MODEL, 0, (SeqRun(1_000, 1),), 1, 0.123, 0.0, "slice_free")
        )
        inputs = header(Inputs(batch, _SLICE, _BOOT, _MODEL, _FRONTEND, 0, seqs), payload)
        outputs = answer_frames(Outputs(batch, _SLICE, _MODEL, seqs, 1, 0.123, 0.123, 0.123))
        ledger = Ledger(*(0.123,) * 9, 1, _SLICE, "slice_free")
        answer = answer_frames(Answer(1_000, ledger))
        stack.enter_context(
            processes(
                (worker, (places, outputs)),
                (scheduler, (places, grant)),
                (frontend, (places, arrivals, inputs, answer)),
            )
        )
        ctx = stack.enter_context(zmq.Context())
        dealer = stack.enter_context(ctx.socket(zmq.DEALER))
        dealer.linger = 0
        dealer.connect(places.client)
        client = BareClient(dealer)
        client.one_by_one(4_096, 10)
        yield client
