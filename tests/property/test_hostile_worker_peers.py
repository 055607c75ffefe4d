"""Whatever anybody says to a worker, in whatever order: nothing raises, nothing is kept, every batch ends once."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Sequence
from itertools import count
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.ids import BatchId, FrontendId, Incarnation, ModelId, NodeId, SliceId
from fabric.messages import (
    Directory,
    Done,
    Host,
    Inputs,
    PreemptBatch,
    ReplicaInfo,
    RunBatch,
    SliceReady,
    SliceSpec,
    StatusAsked,
)
from roles.gpu_worker.early_inputs import PARTS_MAX
from roles.gpu_worker.events import (
    Abort,
    BatchRan,
    End,
    Execute,
    InputsCame,
    LoadModel,
    LoadSlice,
    PushOutputs,
    Recall,
    Release,
    SchedulerAnswers,
    UnloadModel,
    UnloadSlice,
    WorkerAction,
    WorkerEvent,
)
from roles.gpu_worker.executors.base import Loaded, LoadFailed, ModelLoaded, RunAborted, RunFailed, Shrunk
from roles.gpu_worker.peer_checks import A_FRONTEND, AGENT
from roles.runtime.core import SCHEDULER, Handle, Heard, Send, Tick
from tests.device_lines import DeviceLines
from tests.hostile import TYPES, Hostile, check_sendable
from tests.worker_builders import (
    BOOT,
    FRONTEND,
    MODEL,
    OTHER_FRONTEND,
    host,
    inputs,
    part,
    run_batch,
    slice_spec,
    worker_core,
    worker_directory,
)

SLICES = ("n/gpu0/0", "n/gpu0/1")
NAMES = {
    "SliceId": (*map(SliceId, SLICES), SliceId("n/gpu0/2")),
    "ModelId": (MODEL, ModelId("other")),
    "Incarnation": (BOOT, BOOT, BOOT, Incarnation("former")),
    "BatchId": tuple(map(BatchId, range(6))),
    "FrontendId": (FRONTEND, OTHER_FRONTEND, FrontendId("nobody")),
    "NodeId": (NodeId("node-0"),),
}
NOT_AN_END = tuple(one for one in TYPES if one.__name__ != "Stop")


class Anything:
    """A worker whose device works, and links by which anything comes."""

    def __init__(self, draws: random.Random, *, is_agent_sane: bool) -> None:
        self.core = worker_core()
        self.now_ms = 0.0
        self.kept: Counter[Handle] = Counter()
        self.granted: Counter[BatchId] = Counter()
        self.ended: Counter[BatchId] = Counter()
        self.rows = 0
        self.is_over = False
        self._is_agent_sane = is_agent_sane
        self._draws = draws
        self._hostile = Hostile(draws, NAMES)
        self._heap: list[tuple[float, int, WorkerEvent]] = []
        self._order, self._handles = count(), count(1_000_000)
        self._devices = DeviceLines(self._begin)
        self._models: dict[SliceId, set[ModelId]] = {}
        self._loaded: dict[SliceId, SliceSpec] = {}
        self._batches = count(10)
        self.right = [host(*map(slice_spec, SLICES)), worker_directory(*SLICES)]
        for event in (Tick(), self.right[0], SchedulerAnswers()):
            self.feed(event)
        self.wait(1.0)

    def step(self) -> None:
        draws, hostile = self._draws, self._hostile
        kind = draws.random()
        if kind < 0.2:
            self._right_batch()
        elif kind < 0.35:
            self.feed(Heard(SCHEDULER, hostile.message((*(RunBatch, PreemptBatch) * 20, Directory, *TYPES))))
        elif kind < 0.5:
            said = inputs(0, 1, batch_id=draws.randrange(6), slice_id=draws.choice(SLICES)).inputs
            came = draws.choice((hostile.message((Inputs,)), hostile.mutant(said)))
            self._came(InputsCame(came, Handle(next(self._handles)), draws.choice((0, 100))))
        elif kind < 0.55:
            self.feed(Heard(A_FRONTEND, hostile.message([one for one in TYPES if one is not Inputs])))
        elif kind < 0.65:
            types: Sequence[type] = (
                NOT_AN_END if not self._is_agent_sane else [t for t in NOT_AN_END if t is not Host]
            )
            self.feed(
                Heard(
                    AGENT, hostile.message((StatusAsked, *types, *([Host] * (not self._is_agent_sane) * 9)))
                )
            )
        elif kind < 0.7:
            self.feed(draws.choice(self.right))
        elif kind < 0.72 and (busy := [line for one in SLICES if (line := self._devices.of(SliceId(one)))]):
            run = draws.choice(busy)[0].run
            self.feed(Shrunk(run.slice_id, run.model_id, draws.choice((1, 2))))
        else:
            self.wait(draws.choice((0.1, 2.0, 30.0, 300.0)))

    def _right_batch(self) -> None:
        number, slice_id = next(self._batches), self._draws.choice(SLICES)
        granted = run_batch(part((0, 2)), batch_id=number, slice_id=slice_id, latest_in_ms=40.0)
        came = inputs(0, 1, batch_id=number, slice_id=slice_id)
        self.granted[BatchId(number)] += 1
        if self._draws.random() < 0.5:
            self.feed(granted)
            self._came(came)
        else:
            self._came(came)
            self.feed(granted)

    def _came(self, event: InputsCame) -> None:
        self.kept[event.payload] += 1
        self.feed(event)

    def wait(self, wait_ms: float) -> None:
        until_ms = self.now_ms + wait_ms
        while not self.is_over:
            wake_at_ms = self.core.wake_at_ms
            at_ms = self._heap[0][0] if self._heap else float("inf")
            if min(at_ms, float("inf") if wake_at_ms is None else wake_at_ms) > until_ms:
                break
            if wake_at_ms is not None and wake_at_ms <= at_ms:
                self.now_ms = max(self.now_ms, wake_at_ms)
                self.feed(Tick())
            else:
                self.now_ms = max(self.now_ms, at_ms)
                self._device(heapq.heappop(self._heap)[2])
        self.now_ms = until_ms

    def _device(self, event: WorkerEvent) -> None:
        if isinstance(event, BatchRan | RunFailed):
            line = self._devices.of(event.slice_id)
            if not line or line[0].run.batch_id != event.batch_id:
                return  # it was aborted
            for late in self._devices.end_first(event.slice_id, self.now_ms):
                self._plan(0.0, late)
            if isinstance(event, BatchRan):
                self.kept[event.outputs] += 1
        elif isinstance(event, Loaded | LoadFailed) and event.slice_id not in self._loaded:
            return
        self.feed(event)

    def feed(self, event: WorkerEvent) -> None:
        for action in self.core.handle(event, self.now_ms):
            check_sendable(action)
            self._do(action)

    def _do(self, action: WorkerAction) -> None:
        match action:
            case LoadSlice(spec):
                self._loaded[spec.slice_id] = spec
                self._models[spec.slice_id] = {m.model_id for m in spec.models}
                replicas = tuple(ReplicaInfo(m.model_id, 4, (6.0, 7.0, 8.0, 9.0)) for m in spec.models)
                self._plan(0.5, Loaded(spec.slice_id, replicas))
            case UnloadSlice(slice_id):
                assert not self._devices.of(slice_id)
                del self._loaded[slice_id]
            case LoadModel(spec, number):
                (model,) = spec.models
                replica = ReplicaInfo(model.model_id, 4, (6.0, 7.0, 8.0, 9.0))
                is_good = self._draws.random() < 0.7
                if is_good:
                    self._models[spec.slice_id].add(model.model_id)
                self._plan(5.0, ModelLoaded(spec.slice_id, number, replica if is_good else None, "no"))
            case UnloadModel(slice_id, model_id):
                assert model_id not in [one.run.model_id for one in self._devices.of(slice_id)]
                self._models[slice_id].discard(model_id)
            case Execute(run, parts):
                assert run.model_id in self._models[run.slice_id]
                assert run.slice_id in self._loaded
                assert all(self.kept[piece.payload] == 1 for piece in parts)
                self._devices.give(action, self.now_ms)
            case Recall(slice_id, batch_id):
                self._give_back(slice_id, batch_id)
            case Abort(slice_id, batch_id) if self._draws.random() < 0.5:
                line = self._devices.of(slice_id)
                if line and line[0].run.batch_id == batch_id:
                    self._plan(0.0, RunAborted(slice_id, batch_id))
                    for late in self._devices.end_first(slice_id, self.now_ms):
                        self._plan(0.0, late)
                else:
                    self._give_back(slice_id, batch_id)
            case Release(payloads):
                for payload in payloads:
                    assert self.kept[payload] == 1, "released once"
                    del self.kept[payload]
            case Send(_, Done(batch_id=batch_id)):
                self.ended[batch_id] += 1
            case PushOutputs(_, message):
                self.rows += len(message.seqs)
            case End():
                self.is_over = True
            case Send(_, SliceReady()) | _:
                pass

    def _begin(self, execute: Execute, now_ms: float) -> None:
        run, outputs = execute.run, Handle(next(self._handles))
        ends = BatchRan(run.slice_id, run.batch_id, outputs, (), 5.0, now_ms)
        fails = RunFailed(run.slice_id, run.batch_id, "no")
        self._plan(5.0, ends if self._draws.random() < 0.9 else fails)

    def _give_back(self, slice_id: SliceId, batch_id: BatchId) -> None:
        for given_back in self._devices.recall(slice_id, batch_id):
            self._plan(0.0, given_back)

    def _plan(self, in_ms: float, event: Any) -> None:
        heapq.heappush(self._heap, (self.now_ms + in_ms, next(self._order), event))


def play(seed: int, *, is_agent_sane: bool) -> Anything:
    run = Anything(random.Random(seed), is_agent_sane=is_agent_sane)
    for _ in range(200):
        run.step()
        assert len(run.core._early) <= PARTS_MAX
    return run


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 32))
def test_every_batch_ends_once_whatever_strangers_say(seed: int) -> None:
    run = play(seed, is_agent_sane=True)
    run.wait(1_000.0)  # what loads now introduces itself
    run.feed(run.right[1])  # it is listed, and has nothing to repeat
    run.wait(3e9)  # beyond every batch's end
    assert all(run.ended[batch_id] == 1 for batch_id in run.granted)
    assert run.rows
    assert not run.kept, "every payload is released"
    assert run.core.offences.counters["offences_wrong_type"]


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 32))
def test_whatever_the_agent_says_nothing_raises(seed: int) -> None:
    play(seed, is_agent_sane=False)
