"""The best mix of patterns, by integer programming: where the search starts on small clusters.

Maximise Σ w[m] with w[m] ≤ rate[m], w[m] ≤ usable part of Σ capacity[m, pattern] · count[pattern] and as many
patterns as GPUs. The capacities are those beside neighbours that never idle, so what the program promises holds
whatever the load, and no pattern breaks an SLO. Interference is inside the pattern, which keeps the program linear.
The patterns are all of up to five slices of two items per model: the batch size that brings most beside copies of
itself, and the one that brings most alone. The search has all the others.

The program is given a number of nodes and no time, so that a slow machine plans as a fast one does.
"""

from __future__ import annotations

from itertools import combinations_with_replacement

from policies.placement.tenuto.goodput import USABLE, Cluster, GoodputModel, Pattern
from policies.placement.tenuto.task import PlacementTask
from policies.solver import prove, quiet_pulp

GPUS_MAX = 16
_MODELS_MAX = 8
_SLICES = 5
_COPIES = 4
_GAP = 1e-3
# About what 10 s bring: 800 nodes a second in a program of 741 columns, 57 in one of 11,736. Of 87 random tasks of 8 models
# on 16 GPUs of one to 16 types 80 were proven at the root, 3 took 181 to 3,105 nodes, 4 were not proven in 40 s.
NODES_MAX = 8_000
_COLUMNS = 1_000  # programs with more of them get fewer nodes in proportion


def exact_cluster(task: PlacementTask, model: GoodputModel, nodes_max: int = NODES_MAX) -> Cluster | None:
    """A proven optimum over those patterns; None for larger clusters, without a solver, or where the nodes give no proof."""
    gpu_count = sum(len(gpus.gpus) for gpus in task.classes)
    if gpu_count > GPUS_MAX or len(task.models) > _MODELS_MAX or not all(task.items):
        return None
    with quiet_pulp() as pulp:
        if pulp is None:
            return None
        program = pulp.LpProblem("patterns", pulp.LpMaximize)
        served = [
            pulp.LpVariable(f"w_{m}", lowBound=0, upBound=rate) for m, rate in enumerate(task.rates_rps)
        ]
        program.setObjective(pulp.lpSum(served))
        carried: list[list[object]] = [[] for _ in served]
        counts: list[dict[Pattern, object]] = []
        for k, gpus in enumerate(task.classes):
            of_class: dict[Pattern, object] = {}
            for place, pattern in enumerate(_patterns(task, model, k)):
                count = pulp.LpVariable(f"z_{k}_{place}", 0, len(gpus.gpus), cat=pulp.LpInteger)
                of_class[pattern] = count
                for m, rps in _capacities(task, model, k, pattern).items():
                    carried[m].append(USABLE * rps * count)
            program += pulp.lpSum(of_class.values()) <= len(gpus.gpus)
            counts.append(of_class)
        for m, variable in enumerate(served):
            program += variable <= pulp.lpSum(carried[m])
        columns = max(_COLUMNS, program.numVariables())
        if prove(pulp, program, nodes_max * _COLUMNS // columns, _GAP) is None:
            return None
        return tuple(
            _cluster_of(
                {pattern: round(getattr(z, "varValue", 0.0) or 0.0) for pattern, z in of_class.items()},
                len(gpus.gpus),
            )
            for of_class, gpus in zip(counts, task.classes, strict=True)
        )


def _patterns(task: PlacementTask, model: GoodputModel, k: int) -> list[Pattern]:
    items, memory_bytes = task.items[k], task.classes[k].slot.memory_bytes
    kept = sorted(
        {
            place
            for m in range(len(task.models))
            for copies in (1, _COPIES)
            for place in _best(task, model, k, m, copies)
        }
    )
    slices = min(_SLICES, task.slices_max)
    return [
        pattern
        for size in range(1, slices + 1)
        for pattern in combinations_with_replacement(kept, size)
        if sum(items[place].memory_bytes for place in pattern) <= memory_bytes and model.in_time(k, pattern)
    ]


def _best(task: PlacementTask, model: GoodputModel, k: int, m: int, copies: int) -> list[int]:
    """The place of the model's item that brings most beside copies of itself that never idle."""

    def brings_rps(place: int) -> float:
        return sum(_capacities(task, model, k, (place,) * copies).values())

    mine = [place for place, item in enumerate(task.items[k]) if item.model == m]
    return [max(mine, key=brings_rps)] if mine else []


def _capacities(task: PlacementTask, model: GoodputModel, k: int, pattern: Pattern) -> dict[int, float]:
    found: dict[int, float] = {}
    for item, _, rps in model.replicas(k, pattern, [1.0] * len(task.models)):
        found[item.model] = found.get(item.model, 0.0) + rps
    return found


def _cluster_of(counts: dict[Pattern, int], gpu_count: int) -> dict[Pattern, int]:
    used = {pattern: count for pattern, count in counts.items() if count}
    empty = gpu_count - sum(used.values())
    return {**used, (): empty} if empty else used
