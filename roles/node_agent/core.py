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
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fabric.ids import Incarnation, NodeId, PeerId, SliceId
from fabric.messages import (
    AnyMessage,
    GpuInfo,
    Host,
    NodeHello,
    SliceChanged,
    SliceFailed,
    SliceReady,
    SliceReport,
    SliceSpec,
    SliceStatus,
    StatusAsked,
    StatusListed,
    Stop,
    Want,
    WorkerHello,
)
from roles.core import Heard, Lost, Send, Tick
from roles.node_agent.lifecycle import ENDING, NEXT, PROCESSLESS, Step, WorkerState
from roles.restarts import RestartRule, Restarts

EMULATED_PER_PROCESS = 64
NOT_BORN = Incarnation("")
REASON_CHARS_MAX = 600

SCHEDULER = PeerId("scheduler")
"""The scheduler's name on its link, whatever its incarnation. No worker can have it."""
HELLO_EVERY_MS = 250.0


@dataclass(slots=True, frozen=True)
class AgentLimits:
    """How long a worker may take for each step of its life, in ms."""

    hello_ms: float = 30_000.0  # an interpreter and torch from a cold disk
    load_ms: float = 120_000.0
    grace_ms: float = 2_000.0  # for the batch that runs
    terminate_ms: float = 2_000.0
    kill_ms: float = 2_000.0
    restart: RestartRule = field(default_factory=RestartRule)


@dataclass(slots=True, frozen=True)
class ProcessExited:
    """A child is gone and reaped. `code` below 0: killed by that signal. `last_words`: its stderr's tail."""

    name: str
    code: int
    last_words: str


@dataclass(slots=True, frozen=True)
class SchedulerFound:
    """The scheduler (or its next incarnation) can be reached at `addresses`."""

    addresses: tuple[str, ...]


@dataclass(slots=True, frozen=True)
class StopAsked:
    """End everything in order; `NodeAgentCore.is_stopped` says when."""


@dataclass(slots=True, frozen=True)
class Spawn:
    """Start a worker process for these slices (they are of one device)."""

    worker_id: str
    slices: tuple[SliceSpec, ...]


@dataclass(slots=True, frozen=True)
class Terminate:
    """SIGTERM."""

    worker_id: str


@dataclass(slots=True, frozen=True)
class Kill:
    """SIGKILL."""

    worker_id: str


@dataclass(slots=True, frozen=True)
class Reconnect:
    """The scheduler is silent: begin a new connection to it."""


AgentEvent = Heard | Lost | SchedulerFound | ProcessExited | StopAsked | Tick
AgentAction = Spawn | Terminate | Kill | Send | Reconnect


@dataclass(slots=True)
class _Worker:
    """One worker process over all its starts. `slices` are the wanted ones; none: it is to end."""

    worker_id: str
    slices: dict[SliceId, SliceSpec]
    restarts: Restarts
    state: WorkerState = WorkerState.WAITING
    limit_at_ms: float | None = None
    holding: frozenset[SliceId] = frozenset()
    """Everything the process was started with, wanted or not."""
    peer: PeerId | None = None
    end_reason: str = ""


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
        self._limits = limits or AgentLimits()
        self._limit_ms = {
            WorkerState.STARTING: self._limits.hello_ms,
            WorkerState.LOADING: self._limits.load_ms,
            # Its own grace, and a little for the way there and back.
            WorkerState.STOPPING: self._limits.grace_ms + 500.0,
            WorkerState.TERMINATING: self._limits.terminate_ms,
            WorkerState.KILLED: self._limits.kill_ms,
        }
        self._workers: list[_Worker] = []
        self._wanted: dict[SliceId, SliceSpec] = {}
        self._failed: dict[SliceId, SliceSpec] = {}
        """Given up, under the specification with which they failed."""
        self._status: dict[SliceId, SliceStatus] = {}
        self._spawned = 0
        self._scheduler_addresses: tuple[str, ...] = ()
        self._hello_at_ms: float | None = None
        self._is_stopping = False
        self._now_ms = 0.0
        self._actions: list[AgentAction] = []

    def handle(self, event: AgentEvent, now_ms: float) -> Sequence[AgentAction]:
        """Take one event; answer what to do, in order."""
        self._now_ms = now_ms
        match event:
            case Tick():
                self._on_tick()
            case Heard(peer, message) if peer == SCHEDULER:
                self._on_scheduler(message)
            case Heard(peer, message):
                self._on_worker(peer, message)
            case Lost():
                self._actions.append(Reconnect())
                self._hello_at_ms = now_ms
            case ProcessExited(worker_id, code, last_words):
                self._on_exit(worker_id, code, last_words)
            case SchedulerFound(addresses):
                self._on_scheduler_found(addresses)
            case StopAsked():
                self._on_stop()
        actions, self._actions = self._actions, []
        return actions

    @property
    def wake_at_ms(self) -> float | None:
        """The next time limit, restart or hello."""
        moments = [worker.limit_at_ms for worker in self._workers if worker.limit_at_ms is not None]
        if self._hello_at_ms is not None:
            moments.append(self._hello_at_ms)
        return min(moments, default=None)

    @property
    def is_stopped(self) -> bool:
        """Asked to stop, and nothing is left to wait for."""
        return self._is_stopping and all(worker.state in PROCESSLESS for worker in self._workers)

    # ------------------------------------------------------------ the scheduler's side

    def _on_scheduler_found(self, addresses: tuple[str, ...]) -> None:
        is_elsewhere = bool(self._scheduler_addresses) and addresses != self._scheduler_addresses
        self._scheduler_addresses = addresses
        if is_elsewhere:
            for worker in self._workers:
                self._tell_what_to_host(worker)
        self._hello()

    def _on_scheduler(self, message: AnyMessage) -> None:
        match message:
            case Want():
                self._hello_at_ms = None
                self._on_want(message)
            case _:
                self.counters["unexpected_in"] += 1

    def _hello(self) -> None:
        alive = tuple(status for status in self._status.values() if status.state in ("starting", "ready"))
        self._tell(NodeHello(self._node_id, self._incarnation, self._gpus, alive))
        self._hello_at_ms = self._now_ms + HELLO_EVERY_MS

    def _listed(self) -> StatusListed:
        models = {spec.slice_id: tuple(m.model_id for m in spec.models) for spec in self._wanted.values()}
        slices = tuple(
            SliceReport(status.slice_id, status.state, status.reason, models.get(status.slice_id, ()), 0, 0)
            for status in self._status.values()
        )
        counters = {name: float(count) for name, count in self.counters.items()}
        return StatusListed(self._role_id, self._pid, slices, (), counters)

    def _tell(self, message: AnyMessage) -> None:
        self._actions.append(Send(SCHEDULER, message))

    def _on_want(self, message: Want) -> None:
        if self._is_stopping:
            return
        self._wanted = {spec.slice_id: spec for spec in message.slices}
        for slice_id in [slice_id for slice_id in self._status if slice_id not in self._wanted]:
            self._report(slice_id, "stopped", "no longer wanted")
            del self._status[slice_id]
        for slice_id, spec in list(self._failed.items()):
            if self._wanted.get(slice_id) != spec:
                del self._failed[slice_id]
            else:
                # Whoever asks again may be a scheduler that was not there when it failed.
                self._tell(SliceChanged(self._node_id, self._status[slice_id]))
        for worker in list(self._workers):
            self._drop_unwanted(worker)
        self._start_missing()

    def _drop_unwanted(self, worker: _Worker) -> None:
        dropped = [slice_id for slice_id, spec in worker.slices.items() if self._wanted.get(slice_id) != spec]
        for slice_id in dropped:
            del worker.slices[slice_id]
            if slice_id in self._wanted:
                self._report(slice_id, "stopped", "its specification changed")
        if dropped and worker.slices:
            self._tell_what_to_host(worker)
        self._end_if_unwanted(worker)

    def _report(
        self, slice_id: SliceId, state: str, reason: str = "", incarnation: Incarnation | None = None
    ) -> None:
        if incarnation is None:
            former = self._status.get(slice_id)
            incarnation = NOT_BORN if former is None else former.incarnation
        status = SliceStatus(slice_id, incarnation, state, reason)
        if self._status.get(slice_id) == status:
            return
        self._status[slice_id] = status
        self._tell(SliceChanged(self._node_id, status))

    # ------------------------------------------------------------ starting

    def _start_missing(self) -> None:
        """Start what is wanted and neither running, nor given up, nor waiting for its old process to end."""
        taken = set(self._failed)
        for worker in self._workers:
            taken.update(worker.slices)
            if worker.state in ENDING:
                taken.update(worker.holding)
        missing = []
        for slice_id, spec in self._wanted.items():
            if slice_id in taken:
                continue
            problem = self._problem(spec)
            if problem:
                self._give_up(spec, problem)
            else:
                missing.append(spec)
        for group in _groups(missing):
            worker = _Worker("", {spec.slice_id: spec for spec in group}, Restarts(self._limits.restart))
            self._workers.append(worker)
            self._spawn(worker)

    def _problem(self, spec: SliceSpec) -> str:
        devices = {gpu.gpu: gpu.device for gpu in self._gpus}
        if spec.gpu not in devices:
            return f"node {self._node_id} has no gpu {spec.gpu} (it has {len(devices)})"
        if spec.device != devices[spec.gpu]:
            return f"gpu {spec.gpu} of node {self._node_id} is {devices[spec.gpu]}, not {spec.device}"
        return ""

    def _spawn(self, worker: _Worker) -> None:
        self._spawned += 1
        worker.worker_id = f"worker-{self._node_id}-{self._spawned}"
        worker.peer, worker.end_reason = None, ""
        worker.holding = frozenset(worker.slices)
        self._step(worker, Step.START)
        self._actions.append(Spawn(worker.worker_id, tuple(worker.slices.values())))
        for slice_id in worker.slices:
            self._report(slice_id, "starting", incarnation=NOT_BORN)

    def _give_up(self, spec: SliceSpec, reason: str, incarnation: Incarnation | None = None) -> None:
        self._failed[spec.slice_id] = spec
        self._report(spec.slice_id, "failed", reason[:REASON_CHARS_MAX], incarnation)

    # ------------------------------------------------------------ the workers' side

    def _on_worker(self, peer: PeerId, message: AnyMessage) -> None:
        match message:
            case WorkerHello(worker_id, incarnation):
                self._on_greeting(peer, worker_id, incarnation)
                return
            case StatusAsked():
                self._actions.append(Send(peer, self._listed()))
                return
        worker = next((worker for worker in self._workers if worker.peer == peer), None)
        if worker is None or worker.state in ENDING:
            self.counters["unexpected_in"] += 1
            return
        match message:
            case SliceReady() if worker.state is WorkerState.WAITING:
                pass  # the news of its end was quicker
            case SliceReady(slice_id=slice_id, incarnation=incarnation) if slice_id in worker.slices:
                self._report(slice_id, "ready", incarnation=incarnation)
            case SliceFailed(slice_id=slice_id, reason=reason) if slice_id in worker.slices:
                self._on_slice_failed(worker, slice_id, message.incarnation, reason)
            case SliceReady() | SliceFailed():
                pass  # of a slice that is no longer wanted
            case _:
                self.counters["unexpected_in"] += 1
        if worker.state is WorkerState.LOADING and self._is_settled(worker):
            self._step(worker, Step.SETTLED)

    def _on_slice_failed(
        self, worker: _Worker, slice_id: SliceId, incarnation: Incarnation, reason: str
    ) -> None:
        if self._status[slice_id].state == "ready":  # it has worked: its device broke, a new process may do
            worker.end_reason = reason[:REASON_CHARS_MAX]
            self._report(slice_id, "lost", worker.end_reason, incarnation)
            self._step(worker, Step.BROKE)
            self._actions.append(Terminate(worker.worker_id))
            return
        self._give_up(worker.slices.pop(slice_id), reason, incarnation)
        self._end_if_unwanted(worker)

    def _on_greeting(self, peer: PeerId, worker_id: str, incarnation: Incarnation) -> None:
        worker = self._find(worker_id)
        if worker is None:
            self.counters["unexpected_in"] += 1
            self._actions.append(Send(peer, Stop(0.0)))  # nobody's child: of no use to anyone
            return
        if worker.state is not WorkerState.STARTING:
            return  # said twice, or already on its way out
        worker.peer = peer
        for slice_id in worker.slices:
            self._report(slice_id, "starting", incarnation=incarnation)
        self._step(worker, Step.GREETED)
        self._tell_what_to_host(worker)

    def _is_settled(self, worker: _Worker) -> bool:
        return all(self._status[slice_id].state == "ready" for slice_id in worker.slices)

    def _on_exit(self, worker_id: str, code: int, last_words: str) -> None:
        worker = self._find(worker_id)
        assert worker is not None, "only our own children are watched"
        self._step(worker, Step.EXITED)
        self.counters["workers_exited"] += 1
        if not worker.slices:
            self._workers.remove(worker)
            self._start_missing()  # what waited for its end
            return
        self._fail(worker, _reason(worker.end_reason or _ending(code), last_words))

    def _fail(self, worker: _Worker, reason: str) -> None:
        """Its process is gone although it was wanted: tell at once, then start it again or give up."""
        for slice_id in worker.slices:
            self._report(slice_id, "lost", reason)
        worker.limit_at_ms = worker.restarts.note_failure(self._now_ms)
        if worker.limit_at_ms is None:
            rule = self._limits.restart
            words = (
                f"given up after {rule.failures_max} failures within {rule.window_ms / 1e3:.0f} s: {reason}"
            )
            for spec in worker.slices.values():
                self._give_up(spec, words)
            self._workers.remove(worker)

    # ------------------------------------------------------------ ending

    def _end_if_unwanted(self, worker: _Worker) -> None:
        if worker.slices or worker.state in ENDING:
            return
        if worker.state is WorkerState.WAITING:
            self._workers.remove(worker)
            return
        self._step(worker, Step.END)
        if worker.state is WorkerState.STOPPING:
            self._send(worker, Stop(self._limits.grace_ms))
        else:
            self._actions.append(Terminate(worker.worker_id))

    def _on_stop(self) -> None:
        self._is_stopping = True
        self._wanted.clear()
        for slice_id in self._status:
            self._report(slice_id, "stopped", "its node agent stops")
        for worker in list(self._workers):
            worker.slices.clear()
            self._end_if_unwanted(worker)

    # ------------------------------------------------------------ time

    def _on_tick(self) -> None:
        for worker in list(self._workers):
            if worker.limit_at_ms is not None and worker.limit_at_ms <= self._now_ms:
                self._on_overdue(worker)
        if self._hello_at_ms is not None and self._hello_at_ms <= self._now_ms:
            self._hello()

    def _on_overdue(self, worker: _Worker) -> None:
        if worker.state is WorkerState.WAITING:
            self._spawn(worker)
            return
        former = worker.state
        self._step(worker, Step.OVERDUE)
        match worker.state:
            case WorkerState.TERMINATING:
                self._actions.append(Terminate(worker.worker_id))
            case WorkerState.KILLED:
                self._actions.append(Kill(worker.worker_id))
        is_slow = former in (WorkerState.STARTING, WorkerState.LOADING)
        if is_slow and worker.slices:  # told at once, whenever its end comes
            worker.end_reason = self._slowness(former, worker)
            for slice_id in worker.slices:
                self._report(slice_id, "lost", worker.end_reason)

    def _slowness(self, state: WorkerState, worker: _Worker) -> str:
        if state is WorkerState.STARTING:
            return f"its worker did not say hello within {self._limits.hello_ms / 1e3:g} s"
        late = sorted(slice_id for slice_id in worker.slices if self._status[slice_id].state != "ready")
        return f"not loaded within {self._limits.load_ms / 1e3:g} s: {', '.join(late[:4])}"

    # ------------------------------------------------------------ small things

    def _step(self, worker: _Worker, step: Step) -> None:
        worker.state = NEXT[worker.state, step]
        limit_ms = self._limit_ms.get(worker.state)
        worker.limit_at_ms = None if limit_ms is None else self._now_ms + limit_ms

    def _tell_what_to_host(self, worker: _Worker) -> None:
        if worker.state in (WorkerState.LOADING, WorkerState.SERVING):
            self._send(worker, Host(self._node_id, tuple(worker.slices.values()), self._scheduler_addresses))

    def _send(self, worker: _Worker, message: AnyMessage) -> None:
        assert worker.peer is not None, "only workers that said hello are written to"
        self._actions.append(Send(worker.peer, message))

    def _find(self, worker_id: str) -> _Worker | None:
        return next((worker for worker in self._workers if worker.worker_id == worker_id), None)


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


def _ending(code: int) -> str:
    return f"its worker was killed by signal {-code}" if code < 0 else f"its worker exited with code {code}"


def _reason(what: str, last_words: str) -> str:
    """One line: what happened, then the last lines that the process said."""
    lines = [line.strip() for line in last_words.splitlines() if line.strip()]
    said = " | ".join(lines[-3:])[-(REASON_CHARS_MAX - 200) :]
    return f"{what}; its last words: {said}" if said else what
