"""An application as clients see it, as if it were a model: from what is known of the models of its stages now."""

from __future__ import annotations

import math
from collections.abc import Iterable

from fabric.errors import ModelNotFound, NoReplica, RequestError, nothing_ready
from fabric.ids import ModelId
from fabric.messages import ModelInfo, TensorInfo
from policies.graphs.graph import Stage
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
        asks=tuple(dict.fromkeys(stage.model_id for stage in served.plan.graph.stages)),
    )


def lack_of(name: str, stages: Iterable[Stage], shards: Shards, now_ms: float) -> NotAdmitted | None:
    """What the application of that name lacks for longest of what these stages need; None: all of that is ready.

    `retry_after_ms`: how long until a slice should serve that, 0 where it is late; None: none is expected.
    """
    lacks = []
    for stage in stages:
        info = shards.models.get(stage.model_id)
        if stage.is_optional or (info is not None and info.replicas):
            continue
        error, reason = why_unserved(stage.model_id, shards)
        reason = f"stage {stage.name} of application {name!r}: {reason}"
        lacks.append(NotAdmitted(error, reason, shards.coming_in_ms(stage.model_id, now_ms)))
    return max(lacks, key=_wait_ms, default=None)


def why_unserved(model_id: ModelId, shards: Shards) -> tuple[type[RequestError], str]:
    """Of a model that nothing serves, or that no directory lists."""
    if model_id in shards.models:
        return NoReplica, nothing_ready(model_id)
    if shards.unheard:
        return NoReplica, f"model {model_id!r}: {unheard_reason(shards.unheard)}"
    return ModelNotFound, f"no model {model_id!r} is served"


def _wait_ms(lack: NotAdmitted) -> float:
    return math.inf if lack.retry_after_ms is None else lack.retry_after_ms
