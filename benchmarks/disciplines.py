"""Goodput of `tenuto` beside deferred and eager batching, each with both drop rules, on the same arrivals.

    python benchmarks/disciplines.py run RESULTS.json [--set table] [--seconds 40] [--seeds 1,2,3] [--processes 2] [--only tenuto]
    python benchmarks/disciplines.py table RESULTS.json

Goodput is the highest total rate at which every model's bad rate is under 1 %. Disciplines are played directly on
virtual time, without network delays: what they dispatch runs exactly l(b), so a request is bad if it is dropped.
A run goes on where its results file ends. The method's reasons are in docs/results/disciplines.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from fabric.ids import FrontendId, ModelId, SliceId
from policies.batching.base import BatchModel, BatchSlice, Discipline, Drop, HostedModel, RequestRun
from policies.batching.registry import make_discipline
from roles.workload.arrivals import ArrivalSource, Workload

WARMUP_MS = 5000.0  # what the disciplines' rate meters look back
ALLOWED = 0.01
GRID = 1.005  # all disciplines are asked at the same rates, so that alike ones cannot differ by chance
STEP, GROWTH = 8, 1.6  # grid steps of the first look around where the search begins, and how they grow
BEGIN, LOWEST, HIGHEST = -58, -1386, 4  # grid steps from the bound: 0.75 of it, 0.001 (less is nothing), 1.02

PROFILES = json.loads((Path(__file__).parents[1] / "profiles/data/symphony_profiles.json").read_text())
TI = {model["name"]: model for model in PROFILES["gtx1080ti"]}
A100 = {model["name"]: model for model in PROFILES["a100"]}
TABLE2 = {model["name"]: model for model in PROFILES["table2"]["models"]}

CONTENDERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "deferred window": ("deferred", {"drop": "window"}),
    "deferred simple": ("deferred", {"drop": "simple"}),
    "eager window": ("eager", {"drop": "window"}),
    "eager simple": ("eager", {"drop": "simple"}),
    "tenuto": ("tenuto", {}),
}
OTHERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "timeout 30 %": ("timeout", {"slo_percent": 30}),
    "nexus": ("nexus", {}),
    "clockwork": ("clockwork", {}),
    "clockwork all": ("clockwork", {"sizes": "all"}),
    "shepherd": ("shepherd", {}),
}
RIVALS = [name for name in CONTENDERS if name != "tenuto"]


@dataclass(frozen=True)
class Model:
    """l(b) = alpha_ms · b + beta_ms; `weight`: its part of the total rate."""

    name: str
    alpha_ms: float
    beta_ms: float
    slo_ms: float
    weight: float


@dataclass(frozen=True)
class Case:
    """Models on equal GPUs that host all of them; `shape` of the gamma gaps (1: Poisson)."""

    name: str
    models: tuple[Model, ...]
    gpus: int
    shape: float

    @property
    def bound_rps(self) -> float:
        """No schedule carries more: every request in the largest batch its SLO allows."""
        weights = sum(model.weight for model in self.models)
        work_ms = 0.0
        for model in self.models:
            size = max(1, int((model.slo_ms - model.beta_ms) / model.alpha_ms))
            work_ms += model.weight / weights * (model.alpha_ms + model.beta_ms / size)
        return 1000 * self.gpus / work_ms

    def arrivals(self, seed: int, rate_rps: float, until_ms: float) -> list[Any]:
        """Ascending moments of each model; a seed is one burst pattern at every rate."""
        weights = sum(model.weight for model in self.models)
        sources = [
            ArrivalSource(
                ModelId(model.name), "gamma", ((0.0, rate_rps * model.weight / weights),), self.shape
            )
            for model in self.models
        ]
        return list(Workload(seed, tuple(sources)).arrivals(until_ms))


def alike(
    row: Mapping[str, Any], count: int, gpus: int, slo_ms: float, shape: float, zipf: float = 0.0
) -> Case:
    """`count` models of one profile."""
    models = tuple(
        Model(f"m{rank:02d}", row["alpha_ms"], row["beta_ms"], slo_ms, (rank + 1) ** -zipf)
        for rank in range(count)
    )
    name = f"{count} {row['name']}, {gpus} GPUs, {slo_ms:g} ms, {_process(shape)}"
    return Case(name + (f", Zipf {zipf:g}" if zipf else ""), models, gpus, shape)


def zoo(title: str, rows: Sequence[Mapping[str, Any]], gpus: int, shape: float, zipf: float = 0.0) -> Case:
    """Different models, each with its own SLO."""
    models = tuple(
        Model(row["name"], row["alpha_ms"], row["beta_ms"], row["slo_ms"], (rank + 1) ** -zipf)
        for rank, row in enumerate(rows)
    )
    name = f"{title} ({len(models)}), {gpus} GPUs, {_process(shape)}"
    return Case(name + (f", Zipf {zipf:g}" if zipf else ""), models, gpus, shape)


def _process(shape: float) -> str:
    return "Poisson" if shape == 1 else f"gamma {shape:g}"


ALL = list(TI.values())
STRONG = [row for row in ALL if row["beta_ms"] > 2 * row["alpha_ms"]]
WEAK = [row for row in ALL if row["beta_ms"] <= 2 * row["alpha_ms"]]
BERT = next(row for name, row in TI.items() if name.lower().startswith("bert"))
DENSE, INCEPTION, RESNET, VGG, XCEPTION = (
    TI[name] for name in ("DenseNet121", "InceptionV3", "ResNet50V2", "VGG16", "Xception")
)
SMALL = {"name": "small net", "alpha_ms": 0.4, "beta_ms": 8.0}

CASES: Sequence[Case] = (
    # Symphony's table 1, sampled over all of its dimensions
    alike(DENSE, 8, 8, 30, 0.2),
    alike(DENSE, 16, 16, 30, 1.0),
    alike(DENSE, 8, 16, 50, 0.1),
    alike(DENSE, 8, 8, 25, 1.0),
    alike(DENSE, 12, 12, 40, 0.5),
    alike(INCEPTION, 8, 8, 50, 0.3),
    alike(INCEPTION, 8, 12, 30, 1.0),
    alike(INCEPTION, 16, 16, 40, 0.1),
    alike(RESNET, 16, 16, 25, 1.0),
    alike(RESNET, 8, 16, 20, 0.5),
    alike(RESNET, 8, 8, 50, 0.2),
    alike(RESNET, 12, 12, 40, 0.7),
    alike(VGG, 8, 8, 40, 1.0),
    alike(VGG, 8, 16, 50, 0.3),
    alike(VGG, 16, 24, 30, 0.1),
    alike(XCEPTION, 8, 16, 40, 0.1),
    alike(XCEPTION, 8, 8, 30, 0.7),
    alike(XCEPTION, 16, 16, 50, 1.0),
    alike(BERT, 8, 8, 50, 1.0),
    alike(BERT, 16, 16, 50, 0.2),
    alike(BERT, 8, 32, 40, 0.5),
    # the mixed zoo (section 5.1)
    zoo("zoo", ALL, 32, 1.0),
    zoo("zoo", ALL, 32, 0.2, 0.9),
    zoo("zoo", ALL, 16, 0.5),
    zoo("zoo", ALL, 48, 0.1),
    zoo("zoo", ALL, 24, 0.05, 0.9),
    zoo("strong zoo", STRONG, 24, 1.0),
    zoo("weak zoo", WEAK, 24, 1.0),
    zoo("A100 zoo", list(A100.values()), 8, 1.0, 0.9),
    # popularity and bursts
    alike(RESNET, 16, 16, 50, 0.3, 0.9),
    alike(DENSE, 24, 16, 40, 1.0, 0.9),
    alike(INCEPTION, 16, 24, 50, 0.05),
    # table 2
    alike(TABLE2["ResNet50"], 1, 8, 25, 1.0),
    alike(TABLE2["InceptionResNetV2"], 1, 8, 70, 1.0),
    # figure 11: 20 ResNet-like models on 32 GPUs
    alike(TI["ResNet50"], 20, 32, 20, 1.0),
    alike(TI["ResNet50"], 20, 32, 30, 1.0, 0.9),
    alike(TI["ResNet50"], 20, 32, 50, 0.05, 0.9),
    alike(TI["ResNet50"], 20, 32, 100, 0.05),
    # one or two GPUs, as on a desk
    alike(RESNET, 4, 2, 50, 0.3),
    alike(RESNET, 1, 1, 50, 1.0),
    alike(SMALL, 3, 1, 100, 1.0),
    alike(INCEPTION, 2, 2, 100, 0.5),
)


def held_out() -> list[Case]:
    """Fifteen rows that nothing was tuned on, drawn from one seed."""
    rng = random.Random(20261123)
    drawn = []
    for _ in range(12):
        row = rng.choice([one for one in ALL if 20 <= one["slo_ms"] <= 100])
        count = rng.choice((2, 4, 6, 10, 14, 20))
        gpus = rng.choice((4, 8, 12, 20, 28))
        slo_ms = round(row["slo_ms"] * rng.choice((0.8, 1.0, 1.5)))
        drawn.append(
            alike(row, count, gpus, slo_ms, rng.choice((1.0, 0.5, 0.2, 0.1)), rng.choice((0.0, 0.0, 0.9)))
        )
    drawn += [
        zoo(f"part {part} of the zoo", rng.sample(ALL, 12), rng.choice((10, 20)), rng.choice((1.0, 0.3)), 0.5)
        for part in "abc"
    ]
    return drawn


# Figure 9: the whole zoo, its strong and its weak part on 64 GPUs, with either GPU's profiles
FIGURE_9 = [
    zoo(f"{gpu} {part}", [row for row in rows if is_in(row["beta_ms"] / row["alpha_ms"])], 64, 1.0)
    for gpu, rows in (("1080Ti", ALL), ("A100", list(A100.values())))
    for part, is_in in (("mixed", lambda _: True), ("strong", lambda r: r > 2), ("weak", lambda r: r < 2))
]
SETS: Mapping[str, Sequence[Case]] = {"table": CASES, "held-out": held_out(), "figure-9": FIGURE_9}


def is_good(case: Case, contender: str, seed: int, rate_rps: float, window_ms: float) -> bool:
    """Whether every model's bad rate stays under 1 %; gives up as soon as one's does not."""
    until_ms = WARMUP_MS + window_ms
    arrived = case.arrivals(seed, rate_rps, until_ms + 2 * max(model.slo_ms for model in case.models))
    losses_left = {
        ModelId(model.name): math.ceil(ALLOWED * np.count_nonzero((at_ms >= WARMUP_MS) & (at_ms < until_ms)))
        - 1
        for model, at_ms in zip(case.models, arrived, strict=True)
    }
    discipline = made(case, contender)
    moments = np.concatenate(arrived)
    model = np.repeat(np.arange(len(arrived)), [at_ms.size for at_ms in arrived])
    order = np.argsort(moments, kind="stable")
    names = [ModelId(one.name) for one in case.models]
    slos_ms = [one.slo_ms for one in case.models]
    frontend, arrive = FrontendId("f"), discipline.arrive

    def are_lost(decisions: Sequence[Any]) -> bool:
        for decision in decisions:
            if isinstance(decision, Drop):
                lost = sum(run.count for run in decision.runs if WARMUP_MS <= run.arrived_at_ms < until_ms)
                losses_left[decision.model_id] -= lost
                if losses_left[decision.model_id] < 0:
                    return True
        return False

    now_ms = 0.0
    for seq, (at_ms, index) in enumerate(zip(moments[order].tolist(), model[order].tolist(), strict=True)):
        if are_lost(_until(discipline, now_ms, at_ms)):
            return False
        now_ms = at_ms
        run = RequestRun(frontend, seq, 1, at_ms + slos_ms[index], at_ms)
        decisions = arrive(names[index], run, at_ms)
        if decisions and are_lost(decisions):
            return False
    return not are_lost(_until(discipline, now_ms, math.inf))


def made(case: Case, contender: str) -> Discipline:
    """The discipline with the models and GPUs of the case."""
    discipline = make_discipline(*{**CONTENDERS, **OTHERS}[contender])
    hosted = []
    for model in case.models:
        model_id = ModelId(model.name)
        size_max = max(1, int((model.slo_ms - model.beta_ms) / model.alpha_ms) + 2)
        exec_ms = tuple(model.alpha_ms * size + model.beta_ms for size in range(1, size_max + 1))
        hosted.append(HostedModel(model_id, exec_ms))
        discipline.add_model(BatchModel(model_id, model.slo_ms), 0.0)
    for gpu in range(case.gpus):
        discipline.add_slice(BatchSlice(SliceId(f"gpu-{gpu}"), gpu, tuple(hosted)), 0.0)
    return discipline


def _until(discipline: Discipline, now_ms: float, at_ms: float) -> Sequence[Any]:
    """Tick up to that moment, exclusively: who comes at the moment a batch leaves is still in it."""
    wake_at_ms = discipline.wake_at_ms
    if wake_at_ms is None or wake_at_ms >= at_ms:
        return ()
    decisions: list[Any] = []
    while wake_at_ms is not None and wake_at_ms < at_ms:
        now_ms = max(now_ms, wake_at_ms)
        decisions += discipline.tick(now_ms)
        wake_at_ms = discipline.wake_at_ms
    return decisions


def goodput_rps(case: Case, is_good_at: Callable[[float], bool], near_rps: float) -> float:
    """The highest good rate of the grid, bisected between steps from `near_rps` outwards (0: from 0.75 of the bound)."""
    bound = case.bound_rps
    at = round(math.log(near_rps / bound, GRID)) if near_rps else BEGIN
    low, high, step = LOWEST, HIGHEST, float(STEP)
    while high - low > 1:
        at = min(max(at, low + 1), high - 1)
        if is_good_at(bound * GRID**at):
            low = at
        else:
            high = at
        if high == HIGHEST:
            at = low + int(step)
        elif low == LOWEST:
            at = high - int(step)
        else:
            at = (low + high) // 2
        step *= GROWTH
    return bound * GRID**low if low > LOWEST else 0.0


def measure(
    case: Case, contenders: Sequence[str], seed: int, window_ms: float, known: Mapping[str, float]
) -> dict[str, float]:
    """What is not known of one row and seed. Each search begins where the first contender's has ended."""
    found = dict(known)
    first = next(iter(CONTENDERS))
    for contender in sorted({first, *contenders}, key=[*CONTENDERS, *OTHERS].index):
        if contender not in found:

            def is_good_at(rate_rps: float, contender: str = contender) -> bool:
                return is_good(case, contender, seed, rate_rps, window_ms)

            found[contender] = round(goodput_rps(case, is_good_at, found.get(first, 0.0)), 1)
    return found


def run(
    path: Path,
    cases: Sequence[Case],
    contenders: Sequence[str],
    seeds: Sequence[int],
    window_ms: float,
    processes: int,
) -> None:
    """Fill in what the results file lacks, one seed after the other."""
    results: dict[str, dict[str, dict[str, float]]] = json.loads(path.read_text()) if path.exists() else {}
    with ProcessPoolExecutor(processes) as pool:
        jobs = {}
        for seed in seeds:
            for case in cases:
                cells = results.setdefault(case.name, {})
                known = {contender: of[str(seed)] for contender, of in cells.items() if str(seed) in of}
                if not known.keys() >= set(contenders):
                    job = pool.submit(measure, case, contenders, seed, window_ms, known)
                    jobs[job] = (cells, str(seed))
        for job in as_completed(jobs):
            cells, of = jobs[job]
            for contender, found_rps in job.result().items():
                cells.setdefault(contender, {})[of] = found_rps
            path.write_text(json.dumps(results, indent=1))


def table(path: Path) -> None:
    """The results as Markdown, each cell in r/s, the mean of the seeds that all disciplines of the row were asked at."""
    results = json.loads(path.read_text())
    known = {contender for cells in results.values() for contender in cells}
    shown = [contender for contender in [*CONTENDERS, *OTHERS] if contender in known]
    print(f"| workload | {' | '.join(shown)} | of the best of four | seeds | spread |")
    print(f"|---|{'---:|' * (len(shown) + 3)}")
    ratios = []
    for name, cells in results.items():
        seeds = [seed for seed in cells["tenuto"] if all(seed in cells.get(one, {}) for one in shown)]
        if not seeds:
            continue
        mean = {contender: fmean(cells[contender][seed] for seed in seeds) for contender in shown}
        own = [cells["tenuto"][seed] for seed in seeds]
        ratios.append(mean["tenuto"] / max(mean[rival] for rival in RIVALS))
        spread = (max(own) - min(own)) / mean["tenuto"] if mean["tenuto"] else 0.0
        figures = " | ".join(f"{mean[contender]:.0f}" for contender in shown)
        print(f"| {name} | {figures} | {ratios[-1]:.3f} | {len(seeds)} | {spread:.3f} |")
    low = sum(ratio < 0.99 for ratio in ratios)
    print(f"\n{len(ratios)} workloads: mean {fmean(ratios):.3f}, lowest {min(ratios):.3f}, {low} below 0.99")


def main() -> None:
    """Run, or print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", default=",".join(CONTENDERS), help="disciplines, separated by commas")
    parser.add_argument("--set", choices=SETS, default="table", help="which workloads")
    parser.add_argument("--cases", default="", help="numbers from 0, separated by commas; all if not given")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    options = parser.parse_args()
    if options.what == "table":
        table(options.results)
        return
    seeds = [int(seed) for seed in options.seeds.split(",")]
    cases = SETS[options.set]
    if options.cases:
        cases = [cases[int(number)] for number in options.cases.split(",")]
    run(options.results, cases, options.only.split(","), seeds, options.seconds * 1000, options.processes)


if __name__ == "__main__":
    main()
