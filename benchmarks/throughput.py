"""Requests per second through one frontend, one scheduler and emulated devices, without payload.

    python -m benchmarks.throughput [--rates 2000 4000 6000 8000 10000 12000 16000] [--seconds 4] [--repeat 3]
                                    [--senders 2] [--batching tenuto] [--gather-ms 0] [--json FILE]

A cluster of this host: supervisor, scheduler, frontend, node agent, one worker with four emulated devices, and
`--senders` processes of the load tool (`tenuto bench`'s own), open loop, Poisson, latency from the intended moment.
All of them share this host's cores. The devices carry ten times the line (128 requests in 4.6 ms, each), so they are
not what ends the ladder. A rate is sustained when fewer than 1 % are bad: refused, or later than the SLO of 50 ms. Rates
are climbed until two in a row are not; the highest sustained one is then measured `--repeat` times, and counts if most
of these hold. A run whose senders were late says nothing and is marked; late senders make latency look worse, never
better. CPU is that of the middle of a run, by kind of process, a request.

There is no rival here: those are in `benchmarks/peers`, with the same load on the same model.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.figures import Figures, Line, add_json_option, tell
from benchmarks.stage import CpuMeter, Stage, by_kind, children, cluster
from policies.slo import BAD_RATE_ALLOWED
from roles.benchmark.run import run_load
from roles.benchmark.share import LoadPlan
from roles.benchmark.verdict import LoadRun
from roles.workload.arrivals import workload_of
from roles.workload.outcomes import Window, nearest_rank

CLUSTER = """
models: [{{name: sleeper, slo_ms: 50, rate_rps: {rate_rps:g}, profile: {{alpha_ms: 0.02, beta_ms: 2, max_batch: 128}}}}]
cluster: {{gpus: 4}}
batching: {batching}
"""
CONFIGURED_RPS = 1_000.0
LINE_RPS = 10_000.0
WARMUP_S = 1.0
GIVE_UP_AFTER = 2  # rates in a row that are not sustained
METER_FROM, METER_UNTIL = 0.5, 1.0  # of the run's length: the senders' own start lies before


@dataclass(slots=True)
class Step:
    """One rate, played once. `cpu_us` a request, by kind of process."""

    rate_rps: float
    run: LoadRun
    cpu_us: dict[str, float]

    @property
    def bad_rate(self) -> float:
        """Refused or late, of all."""
        return self.run.outcome.worst_bad_rate

    @property
    def is_sustained(self) -> bool:
        """Within the SLO, whatever the senders' lateness added."""
        return self.bad_rate < BAD_RATE_ALLOWED

    @property
    def verdict(self) -> str:
        """In a word."""
        if self.is_sustained:
            return "sustained"
        return "missed" if self.run.is_valid else "missed, senders late"


def play(stage: Stage, rate_rps: float, seconds: float, senders: int, gather_ms: float) -> Step:
    """Send that load once."""
    workload = workload_of(stage.config).scaled(rate_rps / CONFIGURED_RPS)
    window = Window(WARMUP_S * 1e3, (WARMUP_S + seconds) * 1e3)
    plan = LoadPlan(stage.config, workload, stage.targets, window.until_ms, senders, 0, gather_ms)
    meters: list[CpuMeter] = []
    cpu_us: dict[str, float] = {}

    def look(part: float) -> None:
        """Called a few times a second, with the part of the run that has passed."""
        if not meters and METER_FROM <= part < METER_UNTIL:
            ours = {f"senders-{pid}": pid for pid in children(os.getpid()) if pid not in stage.pids.values()}
            meters.append(CpuMeter({**stage.pids, **ours}))
            meters[0].begin()
        elif meters and not cpu_us and part >= METER_UNTIL:
            took_s, spent_s = meters[0].spent()
            cpu_us.update({kind: s * 1e6 / (took_s * rate_rps) for kind, s in by_kind(spent_s).items()})

    run = run_load(plan, window, look)
    return Step(rate_rps, run, cpu_us)


def main() -> None:
    """Climb, then repeat at the top."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=[2_000, 4_000, 6_000, 8_000, 10_000, 12_000, 16_000, 20_000],
        help="ascending",
    )
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--senders", type=int, default=2)
    parser.add_argument("--batching", default="tenuto")
    parser.add_argument(
        "--gather-ms",
        type=float,
        default=0.0,
        help="send together what is due within so much, as a gateway does",
    )
    add_json_option(parser)
    options = parser.parse_args()
    figures = Figures("throughput")
    with cluster(CLUSTER.format(batching=options.batching, rate_rps=CONFIGURED_RPS)) as stage:
        kinds = ["senders", *by_kind(dict.fromkeys(stage.pids, 0.0))]
        table = figures.table(
            f"requests/s, no payload, SLO 50 ms, {options.batching}; CPU in microseconds a request",
            *(
                "offered",
                "p50 ms",
                "p99 ms",
                "bad %",
                "batch",
                "sender late p99 ms",
                *kinds,
                "all CPU",
                "verdict",
            ),
        )
        sustained: list[float] = []
        missed = 0
        for rate_rps in options.rates:
            step = play(stage, rate_rps, options.seconds, options.senders, options.gather_ms)
            table.rows.append(_row(step, kinds))
            if step.is_sustained:
                sustained.append(rate_rps)
            missed = 0 if step.is_sustained else missed + 1
            if missed == GIVE_UP_AFTER:
                break
        highest = 0.0
        while sustained and not highest:
            rate_rps = sustained.pop()
            steps = [
                play(stage, rate_rps, options.seconds, options.senders, options.gather_ms)
                for _ in range(options.repeat)
            ]
            table.rows.extend(_row(step, kinds) for step in steps)
            if statistics.median(step.bad_rate for step in steps) < BAD_RATE_ALLOWED:
                highest = rate_rps
    figures.lines.append(Line("requests/s sustained, p99 within 50 ms", highest, at_least=LINE_RPS))
    tell(figures, options.json)


def _row(step: Step, kinds: Sequence[str]) -> tuple[str | float | None, ...]:
    latency_ms, batch_sizes = (_known(step.run.column(name)) for name in ("latency_ms", "batch_size"))
    return (
        step.rate_rps,
        nearest_rank(latency_ms, 0.5),
        nearest_rank(latency_ms, 0.99),
        100 * step.bad_rate,
        float(batch_sizes.mean()) if batch_sizes.size else None,
        step.run.sender_late_p99_ms,
        *(step.cpu_us.get(kind) for kind in kinds),
        sum(step.cpu_us.values()),
        step.verdict,
    )


def _known(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Those of answered requests, ascending."""
    return np.sort(values[~np.isnan(values)])


if __name__ == "__main__":
    main()
