"""An emulated device: a batch of b takes `exec_ms[b - 1]` and computes nothing.

Inputs are copied once all the same, as into any device's batch: what comes to a worker costs its host that.

Where its specification names an interference model, what the GPU's other slices in this process run at its start
slows a batch down, by the same model that the simulator uses.

A pipeline is emulated as the simulator plays it: a stage runs one batch at a time in the order in which they came, so all
moments of a batch are known when it starts.

No thread sleeps. A running batch is a moment in a heap, so one process emulates as many slices as its loop can
serve, and the driver's own sleep is the device.
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
    is_first_stage: bool = field(compare=False, default=False)
    """Not its end: that of a pipeline's first stage."""


class EmulatedExecutor:
    """Any number of emulated slices; each runs one batch at a time."""

    def __init__(self) -> None:
        self._exec_ms: dict[SliceId, dict[ModelId, tuple[float, ...]]] = {}
        self._stages_ms: dict[SliceId, dict[ModelId, tuple[tuple[float, ...], ...]]] = {}
        """Of pipelines."""
        self._colocated = ColocatedSlices()
        self._free_at_ms: dict[SliceId, list[float]] = {}
        """Of each of its GPUs."""
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
        self._exec_ms[spec.slice_id] = {model.model_id: model.exec_ms for model in spec.models}
        if spec.is_pipeline:
            self._stages_ms[spec.slice_id] = {model.model_id: model.stages_ms for model in spec.models}
        self._free_at_ms[spec.slice_id] = [0.0] * spec.stages
        self._ready.append(loaded(spec, replicas, left_out))

    def unload(self, slice_id: SliceId) -> None:
        """Forget it; one that failed to load was never kept."""
        self._colocated.remove(slice_id)
        self._exec_ms.pop(slice_id, None)
        self._stages_ms.pop(slice_id, None)
        self._free_at_ms.pop(slice_id, None)

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
        self._exec_ms[slice_id][model.model_id] = model.exec_ms
        if spec.is_pipeline:
            self._stages_ms[slice_id][model.model_id] = model.stages_ms
        self._ready.append(ModelLoaded(slice_id, number, _replica(model)))

    def unload_model(self, slice_id: SliceId, model_id: ModelId) -> None:
        """Forget it; one that failed to load was never kept."""
        self._colocated.narrow(slice_id, model_id)
        self._exec_ms[slice_id].pop(model_id, None)
        self._stages_ms.get(slice_id, {}).pop(model_id, None)

    def run(self, job: Job, now_ms: float) -> None:
        """Busy until now + l(b), or l(b) after what the slice runs already."""
        batch_size = sum(part.count for part in job.parts)
        exec_ms = self._exec_ms[job.slice_id][job.model_id]
        if batch_size > len(exec_ms):
            reason = f"a batch of {batch_size} is over the model's largest, {len(exec_ms)}"
            self._ready.append(RunFailed(job.slice_id, job.batch_id, reason))
            return
        self._copy_inputs(job)
        free_at_ms = self._free_at_ms[job.slice_id]
        if job.slice_id in self._stages_ms:
            tables = self._stages_ms[job.slice_id][job.model_id]
            times_ms = [table[batch_size - 1] for table in tables]
        else:
            times_ms = [exec_ms[batch_size - 1] * self.slowdown(job, batch_size, now_ms)]
        took_ms, at_ms = sum(times_ms), now_ms
        for stage, stage_ms in enumerate(times_ms):
            at_ms = free_at_ms[stage] = max(at_ms, free_at_ms[stage]) + stage_ms
            if stage == 0 and len(times_ms) > 1:
                self._end_at(at_ms, job, batch_size, took_ms, is_first_stage=True)
        self._end_at(at_ms, job, batch_size, took_ms)

    def _end_at(
        self, at_ms: float, job: Job, batch_size: int, took_ms: float, *, is_first_stage: bool = False
    ) -> None:
        running = _Running(at_ms, next(self._order), job, batch_size, took_ms, is_first_stage)
        heapq.heappush(self._running, running)

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

    def stage(self, job: Job) -> None:
        """There is nowhere to put anything."""

    def abort(self, slice_id: SliceId, batch_id: BatchId, now_ms: float) -> None:
        """Wake up early; in a pipeline what has begun goes through."""
        if slice_id in self._stages_ms:
            return
        for running in self._running:
            if (running.job.slice_id, running.job.batch_id) == (slice_id, batch_id):
                self._running.remove(running)
                heapq.heapify(self._running)
                self._free_at_ms[slice_id] = [now_ms]
                self._ready.append(RunAborted(slice_id, batch_id))
                return

    def close(self) -> None:
        """Nothing to give back."""

    def fileno(self) -> int:
        """It has only moments."""
        return -1

    @property
    def has_more(self) -> bool:
        """Whether a load or an abort has ended."""
        return bool(self._ready)

    @property
    def wake_at_ms(self) -> float | None:
        """When the next batch ends."""
        return self._running[0].finish_at_ms if self._running else None

    def take(self, limit: int, now_ms: float) -> Sequence[ExecutorEvent]:
        """Ended loads and aborts, and batches whose moment has come."""
        events: list[ExecutorEvent] = []
        while self._ready and len(events) < limit:
            events.append(self._ready.popleft())
        while self._running and self._running[0].finish_at_ms <= now_ms and len(events) < limit:
            ended = heapq.heappop(self._running)
            if ended.is_first_stage:
                events.append(LeftFirstStage(ended.job.slice_id, ended.job.batch_id))
                continue
            output = NamedTensor("output", np.zeros((ended.batch_size, 1), np.float32))
            events.append(JobRan(ended.job.slice_id, ended.job.batch_id, [output], (), ended.exec_ms))
        return events


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
