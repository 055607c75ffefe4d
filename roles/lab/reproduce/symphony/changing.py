"""Symphony's figures 15 and 16: a changing workload on 512 GPUs, and the partition into sub-clusters."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence

from fabric.ids import ModelId
from policies.scaling import advised_gpus
from policies.slo import BAD_RATE_ALLOWED
from policies.subclusters import NO_BOUNDS, PartitionModel, partition
from policies.subclusters.base import Partition, Problem
from roles.lab.reproduce.report import Grid, Reproduction, Row, Value
from roles.lab.reproduce.symphony.workloads import SYSTEMS, table
from roles.lab.scheduler_only import Case, made, play
from roles.workload.outcomes import Window, gpu_use

# ---------------------------------------------------------------- figure 15

GPUS = 512
MODELS = 24
STEP_MS = 1000.0
SPREAD = 0.5
LOADS = (0.3, 0.5, 0.7, 0.85, 1.0, 1.2, 0.9, 0.6, 0.3)
"""Of the bound that no schedule passes: up into overload and down again."""

Steps = tuple[tuple[float, float], ...]


def changing_rates(case: Case, seed: int, steps: int) -> dict[str, Steps]:
    """(from_ms, rps) of each model: the total follows `LOADS`, each model besides a wave of its own."""
    draw = random.Random(f"{seed}/changing rates")
    phases = {model.name: draw.random() for model in case.models}
    periods = {model.name: draw.uniform(0.3, 1.0) for model in case.models}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in phases}
    for step in range(steps):
        weights = {
            name: 1 + SPREAD * math.sin(2 * math.pi * (step / (steps * periods[name]) + phase))
            for name, phase in phases.items()
        }
        place = step * (len(LOADS) - 1) / max(1, steps - 1)
        low = min(int(place), len(LOADS) - 2)
        load = LOADS[low] + (place - low) * (LOADS[low + 1] - LOADS[low])
        total = load * case.bound_rps
        for name, weight in weights.items():
            found[name].append((step * STEP_MS, total * weight / sum(weights.values())))
    return {name: tuple(rates) for name, rates in found.items()}


def figure_15(*, is_full: bool = False, gpus: int = GPUS, count: int = MODELS) -> Reproduction:
    """What is offered, served and used, second by second, and the advice on the number of GPUs."""
    steps = 120 if is_full else 18
    models = tuple(random.Random("24 of table 3").sample(table("gtx1080ti"), count))
    case = Case(f"{count} models, {gpus} GPUs", models, gpus)
    until_ms = steps * STEP_MS
    arrived = case.stepped_arrivals(1, changing_rates(case, 1, steps), until_ms)
    played = play(case, made(case, *SYSTEMS["Symphony"]), arrived, run_ms=1.0)
    starts: list[list[int]] = [[] for _ in range(steps + 1)]
    for index, batch in enumerate(played.batches):
        for step in range(int(batch.started_at_ms / STEP_MS), int(batch.finished_at_ms / STEP_MS) + 1):
            if step < steps:
                starts[step].append(index)
    rows_of: list[tuple[str, tuple[Value, ...]]] = []
    offered, bad, used, advice = [], [], [], []
    for step in range(steps):
        window = Window(step * STEP_MS, (step + 1) * STEP_MS)
        use = gpu_use([played.batches[index] for index in starts[step]], gpus, window)
        bad.append(played.bad_rate(window))
        good = played.good_rps(window)
        offered.append(good / (1 - bad[-1]))
        used.append(use.used)
        advice.append(advised_gpus(gpus, bad[-1], 1 - sum(use.busy_fraction) / gpus))
        cells = (
            round(offered[-1]),
            round(good),
            use.used,
            round(100 * sum(use.busy_fraction) / gpus, 1),
            advice[-1],
            round(100 * bad[-1], 2),
        )
        rows_of.append((f"{step} s", cells))
    peak = max(rate for rate, lost in zip(offered, bad, strict=True) if lost < BAD_RATE_ALLOWED)
    calm = [lost for rate, lost in zip(offered, bad, strict=True) if rate <= peak]
    over = [step for step in range(steps) if bad[step] >= BAD_RATE_ALLOWED]
    low = min(range(steps), key=lambda step: offered[step])
    rows = (
        Row("bad rate in seconds without overload, mean %", "low", round(100 * statistics.fmean(calm), 3)),
        Row(f"GPUs used at the lowest load, of {gpus}", "fewer: consolidated", used[low]),
        Row("busy GPUs' worth advised at the lowest load", "fewer", advice[low]),
        Row(
            "seconds in overload in which more GPUs are advised, %",
            100,
            round(100 * sum(advice[step] > gpus for step in over) / len(over), 1) if over else None,
        ),
        Row(
            "seconds below half of the peak in which GPUs are released, %",
            100,
            round(
                100
                * statistics.fmean(advice[step] < gpus for step in range(steps) if offered[step] < peak / 2),
                1,
            ),
        ),
    )
    return Reproduction(
        "symphony-figure-15",
        "Symphony: a changing workload on 512 GPUs",
        "Symphony, figure 15 (section 5.7). Its rates come from 150 hours of video that were not published: ours rise into overload and fall "
        f"again in {steps} s, each model in a wave of its own; {count} models drawn from table 3. The text states no numbers.",
        rows,
        (
            Grid(
                "Second by second, requests/s:",
                ("offered", "good", "GPUs used", "busy %", "GPUs advised", "bad %"),
                tuple(rows_of),
            ),
        ),
    )


# ---------------------------------------------------------------- figure 16

PARTITION_MODELS, SUBCLUSTERS = 800, 20
RANDOM_TRIES = 2000


def drawn_problem(seed: int) -> Problem:
    """Rates exponential (appendix A.2); memory drawn evenly, in MB: the paper does not state its models'."""
    draw = random.Random(seed)
    models = [
        PartitionModel(
            ModelId(f"m{i}"), draw.expovariate(1.0) * 100, draw.uniform(20, 600), draw.uniform(50, 800)
        )
        for i in range(PARTITION_MODELS)
    ]
    return Problem.of(models, SUBCLUSTERS, None, NO_BOUNDS)


def random_partition(problem: Problem, seed: int, tries: int = RANDOM_TRIES) -> Partition:
    """The paper's baseline: random partitions, the best of so many."""
    draw = random.Random(f"{seed}/random partitions")
    return min(
        (
            problem.judge([draw.randrange(problem.subclusters) for _ in problem.models], "random")
            for _ in range(tries)
        ),
        key=lambda one: one.objective_percent,
    )


def figure_16(*, is_full: bool = False) -> Reproduction:
    """How even load and memory of the sub-clusters are."""
    seeds = range(1, 21 if is_full else 4)
    problems = [drawn_problem(seed) for seed in seeds]
    found: Mapping[str, Sequence[Partition]] = {
        "ours": [partition(problem.models, problem.subclusters) for problem in problems],
        "random": [random_partition(problem, seed) for seed, problem in zip(seeds, problems, strict=True)],
    }
    rows = []
    for what in ("load", "memory"):
        for name, paper in (("ours", "load-balanced"), ("random", "less even")):
            percents = [getattr(one, f"{what}_imbalance_percent") for one in found[name]]
            rows.append(
                Row(
                    f"imbalance of {what}, (max - min)/mean, {name}, median %",
                    paper,
                    round(statistics.median(percents), 3),
                    "the figure is a CDF without printed values"
                    if name == "ours"
                    else f"the best of {RANDOM_TRIES:,}",
                )
            )
    return Reproduction(
        "symphony-figure-16",
        "Symphony: 800 models in 20 sub-clusters",
        "Symphony, figure 16 (appendix A.2). Ours is the search that `partition` uses at this size; with the paper's program "
        "and 10 s of a solver: docs/operate/subclusters.md.",
        tuple(rows),
    )
