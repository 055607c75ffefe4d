"""The simulated world around a scheduler: frontends, node agents and workers on a virtual clock.

A heap holds what happens next. The scheduler in the middle is the very object that runs live: whatever there
is to decide about batching it decides, and here is only what answers it. Of one moment's events arrivals come
first, then what was scheduled, in the order in which it was scheduled, and the scheduler's own timer last: a
request that comes at the very moment a batch would leave is still in it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fabric.errors import NoReplica
from fabric.ids import (
    Incarnation,
    ModelId,
    NodeId,
    PeerId,
    SliceId,
    frontend_id,
    peer_id,
    role_id_of_node,
    worker_prefix,
)
from fabric.messages import (
    AnyMessage,
    Arrivals,
    DesiredSlices,
    Done,
    Dropped,
    FrontendHello,
    ModelSpec,
    NodeHello,
    PlanAsked,
    PreemptBatch,
    RehearsalAsked,
    ReplicaInfo,
    Returned,
    RunBatch,
    SeqRun,
    SliceReady,
    Withdraw,
)
from roles.applications.tally import StageTally
from roles.frontend.arrivals import cut_runs
from roles.frontend.requests import LATE_RETURNS_MAX, TRIES_MAX
from roles.frontend.return_margin import ReturnMargin, ReturnPath
from roles.gpu_worker.batch_start_rules import start_moments
from roles.runtime.core import PLANNER, REHEARSER, SCHEDULER_ID, Core, Heard, Lost, Send, Tick
from roles.scheduler.planning.make_plan import make_plan
from roles.scheduler.rehearsing.make_rehearsal import make_rehearsal
from roles.simulator.applications import TASKS_FROM, ApplicationPlay
from roles.simulator.gpu import SimulatedGpu, SimulatedJob, SimulatedSlice, requests_in
from roles.simulator.hardware import SimulatedHardware
from roles.simulator.network import KnownReturn
from roles.simulator.pipeline import SimulatedGang, SimulatedPipeline
from roles.simulator.traffic import ModelTraffic
from roles.workload.outcomes import BatchRecord

FIRST = Incarnation("00000000")  # nothing restarts here
SCHEDULER = peer_id(SCHEDULER_ID, FIRST)
BLOCK = 1024  # arrivals made from numpy's columns at a time: few enough to stay in the cache
TICKS_AT_ONE_MOMENT = 10_000  # more is a scheduler that asks to be woken for nothing
IDLE_END_MS = (
    60_000.0  # all deadlines have passed, and nothing ran or was dropped for so long: nothing will be
)
AGAIN_FROM = 1 << 40  # the numbers of requests that are announced again
NEVER_MS = float("inf")
_TICK = Tick()


@dataclass(slots=True, frozen=True)
class _Returned:
    """A request that came back to its frontend."""

    index: int
    due_at_ms: float


class FastWorld:
    """One run around `core`, a scheduler's. `traffic` says what arrives, and takes each request's fate."""

    def __init__(
        self,
        core: Core[Heard | Lost | Tick, Send],
        hardware: SimulatedHardware,
        traffic: Sequence[ModelTraffic],
        applications: ApplicationPlay | None = None,
    ) -> None:
        self.batches: list[BatchRecord] = []
        """Every batch that started, in the order of their ends."""
        self.dropped = {one.model_id: 0 for one in traffic}
        """Requests of the models' own given up by the scheduler."""
        self.late_preemptions = 0
        """Of batches that had ended when the scheduler's word came."""
        self._core = core
        self._nodes = {node.node_id: node for node in hardware.nodes}
        self._network = hardware.network
        self._hardware = hardware
        self._traffic = {one.model_id: one for one in traffic}
        self._applications = applications
        self._frontends = [
            (frontend_id(number), peer_id(frontend_id(number), FIRST)) for number in range(hardware.frontends)
        ]
        self._peer_of = dict(self._frontends)
        self._number_of = {name: number for number, (name, _) in enumerate(self._frontends)}
        self._number_of_peer = {peer: number for number, (_, peer) in enumerate(self._frontends)}
        self._gpus: dict[tuple[NodeId, int], SimulatedGpu] = {}
        for node in hardware.nodes:
            for info, device in zip(node.gpus, node.devices, strict=True):
                self._gpus[node.node_id, info.gpu] = SimulatedGpu(len(self._gpus), device)
        self._slices: dict[SliceId, SimulatedSlice] = {}
        self._nodes_slices: dict[NodeId, list[SliceId]] = {}
        self._node_of: dict[PeerId, NodeId] = {}
        self._started = 0
        # A network that jitters is learned as live frontends learn it; one that does not is known.
        model = hardware.network.model
        self._is_learning = model.jitter_ms > 0.0
        self._returns: Mapping[ModelId, ReturnPath | KnownReturn] = {
            one.model_id: ReturnPath() if self._is_learning else KnownReturn(model.result_ms)
            for one in traffic
        }
        self._announced_again: Counter[tuple[ModelId, int]] = Counter()
        self._again: dict[tuple[ModelId, int], list[int]] = {}
        """Of each model and frontend, the requests that have the numbers from `AGAIN_FROM` on."""
        self._heap: list[tuple[float, int, Callable[[Any, float], None], Any]] = []
        self._order = 0
        self._progress_at_ms = 0.0
        self._ticked_at_ms = -1.0
        self._ticks = 0
        self._on: dict[type, Callable[[PeerId, Any, float], None]] = {
            RunBatch: self._on_run_batch,
            PreemptBatch: self._on_preempt,
            Dropped: self._on_dropped,
            Returned: self._on_returned,
            DesiredSlices: self._on_want,
            PlanAsked: self._on_plan_asked,
            RehearsalAsked: self._on_rehearsal_asked,
        }

    def run(self) -> None:
        """Play everything, until each request has met its fate."""
        self._introduce()
        if self._applications is not None:
            self._applications.begin(self)
        core, handle = self._core, self._core.handle
        at_ms = 0.0
        due_at_ms = self._due_at_ms(at_ms)
        wake_at_ms = core.wake_at_ms
        for block in self._announcements():
            for at_ms, heard in block:
                if due_at_ms < at_ms:
                    while due_at_ms < at_ms:
                        due_at_ms = self._step(due_at_ms)
                    wake_at_ms = core.wake_at_ms
                # Nearly every request only adds to a batch: then what is due next is what it was.
                if actions := handle(heard, at_ms):
                    self._carry_out(actions, at_ms)
                elif core.wake_at_ms == wake_at_ms:
                    continue
                wake_at_ms = core.wake_at_ms
                due_at_ms = self._due_at_ms(at_ms)
        while due_at_ms <= (ends_at_ms := self._ends_at_ms()):
            while due_at_ms <= ends_at_ms:
                due_at_ms = self._step(due_at_ms)
        for traffic in self._traffic.values():
            traffic.settle()
        if self._applications is not None:
            self._applications.settle()

    # ------------------------------------------------------------ what happens next

    def schedule(self, at_ms: float, callback: Callable[[Any, float], None], argument: object) -> None:
        """See `Surroundings`."""
        self._order += 1
        heapq.heappush(self._heap, (at_ms, self._order, callback, argument))

    def _ends_at_ms(self) -> float:
        """When nothing is left that could happen to a request, unless something happens to one before."""
        deadlines_ms = [
            float(one.arrived_at_ms[-1]) + one.slo_ms
            for one in self._traffic.values()
            if one.arrived_at_ms.size
        ]
        free_at_ms = [slice_.free_at_ms for slice_ in self._slices.values()]
        applied_at_ms = 0.0 if self._applications is None else self._applications.ends_at_ms
        return max(self._progress_at_ms, applied_at_ms, *deadlines_ms, *free_at_ms, 0.0) + IDLE_END_MS

    def _due_at_ms(self, now_ms: float) -> float:
        """The moment of the next thing that happens of itself."""
        wake_at_ms = self._core.wake_at_ms
        next_at_ms = self._heap[0][0] if self._heap else NEVER_MS
        if wake_at_ms is None or wake_at_ms >= next_at_ms:
            return next_at_ms
        return wake_at_ms if wake_at_ms > now_ms else now_ms

    def _step(self, at_ms: float) -> float:
        """Let the next thing happen, which is due at `at_ms`; the moment of the one after it."""
        heap = self._heap
        if heap and heap[0][0] <= at_ms:
            _, _, callback, argument = heapq.heappop(heap)
            callback(argument, at_ms)
        else:
            self._ticks = self._ticks + 1 if at_ms == self._ticked_at_ms else 0
            self._ticked_at_ms = at_ms
            assert self._ticks < TICKS_AT_ONE_MOMENT, f"the scheduler does not get past {at_ms} ms"
            self._carry_out(self._core.handle(_TICK, at_ms), at_ms)
        return self._due_at_ms(at_ms)

    def _carry_out(self, actions: Sequence[Send], now_ms: float) -> None:
        """Deliver what the scheduler sends; directories and grants tell nobody here anything new."""
        for action in actions:
            deliver = self._on.get(type(action.message))
            if deliver is not None:
                deliver(action.peer, action.message, now_ms)

    def _tell(self, peer: PeerId, message: AnyMessage, now_ms: float) -> None:
        """Send to the scheduler."""
        at_ms = self._network.control_at_ms(peer, SCHEDULER, now_ms)
        self.schedule(at_ms, self._hear, Heard(peer, message, at_ms - now_ms))

    def _hear(self, heard: Heard, now_ms: float) -> None:
        self._carry_out(self._core.handle(heard, now_ms), now_ms)

    # ------------------------------------------------------------ frontends

    def _announcements(self) -> Iterator[Iterator[tuple[float, Heard]]]:
        """Every request as its frontend announces it, by arrival at the scheduler, in blocks.

        Requests go to the frontends in turn. Those of one frontend, model and moment are one run.
        """
        frontends = len(self._frontends)
        models = list(self._traffic.values())
        sent_at_ms = np.concatenate([one.arrived_at_ms for one in models] or [np.empty(0)])
        model = np.repeat(np.arange(len(models)), [one.arrived_at_ms.size for one in models])
        index = np.concatenate([np.arange(one.arrived_at_ms.size) for one in models] or [np.empty(0, int)])
        if frontends == 1:
            by_time = np.argsort(sent_at_ms, kind="stable")  # of one moment, by models
        else:
            by_time = np.lexsort((model, index % frontends, sent_at_ms))
        sent_at_ms, model, index = sent_at_ms[by_time], model[by_time], index[by_time]
        is_first = np.ones(sent_at_ms.size, dtype=bool)
        is_first[1:] = (np.diff(sent_at_ms) > 0) | (np.diff(model) != 0) | (np.diff(index % frontends) != 0)
        has_priorities = any(one.priorities is not None for one in models)
        if has_priorities:  # a run has one
            is_first[:] = True
        first = np.flatnonzero(is_first)
        count = np.diff(np.append(first, sent_at_ms.size))
        sent_at_ms, model, index = sent_at_ms[first], model[first], index[first]
        seq, frontend = np.divmod(index, frontends)
        at_ms = self._network.announced_at_ms(frontend, sent_at_ms)
        by_time = np.argsort(at_ms, kind="stable")
        columns = (model, seq, count, frontend, at_ms - sent_at_ms)
        known_ms = [one.slo_ms - self._network.model.result_ms for one in models]
        names = [one.model_id for one in models]
        peers = [peer for _, peer in self._frontends]
        for start in range(0, at_ms.size, BLOCK):
            block = by_time[start : start + BLOCK]
            m, first_seq, n, f, late_ms = (column[block].tolist() for column in columns)
            # Through `map`, so that only `Heard` is left for the interpreter to do.
            if self._is_learning or has_priorities:
                arrivals = self._learned(map(models.__getitem__, m), first_seq, n, f)
            else:
                budgets_ms = map(known_ms.__getitem__, m)
                arrivals = map(Arrivals, map(names.__getitem__, m), first_seq, n, budgets_ms)
            heard = map(Heard, map(peers.__getitem__, f), arrivals, late_ms)
            yield zip(at_ms[block].tolist(), heard, strict=True)

    def _learned(
        self,
        models: Iterable[ModelTraffic],
        first_seqs: Iterable[int],
        counts: Iterable[int],
        frontends: Iterable[int],
    ) -> Iterator[Arrivals]:
        """Announcements with what has been learned of the return path by the time each is heard."""
        for model, first_seq, count, number in zip(models, first_seqs, counts, frontends, strict=True):
            path, slo_ms = self._returns[model.model_id], model.slo_ms
            budget_ms, slack_ms = path.budget_ms(slo_ms), path.slack_ms(slo_ms)
            priority = model.priority(first_seq * len(self._frontends) + number)
            yield Arrivals(model.model_id, first_seq, count, budget_ms, slack_ms=slack_ms, priority=priority)

    def tell_scheduler(self, frontend: int, message: Arrivals | Withdraw, now_ms: float) -> None:
        """See `ApplicationSurroundings`."""
        self._tell(self._frontends[frontend][1], message, now_ms)

    def return_of(self, model_id: ModelId) -> ReturnMargin:
        """See `ApplicationSurroundings`."""
        return self._returns[model_id]

    def _note_answers(
        self, traffic: ModelTraffic, indices: Sequence[int], at_ms: float, return_ms: float
    ) -> None:
        """A run of answers has come: what its frontend learns of it."""
        path = self._returns[traffic.model_id]
        path.note_batch(return_ms)
        for arrived_at_ms in traffic.arrived_at_ms[indices].tolist():
            path.note_answer(at_ms - arrived_at_ms - traffic.slo_ms, traffic.slo_ms)

    def _on_dropped(self, peer: PeerId, message: Dropped, now_ms: float) -> None:
        own, tasks = self._own_and_tasks(message.runs)
        count = sum(run.count for run in own)
        self.dropped[message.model_id] += count
        if tasks and self._applications is not None:
            heard = self._applications.dropped(
                message.model_id, self._number_of_peer[peer], tasks, message.code
            )
            self.schedule(
                self._network.control_at_ms(SCHEDULER, peer, now_ms), self._applications.hear, heard
            )
            count += len(heard)
        if message.retry_after_ms is None and message.code != NoReplica.code:  # else no margin is to blame
            self._returns[message.model_id].note_dropped(count)
        self._progress_at_ms = now_ms

    def _on_returned(self, peer: PeerId, message: Returned, now_ms: float) -> None:
        """Granted, but not run: each is announced again while its budget lasts, with those it came back with."""
        traffic, number = self._traffic[message.model_id], self._number_of_peer[peer]
        back_at_ms = self._network.control_at_ms(SCHEDULER, peer, now_ms)
        again = self._again.setdefault((message.model_id, number), [])
        came: dict[int | None, list[_Returned]] = {}
        own, tasks = self._own_and_tasks(message.runs)
        if tasks and self._applications is not None:
            self._applications.returned(message.model_id, number, tasks, back_at_ms)
        for index in (one for run in own for one in self._indices(message.model_id, number, run)):
            due_at_ms = float(traffic.arrived_at_ms[index]) + traffic.slo_ms
            tries = self._announced_again[message.model_id, index]
            if due_at_ms > back_at_ms and tries < TRIES_MAX + LATE_RETURNS_MAX:
                self._announced_again[message.model_id, index] += 1
                came.setdefault(traffic.priority(index), []).append(_Returned(index, due_at_ms))
        path = self._returns[message.model_id]
        for priority, alike in came.items():
            for run, budget_ms, span_ms in cut_runs(alike, path, back_at_ms):
                first_seq = AGAIN_FROM + len(again)
                again += [one.index for one in run]
                slack_ms = path.slack_ms(run[0].due_at_ms - back_at_ms)
                told = Arrivals(
                    message.model_id,
                    first_seq,
                    len(run),
                    budget_ms,
                    span_ms,
                    slack_ms=slack_ms,
                    priority=priority,
                )
                self._tell(peer, told, back_at_ms)

    def _indices(self, model_id: ModelId, number: int, run: SeqRun) -> Sequence[int]:
        """Which requests of a model a run of that frontend is."""
        if run.first_seq >= AGAIN_FROM:
            first = run.first_seq - AGAIN_FROM
            return self._again[model_id, number][first : first + run.count]
        frontends = len(self._frontends)
        first = run.first_seq * frontends + number
        return range(first, first + run.count * frontends, frontends)

    @property
    def stage_tallies(self) -> Sequence[Mapping[str, StageTally]]:
        """Of each application."""
        return [] if self._applications is None else self._applications.tallies

    def _own_and_tasks(self, runs: Sequence[SeqRun]) -> tuple[Sequence[SeqRun], Sequence[SeqRun]]:
        """A model's own requests, and tasks of applications."""
        if self._applications is None:
            return runs, ()
        tasks = [run for run in runs if run.first_seq >= TASKS_FROM]
        return ([run for run in runs if run.first_seq < TASKS_FROM], tasks) if tasks else (runs, ())

    # ------------------------------------------------------------ nodes and workers

    def _introduce(self) -> None:
        """Everybody says hello at 0; the cluster is up when time begins."""
        for name, peer in self._frontends:
            self._carry_out(self._core.handle(Heard(peer, FrontendHello(name, FIRST, ())), 0.0), 0.0)
        for node in self._nodes.values():
            agent = peer_id(role_id_of_node(node.node_id), FIRST)
            self._node_of[agent] = node.node_id
            hello = Heard(agent, NodeHello(node.node_id, FIRST, node.gpus, ()))
            self._carry_out(self._core.handle(hello, 0.0), 0.0)

    def _on_want(self, peer: PeerId, message: DesiredSlices, now_ms: float) -> None:
        """An agent ends what is not wanted and starts what is not there yet; new slices report themselves ready."""
        node_id = self._node_of[peer]
        wanted = {spec.slice_id for spec in message.slices}
        for slice_id in [one for one in self._nodes_slices.get(node_id, ()) if one not in wanted]:
            gone = self._slices.pop(slice_id)
            gone.gpu.slices.remove(gone)
            self._nodes_slices[node_id].remove(slice_id)
        load_ms = self._hardware.start_ms if now_ms > 0 else 0.0
        for spec in message.slices:
            slice_ = self._slices.get(spec.slice_id)
            if slice_ is None:
                gpus = [self._gpus[node_id, gpu] for gpu in spec.gpus]
                self._started += 1
                worker = peer_id(f"{worker_prefix(node_id)}{self._started}", FIRST)
                kind = SimulatedGang if spec.is_gang else SimulatedSlice
                slice_ = (SimulatedPipeline if spec.is_pipeline else kind)(spec, node_id, worker, gpus, self)
                gpus[0].slices.append(slice_)
                self._slices[spec.slice_id] = slice_
                self._nodes_slices.setdefault(node_id, []).append(spec.slice_id)
                self._load_in(load_ms, slice_, spec.models, now_ms)
            else:
                for number, model in enumerate(slice_.become(spec), 1):  # one after the other
                    self._load_in(number * load_ms, slice_, (model,), now_ms)

    def _load_in(
        self, wait_ms: float, slice_: SimulatedSlice, models: tuple[ModelSpec, ...], now_ms: float
    ) -> None:
        if wait_ms > 0:
            self.schedule(now_ms + wait_ms, self._on_loaded, (slice_, models))
        else:
            self._on_loaded((slice_, models), now_ms)

    def _on_loaded(self, loaded: tuple[SimulatedSlice, tuple[ModelSpec, ...]], now_ms: float) -> None:
        """A slice has loaded these models, and says what it hosts by now, if anybody wants it still."""
        slice_, models = loaded
        spec = slice_.spec
        if self._slices.get(spec.slice_id) is not slice_:
            return
        slice_.loaded.update(model.model_id for model in models)
        replicas = tuple(
            ReplicaInfo(
                model.model_id,
                model.batch_size_max,
                tuple(slice_.alone_ms[model.model_id]),
                memory_bytes=model.memory_bytes,
                interval_ms=model.interval_ms,
            )
            for model in spec.models
            if model.model_id in slice_.loaded
        )
        ready = SliceReady(spec.slice_id, FIRST, slice_.node_id, spec.gpu, (), replicas)
        self._hear(Heard(slice_.peer, ready), now_ms)

    def _on_plan_asked(self, peer: PeerId, message: PlanAsked, now_ms: float) -> None:
        del peer
        self.schedule(now_ms + self._hardware.plan_ms, self._hear, Heard(PLANNER, make_plan(message)))

    def _on_rehearsal_asked(self, peer: PeerId, message: RehearsalAsked, now_ms: float) -> None:
        """It takes no time."""
        del peer
        self.schedule(now_ms, self._hear, Heard(REHEARSER, make_rehearsal(message)))

    def _on_run_batch(self, peer: PeerId, message: RunBatch, now_ms: float) -> None:
        """A batch goes to its worker; its grants to the frontends, which push the inputs at once.

        All inputs of a batch come in over the worker's one link, so each part is there after the whole batch.
        """
        network = self._network
        batch_size = requests_in(message.parts)
        data_ms = network.model.data_ms_per_item * batch_size
        received_at_ms = network.control_at_ms(SCHEDULER, peer, now_ms)
        inputs_at_ms = [
            network.control_at_ms(SCHEDULER, self._peer_of[part.frontend_id], now_ms) + data_ms
            for part in message.parts
        ]
        job = SimulatedJob(
            message,
            batch_size,
            now_ms,
            received_at_ms,
            *start_moments(message, now_ms),
            inputs_at_ms,
            max(inputs_at_ms),
        )
        slice_ = self._slices[message.slice_id]
        if received_at_ms <= now_ms:
            slice_.take(job, now_ms)
        else:
            self.schedule(received_at_ms, slice_.take, job)

    def _on_preempt(self, peer: PeerId, message: PreemptBatch, now_ms: float) -> None:
        slice_ = self._slices[message.slice_id]
        at_ms = self._network.control_at_ms(SCHEDULER, peer, now_ms)
        self.schedule(at_ms, slice_.preempt, message.batch_id)

    def preempted_late(self) -> None:
        """See `Surroundings`."""
        self.late_preemptions += 1

    def report(self, peer: PeerId, done: Done, now_ms: float) -> None:
        """See `Surroundings`."""
        at_ms = self._network.control_at_ms(peer, SCHEDULER, now_ms)
        heard = Heard(peer, done, at_ms - now_ms)
        if at_ms <= now_ms and done.status == "ok":
            # A message that takes no time is heard at once. A batch that was given back takes the long way
            # round even so: what follows from it may be given back too, and so on.
            self._hear(heard, now_ms)
        else:
            self.schedule(at_ms, self._hear, heard)

    def ran(self, slice_: SimulatedSlice, job: SimulatedJob) -> None:
        """See `Surroundings`. Outputs go to the frontends, where the first answer counts."""
        model_id, spec, frontends = job.run.model_id, slice_.spec, len(self._frontends)
        started_at_ms, finished_at_ms = job.started_at_ms, job.finished_at_ms
        traffic = self._traffic[model_id]
        for part in job.parts:
            answered_at_ms = self._network.result_at_ms(finished_at_ms)
            number = self._number_of[part.frontend_id]
            own, tasks = self._own_and_tasks(part.runs)
            if tasks and self._applications is not None:
                span_ms = (started_at_ms, finished_at_ms)
                heard = self._applications.answered(model_id, number, tasks, span_ms, answered_at_ms)
                self.schedule(answered_at_ms, self._applications.hear, heard)
            for run in own:
                if run.first_seq < AGAIN_FROM:
                    first = run.first_seq * frontends + number
                    traffic.answered(first, run.count, frontends, started_at_ms, answered_at_ms)
                else:
                    for index in self._indices(model_id, number, run):
                        traffic.answered(index, 1, 1, started_at_ms, answered_at_ms)
                if self._is_learning:
                    indices, return_ms = self._indices(model_id, number, run), answered_at_ms - finished_at_ms
                    self._note_answers(traffic, indices, answered_at_ms, return_ms)
        self._progress_at_ms = finished_at_ms
        batch_size = job.ran if job.parts else 0
        self.batches.append(
            BatchRecord(
                model_id,
                batch_size,
                spec.slice_id,
                slice_.gpu.number,
                spec.share_percent,
                job.sent_at_ms,
                started_at_ms,
                finished_at_ms,
                job.stages,
            )
        )
