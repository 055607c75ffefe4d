"""Does a gpulet plan hold? Checked from the definitions and the data file; nothing of the policy is imported.

The definitions are the paper's (Choi et al., ATC 2022, slides) with the constants of the authors' code, as the
data file states them: planned time L' = 1.1 (L + overhead + L (factor - 1)), a request waits for at most one duty
cycle and one round, a round fits into its cycle, a partition in use costs 1230 MB beside its models.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.placement.common.base import GpuSlot, Placement, PlannedSlice

DATA: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "profiles" / "data" / "gpulet_2080ti.json").read_text(encoding="utf-8")
)
ROUNDING = 1e-6


@dataclass(frozen=True)
class Asked:
    """A model as it was asked for: the file's model, its SLO and rate."""

    model: str
    slo_ms: float
    rate_rps: float


def problems(
    placement: Placement,
    asked: Mapping[str, Asked],
    gpus: Sequence[GpuSlot],
    *,
    has_interference: bool,
    models_max: float = 3,
) -> list[str]:
    """Everything that is wrong with the plan; what it states as unplaced or as a violation is not."""
    found: list[str] = []
    on_gpu: dict[int, list[PlannedSlice]] = defaultdict(list)
    for planned in placement.slices:
        on_gpu[planned.gpu].append(planned)
    for gpu in gpus:
        found += _gpu_problems(gpu, on_gpu.pop(gpu.index, []), asked)
    if on_gpu:
        found.append(f"GPUs {sorted(on_gpu)} do not exist")
    by_gpu: dict[int, list[PlannedSlice]] = defaultdict(list)
    for planned in placement.slices:
        by_gpu[planned.gpu].append(planned)
    for planned in placement.slices:
        others = [other for other in by_gpu[planned.gpu] if other is not planned] if has_interference else []
        found += _slice_problems(planned, others, asked, placement.violations, models_max)
    return found + _rate_problems(placement, asked, has_interference=has_interference)


def _gpu_problems(gpu: GpuSlot, slices: Sequence[PlannedSlice], asked: Mapping[str, Asked]) -> list[str]:
    found = []
    sizes = sorted(_size(planned) for planned in slices)
    if slices and not any(_is_part(sizes, pair) for pair in DATA["partition_pairs_pct"]):
        found.append(f"GPU {gpu.index} is cut into {sizes}")
    constants = DATA["scheduler_constants"]
    used_mb = sum(
        constants["mem_per_new_partition_context_mb"]
        + sum(DATA["models"][asked[model.model_id].model]["mem_mb"] for model in planned.models)
        for planned in slices
    )
    if used_mb * 2**20 > constants["usable_mem_fraction"] * gpu.memory_bytes:
        found.append(f"GPU {gpu.index} holds {used_mb} MB")
    return found


def _is_part(sizes: Sequence[int], pair: Sequence[int]) -> bool:
    left = list(pair)
    for size in sizes:
        if size not in left:
            return False
        left.remove(size)
    return True


def _slice_problems(
    planned: PlannedSlice,
    others: Sequence[PlannedSlice],
    asked: Mapping[str, Asked],
    violations: Sequence[str],
    models_max: float,
) -> list[str]:
    found = []
    size = _size(planned)
    name = f"GPU {planned.gpu} {size} %"
    if len(planned.models) > models_max:
        found.append(f"{name}: {len(planned.models)} models")
    round_ms = 0.0
    for model in planned.models:
        assert model.batch is not None
        assert model.predicted_ms is not None
        if not 1 <= model.batch <= 32:
            found.append(f"{name}: {model.model_id} has batch {model.batch}")
            continue
        exec_ms = planned_ms(asked[model.model_id].model, model.batch, size, _neighbours(others, asked))
        round_ms += exec_ms
        if abs(exec_ms - model.predicted_ms) > ROUNDING:
            found.append(f"{name}: {model.model_id} predicts {model.predicted_ms} ms, it is {exec_ms}")
    for model in planned.models:
        assert model.duty_ms is not None
        if round_ms > model.duty_ms + ROUNDING:
            found.append(f"{name}: a round of {round_ms} ms in a cycle of {model.duty_ms} ms")
        slo_ms = asked[model.model_id].slo_ms
        is_listed = any(model.model_id in line and f"GPU {planned.gpu}" in line for line in violations)
        slack = DATA["scheduler_constants"]["residue_slo_slack"] if is_listed and others else 1.0
        if round_ms + model.duty_ms > slo_ms * slack + ROUNDING:
            found.append(f"{name}: {model.model_id} takes {round_ms + model.duty_ms} ms, its SLO is {slo_ms}")
    return found


def _rate_problems(placement: Placement, asked: Mapping[str, Asked], *, has_interference: bool) -> list[str]:
    found = []
    unplaced = {str(one.model_id): one for one in placement.unplaced}
    for model_id, one in asked.items():
        served = carried = 0.0
        for planned in placement.slices:
            for model in planned.models:
                if model.model_id == model_id:
                    assert model.batch is not None
                    assert model.duty_ms is not None
                    assert model.rate_rps is not None
                    can_rps = 1000 * model.batch / model.duty_ms
                    if model.rate_rps > can_rps * (1 + ROUNDING):
                        found.append(f"{model_id}: {model.rate_rps} planned where {can_rps} fit")
                    served += model.rate_rps
                    carried += can_rps
        missing = unplaced.get(model_id)
        missing_rps = 0.0 if missing is None else (missing.rate_rps or 0.0)
        if abs(served + missing_rps - one.rate_rps) > 1e-6 * one.rate_rps:
            found.append(f"{model_id}: {served} served and {missing_rps} unplaced of {one.rate_rps}")
        if missing is None:
            inflated = inflated_rps(one.rate_rps)
            enough = inflated - DATA["scheduler_constants"]["ignored_residual_rate_rps"]
            if has_interference:
                kept = DATA["scheduler_constants"]["interference_retry_threshold"]
                enough = min(enough, kept * inflated)
            if carried < max(enough, one.rate_rps) - ROUNDING:
                found.append(f"{model_id}: gpulets for {carried} of {inflated} requests per second")
    return found


def _size(planned: PlannedSlice) -> int:
    return 100 if planned.share_percent is None else int(planned.share_percent)


def _neighbours(others: Sequence[PlannedSlice], asked: Mapping[str, Asked]) -> list[tuple[str, int, int]]:
    return [
        (asked[model.model_id].model, model.batch or 0, _size(other))
        for other in others
        for model in other.models
    ]


def planned_ms(model: str, batch: int, size: int, neighbours: Sequence[tuple[str, int, int]]) -> float:
    """L' by the definition; neighbours are (model, batch, size)."""
    solo: float = DATA["latency_ms_synthetic"][model][str(batch)][str(size)]
    factor = max([1.0, *(interference_factor((model, batch, size), other) for other in neighbours)])
    ratio: float = DATA["scheduler_constants"]["latency_ratio"]
    return ratio * (solo + overhead_ms(model, batch) + solo * (factor - 1))


def overhead_ms(model: str, batch: int) -> float:
    given = DATA["batching_overhead_ms"]
    if model == "bert":
        return float(given["constant_ms"]["bert"])
    if model.startswith("lenet"):
        return float(given["input_28"][batch - 1] + given["constant_ms"]["lenet"])
    if model == "ssd-mobilenetv1":
        return float(given["input_300"][batch - 1] * given["multiplier"]["ssd-mobilenetv1"])
    return float(given["input_224"][batch - 1] * given["multiplier"]["224 models"])


def interference_factor(own: tuple[str, int, int], other: tuple[str, int, int]) -> float:
    c = DATA["interference"]["constants_2080ti"]
    (own_l2, own_dram), (other_l2, other_dram) = (_used(*own), _used(*other))
    return float(
        c["c1_l2_self"] * own_l2
        + c["c2_l2_other"] * other_l2
        + c["c3_dram_self"] * own_dram
        + c["c4_dram_other"] * other_dram
        + c["c5_const"]
    )


def _used(model: str, batch: int, size: int) -> tuple[float, float]:
    """L2 and memory as fractions times the share; linear between the powers of two around the batch."""
    rows = DATA["util_2080ti"][DATA["models"][model]["util_key"]]
    low = 1
    while low * 2 <= batch:
        low *= 2
    high = min(32, low if low == batch else 2 * low)
    weight = 0.0 if high == low else (batch - low) / (high - low)
    l2, dram = (
        rows[str(low)][key] + (rows[str(high)][key] - rows[str(low)][key]) * weight
        for key in ("l2_util_pct", "dram_util_pct")
    )
    return l2 / 100 * size / 100, dram / 100 * size / 100


def inflated_rps(rate_rps: float) -> int:
    """99th percentile of Poisson plus one; above 550 int(1.1 R), here in whole tenths against rounding."""
    if rate_rps > 550:
        return math.floor(round(11 * rate_rps, 6) / 10)
    count, total = 0, 0.0
    while True:
        total += math.exp(count * math.log(rate_rps) - rate_rps - math.lgamma(count + 1))
        if total >= 0.99:
            return count + 1
        count += 1
