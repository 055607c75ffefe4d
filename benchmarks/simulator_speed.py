"""Requests per second through the simulator, on one core (design section 12; the line is 200,000).

Symphony's table 2, first workload: ResNet50 on 8 GPUs, SLO 25 ms, at its goodput. The whole run counts:
arrivals, world, scheduler core, discipline, and the verdict. The best of several runs is the machine's, the
spread is its neighbours'. A shared core is now twice as fast and now half, so each run stands between two calibrations
(a million turns of an empty loop), and its cost is also given in such turns: that figure is the code's own.

    python -m benchmarks.simulator_speed [--seconds 20] [--repeat 5] [--batching deferred] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from benchmarks.figures import Figures, Line, add_json_option, tell
from roles.config.read_config import parse_config
from roles.simulator.simulation import simulate
from roles.workload.arrivals import workload_of
from roles.workload.outcomes import Window

LINE_RPS = 200_000
WARMUP_MS = 5000.0
TURNS = 1_000_000


def calibration_s() -> float:
    """What this core takes for a million turns of an empty loop now."""
    began_s = time.process_time()
    total = 0
    for turn in range(TURNS):
        total += turn
    return time.process_time() - began_s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the simulated window")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--batching", default="deferred")
    add_json_option(parser)
    options = parser.parse_args()
    figures = Figures("simulator speed")
    table = figures.table(
        f"{options.seconds:g} s of table 2, {options.batching}",
        *("requests", "batches", "CPU s", "requests/s", "ms a million turns", "turns a request"),
    )
    config = parse_config(
        {
            "models": [
                {
                    "name": "resnet50",
                    "slo_ms": 25,
                    "rate_rps": 5264,
                    "profile": {"alpha_ms": 1.053, "beta_ms": 5.072},
                }
            ],
            "cluster": {"gpus": 8},
            "batching": options.batching,
        },
        Path(),
    )
    window = Window(WARMUP_MS, WARMUP_MS + options.seconds * 1000)
    rates = []
    costs = []
    for _ in range(options.repeat):
        before_s = calibration_s()
        began_s = time.process_time()
        run = simulate(config, workload_of(config), window)
        took_s = time.process_time() - began_s
        requests = sum(one.arrived_at_ms.size for one in run.traffic)
        turn_s = (before_s + calibration_s()) / 2 / TURNS
        rates.append(requests / took_s)
        costs.append(took_s / requests / turn_s)
        table.rows.append((requests, len(run.batches), took_s, rates[-1], 1e3 * turn_s * TURNS, costs[-1]))
    figures.lines.append(Line("requests/s, the best run", max(rates), at_least=LINE_RPS))
    figures.remarks.append(
        f"a request costs {statistics.median(costs):.0f} turns of an empty loop in the median"
    )
    tell(figures, options.json)


if __name__ == "__main__":
    main()
