"""Elastic partitioning (gpulet, Algorithm 1): GPUs are cut as the models need it, one model after the other.

A model first gets the gpulets it would like best: as many saturated ones of its most efficient size as its rate
fills, and the smallest one that carries the rest (`wishes`). Where those do not fit, it takes what is left, from
the largest empty gpulet down; then its residues are merged, if one gpulet can carry them all; and what is still
missing shares the time of gpulets that are not full.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from policies.placement.gpulet.board import Board, CostKind, Gpulet, GpuletLoad, ModelDemand, Spot, cost_kind
from policies.placement.gpulet.interference import relieve, settle
from policies.placement.gpulet.quantities import MODELS_MAX, WHOLE, residue, saturated
from policies.placement.gpulet.sharing import Member, joined


def elastic(
    demands: Sequence[ModelDemand], board: Board, *, can_cut: bool = True, is_partial: bool = False
) -> bool:
    """Place all on the board, in the order given by `in_order`; False where one of them is not served.

    `can_cut` False: only the cuts that are there. Without `is_partial` it stops at the first that finds no place.
    """
    is_served = True
    for demand in demands:
        if not place_model(board, demand, can_cut=can_cut):
            is_served = False
            if not is_partial:
                return False
    # Neighbours that came later may have taken rate from earlier models: it is scheduled again.
    for demand in demands:
        if board.has_interference and board.missing_rps(demand) > 0:
            place_rest(board, demand, can_cut=can_cut)
    return is_served and all(board.is_served(demand) for demand in demands)


def in_order(demands: Sequence[ModelDemand]) -> list[ModelDemand]:
    """Algorithm 1, line 2: rate times SLO ascending, of equals the later model first."""
    return sorted(demands, key=lambda demand: (demand.rps * demand.slo_ms, -demand.place))


def place_model(board: Board, demand: ModelDemand, *, can_cut: bool = True) -> bool:
    """Lines 4 to 11: everything for one model; what found a place stays on the board in any case."""
    wished = board.copy()
    if _place_wishes(wished, demand, can_cut=can_cut):
        board.adopt(wished)
        if board.missing_rps(demand) == 0:
            return True
    return place_rest(board, demand, can_cut=can_cut)


def place_rest(board: Board, demand: ModelDemand, *, can_cut: bool = True) -> bool:
    """What is missing goes to empty gpulets, into one residue, or shares time."""
    _place_on_empty(board, demand, can_cut=can_cut)
    _merge_residues(board, demand)
    board.rejoin_empty()
    _share_time(board, demand)
    return board.is_served(demand)


class Wish(NamedTuple):
    """A gpulet that a model would like: of that size, with that batch and duty cycle."""

    size: int
    batch: int
    duty_ms: float
    rps: float
    is_saturated: bool


def wishes(demand: ModelDemand, kind: CostKind, count_max: int) -> list[Wish]:
    """Saturated gpulets of p_eff, and the smallest for the rest (p_req with the batch of p_eff); [] if none can.

    Never more than `count_max`: a longer list fits nowhere.
    """
    by_size, p_eff = demand.costs[kind], demand.p_eff[kind]
    full = saturated(by_size[p_eff], demand.slo_ms)
    rest = demand.rps
    wished: list[Wish] = []
    while rest > demand.ignored_rps and len(wished) < count_max:
        if full.is_in_time and full.rps < rest:
            wished.append(Wish(p_eff, full.batch, full.exec_ms, full.rps, is_saturated=True))
            rest -= full.rps
            continue
        found = residue(by_size[p_eff], demand.slo_ms, rest)
        if found is None:
            return []
        size = min(
            size
            for size, costs in by_size.items()
            if size == p_eff
            or (
                size < p_eff
                and found.batch <= costs.batch_max
                and (exec_ms := costs.exec_ms(found.batch)) <= found.duty_ms
                and exec_ms + found.duty_ms <= demand.slo_ms
            )
        )
        wished.append(Wish(size, found.batch, found.duty_ms, rest, is_saturated=False))
        break
    return wished


def _place_wishes(board: Board, demand: ModelDemand, *, can_cut: bool) -> bool:
    """Best fit for each wish, the larger ones first; of several GPU types that with the smallest sum of sizes."""
    count_max = 2 * len(board.gpulets)
    kinds = [kind for kind in dict.fromkeys(map(cost_kind, board.kinds)) if demand.costs.get(kind)]
    lists = [(wished, kind) for kind in kinds if (wished := wishes(demand, kind, count_max))]
    if not lists:
        return False
    wished, kind = min(lists, key=lambda entry: sum(wish.size for wish in entry[0]))
    for wish in sorted(wished, key=lambda wish: -wish.size):
        # The last one is the residue: gpulets that are larger than wished leave less of it, neighbours more.
        rps = wish.rps if wish.is_saturated else board.missing_rps(demand)
        if rps > 0 and not _place_wish(board, demand, kind, wish._replace(rps=rps), can_cut=can_cut):
            return False
    return True


def _place_wish(board: Board, demand: ModelDemand, kind: CostKind, wish: Wish, *, can_cut: bool) -> bool:
    """FINDBESTFIT: a GPU that is not cut yet, the last one; else the least larger gpulet, of equals the last."""
    fitting = [
        (not (can_cut and gpulet.size == WHOLE), gpulet.size - wish.size, -spot.gpu, -spot.part, spot)
        for spot, gpulet in board.spots()
        if gpulet.size >= wish.size and not gpulet.loads and board.cost_kind(spot.gpu) == kind
    ]
    for is_fixed, _, _, _, spot in sorted(fitting):
        if not board.has_room(demand, spot):
            continue
        before = board.gpulets[spot.gpu]
        if not is_fixed:
            board.cut(spot, wish.size)
        gpulet = _filled(board, demand, spot, wish.rps, is_saturated=wish.is_saturated)
        if gpulet is not None and settle(board, spot, gpulet):
            return True
        board.set(spot.gpu, before)
    return False


def _filled(
    board: Board, demand: ModelDemand, spot: Spot, rps: float, *, is_saturated: bool
) -> Gpulet | None:
    """The empty gpulet at that spot with the model alone on it, its batch chosen beside its neighbour."""
    size = board.gpulets[spot.gpu][spot.part].size
    costs = board.costs(demand, spot.gpu).get(size)
    if costs is None:
        return None
    pressure = board.pressure_on(spot)
    if is_saturated:
        full = saturated(costs, demand.slo_ms, pressure)
        if not full.is_in_time:
            return None
        load = GpuletLoad(demand, costs, full.batch, full.exec_ms, full.rps)
        return Gpulet(size, full.exec_ms, (load,), is_saturated=True)
    found = residue(costs, demand.slo_ms, rps, pressure)
    if found is None:
        return None
    return Gpulet(size, found.duty_ms, (GpuletLoad(demand, costs, found.batch, found.exec_ms, rps),))


def _place_on_empty(board: Board, demand: ModelDemand, *, can_cut: bool) -> None:
    """Empty gpulets from the largest down, also below p_eff: saturated while that is less than what is missing."""
    tried: set[Spot] = set()
    while (missing := board.missing_rps(demand)) > 0:
        entry = next((e for e in board.empty_spots() if e[0] not in tried), None)
        if entry is None:
            return
        spot, _ = entry
        tried.add(spot)
        if not board.costs(demand, spot.gpu) or not board.has_room(demand, spot):
            continue
        before = board.gpulets[spot.gpu]
        if can_cut and before[spot.part].size == WHOLE:
            wished = wishes(demand, board.cost_kind(spot.gpu), 1)
            board.cut(spot, wished[0].size if wished else WHOLE)
        gpulet = _filled(board, demand, spot, missing, is_saturated=True)
        if gpulet is None or gpulet.loads[0].rps > missing:
            gpulet = _filled(board, demand, spot, missing, is_saturated=False)
        if gpulet is None or not settle(board, spot, gpulet):
            board.set(spot.gpu, before)


def _merge_residues(board: Board, demand: ModelDemand) -> None:
    """Several residues of the model, and what is missing, into one gpulet, where one can carry them."""
    alone = [
        (spot, gpulet)
        for spot, gpulet in board.spots()
        if len(gpulet.loads) == 1 and gpulet.loads[0].demand is demand and not gpulet.is_saturated
    ]
    if len(alone) + (board.missing_rps(demand) > 0) < 2:
        return
    trial = board.copy()
    for spot, gpulet in alone:
        trial.put(spot, Gpulet(gpulet.size))
        relieve(trial, spot.gpu)
    missing = trial.missing_rps(demand)
    for spot, _ in reversed(trial.empty_spots()):  # the smallest that can
        if missing == 0 or not trial.costs(demand, spot.gpu) or not trial.has_room(demand, spot):
            continue
        merged = _filled(trial, demand, spot, missing, is_saturated=False)
        if merged is not None and settle(trial, spot, merged):
            board.adopt(trial)
            return


def _share_time(board: Board, demand: ModelDemand) -> None:
    """What is still missing joins a gpulet that is not full, the fullest first (at most three models on each)."""
    missing = board.missing_rps(demand)
    if missing == 0:
        return
    open_ = [
        (spot, gpulet)
        for spot, gpulet in board.spots()
        if 0 < len(gpulet.loads) < MODELS_MAX
        and not gpulet.is_saturated
        and all(load.demand is not demand for load in gpulet.loads)
    ]
    for spot, gpulet in sorted(open_, key=lambda entry: -entry[1].occupancy):
        costs = board.costs(demand, spot.gpu).get(gpulet.size)
        if costs is None or not board.has_room(demand, spot):
            continue
        fuller = joined(gpulet, Member(demand, costs, missing), board.pressure_on(spot))
        if fuller is not None and settle(board, spot, fuller):
            return
