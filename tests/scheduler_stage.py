"""A whole scheduler core amid a cluster that comes and goes, on virtual time: every request's fate is written down.

Frontends, workers and agents are as simple as they can be: they say what real ones say and keep to it. Everything a
core sends is held against what must always hold.
"""

from __future__ import annotations

import gc
import itertools
import json
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from msgspec.structs import replace

from fabric.ids import BatchId, FrontendId, Incarnation, ModelId, NodeId, PeerId, SliceId
from fabric.limits import SMALLEST_MS
from fabric.messages import (
    AnyMessage,
    Arrivals,
    ChangedSlice,
    DesiredSlices,
    Directory,
    Done,
    DrainAsked,
    Dropped,
    FrontendHello,
    GpuInfo,
    GpuRef,
    Grant,
    KeptSlice,
    LeftOut,
    ModelsAdd,
    ModelSet,
    ModelSpec,
    ModelsRemove,
    MoveInfo,
    NewSlice,
    NodeHello,
    PlanAsked,
    PlanMade,
    PreemptBatch,
    RehearsalAsked,
    ReplicaHint,
    ReplicaInfo,
    Returned,
    RunBatch,
    SeqRun,
    SliceChanged,
    SliceReady,
    SliceSpec,
    SliceStatus,
    StatusAsked,
    Telemetry,
    Withdraw,
)
from roles.config.cluster import PolicyChoice
from roles.runtime.core import PLANNER, REHEARSER, Heard, Lost, Send, Tick
from roles.runtime.journal import packed, unpacked
from roles.scheduler.build import scheduler_core
from roles.scheduler.dispatch.withdrawals import AT_ONCE_MAX
from roles.scheduler.planning.desired_state import ControllerSettings, Desired
from roles.scheduler.rehearsing.make_rehearsal import make_rehearsal
from roles.scheduler.settings import SchedulerSettings

OPERATOR = PeerId("operator/1")
UNLISTED = PeerId("unlisted/1")
"""A frontend that never says hello."""
STALE = PeerId("worker-n-0/0")
"""A worker of which only news of batches long gone is heard."""
NODES = (NodeId("n"), NodeId("m"))
GPUS = (GpuRef(NODES[0], 0), GpuRef(NODES[0], 1), GpuRef(NODES[1], 0))
PIPELINE = GPUS[2]
"""The first of two GPUs; every stage takes so much of the whole:"""
STAGE_SHARE = 0.6
TURNS_MAX = 2_000  # of a core at one moment

# l(b) of every shape a configuration admits. Measured times never fall either (`executors/hosted.py`).
SHAPES: Mapping[str, tuple[float, ...]] = {
    "line": tuple(b + 5.0 for b in range(1, 9)),
    "no intercept": tuple(1.0 * b for b in range(1, 17)),
    "flat": (6.0,) * 16,
    "superadditive": (10.0, 20.0, 30.5, 41.0, 51.5, 62.0, 72.5, 83.0),
    "one size": (7.0,),
    "steps": (4.0, 4.0, 4.0, 30.0, 30.0, 31.0),
    "tiny": tuple(1e-300 * b for b in range(1, 9)),
    "huge": tuple(1e8 * b for b in range(1, 5)),
    "one huge": (1e9,),
    "tiny then huge": (1e-300, 1e9),
    "long": tuple(0.02 * b + 4.0 for b in range(1, 513)),
}
SLOS_MS = (0.5, 20.0, 60.0, 300.0, 3_600_000.0)
BUDGETS = (1.0, 1.0, 1.0, 0.5, 0.1, 0.0)  # of the SLO
WAITS_MS = (0.0, 0.0, 0.25, 2.0, 9.0, 60.0, 400.0)

RequestKey = tuple[PeerId, ModelId, int]
QUEUED, WITHDRAWN = "queued", "withdrawn"
ABOUT_TO_GO = "about to be withdrawn"
"""From a long queue, or from what waits for a slice to come: in a while, or never."""
WAITING = (QUEUED, ABOUT_TO_GO)


@dataclass
class Worker:
    """A slice's process as the scheduler was last told of it."""

    peer: PeerId
    incarnation: Incarnation
    tables: dict[ModelId, tuple[float, ...]]
    slower: float = 1.0
    is_silent: bool = False
    running: dict[BatchId, RunBatch] = field(default_factory=dict)


class Cluster:
    """`shapes`: l(b) of each model. `draws` decide the details of each step."""

    def __init__(
        self, batching: PolicyChoice, shapes: Mapping[ModelId, str], slo_ms: Sequence[float]
    ) -> None:
        self.now_ms = 0.0
        self.fates: dict[RequestKey, str] = {}
        self.batches = self.rehearsed = 0
        self.shapes = dict(shapes)
        self.dead_frontends: set[PeerId] = set()
        self.strangers: set[NodeId] = set()
        self.peers: set[PeerId] = set()
        self.frontends: dict[FrontendId, PeerId] = {}
        self.agents: dict[NodeId, PeerId] = {}
        self.workers: dict[SliceId, Worker] = {}
        self._replaced: set[PeerId] = set()
        self.wanted: dict[SliceId, tuple[NodeId, SliceSpec]] = {}
        self._slo_ms = dict(zip(shapes, slo_ms, strict=True))
        self._numbers = itertools.count(1)
        self._seqs: dict[tuple[PeerId, ModelId], int] = {}
        self._ends: list[tuple[float, int, SliceId, Incarnation, BatchId]] = []
        self._stale: deque[Done] = deque(maxlen=8)
        self._plans: deque[PlanAsked] = deque(maxlen=1)
        self._rehearsals: deque[RehearsalAsked] = deque(maxlen=1)
        self._under_way: deque[Send] = deque()
        self._is_delivering = False
        first, second, *_ = shapes
        hosted = ((first, second), (first,), (first, second))
        planned = [
            (gpu.node_id, self._spec(gpu, f"{gpu.node_id}/gpu{gpu.gpu}/0", models))
            for gpu, models in zip(GPUS, hosted, strict=True)
        ]
        served = (first, second)
        self.settings = SchedulerSettings(
            models=tuple(self._model(model_id) for model_id in served),
            slices=tuple(planned),
            priorities={second: 1},
            hints={(planned[0][1].slice_id, first): (4, 2.0)},
            guard_ms=0.25,
        )
        sections = tuple({"name": model_id, "slo_ms": self._slo_ms[model_id]} for model_id in served)
        hints = tuple(KeptSlice(spec.slice_id, _hints(spec)) for _, spec in planned)
        planning = ControllerSettings(Desired(sections, {}, "", GPUS), hints, is_rate_blind=False)
        self.core = scheduler_core(self.settings, batching, planning)

    # ------------------------------------------------------------ what is described

    def slo_ms(self, model_id: ModelId) -> float:
        return self._slo_ms[model_id]

    def _model(self, model_id: ModelId) -> ModelSpec:
        table = SHAPES[self.shapes[model_id]]
        return ModelSpec(model_id, self._slo_ms[model_id], len(table), None, table)

    def _spec(self, gpu: GpuRef, slice_id: str, models: Iterable[ModelId]) -> SliceSpec:
        share = 40.0 if gpu.gpu == 0 else None
        spec = SliceSpec(SliceId(slice_id), gpu.gpu, "emulated", share, tuple(map(self._model, models)))
        return replace(spec, share_percent=None, following=(1,)) if gpu == PIPELINE else spec

    # ------------------------------------------------------------ steps

    def frontend_comes(self, name: str) -> None:
        """It, or its next incarnation; of the former one nothing else is heard."""
        frontend_id = FrontendId(name)
        number = next(self._numbers)
        peer = PeerId(f"{name}/{number}")
        former = self.frontends.get(frontend_id)
        if former is not None:
            self._bury(former)
        self.frontends[frontend_id] = peer
        self.hear(peer, FrontendHello(frontend_id, Incarnation(str(number)), ()))

    def frontend_goes(self, name: str) -> None:
        peer = self.frontends.pop(FrontendId(name), None)
        if peer is not None:
            self._bury(peer)
            self.handle(Lost(peer, "silent"))

    def _bury(self, peer: PeerId) -> None:
        self.dead_frontends.add(peer)
        for key in [key for key in self.fates if key[0] == peer]:
            del self.fates[key]

    def agent_comes(self, node_id: NodeId, *, knows_slices: bool, is_outlived: bool = False) -> None:
        """Its next incarnation where it is there already."""
        number = next(self._numbers)
        peer = self.agents[node_id] = PeerId(f"node-{node_id}/{number}")
        alive = [
            (slice_id, one)
            for slice_id, one in self.workers.items()
            if knows_slices and slice_id in self.wanted and self.wanted[slice_id][0] == node_id
        ]
        if not knows_slices:
            for slice_id in [one for one, (at, _) in self.wanted.items() if at == node_id]:
                if (gone := self.workers.pop(slice_id, None)) is not None:
                    self._replaced.add(gone.peer)
        slices = tuple(SliceStatus(slice_id, one.incarnation, "ready") for slice_id, one in alive)
        gpus = (GpuInfo(0, "generic", "emulated"), GpuInfo(1, "generic", "emulated"))
        self.hear(peer, NodeHello(node_id, Incarnation(str(number)), gpus, slices, is_outlived))

    def stranger_comes_and_goes(self) -> None:
        """A node that nobody planned with."""
        node_id = NodeId(f"stranger-{next(self._numbers)}")
        peer = PeerId(f"node-{node_id}/1")
        self.strangers.add(node_id)
        self.hear(peer, NodeHello(node_id, Incarnation("1"), (GpuInfo(0, "generic", "emulated"),), ()))
        self.hear(peer, Telemetry(node_id, (), ()))
        self.handle(Lost(peer, "silent"))

    def agent_goes(self, node_id: NodeId) -> None:
        peer = self.agents.pop(node_id, None)
        if peer is not None:
            self.handle(Lost(peer, "silent"))

    def slice_comes(self, slice_id: SliceId, scale: float = 1.0) -> None:
        """Its process is warm; another one where one was. A worker process may host two slices."""
        node_id, spec = self.wanted[slice_id]
        worker = self.workers.get(slice_id)
        peer, incarnation = self._process(node_id)
        while worker is not None and worker.peer == peer:
            peer, incarnation = self._process(node_id)
        tables = {
            one.model_id: tuple(min(1e9, ms * scale) for ms in SHAPES[self.shapes[one.model_id]])
            for one in spec.models
        }
        if worker is not None:
            self._replaced.add(worker.peer)
        self.workers[slice_id] = Worker(peer, incarnation, tables)
        self._announce(slice_id)

    def _process(self, node_id: NodeId) -> tuple[PeerId, Incarnation]:
        """A worker process; now and then that of the slice before."""
        number = next(self._numbers) // 2
        return PeerId(f"worker-{node_id}-{number}/{number}"), Incarnation(str(number))

    def slice_shrinks(self, slice_id: SliceId, share: float) -> None:
        """Its batches are smaller from now on, or as large as they were again."""
        worker = self.workers.get(slice_id)
        if worker is None or slice_id not in self.wanted:
            return
        for model_id in worker.tables:
            table = SHAPES[self.shapes[model_id]]
            worker.tables[model_id] = table[: max(1, int(share * len(table)))]
        self._announce(slice_id)

    def _announce(self, slice_id: SliceId, broken: Sequence[ModelId] = ()) -> None:
        node_id, spec = self.wanted[slice_id]
        worker = self.workers[slice_id]
        replicas = tuple(
            ReplicaInfo(one, len(table), table, interval_ms=_intervals(spec, table))
            for one, table in worker.tables.items()
        )
        left_out = tuple(LeftOut(slice_id, one, "no") for one in broken if one not in worker.tables)
        ready = SliceReady(slice_id, worker.incarnation, node_id, spec.gpu, ("ipc:///w",), replicas, left_out)
        self.hear(worker.peer, ready)

    def slice_goes(self, slice_id: SliceId, state: str) -> None:
        """Its agent says so; where there is none, its process is only heard no more."""
        worker = self.workers.get(slice_id)
        if worker is None or slice_id not in self.wanted:
            return
        node_id, _ = self.wanted[slice_id]
        agent = self.agents.get(node_id)
        if agent is None:
            self.worker_goes(slice_id)
            return
        del self.workers[slice_id]
        self.hear(agent, SliceChanged(node_id, SliceStatus(slice_id, worker.incarnation, state, "it ended")))

    def worker_goes(self, slice_id: SliceId) -> None:
        worker = self.workers.get(slice_id)
        if worker is not None:
            for other in [one for one, known in self.workers.items() if known.peer == worker.peer]:
                del self.workers[other]
            self.handle(Lost(worker.peer, "silent"))

    def arrive(
        self,
        peer: PeerId,
        model_id: ModelId,
        count: int,
        budget_ms: float,
        span_ms: float,
        ready_in_ms: float,
    ) -> None:
        first_seq = self._seqs.get((peer, model_id), 0)
        self._seqs[peer, model_id] = first_seq + count
        if peer in self.frontends.values():
            self.fates.update({(peer, model_id, seq): QUEUED for seq in range(first_seq, first_seq + count)})
        self.hear(peer, Arrivals(model_id, first_seq, count, budget_ms, span_ms, ready_in_ms, budget_ms / 10))

    def withdraw(self, peer: PeerId, model_id: ModelId, back: int, count: int) -> None:
        first_seq = max(0, self._seqs.get((peer, model_id), 0) - back)
        batches = self.core._batches
        is_soon = model_id in batches.withdrawals._gathered or self._queued(model_id) > AT_ONCE_MAX
        for seq in range(first_seq, first_seq + count):
            if self.fates.get((peer, model_id, seq)) == QUEUED:
                self.fates[peer, model_id, seq] = ABOUT_TO_GO if is_soon else WITHDRAWN
        self.hear(peer, Withdraw(model_id, (SeqRun(first_seq, count),)))

    def change(self, change: ModelsAdd | ModelsRemove | ModelSet | DrainAsked) -> None:
        """An operator's wish; a planner that answers does so in a step of its own."""
        if isinstance(change, ModelSet) and change.slo_ms is not None:
            self._slo_ms[change.model_id] = change.slo_ms
        self.hear(OPERATOR, change)

    def plan(self, draw: random.Random) -> None:
        """The planner answers: some slices end, others begin."""
        if not self._plans:
            return
        asked = self._plans.popleft()
        if draw.random() < 0.15:
            self.hear(PLANNER, PlanMade(asked.number, "no plan fits"))
            return
        models = [ModelId(section["name"]) for section in json.loads(asked.document)["models"]]
        current = [one.slice_id for one in asked.current]
        moves: list[MoveInfo] = []
        changed: set[SliceId] = set()
        for wave in range(draw.randint(0, 2)):
            ends = tuple(draw.sample(current, min(len(current), draw.randint(0, 1))))
            current = [one for one in current if one not in ends]
            gpu = draw.choice(GPUS)
            hosted = draw.sample(models, draw.randint(1, len(models))) if models else []
            spec = self._spec(gpu, "new", hosted)
            after = ends if draw.random() < 0.3 else ()
            starts = (
                (NewSlice(gpu.node_id, spec, _hints(spec), after),) if hosted and draw.random() < 0.8 else ()
            )
            staying = [one for one in current if one in self.wanted and one not in changed]
            changes = tuple(
                self._changed(one, models, draw) for one in staying if models and draw.random() < 0.4
            )
            changed |= {one.slice_id for one in changes}
            moves.append(MoveInfo(wave, starts, ends, changes))
        self.hear(
            PLANNER,
            PlanMade(
                asked.number,
                "",
                tuple(map(self._model, models)),
                (0.0,) * len(models),
                tuple(
                    KeptSlice(
                        one,
                        tuple(ReplicaHint(m.model_id, draw.choice((None, 2, 40)), 1.0) for m in spec.models),
                    )
                    for one, (_, spec) in self.wanted.items()
                    if one in current and one not in changed
                ),
                tuple(moves),
                rates_rps=asked.rates_rps,
            ),
        )

    def _changed(self, slice_id: SliceId, models: Sequence[ModelId], draw: random.Random) -> ChangedSlice:
        """That slice should serve on with other models."""
        node_id, spec = self.wanted[slice_id]
        hosted = draw.sample(models, draw.randint(1, len(models)))
        later = self._spec(GpuRef(node_id, spec.gpu), slice_id, hosted)
        return ChangedSlice(slice_id, later.models, _hints(later))

    def slice_adapts(self, slice_id: SliceId, draw: random.Random) -> None:
        """Its worker has loaded what was missing, or some of it, cannot load one, or has let go what nobody wants."""
        worker = self.workers.get(slice_id)
        if worker is None or slice_id not in self.wanted:
            return
        names = {model.model_id for model in self.wanted[slice_id][1].models}
        if draw.random() < 0.7:
            running = {batch.model_id for batch in worker.running.values()}
            worker.tables = {
                one: table for one, table in worker.tables.items() if one in names or one in running
            }
        missing = sorted(names - worker.tables.keys())
        for model_id in draw.sample(missing, draw.randint(0, len(missing))):
            worker.tables[model_id] = tuple(min(1e9, ms) for ms in SHAPES[self.shapes[model_id]])
        self._announce(slice_id, tuple(one for one in missing if draw.random() < 0.1))

    def end(self, slice_id: SliceId, status: str) -> None:
        """A batch ends before its time, or otherwise than well."""
        worker = self.workers.get(slice_id)
        if worker is not None and worker.running:
            self._end(worker, next(iter(worker.running)), status)

    def say_stale(self) -> None:
        """What a worker said of a batch that was given up comes late."""
        if self._stale:
            self.hear(STALE, self._stale.popleft())

    def ask_status(self) -> None:
        self.hear(OPERATOR, StatusAsked())

    # ------------------------------------------------------------ time

    def wait(self, wait_ms: float) -> None:
        """Let time pass: batches end when they should, the core ticks when it wants."""
        until_ms = self.now_ms + wait_ms
        turns = 0
        while self._rehearsals:
            self.hear(REHEARSER, make_rehearsal(self._rehearsals.popleft()))
            self.rehearsed += 1
        while True:
            wake_at_ms = self.core.wake_at_ms
            wake_at_ms = float("inf") if wake_at_ms is None else wake_at_ms
            end_at_ms = self._ends[0][0] if self._ends else float("inf")
            next_ms = min(wake_at_ms, end_at_ms)
            if next_ms > until_ms:
                break
            turns = turns + 1 if next_ms <= self.now_ms else 0
            assert turns < TURNS_MAX, f"the core turns on the spot at {self.now_ms}"
            self.now_ms = max(self.now_ms, next_ms)
            if end_at_ms <= wake_at_ms:
                _, _, slice_id, incarnation, batch_id = heappop(self._ends)
                worker = self.workers.get(slice_id)
                if worker is not None and worker.incarnation == incarnation and not worker.is_silent:
                    self._end(worker, batch_id, "ok")
            else:
                self.handle(Tick())
        self.now_ms = until_ms

    def _end(self, worker: Worker, batch_id: BatchId, status: str) -> None:
        batch = worker.running.pop(batch_id, None)
        if batch is None:
            return
        count = sum(run.count for part in batch.parts for run in part.runs)
        ran = count if status == "ok" else 0
        exec_ms = (
            min(1e9, SHAPES[self.shapes[batch.model_id]][max(0, ran - 1)] * worker.slower) if ran else 0.0
        )
        missing = batch.parts if status == "expired" else ()
        if status != "expired":
            self._settle(batch, "ran" if ran else "failed")
        self.hear(
            worker.peer,
            Done(batch_id, batch.slice_id, batch.model_id, status, ran, missing, 1.0, 0.25, exec_ms),
        )

    # ------------------------------------------------------------ what the core says

    def hear(self, peer: PeerId, message: AnyMessage, late_ms: float = 0.0) -> None:
        self.peers.add(peer)
        self.handle(Heard(peer, message, late_ms))

    def handle(self, event: Heard | Lost | Tick) -> None:
        self.deliver(self.core.handle(event, self.now_ms))
        slices = self.core._fleet.slices.values()
        assert all(len(record.flights) <= record.batches_max for record in slices), "one runs, one waits"

    def deliver(self, actions: Sequence[Send]) -> None:
        self._under_way.extend(actions)
        if self._is_delivering:
            return
        self._is_delivering = True
        try:
            while self._under_way:
                self._take(self._under_way.popleft())
        finally:
            self._is_delivering = False

    def _take(self, send: Send) -> None:
        peer, message = send.peer, send.message
        assert peer not in self.dead_frontends or isinstance(message, Directory), f"{message} for the dead"
        assert unpacked(packed(message)) is not None, "what it says can be sent"
        match message:
            case PlanAsked():
                self._plans.append(message)
            case RehearsalAsked():
                assert not self._rehearsals, "one at a time"
                self._rehearsals.append(message)
            case DesiredSlices():
                self._want(peer, message)
            case RunBatch():
                self._run(peer, message)
            case PreemptBatch():
                self._preempt(message)
            case Grant():
                for key in _keys(peer, message.model_id, message.runs):
                    assert self.fates[key] in WAITING, f"{key} was {self.fates[key]} already"
                    self.fates[key] = _granted(message.batch_id)
            case Dropped():
                for key in _keys(peer, message.model_id, message.runs):
                    if peer in self.frontends.values():
                        assert self.fates[key] in WAITING, f"{key} was {self.fates[key]} already"
                        self.fates[key] = "dropped"
            case Returned():
                for key in _keys(peer, message.model_id, message.runs):
                    assert self.fates[key] == _granted(message.batch_id), f"{key} was {self.fates[key]}"
                    self.fates[key] = "returned"

    def _want(self, peer: PeerId, want: DesiredSlices) -> None:
        node_id = next((one for one, known in self.agents.items() if known == peer), None)
        if node_id is None:
            return
        self.wanted = {one: known for one, known in self.wanted.items() if known[0] != node_id}
        self.wanted |= {spec.slice_id: (node_id, spec) for spec in want.slices}
        for slice_id in self.workers.keys() - self.wanted.keys():
            del self.workers[slice_id]

    def _run(self, peer: PeerId, batch: RunBatch) -> None:
        worker = self.workers.get(batch.slice_id)
        if worker is None or worker.incarnation != batch.incarnation:
            return  # gone, and the scheduler has not heard of it
        assert peer == worker.peer
        self.batches += 1
        size = sum(run.count for part in batch.parts for run in part.runs)
        table = worker.tables[batch.model_id]
        assert 1 <= size <= len(table)
        worker.running[batch.batch_id] = batch
        end_at_ms = self.now_ms + batch.start_in_ms + table[size - 1] * worker.slower
        heappush(
            self._ends,
            (end_at_ms, next(self._numbers), batch.slice_id, batch.incarnation, batch.batch_id),
        )

    def _preempt(self, preempt: PreemptBatch) -> None:
        worker = self.workers.get(preempt.slice_id)
        batch = worker.running.pop(preempt.batch_id, None) if worker is not None else None
        for key, fate in self.fates.items():
            if fate == _granted(preempt.batch_id):
                self.fates[key] = QUEUED
        if batch is not None:
            done = Done(batch.batch_id, batch.slice_id, batch.model_id, "preempted", 0, (), 0.0, 0.0, 0.0)
            self._stale.append(done)

    def _settle(self, batch: RunBatch, fate: str) -> None:
        for key, known in self.fates.items():
            if known == _granted(batch.batch_id):
                self.fates[key] = fate

    # ------------------------------------------------------------ the end

    def _queued(self, model_id: ModelId) -> int:
        """For a slice, or for one that is on its way."""
        return self.core._discipline.queued(model_id) + self.core._batches.unserved.count(model_id)

    def finish(self) -> None:
        """All go, and of those who are gone nothing is left."""
        self.wait(2_500.0)
        for key, fate in self.fates.items():
            assert fate != QUEUED or self._queued(key[1]), f"{key} is lost"
        waiting = sum(1 for fate in self.fates.values() if fate == QUEUED)
        assert sum(map(self._queued, self.shapes)) >= waiting
        for name in list(self.frontends):
            self.frontend_goes(name)
        self._bury(UNLISTED)
        self.handle(Lost(UNLISTED, "silent"))
        assert not any(map(self._queued, self.shapes)), "requests of the dead wait"
        for slice_id in list(self.workers):
            self.worker_goes(slice_id)
        for node_id in list(self.agents):
            self.agent_goes(node_id)
        for peer in (STALE, *sorted(self._replaced)):
            self.handle(Lost(peer, "silent"))  # who speaks has a connection, whatever it says
        batches = self.core._batches
        assert not batches.flights
        assert not any(record.flights for record in self.core._fleet.slices.values())
        self.wait(2_500.0)
        names = texts_within(self.core)
        assert not names & self.peers - {OPERATOR, PLANNER, REHEARSER}
        assert not names & self.strangers
        offences = {
            reason: n for reason, n in self.core.offences.counters.items() if reason.startswith("offences_")
        }
        assert offences.pop("offences_not_owner", 0) == len(self.strangers)
        assert offences.keys() <= {"offences_other_plan"}, "they say what real ones say"


def _hints(spec: SliceSpec) -> tuple[ReplicaHint, ...]:
    return tuple(ReplicaHint(one.model_id, 4, 1.0, 10.0, 20.0) for one in spec.models)


def _intervals(spec: SliceSpec, table: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(max(SMALLEST_MS, STAGE_SHARE * ms) for ms in table) if spec.following else ()


def _granted(batch_id: BatchId) -> str:
    return f"granted in {batch_id}"


def _keys(peer: PeerId, model_id: ModelId, runs: Iterable[SeqRun]) -> list[RequestKey]:
    return [(peer, model_id, seq) for run in runs for seq in range(run.first_seq, run.first_seq + run.count)]


def texts_within(root: object) -> set[Any]:
    """Every text that an object holds on to, however deep."""
    return set(objects_within(root, lambda one: isinstance(one, str)))


def objects_within(root: object, is_wanted: Callable[[object], bool]) -> list[Any]:
    """All objects of a kind that an object holds on to; classes, functions and modules are not looked into."""
    seen: set[int] = set()
    found: list[Any] = []
    pending: list[object] = [root]
    while pending:
        one = pending.pop()
        if (
            id(one) in seen
            or isinstance(one, type)
            or type(one).__name__ in {"module", "builtin_function_or_method"}
        ):
            continue
        seen.add(id(one))
        if is_wanted(one):
            found.append(one)
        if type(one).__name__ == "function":
            pending.extend(one.__closure__ or ())  # type: ignore[attr-defined]
        else:
            pending.extend(gc.get_referents(one))
            if isinstance(one, dict):
                pending.extend(one)  # keys that are text are not among them
    return found
