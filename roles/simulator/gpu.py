"""Modelled GPUs: workers that take the device model's time for a batch instead of computing it.

A worker behaves as the live one does, by the same rules (`roles/gpu_worker/batch_start_rules.py`): of several batches that may start
the one with the earliest start does, and one that is kept waiting until all its deadlines are lost is given back. The
neighbours on the same GPU that run at a batch's start slow it down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fabric.ids import BatchId, ModelId, NodeId, PeerId
from fabric.messages import Done, ModelSpec, Part, RunBatch, SliceSpec
from profiles.device_model import DeviceModel
from profiles.interference import Running
from roles.gpu_worker.batch_start_rules import begins_at_ms

# A duration that travelled and was added to a clock again differs from the moment it stands for by rounding.
ROUNDING_MS = 1e-6


@dataclass(slots=True, eq=False)
class SimulatedJob:
    """A batch on its way through a slice.

    `inputs_at_ms`: when each part's inputs are there, `all_in_at_ms` the last of them. `parts` are those that
    ran, `missing` the others.
    """

    run: RunBatch
    batch_size: int
    sent_at_ms: float
    received_at_ms: float
    start_at_ms: float
    latest_at_ms: float
    expires_at_ms: float
    inputs_at_ms: Sequence[float]
    all_in_at_ms: float
    parts: Sequence[Part] = ()
    missing: tuple[Part, ...] = ()
    ran: int = 0
    started_at_ms: float = 0.0
    finished_at_ms: float = 0.0
    stages: tuple[tuple[int, float, float], ...] = ()
    """In a pipeline: each stage's GPU, and from when until when it has the batch."""

    @property
    def begins_at_ms(self) -> float:
        """When it goes, as far as it depends on itself: without any inputs there is nothing to go with."""
        return begins_at_ms(
            self.start_at_ms,
            self.latest_at_ms,
            self.expires_at_ms,
            min(self.inputs_at_ms),
            self.all_in_at_ms,
        )

    @property
    def goes_first_at_ms(self) -> float:
        """The same of the first in line: its start only says when its inputs were expected."""
        return min(self.begins_at_ms, max(self.received_at_ms, self.all_in_at_ms))


class SimulatedSurroundings(Protocol):
    """What a worker needs of the world."""

    def schedule(self, at_ms: float, callback: Callable[[Any, float], None], argument: object) -> None:
        """Call back at that moment of virtual time, with the argument and the moment."""
        ...

    def ran(self, slice_: SimulatedSlice, job: SimulatedJob) -> None:
        """A batch ended, or was cut off (then without parts)."""
        ...

    def preempted_late(self) -> None:
        """A batch that should be stopped has ended already."""
        ...

    def report(self, peer: PeerId, done: Done, now_ms: float) -> None:
        """Send to the scheduler. What it answers comes after this call's caller is done."""
        ...


class SimulatedGpu:
    """One GPU: its device model, and the slices that share it. `number` is its place in the cluster."""

    def __init__(self, number: int, device: DeviceModel) -> None:
        self.number = number
        self.device = device
        self.slices: list[SimulatedSlice] = []

    def neighbours(self, of: SimulatedSlice) -> list[Running]:
        """What the other slices run now."""
        return [other.running for other in self.slices if other is not of and other.running is not None]


class SimulatedSlice:
    """One slice and the worker on it. `running` is what it runs now, `free_at_ms` when its last batch ends or ended."""

    def __init__(
        self,
        spec: SliceSpec,
        node_id: NodeId,
        peer: PeerId,
        gpus: Sequence[SimulatedGpu],
        world: SimulatedSurroundings,
    ) -> None:
        self.spec = spec
        self.node_id = node_id
        self.peer = peer
        self.loaded: set[ModelId] = set()
        """Models that it hosts by now."""
        self.gpu = gpus[0]
        self._gpus = gpus
        self.running: Running | None = None
        self.alone_ms: dict[ModelId, Sequence[float]] = {
            model.model_id: self._alone_ms(model) for model in spec.models
        }
        """l(b) at index b - 1 of each model that it hosts, or has hosted, without neighbours."""
        self._world = world
        self._job: SimulatedJob | None = None
        self.free_at_ms = 0.0
        self._waiting: list[SimulatedJob] = []

    def become(self, spec: SliceSpec) -> list[ModelSpec]:
        """It should host these models; those it must load first. Batches that it has of others end as they would have."""
        there = {model.model_id for model in self.spec.models}
        new = [model for model in spec.models if model.model_id not in there]
        self.spec = spec
        self.loaded &= {model.model_id for model in spec.models}
        self.alone_ms.update({model.model_id: self._alone_ms(model) for model in new})
        return new

    def _alone_ms(self, model: ModelSpec) -> Sequence[float]:
        table = self.gpu.device.exec_table(model.model_id, self.spec.share_percent)
        return table[: model.batch_size_max]

    def take(self, job: SimulatedJob, now_ms: float) -> None:
        """A batch was sent here."""
        if self._job is not None:
            self._keep(job)
            self._waiting.append(job)
        elif self._waiting or job.goes_first_at_ms > now_ms:
            self._waiting.append(job)
            self._look(None, now_ms)
        else:
            self._begin(job, now_ms)

    def preempt(self, batch_id: BatchId, now_ms: float) -> None:
        """Stop that batch, whether it runs or waits; nothing if it has ended. What ends at this moment has ended."""
        job = self._job
        if job is not None and job.run.batch_id == batch_id and self.free_at_ms > now_ms:
            self._job = self.running = None
            job.parts = job.missing = ()  # all are granted again already
            self._end(job, now_ms)
        else:
            job = next((waiting for waiting in self._waiting if waiting.run.batch_id == batch_id), None)
            if job is None:
                self._world.preempted_late()
                return
            self._waiting.remove(job)
        self._report(job, "preempted", now_ms)
        self._look(None, now_ms)

    def _look(self, _: None, now_ms: float) -> None:
        """Start what may start, or ask to be called when something may."""
        while self._waiting and self._job is None:
            first = min(self._waiting, key=_rank) if len(self._waiting) > 1 else self._waiting[0]
            if first.goes_first_at_ms <= now_ms:
                job = first
            else:
                due = [job for job in self._waiting if job.begins_at_ms <= now_ms]
                if not due:
                    begins_at_ms = min(job.begins_at_ms for job in self._waiting)
                    self._world.schedule(min(begins_at_ms, first.goes_first_at_ms), self._look, None)
                    return
                job = min(due, key=_rank) if len(due) > 1 else due[0]
            self._waiting.remove(job)
            self._begin(job, now_ms)

    def _keep(self, job: SimulatedJob) -> None:
        """It waits for the device: until that is free, or until it is no use any more."""
        if self.free_at_ms > job.expires_at_ms + ROUNDING_MS:
            self._world.schedule(job.expires_at_ms, self._expire, job)

    def _expire(self, job: SimulatedJob, now_ms: float) -> None:
        if (
            job in self._waiting and self._job is not None
        ):  # else it goes itself, at this moment at the latest
            self._waiting.remove(job)
            job.missing = job.run.parts
            self._report(job, "expired", now_ms)

    def _begin(self, job: SimulatedJob, now_ms: float) -> None:
        run = job.run
        if now_ms > job.expires_at_ms + ROUNDING_MS:
            job.missing = run.parts
        elif job.all_in_at_ms <= now_ms + ROUNDING_MS:
            job.parts, job.ran = run.parts, job.batch_size
        else:
            there = [at_ms <= now_ms + ROUNDING_MS for at_ms in job.inputs_at_ms]
            job.parts = [part for part, is_there in zip(run.parts, there, strict=True) if is_there]
            job.missing = tuple(p for p, is_there in zip(run.parts, there, strict=True) if not is_there)
            job.ran = requests_in(job.parts)
        if job.ran == 0:
            self._report(job, "expired", now_ms)
            return
        job.started_at_ms = now_ms
        self._job = job
        self._run(job, now_ms)
        for waiting in self._waiting:
            self._keep(waiting)

    def _run(self, job: SimulatedJob, now_ms: float) -> None:
        """The device has it: say when it will be free, and see to the end."""
        run = job.run
        if len(self.gpu.slices) == 1:
            exec_ms = self.alone_ms[run.model_id][job.ran - 1]
        else:
            self.running = Running(run.model_id, job.ran, self.spec.share_percent)
            exec_ms = self.gpu.device.exec_ms(self.running, self.gpu.neighbours(self))
        self.free_at_ms = now_ms + exec_ms
        self._world.schedule(self.free_at_ms, self._finish, job)

    def _finish(self, job: SimulatedJob, now_ms: float) -> None:
        if self._job is not job:
            return  # it was preempted
        self._job = self.running = None
        self._end(job, now_ms)
        if self._waiting:
            self._look(None, now_ms)
        self._report(job, "ok", now_ms)

    def _end(self, job: SimulatedJob, now_ms: float) -> None:
        """It ran until now."""
        job.finished_at_ms = now_ms
        self._world.ran(self, job)

    def _report(self, job: SimulatedJob, status: str, now_ms: float) -> None:
        run, all_in_at_ms, started_at_ms = job.run, job.all_in_at_ms, job.started_at_ms
        if status == "preempted":
            in_at_ms, queued_ms, exec_ms = job.received_at_ms, 0.0, 0.0
        elif job.ran:
            in_at_ms = min(all_in_at_ms, started_at_ms)
            if job.missing:  # from its latest start on it waited for the device, not for those
                came_at_ms = [at_ms for at_ms in job.inputs_at_ms if at_ms <= started_at_ms]
                in_at_ms = max([job.latest_at_ms, *came_at_ms])
            queued_ms, exec_ms = started_at_ms - in_at_ms, now_ms - started_at_ms
            if self.spec.is_pipeline:  # what it waited between stages says nothing about the model
                run_ms = sum(end_at_ms - start_at_ms for _, start_at_ms, end_at_ms in job.stages)
                queued_ms, exec_ms = queued_ms + exec_ms - run_ms, run_ms
        else:
            in_at_ms = min(all_in_at_ms, now_ms)
            queued_ms = exec_ms = 0.0
        ran = job.ran if status == "ok" else 0
        transfer_ms = in_at_ms - job.received_at_ms
        done = Done(
            run.batch_id,
            run.slice_id,
            run.model_id,
            status,
            ran,
            job.missing,
            transfer_ms if transfer_ms > 0 else 0.0,
            queued_ms,
            exec_ms,
        )
        self._world.report(self.peer, done, now_ms)


def _rank(job: SimulatedJob) -> tuple[float, BatchId]:
    return job.start_at_ms, job.run.batch_id


def requests_in(parts: Sequence[Part]) -> int:
    """How many requests the parts have together."""
    count = 0
    for part in parts:
        for run in part.runs:
            count += run.count
    return count
