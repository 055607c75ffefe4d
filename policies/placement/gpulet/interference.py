"""Two gpulets side by side: each slows the other, and shrinks its batch until its SLOs hold again."""

from __future__ import annotations

from policies.placement.gpulet.board import Board, Gpulet, Spot
from policies.placement.gpulet.quantities import RESIDUE_SLACK, residue, saturated
from policies.placement.gpulet.sharing import Member, shared


def settle(board: Board, spot: Spot, gpulet: Gpulet) -> bool:
    """Put the gpulet there if it and its neighbour can stand each other; False: they cannot.

    Batches only ever shrink, so this ends. A saturated neighbour loses rate, which is missing from then on.
    """
    neighbour = board.neighbour(spot) if board.has_interference else None
    if neighbour is None:
        board.put(spot, gpulet)
        return True
    while True:
        first = _shrunk(gpulet, neighbour.pressure)
        second = _shrunk(neighbour, first.pressure) if first is not None else None
        if first is None or second is None:
            return False
        if _batches(first) == _batches(gpulet) and _batches(second) == _batches(neighbour):
            board.put(spot, first, second)
            return True
        gpulet, neighbour = first, second


def relieve(board: Board, gpu: int) -> None:
    """After a gpulet left: what remains on the GPU runs the same batches without its pressure."""
    if not board.has_interference:
        return
    relieved = []
    for index, gpulet in enumerate(board.gpulets[gpu]):
        pressure = board.pressure_on(Spot(gpu, index))
        loads = tuple(
            load._replace(exec_ms=load.costs.exec_ms(load.batch, pressure)) for load in gpulet.loads
        )
        if gpulet.is_saturated:
            exec_ms = loads[0].exec_ms
            loads = (loads[0]._replace(rps=1000 * loads[0].batch / exec_ms),)
            relieved.append(gpulet._replace(duty_ms=exec_ms, loads=loads))
        else:
            relieved.append(gpulet._replace(loads=loads))
    board.set(gpu, tuple(relieved))


def _shrunk(gpulet: Gpulet, pressure: float) -> Gpulet | None:
    """The gpulet under that pressure, with batches no larger; residues may exceed the SLO by 5 % at last."""
    if gpulet.is_saturated:
        return _saturated_under(gpulet, pressure)
    return _residues_under(gpulet, pressure, 1.0) or _residues_under(gpulet, pressure, RESIDUE_SLACK)


def _saturated_under(gpulet: Gpulet, pressure: float) -> Gpulet | None:
    load = gpulet.loads[0]
    found = saturated(load.costs, load.demand.slo_ms, pressure)
    if not found.is_in_time:
        return None
    batch = min(found.batch, load.batch)
    exec_ms = load.costs.exec_ms(batch, pressure)
    smaller = load._replace(batch=batch, exec_ms=exec_ms, rps=1000 * batch / exec_ms)
    return gpulet._replace(duty_ms=exec_ms, loads=(smaller,))


def _residues_under(gpulet: Gpulet, pressure: float, slack: float) -> Gpulet | None:
    if len(gpulet.loads) > 1:
        members = [Member(load.demand, load.costs, load.rps) for load in gpulet.loads]
        return shared(gpulet.size, members, gpulet.duty_ms, pressure, slack)
    load = gpulet.loads[0]
    found = residue(load.costs, load.demand.slo_ms, load.rps, pressure, load.batch, slack)
    if found is None:
        return None
    same = load._replace(batch=found.batch, exec_ms=found.exec_ms)
    return gpulet._replace(duty_ms=found.duty_ms, loads=(same,))


def _batches(gpulet: Gpulet) -> list[int]:
    return [load.batch for load in gpulet.loads]
