"""Symphony: every GPU hosts all models of its sub-cluster, and the scheduler decides the rest.

With one sub-cluster there is nothing to search: the only limits are memory, and what a device can run. With
several, models are partitioned (`subclusters.py`), each sub-cluster gets GPUs by its load, and is placed like a
cluster of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from fabric.ids import ModelId
from fabric.policy_options import Number
from policies.placement.common.base import (
    Decision,
    GpuSlot,
    PlacedModelInput,
    Placement,
    PlannedModel,
    PlannedSlice,
    Profiles,
    Rejected,
    Unplaced,
    cannot_host,
    in_gib,
    largest_batch,
    slice_memory_bytes,
)
from policies.placement.common.gpu_kinds import GpuKind, gpu_kind
from policies.placement.common.request_checks import joined, require_gpus
from policies.placement.symphony.subclusters import subclusters_of
from policies.registry import Registered

_Of = tuple[int, GpuKind]
"""A sub-cluster, and what tells two of its GPUs apart here: GPUs that agree in both host the same models."""


class Symphony:
    """One slice without a limit per GPU, with all models of its sub-cluster, in file order while memory lasts."""

    def __init__(self, subclusters: int = 1) -> None:
        self._subclusters = subclusters

    def place(
        self,
        models: Sequence[PlacedModelInput],
        gpus: Sequence[GpuSlot],
        profiles: Profiles,
        current: Placement | None = None,
    ) -> Placement:
        """Place (Symphony sections 3.1 and 4.4): a model that fits on no GPU of its sub-cluster is unplaced.

        `current` matters with several sub-clusters only: few models and GPUs change theirs. Raises ConfigError
        where there is no GPU.
        """
        require_gpus(gpus)
        divided = subclusters_of(models, gpus, profiles, current, self._subclusters)
        of = {gpu.index: (divided.of_gpu[gpu.index], gpu_kind(gpu)) for gpu in gpus}
        hosted: dict[_Of, list[PlacedModelInput]] = {}
        reasons = {model_id: [reason] for model_id, reason in divided.reasons.items()}
        for gpu in gpus:
            if of[gpu.index] not in hosted:
                inside = [m for m in models if divided.of_model.get(m.model_id) == divided.of_gpu[gpu.index]]
                hosted[of[gpu.index]] = _hosted_on(gpu, inside, profiles, reasons)
        planned = {
            key: tuple(PlannedModel(model.model_id) for model in inside) for key, inside in hosted.items()
        }
        slices = tuple(
            PlannedSlice(gpu.index, None, planned[of[gpu.index]]) for gpu in gpus if planned[of[gpu.index]]
        )
        placed = {model.model_id for inside in hosted.values() for model in inside}
        unplaced = tuple(
            Unplaced(m.model_id, m.rate_rps, joined(reasons[m.model_id]))
            for m in models
            if m.model_id not in placed
        )
        counts = Counter(of.values())
        carried = _staggered_fractions(hosted, counts, profiles)
        rates = {model.model_id: model.rate_rps or 0.0 for model in models}
        lost = {model_id: rates[model_id] * (1 - part) for model_id, part in (carried or {}).items()}
        return Placement(
            slices,
            unplaced,
            divided.violations,
            None if carried is None else sum(rates[model_id] * part for model_id, part in carried.items()),
            tuple(
                _decided(model, divided.of_model[model.model_id], hosted, counts, reasons)
                for model in models
                if model.model_id in placed
            ),
            {model_id: rate_rps for model_id, rate_rps in lost.items() if rate_rps > 0},
        )


def _decided(
    model: PlacedModelInput,
    subcluster: int,
    hosted: Mapping[_Of, Sequence[PlacedModelInput]],
    counts: Mapping[_Of, int],
    reasons: Mapping[ModelId, Sequence[str]],
) -> Decision:
    """Where a model is, and why not elsewhere."""
    taken = sum(counts[key] for key, inside in hosted.items() if model in inside)
    everywhere = sum(counts.values())
    which = f"all {everywhere} GPUs" if taken == everywhere else f"{taken} of {everywhere} GPUs"
    own = sum(count for (of, _), count in counts.items() if of == subcluster)
    size = "1 GPU" if own == 1 else f"{own} GPUs"
    of_others = [
        *([f"it may not leave its sub-cluster, which has {size}"] if own < everywhere else ()),
        *reasons.get(model.model_id, ()),
    ]
    return Decision(
        model.model_id,
        f"on {'the one GPU' if everywhere == 1 else which}, with every other model that they take: whichever is free runs the next batch",
        {"gpus": float(taken)},
        (Rejected("every GPU", f"{model.model_id} can use none of the others: {joined(of_others)}"),)
        if of_others
        else (),
    )


def _hosted_on(
    gpu: GpuSlot,
    models: Sequence[PlacedModelInput],
    profiles: Profiles,
    reasons: dict[ModelId, list[str]],
) -> list[PlacedModelInput]:
    """The models that such a GPU hosts; why not, of the others, goes into `reasons`."""
    hosted: list[PlacedModelInput] = []
    for model in models:
        reason = cannot_host(model, gpu, profiles)
        if reason is None:
            needed = slice_memory_bytes([*hosted, model], gpu.gpu_type, profiles)
            if needed <= gpu.memory_bytes:
                hosted.append(model)
                continue
            reason = (
                f"memory: with the models listed before it, it would need {in_gib(needed)} "
                f"of a GPU's {in_gib(gpu.memory_bytes)}"
            )
        reasons.setdefault(model.model_id, []).append(reason)
    return hosted


def _staggered_fractions(
    hosted: Mapping[_Of, Sequence[PlacedModelInput]], counts: Mapping[_Of, int], profiles: Profiles
) -> dict[ModelId, float] | None:
    """Which part of each model's rate perfectly staggered batches could carry (Symphony section 3.2), or None without rates.

    A model alone on its N GPUs runs batches of the largest b with (1 + 1/N) l(b) ≤ SLO, N b / l(b) in all;
    each model takes the fraction rate / capacity of its sub-cluster, and beyond 1 all are cut in proportion.
    """
    gpu_count: Counter[ModelId] = Counter()
    for key, models in hosted.items():
        gpu_count.update({model.model_id: counts[key] for model in models})
    capacity_rps: dict[ModelId, float] = {}
    inside: dict[int, dict[ModelId, float]] = {}
    for (subcluster, kind), models in hosted.items():
        for model in models:
            profile = profiles.get((model.model_id, kind.gpu_type))
            if profile is None or model.rate_rps is None:  # never profiled, or no rate: no prediction
                return None
            table = profile.exec_table()
            limit_ms = model.slo_ms / (1 + 1 / gpu_count[model.model_id])
            batch_size = max(1, largest_batch(table, limit_ms))
            one_gpu_rps = 1000 * batch_size / table[batch_size - 1]
            so_far_rps = capacity_rps.get(model.model_id, 0.0)
            capacity_rps[model.model_id] = so_far_rps + counts[subcluster, kind] * one_gpu_rps
            inside.setdefault(subcluster, {})[model.model_id] = model.rate_rps
    carried: dict[ModelId, float] = {}
    for rate_rps in inside.values():
        fraction = sum(rate / capacity_rps[model_id] for model_id, rate in rate_rps.items())
        carried.update(dict.fromkeys(rate_rps, 1 / max(1.0, fraction)))
    return carried


REGISTERED: Final = Registered(
    {"subclusters": Number(1, minimum=1, maximum=65_536, is_minimum_allowed=True, is_whole=True)},
    lambda options: Symphony(options["subclusters"]),
)
