"""Frontends, a scheduler and a worker over modelled lines, on virtual time: the real cores, and nothing else real.

Every frontend is a host of its own whose line to the worker carries `bytes_per_ms`, first in first out; every
message, on whatever line, takes `delay_ms` more. Control and outputs are too small to fill a line.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from fabric.ids import FrontendId, Incarnation, ModelId, NodeId, PeerId, SliceId
from fabric.messages import (
    Answer,
    AnyMessage,
    BatchFailed,
    Directory,
    Dropped,
    Grant,
    Host,
    Infer,
    Inputs,
    InputsReturned,
    ModelSpec,
    NodeHello,
    Outputs,
    Refusal,
    ReplicaInfo,
    Returned,
    SliceSpec,
    TensorSpec,
)
from policies.batching.registry import make_discipline
from roles.frontend.core import FrontendCore
from roles.frontend.events import (
    Asked,
    Computed,
    FrontendAction,
    FrontendEvent,
    FrontendSettings,
    PushInputs,
    Release,
    Reply,
    SchedulerSaid,
    Tell,
    TurnEnded,
    WorkerSaid,
)
from roles.gpu_worker.core import WorkerCore
from roles.gpu_worker.events import (
    BatchRan,
    Execute,
    InputsCame,
    LoadSlice,
    PushOutputs,
    Recall,
    SchedulerAnswers,
    WorkerAction,
    WorkerEvent,
)
from roles.gpu_worker.events import Release as ReleaseOutputs
from roles.gpu_worker.executors.base import Loaded
from roles.gpu_worker.peer_checks import AGENT
from roles.gpu_worker.registration import WorkerIdentity
from roles.runtime.core import SCHEDULER, Handle, Heard, Lost, Send, Tick
from roles.scheduler.core import SchedulerCore
from roles.scheduler.settings import SchedulerSettings
from tests.device_lines import DeviceLines

MODEL = ModelId("resnet50")
NODE = NodeId("c")
BOOT = Incarnation("b0b0b0b0")
WORKER = PeerId("worker-c-0/b0b0b0b0")
NODE_AGENT = PeerId("node-c/b0b0b0b0")
CLIENT = PeerId("client/1")
NEVER_MS = float("inf")


@dataclass(slots=True, frozen=True)
class Line:
    """What lies between the hosts. `bytes_per_ms` of a frontend's line: 125,000 is 1 Gbit/s."""

    bytes_per_ms: float = 125_000.0
    delay_ms: float = 0.0


@dataclass(slots=True)
class Fate:
    """What became of a request; `code` is ok or a refusal's."""

    asked_at_ms: float
    answered_at_ms: float = NEVER_MS
    code: str = ""
    transfer_ms: float = 0.0
    batch_size: int = 0


@dataclass(slots=True)
class _Frontend:
    core: FrontendCore
    peer: PeerId
    frontend_id: FrontendId
    incarnation: Incarnation
    line_free_at_ms: float = 0.0
    sizes: dict[Handle, int] = field(default_factory=dict)


class LineStage:
    """One model on `slices` emulated GPUs of one worker process."""

    def __init__(
        self,
        line: Line,
        exec_ms: Sequence[float],
        *,
        slo_ms: float = 50.0,
        batching: str = "tenuto",
        frontends: int = 1,
        slices: int = 1,
    ) -> None:
        self.now_ms = 0.0
        self.fates: dict[tuple[int, int], Fate] = {}
        self._line = line
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._handles = count(1)
        self._devices = DeviceLines(self._begin)
        self._exec_ms = tuple(exec_ms)
        model = ModelSpec(MODEL, slo_ms, len(exec_ms), None, self._exec_ms)
        specs = [SliceSpec(SliceId(f"c/gpu{k}/0"), k, "emulated", None, (model,)) for k in range(slices)]
        settings = SchedulerSettings(
            (model,), tuple((NODE, spec) for spec in specs), guard_ms=0.2, transfer_ms=5.0
        )
        self.scheduler = SchedulerCore(settings, make_discipline(batching, {}))
        self.worker = WorkerCore(WorkerIdentity("worker-0", BOOT, 1, ("tcp://c:1",)))
        self.payloads: dict[Handle, object] = {}
        """What the worker keeps."""
        self.frontends = [self._new_frontend(number) for number in range(frontends)]
        self._by_peer = {one.peer: one for one in self.frontends}
        self._start(specs)

    def _new_frontend(self, number: int) -> _Frontend:
        name, boot = FrontendId(f"frontend-{number}"), Incarnation(f"f{number:07x}")
        settings = FrontendSettings(name, boot, ("tcp://a:1",))
        return _Frontend(FrontendCore(settings), PeerId(f"{name}/{boot}"), name, boot)

    def _start(self, specs: Sequence[SliceSpec]) -> None:
        self.to_scheduler(NODE_AGENT, NodeHello(NODE, BOOT, (), ()))
        self.to_worker(Tick())
        self.to_worker(Heard(AGENT, Host(NODE, tuple(specs), ("tcp://b:1",))))
        self.to_worker(SchedulerAnswers())
        for one in self.frontends:
            self.to_frontend(one, Tick())
        self.run_until(20.0)

    # ------------------------------------------------------------ what a test does

    def ask(self, number: int, size_bytes: int, frontend: int = 0, budget_ms: float | None = None) -> None:
        """A client of that frontend asks now."""
        one = self.frontends[frontend]
        handle = Handle(next(self._handles))
        one.sizes[handle] = size_bytes
        self.fates[frontend, number] = Fate(self.now_ms)
        specs = (TensorSpec("input", "uint8", (size_bytes,)),)
        self.to_frontend(one, Asked(CLIENT, Infer(number, MODEL, budget_ms), 0.0, handle, specs, size_bytes))

    def later(self, at_ms: float, act: Callable[[], None]) -> None:
        """Do it then."""
        heapq.heappush(self._heap, (at_ms, next(self._order), act))

    def run_until(self, until_ms: float) -> None:
        """Let everything happen that is due by then."""
        for _ in itertools.count():
            wakes = [(self.scheduler.wake_at_ms, 0), (self.worker.wake_at_ms, 1)]
            wakes += [(one.core.wake_at_ms, 2 + k) for k, one in enumerate(self.frontends)]
            at_ms, who = min((NEVER_MS if at is None else max(at, self.now_ms), who) for at, who in wakes)
            next_ms = self._heap[0][0] if self._heap else NEVER_MS
            if min(at_ms, next_ms) > until_ms:
                break
            if next_ms <= at_ms:
                self.now_ms = max(self.now_ms, next_ms)
                heapq.heappop(self._heap)[2]()
                continue
            self.now_ms = at_ms
            if who == 0:
                self._send_all(self.scheduler.handle(Tick(), self.now_ms))
            elif who == 1:
                self.to_worker(Tick())
            else:
                self.to_frontend(self.frontends[who - 2], Tick())
        self.now_ms = until_ms

    # ------------------------------------------------------------ scheduler

    def to_scheduler(self, peer: PeerId, message: AnyMessage) -> None:
        """It hears now."""
        self._send_all(self.scheduler.handle(Heard(peer, message, self._line.delay_ms), self.now_ms))

    def give_up(self, one: _Frontend, reason: str) -> None:
        """The scheduler takes that frontend for lost, which does not notice."""
        self._send_all(self.scheduler.handle(Lost(one.peer, reason), self.now_ms))

    def _send_all(self, sends: Sequence[Send]) -> None:
        for send in sends:
            peer, message = send.peer, send.message
            if peer == WORKER:
                self._carry(partial(self.to_worker, Heard(SCHEDULER, message, self._line.delay_ms)))
            elif peer in self._by_peer:
                assert isinstance(message, Grant | Dropped | Returned | Directory)
                self._carry(partial(self.to_frontend, self._by_peer[peer], SchedulerSaid(message)))

    # ------------------------------------------------------------ frontends

    def to_frontend(self, one: _Frontend, event: FrontendEvent) -> None:
        """It hears now, and its turn ends."""
        self._act(one, one.core.handle(event, self.now_ms))
        if one.core.has_gathered:
            self._act(one, one.core.handle(TurnEnded(), self.now_ms))

    def _act(self, one: _Frontend, actions: Sequence[FrontendAction]) -> None:
        for action in actions:
            match action:
                case Tell(message):
                    self._carry(partial(self.to_scheduler, one.peer, message))
                case PushInputs(inputs, payloads):
                    self._push(one, inputs, sum(one.sizes[payload] for payload in payloads))
                case Reply(_, Answer(number, ledger)):
                    fate = self._answer(one, number, "ok")
                    fate.transfer_ms, fate.batch_size = ledger.transfer_ms, ledger.batch_size
                case Reply(_, Refusal(number, code)):
                    self._answer(one, number, code)
                case Release(payload):
                    one.sizes.pop(payload, None)
                case _:
                    pass

    def _answer(self, one: _Frontend, number: int, code: str) -> Fate:
        fate = self.fates[self.frontends.index(one), number]
        assert not fate.code, "answered twice"
        fate.code, fate.answered_at_ms = code, self.now_ms
        return fate

    def _push(self, one: _Frontend, message: Inputs, size: int) -> None:
        one.line_free_at_ms = max(one.line_free_at_ms, self.now_ms) + size / self._line.bytes_per_ms

        def come() -> None:
            handle = Handle(next(self._handles))
            self.payloads[handle] = message
            self.to_worker(InputsCame(message, handle, size))

        self.later(one.line_free_at_ms + self._line.delay_ms, come)

    # ------------------------------------------------------------ the worker

    def to_worker(self, event: WorkerEvent) -> None:
        """It hears now."""
        for action in self.worker.handle(event, self.now_ms):
            self._do(action)

    def _do(self, action: WorkerAction) -> None:
        match action:
            case Send(peer, message) if peer == SCHEDULER:
                self._carry(partial(self.to_scheduler, WORKER, message))
            case LoadSlice(spec):
                replicas = tuple(ReplicaInfo(m.model_id, m.batch_size_max, m.exec_ms) for m in spec.models)
                self.later(self.now_ms, lambda: self.to_worker(Loaded(spec.slice_id, replicas)))
            case Execute():
                self._devices.give(action, self.now_ms)
            case Recall(slice_id, batch_id):
                for given_back in self._devices.recall(slice_id, batch_id):
                    self.later(self.now_ms, partial(self.to_worker, given_back))
            case PushOutputs(frontend_id, message):
                one = next(one for one in self.frontends if one.frontend_id == frontend_id)
                self._carry(partial(self._output, one, message))
            case ReleaseOutputs(payloads):
                for payload in payloads:
                    assert payload in self.payloads, "released once"
                    del self.payloads[payload]
            case _:
                pass

    def _begin(self, execute: Execute, now_ms: float) -> None:
        run, parts = execute.run, execute.parts
        assert all(part.payload in self.payloads for part in parts), "what runs is still there"
        exec_ms = self._exec_ms[sum(len(part.live_seqs) for part in parts) - 1]

        def end() -> None:
            outputs = Handle(next(self._handles))
            self.payloads[outputs] = run
            late = self._devices.end_first(run.slice_id, self.now_ms)
            self.to_worker(BatchRan(run.slice_id, run.batch_id, outputs, (), exec_ms, now_ms))
            for one in late:
                self.to_worker(one)

        self.later(now_ms + exec_ms, end)

    def _output(self, one: _Frontend, message: Outputs | BatchFailed | InputsReturned) -> None:
        if isinstance(message, Outputs):
            rows = (TensorSpec("scores", "float32", (len(message.seqs), 1)),)
            self.to_frontend(one, Computed(message, Handle(next(self._handles)), rows))
        else:
            self.to_frontend(one, WorkerSaid(message))

    def _carry(self, arrive: Callable[[], None]) -> None:
        self.later(self.now_ms + self._line.delay_ms, arrive)
