"""A scheduler and a worker in one thread, just clever enough for a real frontend: all over real sockets."""

from __future__ import annotations

import select
import threading
from collections import Counter, deque
from collections.abc import Sequence
from typing import Self

import numpy as np

from fabric.ids import BatchId, Incarnation, ModelId, NodeId, PeerId, SliceId, new_incarnation
from fabric.link import NamedTensor, Received
from fabric.messages import (
    Arrivals,
    Directory,
    FrontendHello,
    FrontendInfo,
    Grant,
    Inputs,
    ModelInfo,
    Outputs,
    Ping,
    Pong,
    SeqRun,
    SliceInfo,
)
from fabric.sockets import LinkOptions, PullLink, PushPool, RouterLink

SLICE = SliceId("node-0/gpu0/0")
DEAF_SLICE = SliceId("node-0/gpu0/1")


class StandInCluster:
    """Grants every run at once; the worker answers `2 * input + 1` under the name ``output``.

    `is_worker_silent`: inputs are taken and nothing comes back. `deaf_model` is granted to a second slice, which
    never takes anything from its socket; `vast_model` is answered with a row of 257 MB. Attributes may be set from the test's thread; links belong to the
    stand-in's own.
    """

    def __init__(
        self,
        control: str,
        models: Sequence[ModelInfo],
        deaf_model: ModelId | None = None,
        vast_model: ModelId | None = None,
    ) -> None:
        self.is_worker_silent = False
        self.is_scheduler_silent = False
        self.seen: Counter[str] = Counter()
        self.control_bytes = 0.0
        self._models = tuple(models)
        self._deaf_model = deaf_model
        self._vast_model = vast_model
        self._unread = PullLink.bind(["tcp://127.0.0.1:0"], LinkOptions(queue_messages_max=1))
        self._control = RouterLink.bind([control])
        self._inputs = PullLink.bind(["tcp://127.0.0.1:0"])
        self._outputs = PushPool()
        self._unsent: deque[tuple[PeerId, Outputs, list[NamedTensor]]] = deque()
        self._boot = new_incarnation()
        self._frontends: dict[PeerId, FrontendInfo] = {}
        self._batches = 0
        self._is_restart_asked = threading.Event()
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stand-in")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_stopping.set()
        self._thread.join(10.0)
        assert not self._thread.is_alive()

    def restart_worker(self) -> None:
        """The slice is lost with all it has, and there is a new one."""
        self.is_worker_silent = False
        self._is_restart_asked.set()

    def _run(self) -> None:
        while not self._is_stopping.is_set():
            heard = [*self._control.receive(64)]
            for received in heard:
                self._hear_control(received)
            inputs = self._inputs.receive(64)
            for received in inputs:
                self._compute(received)
            self._outputs.receive(0)  # what waits for room goes on
            self._send_outputs()
            if self._is_restart_asked.is_set():
                self._is_restart_asked.clear()
                self._boot = new_incarnation()
                self._tell()
            if not heard and not inputs:
                select.select([self._control.fileno(), self._inputs.fileno()], [], [], 0.005)
        self.control_bytes = self._control.counters["bytes_in"] + self._control.counters["bytes_out"]
        for link in (self._control, self._inputs, self._unread, self._outputs):
            link.close()

    def _hear_control(self, received: Received) -> None:
        peer = received.peer
        self.seen[type(received.message).__name__] += 1
        match received.message:
            case Ping(number) if not self.is_scheduler_silent:
                self._control.send(peer, Pong(number))
            case FrontendHello(frontend_id, incarnation, addresses):
                self._frontends[peer] = FrontendInfo(frontend_id, incarnation, addresses)
                self._outputs.know(PeerId(frontend_id), incarnation, addresses)
                self._tell()
            case Arrivals(model_id, first_seq, count):
                self._grant(peer, model_id, SeqRun(first_seq, count))
            case _:
                pass

    def _tell(self) -> None:
        slices = tuple(
            SliceInfo(slice_id, self._boot, NodeId("node-0"), tuple(link.addresses))
            for slice_id, link in ((SLICE, self._inputs), (DEAF_SLICE, self._unread))
        )
        frontends = tuple(self._frontends.values())
        for peer in self._frontends:
            self._control.send(peer, Directory(1, self._models, slices, frontends))

    def _grant(self, peer: PeerId, model_id: ModelId, run: SeqRun) -> None:
        self._batches += 1
        batch_id, boot = BatchId(self._batches), Incarnation(self._boot)
        slice_id = DEAF_SLICE if model_id == self._deaf_model else SLICE
        grant = Grant(batch_id, slice_id, boot, model_id, 0, (run,), run.count, 0.0, 0.0, "eager")
        self._control.send(peer, grant)

    def _compute(self, received: Received) -> None:
        inputs = received.message
        assert isinstance(inputs, Inputs)
        self.seen["Inputs"] += 1
        if self.is_worker_silent or inputs.incarnation != self._boot or not inputs.live_seqs:
            return
        rows = np.stack([2 * tensor.array + 1 for tensor in received.tensors])
        if inputs.model_id == self._vast_model:
            rows = np.zeros((len(inputs.live_seqs), 257 << 20), np.uint8)
        outputs = Outputs(
            inputs.batch_id,
            inputs.slice_id,
            inputs.model_id,
            inputs.live_seqs,
            len(inputs.live_seqs),
            0.1,
            0.1,
            0.1,
        )
        self._unsent.append((PeerId(inputs.frontend_id), outputs, [NamedTensor("output", rows)]))

    def _send_outputs(self) -> None:
        """In order, as far as the frontends take them: what does not come is then not our fault."""
        while self._unsent and self._outputs.send(*self._unsent[0]):
            self._unsent.popleft()
