"""What the active schedulers of all shards say, as one: a cluster looks the same to its operator however it is divided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from fabric.ids import ModelId
from fabric.messages import Changed, ModelInfo, PlanReport, StatusListed

_LATELY_MAX = 16
STATUSES = ("ok", "partial", "failed", "refused")
"""Of a `Changed`, the worst last."""


class ShardReport(Struct, frozen=True):
    """One shard. `scheduler`: its active one's role id; empty: none answers, and all the rest is unknown."""

    shard: int
    scheduler: str
    epoch: int = 0
    models: Sequence[ModelId] = ()
    slices: int = 0
    gpus: int = 0
    standbys: Sequence[str] = ()


def shard_of(status: StatusListed) -> int:
    """Whose scheduler says that."""
    return 0 if status.standing is None else status.standing.shard


def shard_report(status: StatusListed) -> ShardReport:
    """Of the shard that its active scheduler describes."""
    standing = status.standing
    return ShardReport(
        shard_of(status),
        status.role_id,
        0 if standing is None else standing.epoch,
        tuple(model.model_id for model in status.models),
        len(status.slices),
        len(status.gpus),
        () if standing is None else tuple(one.scheduler_id for one in standing.standbys),
    )


def merged(shards: Sequence[StatusListed]) -> StatusListed:
    """All shards as one scheduler would describe them; `role_id`, `pid` and `standing` are the first one's."""
    if len(shards) == 1:
        return shards[0]
    first, served = shards[0], _served(shards)
    queued: Counter[ModelId] = Counter()
    for status in shards:
        queued.update(status.queued)  # type: ignore[arg-type]  # numbers of any kind
    return replace(
        first,
        slices=tuple(one for status in shards for one in status.slices),
        models=tuple(model for model, _ in served.values()),
        counters=_counters(status.counters for status in shards),
        gpus=tuple(one for status in shards for one in status.gpus),
        plan=_plan([status.plan for status in shards if status.plan is not None], served),
        warnings=tuple(one for status in shards for one in status.warnings),
        queued=dict(queued),
    )


def combined(answers: Sequence[tuple[int, Changed]]) -> Changed:
    """What became of one change that several shards were asked for, each for its part: (shard, its answer)."""
    shard, worst = max(answers, key=lambda one: STATUSES.index(one[1].status))
    reason = worst.reason
    if reason and len(answers) > 1:
        done = did_its_part(answers)
        reason = f"shard {shard}: {reason}{f'; {done}' if done else ''}"
    return replace(
        worst,
        reason=reason,
        started=sum(one.started for _, one in answers),
        ended=sum(one.ended for _, one in answers),
        kept=sum(one.kept for _, one in answers),
        changed=sum(one.changed for _, one in answers),
        unplaced=tuple(unplaced for _, one in answers for unplaced in one.unplaced),
    )


def did_its_part(answers: Sequence[tuple[int, Changed]]) -> str:
    """Which shards have changed, as a sentence; empty: none."""
    done = dict.fromkeys(shard for shard, one in answers if one.status in ("ok", "partial"))
    return f"shard {', '.join(map(str, done))} did its part" if done else ""


def _served(shards: Sequence[StatusListed]) -> Mapping[ModelId, tuple[ModelInfo, PlanReport | None]]:
    """Each model once, with the plan of the shard that serves it: while it moves, two list it."""
    best: dict[ModelId, tuple[ModelInfo, PlanReport | None]] = {}
    for status in shards:
        for model in status.models:
            known = best.get(model.model_id, (None, None))[0]
            if known is None or (model.replicas > 0, model.term) > (known.replicas > 0, known.term):
                best[model.model_id] = model, status.plan
    return best


def _counters(shards: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sums; the largest of what is measured in ms, but for CPU time, and of the frontends, which all shards have."""
    total: Counter[str] = Counter()
    largest: dict[str, float] = {}
    for counters in shards:
        for name, value in counters.items():
            if name == "frontends" or (name.endswith(("_ms", "_ms_max")) and name != "cpu_ms"):
                largest[name] = max(value, largest.get(name, value))
            else:
                total[name] += value  # type: ignore[assignment]  # numbers of any kind
    return {**total, **largest}


def _plan(
    plans: Sequence[PlanReport], served: Mapping[ModelId, tuple[ModelInfo, PlanReport | None]]
) -> PlanReport | None:
    if not plans:
        return None
    busy = next((plan for plan in plans if plan.state != "steady"), plans[0])
    return PlanReport(
        busy.state,
        busy.reason,
        sum(plan.gpus for plan in plans),
        sum(plan.gpus_advised for plan in plans),
        tuple(
            one for plan in plans for one in plan.models if served.get(one.model_id, (None, plan))[1] is plan
        ),
        sum(plan.moves_done for plan in plans),
        sum(plan.moves_failed for plan in plans),
        tuple(one for plan in plans for one in plan.unplaced),
        tuple(line for plan in plans for line in plan.lately)[-_LATELY_MAX:],
        tuple(ref for plan in plans for ref in plan.drained),
    )
