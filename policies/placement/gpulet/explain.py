"""Why a gpulet plan is what it is: its decisions, for `tenuto plan --why`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from policies.placement.common.base import Decision, GpuSlot, Rejected
from policies.placement.gpulet.board import Board, Gpulet, ModelDemand
from policies.placement.gpulet.quantities import WHOLE, saturated


def model_decision(
    subject: str, demand: ModelDemand, board: Board, gpus: Sequence[GpuSlot], *, is_cut: bool
) -> Decision:
    """The gpulets of a model; beside them, where GPUs are cut, the sizes that are not its p_eff."""
    chosen = ", ".join(
        _named(gpulet, demand, gpus[spot.gpu]) for spot, gpulet in board.spots() if _is_on(gpulet, demand)
    )
    metrics = {"inflated_rps": demand.rps, "carried_rps": board.carried_rps(demand)}
    if not is_cut:
        return Decision(subject, chosen or "nowhere", metrics)
    kind = next(iter(demand.costs))
    p_eff = demand.p_eff[kind]
    sizes = {size: saturated(costs, demand.slo_ms).rps for size, costs in demand.costs[kind].items()}
    metrics |= {"p_eff_percent": float(p_eff), "saturated_rps": sizes[p_eff]}
    rejected = tuple(
        Rejected(f"p_eff {size} %", _why_not(size, p_eff), {"saturated_rps": rps, **_gain(sizes, size)})
        for size, rps in sorted(sizes.items(), key=lambda entry: abs(entry[0] - p_eff))
        if size != p_eff
    )
    return Decision(subject, chosen or "nowhere", metrics, rejected)


def scaling_decision(board: Board, first_count: int, gpu_count: int, *, is_scheduled: bool) -> Decision:
    """Which numbers of GPUs were tried (Algorithm 2)."""
    count = len(board.gpulets)
    failed = range(min(max(1, first_count), gpu_count), count if is_scheduled else count + 1)
    rejected = tuple(Rejected(f"{tried} GPUs", "not every model is served") for tried in reversed(failed))
    chosen = (
        f"{count} of {gpu_count} GPUs" if is_scheduled else "unschedulable: all GPUs, as much as they carry"
    )
    return Decision("GPUs", chosen, {}, rejected[:5])


def _why_not(size: int, p_eff: int) -> str:
    if size == WHOLE:
        return "the step to the whole GPU is not looked at"
    return (
        "a step above it gains more per percent" if size < p_eff else "the step to it gains less per percent"
    )


def _gain(sizes: Mapping[int, float], size: int) -> dict[str, float]:
    """Throughput gained per percent, from the next smaller size."""
    below = max((other for other in sizes if other < size), default=None)
    return {} if below is None else {"gain_rps_per_percent": (sizes[size] - sizes[below]) / (size - below)}


def _is_on(gpulet: Gpulet, demand: ModelDemand) -> bool:
    return any(load.demand is demand for load in gpulet.loads)


def _named(gpulet: Gpulet, demand: ModelDemand, gpu: GpuSlot) -> str:
    load = next(load for load in gpulet.loads if load.demand is demand)
    how = "saturated" if gpulet.is_saturated else f"every {gpulet.duty_ms:.1f} ms"
    if len(gpulet.loads) > 1:
        how += f", shared by {len(gpulet.loads)}"
    return f"GPU {gpu.index} {gpulet.size} % batch {load.batch} {how}"
