"""Emulated devices that take their time to load, that a script slows down, and whose answers tell which request they are of."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from fabric.ids import BatchId, ModelId, SliceId
from fabric.link import NamedTensor
from fabric.messages import SliceSpec, replaced
from roles.gpu_worker.executors.base import ExecutorEvent, Job, JobRan
from roles.gpu_worker.executors.emulated import EmulatedExecutor

if TYPE_CHECKING:
    from tests.chaos.virtual.processes.roles import WorkerProcess

INPUT: Final = "input"
MODELS_MAX: Final = 8
FIRST_REQUEST: Final = 1 << 12
"""Requests have numbers from here on, and fewer than as many again: so an input says how many models it has gone through."""


def input_of(request: int) -> NamedTensor:
    """What a client sends."""
    return NamedTensor(INPUT, np.array([request], np.float32))


def output_of(value: float, model_id: ModelId) -> float:
    """What that model answers to that input: of which both can be told. 32 bits are wide enough for a few models."""
    return value * MODELS_MAX + int(model_id.removeprefix("m"))


def values_of(job: Job) -> list[float]:
    """The inputs of a batch's requests, in the order of its rows."""
    return [float(tensor.array.reshape(-1)[0]) for part in job.parts for tensor in part.tensors]


def request_of(value: float) -> tuple[int, int]:
    """The request that an input is of, and how many models it has gone through."""
    number, models = int(value), 0
    while number >= 2 * FIRST_REQUEST:
        number, models = number // MODELS_MAX, models + 1
    return number, models


class VirtualDevices(EmulatedExecutor):
    """Of one worker."""

    def __init__(self, process: WorkerProcess) -> None:
        super().__init__()
        self.specs: dict[str, SliceSpec] = {}
        self._process = process
        self._loading: list[tuple[float, int, ExecutorEvent]] = []
        self._loads = 0
        self._outputs: dict[BatchId, list[float]] = {}

    def load(self, spec: SliceSpec) -> None:
        before = len(self._ready)
        super().load(spec)
        self.specs[spec.slice_id] = spec
        self._take_time(before)
        self._process.world.monitor.loaded(self._process)

    def unload(self, slice_id: SliceId) -> None:
        super().unload(slice_id)
        self.specs.pop(slice_id, None)

    def load_model(self, spec: SliceSpec, number: int) -> None:
        before = len(self._ready)
        super().load_model(spec, number)
        hosted = self.specs[spec.slice_id]
        self.specs[spec.slice_id] = replaced(hosted, models=(*hosted.models, *spec.models))
        self._take_time(before)
        self._process.world.monitor.loaded(self._process)

    def unload_model(self, slice_id: SliceId, model_id: ModelId) -> None:
        super().unload_model(slice_id, model_id)
        hosted = self.specs[slice_id]
        left = tuple(model for model in hosted.models if model.model_id != model_id)
        self.specs[slice_id] = replaced(hosted, models=left)

    def _begin(self, job: Job, now_ms: float) -> None:
        values = values_of(job)
        self._process.world.monitor.runs(self._process, job, values, now_ms)
        self._outputs[job.batch_id] = [output_of(value, job.model_id) for value in values]
        super()._begin(job, now_ms)

    def slowdown(self, job: Job, batch_size: int, now_ms: float) -> float:
        return super().slowdown(job, batch_size, now_ms) * self._process.host.slower

    def runs_on(self, slice_id: str) -> bool:
        """Whether a batch is on that slice."""
        return any(running.job.slice_id == slice_id for running in self._running)

    @property
    def wake_at_ms(self) -> float | None:
        moments = [at_ms for at_ms, *_ in self._loading[:1]]
        running_until_ms = super().wake_at_ms
        return min(moments + ([] if running_until_ms is None else [running_until_ms]), default=None)

    def take(self, limit: int, now_ms: float) -> Sequence[ExecutorEvent]:
        while self._loading and self._loading[0][0] <= now_ms:
            self._ready.append(heapq.heappop(self._loading)[2])
        return [self._with_outputs(event) for event in super().take(limit, now_ms)]

    def _take_time(self, before: int) -> None:
        """What is ready at once by the emulation is so a while later."""
        ready_at_ms = self._process.now_ms() + self._process.world.shape.load_ms
        while len(self._ready) > before:
            self._loads += 1
            heapq.heappush(self._loading, (ready_at_ms, self._loads, self._ready.pop()))

    def _with_outputs(self, event: ExecutorEvent) -> ExecutorEvent:
        if not isinstance(event, JobRan):
            return event
        rows = np.array(self._outputs.pop(event.batch_id), np.float32).reshape(-1, 1)
        return replace(event, outputs=[NamedTensor("output", rows)])
