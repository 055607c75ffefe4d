"""Runs a device that blocks on a thread of its own.

The thread takes work from a bounded queue and leaves what came of it in a mailbox. It takes the next job without waiting
for anybody to hear of the last one; what has not been taken can be recalled. Users' code runs on it:
whatever that raises ends a load or a batch, never the thread. Even the device's own module is imported there, as
torch takes seconds to import. Only a model that comes to a slice that serves is loaded on a thread of its own; where
no batch waits, the device's thread warms it up, a run at a time.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from fabric.errors import error_text
from fabric.ids import BatchId, ModelId, SliceId
from fabric.messages import LeftOut, ReplicaInfo, SliceSpec
from roles.gpu_worker.executors.base import (
    DeviceBroken,
    ExecutorEvent,
    Job,
    JobRan,
    LoadBegins,
    LoadFailed,
    ModelLoaded,
    RunAborted,
    RunFailed,
    Shrunk,
    Warming,
    loaded,
)
from roles.runtime.loop.mailbox import Mailbox

QUEUE_MAX = 1_024  # the core gives two jobs and one load per slice: this is never reached in order
STAGED_MAX = 2  # one in the making, one behind it; a batch that is not staged is assembled when it runs
CLOSE_WITHIN_S = 1.0
REASON_CHARS_MAX = 1_000  # an exception's text can be a page


class BlockingDevice(Protocol):
    """A device whose calls take as long as they take. Used by one thread."""

    def load(self, spec: SliceSpec) -> tuple[ReplicaInfo, ...]:
        """Load and warm these models, beside those that the slice has already; may raise anything."""
        ...

    def load_beside(self, spec: SliceSpec) -> Iterator[ReplicaInfo | None]:
        """Load the one model of `spec` on the caller's thread, which is not the device's; may raise anything.

        The answer warms it in steps, on the device's thread; the last one gives its replica, and it can run.
        """
        ...

    def unload(self, slice_id: SliceId) -> None:
        """Forget a slice; one that failed to load was never kept."""
        ...

    def unload_model(self, slice_id: SliceId, model_id: ModelId) -> None:
        """Forget a model of a slice that serves on; one that failed to load was never kept."""
        ...

    def collect(self, *, is_frozen: bool) -> None:
        """Give back what a load that came to nothing has left; `is_frozen`: some of it may be out of the collector's sight."""
        ...

    def run(self, job: Job) -> JobRan:
        """Run a batch; may raise anything."""
        ...

    def stage(self, job: Job) -> None:
        """Put the inputs of a batch in place that is likely to run next; called by another thread."""
        ...

    def shrunk(self, job: Job, error: BaseException) -> int | None:
        """Asked after a job raised: the largest batch from now on, where that has changed."""
        ...

    def explain(self, error: BaseException) -> str:
        """What went wrong, in a line for people."""
        ...

    @property
    def is_broken(self) -> bool:
        """Asked after something raised: whether nothing will ever run here again."""
        ...


class _Unload(Struct, frozen=True):
    slice_id: SliceId


class _UnloadModel(Struct, frozen=True):
    slice_id: SliceId
    model_id: ModelId


@dataclass(slots=True, eq=False)
class _SideLoad:
    """A model that is loaded beside what its slice serves, then warmed in `steps`."""

    spec: SliceSpec
    number: int
    is_given_up: bool = False
    is_over: bool = False
    steps: Iterator[ReplicaInfo | None] | None = None
    before: int = 0
    """How many loads had ended well when it began."""

    def warming(self, *, is_over: bool = False) -> Warming:
        """What the worker hears of its runs on the device's thread."""
        return Warming(self.spec.slice_id, self.spec.models[0].model_id, is_over)


class _Collect(Struct, frozen=True):
    is_frozen: bool


class _Prepare(Struct, frozen=True):
    pass


class _Close(Struct, frozen=True):
    pass


_Work = SliceSpec | Job | _Unload | _UnloadModel | _SideLoad | _Collect | _Prepare | _Close


class ThreadExecutor(Mailbox[ExecutorEvent]):
    """An executor over a blocking device; `make_device` is called on the thread, before the first load. `now_ms`: the clock of jobs."""

    def __init__(self, make_device: Callable[[], BlockingDevice], now_ms: Callable[[], float]) -> None:
        super().__init__()
        self._make_device = make_device
        self._now_ms = now_ms
        self._is_busy = False  # the thread runs a job
        self._work: queue.Queue[_Work] = queue.Queue(QUEUE_MAX)
        self._device: BlockingDevice | None = None  # the thread's own
        self._ahead: queue.Queue[Job | _Close] = queue.Queue(STAGED_MAX)
        # Daemons: a model that never returns must not keep the process.
        self._thread = threading.Thread(target=self._serve, name="device", daemon=True)
        self._stager = threading.Thread(target=self._serve_ahead, name="staging", daemon=True)
        self._side_loads: dict[tuple[SliceId, ModelId], _SideLoad] = {}  # the caller's
        self._warming: deque[_SideLoad] = deque()  # the thread's own
        self._ended = (
            0  # loads that ended well: the worker puts what is there then out of the collector's sight
        )

    def prepare(self) -> None:
        """Make the device before there is something to load, as that takes seconds. Where it cannot be made the first load says why."""
        self._start(_Prepare())

    def load(self, spec: SliceSpec) -> None:
        """Load, warm and measure on the thread."""
        self._start(spec)

    def unload(self, slice_id: SliceId) -> None:
        """After what was asked before."""
        for (of, _), load in self._side_loads.items():
            load.is_given_up |= of == slice_id
        self._put(_Unload(slice_id))

    def load_model(self, spec: SliceSpec, number: int) -> None:
        """Load on a thread of its own, as that may take minutes; then warm and measure on the device's, between batches."""
        (model,) = spec.models
        load = _SideLoad(spec, number, before=self._ended)
        self._side_loads = {key: one for key, one in self._side_loads.items() if not one.is_over}
        self._side_loads[spec.slice_id, model.model_id] = load
        try:
            threading.Thread(target=self._load_beside, args=(load,), name="loading", daemon=True).start()
        except RuntimeError as error:  # the host has no more threads for us
            load.is_over = True
            self.post(ModelLoaded(spec.slice_id, number, None, f"it cannot be loaded now: {error}"))

    def unload_model(self, slice_id: SliceId, model_id: ModelId) -> None:
        """After what was asked before. A load that hangs keeps its thread, and nobody waits for it."""
        load = self._side_loads.pop((slice_id, model_id), None)
        if load is not None:
            load.is_given_up = True
        self._put(_UnloadModel(slice_id, model_id))

    def run(self, job: Job, now_ms: float) -> None:  # noqa: ARG002  an Executor's signature
        """After what was asked before. While another one runs, its inputs are put in place by a thread of its own, unless that is behind."""
        self._put(job)
        if self._is_busy:
            with contextlib.suppress(queue.Full):
                self._ahead.put_nowait(job)

    def recall(self, slice_id: SliceId, batch_id: BatchId, now_ms: float) -> None:  # noqa: ARG002  an Executor's signature
        """Only what the thread has not taken."""
        with self._work.mutex:
            works = self._work.queue
            places = [
                place
                for place, work in enumerate(works)
                if isinstance(work, Job) and (work.slice_id, work.batch_id) == (slice_id, batch_id)
            ]
            for place in places:
                del works[place]
        if places:
            self.post(RunAborted(slice_id, batch_id))

    def abort(self, slice_id: SliceId, batch_id: BatchId, now_ms: float) -> None:
        """A kernel that was launched cannot be called back."""
        self.recall(slice_id, batch_id, now_ms)

    def close(self, within_s: float = CLOSE_WITHIN_S) -> None:
        """End the thread if it ends in time, else leave it to the end of the process."""
        if self._thread.ident is not None:
            self._put(_Close())
            with contextlib.suppress(queue.Full):
                self._ahead.put_nowait(_Close())
            self._thread.join(within_s)
        super().close()

    def _start(self, work: _Work) -> None:
        if self._thread.ident is None:
            self._thread.start()
            self._stager.start()
        self._put(work)

    def _put(self, work: _Work) -> None:
        try:
            self._work.put_nowait(work)
        except queue.Full:
            event = self._failed(work, f"{QUEUE_MAX} loads and batches wait for the device already")
            if event is not None:
                self.post(event)

    def _serve(self) -> None:
        while self._serve_one(self._next()):
            pass

    def _serve_one(self, work: _Work) -> bool:
        """In a frame of its own, so that nothing of what was unloaded is held while there is nothing to do."""
        for event in self._do(work):
            self.post(event)
        return not isinstance(work, _Close)

    def _next(self) -> _Work:
        """What was asked for; where nothing was, a step of what warms up."""
        if not self._warming:
            return self._work.get()
        try:
            return self._work.get_nowait()
        except queue.Empty:
            return self._warming[0]

    def _load_beside(self, load: _SideLoad) -> None:
        assert self._device is not None, "the slice serves"
        try:
            load.steps = self._device.load_beside(load.spec)
        except BaseException as error:  # noqa: BLE001  top of thread: users' code may raise anything
            load.is_over = True
            for event in self._errors(load, error):
                self.post(event)
        self._put(_Collect(self._ended > load.before) if load.is_over else load)

    def _serve_ahead(self) -> None:
        while self._stage_one(self._ahead.get()):
            pass

    def _stage_one(self, job: Job | _Close) -> bool:
        """In a frame of its own, so that no batch's inputs are held while there is nothing to do."""
        if isinstance(job, _Close):
            return False
        if self._device is not None:
            # Whatever is wrong with these inputs, their run will meet it and answer for it.
            with contextlib.suppress(Exception):  # top of process: the batch is none of this thread's to fail
                self._device.stage(job)
        return True

    def _do(self, work: _Work) -> list[ExecutorEvent]:
        try:
            if self._device is None:
                self._device = self._make_device()
            match work:
                case SliceSpec():
                    return [self._load(work, self._device)]
                case Job():
                    return [self._run(work, self._device)]
                case _Unload(slice_id=slice_id):
                    self._device.unload(slice_id)
                case _UnloadModel(slice_id, model_id):
                    self._device.unload_model(slice_id, model_id)
                case _Collect(is_frozen):
                    self._device.collect(is_frozen=is_frozen)
                case _SideLoad():
                    return self._warm(work)
        except BaseException as error:  # noqa: BLE001  top of thread: users' code may raise anything
            events = self._errors(work, error)
            if not isinstance(work, _SideLoad):
                return events
            self._end_load(work)
            # Of a device that broke in this step the worker shall know that it was in it.
            is_broken = any(isinstance(event, DeviceBroken) for event in events)
            return events if is_broken else [work.warming(is_over=True), *events]
        return []

    def _run(self, job: Job, device: BlockingDevice) -> ExecutorEvent:
        if self._now_ms() >= job.expires_at_ms:
            return RunAborted(job.slice_id, job.batch_id)
        self._is_busy = True
        try:
            return device.run(job)
        finally:
            self._is_busy = False

    def _warm(self, load: _SideLoad) -> list[ExecutorEvent]:
        """One step."""
        if load.is_given_up:
            self._end_load(load)
            return []
        if load not in self._warming:
            self._warming.append(load)
        assert load.steps is not None, "it is loaded, and not over"
        self.post(load.warming())
        replica = next(load.steps)
        if replica is None:
            return [load.warming(is_over=True)]
        self._end_load(load, is_good=True)
        return [load.warming(is_over=True), ModelLoaded(load.spec.slice_id, load.number, replica)]

    def _end_load(self, load: _SideLoad, *, is_good: bool = False) -> None:
        load.is_over = True
        load.steps = None  # with all that it held
        if load in self._warming:
            self._warming.remove(load)
        if is_good:
            self._ended += 1
        else:  # once this call is over, which may still hold what is to go
            self._put(_Collect(self._ended > load.before))

    def _load(self, spec: SliceSpec, device: BlockingDevice) -> ExecutorEvent:
        """Model by model, so that one which raises leaves only itself out."""
        replicas: list[ReplicaInfo] = []
        left_out: list[LeftOut] = []
        for model in spec.models:
            self.post(LoadBegins(spec.slice_id, model.model_id))
            try:
                replicas += device.load(replace(spec, models=(model,)))
            except BaseException as error:  # noqa: BLE001  as above
                reason = device.explain(error)[:REASON_CHARS_MAX]
                if device.is_broken:
                    return DeviceBroken(reason)
                left_out.append(LeftOut(spec.slice_id, model.model_id, reason))
        if left_out:
            device.collect(is_frozen=False)
        return loaded(spec, replicas, left_out)

    def _errors(self, work: _Work, error: BaseException) -> list[ExecutorEvent]:
        if self._device is None:  # it could not even be made: torch is not installed
            event = self._failed(work, error_text(error))
        else:
            reason = self._device.explain(error)[:REASON_CHARS_MAX]
            if self._device.is_broken:
                return [DeviceBroken(reason)]
            event = self._failed(work, reason)
            if isinstance(work, Job) and (largest := self._device.shrunk(work, error)) is not None:
                assert event is not None, "a job that failed has somebody to tell"
                return [Shrunk(work.slice_id, work.model_id, largest), event]
        return [event] if event is not None else []

    def _failed(self, work: _Work, reason: str) -> ExecutorEvent | None:
        match work:
            case SliceSpec(slice_id=slice_id):
                return LoadFailed(slice_id, reason)
            case _SideLoad():
                return ModelLoaded(work.spec.slice_id, work.number, None, reason)
            case Job(slice_id=slice_id, batch_id=batch_id):
                return RunFailed(slice_id, batch_id, reason)
            case _:
                return None
