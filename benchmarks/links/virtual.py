"""A cluster over modelled lines, on virtual time: what the *decisions* are worth where lines are slow or far.

    python -m benchmarks.links.virtual [--gbit 1 8] [--delay-ms 0 1 3] [--size-mb 0.15 0.6] [--load 0.6 0.9]
                                       [--batching tenuto eager] [--slo-ms 50] [--gpus 1] [--frontends 1] …

The cores of frontends, scheduler and worker are the real ones (`tests/line_stage.py`); sockets, copies and late
timers cost nothing here, and one seed has one outcome on any machine. The rivals are the disciplines. A load of 1 is
what lines or GPUs can carry, whichever is less. One process.
"""

from __future__ import annotations

import argparse
import itertools
import random
from functools import partial

from benchmarks.figures import Figures, add_json_option, tell
from tests.line_stage import Line, LineStage

ALPHA_MS, BETA_MS, BATCH_MAX = 1.053, 5.072, 64
WARMUP_MS = 1_000.0
COLUMNS = ("offered_rps", "goodput_rps", "bad_percent", "p50_ms", "p99_ms", "transfer_ms", "batch_mean")


def run(
    options: argparse.Namespace, line: Line, size: int, rate_rps: float, batching: str
) -> tuple[float, ...]:
    """One run; `COLUMNS` over what was asked after the warm-up."""
    stage = LineStage(
        line,
        [ALPHA_MS * b + BETA_MS for b in range(1, BATCH_MAX + 1)],
        slo_ms=options.slo_ms,
        batching=batching,
        frontends=options.frontends,
        slices=options.gpus,
    )
    draws = random.Random(options.seed)
    at_ms = stage.now_ms
    from_ms = at_ms + WARMUP_MS
    until_ms = from_ms + 1000 * options.seconds
    for number in itertools.count():
        at_ms += draws.expovariate(rate_rps) * 1000
        if at_ms > until_ms:
            break
        stage.later(at_ms, partial(stage.ask, number, size, number % options.frontends))
    stage.run_until(until_ms + 1000)
    counted = [fate for fate in stage.fates.values() if fate.asked_at_ms > from_ms]
    ran = sorted(
        (fate for fate in counted if fate.code == "ok"),
        key=lambda fate: fate.answered_at_ms - fate.asked_at_ms,
    )
    took_ms = [fate.answered_at_ms - fate.asked_at_ms for fate in ran]
    good = sum(ms <= options.slo_ms for ms in took_ms)
    many = max(1, len(ran))
    return (
        len(counted) / options.seconds,
        good / options.seconds,
        100 * (1 - good / max(1, len(counted))),
        took_ms[len(ran) // 2] if ran else 0.0,
        took_ms[int(0.99 * len(ran))] if ran else 0.0,
        sum(fate.transfer_ms for fate in ran) / many,
        sum(fate.batch_size for fate in ran) / many,
    )


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gbit", type=float, nargs="+", default=[1.0, 8.0])
    parser.add_argument("--delay-ms", type=float, nargs="+", default=[0.0, 1.0, 3.0], help="one way")
    parser.add_argument("--size-mb", type=float, nargs="+", default=[0.15, 0.6], help="of a request")
    parser.add_argument("--load", type=float, nargs="+", default=[0.6, 0.9])
    parser.add_argument("--batching", nargs="+", default=["tenuto", "eager"])
    parser.add_argument("--slo-ms", type=float, default=50.0)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--frontends", type=int, default=1, help="each with a line of its own")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=1)
    add_json_option(parser)
    options = parser.parse_args()
    figures = Figures("links, virtual: the real cores over modelled lines")
    caption = (
        f"SLO {options.slo_ms:g} ms, {options.gpus} emulated GPU(s), Poisson, {options.seconds:g} s each"
    )
    table = figures.table(caption, "Gbit/s", "delay ms", "MB", "load", "batching", *COLUMNS)
    for gbit, delay_ms, size_mb, load, batching in itertools.product(
        options.gbit, options.delay_ms, options.size_mb, options.load, options.batching
    ):
        batch = max(1, int((options.slo_ms / 2 - BETA_MS) / ALPHA_MS))
        gpu_rps = options.gpus * batch / (ALPHA_MS * batch + BETA_MS) * 1e3
        rate_rps = load * min(gpu_rps, options.frontends * gbit * 125 / size_mb)
        found = run(options, Line(gbit * 125_000, delay_ms), int(size_mb * 1e6), rate_rps, batching)
        table.rows.append((gbit, delay_ms, size_mb, load, batching, *found))
    tell(figures, options.json)


if __name__ == "__main__":
    main()
