"""Builders for the worker: a test names only what matters to it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

from fabric.ids import BatchId, FrontendId, Incarnation, ModelId, NodeId, SliceId
from fabric.messages import (
    Directory,
    FrontendInfo,
    Host,
    Inputs,
    LoaderSpec,
    ModelSpec,
    Part,
    ReplicaInfo,
    RunBatch,
    SeqRun,
    SliceInfo,
    SliceSpec,
)
from roles.gpu_worker.core import WorkerCore
from roles.gpu_worker.events import InputsCame, SchedulerAnswers, WorkerAction
from roles.gpu_worker.executors.base import Loaded
from roles.gpu_worker.peer_checks import AGENT
from roles.gpu_worker.registration import WorkerIdentity
from roles.runtime.core import SCHEDULER, Handle, Heard, Send, Tick

SLICE = SliceId("node-0/gpu0/0")
MODEL = ModelId("resnet50")
BOOT = Incarnation("a0a0a0a0")
FRONTEND = FrontendId("frontend-0")
OTHER_FRONTEND = FrontendId("frontend-1")
SCHEDULER_AT = ("tcp://127.0.0.1:1",)


class SteppingClock:
    """Every look takes 10 ms, so every run does: what is decided by measured times does not depend on this machine's load."""

    def __init__(self) -> None:
        self._now_ms = 0.0

    def now_ms(self) -> float:
        self._now_ms += 10.0
        return self._now_ms


ActionT = TypeVar("ActionT")
MessageT = TypeVar("MessageT")

_handles = itertools.count(1)


def worker_core() -> WorkerCore:
    return WorkerCore(WorkerIdentity("worker-0", BOOT, 4242, ("tcp://127.0.0.1:2",)))


def model_spec(
    model_id: str = MODEL,
    exec_ms: Sequence[float] = (6.0, 7.0, 8.0, 9.0),
    batch_size_max: int | None = None,
    loader: LoaderSpec | None = None,
    slo_ms: float = 25.0,
) -> ModelSpec:
    size = len(exec_ms) if batch_size_max is None else batch_size_max
    return ModelSpec(ModelId(model_id), slo_ms, size, loader, tuple(exec_ms))


def slice_spec(
    slice_id: str = SLICE, models: Sequence[ModelSpec] = (), device: str = "emulated"
) -> SliceSpec:
    return SliceSpec(SliceId(slice_id), 0, device, None, tuple(models) or (model_spec(),))


def host(*slices: SliceSpec, addresses: tuple[str, ...] = SCHEDULER_AT) -> Heard:
    return Heard(AGENT, Host(NodeId("node-0"), slices or (slice_spec(),), addresses))


def loaded(spec: SliceSpec | None = None) -> Loaded:
    spec = spec or slice_spec()
    return Loaded(
        spec.slice_id,
        tuple(ReplicaInfo(model.model_id, model.batch_size_max, model.exec_ms) for model in spec.models),
    )


def serving_core(*slices: SliceSpec) -> WorkerCore:
    """Hosts the slices, all ready, and a scheduler lists them; time is 0."""
    core = worker_core()
    specs = slices or (slice_spec(),)
    core.handle(Tick(), 0.0)
    core.handle(host(*specs), 0.0)
    core.handle(SchedulerAnswers(), 0.0)
    for spec in specs:
        core.handle(loaded(spec), 0.0)
    core.handle(worker_directory(*(spec.slice_id for spec in specs)), 0.0)
    return core


def part(*runs: tuple[int, int], frontend_id: str = FRONTEND) -> Part:
    return Part(FrontendId(frontend_id), tuple(SeqRun(*run) for run in runs))


def run_batch(
    *parts: Part,
    batch_id: int = 1,
    start_in_ms: float = 0.0,
    latest_in_ms: float = 10.0,
    expires_in_ms: float | None = None,
    slice_id: str = SLICE,
    incarnation: str = BOOT,
    model_id: str = MODEL,
    late_ms: float = 0.0,
) -> Heard:
    message = RunBatch(
        BatchId(batch_id),
        SliceId(slice_id),
        Incarnation(incarnation),
        ModelId(model_id),
        parts or (part((0, 2)),),
        start_in_ms,
        latest_in_ms,
        latest_in_ms if expires_in_ms is None else expires_in_ms,
    )
    return Heard(SCHEDULER, message, late_ms)


def inputs(
    *live_seqs: int,
    batch_id: int = 1,
    number: int = 0,
    frontend_id: str = FRONTEND,
    slice_id: str = SLICE,
    incarnation: str = BOOT,
    model_id: str = MODEL,
    size_bytes: int = 100,
) -> InputsCame:
    message = Inputs(
        BatchId(batch_id),
        SliceId(slice_id),
        Incarnation(incarnation),
        ModelId(model_id),
        FrontendId(frontend_id),
        number,
        live_seqs,
    )
    return InputsCame(message, Handle(next(_handles)), size_bytes)


def worker_directory(*slices: str, incarnation: str = BOOT) -> Heard:
    listed = tuple(
        SliceInfo(SliceId(name), Incarnation(incarnation), NodeId("node-0"), ()) for name in slices
    )
    frontends = (FrontendInfo(FRONTEND, Incarnation("f0f0f0f0"), ("tcp://127.0.0.1:3",)),)
    return Heard(SCHEDULER, Directory(1, (), listed, frontends))


def actions_of(kind: type[ActionT], actions: Sequence[WorkerAction]) -> list[ActionT]:
    return [action for action in actions if isinstance(action, kind)]


def sent(kind: type[MessageT], actions: Sequence[WorkerAction]) -> list[MessageT]:
    return [
        action.message for action in actions if isinstance(action, Send) and isinstance(action.message, kind)
    ]
