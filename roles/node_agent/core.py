"""The node agent's decisions: which worker processes should run on this host, and what the scheduler hears.

The scheduler says which slices should exist (`Want`); the agent makes it so and reports every change. A slice
of a real device gets a process of its own, so that a fault stays there; emulated slices cost a timer each and
share processes, up to `EMULATED_PER_PROCESS` in one.

- A changed specification under the same slice id is an end and a start; the new process waits for the end of
  the old one, whose memory it may need. Moves without a gap use two ids (a differ's business).
- An emulated slice that is no longer wanted while its process still serves others is reported as stopped at
  once and dropped by its worker, which is told what is left to host. New slices, and one that is wanted
  again, always get a new process: the neighbours never notice, and there is one way to start.
- A process that ends, or whose device breaks, is started again with back-off. A slice that never got ready
  because its *loader* failed is not: it would fail again. It is tried anew when its specification changes,
  or when it was unwanted for a while.
- Every start has a fresh worker id, so words of a dead process are never taken for those of its successor.
- The scheduler is greeted until it answers with a `Want`: what is sent without a connection is lost.

Here wanted and running are compared; `workers.py` brings processes through their lives, `reports.py` keeps what
the scheduler was told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from fabric.ids import Incarnation, NodeId, PeerId, SliceId
from fabric.messages import (
    AnyMessage,
    GpuInfo,
    NodeHello,
    SliceFailed,
    SliceReady,
    SliceSpec,
    StatusAsked,
    StatusListed,
    Stop,
    Want,
    WorkerHello,
)
from roles.core import SCHEDULER, Heard, Lost, Send, Tick
from roles.node_agent.events import AgentAction, AgentEvent, AgentLimits
from roles.node_agent.lifecycle import WorkerState
from roles.node_agent.reports import Reports
from roles.node_agent.workers import Worker, Workers
from roles.upkeep import ProcessExited, SchedulerFound, StopAsked

EMULATED_PER_PROCESS = 64
HELLO_EVERY_MS = 250.0


class NodeAgentCore:
    """Reconciles wanted slices with running workers. Sans-IO: see `roles/core.py`."""

    def __init__(
        self,
        node_id: NodeId,
        incarnation: Incarnation,
        gpus: Sequence[GpuInfo],
        limits: AgentLimits | None = None,
        *,
        role_id: str = "",
        pid: int = 0,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._node_id = node_id
        self._role_id = role_id
        self._pid = pid
        self._incarnation = incarnation
        self._gpus = tuple(gpus)
        self._actions: list[AgentAction] = []
        self._reports = Reports(node_id, self._actions)
        self._workers = Workers(node_id, limits or AgentLimits(), self._reports, self._actions)
        self._wanted: dict[SliceId, SliceSpec] = {}
        self._hello_at_ms: float | None = None
        self._is_stopping = False

    def handle(self, event: AgentEvent, now_ms: float) -> Sequence[AgentAction]:
        """Take one event; answer what to do, in order."""
        match event:
            case Tick():
                self._on_tick(now_ms)
            case Heard(peer, message) if peer == SCHEDULER:
                self._on_scheduler(message, now_ms)
            case Heard(peer, message):
                self._on_worker(peer, message, now_ms)
            case Lost():
                self._hello_at_ms = now_ms
            case ProcessExited(worker_id, code, last_words):
                self._on_exit(worker_id, code, last_words, now_ms)
            case SchedulerFound(addresses):
                self._on_scheduler_found(addresses, now_ms)
            case StopAsked():
                self._on_stop(now_ms)
        actions = self._actions.copy()
        self._actions.clear()  # the same list stays: the parts of this core add to it
        return actions

    @property
    def wake_at_ms(self) -> float | None:
        """The next time limit, restart or hello."""
        moments = (self._workers.wake_at_ms, self._hello_at_ms)
        return min((moment for moment in moments if moment is not None), default=None)

    @property
    def is_stopped(self) -> bool:
        """Asked to stop, and nothing is left to wait for."""
        return self._is_stopping and self._workers.are_gone

    # ------------------------------------------------------------ the scheduler's side

    def _on_scheduler_found(self, addresses: tuple[str, ...], now_ms: float) -> None:
        former, self._workers.scheduler_addresses = self._workers.scheduler_addresses, addresses
        if former and addresses != former:
            for worker in self._workers:
                self._workers.tell_what_to_host(worker)
        self._hello(now_ms)

    def _on_scheduler(self, message: AnyMessage, now_ms: float) -> None:
        match message:
            case Want():
                self._hello_at_ms = None
                self._on_want(message, now_ms)
            case _:
                self.counters["unexpected_in"] += 1

    def _hello(self, now_ms: float) -> None:
        hello = NodeHello(self._node_id, self._incarnation, self._gpus, self._reports.alive())
        self._actions.append(Send(SCHEDULER, hello))
        self._hello_at_ms = now_ms + HELLO_EVERY_MS

    def _listed(self) -> StatusListed:
        counters = {name: float(count) for name, count in self.counters.items()}
        return StatusListed(self._role_id, self._pid, self._reports.listed(self._wanted), (), counters)

    # ------------------------------------------------------------ wanted and running

    def _on_want(self, message: Want, now_ms: float) -> None:
        if self._is_stopping:
            return
        self._wanted = {spec.slice_id: spec for spec in message.slices}
        self._reports.compare(self._wanted)
        for worker in self._workers:
            self._drop_unwanted(worker, now_ms)
        self._start_missing(now_ms)

    def _drop_unwanted(self, worker: Worker, now_ms: float) -> None:
        dropped = [slice_id for slice_id, spec in worker.slices.items() if self._wanted.get(slice_id) != spec]
        for slice_id in dropped:
            del worker.slices[slice_id]
            if slice_id in self._wanted:
                self._reports.report(slice_id, "stopped", "its specification changed")
        if dropped and worker.slices:
            self._workers.tell_what_to_host(worker)
        self._workers.end_if_unwanted(worker, now_ms)

    def _start_missing(self, now_ms: float) -> None:
        """Start what is wanted and neither running, nor given up, nor waiting for its old process to end."""
        taken = self._workers.taken | self._reports.given_up
        missing = []
        for slice_id, spec in self._wanted.items():
            if slice_id in taken:
                continue
            problem = self._problem(spec)
            if problem:
                self._reports.give_up(spec, problem)
            else:
                missing.append(spec)
        for group in _groups(missing):
            self._workers.start(group, now_ms)

    def _problem(self, spec: SliceSpec) -> str:
        devices = {gpu.gpu: gpu.device for gpu in self._gpus}
        if spec.gpu not in devices:
            return f"node {self._node_id} has no gpu {spec.gpu} (it has {len(devices)})"
        if spec.device != devices[spec.gpu]:
            return f"gpu {spec.gpu} of node {self._node_id} is {devices[spec.gpu]}, not {spec.device}"
        return ""

    # ------------------------------------------------------------ the workers' side

    def _on_worker(self, peer: PeerId, message: AnyMessage, now_ms: float) -> None:
        match message:
            case WorkerHello(worker_id, incarnation):
                self._on_greeting(peer, worker_id, incarnation, now_ms)
            case StatusAsked():
                self._actions.append(Send(peer, self._listed()))
            case SliceReady() | SliceFailed():
                worker = self._workers.at(peer)
                if worker is None or worker.is_ending:
                    self.counters["unexpected_in"] += 1
                    return
                if message.slice_id in worker.slices:  # else it is no longer wanted
                    self._on_news(worker, message, now_ms)
                self._workers.settle(worker, now_ms)
            case _:
                self.counters["unexpected_in"] += 1

    def _on_greeting(self, peer: PeerId, worker_id: str, incarnation: Incarnation, now_ms: float) -> None:
        worker = self._workers.named(worker_id)
        if worker is None:
            self.counters["unexpected_in"] += 1
            self._actions.append(Send(peer, Stop(0.0)))  # nobody's child: of no use to anyone
            return
        self._workers.greet(worker, peer, incarnation, now_ms)

    def _on_news(self, worker: Worker, message: SliceReady | SliceFailed, now_ms: float) -> None:
        slice_id, incarnation = message.slice_id, message.incarnation
        match message:
            case SliceReady() if worker.state is WorkerState.WAITING:
                pass  # the news of its end was quicker
            case SliceReady():
                self._reports.report(slice_id, "ready", incarnation=incarnation)
            case SliceFailed(reason=reason) if self._reports.is_ready(slice_id):
                self._workers.broke(worker, slice_id, incarnation, reason, now_ms)
            case SliceFailed(reason=reason):
                self._reports.give_up(worker.slices.pop(slice_id), reason, incarnation)
                self._workers.end_if_unwanted(worker, now_ms)

    def _on_exit(self, worker_id: str, code: int, last_words: str, now_ms: float) -> None:
        worker = self._workers.named(worker_id)
        assert worker is not None, "only our own children are watched"
        self.counters["workers_exited"] += 1
        self._workers.exited(worker, code, last_words, now_ms)
        if not worker.slices:
            self._start_missing(now_ms)  # what waited for its end

    # ------------------------------------------------------------ time, and the end

    def _on_tick(self, now_ms: float) -> None:
        self._workers.tick(now_ms)
        if self._hello_at_ms is not None and self._hello_at_ms <= now_ms:
            self._hello(now_ms)

    def _on_stop(self, now_ms: float) -> None:
        self._is_stopping = True
        self._wanted.clear()
        self._reports.stop_all("its node agent stops")
        for worker in self._workers:
            worker.slices.clear()
            self._workers.end_if_unwanted(worker, now_ms)


def _groups(specs: Iterable[SliceSpec]) -> list[list[SliceSpec]]:
    """Who shares a process: emulated slices in the order they were wanted, everyone else alone."""
    emulated: list[SliceSpec] = []
    groups = []
    for spec in specs:
        if spec.device == "emulated":
            emulated.append(spec)
        else:
            groups.append([spec])
    groups.extend(
        emulated[first : first + EMULATED_PER_PROCESS]
        for first in range(0, len(emulated), EMULATED_PER_PROCESS)
    )
    return groups
