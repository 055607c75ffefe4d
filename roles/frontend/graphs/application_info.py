"""An application as clients see it, as if it were a model: from what is known of the models of its stages now."""

from __future__ import annotations

import math

from fabric.errors import ModelNotFound, NoReplica, nothing_ready
from fabric.ids import ModelId
from fabric.messages import ModelInfo, TensorInfo
from roles.applications.served import ServedApplication
from roles.frontend.admission import NotAdmitted, unheard_reason
from roles.frontend.shards import Shards


def application_info(served: ServedApplication, shards: Shards, lack: NotAdmitted | None) -> ModelInfo:
    """With what its first stages take, and as many replicas as the needed stage with the fewest; none where it lacks one."""
    inputs: dict[str, TensorInfo] = {}
    image = None
    replicas = []
    is_idempotent = True
    for stage in served.plan.graph.stages:
        info = shards.models.get(stage.model_id)
        if info is None:
            continue
        if not stage.is_optional:
            replicas.append(info.replicas)
        is_idempotent &= info.is_idempotent
        if not stage.after and stage.name not in served.glue:
            inputs.update((tensor.name, tensor) for tensor in info.inputs)
            image = info.image or image
    return ModelInfo(
        ModelId(served.plan.name),
        served.plan.slo_ms,
        tuple(inputs.values()),
        image=image,
        replicas=min(replicas, default=1) if lack is None else 0,
        is_idempotent=is_idempotent,
        coming_in_ms=None if lack is None else lack.retry_after_ms or None,
    )


def lack_of(served: ServedApplication, shards: Shards, now_ms: float) -> NotAdmitted | None:
    """What it lacks for longest of what it needs; None: all of that is ready.

    `retry_after_ms`: how long until a slice should serve that, 0 where it is late; None: none is expected.
    """
    lacks = []
    for stage in served.plan.graph.stages:
        info = shards.models.get(stage.model_id)
        if info is not None and (info.replicas or stage.is_optional):
            continue
        where = f"stage {stage.name} of application {served.plan.name!r}"
        if info is not None:
            coming_in_ms = shards.coming_in_ms(stage.model_id, now_ms)
            lacks.append(NotAdmitted(NoReplica, f"{where}: {nothing_ready(stage.model_id)}", coming_in_ms))
        elif shards.unheard:
            reason = f"model {stage.model_id!r}: {unheard_reason(shards.unheard)}"
            lacks.append(NotAdmitted(NoReplica, f"{where}: {reason}"))
        else:
            lacks.append(NotAdmitted(ModelNotFound, f"{where}: no model {stage.model_id!r} is served"))
    return max(lacks, key=_wait_ms, default=None)


def _wait_ms(lack: NotAdmitted) -> float:
    return math.inf if lack.retry_after_ms is None else lack.retry_after_ms
