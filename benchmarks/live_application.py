"""An application in a living cluster beside its simulation: gpulet's traffic, one detector and two classifiers.

    python -m benchmarks.live_application [--rates 300] [--scale 4] [--gpus 16] [--seconds 10] [--repeat 3] [--json FILE]

Emulated devices take `--scale` times what gpulet's tables say, and the SLO is as much longer, so that the host's cores can carry what the devices can.
Each rate is played with the same arrivals and the same draws of fan-outs on virtual time and at a cluster of this host. Goodput may be 5 % apart.
Each answer's ledger is held against itself: the stages on its path must sum to the whole, and each request must have one answer.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import yaml

from benchmarks.figures import Figures, Line, add_json_option, tell
from benchmarks.stage import Stage, cluster
from fabric.client import Client
from fabric.errors import FabricError
from roles.benchmark.run import run_load
from roles.benchmark.share import LoadPlan
from roles.benchmark.verdict import LoadRun
from roles.config.read_config import parse_config
from roles.simulator.simulation import COOLDOWN_SLOS, simulate
from roles.workload.arrivals import Workload, workload_of
from roles.workload.outcomes import Window

MODELS = {"ssd": "ssd-mobilenetv1", "googlenet": "googlenet", "vgg16": "vgg16"}
SLO_MS = 136.0
WARMUP_S = 1.0
APART_MAX = 0.05
LEDGERS = 200  # that are looked at one by one


def document(options: argparse.Namespace, rate_rps: float) -> str:
    """The cluster's configuration."""
    shipped = {
        "models": [
            {"name": name, "slo_ms": 1e6, "profile": {"ref": f"gpulet-2080ti/{ref}"}}
            for name, ref in MODELS.items()
        ],
        "cluster": {"gpus": 1},
    }
    tables = {
        str(model.model_id): model.find_profile("generic") for model in parse_config(shipped, Path()).models
    }
    models = [
        {
            "name": name,
            "profile": {
                "table": {size: options.scale * time for size, time in enumerate(profile.exec_table(), 1)}
            },
        }
        for name, profile in tables.items()
        if profile is not None
    ]
    stages = {
        "detect": {"model": "ssd"},
        "cars": {"model": "googlenet", "after": "detect", "fan_out": {"poisson": 1.2}},
        "people": {"model": "vgg16", "after": "detect", "fan_out": {"share": 0.8}},
    }
    application = {
        "name": "traffic",
        "slo_ms": SLO_MS * options.scale,
        "rate_rps": rate_rps,
        "stages": stages,
    }
    return yaml.safe_dump(
        {"models": models, "applications": [application], "cluster": {"gpus": options.gpus}}, sort_keys=False
    )


def live(stage: Stage, workload: Workload, window: Window) -> LoadRun:
    """The workload at the cluster; load goes on behind the window as in the simulator."""
    (application,) = stage.config.applications
    until_ms = window.until_ms + COOLDOWN_SLOS * application.slo_ms
    plan = LoadPlan(stage.config, workload, stage.targets, until_ms, 1, 4096)
    return run_load(plan, window, lambda _: None)


async def ledgers(stage: Stage) -> tuple[float, Counter[str]]:
    """The largest gap between a path's stages and the whole, of some requests one after the other, and what became of them."""
    gap_ms, ends = 0.0, Counter[str]()
    async with Client(stage.targets) as client:
        for _ in range(LEDGERS):
            try:
                result = await client.run("traffic", {"input": np.zeros(4096, np.uint8)})
            except FabricError as error:
                ends[type(error).__name__] += 1
                continue
            ends["answered"] += 1
            path_ms = sum(line.ledger.total_ms for line in result.stages if line.is_on_path)
            gap_ms = max(gap_ms, abs(path_ms + result.ledger.network_ms - result.ledger.total_ms))
    return gap_ms, ends


def compare(figures: Figures, options: argparse.Namespace) -> None:
    """Each rate, both ways."""
    table = figures.table(
        f"traffic on {options.gpus} devices, times and SLO x {options.scale:g}: medians of {options.repeat} seeds",
        *("requests/s", "where", "good/s", "bad %", "p50 ms", "p99 ms", "sender late p99 ms"),
    )
    window = Window(WARMUP_S * 1e3, (WARMUP_S + options.seconds) * 1e3)
    for rate_rps in options.rates:
        with cluster(document(options, rate_rps)) as stage:
            gap_ms, ends = asyncio.run(ledgers(stage))
            figures.lines.append(Line(f"ms between path and whole at {rate_rps:g}", gap_ms, at_most=1e-6))
            figures.remarks.append(f"{LEDGERS} requests one by one: {dict(ends)}")
            simulated, runs = [], []
            for seed in range(1, options.repeat + 1):
                workload = replace(workload_of(stage.config), seed=seed)
                simulated.append(simulate(stage.config, workload, window).outcome)
                runs.append(live(stage, workload, window))
        for where, outcomes in (("simulated", simulated), ("live", [run.outcome for run in runs])):
            fates = [outcome.applications["traffic"].requests for outcome in outcomes]
            table.rows.append(
                (
                    rate_rps,
                    where,
                    statistics.median(fate.good / options.seconds for fate in fates),
                    100 * statistics.median(fate.bad_rate for fate in fates),
                    statistics.median(fate.p50_ms or 0.0 for fate in fates),
                    statistics.median(fate.p99_ms or 0.0 for fate in fates),
                    None
                    if where == "simulated"
                    else statistics.median(run.sender_late_p99_ms for run in runs),
                )
            )
        ratio = statistics.median(
            run.outcome.good / outcome.good for run, outcome in zip(runs, simulated, strict=True)
        )
        figures.lines.append(
            Line(f"live goodput apart from the simulated at {rate_rps:g}", abs(1 - ratio), at_most=APART_MAX)
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[300.0])
    parser.add_argument("--gpus", type=int, default=16)
    parser.add_argument("--scale", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--repeat", type=int, default=3)
    add_json_option(parser)
    options = parser.parse_args()
    figures = Figures("a living application against its simulation")
    compare(figures, options)
    tell(figures, options.json)


if __name__ == "__main__":
    main()
