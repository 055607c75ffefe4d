"""GPUs that many rarely asked models keep busy, beside the least that anybody could who knows every arrival beforehand.

    python -m benchmarks.rarely_asked [--seconds 20] [--json FILE]

Sixteen equal models on sixteen GPUs, at parts of their goodput: the busy fraction less the load. What is `least` comes of
`foreseen/device_time.py`: all batches that serve these arrivals take at least so long together, if 1 % of each model's
requests are given up, or none.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from benchmarks.below_peak import SEED, look
from benchmarks.disciplines import CASES, WARMUP_MS
from benchmarks.figures import Figures, Line, add_json_option, tell
from benchmarks.foreseen.device_time import least_ms
from benchmarks.foreseen.highest import asked_of
from roles.workload.outcomes import Window

LOADS = (0.1, 0.2, 0.3, 0.4, 0.6, 0.8)
PEAK_RPS = 5_742.0  # the best of five disciplines on the case, docs/results/disciplines.md
CASE = next(case for case in CASES if case.name.startswith("16 ResNet50V2, 16 GPUs, 25 ms"))
PLAYED = ("deferred window", "tenuto", "eager window")


def least_busy(rate_rps: float, window: Window) -> tuple[float, float]:
    """The part of the GPUs' time that nobody can do without: with 1 % given up, and with nothing."""
    asked = asked_of(CASE, SEED, rate_rps, window)
    whole_ms = CASE.gpus * (window.until_ms - window.from_ms)
    none_given_up = [replace(one, given_up_max=0) for one in asked]
    return sum(map(least_ms, asked)) / whole_ms, sum(map(least_ms, none_given_up)) / whole_ms


def main() -> None:
    """Print a row a load."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--seconds", type=float, default=20.0)
    add_json_option(arguments)
    asked = arguments.parse_args()
    window = Window(WARMUP_MS, WARMUP_MS + 1e3 * asked.seconds)
    figures = Figures("many rarely asked models")
    table = figures.table(
        f"{CASE.name}: busy fraction less load",
        *("load", *PLAYED, "least, 1 % given up", "least, none given up"),
    )
    over_least = 0.0
    for load in LOADS:
        rate_rps = load * PEAK_RPS
        busy = [look(CASE, name, rate_rps, 1e3 * asked.seconds)[2] / CASE.gpus for name in PLAYED]
        least = least_busy(rate_rps, window)
        table.rows.append((f"{load:g}", *(round(one - load, 3) for one in (*busy, *least))))
        if load < 0.5:
            over_least = max(over_least, busy[PLAYED.index("tenuto")] - least[0])
    figures.lines.append(
        Line(
            "`tenuto` below half load, beyond the least that nobody can do without", over_least, at_most=0.05
        )
    )
    tell(figures, asked.json)


if __name__ == "__main__":
    main()
