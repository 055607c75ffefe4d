"""The devices of a worker that may have a pipeline: its own runs the first stage, processes of its own the others.

A batch goes from the first stage to the second, from there to the third, and from the last one back here with its outputs. The first
stage takes the next batch as soon as it is done with one. A model is loaded when every stage has it: the first stage
decides where it is cut, then the others load their parts. A stage that is lost takes the slice along: the worker ends, all of
it, and is started again as one. Slices of one GPU pass through here untouched.

A gang is a model that runs in ranks, a process each, all of them in every batch. The first rank's device says when it begins one (`gang.py`); the
others get the same inputs, and say how they ended it. The rest is as with one device.
"""

from __future__ import annotations

import math
import select
from collections import deque
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from msgspec.structs import replace

from fabric.errors import LocalProtocolError
from fabric.ids import BatchId, ModelId, SliceId
from fabric.messages import (
    Activations,
    LeftOut,
    LoadStage,
    ModelSpec,
    ReplicaInfo,
    SliceSpec,
    StageFailed,
    StageLoaded,
    UnloadStage,
)
from roles.gpu_worker.executors.base import (
    DeviceBroken,
    Executor,
    ExecutorEvent,
    Job,
    JobRan,
    LeftFirstStage,
    LoadBegins,
    Loaded,
    ModelLoaded,
    Part,
    RejectedRow,
    RunAborted,
    RunExpired,
    RunFailed,
    Shrunk,
    loaded,
)
from roles.gpu_worker.executors.gang import Gang
from roles.gpu_worker.stages.later_stages import EXPIRES_MS_MAX, LaterStages, StageGone, StageSaid
from roles.gpu_worker.stages.ranks import OtherRanks


@dataclass(slots=True)
class _Load:
    """A model that the first stage has and the others are loading. `number`: of a load beside others; 0: of the slice's."""

    replica: ReplicaInfo
    number: int
    stages: dict[int, StageLoaded] = field(default_factory=dict)


@dataclass(slots=True)
class _UnderWay:
    job: Job
    rejected: tuple[RejectedRow, ...] = ()
    began_at_ms: float = 0.0


class PipelineExecutor:
    """An executor over the first stage's own. `parts`: where that one's device writes down how it has cut a model."""

    def __init__(
        self,
        first: Executor,
        later: LaterStages,
        parts: MutableMapping[tuple[SliceId, ModelId], Part],
        now_ms: Callable[[], float],
        gang: Gang | None = None,
    ) -> None:
        self._first = first
        self._later = later
        self._parts = parts
        self._now_ms = now_ms
        self._gang = gang or Gang(now_ms)
        self._ranks = OtherRanks(later, self._gang)
        self._spec: SliceSpec | None = None
        """The pipeline, or the gang; None: there is none."""
        self._models: dict[ModelId, ModelSpec] = {}
        self._beside: dict[int, ModelId] = {}
        """Models that the first stage loads beside what it serves, by the number of the load."""
        self._numbers = count(1)
        self._loads: dict[int, _Load] = {}
        self._waiting: deque[ReplicaInfo] = deque()
        """The slice's models that the first stage has, before the others load them."""
        self._done: list[ReplicaInfo] = []
        self._left_out: list[LeftOut] = []
        self._under_way: dict[BatchId, _UnderWay] = {}
        self._epoll = select.epoll()
        self._watched: tuple[int, ...] = ()
        if first.fileno() >= 0:
            self._epoll.register(first.fileno(), select.EPOLLIN)
        self._epoll.register(self._gang.fileno(), select.EPOLLIN)

    @property
    def _stages(self) -> int:
        return 1 if self._spec is None else 1 + len(self._spec.following)

    # ------------------------------------------------------------ what the worker asks

    def load(self, spec: SliceSpec) -> None:
        """Load the slice, or the first stage of it while the others start."""
        if spec.following:
            assert self._spec is None, "a real slice has a process of its own"
            self._spec = spec
            self._models = {model.model_id: model for model in spec.models}
            self._later.start(self._stages, is_gang=spec.is_gang)
            self._watched = tuple(self._later.filenos())
            for descriptor in self._watched:
                self._epoll.register(descriptor, select.EPOLLIN)
            if spec.is_gang:
                self._ranks.load(spec)
        self._first.load(spec)

    def unload(self, slice_id: SliceId) -> None:
        """Forget it; a pipeline's processes end, and a gang's."""
        if self._spec is not None and self._spec.slice_id == slice_id:
            for descriptor in self._watched:
                self._epoll.unregister(descriptor)
            self._later.stop()
            self._gang.start(1)
            self._spec, self._watched = None, ()
            self._loads.clear()
            self._beside.clear()
            self._under_way.clear()
        self._first.unload(slice_id)

    def load_model(self, spec: SliceSpec, number: int) -> None:
        """The first stage first."""
        assert self._spec is None or not self._spec.is_gang, "another model makes it another slice"
        if self._is_pipeline(spec.slice_id):
            (model,) = spec.models
            self._models[model.model_id] = model
            self._beside[number] = model.model_id
        self._first.load_model(spec, number)

    def unload_model(self, slice_id: SliceId, model_id: ModelId) -> None:
        """In all stages."""
        if self._is_pipeline(slice_id):
            self._forget(slice_id, model_id)
        self._first.unload_model(slice_id, model_id)

    def run(self, job: Job, now_ms: float) -> None:
        """In the first stage, then in the others."""
        if self._is_pipeline(job.slice_id):
            self._under_way[job.batch_id] = _UnderWay(job)
        self._first.run(job, now_ms)

    def recall(self, slice_id: SliceId, batch_id: BatchId, now_ms: float) -> None:
        """From the first stage, which has what has not begun."""
        self._first.recall(slice_id, batch_id, now_ms)

    def abort(self, slice_id: SliceId, batch_id: BatchId, now_ms: float) -> None:
        """Only what one GPU runs could be stopped."""
        if self._is_pipeline(slice_id):
            self._first.recall(slice_id, batch_id, now_ms)
        else:
            self._first.abort(slice_id, batch_id, now_ms)

    def close(self) -> None:
        """End the processes and the device's thread."""
        self._later.stop()
        self._first.close()
        self._gang.close()
        self._epoll.close()

    # ------------------------------------------------------------ the driver's side

    def fileno(self) -> int:
        """Readable when a stage may have something to say."""
        return self._epoll.fileno()

    @property
    def has_more(self) -> bool:
        """Whether one has."""
        return self._first.has_more or self._later.has_more or self._gang.has_more

    @property
    def wake_at_ms(self) -> float | None:
        """When the first stage has something by itself, or its wait for a rank that failed is over."""
        moments = (self._first.wake_at_ms, self._gang.fails_at_ms)
        return min((moment for moment in moments if moment is not None), default=None)

    def take(self, limit: int, now_ms: float) -> Sequence[ExecutorEvent]:
        """What came of loads and batches."""
        events: list[ExecutorEvent] = []
        for event in self._first.take(limit, now_ms):
            events += [event] if self._spec is None or self._spec.is_gang else self._of_first(event)
        if self._spec is not None and self._spec.is_gang:
            return [*events, *self._ranks.take(limit, now_ms)]
        if self._gang.has_more:  # steps of one that is no more, which would wake this process for ever
            self._gang.take(limit, now_ms)
        if self._spec is not None:
            for said in self._later.take(limit, now_ms):
                events += self._of_later(said)
        return events

    # ------------------------------------------------------------ the first stage

    def _of_first(self, event: ExecutorEvent) -> list[ExecutorEvent]:
        match event:
            case Loaded(_, replicas, left_out):
                self._waiting, self._done, self._left_out = deque(replicas), [], list(left_out)
                return self._load_next()
            case ModelLoaded():
                if self._beside.pop(event.number, None) is None:
                    return []  # it was given up when the last step of it was done
                if event.replica is None:
                    return [event]
                return self._load_others(event.slice_id, event.replica, event.number)
            case JobRan():
                return self._left_first(event)
            case RunFailed(batch_id=batch_id) | RunAborted(batch_id=batch_id):
                self._under_way.pop(batch_id, None)
                return [event]
            case _:
                return [event]

    def _left_first(self, ran: JobRan) -> list[ExecutorEvent]:
        under_way = self._under_way[ran.batch_id]
        under_way.rejected, under_way.began_at_ms = ran.rejected, ran.began_at_ms
        if not ran.outputs:  # none of the rows fits
            del self._under_way[ran.batch_id]
            return [ran]
        job = under_way.job
        expires_in_ms = job.expires_at_ms + ran.exec_ms - self._now_ms()
        message = Activations(
            ran.batch_id,
            ran.slice_id,
            job.model_id,
            0,
            ran.exec_ms,
            min(max(expires_in_ms, 0.0), EXPIRES_MS_MAX) if math.isfinite(expires_in_ms) else EXPIRES_MS_MAX,
        )
        left = LeftFirstStage(ran.slice_id, ran.batch_id)
        try:
            is_out, reason = self._later.send(1, message, ran.outputs), "the second stage takes no more"
        except LocalProtocolError as error:
            is_out, reason = False, f"what the first stage gave cannot be sent: {error}"
        if is_out:
            return [left]
        del self._under_way[ran.batch_id]
        return [left, RunFailed(ran.slice_id, ran.batch_id, reason)]

    def _load_others(self, slice_id: SliceId, replica: ReplicaInfo, number: int) -> list[ExecutorEvent]:
        """The first stage has the model: the others may know now where it is cut."""
        assert self._spec is not None, "it is a pipeline"
        model = replace(self._models[replica.model_id], batch_size_max=replica.batch_size_max)
        spec = replace(self._spec, models=(model,))
        part = self._parts[slice_id, replica.model_id]
        key = next(self._numbers)
        load = self._loads[key] = _Load(replica, number)
        for stage in range(1, self._stages):
            if not self._later.send(stage, LoadStage(spec, key, stage, part.first_layers, part.digest)):
                return self._leave_out(slice_id, load, f"stage {stage} takes no more")
        return []

    # ------------------------------------------------------------ the others

    def _of_later(self, said: StageSaid | StageGone) -> list[ExecutorEvent]:
        if isinstance(said, StageGone):
            return [DeviceBroken(f"stage {said.stage} of its pipeline is gone: {said.reason}")]
        match said.message:
            case StageLoaded() as message:
                return self._stage_loaded(message)
            case Activations() as message:
                under_way = self._under_way.pop(message.batch_id, None)
                if under_way is None:
                    return []
                return [
                    JobRan(
                        message.slice_id,
                        message.batch_id,
                        said.tensors,
                        under_way.rejected,
                        message.exec_ms,
                        under_way.began_at_ms,
                    )
                ]
            case StageFailed() as message:
                return self._stage_failed(message)
            case _:
                return []

    def _stage_failed(self, message: StageFailed) -> list[ExecutorEvent]:
        if self._under_way.pop(message.batch_id, None) is None:
            return []
        if message.is_expired:
            return [RunExpired(message.slice_id, message.batch_id, message.reason)]
        events: list[ExecutorEvent] = []
        if message.shrunk_to:
            events.append(Shrunk(message.slice_id, message.model_id, message.shrunk_to))
        reason = f"stage {message.stage}: {message.reason}"
        return [*events, RunFailed(message.slice_id, message.batch_id, reason)]

    def _stage_loaded(self, message: StageLoaded) -> list[ExecutorEvent]:
        load = self._loads.get(message.number)
        if load is None or self._spec is None:
            return []  # nobody wants it any more
        load.stages[message.stage] = message
        if len(load.stages) < self._stages - 1:
            return []
        del self._loads[message.number]
        slice_id, model_id = self._spec.slice_id, load.replica.model_id
        failed = [one for _, one in sorted(load.stages.items()) if one.reason]
        if failed:
            left_out = self._leave_out(slice_id, load, f"stage {failed[0].stage}: {failed[0].reason}")
            return left_out or self._load_next()
        replica = _of_all(load, self._models[model_id].slo_ms)
        if load.number:
            return [ModelLoaded(slice_id, load.number, replica)]
        self._done.append(replica)
        return self._load_next()

    def _leave_out(self, slice_id: SliceId, load: _Load, reason: str) -> list[ExecutorEvent]:
        """A stage cannot have that model, so none needs it. Of the slice's own loads nothing is said before all are over."""
        model_id = load.replica.model_id
        self._forget(slice_id, model_id)
        self._first.unload_model(slice_id, model_id)
        if load.number:
            return [ModelLoaded(slice_id, load.number, None, reason)]
        self._left_out.append(LeftOut(slice_id, model_id, reason))
        return []

    @property
    def _is_loading(self) -> bool:
        """Whether the others load a model of the slice's own."""
        return any(not load.number for load in self._loads.values())

    def _load_next(self) -> list[ExecutorEvent]:
        """The others load the slice's models one after the other: each has its own time, and what comes of it is its doing."""
        assert self._spec is not None, "it is a pipeline"
        slice_id = self._spec.slice_id
        events: list[ExecutorEvent] = []
        while self._waiting and not self._is_loading:
            replica = self._waiting.popleft()
            events.append(LoadBegins(slice_id, replica.model_id))
            self._load_others(slice_id, replica, 0)  # which leaves it out where a stage takes no more
        if self._is_loading:
            return events
        places = {model.model_id: place for place, model in enumerate(self._spec.models)}
        self._done.sort(key=lambda one: places[one.model_id])
        return [*events, loaded(self._spec, self._done, self._left_out)]

    def _forget(self, slice_id: SliceId, model_id: ModelId) -> None:
        """In the later stages."""
        self._models.pop(model_id, None)
        self._beside = {number: one for number, one in self._beside.items() if one != model_id}
        self._loads = {key: one for key, one in self._loads.items() if one.replica.model_id != model_id}
        for stage in range(1, self._stages):
            self._later.send(stage, UnloadStage(slice_id, model_id))

    def _is_pipeline(self, slice_id: SliceId) -> bool:
        return self._spec is not None and self._spec.slice_id == slice_id and self._spec.is_pipeline


def _of_all(load: _Load, slo_ms: float) -> ReplicaInfo:
    """The replica, from what each stage has measured. No batch is larger than the SLO allows, as on one GPU."""
    first, others = load.replica, [one for _, one in sorted(load.stages.items())]
    tables = [first.exec_ms, *(one.exec_ms for one in others)]
    exec_ms = [sum(times) for times in zip(*tables, strict=False)]
    size = next((b for b, ms in enumerate(exec_ms) if b and ms > slo_ms), len(exec_ms))
    limits = [first.reason, *(one.limit for one in others)]
    reason = next((one for one, table in zip(limits, tables, strict=True) if one and len(table) == size), "")
    return replace(
        first,
        batch_size_max=size,
        exec_ms=tuple(exec_ms[:size]),
        interval_ms=tuple(max(times) for times in zip(*tables, strict=False))[:size],
        outputs=others[-1].outputs,
        memory_bytes=max(first.memory_bytes, *(one.memory_bytes for one in others)),
        reason=reason,
    )
