"""A worker with a pipeline of three GPUs, all of its cores, on devices and between sockets that do things in any order."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final, TypeVar

import numpy as np
from msgspec.structs import replace

from fabric.ids import BatchId, ModelId, NodeId, SliceId
from fabric.limits import check
from fabric.link import NamedTensor
from fabric.messages import (
    Activations,
    AnyMessage,
    BatchFailed,
    Done,
    LeftOut,
    LoadStage,
    ModelSpec,
    Outputs,
    ReplicaInfo,
    SliceReady,
    SliceSpec,
    UnloadStage,
)
from roles.gpu_worker.events import (
    BatchRan,
    End,
    Execute,
    LoadModel,
    LoadSlice,
    PushOutputs,
    Recall,
    Release,
    SchedulerAnswers,
    UnloadModel,
    UnloadSlice,
    WorkerEvent,
)
from roles.gpu_worker.executors.base import (
    ExecutorEvent,
    Job,
    JobPart,
    JobRan,
    ModelLoaded,
    Part,
    RunAborted,
    RunFailed,
    Shrunk,
    loaded,
)
from roles.gpu_worker.slices import HostedState
from roles.gpu_worker.stages.core import (
    ActivationsCame,
    ForgetModel,
    LoadPart,
    PassOn,
    ReleaseInputs,
    RunStage,
    StageAsked,
    StageCore,
    StageEvent,
    TellWorker,
)
from roles.gpu_worker.stages.executor import PipelineExecutor
from roles.gpu_worker.stages.later_stages import StageGone, StageSaid
from roles.runtime.core import SCHEDULER, Handle, Send, Tick
from roles.scheduler.fleet import SliceRecord
from roles.scheduler.peer_checks import _check_replicas
from tests.worker_builders import SLICE, host, inputs, model_spec, part, run_batch, slice_spec, worker_core

NAMES: Final = "abcd"
LARGEST: Final = 8
STAGES: Final = 3
OUTPUTS: Final = (NamedTensor("x", np.zeros((1, 2), np.float32)),)
TAKES_MS: Final = 2.0
TURNS_MAX: Final = 20_000

EventT = TypeVar("EventT")


@dataclass
class Device:
    """A GPU's thread as `ThreadExecutor` has it: one thing after the other, and loads beside them."""

    draws: random.Random
    parts: dict[tuple[SliceId, ModelId], Part] | None = None
    """Of the first stage: where it writes down how it has cut a model."""
    work: deque[SliceSpec | Job | ModelId | None] = field(default_factory=deque)
    """A slice to load, a batch to run, a model to forget, or, None, all of them."""
    beside: dict[int, SliceSpec] = field(default_factory=dict)
    given_up: set[int] = field(default_factory=set)
    models: dict[ModelId, int] = field(default_factory=dict)
    """What is there, with its largest batch."""
    events: deque[ExecutorEvent] = field(default_factory=deque)
    now_ms: float = 0.0

    @property
    def is_idle(self) -> bool:
        return not (self.work or self.beside or self.events)

    def forget(self, model_id: ModelId) -> None:
        self.give_up(model_id)
        self.work.append(model_id)

    def give_up(self, model_id: ModelId | None = None) -> None:
        of = (number for number, spec in self.beside.items() if model_id in (None, spec.models[0].model_id))
        self.given_up.update(of)

    def go_on(self) -> None:
        if self.beside and (not self.work or self.draws.random() < 0.4):
            self._load_beside(self.draws.choice(sorted(self.beside)))
        elif self.work:
            self._do(self.work.popleft())

    def _load_beside(self, number: int) -> None:
        (model,) = self.beside[number].models
        is_forgotten_first = model.model_id in self.work
        if number in self.given_up:
            del self.beside[number]
            # Its last step may have begun before it was given up; what it has loaded is forgotten after that.
            is_alone = not any(one.models[0].model_id == model.model_id for one in self.beside.values())
            if not (is_forgotten_first and is_alone and self.draws.random() < 0.5):
                return
        elif is_forgotten_first:
            return  # in line behind that
        else:
            del self.beside[number]
        if self.draws.random() < 0.15:
            self.events.append(ModelLoaded(SLICE, number, None, "no file"))
        else:
            self.events.append(ModelLoaded(SLICE, number, self._load(model)))

    def _do(self, work: SliceSpec | Job | ModelId | None) -> None:
        match work:
            case SliceSpec():
                left_out = [
                    LeftOut(SLICE, one.model_id, "no file")
                    for one in work.models
                    if self.draws.random() < 0.1
                ]
                names = {out.model_id for out in left_out}
                replicas = [self._load(one) for one in work.models if one.model_id not in names]
                self.events.append(loaded(work, replicas, left_out))
            case Job():
                self._run(work)
            case None:
                self.models.clear()
            case model_id:
                self.models.pop(model_id, None)

    def _load(self, model: ModelSpec) -> ReplicaInfo:
        size = self.models[model.model_id] = min(
            model.batch_size_max, self.draws.choice((LARGEST, LARGEST, 5))
        )
        if self.parts is not None:
            self.parts[SLICE, model.model_id] = Part(0, (1, 2), "digest")
        return ReplicaInfo(model.model_id, size, tuple(TAKES_MS + b for b in range(size)))

    def _run(self, job: Job) -> None:
        before = self.models[job.model_id]  # raises where it was asked to run what it has not
        fate = self.draws.random()
        if fate < 0.75:
            self.events.append(JobRan(SLICE, job.batch_id, OUTPUTS, (), TAKES_MS, self.now_ms))
            return
        if fate > 0.9:
            rows = sum(one.count for one in job.parts) or self.draws.randint(1, LARGEST)
            after = self.models[job.model_id] = min(before, max(1, min(before, rows) // 2))
            if after < before:
                self.events.append(Shrunk(SLICE, job.model_id, after))
        self.events.append(RunFailed(SLICE, job.batch_id, "it raised"))


@dataclass
class FirstStage:
    """The device of the worker itself, as an executor."""

    device: Device

    def load(self, spec: SliceSpec) -> None:
        self.device.work.append(spec)

    def unload(self, slice_id: SliceId) -> None:
        self.device.give_up()
        self.device.work.append(None)

    def load_model(self, spec: SliceSpec, number: int) -> None:
        self.device.beside[number] = spec

    def unload_model(self, slice_id: SliceId, model_id: ModelId) -> None:
        self.device.forget(model_id)

    def run(self, job: Job, now_ms: float) -> None:
        self.device.work.append(job)

    def recall(self, slice_id: SliceId, batch_id: BatchId, now_ms: float) -> None:
        for work in self.device.work:
            if isinstance(work, Job) and work.batch_id == batch_id:
                self.device.work.remove(work)
                self.device.events.append(RunAborted(slice_id, batch_id))
                return

    def abort(self, slice_id: SliceId, batch_id: BatchId, now_ms: float) -> None:
        raise AssertionError("what has begun goes through")

    def close(self) -> None:
        """Nothing."""

    def fileno(self) -> int:
        return -1

    @property
    def has_more(self) -> bool:
        return bool(self.device.events)

    @property
    def wake_at_ms(self) -> float | None:
        return None

    def take(self, limit: int, now_ms: float) -> Sequence[ExecutorEvent]:
        return _some(self.device.events, self.device.draws)


class Stage:
    """The process of a later stage: its core, its device, and its socket."""

    def __init__(self, number: int, draws: random.Random) -> None:
        self.core = StageCore(number)
        self.device = Device(draws)
        self.came: deque[AnyMessage] = deque()
        self.passed_on: deque[Activations] = deque()
        self.told: deque[AnyMessage] = deque()
        self.kept: set[Handle] = set()
        self._handles = count(1)

    @property
    def is_idle(self) -> bool:
        return self.device.is_idle and not self.came

    def hear(self, now_ms: float) -> None:
        match self.came.popleft() if self.came else None:
            case Activations() as message:
                self._feed(ActivationsCame(message, self._keep()), now_ms)
            case LoadStage() | UnloadStage() as message:
                self._feed(StageAsked(message), now_ms)
            case _:
                pass

    def go_on(self, now_ms: float) -> None:
        self.device.go_on()
        if self.device.events:
            event = self.device.events.popleft()
            if isinstance(event, JobRan):
                self._feed(BatchRan(SLICE, event.batch_id, self._keep(), (), event.exec_ms, 0.0), now_ms)
            else:
                self._feed(event, now_ms)

    def _keep(self) -> Handle:
        handle = Handle(next(self._handles))
        self.kept.add(handle)
        return handle

    def _feed(self, event: StageEvent, now_ms: float) -> None:
        for action in self.core.handle(event, now_ms):
            match action:
                case LoadPart(message, is_beside) if is_beside:
                    self.device.beside[message.number] = message.spec
                case LoadPart(message):
                    self.device.work.append(message.spec)
                case ForgetModel(_, model_id):
                    self.device.forget(model_id)
                case RunStage(message, payload):
                    assert payload in self.kept
                    self.device.work.append(Job(SLICE, message.batch_id, message.model_id, ()))
                case PassOn(message, payload):
                    check(message)
                    self.kept.remove(payload)
                    self.passed_on.append(message)
                case TellWorker(told):
                    check(told)
                    self.told.append(told)
                case ReleaseInputs(payload):
                    self.kept.remove(payload)
                case _:
                    raise AssertionError(f"not expected: {action}")


@dataclass
class LaterStages:
    """Their processes, as the worker's executor has them."""

    draws: random.Random
    stages: list[Stage] = field(default_factory=list)
    said: deque[StageSaid | StageGone] = field(default_factory=deque)

    def start(self, stages: int, *, is_gang: bool = False) -> None:
        assert stages == STAGES
        self.stages = [Stage(number, self.draws) for number in range(1, stages)]

    def send(self, stage: int, message: AnyMessage, tensors: Sequence[NamedTensor] = ()) -> bool:
        check(message)
        self.stages[stage - 1].came.append(message)
        return True

    def stop(self) -> None:
        self.stages = []
        self.said.clear()

    def filenos(self) -> Sequence[int]:
        return ()

    @property
    def has_more(self) -> bool:
        return bool(self.said)

    def take(self, limit: int, now_ms: float) -> Sequence[StageSaid | StageGone]:
        return _some(self.said, self.draws)

    def deliver(self) -> None:
        """What stages have given goes on, each stage's in order."""
        for place, stage in enumerate(self.stages):
            while stage.told:
                self.said.append(StageSaid(stage.told.popleft()))
            while stage.passed_on:
                message = stage.passed_on.popleft()
                if place + 1 < len(self.stages):
                    self.stages[place + 1].came.append(message)
                else:
                    self.said.append(StageSaid(message, OUTPUTS))


class PipelineWorker:
    """The worker, and all that it is told; it says when something is told or done twice, or never."""

    def __init__(self, draws: random.Random) -> None:
        self.draws = draws
        self.now_ms = 0.0
        self.core = worker_core()
        self.parts: dict[tuple[SliceId, ModelId], Part] = {}
        self.first = Device(draws, self.parts)
        self.later = LaterStages(draws)
        self.executor = PipelineExecutor(FirstStage(self.first), self.later, self.parts, lambda: self.now_ms)
        self.batches = 0
        self.dones: Counter[BatchId] = Counter()
        self.live: set[tuple[BatchId, int]] = set()
        self.fates: Counter[tuple[BatchId, int]] = Counter()
        self.kept: set[Handle] = set()
        self.wanted = self._spec("ab", 200.0)
        self._handles = count(1_000_000)
        self.feed(Tick())
        self.feed(host(self.wanted))
        self.feed(SchedulerAnswers())

    def _spec(self, names: Sequence[str], slo_ms: float) -> SliceSpec:
        models = [model_spec(name, exec_ms=[TAKES_MS] * LARGEST, slo_ms=slo_ms) for name in names]
        return replace(slice_spec(models=models, device="cpu"), following=tuple(range(1, STAGES)))

    # ------------------------------------------------------------ what happens

    def step(self) -> None:
        what = self.draws.random()
        if what < 0.35:
            self.take()
        elif what < 0.45:
            self.first.go_on()
        elif what < 0.8 and self.later.stages:
            stage = self.draws.choice(self.later.stages)
            self.draws.choice((stage.hear, stage.go_on))(self.now_ms)
            self.later.deliver()
        elif what < 0.88:
            self.grant()
        elif what < 0.9:
            others = self.draws.sample(NAMES[1:], self.draws.randint(1, 3))
            self.wanted = self._spec(
                ["a"] * (self.draws.random() < 0.9) + others, self.draws.choice((200.0, 300.0))
            )
            self.feed(host(self.wanted))
        else:
            self.wait(self.draws.choice((0.1, 1.0, 5.0)))

    def grant(self) -> None:
        self.batches += 1
        requests, name = self.draws.randint(1, 4), self.draws.choice(NAMES)
        latest_in_ms = self.draws.choice((20.0, 60.0, 1_000.0))
        has_inputs = self.draws.random() < 0.95
        if has_inputs:
            self.live.update((BatchId(self.batches), seq) for seq in range(requests))
        runs = part((0, requests))
        self.feed(run_batch(runs, batch_id=self.batches, model_id=name, latest_in_ms=latest_in_ms))
        if has_inputs:
            came = inputs(*range(requests), batch_id=self.batches, model_id=name)
            self.kept.add(came.payload)
            self.feed(came)

    def wait(self, wait_ms: float) -> None:
        self.now_ms += wait_ms
        self.first.now_ms = self.now_ms
        wake_at_ms = self.core.wake_at_ms
        if wake_at_ms is not None and wake_at_ms <= self.now_ms:
            self.feed(Tick())

    def take(self) -> None:
        for event in self.executor.take(9, self.now_ms):
            if isinstance(event, JobRan):
                outputs = Handle(next(self._handles))
                self.kept.add(outputs)
                times_ms = event.exec_ms, event.began_at_ms
                self.feed(BatchRan(SLICE, event.batch_id, outputs, event.rejected, *times_ms))
            else:
                self.feed(event)

    def feed(self, event: WorkerEvent) -> None:
        for action in self.core.handle(event, self.now_ms):
            match action:
                case LoadSlice(spec):
                    self.executor.load(spec)
                case UnloadSlice(slice_id):
                    self.executor.unload(slice_id)
                case LoadModel(spec, number):
                    self.executor.load_model(spec, number)
                case UnloadModel(slice_id, model_id):
                    self.executor.unload_model(slice_id, model_id)
                case Execute(run, parts, expires_at_ms):
                    job = [JobPart(len(one.live_seqs), ()) for one in parts]
                    self.executor.run(Job(SLICE, run.batch_id, run.model_id, job, expires_at_ms), self.now_ms)
                case Recall(slice_id, batch_id):
                    self.executor.recall(slice_id, batch_id, self.now_ms)
                case Release(payloads):
                    for payload in payloads:
                        self.kept.remove(payload)
                case PushOutputs(message=Outputs() | BatchFailed() as message):
                    self.fates.update((message.batch_id, seq) for seq in message.seqs)
                case Send(peer, Done() as done):
                    check(done)
                    self._note(done)
                case Send(peer, SliceReady() as ready) if peer == SCHEDULER:
                    check(ready)
                    _check_replicas(ready.replicas, SliceRecord(self.wanted, NodeId("node-0"), 0))
                case End():
                    raise AssertionError(f"the slice serves on: {action}")
                case _:
                    pass

    def _note(self, done: Done) -> None:
        self.dones[done.batch_id] += 1
        missing = (run for one in done.missing for run in one.runs)
        seqs = (seq for run in missing for seq in range(run.first_seq, run.first_seq + run.count))
        self.fates.update(one for seq in seqs if (one := (done.batch_id, seq)) in self.live)

    # ------------------------------------------------------------ the end

    @property
    def _are_devices_at_rest(self) -> bool:
        return self.first.is_idle and not self.later.said and all(one.is_idle for one in self.later.stages)

    @property
    def _is_at_rest(self) -> bool:
        queues = (slice_.queue for slice_ in self.core._slices.values())
        return self._are_devices_at_rest and not any(map(len, queues))

    def finish(self) -> None:
        """All that was begun comes to its end."""
        for _ in range(TURNS_MAX):
            self.take()
            self.first.go_on()
            for stage in self.later.stages:
                stage.go_on(self.now_ms)
                stage.hear(self.now_ms)
            self.later.deliver()
            if self._are_devices_at_rest:
                self.wait(5.0)
                if self._is_at_rest:
                    break
        assert self._is_at_rest, "it never comes to rest"
        self.wait(1_000.0)
        assert self.dones == Counter(BatchId(number) for number in range(1, self.batches + 1))
        assert all(self.fates[one] == 1 for one in self.live)
        assert not self.kept, "every payload is released"
        assert not any(stage.kept for stage in self.later.stages)
        for slice_ in self.core._slices.values():
            assert slice_.state is not HostedState.LOADING
            assert slice_.side_load is None, "it loads for ever"
            if slice_.state is HostedState.READY:
                for device in (self.first, *(stage.device for stage in self.later.stages)):
                    assert device.models.keys() == slice_.replicas.keys()
                left_out = {out.model_id for out in slice_.left_out}
                wanted = {model.model_id for model in self.wanted.models}
                assert slice_.replicas.keys() | left_out == wanted


def _some(events: deque[EventT], draws: random.Random) -> list[EventT]:
    return [events.popleft() for _ in range(min(len(events), draws.randint(1, 4)))]
