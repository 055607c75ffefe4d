"""Builders: a test names only what matters to it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from fabric.frames import REQUEST_BYTES_MAX
from fabric.ids import BatchId, FrontendId, Incarnation, ModelId, NodeId, PeerId, SliceId
from fabric.messages import (
    Directory,
    FrontendInfo,
    Grant,
    ImagePreprocess,
    Infer,
    ModelInfo,
    Outputs,
    SeqRun,
    SliceInfo,
    TensorInfo,
    TensorSpec,
)
from roles.frontend.events import Asked, Computed, FrontendSettings, SchedulerSaid
from roles.runtime.core import Handle

ActionT = TypeVar("ActionT")


def of_type(kind: type[ActionT], actions: Sequence[object]) -> list[ActionT]:
    return [action for action in actions if isinstance(action, kind)]


# ---------------------------------------------------------------- frontend

FRONTEND = FrontendId("frontend-0")
BOOT = Incarnation("f0f0f0f0")
CLIENT = PeerId("client/1")
DIGITS = ModelId("digits")
PIXELS = TensorInfo("image", "float32", (1, 8, 8))
IMAGENET = ImagePreprocess("input", 256, 224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
SLICE = SliceId("node-0/gpu0/0")
WORKER_BOOT = Incarnation("a0a0a0a0")

_handles = itertools.count(1_000_000)


def frontend_settings(
    request_bytes_max: int = REQUEST_BYTES_MAX,
    pending_max: int = 65_536,
    pending_bytes_max: int = 1 << 30,
    shards: int = 1,
) -> FrontendSettings:
    addresses = ("tcp://127.0.0.1:1",)
    return FrontendSettings(
        FRONTEND, BOOT, addresses, request_bytes_max, pending_max, pending_bytes_max, shards=shards
    )


def model_info(
    model_id: str = DIGITS,
    slo_ms: float = 100.0,
    inputs: tuple[TensorInfo, ...] = (PIXELS,),
    image: ImagePreprocess | None = None,
    replicas: int = 1,
    term: int = 0,
    coming_in_ms: float | None = None,
) -> ModelInfo:
    return ModelInfo(
        ModelId(model_id), slo_ms, inputs, (), image, replicas, coming_in_ms=coming_in_ms, term=term
    )


def slice_info(slice_id: str = SLICE, incarnation: str = WORKER_BOOT) -> SliceInfo:
    return SliceInfo(SliceId(slice_id), Incarnation(incarnation), NodeId("node-0"), ("tcp://127.0.0.1:2",))


def directory(
    models: Sequence[ModelInfo] = (model_info(),),
    slices: Sequence[SliceInfo] = (slice_info(),),
    *,
    lists_frontend: bool = True,
    shard: int = 0,
) -> SchedulerSaid:
    own = (FrontendInfo(FRONTEND, BOOT, ()),) if lists_frontend else ()
    return SchedulerSaid(Directory(1, tuple(models), tuple(slices), own), shard=shard)


def asked(
    request_no: int = 1,
    model_id: str = DIGITS,
    budget_ms: float | None = None,
    specs: Sequence[TensorSpec] = (TensorSpec("image", "float32", (1, 8, 8)),),
    client: str = CLIENT,
    late_ms: float = 0.0,
    size_bytes: int | None = None,
    way_ms: float = 0.0,
    priority: int | None = None,
) -> Asked:
    size = sum(int(np.prod(spec.shape)) * np.dtype(spec.dtype).itemsize for spec in specs)
    return Asked(
        PeerId(client),
        Infer(request_no, ModelId(model_id), budget_ms, way_ms, priority),
        late_ms,
        Handle(next(_handles)),
        tuple(specs),
        size if size_bytes is None else size_bytes,
    )


def grant(
    *runs: tuple[int, int],
    batch_id: int = 1,
    slice_id: str = SLICE,
    incarnation: str = WORKER_BOOT,
    model_id: str = DIGITS,
    waited_ms: float = 0.0,
    reason: str = "frontrun",
    shard: int = 0,
) -> SchedulerSaid:
    count = sum(run[1] for run in runs)
    return SchedulerSaid(
        Grant(
            BatchId(batch_id),
            SliceId(slice_id),
            Incarnation(incarnation),
            ModelId(model_id),
            0,
            tuple(SeqRun(*run) for run in runs),
            count,
            0.0,
            waited_ms,
            reason,
        ),
        shard=shard,
    )


def computed(
    *seqs: int,
    batch_id: int = 1,
    slice_id: str = SLICE,
    model_id: str = DIGITS,
    transfer_ms: float = 1.0,
    queue_ms: float = 2.0,
    gpu_ms: float = 3.0,
    specs: Sequence[TensorSpec] | None = None,
) -> Computed:
    outputs = Outputs(
        BatchId(batch_id),
        SliceId(slice_id),
        ModelId(model_id),
        seqs,
        len(seqs),
        transfer_ms,
        queue_ms,
        gpu_ms,
    )
    rows = (TensorSpec("scores", "float32", (len(seqs), 10)),)
    return Computed(outputs, Handle(next(_handles)), rows if specs is None else tuple(specs))
