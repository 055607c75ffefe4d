"""The iGniter paper's workloads as placement inputs, for golden and property tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fabric.ids import ModelId, NodeId
from policies.placement.common.base import GpuSlot, PlacedModelInput, Placement, Profiles
from profiles.store import shipped_data, shipped_profile

GIB = 2**30
Workloads = Iterable[Mapping[str, Any]]


def table_3() -> list[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = shipped_data("igniter_v100")["workloads_table3"]
    return rows


def illustrative() -> list[Mapping[str, Any]]:
    rows: list[Mapping[str, Any]] = shipped_data("igniter_v100")["illustrative_example"]
    return rows


def inputs(workloads: Workloads) -> list[PlacedModelInput]:
    return [PlacedModelInput(_name(w), w["slo_ms"], w["rate_rps"]) for w in workloads]


def profiles(workloads: Workloads, *gpu_types: str) -> Profiles:
    return {
        (_name(w), gpu_type): shipped_profile(f"igniter-{gpu_type}/{w['model']}")
        for w in workloads
        for gpu_type in gpu_types
    }


def gpus(count: int, gpu_type: str = "v100", first: int = 0, price: float | None = None) -> list[GpuSlot]:
    return [
        GpuSlot(first + i, gpu_type, 16 * GIB, NodeId(gpu_type), i, price_per_hour=price)
        for i in range(count)
    ]


def by_gpu(placed: Placement) -> list[dict[str, tuple[float | None, int | None]]]:
    """For each GPU in use, the share and batch of every model on it."""
    found: dict[int, dict[str, tuple[float | None, int | None]]] = {}
    for planned in placed.slices:
        (model,) = planned.models
        found.setdefault(planned.gpu, {})[model.model_id] = (planned.share_percent, model.batch)
    return [found[gpu] for gpu in sorted(found)]


def _name(workload: Mapping[str, Any]) -> ModelId:
    return ModelId(workload.get("id", workload["model"]))
