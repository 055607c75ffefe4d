"""The ledger of an application's request: a line for each stage, and the whole.

The way that ended last decides how long a request took. Each of its legs begins when the one before it ends: first the inputs of a task
are made, which counts as preprocessing, then the task waits, runs and comes back. So the lines of that way sum to the whole.
The other stages have lines too, each of its task that was answered last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from fabric.ids import SliceId
from fabric.messages import Ledger, StageLine
from policies.graphs.graph import Graph
from roles.applications.trip import Leg, Trip

_SUMMED = ("preprocess_ms", "held_ms", "waited_ms", "transfer_ms", "queue_ms", "gpu_ms", "return_ms")
_NOTHING = Ledger()


def stage_lines(graph: Graph, trip: Trip, ledgers: Mapping[int, Ledger]) -> list[StageLine]:
    """One for each stage of the graph, in its order. `ledgers`: of the tasks that were answered."""
    legs: dict[str, list[Ledger]] = {}
    for leg in trip.path():  # a stage is there twice where its other requests were waited for in vain
        legs.setdefault(leg.stage, []).append(leg_ledger(leg, ledgers))
    lines = []
    for stage in graph.stages:
        own, lost = legs.get(stage.name), trip.lost.get(stage.name)
        if own is None:
            _, last = trip.answered.get(stage.name, [((), 0)])[-1]
            ledger = ledgers.get(last, _NOTHING)
        else:
            ledger = replace(own[0], **_sums(own))
        lines.append(
            StageLine(
                stage.name,
                trip.asked.get(stage.name, 0),
                0 if lost is None else lost.count,
                own is not None,
                stage.is_answer or not graph.successors[stage.name],
                ledger,
                "" if lost is None else f"{lost.code}: {lost.reason}",
            )
        )
    return lines


def leg_ledger(leg: Leg, ledgers: Mapping[int, Ledger]) -> Ledger:
    """Where the time of a leg went, all of it."""
    total_ms = leg.ended_at_ms - leg.begun_at_ms
    making_ms = leg.asked_at_ms - leg.begun_at_ms
    own = ledgers.get(leg.task)
    if own is None:  # it came to nothing
        return Ledger(preprocess_ms=making_ms, waited_ms=total_ms - making_ms, total_ms=total_ms)
    # Until the turn ends in which it is asked a task is not announced: that is the frontend's time, too. A worker that hears of a
    # batch before the frontend does waits for its inputs meanwhile: that part of the transfer is in the wait already.
    rest_ms = own.total_ms - sum(getattr(own, name) for name in _SUMMED)
    twice_ms = max(0.0, -rest_ms)
    transfer_ms = max(0.0, own.transfer_ms - twice_ms)
    return replace(
        own,
        preprocess_ms=own.preprocess_ms + making_ms + max(0.0, rest_ms),
        transfer_ms=transfer_ms,
        queue_ms=max(0.0, own.queue_ms - (twice_ms - own.transfer_ms + transfer_ms)),
        total_ms=total_ms,
    )


def whole_ledger(trip: Trip, lines: Sequence[StageLine], request_id: str, now_ms: float) -> Ledger:
    """The sum of the way that ended last."""
    sums = _sums([line.ledger for line in lines if line.is_on_path])
    way = " > ".join(leg.stage for leg in trip.path())
    total_ms = now_ms - trip.begun_at_ms
    whole = Ledger(slice_id=SliceId(""), reason=f"stages {way}", request_id=request_id)
    return replace(whole, **sums | {"total_ms": total_ms})


def _sums(ledgers: Sequence[Ledger]) -> dict[str, float]:
    return {name: sum(getattr(one, name) for one in ledgers) for name in (*_SUMMED, "total_ms")}
