"""Goodput of `tenuto` beside deferred and eager batching, each with both drop rules, on the same arrivals.

    python -m benchmarks.disciplines run RESULTS.json [--set table | --drawn-from SEED] [--seconds 40] [--seeds 1,2,3] [--processes 2] [--only tenuto]
    python -m benchmarks.disciplines table RESULTS.json

Goodput is the highest total rate at which every model's bad rate is under 1 %. Disciplines are played directly on
virtual time, without network delays: what they dispatch runs exactly l(b), so a request is bad if it is dropped.
`foreseen` is what nobody can beat who knows all arrivals (`benchmarks/foreseen`); `best / foreseen`: what the best discipline has of it.
A run goes on where its results file ends. The method's reasons are in docs/results/disciplines.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.foreseen.highest import foreseen_rps
from policies.batching.base import Discipline
from roles.lab import scheduler_only
from roles.lab.scheduler_only import Case, Model, goodput_rps
from roles.workload.outcomes import Window

WARMUP_MS = 5000.0  # what the disciplines' rate meters look back

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
FORESEEN = "foreseen"
"""Among the disciplines of a results file: the bound."""


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


def drawn(seed: int) -> list[Case]:
    """Fifteen rows, the same for a seed whenever they are drawn."""
    rng = random.Random(seed)
    cases = []
    for _ in range(12):
        row = rng.choice([one for one in ALL if 20 <= one["slo_ms"] <= 100])
        count = rng.choice((2, 4, 6, 10, 14, 20))
        gpus = rng.choice((4, 8, 12, 20, 28))
        slo_ms = round(row["slo_ms"] * rng.choice((0.8, 1.0, 1.5)))
        cases.append(
            alike(row, count, gpus, slo_ms, rng.choice((1.0, 0.5, 0.2, 0.1)), rng.choice((0.0, 0.0, 0.9)))
        )
    cases += [
        zoo(f"part {part} of the zoo", rng.sample(ALL, 12), rng.choice((10, 20)), rng.choice((1.0, 0.3)), 0.5)
        for part in "abc"
    ]
    return cases


HELD_OUT_SEED = 20261123  # of rows that nothing was tuned on

# Figure 9: the whole zoo, its strong and its weak part on 64 GPUs, with either GPU's profiles
FIGURE_9 = [
    zoo(f"{gpu} {part}", [row for row in rows if is_in(row["beta_ms"] / row["alpha_ms"])], 64, 1.0)
    for gpu, rows in (("1080Ti", ALL), ("A100", list(A100.values())))
    for part, is_in in (("mixed", lambda _: True), ("strong", lambda r: r > 2), ("weak", lambda r: r < 2))
]
SETS: Mapping[str, Sequence[Case]] = {"table": CASES, "held-out": drawn(HELD_OUT_SEED), "figure-9": FIGURE_9}


def is_good(case: Case, contender: str, seed: int, rate_rps: float, window_ms: float) -> bool:
    """Whether every model's bad rate stays under 1 % in a window of that length."""
    window = Window(WARMUP_MS, WARMUP_MS + window_ms)
    return scheduler_only.is_good(case, made(case, contender), seed, rate_rps, window)


def made(case: Case, contender: str) -> Discipline:
    """The discipline with the models and GPUs of the case."""
    return scheduler_only.made(case, *{**CONTENDERS, **OTHERS}[contender])


def measure(
    case: Case, contenders: Sequence[str], seed: int, window_ms: float, known: Mapping[str, float]
) -> dict[str, float]:
    """What is not known of one row and seed. Each search begins where the first contender's has ended."""
    found = dict(known)
    first = next(iter(CONTENDERS))
    if FORESEEN in contenders and FORESEEN not in found:
        found[FORESEEN] = round(foreseen_rps(case, seed, Window(WARMUP_MS, WARMUP_MS + window_ms)), 1)
    played = set(contenders) - {FORESEEN}
    for contender in sorted({first, *played} if played else (), key=[*CONTENDERS, *OTHERS].index):
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
    shown = [contender for contender in [*CONTENDERS, *OTHERS, FORESEEN] if contender in known]
    print(f"| workload | {' | '.join(shown)} | tenuto / best of four | best / foreseen | seeds | spread |")
    print(f"|---|{'---:|' * (len(shown) + 4)}")
    ratios, parts = [], []
    for name, cells in results.items():
        seeds = [seed for seed in cells.get("tenuto", ()) if all(seed in cells.get(one, {}) for one in shown)]
        if not seeds:
            continue
        mean = {contender: fmean(cells[contender][seed] for seed in seeds) for contender in shown}
        own = [cells["tenuto"][seed] for seed in seeds]
        ratios.append(mean["tenuto"] / max(mean[rival] for rival in RIVALS))
        spread = (max(own) - min(own)) / mean["tenuto"] if mean["tenuto"] else 0.0
        figures = " | ".join(f"{mean[contender]:.0f}" for contender in shown)
        part = "-"
        if FORESEEN in mean:
            parts.append(max(mean[one] for one in shown if one != FORESEEN) / mean[FORESEEN])
            part = f"{parts[-1]:.2f}"
        print(f"| {name} | {figures} | {ratios[-1]:.3f} | {part} | {len(seeds)} | {spread:.2f} |")
    low = sum(ratio < 0.99 for ratio in ratios)
    print(f"\n{len(ratios)} workloads: mean {fmean(ratios):.3f}, lowest {min(ratios):.3f}, {low} below 0.99")
    if parts:
        print(
            f"The best discipline has {fmean(parts):.3f} of what nobody could beat, {min(parts):.3f} to {max(parts):.3f}"
        )


def main() -> None:
    """Run, or print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("results", type=Path)
    parser.add_argument(
        "--only",
        default=",".join([*CONTENDERS, FORESEEN]),
        help=f"disciplines and {FORESEEN}, separated by commas",
    )
    parser.add_argument("--set", choices=SETS, default="table", help="which workloads")
    parser.add_argument("--drawn-from", type=int, help="fifteen rows of that seed instead of a set")
    parser.add_argument("--cases", default="", help="numbers from 0, separated by commas; all if not given")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    options = parser.parse_args()
    if options.what == "table":
        table(options.results)
        return
    seeds = [int(seed) for seed in options.seeds.split(",")]
    cases = SETS[options.set] if options.drawn_from is None else drawn(options.drawn_from)
    if options.cases:
        cases = [cases[int(number)] for number in options.cases.split(",")]
    run(options.results, cases, options.only.split(","), seeds, options.seconds * 1000, options.processes)


if __name__ == "__main__":
    main()
