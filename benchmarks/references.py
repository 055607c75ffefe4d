"""Our disciplines beside plain references written from the papers (`tests/references`).

    python -m benchmarks.references agree [--settings 2000] [--only "eager simple"]
    python -m benchmarks.references mixes RESULTS.json [--mixes 30] [--seconds 10] [--disciplines eager,deferred,timeout]
    python -m benchmarks.references table RESULTS.json

`agree` plays random settings at both and compares every batch. (Slices that two batches were sent to at one moment can be
free at one moment later; which of them is looked at first is chance, and counted apart.) `mixes` draws six to twelve models of Symphony's A100
table on 12 to 32 GPUs, finds the rate at which the reference loses 0.3 to 0.8 % of all requests, and prints what both
lose there and around it: in all, and of the worst model. Ours is as users have it, its credit and all. What is played
runs exactly l(b), so a request is lost if it is dropped. The loss counts after a second of warm-up.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from policies.batching.base import Discipline
from policies.batching.registry import make_discipline
from tests.references import central
from tests.references.pairs import PAIRS, kinds_of
from tests.references.playing import (
    Gpu,
    Model,
    Played,
    Request,
    Setting,
    differences,
    is_tie,
    play_ours,
    random_setting,
)

WARMUP_MS = 1000.0
LOW, HIGH = 0.003, 0.008  # the reference loses so much where both are compared
AROUND = (0.9, 1.0, 1.1)  # of that rate
TIMEOUT_MS = 10.0
A100 = json.loads((Path(__file__).parents[1] / "profiles/data/symphony_profiles.json").read_text())["a100"]


@dataclass(frozen=True)
class Contender:
    """A discipline as users have it, and the reference's rules."""

    ours: Callable[[], Discipline]
    rules: central.Rules


CONTENDERS: Mapping[str, Contender] = {
    "eager": Contender(lambda: make_discipline("eager"), central.Rules(central.eager, is_window=False)),
    "deferred": Contender(
        lambda: make_discipline("deferred"), central.Rules(central.deferred, is_window=True)
    ),
    "timeout": Contender(
        lambda: make_discipline("timeout", {"timeout_ms": TIMEOUT_MS}),
        central.Rules(central.timeout(TIMEOUT_MS), is_window=True),
    ),
}


@dataclass(frozen=True)
class Mix:
    """Models of the A100 table (rows), each asked for by its weight, on equal GPUs that host all of them."""

    rows: tuple[int, ...]
    weights: tuple[float, ...]
    gpus: int
    seed: int

    @property
    def bound_rps(self) -> float:
        """No schedule carries more: every request in the largest batch its SLO allows."""
        work_ms = 0.0
        for row, weight in zip(self.rows, self.weights, strict=True):
            model = A100[row]
            size = max(1, int((model["slo_ms"] - model["beta_ms"]) / model["alpha_ms"]))
            work_ms += weight / sum(self.weights) * (model["alpha_ms"] + model["beta_ms"] / size)
        return 1000 * self.gpus / work_ms

    def setting(self, rate_rps: float, seconds: float) -> Setting:
        """The same draws at every rate: only their scale differs."""
        rng = random.Random(self.seed)
        models, tables = [], {}
        for row in self.rows:
            model = A100[row]
            size_max = max(1, int((model["slo_ms"] - model["beta_ms"]) / model["alpha_ms"]) + 2)
            models.append(Model(model["name"], model["slo_ms"]))
            tables[model["name"]] = [
                model["alpha_ms"] * size + model["beta_ms"] for size in range(1, size_max + 1)
            ]
        requests = []
        at_ms = 0.0
        while (at_ms := at_ms + rng.expovariate(rate_rps / 1000)) < WARMUP_MS + 1000 * seconds:
            (chosen,) = rng.choices(models, self.weights)
            requests.append(Request(len(requests), chosen.name, at_ms, at_ms + chosen.slo_ms))
        return Setting(
            tuple(models), tuple(Gpu(f"g{order}", tables) for order in range(self.gpus)), tuple(requests)
        )


def drawn_mix(seed: int) -> Mix:
    """Six to twelve models, 12 to 32 GPUs, weights from equal to Zipf."""
    rng = random.Random(seed)
    rows = tuple(rng.sample(range(len(A100)), rng.randint(6, 12)))
    zipf = rng.choice((0.0, 0.5, 0.9, 1.2))
    weights = tuple((rank + 1) ** -zipf for rank in range(len(rows)))
    return Mix(rows, weights, rng.randint(12, 32), seed)


def lost(played: Played, setting: Setting) -> tuple[float, float]:
    """The part of the requests that was given up: in all, and of the worst model."""
    asked: Counter[str] = Counter()
    gone: Counter[str] = Counter()
    for request in setting.requests:
        if request.arrived_at_ms >= WARMUP_MS:
            asked[request.model] += 1
            gone[request.model] += request.number in played.given_up
    return gone.total() / asked.total(), max(gone[model] / asked[model] for model in asked)


def rate_losing(losses: Callable[[float], tuple[float, float]], rate_rps: float) -> float:
    """A rate at which the first loss lies in the window, near where it jumps over it otherwise."""
    low, high = 0.0, math.inf
    while True:
        share, _ = losses(rate_rps)
        if LOW <= share <= HIGH:
            return rate_rps
        low, high = (rate_rps, high) if share < LOW else (low, rate_rps)
        if high / max(low, 1e-9) < 1.0005:
            return low
        if low and high < math.inf:
            rate_rps = math.sqrt(low * high)
        else:
            rate_rps *= 1.1 if share < LOW else 0.9


def compare_mix(seed: int, name: str, seconds: float) -> list[dict[str, float]]:
    """Both at the rate at which the reference loses what it should, and around it."""
    mix, contender = drawn_mix(seed), CONTENDERS[name]

    def of_ours(rate_rps: float) -> tuple[float, float]:
        setting = mix.setting(rate_rps, seconds)
        return lost(play_ours(contender.ours(), setting), setting)

    def of_reference(rate_rps: float) -> tuple[float, float]:
        setting = mix.setting(rate_rps, seconds)
        return lost(central.Central(setting, contender.rules).play(), setting)

    # The reference is slow: it begins where ours loses as much.
    rate_rps = rate_losing(of_ours, 0.7 * mix.bound_rps)
    rate_rps = rate_losing(of_reference, rate_rps)
    rows = []
    for factor in AROUND:
        whole, worst = of_reference(rate_rps * factor)
        own_whole, own_worst = of_ours(rate_rps * factor)
        rows.append(
            {
                "rate_rps": rate_rps * factor,
                "factor": factor,
                "reference": whole,
                "reference_worst": worst,
                "ours": own_whole,
                "ours_worst": own_worst,
            }
        )
    return rows


def mixes(path: Path, count: int, names: list[str], seconds: float, processes: int) -> None:
    """Fill in what the results file lacks."""
    results: dict[str, list[dict[str, float]]] = json.loads(path.read_text()) if path.exists() else {}
    with ProcessPoolExecutor(processes) as pool:
        jobs = {
            pool.submit(compare_mix, seed, name, seconds): f"{name} {seed}"
            for name in names
            for seed in range(count)
            if f"{name} {seed}" not in results
        }
        for job in as_completed(jobs):
            results[jobs[job]] = job.result()
            path.write_text(json.dumps(results, indent=1))


def table(path: Path) -> None:
    """A row per mix and rate, in per cent, and the largest differences."""
    results: dict[str, list[dict[str, float]]] = json.loads(path.read_text())
    print("| discipline and mix | models, GPUs | r/s | reference | ours | its worst model | ours |")
    print("|---|---|---:|---:|---:|---:|---:|")
    apart: dict[tuple[str, float], list[tuple[float, float]]] = {}
    for key, rows in sorted(results.items(), key=lambda item: (item[0].split()[0], int(item[0].split()[1]))):
        name, seed = key.split()
        mix = drawn_mix(int(seed))
        for row in rows:
            figures = " | ".join(
                f"{100 * row[one]:.2f}" for one in ("reference", "ours", "reference_worst", "ours_worst")
            )
            print(f"| {key} | {len(mix.rows)}, {mix.gpus} | {row['rate_rps']:.0f} | {figures} |")
            apart.setdefault((name, row["factor"]), []).append(
                (row["ours"] - row["reference"], row["ours_worst"] - row["reference_worst"])
            )
    for (name, factor), pairs in sorted(apart.items()):
        whole, worst = (max(100 * pair[place] for pair in pairs) for place in (0, 1))
        print(
            f"\n{name}, {factor:g} of the rate, {len(pairs)} mixes: ours loses at most {whole:+.2f} points more "
            f"than the reference, its worst model {worst:+.2f}"
        )


def agree(count: int, names: list[str], first: int) -> None:
    """Play random settings at both, and print how many differ and how fast both are."""
    for name in names:
        pair = PAIRS[name]
        different: list[str] = []
        requests = ties = 0
        reference_s = ours_s = 0.0
        for seed in range(first, first + count):
            setting = random_setting(seed, classes=pair.classes)
            began = time.perf_counter()
            theirs = pair.reference(setting).play()
            middle = time.perf_counter()
            ours = play_ours(pair.ours(), setting)
            reference_s += middle - began
            ours_s += time.perf_counter() - middle
            requests += len(setting.requests)
            found = differences(theirs, ours, kinds_of(setting) if pair.has_ties else None)
            if found and is_tie(setting, theirs, ours):
                ties += 1
                continue
            different += [f"setting {seed}: {line}" for line in found]
        print(
            f"{name}: {len(different)} of {count} settings differ, {ties} more where two slices were free at one moment; "
            f"reference {requests / reference_s:.0f} requests/s, ours {requests / ours_s:.0f}",
            *different[:5],
            sep="\n    ",
            flush=True,
        )


def main() -> None:
    """Compare, or print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("agree", "mixes", "table"))
    parser.add_argument("results", type=Path, nargs="?", default=Path("references.json"))
    parser.add_argument("--settings", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the first setting's seed")
    parser.add_argument("--only", default=",".join(PAIRS), help="pairs, separated by commas")
    parser.add_argument("--mixes", type=int, default=30)
    parser.add_argument("--disciplines", default=",".join(CONTENDERS))
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    options = parser.parse_args()
    if options.what == "agree":
        agree(options.settings, options.only.split(","), options.first)
    elif options.what == "mixes":
        mixes(
            options.results,
            options.mixes,
            options.disciplines.split(","),
            options.seconds,
            options.processes,
        )
    else:
        table(options.results)


if __name__ == "__main__":
    main()
