"""The worker processes of an agent: each on its way through the table in `lifecycle.py`, in bounded time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from fabric.ids import Epoch, Incarnation, ModelId, NodeId, PeerId, SliceId, worker_prefix
from fabric.messages import AnyMessage, EpochGranted, Host, SliceFailed, SliceSpec, SliceState, Stop
from roles.node_agent.events import AgentAction, AgentLimits, Kill, Orphan, Remember, Spawn, Terminate
from roles.node_agent.mps.daemons import Daemons
from roles.node_agent.slice_reports import NOT_BORN, REASON_CHARS_MAX, SliceReports
from roles.node_agent.workers.end_reasons import how_it_ended, with_last_words
from roles.node_agent.workers.lifecycle import NEXT, PROCESSLESS, Worker, WorkerState, WorkerTransition
from roles.node_agent.workers.suspect_models import STRIKES_MAX, Suspects
from roles.runtime.core import Send
from roles.runtime.process_events import Warn
from roles.runtime.restarts import Restarts
from roles.runtime.time_limits import is_looked_at_late

HELLO_LIMIT_GROWTH_MAX = 4.0  # on a host too busy for the first limit, who is ended for it would never serve
TELL_AGAIN_MS = 100.0  # a worker that may not have heard: its queue was full, or its connection broke
TOLD = (WorkerState.LOADING, WorkerState.SERVING)  # they have heard what to host, and hear of changes


class Workers:
    """Starts, restarts and ends worker processes. What to do goes to `actions`, the core's own list."""

    def __init__(
        self,
        node_id: NodeId,
        limits: AgentLimits,
        reports: SliceReports,
        daemons: Daemons,
        actions: list[AgentAction],
        agent_pid: int,
    ) -> None:
        self.scheduler_addresses: tuple[str, ...] = ()
        self.epoch = Epoch(0)
        """Of the scheduler at these addresses, whose commands count."""
        self._node_id = node_id
        self._limits = limits
        self._limit_ms = {
            WorkerState.LOADING: limits.load_ms,
            # Its own grace, and a little for the way there and back.
            WorkerState.STOPPING: limits.grace_ms + 500.0,
            WorkerState.TERMINATING: limits.terminate_ms,
            WorkerState.KILLED: limits.kill_ms,
        }
        self._reports = reports
        self._daemons = daemons
        self._agent_pid = agent_pid
        self._actions = actions
        self._all: list[Worker] = []
        self._spawned = 0
        self._suspects = Suspects()
        self._wanted: Mapping[SliceId, SliceSpec] = {}

    def __iter__(self) -> Iterator[Worker]:
        """All of them; they may be ended on the way."""
        return iter(list(self._all))

    @property
    def wake_at_ms(self) -> float | None:
        """The next time limit or restart."""
        limits = (
            worker.limit_at_ms
            for worker in self._all
            if worker.limit_at_ms is not None and not self._is_held(worker)
        )
        again = (worker.tell_at_ms for worker in self._all if worker.tell_at_ms is not None)
        return min((*limits, *again), default=None)

    @property
    def are_gone(self) -> bool:
        """Whether there is no process left to wait for."""
        return all(worker.state in PROCESSLESS for worker in self._all)

    @property
    def taken(self) -> set[SliceId]:
        """Slices that run, are about to, or whose old process has not ended."""
        taken: set[SliceId] = set()
        for worker in self._all:
            taken.update(worker.slices)
            if worker.is_ending:
                taken.update(worker.holding)
        return taken

    def at(self, peer: PeerId) -> Worker | None:
        """Whose process is behind a peer, or was until it ended."""
        return next((worker for worker in self._all if worker.peer == peer), None)

    def named(self, worker_id: str) -> Worker | None:
        """The process of that start."""
        return next((worker for worker in self._all if worker.worker_id == worker_id), None)

    # ------------------------------------------------------------ starting

    def start(self, specs: Iterable[SliceSpec], now_ms: float) -> None:
        """A new process for these slices, be they new or given up before."""
        slices = {spec.slice_id: spec for spec in specs}
        self._suspects.give_another_try(slices)
        worker = Worker("", slices, Restarts(self._limits.restart), self._limits.hello_ms)
        self._all.append(worker)
        self._spawn(worker, now_ms)

    def greet(self, worker: Worker, peer: PeerId, incarnation: Incarnation, pid: int, now_ms: float) -> None:
        """It said hello: tell it what to host."""
        if worker.state is not WorkerState.STARTING:
            return  # said twice, or already on its way out
        worker.peer = peer
        self._actions.append(Remember(Orphan(worker.worker_id, pid, incarnation, worker.is_mps)))
        for slice_id in worker.slices:
            self._reports.report(slice_id, SliceState.STARTING, incarnation=incarnation)
        self._step(worker, WorkerTransition.GREETED, now_ms)
        self.tell_what_to_host(worker)

    def count_from(self, number: int) -> None:
        """Workers started from now on have higher numbers: those that live, wanted or not, keep their names."""
        self._spawned = max(self._spawned, number)

    def adopt(self, orphan: Orphan, slices: Iterable[SliceSpec], peer: PeerId, now_ms: float) -> None:
        """A worker of a former agent serves on under this one, which it tells anew what is ready."""
        hosted = {spec.slice_id: spec for spec in slices}
        restarts = Restarts(self._limits.restart)
        worker = Worker(orphan.worker_id, hosted, restarts, self._limits.hello_ms, is_mps=orphan.is_mps)
        worker.holding, worker.peer = frozenset(hosted), peer
        self._all.append(worker)
        for slice_id in hosted:
            self._reports.report(slice_id, SliceState.STARTING, incarnation=orphan.incarnation)
        self._step(worker, WorkerTransition.START, now_ms)
        self._step(worker, WorkerTransition.GREETED, now_ms)
        self.tell_what_to_host(worker)

    def loads(self, worker: Worker, slice_id: SliceId, model_id: ModelId, now_ms: float) -> None:
        """It begins to load a model, or says so again. One after the other: each has its own time."""
        if not worker.hosts(slice_id, model_id):
            return  # it is no longer wanted
        worker.loading.pop(slice_id, None)
        worker.loading[slice_id] = model_id
        turns = 2 if worker.slices[slice_id].is_pipeline else 1  # its first stage's, then that of all others
        if worker.state is WorkerState.LOADING and worker.given_time[slice_id, model_id] < turns:
            worker.given_time[slice_id, model_id] += 1
            self._give_time(worker, now_ms)

    def settle(self, worker: Worker, now_ms: float) -> None:
        """Has it loaded everything that it should host? Then it has time for ever."""
        if worker.state is WorkerState.LOADING and all(map(self._reports.is_ready, worker.slices)):
            worker.unready_since_ms, worker.hello_limit_ms = None, self._limits.hello_ms
            self._step(worker, WorkerTransition.SETTLED, now_ms)

    def tell_what_to_host(self, worker: Worker) -> None:
        """All of it, each time that something of it has changed; nothing before it has said hello, or once it ends."""
        if worker.state in TOLD:
            slices, left_out = tuple(worker.slices.values()), self._suspects.left_out(worker.slices)
            host = Host(
                self._node_id,
                slices,
                self.scheduler_addresses,
                self._agent_pid,
                left_out,
                self.epoch,
                self._limits.heartbeats.interval_ms,
                self._limits.heartbeats.patience_ms,
            )
            self._send(worker, host)

    def untold(self, peer: PeerId, now_ms: float) -> None:
        """A worker may not have heard what it was told last: it is told all of it in a while, and again until it takes that."""
        worker = self.at(peer)
        if worker is not None:
            worker.tell_at_ms = now_ms + TELL_AGAIN_MS

    def tell_the_epoch(self, worker: Worker) -> None:
        """Another scheduler commands it from now on, or one that is elsewhere."""
        if worker.state in TOLD:
            self._send(worker, EpochGranted(self.epoch, self.scheduler_addresses))

    def _spawn(self, worker: Worker, now_ms: float) -> None:
        self._spawned += 1
        worker.worker_id = f"{worker_prefix(self._node_id)}{self._spawned}"
        worker.peer, worker.end_reason = None, ""
        worker.holding = frozenset(worker.slices)
        worker.is_uprooted = worker.is_a_models_doing = False
        worker.loading, worker.given_time, worker.tell_at_ms = {}, Counter(), None
        worker.unready_since_ms = now_ms
        gpu = worker.gpu
        worker.is_mps = gpu is not None and not worker.is_pipeline and self._daemons.is_mps(gpu)
        self._step(worker, WorkerTransition.START, now_ms)
        slices = tuple(worker.slices.values())
        self._actions.append(Spawn(worker.worker_id, slices, worker.is_mps, self._beside(worker)))
        if gpu is not None and not self._daemons.enforces_shares(gpu):
            self._warn_of_shares(worker, gpu)
        for slice_id in worker.slices:
            self._reports.report(slice_id, SliceState.STARTING, incarnation=NOT_BORN)

    def _warn_of_shares(self, worker: Worker, gpu: int) -> None:
        for spec in worker.slices.values():
            if spec.share_percent is not None and spec.share_percent < 100.0:
                why = self._daemons.why_not(gpu)
                self._actions.append(
                    Warn(
                        f"share_not_enforced slice={spec.slice_id} share_percent={spec.share_percent:g} reason={why!r}"
                    )
                )

    # ------------------------------------------------------------ ending

    def uproot(self, gpu: int, reason: str, now_ms: float, *, are_clients: bool) -> None:
        """The MPS daemon of a GPU is gone: its clients end now, and start again when it is back. Or it answers: who is no client ends, and starts again as one."""
        for worker in self._all:
            if (
                worker.is_mps != are_clients
                or worker.is_pipeline
                or worker.gpu != gpu
                or (worker.state, WorkerTransition.UPROOTED) not in NEXT
            ):
                continue
            worker.is_uprooted, worker.end_reason = True, reason[:REASON_CHARS_MAX]
            for slice_id in worker.slices:
                self._reports.report(slice_id, SliceState.LOST, worker.end_reason)
            self._step(worker, WorkerTransition.UPROOTED, now_ms)
            self._actions.append(Kill(worker.worker_id, at_once=True))

    def end_if_unwanted(self, worker: Worker, now_ms: float) -> None:
        """In order: by a message where it can hear one."""
        if worker.slices or worker.is_ending:
            return
        if worker.state is WorkerState.WAITING:
            self._all.remove(worker)
            return
        self._step(worker, WorkerTransition.END, now_ms)
        if worker.state is WorkerState.STOPPING:
            self._send(worker, Stop(self._limits.grace_ms))
        else:
            self._actions.append(Terminate(worker.worker_id))

    def broke(self, worker: Worker, failed: SliceFailed, now_ms: float) -> None:
        """A slice works no more: its device broke, be it while it loaded, or a model hung, and a new process may do."""
        worker.end_reason = failed.reason[:REASON_CHARS_MAX]
        if failed.model_id:
            self._suspect(worker, failed.slice_id, failed.model_id, now_ms)
        if worker.state is WorkerState.WAITING:  # the news of its end was quicker
            return
        self._reports.report(failed.slice_id, SliceState.LOST, worker.end_reason, failed.incarnation)
        self._step(worker, WorkerTransition.BROKE, now_ms)
        self._actions.append(Terminate(worker.worker_id))

    def silent(self, worker: Worker, silence_ms: float, now_ms: float) -> None:
        """Its loop answers no more though its process lives."""
        worker.end_reason = f"its worker has not answered for {silence_ms / 1e3:g} s"
        self._step(worker, WorkerTransition.OVERDUE, now_ms)
        self._actions.append(Kill(worker.worker_id))
        self._warn_overdue(worker)

    def want(self, wanted: Mapping[SliceId, SliceSpec]) -> None:
        """These should exist. Of models that are wanted no more, or otherwise, nothing is held against anyone."""
        self._wanted = wanted
        self._suspects.keep(wanted)

    def _beside(self, worker: Worker) -> tuple[SliceSpec, ...]:
        """The other slices of a GPU that is shared through MPS."""
        if not worker.is_mps:
            return ()
        others = (spec for slice_id, spec in self._wanted.items() if slice_id not in worker.slices)
        return tuple(spec for spec in others if spec.gpu == worker.gpu)

    def _suspect(self, worker: Worker, slice_id: SliceId, model_id: ModelId, now_ms: float) -> None:
        if worker.is_a_models_doing or not worker.hosts(slice_id, model_id):
            return
        worker.is_a_models_doing = True
        times = self._suspects.note(worker.slices[slice_id], model_id, worker.end_reason, now_ms)
        self._actions.append(
            Warn(
                f"model_suspected slice={slice_id} model={model_id} times={times} of={STRIKES_MAX}"
                f" reason={worker.end_reason!r}"
            )
        )

    def exited(self, worker: Worker, code: int, last_words: str, now_ms: float) -> None:
        """Its process is gone. If it was wanted, tell at once, then start it again or give up."""
        self._step(worker, WorkerTransition.EXITED, now_ms)
        if not worker.slices:
            self._all.remove(worker)
            return
        if worker.is_uprooted:  # told already; its next start waits for the daemon
            worker.limit_at_ms = now_ms
            return
        reason = with_last_words(worker.end_reason or how_it_ended(code), last_words)
        if worker.loading:
            slice_id, model_id = worker.loading.popitem()
            worker.end_reason = f"{reason} (while it loaded {model_id})"[:REASON_CHARS_MAX]
            self._suspect(worker, slice_id, model_id, now_ms)
        for slice_id in worker.slices:
            self._reports.report(slice_id, SliceState.LOST, reason)
        if worker.is_a_models_doing:  # which is left out in the end, so this does
            worker.limit_at_ms = now_ms + self._limits.restart.first_ms
            return
        wasted_ms = 0.0 if worker.unready_since_ms is None else now_ms - worker.unready_since_ms
        worker.limit_at_ms = worker.restarts.note_failure(now_ms, wasted_ms)
        if worker.limit_at_ms is None:
            words = f"given up after {self._limits.restart.failures_max} failures in a row: {reason}"
            for spec in worker.slices.values():
                self._reports.give_up(spec, words, now_ms)
            self._all.remove(worker)

    # ------------------------------------------------------------ time

    def tick(self, now_ms: float) -> None:
        """Start again whose pause is over, be harder on who is overdue."""
        for worker in self:
            if worker.tell_at_ms is not None and worker.tell_at_ms <= now_ms:
                worker.tell_at_ms = None
                self.tell_what_to_host(worker)
            limit_at_ms = worker.limit_at_ms
            if limit_at_ms is None or limit_at_ms > now_ms or self._is_held(worker):
                continue
            if worker.state is WorkerState.WAITING:
                self._spawn(worker, now_ms)
            elif is_looked_at_late(limit_at_ms, now_ms):
                self._give_time(worker, now_ms)
            else:
                self._on_overdue(worker, now_ms)

    def _on_overdue(self, worker: Worker, now_ms: float) -> None:
        former = worker.state
        self._step(worker, WorkerTransition.OVERDUE, now_ms)
        match worker.state:
            case WorkerState.TERMINATING:
                self._actions.append(Terminate(worker.worker_id))
            case WorkerState.KILLED:
                self._actions.append(Kill(worker.worker_id))
        is_slow = former in (WorkerState.STARTING, WorkerState.LOADING)
        if is_slow and worker.slices:  # told at once, whenever its end comes
            worker.end_reason = self._slowness(former, worker)
            if former is WorkerState.STARTING:
                most_ms = HELLO_LIMIT_GROWTH_MAX * self._limits.hello_ms
                worker.hello_limit_ms = min(2.0 * worker.hello_limit_ms, most_ms)
            self._warn_overdue(worker)

    def _warn_overdue(self, worker: Worker) -> None:
        self._actions.append(Warn(f"worker_overdue worker={worker.worker_id} reason={worker.end_reason!r}"))
        for slice_id in worker.slices:
            self._reports.report(slice_id, SliceState.LOST, worker.end_reason)

    def _slowness(self, state: WorkerState, worker: Worker) -> str:
        if state is WorkerState.STARTING:
            return f"its worker did not say hello within {worker.hello_limit_ms / 1e3:g} s"
        late = sorted(slice_id for slice_id in worker.slices if not self._reports.is_ready(slice_id))
        return f"not loaded within {self._limits.load_ms / 1e3:g} s: {', '.join(late[:4])}"

    # ------------------------------------------------------------ small things

    def _is_held(self, worker: Worker) -> bool:
        """Whether it waits for the MPS daemon of its GPU."""
        gpu = worker.gpu
        return worker.state is WorkerState.WAITING and gpu is not None and self._daemons.is_held(gpu)

    def _step(self, worker: Worker, step: WorkerTransition, now_ms: float) -> None:
        worker.state = NEXT[worker.state, step]
        self._give_time(worker, now_ms)

    def _give_time(self, worker: Worker, now_ms: float) -> None:
        limit_ms = self._limit_ms.get(worker.state)
        if worker.state is WorkerState.STARTING:
            limit_ms = worker.hello_limit_ms
        if worker.is_mps and worker.state in (WorkerState.TERMINATING, WorkerState.KILLED):
            limit_ms = self._limit_ms[worker.state] + self._limits.client_end_ms
        worker.limit_at_ms = None if limit_ms is None else now_ms + limit_ms

    def _send(self, worker: Worker, message: AnyMessage) -> None:
        assert worker.peer is not None, "only workers that said hello are written to"
        self._actions.append(Send(worker.peer, message))
