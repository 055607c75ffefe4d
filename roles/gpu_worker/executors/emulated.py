"""An emulated device: a batch of b takes `exec_ms[b - 1]` and computes nothing.

Inputs are copied once all the same, as into any device's batch: what comes to a worker costs its host that.

Where its specification names an interference model, what the GPU's other slices in this process run at its start
slows a batch down, by the same model that the simulator uses.

A pipeline is emulated as the simulator plays it: a stage runs one batch at a time in the order in which they came, so all
moments of a batch are known when it starts.

No thread sleeps. A running batch is a moment in a heap, so one process emulates as many slices as its loop can
serve, and the driver's own sleep is the device. What waits behind a batch begins at that moment, even if the loop is late.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from fabric.errors import ProfileError
from fabric.ids import BatchId, ModelId, SliceId
from fabric.link import NamedTensor
from fabric.messages import LeftOut, ModelSpec, ReplicaInfo, SliceSpec, TensorInfo
from roles.gpu_worker.executors.base import (
    ExecutorEvent,
    Job,
    JobRan,
    LeftFirstStage,
    LoadFailed,
    ModelLoaded,
    RunAborted,
    RunFailed,
    loaded,
)
from roles.gpu_worker.executors.colocation import ColocatedSlices

OUTPUTS = (TensorInfo("output", "float32", (1,)),)


@dataclass(slots=True, order=True)
class _Running:
    finish_at_ms: float
    order: int  # ties: first started, first finished
    job: Job = field(compare=False)
    batch_size: int = field(compare=False)
    exec_ms: float = field(compare=False)
    began_at_ms: float = field(compare=False)
    stage: int = field(compare=False)
    """Whose end it is."""
    spans: Sequence[tuple[float, float]] = field(compare=False)
    """From when until when each stage has the batch."""


@dataclass(slots=True)
class _Slice:
    """Run times by model, `stages_ms` of a pipeline's; when each of its GPUs is free; jobs that wait for the first one."""

    exec_ms: dict[ModelId, tuple[float, ...]]
    stages_ms: dict[ModelId, tuple[tuple[float, ...], ...]]
    free_at_ms: list[float]
    waiting: deque[Job] = field(default_factory=deque)

    @property
    def is_pipeline(self) -> bool:
        return len(self.free_at_ms) > 1


class EmulatedExecutor:
    """Any number of emulated slices; each runs one batch at a time."""

    def __init__(self) -> None:
        self._slices: dict[SliceId, _Slice] = {}
        self._colocated = ColocatedSlices()
        self._running: list[_Running] = []
        self._ready: deque[ExecutorEvent] = deque()
        self._input = np.empty(0, np.uint8)
        self._order = count()

    def load(self, spec: SliceSpec) -> None:
        """Ready at once, but for models that say too little about their run times."""
        replicas = []
        left_out = []
        for model in spec.models:
            problem = _problem(model, spec.stages)
            if problem:
                left_out.append(LeftOut(spec.slice_id, model.model_id, problem))
            else:
                replicas.append(_replica(model))
        try:
            self._colocated.add(spec)
        except ProfileError as error:
            self._ready.append(LoadFailed(spec.slice_id, str(error)))
            return
        self._slices[spec.slice_id] = _Slice(
            {model.model_id: model.exec_ms for model in spec.models},
            {model.model_id: model.stages_ms for model in spec.models},
            [0.0] * spec.stages,
        )
        self._ready.append(loaded(spec, replicas, left_out))

    def unload(self, slice_id: SliceId) -> None:
        """Forget it, with all that it has; one that failed to load was never kept."""
        self._colocated.remove(slice_id)
        self._slices.pop(slice_id, None)
        self._running = [one for one in self._running if one.job.slice_id != slice_id]
        heapq.heapify(self._running)

    def load_model(self, spec: SliceSpec, number: int) -> None:
        """Ready at once, as a slice is."""
        (model,) = spec.models
        slice_id, problem = spec.slice_id, _problem(model, spec.stages)
        if not problem:
            try:
                self._colocated.widen(spec)
            except ProfileError as error:
                problem = str(error)
        if problem:
            self._ready.append(ModelLoaded(slice_id, number, None, problem))
            return
        self._slices[slice_id].exec_ms[model.model_id] = model.exec_ms
        self._slices[slice_id].stages_ms[model.model_id] = model.stages_ms
        self._ready.append(ModelLoaded(slice_id, number, _replica(model)))

    def unload_model(self, slice_id: SliceId, model_id: ModelId) -> None:
        """Forget it; one that failed to load was never kept."""
        self._colocated.narrow(slice_id, model_id)
        self._slices[slice_id].exec_ms.pop(model_id, None)
        self._slices[slice_id].stages_ms.pop(model_id, None)

    def run(self, job: Job, now_ms: float) -> None:
        """Busy until now + l(b), or l(b) after what the slice runs already."""
        self._go_on(now_ms)
        slice_ = self._slices[job.slice_id]
        batch_size, largest = _size(job), len(slice_.exec_ms[job.model_id])
        if batch_size > largest:
            reason = f"a batch of {batch_size} is over the model's largest, {largest}"
            self._ready.append(RunFailed(job.slice_id, job.batch_id, reason))
            return
        self._copy_inputs(job)
        if slice_.waiting or slice_.free_at_ms[0] > now_ms:
            slice_.waiting.append(job)
        else:
            self._begin(job, now_ms)

    def _begin(self, job: Job, now_ms: float) -> None:
        slice_, batch_size = self._slices[job.slice_id], _size(job)
        if slice_.is_pipeline:
            times_ms = [table[batch_size - 1] for table in slice_.stages_ms[job.model_id]]
        else:
            alone_ms = slice_.exec_ms[job.model_id][batch_size - 1]
            times_ms = [alone_ms * self.slowdown(job, batch_size, now_ms)]
        at_ms, spans = now_ms, []
        for stage, stage_ms in enumerate(times_ms):
            start_at_ms = max(at_ms, slice_.free_at_ms[stage])
            at_ms = slice_.free_at_ms[stage] = start_at_ms + stage_ms
            spans.append((start_at_ms, at_ms))
        for stage in dict.fromkeys((0, len(spans) - 1)):
            end_at_ms, order = spans[stage][1], next(self._order)
            running = _Running(end_at_ms, order, job, batch_size, sum(times_ms), now_ms, stage, spans)
            heapq.heappush(self._running, running)

    def _begin_next(self, slice_id: SliceId, now_ms: float) -> None:
        """What waits for the slice that has just become free."""
        waiting = self._slices[slice_id].waiting
        while waiting:
            job = waiting.popleft()
            if now_ms < job.expires_at_ms:
                self._begin(job, now_ms)
                return
            self._ready.append(RunAborted(slice_id, job.batch_id))

    def _go_on(self, now_ms: float) -> None:
        """What ended before now, and what began when it did, however late somebody asks."""
        while self._running and self._running[0].finish_at_ms < now_ms:
            self._end(heapq.heappop(self._running))

    def _end(self, ended: _Running) -> None:
        slice_id, batch_id = ended.job.slice_id, ended.job.batch_id
        if ended.stage == len(ended.spans) - 1:
            output = NamedTensor("output", np.zeros((ended.batch_size, 1), np.float32))
            spans = ended.spans if ended.stage else ()
            self._ready.append(
                JobRan(slice_id, batch_id, [output], (), ended.exec_ms, ended.began_at_ms, spans)
            )
        else:
            self._ready.append(LeftFirstStage(slice_id, batch_id))
        if ended.stage == 0:
            self._begin_next(slice_id, ended.finish_at_ms)

    def began_at_ms(self, slice_id: SliceId, batch_id: BatchId) -> float | None:
        """Of a batch that runs."""
        for running in self._running:
            if (running.job.slice_id, running.job.batch_id) == (slice_id, batch_id):
                return running.began_at_ms
        return None

    def slowdown(self, job: Job, batch_size: int, now_ms: float) -> float:
        """By what runs beside it."""
        beside = [(other.job, other.batch_size) for other in self._running if other.finish_at_ms > now_ms]
        return self._colocated.slowdown(job.slice_id, job.model_id, batch_size, beside)

    def _copy_inputs(self, job: Job) -> None:
        """Copy every input once, each over the one before: nobody reads them, and so it takes the least memory."""
        for part in job.parts:
            for tensor in part.tensors:
                size = tensor.array.nbytes
                if size > self._input.size:
                    self._input = np.empty(size, np.uint8)
                self._input[:size] = tensor.array.reshape(-1).view(np.uint8)

    def recall(self, slice_id: SliceId, batch_id: BatchId, now_ms: float) -> None:
        """At the very moment at which it would begin, too."""
        self._go_on(now_ms)
        waiting = self._slices[slice_id].waiting
        for place, job in enumerate(waiting):
            if job.batch_id == batch_id:
                del waiting[place]
                self._ready.append(RunAborted(slice_id, batch_id))
                return

    def abort(self, slice_id: SliceId, batch_id: BatchId, now_ms: float) -> None:
        """What runs wakes up early; in a pipeline what has begun goes through. What ends at this moment has ended."""
        self.recall(slice_id, batch_id, now_ms)
        slice_ = self._slices[slice_id]
        for running in () if slice_.is_pipeline else self._running:
            is_it = (running.job.slice_id, running.job.batch_id) == (slice_id, batch_id)
            if is_it and running.finish_at_ms > now_ms:
                self._running.remove(running)
                heapq.heapify(self._running)
                slice_.free_at_ms = [now_ms]
                self._ready.append(RunAborted(slice_id, batch_id))
                self._begin_next(slice_id, now_ms)
                return

    def close(self) -> None:
        """Nothing to give back."""

    def fileno(self) -> int:
        """It has only moments."""
        return -1

    @property
    def has_more(self) -> bool:
        """Whether something has ended."""
        return bool(self._ready)

    @property
    def wake_at_ms(self) -> float | None:
        """When the next batch ends."""
        return self._running[0].finish_at_ms if self._running else None

    def take(self, limit: int, now_ms: float) -> Sequence[ExecutorEvent]:
        """Ended loads and aborts, and batches whose moment has come."""
        self._go_on(now_ms)
        while len(self._ready) < limit and self._running and self._running[0].finish_at_ms <= now_ms:
            self._end(heapq.heappop(self._running))
        return [self._ready.popleft() for _ in range(min(limit, len(self._ready)))]


def _size(job: Job) -> int:
    return sum([part.count for part in job.parts])


def _problem(model: ModelSpec, stages: int) -> str:
    if stages > 1 and len(model.stages_ms) != stages:
        return (
            f"model {model.model_id!r} gives the run times of {len(model.stages_ms)} stages, not of {stages}"
        )
    if len(model.exec_ms) >= model.batch_size_max:
        return ""
    return (
        f"model {model.model_id!r} gives {len(model.exec_ms)} run times for an emulated device,"
        f" but batches may have up to {model.batch_size_max} requests"
    )


def _replica(model: ModelSpec) -> ReplicaInfo:
    return ReplicaInfo(
        model_id=model.model_id,
        batch_size_max=model.batch_size_max,
        exec_ms=model.exec_ms[: model.batch_size_max],
        outputs=OUTPUTS,
        memory_bytes=model.memory_bytes,
        interval_ms=model.interval_ms[: model.batch_size_max],
    )
