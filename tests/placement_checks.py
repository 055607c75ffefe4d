"""What every placement promises, whatever its policy: checked from its slices alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

from policies.placement.common.base import (
    GpuSlot,
    PlacedModelInput,
    Placement,
    PlannedSlice,
    Profiles,
    slice_memory_bytes,
)

ROUNDING = 1e-6


def check_promises(
    placed: Placement, models: Sequence[PlacedModelInput], gpus: Sequence[GpuSlot], profiles: Profiles
) -> None:
    """Shares, memory, SLOs and rates; what is broken must be listed under the violations, by GPU or model."""
    inputs = {model.model_id: model for model in models}
    said = " ".join(placed.violations)
    for gpu in gpus:
        on_it = [planned for planned in placed.slices if planned.gpu == gpu.index]
        share = sum(planned.share_percent or 0.0 for planned in on_it)
        memory = sum(_memory_bytes(planned, gpu, models, profiles) for planned in on_it)
        assert share <= 100 + ROUNDING or f"GPU {gpu.index}: the shares sum to" in said
        assert memory <= gpu.memory_bytes or f"GPU {gpu.index}: needs" in said
    assert {planned.gpu for planned in placed.slices} <= {gpu.index for gpu in gpus}
    for planned in placed.slices:
        assert planned.models
        for entry in planned.models:
            is_late = (entry.predicted_ms or 0.0) > inputs[entry.model_id].slo_ms * (1 + ROUNDING)
            assert not is_late or str(entry.model_id) in said
    _check_rates(placed, models)


def _check_rates(placed: Placement, models: Sequence[PlacedModelInput]) -> None:
    """All of a model's rate is either placed or unplaced, with one reason."""
    unplaced = {one.model_id: one for one in placed.unplaced}
    assert len(unplaced) == len(placed.unplaced)
    assert all(one.reason for one in placed.unplaced)
    for model in models:
        entries = [
            entry for planned in placed.slices for entry in planned.models if entry.model_id == model.model_id
        ]
        assert entries or model.model_id in unplaced
        if model.rate_rps is None or any(entry.rate_rps is None for entry in entries):
            continue  # not part of this plan
        missing_rps = unplaced[model.model_id].rate_rps or 0.0 if model.model_id in unplaced else 0.0
        placed_rps = sum(entry.rate_rps or 0.0 for entry in entries)
        assert math.isclose(placed_rps + missing_rps, model.rate_rps, rel_tol=ROUNDING)


def _memory_bytes(
    planned: PlannedSlice, gpu: GpuSlot, models: Sequence[PlacedModelInput], profiles: Profiles
) -> int:
    """All models stay loaded and one batch runs at a time: of the planned size, or any within the SLO without one."""
    inputs = {model.model_id: model for model in models}
    resident, surplus = 0, 0
    for entry in planned.models:
        batch_size = entry.batch_max or entry.batch
        model = inputs[entry.model_id]
        if batch_size is None or model.memory_bytes is not None:
            running = idle = slice_memory_bytes([model], gpu.gpu_type, profiles)
            if model.memory_bytes is None:
                idle = profiles[entry.model_id, gpu.gpu_type].memory_bytes(1)
        else:
            profile = profiles[entry.model_id, gpu.gpu_type]
            running, idle = profile.memory_bytes(batch_size), profile.memory_bytes(1)
        resident, surplus = resident + idle, max(surplus, running - idle)
    return resident + surplus
