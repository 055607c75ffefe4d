"""What a discipline still serves when more is asked than the slices can carry (design section 12).

    python -m benchmarks.overload [--batching tenuto] [--set tuned|held-out] [--cases 0,1] [--seconds 10] [--seeds 11,12]
        [--processes 2] [--json FILE]

1x of a case is its goodput: the highest rate at which every model loses under 1 %. *Overload* offers all models 1.2, 1.5, 2, 3
and 5 times that, from the first moment on; `kept` is the goodput there over the highest at any smaller rate, `worst model` the
lowest of any model over its own at 1x. *Flood*: everybody has 0.9 of 1x, and after 5 s one model ten times as much: goodput of
the others, in all and of the worst, over the same without the flood. *Recovery*: 5x for 5 s, then 0.8x: how long after the
last moment of overload the last half second ends whose p99 is over that of the second before the overload by a tenth, or in
which 1 % are lost. `answered`: half of those that were refused knew it after so many ms.

Played on virtual time without network, as in `disciplines.py`: what is dispatched runs exactly l(b) and is in time.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import median

import numpy as np

from benchmarks.disciplines import A100, ALL, TABLE2, TI, WARMUP_MS, alike, is_good, made, zoo
from benchmarks.figures import Figures, Line, add_json_option, tell
from roles.lab import scheduler_only
from roles.lab.scheduler_only import Case, Fates, goodput_rps
from roles.workload.outcomes import Window

FACTORS = (1.2, 1.5, 2.0, 3.0, 5.0)
FLOOD = 10.0
BELOW = 0.9  # of 1x: what all models have while one floods
CALM = 0.8  # of 1x: what all have after an overload
BIN_MS = 500.0
KEPT, KEPT_OF_EACH, KEPT_OF_OTHERS, RECOVERED_MS = 0.97, 0.9, 0.95, 2000.0
FIVE = ("DenseNet121", "ResNet50V2", "InceptionV3", "BERT", "EfficientNetB4")

Steps = tuple[tuple[float, float], ...]


def drawn(seed: int) -> list[Case]:
    """Six cases: one model alone, two parts of each table of profiles, and a few popular and rare ones of one profile."""
    rng = random.Random(seed)
    cases = [alike(TI[rng.choice(["ResNet101", "VGG16", "Xception", "DenseNet169"])], 1, 12, 60, 1.0)]
    for title, rows in (("A100 part", list(A100.values())), ("1080Ti part", ALL)):
        for _ in range(2):
            some = rng.sample(rows, rng.choice((5, 8, 12)))
            zipf = rng.choice((0.0, 0.9))
            shape = rng.choice((1.0, 0.3))
            cases.append(zoo(f"{title} {len(cases)}", some, rng.choice((12, 16, 24)), shape, zipf))
    cases.append(alike(TI["InceptionV3"], rng.choice((3, 6)), rng.choice((8, 16)), 50, 0.5, 0.9))
    return cases


TUNED = [
    alike(TABLE2["ResNet50"], 1, 8, 25, 1.0),
    zoo("five A100 models", [A100[name] for name in FIVE], 16, 1.0),
    zoo("zoo", ALL, 32, 1.0, 0.9),
    *drawn(20261201),
]
SETS: Mapping[str, Sequence[Case]] = {"tuned": TUNED, "held-out": drawn(20261204)}
"""Nothing was tuned on what is held out."""


def play(
    case: Case, contender: str, seed: int, steps: Mapping[str, Steps], until_ms: float
) -> Mapping[str, Fates]:
    """Every request's fate; `steps` of each model are (from_ms, rps)."""
    arrived = case.stepped_arrivals(seed, steps, until_ms)
    return scheduler_only.play(case, made(case, contender), arrived).fates


def overload(
    case: Case, contender: str, seed: int, one_rps: float, window_ms: float
) -> list[dict[str, float]]:
    """A row for 1x and each factor."""
    rows = []
    own: dict[str, float] = {}
    best = 0.0
    for factor in (1.0, *FACTORS):
        window = Window(WARMUP_MS, WARMUP_MS + window_ms)
        rates = case.rates_rps(one_rps * factor)
        fates = play(
            case, contender, seed, {name: ((0.0, rate),) for name, rate in rates.items()}, window.until_ms
        )
        good = {name: fate.good_rps(window) for name, fate in fates.items()}
        own = own or good
        total = sum(good.values())
        refused = np.concatenate([fate.refused_at_ms - fate.arrived_at_ms for fate in fates.values()])
        known = refused[~np.isnan(refused)]
        rows.append(
            {
                "factor": factor,
                "good_rps": total,
                "kept": total / best if best else 1.0,
                "worst": min(good[name] / own[name] for name in good if own[name]),
                "answered_ms": float(np.median(known)) if known.size else 0.0,
            }
        )
        best = max(best, total)
    return rows


def flood(
    case: Case, contender: str, seed: int, one_rps: float, window_ms: float, flooding: str
) -> dict[str, float]:
    """What the others keep."""
    window = Window(WARMUP_MS, WARMUP_MS + window_ms)
    rates = case.rates_rps(BELOW * one_rps)
    calm: dict[str, Steps] = {name: ((0.0, rate),) for name, rate in rates.items()}
    rate = rates[flooding]
    flooded: dict[str, Steps] = {**calm, flooding: ((0.0, rate), (WARMUP_MS, FLOOD * rate))}
    before, after = (
        {
            name: fate.good_rps(window)
            for name, fate in play(case, contender, seed, steps, window.until_ms).items()
        }
        for steps in (calm, flooded)
    )
    others = [name for name in before if name != flooding]
    return {
        "others": sum(after[name] for name in others) / sum(before[name] for name in others),
        "worst": min(after[name] / before[name] for name in others if before[name]),
        "own": after[flooding] / before[flooding],
    }


def recovery_ms(case: Case, contender: str, seed: int, one_rps: float) -> float:
    """From the end of an overload until p99 and losses are what they were before."""
    ends_ms = 2 * WARMUP_MS
    until_ms = ends_ms + 5000.0
    low, high = case.rates_rps(CALM * one_rps), case.rates_rps(FACTORS[-1] * one_rps)
    steps = {name: ((0.0, low[name]), (WARMUP_MS, high[name]), (ends_ms, low[name])) for name in low}
    fates = play(case, contender, seed, steps, until_ms).values()
    slos_ms = [model.slo_ms for model in case.models]
    arrived = np.concatenate([fate.arrived_at_ms for fate in fates])
    # Of its SLO: models are put together.
    took = np.concatenate(
        [
            (fate.finished_at_ms - fate.arrived_at_ms) / slo_ms
            for fate, slo_ms in zip(fates, slos_ms, strict=True)
        ]
    )

    def of(from_ms: float, to_ms: float) -> tuple[float, float]:
        inside = took[(arrived >= from_ms) & (arrived < to_ms)]
        ran = inside[~np.isnan(inside)]
        p99 = float(np.percentile(ran, 99)) if ran.size else 1.0
        return p99, 1.0 - ran.size / max(1, inside.size)

    normal, _ = of(WARMUP_MS - 2 * BIN_MS, WARMUP_MS)
    last_bad_ms = 0.0
    for number in range(int((until_ms - ends_ms) / BIN_MS)):
        p99, lost = of(ends_ms + number * BIN_MS, ends_ms + (number + 1) * BIN_MS)
        if p99 > 1.1 * normal or lost > 0.01:
            last_bad_ms = (number + 1) * BIN_MS
    return last_bad_ms


@dataclass
class Found:
    """Of one case and seed."""

    one_rps: float
    rows: list[dict[str, float]]
    floods: list[tuple[str, dict[str, float]]]
    recovery_ms: float


def measure(case: Case, contender: str, seed: int, window_ms: float, one_rps: float = 0.0) -> Found:
    """All of it; models that flood are the first, the middle one and the last."""
    if not one_rps:
        one_rps = goodput_rps(case, lambda rate: is_good(case, contender, seed, rate, window_ms), 0.0)
    names = [model.name for model in case.models]
    flooding = dict.fromkeys((names[0], names[len(names) // 2], names[-1])) if len(names) > 1 else {}
    return Found(
        one_rps,
        overload(case, contender, seed, one_rps, window_ms),
        [(name, flood(case, contender, seed, one_rps, window_ms, name)) for name in flooding],
        recovery_ms(case, contender, seed, one_rps),
    )


def main() -> None:
    """Measure and print; each cell is the median of the seeds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batching", default="tenuto", help="a name of disciplines.py")
    parser.add_argument("--set", choices=SETS, default="tuned", help="which cases")
    parser.add_argument("--cases", default="", help="numbers from 0, separated by commas; all if not given")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seeds", default="11,12,13")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    add_json_option(parser)
    options = parser.parse_args()
    cases = list(SETS[options.set])
    if options.cases:
        cases = [cases[int(number)] for number in options.cases.split(",")]
    seeds = [int(seed) for seed in options.seeds.split(",")]
    figures = Figures(
        f"overload, {options.batching}, windows of {options.seconds:g} s, seeds {options.seeds}"
    )
    overloads = figures.table(
        "goodput beyond 1x (requests/s at 1x; then: of the highest at any smaller rate / the worst model of its own at 1x)",
        *(
            "workload",
            "1x",
            *(f"{factor:g}x" for factor in FACTORS),
            "answered after ms",
            "p99 normal after s",
        ),
    )
    floods = figures.table(
        "ten times as much of one model while all have 0.9x: goodput of the others, of the worst of them, and its own, over that before",
        *("workload", "model", "others", "worst", "its own"),
    )
    with ProcessPoolExecutor(options.processes) as pool:
        jobs = {
            (case.name, seed): pool.submit(measure, case, options.batching, seed, options.seconds * 1e3)
            for case in cases
            for seed in seeds
        }
        found = {key: job.result() for key, job in jobs.items()}
    kept, each, others, recovered = [], [], [], []
    for case in cases:
        of = [found[case.name, seed] for seed in seeds]
        cells: list[str | float] = [case.name, round(median(one.one_rps for one in of))]
        for place in range(1, len(FACTORS) + 1):
            whole = median(one.rows[place]["kept"] for one in of)
            worst = median(one.rows[place]["worst"] for one in of)
            kept.append(whole)
            each.append(worst)
            cells.append(f"{whole:.2f} / {worst:.2f}")
        cells.append(round(median(one.rows[-1]["answered_ms"] for one in of), 1))
        recovered.append(median(one.recovery_ms for one in of))
        overloads.rows.append((*cells, recovered[-1] / 1e3))
        for number, (name, _) in enumerate(of[0].floods):
            shares = [
                median(one.floods[number][1][what] for one in of) for what in ("others", "worst", "own")
            ]
            others.append(shares[0])
            floods.rows.append((case.name, name, *(f"{share:.2f}" for share in shares)))
    figures.lines += [
        Line(
            "goodput in overload, of the highest at any smaller rate, the worst row", min(kept), at_least=KEPT
        ),
        Line("the worst model of its own at 1x, the worst row", min(each), at_least=KEPT_OF_EACH),
        Line("p99 normal after ms, the worst row", max(recovered), at_most=RECOVERED_MS),
    ]
    if others:
        figures.lines.append(
            Line("others' goodput in a flood, the worst row", min(others), at_least=KEPT_OF_OTHERS)
        )
    tell(figures, options.json)


if __name__ == "__main__":
    main()
