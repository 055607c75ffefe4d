"""What a batch of a model asks of a GPU: the inputs that Usher and the thesis' MILP share.

Percentages are of one whole GPU and counted in millionths of a percent, so that sums are exact and what fits
does not depend on the order of adding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from policies.placement.common.base import GpuSlot, PlacedModelInput, Profiles, cannot_host
from profiles.requirements import Requirements

Metric = Literal["achieved_occupancy_percent", "weighted_occupancy_percent", "weighted_sm_percent"]
"""Which of a profile's metrics is the compute requirement, Creq (thesis sections 5.2 and 5.3)."""

METRICS: tuple[Metric, ...] = get_args(Metric)
UNITS_PER_PERCENT = 1_000_000
WHOLE_UNITS = 100 * UNITS_PER_PERCENT


@dataclass(frozen=True, slots=True)
class ResourceDemand:
    """A batch size of a model on a type of GPU: its run time alone, and Creq and Mreq in units."""

    batch: int
    exec_ms: float
    compute_units: int
    memory_units: int

    @property
    def throughput_rps(self) -> float:
        """Batch size over run time: the thesis' expected goodput of one replica."""
        return 1000 * self.batch / self.exec_ms

    @property
    def compute_percent(self) -> float:
        """Creq of a whole GPU."""
        return self.compute_units / UNITS_PER_PERCENT

    @property
    def memory_percent(self) -> float:
        """Mreq of a whole GPU."""
        return self.memory_units / UNITS_PER_PERCENT

    @property
    def total_units(self) -> int:
        """Rreq = Creq + Mreq."""
        return self.compute_units + self.memory_units


def rate_of(model: PlacedModelInput) -> float:
    """Its rate, which was looked at before."""
    assert model.rate_rps is not None, "checked when the placement began"
    return model.rate_rps


def profiled_demands(
    model: PlacedModelInput, gpu: GpuSlot, profiles: Profiles, metric: Metric
) -> tuple[ResourceDemand, ...]:
    """Every profiled batch size whose metrics are known, ascending, whatever its run time.

    A batch without its Creq, or without its Mreq where the model's memory is not given, is left out. Creq over
    100 is 100: sums over overlapping kernels can say more than a GPU has (notes to thesis section 5.2).
    """
    profile = profiles.get((model.model_id, gpu.gpu_type))
    if profile is None:
        return ()
    demands = []
    for batch, needed in sorted(profile.requirements.items()):
        compute_percent: float | None = getattr(needed, metric)
        memory_percent = _memory_percent(model, gpu, profile.memory_bytes(batch), needed)
        if compute_percent is None or memory_percent is None:
            continue
        compute_units = min(WHOLE_UNITS, round(compute_percent * UNITS_PER_PERCENT))
        memory_units = round(memory_percent * UNITS_PER_PERCENT)
        demands.append(ResourceDemand(batch, profile.exec_ms(batch), compute_units, memory_units))
    return tuple(demands)


def within_slo(model: PlacedModelInput, demands: Sequence[ResourceDemand]) -> tuple[ResourceDemand, ...]:
    """Those that run within the model's SLO and fit an empty GPU."""
    return tuple(
        demand for demand in demands if demand.exec_ms <= model.slo_ms and demand.memory_units <= WHOLE_UNITS
    )


def why_unservable(model: PlacedModelInput, gpu: GpuSlot, profiles: Profiles, metric: Metric) -> str | None:
    """Why no batch of the model can run on that kind of GPU, or None."""
    reason = cannot_host(model, gpu, profiles)
    if reason is not None:
        return reason
    if (model.model_id, gpu.gpu_type) not in profiles:
        return f"it has no profile for GPU type {gpu.gpu_type}"
    profiled = profiled_demands(model, gpu, profiles, metric)
    if not profiled:
        return f"its profile for GPU type {gpu.gpu_type} has no {metric}, or not its memory"
    if not within_slo(model, profiled):
        fastest_ms = min(demand.exec_ms for demand in profiled)
        return (
            f"no profiled batch runs within its SLO of {model.slo_ms:g} ms and in the memory of a "
            f"{gpu.gpu_type}; the fastest takes {fastest_ms:g} ms"
        )
    return None


def _memory_percent(
    model: PlacedModelInput, gpu: GpuSlot, profiled_bytes: int, needed: Requirements
) -> float | None:
    """Mreq. The profile's bytes over this GPU's memory, which may not be the profiled one's."""
    if model.memory_bytes is not None:
        return 100 * model.memory_bytes / gpu.memory_bytes
    if needed.memory_percent is None:
        return None
    return 100 * profiled_bytes / gpu.memory_bytes if profiled_bytes else needed.memory_percent
