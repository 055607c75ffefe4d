"""A later stage of a pipeline: it runs what the stage before gives, in that order, and passes on what comes of it.

Its worker says what to load. One model is loaded at a time, one batch runs at a time. A batch that the stage before gave too late for its
deadlines is not begun: it ends here, and its worker hears that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from msgspec import Struct

from fabric.ids import BatchId, ModelId, SliceId
from fabric.messages import Activations, LoadStage, ReplicaInfo, StageFailed, StageLoaded, UnloadStage
from roles.gpu_worker.batch_start_rules import LATE_TOLERANCE_MS
from roles.gpu_worker.events import BatchRan, End
from roles.gpu_worker.executors.base import (
    DeviceBroken,
    LeftFirstStage,
    LoadBegins,
    Loaded,
    LoadFailed,
    ModelLoaded,
    RunAborted,
    RunExpired,
    RunFailed,
    Shrunk,
    Warming,
)
from roles.runtime.core import Handle, Tick

WAITING_MAX = 256  # a worker has a batch for each GPU and one more on the way


class StageAsked(Struct, frozen=True, gc=False):
    """The worker says what to load, or to forget."""

    message: LoadStage | UnloadStage


class ActivationsCame(Struct, frozen=True, gc=False):
    """The stage before is done with a batch; the shell keeps the tensors as `payload`."""

    message: Activations
    payload: Handle
    late_ms: float = 0.0


StageEvent = (
    StageAsked
    | ActivationsCame
    | BatchRan
    | LoadBegins
    | Loaded
    | LoadFailed
    | ModelLoaded
    | Warming
    | LeftFirstStage
    | RunFailed
    | RunExpired
    | RunAborted
    | Shrunk
    | DeviceBroken
    | Tick
)


class LoadPart(Struct, frozen=True, gc=False):
    """Load that part; `is_beside`: while other models of it serve."""

    message: LoadStage
    is_beside: bool


class ForgetModel(Struct, frozen=True, gc=False):
    """Nobody wants it any more; what it was loading is given up."""

    slice_id: SliceId
    model_id: ModelId


class RunStage(Struct, frozen=True, gc=False):
    """Run a batch, whose inputs are these."""

    message: Activations
    payload: Handle


class PassOn(Struct, frozen=True, gc=False):
    """To the next stage, or, of the last one, back to the worker. The payload is released after that."""

    message: Activations
    payload: Handle


class TellWorker(Struct, frozen=True, gc=False):
    """Something other than a batch."""

    message: StageLoaded | StageFailed


class ReleaseInputs(Struct, frozen=True, gc=False):
    """Nobody needs these tensors any more."""

    payload: Handle


StageAction = LoadPart | ForgetModel | RunStage | PassOn | TellWorker | ReleaseInputs | End


class _Waiting(Struct, frozen=True):
    message: Activations
    payload: Handle
    expires_at_ms: float


class StageCore:
    """Sans-IO: see `roles/runtime/core.py`. `stage`: its number; the worker's own is 0."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._asked: deque[LoadStage] = deque()
        self._loading: LoadStage | None = None
        self._has_loaded = False
        self._exec_ms: dict[ModelId, tuple[float, ...]] = {}
        self._shrunk: dict[BatchId, int] = {}
        self._waiting: deque[_Waiting] = deque()
        self._running: _Waiting | None = None

    @property
    def wake_at_ms(self) -> float | None:
        """It waits for others only."""
        return None

    def handle(self, event: StageEvent, now_ms: float) -> Sequence[StageAction]:
        """Take one event; answer what to do, in order."""
        match event:
            case StageAsked(message):
                if isinstance(message, UnloadStage):
                    return self._forget(message.slice_id, message.model_id)
                self._asked.append(message)
                return self._load_next()
            case ActivationsCame():
                return self._take(event, now_ms)
            case BatchRan():
                return self._pass_on(event, now_ms)
            case RunFailed(_, _, reason):
                assert self._running is not None, "it was told to"
                return self._end(self._running, reason, now_ms)
            case Shrunk(_, model_id, batch_size_max):
                assert self._running is not None, "it was told to"
                self._shrunk[self._running.message.batch_id] = batch_size_max
                if model_id in self._exec_ms:  # it may have been forgotten while its batch ran
                    self._exec_ms[model_id] = self._exec_ms[model_id][:batch_size_max]
                return []
            case Loaded():
                self._has_loaded = True
                return self._loaded(event.replicas[0] if event.replicas else None, "")
            case LoadFailed(_, reason):
                return self._loaded(None, reason)
            case ModelLoaded():
                is_it = self._loading is not None and self._loading.number == event.number
                return self._loaded(event.replica, event.reason) if is_it else []
            case DeviceBroken(reason):
                return [End(1, reason)]
            case LoadBegins() | Warming() | LeftFirstStage() | RunExpired() | RunAborted() | Tick():
                return []

    # ------------------------------------------------------------ models

    def _load_next(self) -> list[StageAction]:
        if self._loading is not None or not self._asked:
            return []
        self._loading = self._asked.popleft()
        return [LoadPart(self._loading, self._has_loaded)]

    def _loaded(self, replica: ReplicaInfo | None, reason: str) -> list[StageAction]:
        asked, self._loading = self._loading, None
        assert asked is not None, "it was told to"
        if replica is None:
            told = StageLoaded(asked.number, self._stage, (), reason=reason or "its stage did not load")
        else:
            self._exec_ms[replica.model_id] = replica.exec_ms
            told = StageLoaded(
                asked.number,
                self._stage,
                replica.exec_ms,
                replica.outputs,
                replica.memory_bytes,
                replica.reason,
            )
        return [TellWorker(told), *self._load_next()]

    def _forget(self, slice_id: SliceId, model_id: ModelId) -> list[StageAction]:
        self._asked = deque(one for one in self._asked if one.spec.models[0].model_id != model_id)
        self._exec_ms.pop(model_id, None)
        actions: list[StageAction] = [ForgetModel(slice_id, model_id)]
        if (
            self._loading is not None
            and self._loading.spec.models[0].model_id == model_id
            and self._has_loaded
        ):
            self._loading = None  # what loads beside others is given up, and nothing is heard of it
            actions += self._load_next()
        return actions

    # ------------------------------------------------------------ batches

    def _take(self, event: ActivationsCame, now_ms: float) -> list[StageAction]:
        message = event.message
        one = _Waiting(
            message, event.payload, now_ms - event.late_ms + message.expires_in_ms + LATE_TOLERANCE_MS
        )
        if message.model_id not in self._exec_ms or len(self._waiting) >= WAITING_MAX:
            return [ReleaseInputs(event.payload), self._failed(one, "its stage does not have the model")]
        self._waiting.append(one)
        return self._run_next(now_ms)

    def _run_next(self, now_ms: float) -> list[StageAction]:
        actions: list[StageAction] = []
        while self._running is None and self._waiting:
            one = self._waiting.popleft()
            if one.expires_at_ms < now_ms:
                actions += [
                    ReleaseInputs(one.payload),
                    self._failed(one, f"stage {self._stage} got it too late", is_expired=True),
                ]
            else:
                self._running = one
                actions.append(RunStage(one.message, one.payload))
        return actions

    def _pass_on(self, event: BatchRan, now_ms: float) -> list[StageAction]:
        one = self._running
        assert one is not None, "it was told to"
        if event.rejected:
            return [ReleaseInputs(event.outputs), *self._end(one, event.rejected[0].reason, now_ms)]
        self._running = None
        given = one.message
        # The next stage may begin later than this one by what this one takes.
        expires_in_ms = max(0.0, one.expires_at_ms - LATE_TOLERANCE_MS + event.exec_ms - now_ms)
        message = Activations(
            given.batch_id,
            given.slice_id,
            given.model_id,
            self._stage,
            given.exec_ms + event.exec_ms,
            expires_in_ms,
        )
        return [*self._run_next(now_ms), PassOn(message, event.outputs), ReleaseInputs(one.payload)]

    def _end(self, one: _Waiting, reason: str, now_ms: float) -> list[StageAction]:
        self._running = None
        return [*self._run_next(now_ms), ReleaseInputs(one.payload), self._failed(one, reason)]

    def _failed(self, one: _Waiting, reason: str, *, is_expired: bool = False) -> TellWorker:
        message = one.message
        shrunk_to = self._shrunk.pop(message.batch_id, 0)
        told = StageFailed(
            message.batch_id,
            message.slice_id,
            message.model_id,
            self._stage,
            reason,
            is_expired,
            shrunk_to,
        )
        return TellWorker(told)
