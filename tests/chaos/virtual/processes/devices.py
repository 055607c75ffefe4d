"""Emulated devices that take their time to load, that a script slows down, and whose answers tell which request they are of."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec.structs import replace

from fabric.ids import BatchId, ModelId, SliceId
from fabric.link import NamedTensor
from fabric.messages import SliceSpec
from roles.gpu_worker.executors.base import DeviceBroken, ExecutorEvent, Job, JobRan, RunFailed
from roles.gpu_worker.executors.emulated import EmulatedExecutor

if TYPE_CHECKING:
    from tests.chaos.virtual.processes.roles import WorkerProcess

INPUT: Final = "input"
MODELS_MAX: Final = 8
RAISES_EACH: Final = 5
"""Of so many requests there is one on which a model raises, where it does."""
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


def is_raised_on(value: float) -> bool:
    """Whether a model that raises does so on that input."""
    return request_of(value)[0] % RAISES_EACH == 0


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
        self._failing: set[BatchId] = set()
        """Batches on which their model raises."""

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
        self.specs[spec.slice_id] = replace(hosted, models=(*hosted.models, *spec.models))
        self._take_time(before)
        self._process.world.monitor.loaded(self._process)

    def unload_model(self, slice_id: SliceId, model_id: ModelId) -> None:
        super().unload_model(slice_id, model_id)
        hosted = self.specs[slice_id]
        left = tuple(model for model in hosted.models if model.model_id != model_id)
        self.specs[slice_id] = replace(hosted, models=left)

    def _begin(self, job: Job, now_ms: float) -> None:
        world, host = self._process.world, self._process.host
        values = values_of(job)
        world.monitor.runs(self._process, job, values, now_ms)
        self._outputs[job.batch_id] = [output_of(value, job.model_id) for value in values]
        if world.now_ms < host.raises_until_ms and any(map(is_raised_on, values)):
            self._failing.add(job.batch_id)
            world.monitor.fails(values)
        super()._begin(job, now_ms)

    def break_down(self) -> None:
        """Nothing works any more."""
        for running in self._running:
            self._process.world.monitor.fails(values_of(running.job))
        self._running.clear()
        for slice_ in self._slices.values():
            slice_.waiting.clear()
        self._ready.append(DeviceBroken("it fell off the bus"))

    def hang(self) -> None:
        """What runs never ends."""
        for running in self._running:
            self._process.world.monitor.fails(values_of(running.job))
            running.finish_at_ms = math.inf
            self._slices[running.job.slice_id].free_at_ms = [math.inf]

    def slowdown(self, job: Job, batch_size: int, now_ms: float) -> float:
        return super().slowdown(job, batch_size, now_ms) * self._process.host.slower

    def runs_on(self, slice_id: str) -> bool:
        """Whether a batch is on that slice."""
        return any(running.job.slice_id == slice_id for running in self._running)

    @property
    def wake_at_ms(self) -> float | None:
        moments = [at_ms for at_ms, *_ in self._loading[:1]]
        running_until_ms = super().wake_at_ms
        if running_until_ms is not None and running_until_ms < math.inf:
            moments.append(running_until_ms)
        return min(moments, default=None)

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
        if event.batch_id in self._failing:
            self._failing.remove(event.batch_id)
            return RunFailed(event.slice_id, event.batch_id, "the model raised")
        rows = np.array(self._outputs.pop(event.batch_id), np.float32).reshape(-1, 1)
        return replace(event, outputs=[NamedTensor("output", rows)])
