"""From what was found to a placement: slices with bounded batches, and batch sizes for GPUs shared in time."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from fabric.ids import ModelId
from policies.placement.common.base import (
    Decision,
    GpuSlot,
    PlacedModelInput,
    Placement,
    PlannedModel,
    PlannedSlice,
    Profiles,
)
from policies.placement.common.conditions import Conditions
from policies.placement.common.demands import rate_of
from policies.placement.tenuto.goodput import Cluster, GoodputModel
from policies.placement.tenuto.task import Item, PlacementTask, fillable, forming_ms, worthwhile_batches

_CALM = 0.85  # of the time, batches are made larger until the GPUs are no busier than this


def placement_of(task: PlacementTask, model: GoodputModel, cluster: Cluster) -> Placement:
    """Fullest GPUs first. A replica's part of the rate is its part of the model's capacity."""
    forecast = model.forecast(cluster)
    busy = [min(1.0, one) for one in forecast.busy]
    found: list[tuple[int, Item, float, float]] = []
    for k, patterns in enumerate(cluster):
        gpus = iter(task.classes[k].gpus)
        for pattern, count in sorted(patterns.items(), key=lambda entry: (-len(entry[0]), entry[0])):
            for _ in range(count):
                gpu = next(gpus)
                found += [(gpu.index, *replica) for replica in model.replicas(k, pattern, busy)]
    carried = [0.0] * len(task.models)
    for _, item, _, rps in found:
        carried[item.model] += rps
    slices = tuple(
        PlannedSlice(
            gpu,
            None,
            (
                PlannedModel(
                    item.running.model_id,
                    item.batch,
                    forecast.served_rps[item.model] * rps / carried[item.model],
                    predicted_ms=factor * item.exec_ms,
                    batch_max=item.batch,
                ),
            ),
        )
        for gpu, item, factor, rps in sorted(found, key=lambda one: (one[0], one[1].model, one[1].batch))
    )
    decisions = []
    for m, wanted in enumerate(task.models):
        mine = [(item, factor) for _, item, factor, _ in found if item.model == m]
        sizes = ", ".join(str(item.batch) for item, _ in mine) or "none"
        slowest = max((factor for _, factor in mine), default=1.0)
        metrics = {
            "served_rps": forecast.served_rps[m],
            "busy": min(forecast.busy[m], 1e9),
            "slowdown_max": slowest,
        }
        decisions.append(Decision(str(wanted.model_id), f"replicas of batch {sizes}", metrics))
    return Placement(slices, (), (), forecast.total_rps, tuple(decisions))


def with_batches(
    plan: Placement,
    models: Sequence[PlacedModelInput],
    gpus: Sequence[GpuSlot],
    profiles: Profiles,
    conditions: Conditions,
) -> Placement:
    """The plan of `symphony` with a batch size for each model: small ones, until the GPUs are calm.

    The smallest first; while the GPUs are busier than that, the model whose next size saves most time gets it.
    """
    type_of = {gpu.index: gpu.gpu_type for gpu in gpus}
    hosts: dict[ModelId, list[str]] = {}
    for planned in plan.slices:
        for entry in planned.models:
            hosts.setdefault(entry.model_id, []).append(type_of[planned.gpu])
    ladders: dict[ModelId, list[tuple[int, float]]] = {}
    busy: dict[ModelId, int] = {}
    for model in models:
        types = hosts.get(model.model_id, [])
        if not types:
            continue
        exec_ms = _slowest([profiles[model.model_id, t].exec_table() for t in types])
        spare_ms = model.slo_ms - conditions.delay_ms(1)
        sizes = [
            size
            for size in worthwhile_batches(exec_ms, spare_ms / 2, fillable(model, conditions))
            if forming_ms(model, size, conditions) + 2 * exec_ms[size - 1] <= spare_ms
        ] or [1]
        per_gpu_rps = rate_of(model) / len(types)
        ladders[model.model_id] = [(size, per_gpu_rps / 1000 * exec_ms[size - 1] / size) for size in sizes]
        busy[model.model_id] = 0
    while sum(ladders[m][step][1] for m, step in busy.items()) > _CALM:
        growable = [m for m, step in busy.items() if step + 1 < len(ladders[m])]
        if not growable:
            break
        saves = {m: ladders[m][busy[m]][1] - ladders[m][busy[m] + 1][1] for m in growable}
        busy[max(growable, key=saves.__getitem__)] += 1

    def sized(entry: PlannedModel, gpu_type: str) -> PlannedModel:
        profile = profiles[entry.model_id, gpu_type]
        batch = min(ladders[entry.model_id][busy[entry.model_id]][0], profile.batch_size_max)
        return replace(entry, batch=batch, predicted_ms=profile.exec_ms(batch))

    slices = tuple(
        replace(planned, models=tuple(sized(entry, type_of[planned.gpu]) for entry in planned.models))
        for planned in plan.slices
    )
    return replace(plan, slices=slices)


def _slowest(tables: Sequence[Sequence[float]]) -> list[float]:
    """By batch size the longest run time among GPU types; one whose profile ends before runs its largest batch."""
    return [
        max(table[min(place, len(table) - 1)] for table in tables) for place in range(max(map(len, tables)))
    ]
