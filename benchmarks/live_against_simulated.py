"""Live emulation beside the simulator: the same arrivals, the same devices, the same scheduler.

    python -m benchmarks.live_against_simulated [--gpus 8] [--scale 4] [--loads 0.4 0.75 0.95 1.2] [--seconds 8]
                                                [--repeat 3] [--batching deferred] [--many 64] [--json FILE]

ResNet50 of Symphony's table 2 on `--gpus` emulated devices, every time (run time and SLO) `--scale` times as long, so
that the host's cores can carry what the devices can. First the simulator finds the goodput; then each load, a part of
that, is played twice with one seed: on virtual time, and at a cluster of this host (supervisor, scheduler, frontend, node
agent, one worker for all devices, one sender) by the load tool. What counts is the goodput, requests answered within
their SLO a second: the live median of `--repeat` seeds beside the simulator's, at most 5 % apart. The simulator's network
takes no time, so the ledger of the live requests says what it cost.

Then `--many` devices in one cluster, at `--many-rate` requests a second: how long it takes to start, what it serves, and what each role takes of a core.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace

import numpy as np

from benchmarks.figures import Figures, Line, Table, add_json_option, tell
from benchmarks.stage import CpuMeter, Stage, by_kind, cluster, rss_bytes
from roles.benchmark.run import run_load
from roles.benchmark.share import STAGES, LoadPlan
from roles.benchmark.verdict import LoadRun
from roles.lab.goodput import find_goodput, question_of
from roles.lab.live_goodput import InlineExecutor
from roles.simulator.simulation import COOLDOWN_SLOS, simulate
from roles.workload.arrivals import Workload, workload_of
from roles.workload.outcomes import ModelOutcome, Outcome, Window

ALPHA_MS, BETA_MS, SLO_MS = 1.053, 5.072, 25.0
CLUSTER = """
models:
- name: resnet50
  slo_ms: {slo_ms:g}
  rate_rps: {rate_rps:g}
  profile: {{alpha_ms: {alpha_ms:g}, beta_ms: {beta_ms:g}, max_batch: 64}}
cluster: {{gpus: {gpus}}}
batching: {batching}
"""
CONFIGURED_RPS = 1_000.0
WARMUP_S = 1.0
APART_MAX = 0.05


def document(gpus: int, options: argparse.Namespace) -> str:
    """The cluster's configuration."""
    return CLUSTER.format(
        slo_ms=SLO_MS * options.scale,
        alpha_ms=ALPHA_MS * options.scale,
        beta_ms=BETA_MS * options.scale,
        rate_rps=CONFIGURED_RPS,
        gpus=gpus,
        batching=options.batching,
    )


def live(stage: Stage, workload: Workload, window: Window) -> LoadRun:
    """The workload at the cluster; load goes on behind the window as in the simulator."""
    cooldown_ms = COOLDOWN_SLOS * max(model.slo_ms for model in stage.config.models)
    plan = LoadPlan(stage.config, workload, stage.targets, window.until_ms + cooldown_ms, 1, 0)
    return run_load(plan, window, lambda _: None)


def model_of(outcome: Outcome) -> ModelOutcome:
    """There is only one."""
    (found,) = outcome.models.values()
    return found


def compare(stage: Stage, figures: Figures, options: argparse.Namespace) -> None:
    """Each load, both ways."""
    question = question_of(stage.config, WARMUP_S, options.seconds)
    goodput_rps = find_goodput(question, (1, 2, 3), InlineExecutor(), 1, lambda _: None).goodput_rps
    table = figures.table(
        f"{len(stage.config.gpus)} devices, goodput by simulation {goodput_rps:.0f} requests/s, SLO"
        f" {SLO_MS * options.scale:g} ms, {options.batching}: medians of {options.repeat} seeds",
        *("load", "where", "offered/s", "good/s", "bad %", "p50 ms", "p99 ms", "batch", "GPUs busy %"),
        *("sender late p99 ms",),
    )
    ledger = figures.table("the ledger of the live requests: p50 and p99 in ms", "load", *_stage_names())
    window = Window(WARMUP_S * 1e3, (WARMUP_S + options.seconds) * 1e3)
    for load in options.loads:
        simulated: list[Outcome] = []
        runs: list[LoadRun] = []
        for seed in range(1, options.repeat + 1):
            workload = replace(workload_of(stage.config), seed=seed)
            workload = workload.scaled(load * goodput_rps / CONFIGURED_RPS)
            simulated.append(simulate(stage.config, workload, window).outcome)
            runs.append(live(stage, workload, window))
        _row(table, load, "simulated", simulated, None)
        _row(table, load, "live", [run.outcome for run in runs], [run.sender_late_p99_ms for run in runs])
        ledger.rows.append((f"{load:g}", *_ledger_cells(runs)))
        ratio = statistics.median(
            run.outcome.good / outcome.good for run, outcome in zip(runs, simulated, strict=True)
        )
        figures.lines.append(
            Line(f"live goodput apart from the simulated at {load:g}", abs(1 - ratio), at_most=APART_MAX)
        )
        if not all(run.is_valid for run in runs):
            figures.remarks.append(
                f"at {load:g} a sender was late: that run says more of it than of the cluster"
            )


def _row(table: Table, load: float, where: str, outcomes: list[Outcome], late_ms: list[float] | None) -> None:
    columns = [
        (
            outcome.offered / outcome.duration_s,
            outcome.good / outcome.duration_s,
            100 * outcome.bad_rate,
            model_of(outcome).p50_ms or 0.0,
            model_of(outcome).p99_ms or 0.0,
            model_of(outcome).batch_mean or 0.0,
            100 * statistics.fmean(outcome.gpus.busy_fraction),
        )
        for outcome in outcomes
    ]
    medians = [statistics.median(column) for column in zip(*columns, strict=True)]
    late = None if late_ms is None else statistics.median(late_ms)
    table.rows.append((f"{load:g}", where, *medians, late))


def _stage_names() -> list[str]:
    return [name.removesuffix("_ms") for name in STAGES]


def _ledger_cells(runs: list[LoadRun]) -> list[str]:
    cells = []
    for name in STAGES:
        spent_ms = np.concatenate([run.column(name) for run in runs])
        spent_ms = spent_ms[~np.isnan(spent_ms)]
        p50, p99 = np.percentile(spent_ms, (50, 99)) if spent_ms.size else (np.nan, np.nan)
        cells.append(f"{p50:.2f} {p99:.2f}")
    return cells


def many(figures: Figures, options: argparse.Namespace) -> None:
    """Many devices in few processes."""
    with cluster(document(options.many, options)) as stage:
        workload = workload_of(stage.config).scaled(options.many_rate / CONFIGURED_RPS)
        window = Window(WARMUP_S * 1e3, (WARMUP_S + options.seconds) * 1e3)
        meter = CpuMeter(stage.pids)
        meter.begin()
        run = live(stage, workload, window)
        took_s, spent_s = meter.spent()
        rss_mb = {name: rss_bytes(pid) / 1e6 for name, pid in stage.pids.items()}
    outcome = run.outcome
    table = figures.table(
        f"{options.many} devices at {options.many_rate:g} requests/s",
        *("started in s", "good/s", "bad %", "p50 ms", "p99 ms", "GPUs used"),
    )
    model = model_of(outcome)
    good_rps = outcome.good / outcome.duration_s
    table.rows.append(
        (stage.start_s, good_rps, 100 * outcome.bad_rate, model.p50_ms, model.p99_ms, outcome.gpus.used)
    )
    costs = figures.table(f"{options.many} devices: processes", "role", "CPU %", "memory MB")
    memory_mb = by_kind(rss_mb)
    for kind, cpu_s in by_kind(spent_s).items():
        costs.rows.append((kind, 100 * cpu_s / took_s, memory_mb[kind]))
    figures.lines.append(Line(f"bad requests of {options.many} devices", outcome.bad_rate, at_most=0.01))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--scale", type=float, default=4.0)
    parser.add_argument("--loads", type=float, nargs="+", default=[0.4, 0.75, 0.95, 1.2])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--batching", default="deferred")
    parser.add_argument("--many", type=int, default=64)
    parser.add_argument("--many-rate", type=float, default=1_000.0)
    add_json_option(parser)
    options = parser.parse_args()
    figures = Figures("live against simulated")
    with cluster(document(options.gpus, options)) as stage:
        compare(stage, figures, options)
    if options.many:
        many(figures, options)
    tell(figures, options.json)


if __name__ == "__main__":
    main()
