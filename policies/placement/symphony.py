"""Symphony: every GPU hosts all models of its sub-cluster, and the scheduler decides the rest.

With one sub-cluster there is nothing to search: the only limits are memory, and what a device can run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from fabric.ids import ModelId
from policies.placement.base import (
    GpuSlot,
    PlacedModelInput,
    Placement,
    PlannedModel,
    PlannedSlice,
    Profiles,
    Unplaced,
    cannot_host,
    in_gib,
    largest_batch,
    slice_memory_bytes,
)

_Kind = tuple[str, int, str]
"""What tells two GPUs apart here: type, memory, device. All GPUs of a kind host the same models."""


class Symphony:
    """One slice without a limit per GPU, all models on each, in file order while memory lasts."""

    def place(
        self,
        models: Sequence[PlacedModelInput],
        gpus: Sequence[GpuSlot],
        profiles: Profiles,
        current: Placement | None = None,  # noqa: ARG002  nothing is ever moved
    ) -> Placement:
        """Place (Symphony section 3.1): a model that fits on no GPU at all is unplaced."""
        has_real_gpus = any(not gpu.is_emulated for gpu in gpus)
        hosted: dict[_Kind, list[PlacedModelInput]] = {}
        reasons: dict[ModelId, str] = {}
        for gpu in gpus:
            if _kind(gpu) not in hosted:
                hosted[_kind(gpu)] = _hosted_on(gpu, models, profiles, reasons, has_real_gpus=has_real_gpus)
        planned = {
            kind: tuple(PlannedModel(model.model_id) for model in of_kind) for kind, of_kind in hosted.items()
        }
        slices = tuple(
            PlannedSlice(gpu.index, None, planned[_kind(gpu)]) for gpu in gpus if planned[_kind(gpu)]
        )
        placed = {model.model_id for of_kind in hosted.values() for model in of_kind}
        unplaced = tuple(
            Unplaced(m.model_id, m.rate_rps, reasons.get(m.model_id, "there is no GPU"))
            for m in models
            if m.model_id not in placed
        )
        counts = Counter(_kind(gpu) for gpu in gpus)
        return Placement(slices, unplaced, (), _staggered_goodput_rps(hosted, counts, profiles))


def _kind(gpu: GpuSlot) -> _Kind:
    return gpu.gpu_type, gpu.memory_bytes, gpu.device


def _hosted_on(
    gpu: GpuSlot,
    models: Sequence[PlacedModelInput],
    profiles: Profiles,
    reasons: dict[ModelId, str],
    *,
    has_real_gpus: bool,
) -> list[PlacedModelInput]:
    """The models that such a GPU hosts; why not, of the others, goes into `reasons`."""
    hosted: list[PlacedModelInput] = []
    for model in models:
        reason = cannot_host(model, gpu, profiles, has_real_gpus=has_real_gpus)
        if reason is None:
            needed = slice_memory_bytes([*hosted, model], gpu.gpu_type, profiles)
            if needed <= gpu.memory_bytes:
                hosted.append(model)
                continue
            reason = (
                f"memory: with the models listed before it, it would need {in_gib(needed)} "
                f"of a GPU's {in_gib(gpu.memory_bytes)}"
            )
        reasons.setdefault(model.model_id, reason)
    return hosted


def _staggered_goodput_rps(
    hosted: Mapping[_Kind, Sequence[PlacedModelInput]], counts: Mapping[_Kind, int], profiles: Profiles
) -> float | None:
    """What perfectly staggered batches could carry (Symphony section 3.2), or None without rates.

    A model alone on its N GPUs runs batches of the largest b with (1 + 1/N) l(b) ≤ SLO, N b / l(b) in all;
    each model takes the fraction rate / capacity of the cluster, and beyond 1 all are cut in proportion.
    """
    gpu_count: Counter[ModelId] = Counter()
    for kind, models in hosted.items():
        gpu_count.update({model.model_id: counts[kind] for model in models})
    capacity_rps: dict[ModelId, float] = {}
    rate_rps: dict[ModelId, float] = {}
    for kind, models in hosted.items():
        for model in models:
            profile = profiles.get((model.model_id, kind[0]))
            if profile is None or model.rate_rps is None:  # never profiled, or no rate: no prediction
                return None
            table = profile.exec_table()
            limit_ms = model.slo_ms / (1 + 1 / gpu_count[model.model_id])
            batch_size = max(1, largest_batch(table, limit_ms))
            one_gpu_rps = 1000 * batch_size / table[batch_size - 1]
            so_far_rps = capacity_rps.get(model.model_id, 0.0)
            capacity_rps[model.model_id] = so_far_rps + counts[kind] * one_gpu_rps
            rate_rps[model.model_id] = model.rate_rps
    fraction = sum(rate / capacity_rps[model_id] for model_id, rate in rate_rps.items())
    return sum(rate_rps.values()) / max(1.0, fraction)
