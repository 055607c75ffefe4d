"""Write a trace like Azure Functions' of 2019, in its public format: popularity, days and timers as published, functions invented.

    python examples/azure_like_trace.py trace.csv [--functions 200] [--minutes 60] [--rate 50] [--seed 1]

A configuration then plays it with `arrival: {process: trace, path: trace.csv}`, as it plays the public files themselves. Of the
published statistics (Shahrad et al., "Serverless in the Wild", USENIX ATC 2020, section 3) it has: rates of functions over eight orders
of magnitude, 45 % invoked at most once an hour, 81 % at most once a minute, the others having nearly all invocations (99.6 %); half
of the load constant, the rest in a daily wave; timers, every sixth function, at even gaps. Rates are then scaled to `--rate` in all.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import random
from pathlib import Path

MINUTES_A_DAY = 1440
HOUR = 60.0
POPULARITY = ((0.0, -5.0), (0.45, -math.log10(HOUR)), (0.81, 0.0), (1.0, 3.0))
"""(part of the functions, log10 of invocations a minute): between them the logarithm is linear."""
TIMERS = 1 / 6


def rate_a_minute(part: float) -> float:
    """Of the function that so large a part of all functions is less popular than."""
    for (low, low_log), (high, high_log) in itertools.pairwise(POPULARITY):
        if part <= high:
            return float(10 ** (low_log + (part - low) / (high - low) * (high_log - low_log)))
    raise ValueError(f"{part} is no part of a whole")


def counts(rate: float, minutes: int, draw: random.Random, *, is_timer: bool) -> list[int]:
    """Invocations minute by minute, at that mean rate a minute."""
    if is_timer:
        phase = draw.random()
        return [math.floor((m + 1) * rate + phase) - math.floor(m * rate + phase) for m in range(minutes)]
    found = []
    for minute in range(minutes):
        expected = rate * (1 + 0.5 * math.sin(2 * math.pi * minute / MINUTES_A_DAY))
        found.append(_poisson(expected, draw))
    return found


def _poisson(expected: float, draw: random.Random) -> int:
    """Knuth's product for few, the normal law for many."""
    if expected > 100:
        return max(0, round(draw.gauss(expected, math.sqrt(expected))))
    limit, product, count = math.exp(-expected), draw.random(), 0
    while product > limit:
        product *= draw.random()
        count += 1
    return count


def write(path: Path, functions: int, minutes: int, rate_rps: float, seed: int) -> None:
    """The file; `rate_rps` is the mean of all functions together."""
    draw = random.Random(seed)
    rates = [rate_a_minute((number + draw.random()) / functions) for number in range(functions)]
    factor = 60 * rate_rps / sum(rates)
    draw.shuffle(rates)
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(["HashOwner", "HashApp", "HashFunction", "Trigger", *range(1, minutes + 1)])
        for number, rate in enumerate(rates):
            is_timer = draw.random() < TIMERS
            trigger = "timer" if is_timer else "http"
            own = counts(rate * factor, minutes, draw, is_timer=is_timer)
            lines.writerow([f"owner{number}", f"app{number}", f"function{number}", trigger, *own])


def main() -> None:
    """Parse and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path)
    parser.add_argument("--functions", type=int, default=200)
    parser.add_argument("--minutes", type=int, default=60)
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    write(options.path, options.functions, options.minutes, options.rate, options.seed)


if __name__ == "__main__":
    main()
