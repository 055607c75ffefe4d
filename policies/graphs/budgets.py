"""A budget for each stage of a graph, so that no way through it takes longer than the SLO: pure functions.

`equal` and `proportional` are what users of Triton's ensembles and KServe's graphs do by hand, `nexus` is Nexus' program, and
`pooled` is what `carried` plans with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from policies.graphs.graph import SEGMENTS, Budgets, Graph, RunTimes
from policies.graphs.nexus_program import Costs, divide

_ROUNDS = 4  # of rate and budgets, each from the other: they settle within three


def equal(graph: Graph, slo_ms: float) -> Budgets:
    """The same for all stages of a way; a stage on several ways gets what the one with most stages leaves it."""
    return _weighted(graph, slo_ms, {stage.name: 1.0 for stage in graph.stages})


def proportional(graph: Graph, slo_ms: float, run_ms: RunTimes) -> Budgets:
    """In proportion to l(1); a stage on several ways gets what the longest leaves it."""
    return _weighted(graph, slo_ms, {name: times[0] for name, times in run_ms.items()})


def _weighted(graph: Graph, slo_ms: float, weights: Mapping[str, float]) -> Budgets:
    through = graph.through_ms(weights)
    return {name: slo_ms * weight / through[name] for name, weight in weights.items()}


def nexus(
    graph: Graph, slo_ms: float, run_ms: RunTimes, demand: Mapping[str, float], steps: int = SEGMENTS
) -> Budgets | None:
    """Nexus' program: the cut that needs the fewest GPUs, if a batch may take half of its stage's budget.

    A stage of rate r with a budget of j keeps r · l(b) / b GPUs busy, at the batch of the highest throughput b / l(b) of those
    with 2 · l(b) <= j. None where no cut serves all stages. The graph must be a tree.
    """
    own = {
        name: _steps_of(_needs(times, np.full(len(times), np.inf)), times, demand[name], slo_ms, steps)
        for name, times in run_ms.items()
    }
    divided = divide(graph, own, gives_last_step=False)
    if divided is None:
        return None
    return {name: slo_ms * chosen / steps for name, chosen in divided[1].items()}


def pooled(
    graph: Graph,
    slo_ms: float,
    run_ms: RunTimes,
    demand: Mapping[str, float],
    gpus: float,
    steps: int = SEGMENTS,
) -> Budgets | None:
    """As `nexus`, for stages that share `gpus` under one scheduler which sees all of them, at the highest rate these carry.

    A batch of b then waits for n-th of a run only, as its n = r · l(b) / b slices start one after another (Symphony's staggered
    bound), or for its b requests to come where that is less: l(b) + min(l(b), b / r). With budgets longer batches, with those
    a higher rate, with that other waits; so they are found in turn. What no stage has a use for is shared out in proportion. A join is planned as
    if it came after its longest way only; then all ways are made to fit. None where no cut serves all stages, or nothing is asked.
    """
    tree = _tree_of(graph, run_ms)
    asked_ms = sum(demand[name] * times[0] for name, times in run_ms.items())
    if not asked_ms:
        return None
    per_ms = gpus / asked_ms
    found: Budgets | None = None
    for _ in range(_ROUNDS):
        gathering = {
            name: np.arange(1, len(times) + 1) / (per_ms * max(demand[name], 1e-9))
            for name, times in run_ms.items()
        }
        own = {
            name: _steps_of(_needs(times, gathering[name]), times, demand[name], slo_ms, steps)
            for name, times in run_ms.items()
        }
        divided = divide(tree, own, gives_last_step=True)
        if divided is None:
            return found
        cost_ms, chosen = divided
        # A leaf was given all that is left: what it has no use for is everybody's.
        used = {name: int(np.flatnonzero(own[name] <= own[name][count])[0]) for name, count in chosen.items()}
        found = _weighted(graph, slo_ms, {name: float(count) for name, count in used.items()})
        per_ms = gpus / cost_ms
    return found


def _needs(times: Sequence[float], gathering_ms: NDArray[np.float64]) -> NDArray[np.float64]:
    """What a batch of each size takes, and may wait."""
    run = np.asarray(times, dtype=np.float64)
    return np.maximum.accumulate(run + np.minimum(run, gathering_ms))


def _steps_of(
    needs_ms: NDArray[np.float64], times: Sequence[float], demand: float, slo_ms: float, steps: int
) -> Costs:
    """What a stage costs with a budget of 0 to `steps` steps: ms of GPU for each request of the application."""
    run = np.asarray(times, dtype=np.float64)
    cheapest = np.minimum.accumulate(demand * run / np.arange(1, run.size + 1))
    # A budget that is a need but for the last digit serves it.
    budgets = slo_ms * np.arange(steps + 1) / steps * (1 + 1e-12)
    sizes = np.searchsorted(needs_ms, budgets, side="right")
    return np.where(sizes > 0, cheapest[np.maximum(sizes, 1) - 1], np.inf)


def _tree_of(graph: Graph, run_ms: RunTimes) -> Graph:
    """The graph with every join after that predecessor alone which is done last, going by l(1)."""
    ends: dict[str, float] = {}
    stages = []
    for stage in graph.stages:
        last = max(stage.after, key=ends.__getitem__, default=None)
        ends[stage.name] = run_ms[stage.name][0] + (ends[last] if last is not None else 0.0)
        stages.append(stage if last is None else replace(stage, after=(last,)))
    return Graph(tuple(stages))
