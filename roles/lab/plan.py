"""A placement as an answer: the contract of `tenuto plan --json`, its cost, and whether it keeps its promises."""

from __future__ import annotations

import math
from collections.abc import Iterable

from policies.placement.common.base import Decision, Placement, PlannedSlice, Unplaced
from policies.slo import BAD_RATE_ALLOWED
from roles.config.cluster import ApplicationConfig, ClusterConfig
from roles.workload.outcomes import ROUNDING_MS

_DECIMALS = 6


def plan_json(
    config: ClusterConfig, policy: str, placement: Placement, *, with_why: bool = False
) -> dict[str, object]:
    """The contract (design section 10): every GPU in file order, unused ones with no slices."""
    slices: dict[int, list[PlannedSlice]] = {gpu.index: [] for gpu in config.gpus}
    for planned in placement.slices:
        slices[planned.gpu].append(planned)
    answer: dict[str, object] = {
        "policy": policy,
        "gpu_count": len(placement.gpus_used),
        "gpus": [
            {
                "gpu": gpu.index,
                "type": gpu.gpu_type,
                "slices": [_slice_json(planned) for planned in slices[gpu.index]],
            }
            for gpu in config.gpus
        ],
        "expected_goodput_rps": rounded(placement.expected_goodput_rps),
        "cost_per_hour": cost_per_hour(config, placement),
        "unplaced": unplaced_json(placement.unplaced),
        "short_rps": {model_id: rounded(rps) for model_id, rps in placement.short_rps.items()},
        "violations": list(placement.violations),
        "applications": {
            one.name: {"stages": _stages_json(one, config.graph_deadlines, placement)}
            for one in config.applications
        },
    }
    if with_why:
        answer["why"] = [_decision_json(decision) for decision in placement.decisions]
    return answer


def unplaced_json(unplaced: Iterable[Unplaced]) -> list[dict[str, object]]:
    """What found no place, in the order of the policy."""
    return [
        {"model": one.model_id, "rate_rps": rounded(one.rate_rps), "reason": one.reason} for one in unplaced
    ]


def cost_per_hour(config: ClusterConfig, placement: Placement) -> float | None:
    """The prices of the GPUs in use, summed; a GPU without a price adds nothing; None where none has one."""
    price_of = {gpu.index: gpu.price_per_hour for gpu in config.gpus}
    used = [price_of[gpu] for gpu in placement.gpus_used] or list(price_of.values())
    if all(price is None for price in used):
        return None
    if not placement.slices:
        return 0.0
    return rounded(math.fsum(price for price in used if price is not None))


def missed_slos(config: ClusterConfig, placement: Placement) -> list[str]:
    """Replicas whose latency, as the policy predicts it, is over their model's SLO, in words."""
    slo_ms = {model.model_id: model.slo_ms for model in config.models}
    return [
        f"{model.model_id} on GPU {planned.gpu}: {model.predicted_ms:.2f} ms expected, SLO {slo_ms[model.model_id]:g} ms"
        for planned in placement.slices
        for model in planned.models
        if model.predicted_ms is not None and model.predicted_ms > slo_ms[model.model_id] + ROUNDING_MS
    ]


def asked_rps(config: ClusterConfig) -> float:
    """What all models are planned for together; one without a rate adds nothing."""
    return math.fsum(model.rate_rps or 0.0 for model in config.models)


def missed_rates(config: ClusterConfig, placement: Placement) -> list[str]:
    """Where the policy's own forecast loses as much of the rates as breaks an SLO, in words: by model where it says of which.

    Parts of rates under `unplaced` are told of there.
    """
    rates_rps = {model.model_id: model.rate_rps or 0.0 for model in config.models}
    missed = [
        f"{model_id}: {rates_rps[model_id] - lost_rps:.1f} of its {rates_rps[model_id]:.1f} r/s expected within its SLO"
        for model_id, lost_rps in placement.short_rps.items()
        if lost_rps >= BAD_RATE_ALLOWED * rates_rps[model_id]
    ]
    expected_rps, all_rps = placement.expected_goodput_rps, asked_rps(config)
    if (
        missed
        or placement.unplaced
        or expected_rps is None
        or all_rps - expected_rps < BAD_RATE_ALLOWED * all_rps
        or not all_rps
    ):
        return missed
    return [f"all models: {expected_rps:.1f} of {all_rps:.1f} r/s expected within their SLOs"]


def rounded(value: float | None) -> float | None:
    """To a millionth, as everything that is reported."""
    return None if value is None else round(value, _DECIMALS)


def _stages_json(application: ApplicationConfig, rule: str, placement: Placement) -> dict[str, object]:
    """Of each stage its part of the SLO, where the rule splits that, and the GPUs with slices of its model."""
    budgets_ms = application.plan.split(rule) or {}
    return {
        stage.name: {
            "budget_ms": rounded(budgets_ms.get(stage.name)),
            "gpus": sorted(
                {
                    gpu
                    for planned in placement.slices
                    for gpu in planned.gpus
                    if any(model.model_id == stage.model_id for model in planned.models)
                }
            ),
        }
        for stage in application.plan.graph.stages
    }


def _slice_json(planned: PlannedSlice) -> dict[str, object]:
    return {
        **({"following": list(planned.following)} if planned.following else {}),
        "share_percent": rounded(planned.share_percent),
        "models": [
            {
                "model": model.model_id,
                "batch": model.batch,
                "batch_max": model.batch_max,
                "rate_rps": rounded(model.rate_rps),
                "duty_ms": rounded(model.duty_ms),
                "predicted_ms": rounded(model.predicted_ms),
            }
            for model in planned.models
        ],
    }


def _decision_json(decision: Decision) -> dict[str, object]:
    return {
        "subject": decision.subject,
        "chosen": decision.chosen,
        "metrics": dict(decision.metrics),
        "rejected": [
            {"option": one.option, "reason": one.reason, "metrics": dict(one.metrics)}
            for one in decision.rejected
        ],
    }
