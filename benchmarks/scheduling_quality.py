"""Does the scheduler reach what the theory allows, and keep it in overload? All in virtual time.

1. Table 2 of the Symphony paper, per seed, between "no coordination" and "staggered" (section 3.3, 5.3).
2. Flat top: goodput at 1.5, 2 and 4 times the peak, for one model and for a mix, and each model's own.
3. Load-proportional: the busy fraction at 20 to 80 % of the peak, and how much of it the upper half of the ids has.

The rival in the same run is `eager` with simple drop, and with `--all` every discipline on table 2.

    python -m benchmarks.scheduling_quality [--batching tenuto] [--seeds 3] [--seconds 20] [--all] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.figures import Figures, Line, add_json_option, tell
from roles.config.read_config import parse_config
from roles.lab.goodput import find_goodput, question_of
from roles.simulator.simulation import simulate
from roles.workload.arrivals import workload_of
from roles.workload.outcomes import Outcome, Window

TABLE_2 = {
    "resnet50, 8 GPUs, 25 ms": (1.053, 5.072, 25, 8),
    "inceptionresnetv2, 8 GPUs, 70 ms": (5.090, 18.368, 70, 8),
}
LINES = {"resnet50, 8 GPUs, 25 ms": 5264, "inceptionresnetv2, 8 GPUs, 70 ms": 926}
RIVALS: tuple[Any, ...] = (
    "deferred",
    {"deferred": {"drop": "simple"}},
    "eager",
    {"eager": {"drop": "simple"}},
    {"timeout": {"slo_percent": 30}},
    "nexus",
    "clockwork",
    {"clockwork": {"sizes": "all"}},
    "shepherd",
    "tenuto",
)
MIX = {  # name: alpha, beta, SLO, share: strong and weak batching, tight and loose
    "densenet121": (1.061, 10.312, 45, 1.0),
    "resnet50": (1.053, 5.072, 25, 2.0),
    "inceptionv3": (1.964, 8.771, 50, 1.0),
    "bert": (7.008, 0.159, 56, 0.5),
}


def bounds(alpha_ms: float, beta_ms: float, slo_ms: float, gpus: int) -> tuple[float, float]:
    """Goodput without coordination and staggered, in r/s: floor((SLO/2 - beta)/alpha), floor((SLO/(1+1/N) - beta)/alpha)."""
    found = []
    for limit_ms in (slo_ms / 2, slo_ms / (1 + 1 / gpus)):
        size = int((limit_ms - beta_ms) / alpha_ms)
        found.append(1e3 * gpus * size / (alpha_ms * size + beta_ms))
    return found[0], found[1]


def document(
    models: Mapping[str, tuple[float, ...]], gpus: int, rate_rps: float, batching: Any
) -> dict[str, Any]:
    """A configuration of models (alpha, beta, SLO, share)."""
    return {
        "models": [
            {"name": name, "slo_ms": m[2], "weight": m[3], "profile": {"alpha_ms": m[0], "beta_ms": m[1]}}
            for name, m in models.items()
        ],
        "rate_rps": rate_rps,
        "cluster": {"gpus": gpus},
        "batching": batching,
    }


def peak_rps(
    models: Mapping[str, tuple[float, ...]], gpus: int, batching: Any, seeds: int, seconds: float
) -> tuple[float, ...]:
    """Goodput per seed, bisected."""
    config = parse_config(document(models, gpus, 1000.0, batching), Path())
    with ProcessPoolExecutor(2) as pool:
        question = question_of(config, 5.0, seconds)
        return find_goodput(question, range(1, seeds + 1), pool, 2, lambda _: None).per_seed_rps


def play(
    models: Mapping[str, tuple[float, ...]], gpus: int, batching: Any, rate_rps: float, seconds: float
) -> Outcome:
    """One run at one rate."""
    config = parse_config(document(models, gpus, rate_rps, batching), Path())
    return simulate(config, workload_of(config), Window(5e3, 5e3 + seconds * 1e3)).outcome


def table_2(figures: Figures, batchings: tuple[Any, ...], seeds: int, seconds: float) -> None:
    """Goodput per seed and where it lies between the bounds."""
    table = figures.table(
        "table 2: goodput, requests/s",
        *(
            "setting",
            "discipline",
            "no coordination",
            "line",
            "median",
            "staggered",
            "per seed",
            "all between",
        ),
    )
    for name, (alpha_ms, beta_ms, slo_ms, gpus) in TABLE_2.items():
        low, high = bounds(alpha_ms, beta_ms, slo_ms, gpus)
        for batching in batchings:
            found = peak_rps({"m": (alpha_ms, beta_ms, slo_ms, 1.0)}, gpus, batching, seeds, seconds)
            per_seed = ", ".join(f"{one:.0f}" for one in found)
            verdict = "yes" if all(low <= one <= high for one in found) else "no"
            median = statistics.median(found)
            table.rows.append((name, label(batching), low, LINES[name], median, high, per_seed, verdict))
            if batching == batchings[0]:
                what = f"goodput of {label(batching)}, {name}"
                figures.lines.append(Line(what, median, at_least=LINES[name]))


def flat_top(
    figures: Figures,
    name: str,
    models: Mapping[str, tuple[float, ...]],
    gpus: int,
    batching: Any,
    seconds: float,
) -> float:
    """Goodput in overload as a part of the highest at any smaller rate; the peak."""
    peak = statistics.median(peak_rps(models, gpus, batching, 1, seconds))
    table = figures.table(
        f"{name}, {label(batching)}: peak {peak:.0f} requests/s (every model's bad rate under 1 %)",
        *("load", "goodput", "of the highest so far", "worst model, of its own at 1 x"),
    )
    highest = 0.0
    own: dict[str, float] = {}
    for factor in (1.0, 1.25, 1.5, 2.0, 4.0):
        outcome = play(models, gpus, batching, peak * factor, seconds)
        goodput = outcome.good / outcome.duration_s
        own = own or {key: one.good / outcome.duration_s for key, one in outcome.models.items()}
        worst = min(one.good / outcome.duration_s / own[key] for key, one in outcome.models.items())
        part = goodput / highest if highest else 1.0
        table.rows.append((f"{factor:g} x", goodput, part, worst))
        highest = max(highest, goodput)
    return peak


def proportional(
    figures: Figures,
    models: Mapping[str, tuple[float, ...]],
    gpus: int,
    batching: Any,
    peak: float,
    seconds: float,
) -> None:
    """Busy fractions below the peak."""
    table = figures.table("busy fractions", "load", "busy", "over load", "upper half of the ids %")
    for load in (0.2, 0.3, 0.4, 0.6, 0.8):
        busy = play(models, gpus, batching, peak * load, seconds).gpus.busy_fraction
        upper = sum(busy[len(busy) // 2 :]) / max(1e-9, sum(busy))
        mean = statistics.fmean(busy)
        table.rows.append((f"{load:g}", mean, mean - load, 100 * upper))


def label(batching: Any) -> str:
    """A discipline's name with its options."""
    if isinstance(batching, str):
        return batching
    ((name, options),) = batching.items()
    return f"{name} {' '.join(f'{key}={value}' for key, value in options.items())}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batching", default="deferred")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--all", action="store_true", help="every discipline on table 2")
    add_json_option(parser)
    options = parser.parse_args()
    figures = Figures("scheduling quality")
    pair = (options.batching, {"eager": {"drop": "simple"}})
    table_2(figures, RIVALS if options.all else pair, options.seeds, options.seconds)
    alpha_ms, beta_ms, slo_ms, gpus = TABLE_2["resnet50, 8 GPUs, 25 ms"]
    one = {"resnet50": (alpha_ms, beta_ms, slo_ms, 1.0)}
    peak = flat_top(figures, "one model, 8 GPUs", one, gpus, options.batching, options.seconds)
    proportional(figures, one, gpus, options.batching, peak, options.seconds)
    peak = flat_top(figures, "mix of four, 12 GPUs", MIX, 12, options.batching, options.seconds)
    proportional(figures, MIX, 12, options.batching, peak, options.seconds)
    tell(figures, options.json)


if __name__ == "__main__":
    main()
