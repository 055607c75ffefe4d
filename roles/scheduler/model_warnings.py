"""What an operator should know of models that are served: smaller batches than asked for, SLOs that hardly hold, heads that share nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from fabric.ids import ModelId
from fabric.messages import ModelWarning, ReplicaInfo
from roles.scheduler.fleet import SliceRecord


def model_warnings(
    records: Iterable[SliceRecord], slos_ms: Mapping[ModelId, float]
) -> tuple[ModelWarning, ...]:
    """Of the models with ready replicas: at most three of each, however many slices host it."""
    slices = Counter(record.hosting for record in records if record.is_ready)
    hosted: dict[ModelId, Counter[ReplicaInfo]] = {model_id: Counter() for model_id in slos_ms}
    for hosting, count in slices.items():
        for replica in hosting.replicas:
            if replica.model_id in hosted:
                hosted[replica.model_id][replica] += count
    return tuple(
        ModelWarning(model_id, reason)
        for model_id, replicas in hosted.items()
        if replicas
        for reason in (
            _smaller_batches(replicas),
            _hardly_held(replicas, slos_ms[model_id]),
            _not_merged(replicas),
        )
        if reason
    )


def _smaller_batches(replicas: Counter[ReplicaInfo]) -> str:
    limited = [one for one in replicas if one.reason]
    if not limited:
        return ""
    smallest = min(limited, key=lambda one: one.batch_size_max)
    count = sum(replicas[one] for one in limited)
    where = "" if count == replicas.total() else f" on {count} of {replicas.total()} slices"
    return f"batches of at most {smallest.batch_size_max}{where}, because {smallest.reason}"


def _not_merged(replicas: Counter[ReplicaInfo]) -> str:
    reason = next((one.not_merged for one in replicas if one.not_merged), "")
    return f"its heads run one after the other, because {reason}" if reason else ""


def _hardly_held(replicas: Counter[ReplicaInfo], slo_ms: float) -> str:
    """The staggered bound of Symphony (3.3) for batches of one, with as many slices as host the model."""
    exec_ms = min(one.exec_ms[0] for one in replicas)
    if exec_ms > slo_ms:
        return (
            f"a request alone takes {exec_ms:.4g} ms, over its SLO of {slo_ms:g} ms: none is answered in time"
        )
    if (1 + 1 / replicas.total()) * exec_ms > slo_ms:
        return (
            f"a request alone takes {exec_ms:.4g} ms of its SLO of {slo_ms:g} ms:"
            " one that has to wait for another may be late"
        )
    return ""
