"""Sub-clusters: the search beside the solvers on the paper's problem, and what one dispatcher for each brings.

python -m benchmarks.subclusters [--dispatchers] [--seeds N] [--json FILE]

Rates are drawn from an exponential distribution (Symphony appendix A.2), memory evenly from the range of the
papers' models. Deviations and imbalances are in percent of the average.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
import warnings
from collections.abc import Callable

import pulp

from benchmarks.figures import Figures, add_json_option, tell
from fabric.ids import FrontendId, ModelId, SliceId
from policies.batching.base import BatchModel, BatchSlice, Discipline, Dispatch, HostedModel, RequestRun
from policies.batching.per_subcluster import per_subcluster
from policies.batching.registry import make_discipline
from policies.subclusters.base import NO_BOUNDS, Partition, PartitionModel, Problem
from policies.subclusters.milp import solve_partition
from policies.subclusters.search import search_partition

SIZES = ((12, 3), (16, 4), (24, 3), (32, 4), (40, 4), (400, 4), (400, 16), (800, 20), (1000, 8))


def problem(models: int, subclusters: int, seed: int) -> Problem:
    """Models as the paper draws them; memory in MB."""
    draw = random.Random(seed)
    drawn = [
        PartitionModel(
            ModelId(f"m{i}"), draw.expovariate(1.0) * 100, draw.uniform(20, 600), draw.uniform(50, 800)
        )
        for i in range(models)
    ]
    return Problem.of(drawn, subclusters, None, NO_BOUNDS)


def with_cbc(posed: Problem) -> Partition | None:
    """What the fallback finds: HiGHS is there, and is said not to be."""
    available = pulp.HiGHS.available
    pulp.HiGHS.available = lambda _: False
    try:
        return solve_partition(posed)
    finally:
        pulp.HiGHS.available = available


def partitions(figures: Figures, seeds: int) -> None:
    """One line for each size and method: median over the seeds."""
    methods: tuple[tuple[str, Callable[[Problem], Partition | None]], ...] = (
        ("search", search_partition),
        ("highs", solve_partition),
        ("cbc", with_cbc),
    )
    table = figures.table(
        "partitions, medians of the seeds",
        *("models", "sub-clusters", "method", "objective %", "load imb. %", "memory imb. %", "gap %"),
        *("seconds", "CPU s"),
    )
    for models, subclusters in SIZES:
        for name, method in methods:
            found: list[Partition] = []
            took_s, cpu_s = [], []
            for seed in range(1, seeds + 1):
                posed = problem(models, subclusters, seed)
                started_s, started_cpu_s = time.perf_counter(), _cpu_s()
                one = method(posed)
                took_s.append(time.perf_counter() - started_s)
                cpu_s.append(_cpu_s() - started_cpu_s)
                if one is not None:
                    found.append(one)
            if not found:
                table.rows.append((models, subclusters, name, *(None,) * 6))
                continue
            table.rows.append(
                (
                    models,
                    subclusters,
                    name,
                    statistics.median(one.objective_percent for one in found),
                    statistics.median(one.load_imbalance_percent for one in found),
                    statistics.median(one.memory_imbalance_percent for one in found),
                    statistics.median(one.gap_percent for one in found),
                    statistics.median(took_s),
                    statistics.median(cpu_s),
                )
            )


def _cpu_s() -> float:
    """Of this process and its children: CBC is one."""
    return sum(os.times()[:4])


def dispatchers(
    subclusters: int, models: int = 500, gpus: int = 4096, batches: int = 40_000
) -> tuple[int | float, ...]:
    """CPU time per batch, one discipline for all sub-clusters beside one for each."""
    exec_ms = tuple(0.02 * b + 4 for b in range(1, 513))
    groups = [[ModelId(f"m{i}") for i in range(j, models, subclusters)] for j in range(subclusters)]
    of_slice = [tuple(groups[i % subclusters]) for i in range(gpus)]
    cost_us = {}
    for name in ("one", "each"):
        plain: Callable[[], Discipline] = lambda: make_discipline("deferred")  # noqa: E731  it is passed on
        discipline = plain() if name == "one" else per_subcluster(plain, of_slice)
        for group in groups:
            for model_id in group:
                discipline.add_model(BatchModel(model_id, 40.0), 0.0)
        hosted = [tuple(HostedModel(model_id, exec_ms) for model_id in group) for group in groups]
        for i in range(gpus):
            discipline.add_slice(BatchSlice(SliceId(f"n/gpu{i}/0"), i, hosted[i % subclusters]), 0.0)
        cost_us[name] = _play(discipline, models, batches)
    ratio = cost_us["each"] / cost_us["one"]
    return subclusters, models, gpus, cost_us["one"], cost_us["each"], ratio


def _play(discipline: Discipline, models: int, batches: int) -> float:
    draw = random.Random(1)
    frontend = FrontendId("frontend-0/0")
    seqs = [0] * models
    now_ms, sent = 0.0, 0
    started_s = time.process_time()
    while sent < batches:
        now_ms += draw.expovariate(models / 2.0)  # a run of each model every 2 ms
        while (wake_at_ms := discipline.wake_at_ms) is not None and wake_at_ms <= now_ms:
            sent += sum(type(one) is Dispatch for one in discipline.tick(wake_at_ms))
        k = draw.randrange(models)
        run = RequestRun(frontend, seqs[k], 50, now_ms + 40.0, now_ms)
        seqs[k] += 50
        sent += sum(type(one) is Dispatch for one in discipline.arrive(ModelId(f"m{k}"), run, now_ms))
    return 1e6 * (time.process_time() - started_s) / sent


def main() -> None:
    """Both tables, or only the second."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dispatchers", action="store_true", help="only the dispatchers")
    parser.add_argument("--seeds", type=int, default=3)
    add_json_option(parser)
    arguments = parser.parse_args()
    figures = Figures("sub-clusters")
    warnings.simplefilter("ignore", DeprecationWarning)  # PuLP's, of its own next version
    if not arguments.dispatchers:
        partitions(figures, arguments.seeds)
    table = figures.table(
        "CPU us a batch with one discipline, and with one for each sub-cluster",
        *("sub-clusters", "models", "GPUs", "one", "one for each", "ratio"),
    )
    for subclusters in (1, 4, 20):
        table.rows.append(dispatchers(subclusters))
    tell(figures, arguments.json)


if __name__ == "__main__":
    main()
