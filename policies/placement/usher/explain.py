"""Why Usher placed what it placed, as the decisions of a plan."""

from __future__ import annotations

from collections.abc import Mapping

from policies.placement.common.base import Decision, PlacedModelInput, Rejected
from policies.placement.usher.configurations import ReplicaOption
from policies.placement.usher.grouping import Group
from policies.placement.usher.search import FoundConfiguration, Tried


def shortfall(option: ReplicaOption, placed: int) -> str:
    """Why a part of a model's rate is not placed."""
    if not placed:
        return f"none of its {option} fits what the models before it left"
    carried_rps = placed * option.demand.throughput_rps
    return (
        f"{placed} of its {option.degree} replicas of batch {option.demand.batch} are placed and carry "
        f"{carried_rps:.1f} requests per second"
    )


def group_decision(group: Group, gpu_type: str, found: FoundConfiguration) -> Decision:
    """The configuration of a group beside the best of the others."""
    metrics = {
        "expected_goodput_rps": found.tried.goodput_rps,
        "added_gpus": float(found.tried.added_gpus),
        "configurations": float(found.configurations),
        "configurations_placed": float(found.placed),
    }
    for model_id, option in zip(group, found.tried.options, strict=True):
        metrics[f"{model_id}_creq_percent"] = option.demand.compute_percent
        metrics[f"{model_id}_mreq_percent"] = option.demand.memory_percent
    rejected = tuple(
        Rejected(
            _described(group, tried),
            "it serves less"
            if tried.goodput_rps < found.tried.goodput_rps
            else "it serves no more with no fewer GPUs, and comes later",
            {"expected_goodput_rps": tried.goodput_rps, "added_gpus": float(tried.added_gpus)},
        )
        for tried in found.runners_up
    )
    subject = f"group {', '.join(group)} on {gpu_type}"
    return Decision(subject, _described(group, found.tried), metrics, rejected)


def _described(group: Group, tried: Tried) -> str:
    return "; ".join(f"{m}: {option}" for m, option in zip(group, tried.options, strict=True))


def type_decision(model: PlacedModelInput, chosen: str, costs: Mapping[str, float]) -> Decision:
    """Which type of GPU a model goes to; `costs` per hour of its c_min GPUs by type."""
    return Decision(
        f"GPU type of {model.model_id}",
        chosen,
        {"price_per_hour": costs[chosen]},
        tuple(
            Rejected(gpu_type, "its GPUs for the whole rate cost no less", {"price_per_hour": cost})
            for gpu_type, cost in costs.items()
            if gpu_type != chosen
        ),
    )
