"""What a placement can serve of each application, and which stage limits it: for `tenuto plan --why`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fabric.errors import ProfileError
from fabric.ids import ModelId
from policies.graphs import ApplicationPlan
from policies.placement.common.base import (
    Decision,
    GpuSlot,
    Placement,
    PlannedModel,
    PlannedSlice,
    Profiles,
)
from profiles.model import ModelProfile


def limits(
    plans: Sequence[tuple[ApplicationPlan, Sequence[Mapping[str, float]]]],
    placement: Placement,
    gpus: Sequence[GpuSlot],
    profiles: Profiles,
    slo_ms: Mapping[ModelId, float],
) -> list[Decision]:
    """One for each application whose run times are known wherever it is hosted. Other requests of its models are left out of account.

    With each plan what it asks of its stages, at each moment at which that changes; that counts at which it is served least.
    A batch waits for as long as the one before it, as in squishy packing, and both have the SLO of its model.
    """
    from policies.graphs.bottleneck import bottleneck  # noqa: PLC0415  NumPy: few roles have applications

    gpu_types = {gpu.index: gpu.gpu_type for gpu in gpus}
    found = []
    for plan, demands in plans:
        asked = {stage.model_id for stage in plan.graph.stages}
        hosted = (
            (one.model_id, gpu_types[planned.gpu]) for planned in placement.slices for one in planned.models
        )
        if not plan.is_known or any(one not in profiles for one in hosted if one[0] in asked):
            continue
        slices = [
            {
                stage.name: _rps(
                    profiles[model.model_id, gpu_types[planned.gpu]],
                    planned,
                    model,
                    slo_ms[model.model_id],
                )
                for model in planned.models
                for stage in plan.graph.stages
                if stage.model_id == model.model_id
            }
            for planned in placement.slices
        ]
        limit = min(
            (bottleneck(demand, slices) for demand in demands if any(demand.values())),
            key=lambda one: one.rate_rps,
        )
        metrics = {"requests/s at most": limit.rate_rps}
        metrics |= {f"{stage} % of what limits it": 100 * part for stage, part in limit.parts.items()}
        found.append(Decision(f"application {plan.name}", f"bottleneck: stage {limit.stage}", metrics))
    return found


def _rps(profile: ModelProfile, planned: PlannedSlice, model: PlannedModel, slo_ms: float) -> float:
    size_max = min(profile.batch_size_max, model.batch_max or profile.batch_size_max)
    try:
        if planned.following and len(planned.gpus) in profile.cuts:
            tables = profile.stage_tables(len(planned.gpus))
        else:  # a profile of a model in ranks is of all of them together
            tables = (profile.exec_table(planned.share_percent),)
    except ProfileError:  # planned for a share that nobody measured
        return 0.0
    fitting: list[float] = []
    for size, parts_ms in enumerate(list(zip(*tables, strict=True))[:size_max], 1):
        slowest_ms = max(parts_ms)  # a pipeline takes a batch as often as that
        if size == 1 or slowest_ms + sum(parts_ms) <= slo_ms:
            fitting.append(1000 * size / slowest_ms)
    return max(fitting)
