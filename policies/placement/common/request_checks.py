"""What can be wrong with what a policy is asked, said in one way by all of them.

What concerns one model leaves that model out, with a reason that names what is missing; the others are placed. What
concerns the request as a whole (no GPU, a missing price where prices must be compared) is a ConfigError.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from fabric.errors import ConfigError
from policies.placement.common.base import GpuSlot, PlacedModelInput, PlannedSlice, Unplaced
from policies.placement.common.gpu_kinds import gpu_kind


def require_gpus(gpus: Sequence[GpuSlot]) -> None:
    """ConfigError where there is nothing to place on."""
    if not gpus:
        raise ConfigError("placement: there is no GPU to place on")


def require_pipelines(slices: Iterable[PlannedSlice], gpus: Sequence[GpuSlot]) -> None:
    """ConfigError where a pipeline cannot be: its GPUs are of one host and type, and carry no other slice.

    It has no share either: a stage has its whole GPU.
    """
    slot_of = {gpu.index: gpu for gpu in gpus}
    planned = list(slices)
    slices_on = Counter(gpu for one in planned for gpu in one.gpus)
    for one in planned:
        if not one.following:
            continue
        where = f"placement: the pipeline on GPUs {', '.join(map(str, one.gpus))}"
        hosts = sorted({str(slot_of[gpu].node_id) for gpu in one.gpus})
        if len(hosts) > 1:
            raise ConfigError(f"{where} is on hosts {' and '.join(hosts)}; all its stages must be on one")
        if len({gpu_kind(slot_of[gpu]) for gpu in one.gpus}) > 1:
            raise ConfigError(f"{where} has GPUs that differ; all its stages must be on equal ones")
        shared = [gpu for gpu in one.gpus if slices_on[gpu] > 1]
        if shared:
            raise ConfigError(
                f"{where} shares GPU {shared[0]} with another slice or stage; each stage needs a GPU of its own"
            )
        if one.share_percent is not None:
            raise ConfigError(f"{where} has a share of {one.share_percent:g} %; a stage has its whole GPU")


def require_prices(gpus: Iterable[GpuSlot], why: str) -> None:
    """ConfigError for the first GPU without a price; `why` says what the price is for."""
    for gpu in gpus:
        if gpu.price_per_hour is None:
            raise ConfigError(f"cluster.nodes: GPU type {gpu.gpu_type} has no price_per_hour; {why}")


def rated(models: Sequence[PlacedModelInput]) -> tuple[list[PlacedModelInput], list[Unplaced]]:
    """The models with a rate over 0, and the others with the reason: for policies that plan for rates."""
    planned, left = [], []
    for model in models:
        reason = _no_rate(model.rate_rps)
        if reason is None:
            planned.append(model)
        else:
            left.append(Unplaced(model.model_id, model.rate_rps, reason))
    return planned, left


def in_order(unplaced: Iterable[Unplaced], models: Sequence[PlacedModelInput]) -> tuple[Unplaced, ...]:
    """Sorted as the models were given."""
    places = {model.model_id: place for place, model in enumerate(models)}
    return tuple(sorted(unplaced, key=lambda one: places[one.model_id]))


def joined(reasons: Iterable[str]) -> str:
    """Several reasons as one, each once: a model may fail on each type of GPU for another one."""
    return "; ".join(dict.fromkeys(reasons))


def _no_rate(rate_rps: float | None) -> str | None:
    if rate_rps is None:
        return "it has no rate_rps, and this policy plans for rates"
    if rate_rps > 0 and math.isfinite(rate_rps):
        return None
    return f"its rate_rps is {rate_rps:g}: there is nothing to plan for"
