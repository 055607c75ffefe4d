"""Temporal sharing of whole GPUs: Nexus' squishy bin packing, the baseline that gpulet is compared with.

No GPU is cut. A model saturates GPUs while its rate fills them; the residues, the fullest first, join the GPU
that is the fullest afterwards, or take one of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.placement.gpulet.board import Board, Gpulet, GpuletLoad, ModelDemand, Spot
from policies.placement.gpulet.quantities import WHOLE, residue, saturated
from policies.placement.gpulet.sharing import Member, shared


def whole_gpus(demands: Sequence[ModelDemand], board: Board, *, is_partial: bool = False) -> bool:
    """Place all on uncut GPUs; False where one of them is not served."""
    is_served = True
    for demand in demands:
        _saturate(board, demand)
    rests = sorted(demands, key=lambda demand: -_alone_occupancy(board, demand))
    for demand in rests:
        if board.missing_rps(demand) > 0 and not _join_or_open(board, demand):
            is_served = False
            if not is_partial:
                break
    return is_served


def _saturate(board: Board, demand: ModelDemand) -> None:
    for spot, _ in board.empty_spots():
        costs = board.costs(demand, spot.gpu).get(WHOLE)
        if costs is None or not board.has_room(demand, spot):
            continue
        full = saturated(costs, demand.slo_ms)
        if not full.is_in_time or full.rps > board.missing_rps(demand):
            continue
        load = GpuletLoad(demand, costs, full.batch, full.exec_ms, full.rps)
        board.put(spot, Gpulet(WHOLE, full.exec_ms, (load,), is_saturated=True))


def _alone_occupancy(board: Board, demand: ModelDemand) -> float:
    """How full the fastest GPU would be with the model's rest alone."""
    missing = board.missing_rps(demand)
    if missing == 0:
        return 0.0
    found = [
        residue(by_size[WHOLE], demand.slo_ms, missing)
        for by_size in demand.costs.values()
        if WHOLE in by_size
    ]
    return min((one.exec_ms / one.duty_ms for one in found if one is not None), default=0.0)


def _join_or_open(board: Board, demand: ModelDemand) -> bool:
    """Best fit among the GPUs in use, else the first free one."""
    missing = board.missing_rps(demand)
    best: tuple[float, Spot, Gpulet] | None = None
    for spot, gpulet in board.spots():
        costs = board.costs(demand, spot.gpu).get(WHOLE)
        if gpulet.is_saturated or not gpulet.loads or costs is None or not board.has_room(demand, spot):
            continue
        members = [Member(load.demand, load.costs, load.rps) for load in gpulet.loads]
        fuller = shared(WHOLE, [*members, Member(demand, costs, missing)], gpulet.duty_ms)
        if fuller is not None and (best is None or fuller.occupancy > best[0]):
            best = fuller.occupancy, spot, fuller
    if best is not None:
        board.put(best[1], best[2])
        return True
    for spot, _ in reversed(board.empty_spots()):
        costs = board.costs(demand, spot.gpu).get(WHOLE)
        found = residue(costs, demand.slo_ms, missing) if costs is not None else None
        if costs is not None and found is not None and board.has_room(demand, spot):
            load = GpuletLoad(demand, costs, found.batch, found.exec_ms, missing)
            board.put(spot, Gpulet(WHOLE, found.duty_ms, (load,)))
            return True
    return False
