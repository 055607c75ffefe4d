"""AlpaServe's case: whole models on a GPU each, beside groups of GPUs that cut every model into a stage a GPU.

    python -m benchmarks.alpaserve [--slo 1.05,1.5,2.5,5,10] [--variation 1,4] [--requests 6000] [--seeds 1] [--json FILE]

Sixteen models of AlpaServe's bert-1.3b on eight GPUs that hold two each, all asked for equally. `replicas` has two whole models on
each GPU; `groups of n` cut every model into n stages on a group of n GPUs, which then holds 2n models. Stages' times are those that
ship with AlpaServe's simulator. Requests come as a Poisson process (variation 1) or with gamma gaps of that coefficient of
variation. A cell is the highest total rate, in requests/s, at which less than 1 % of all requests miss an SLO of so many
times the run time of the whole model (AlpaServe's measure; bisected to 3 %, virtual time).

`batch 1`: first come first served without batches, as in its paper: `eager` with a largest batch of 1. `tenuto`: our default
discipline, with batches up to 8 on whole models and of 1 on groups, as `placement: alpaserve` plans them. What a batch takes is not among AlpaServe's figures; `BATCHED` is an assumption for a
model that nearly fills the GPU alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from roles.config.cluster import ClusterConfig
from roles.config.read_config import parse_config
from roles.scheduler.settings import settings_from
from roles.simulator.simulation import simulate
from roles.workload.arrivals import workload_of
from roles.workload.outcomes import Window

MODELS, GPUS, PER_GPU = 16, 8, 2
ALONE_MS = 99.0
STAGES = {2: [51, 52], 4: [28, 27, 27, 29], 8: [15, 14, 14, 14, 14, 14, 14, 16]}
MEMORY_MB = 2_600
BATCHED = {1: ALONE_MS, 8: ALONE_MS * (0.3 + 0.7 * 8)}
BAD_ALLOWED = 0.01
PRECISION = 0.03
BATCHINGS: Mapping[str, tuple[str, Mapping[int, float]]] = {
    "batch 1": ("eager", {1: ALONE_MS}),
    "tenuto": ("tenuto", BATCHED),
}


def document(group: int, batching: str, slo_factor: float, variation: float) -> dict[str, Any]:
    """Groups of that size, each with as many models as all have place for."""
    discipline, table = BATCHINGS[batching]
    arrival = {"process": "gamma", "shape": variation**-2} if variation != 1 else {"process": "poisson"}
    model = {
        "slo_ms": slo_factor * ALONE_MS,
        "rate_rps": 1.0,
        "arrival": arrival,
        "profile": {"table": table, "stages": STAGES},
        "memory_mb": MEMORY_MB,
    }
    held = PER_GPU * group
    slices = [
        {
            "gpu": first,
            "following": list(range(first + 1, first + group)),
            "models": [
                {"model": f"bert-{k}", "batch_max": None if group == 1 else 1}
                for k in range(number * held, (number + 1) * held)
            ],
        }
        for number, first in enumerate(range(0, GPUS, group))
    ]
    return {
        "models": [{"name": f"bert-{k}", **model} for k in range(MODELS)],
        "cluster": {"nodes": [{"host": "a", "gpus": GPUS, "memory_gb": (PER_GPU + 0.5) * MEMORY_MB / 1024}]},
        "batching": discipline,
        "placement": {"given": {"slices": slices}},
    }


def goodput_rps(config: ClusterConfig, seed: int, requests: int) -> float:
    """The highest total rate with less than 1 % bad; the same arrivals at all rates, bent to each."""
    settings = settings_from(config)
    if settings.unplaced:
        return 0.0  # no stage, or not all of them, in time for a single request
    workload = replace(workload_of(config), seed=seed)
    low, high = 0.0, max(1.0, 1000.0 * GPUS / ALONE_MS * 1.4)
    while high - low > PRECISION * low and high > 0.2:
        rate_rps = (low + high) / 2
        window = Window(0.0, 1000.0 * requests / rate_rps)
        run = simulate(config, workload.scaled(rate_rps / MODELS), window, settings)
        if run.outcome.bad_rate < BAD_ALLOWED:
            low = rate_rps
        else:
            high = rate_rps
    return low


def main() -> None:
    """Print a table for each batching and variation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slo", default="1.05,1.5,2.5,5,10")
    parser.add_argument("--variation", default="1,4")
    parser.add_argument("--batching", default=",".join(BATCHINGS))
    parser.add_argument("--requests", type=int, default=6_000)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    groups = (1, *STAGES)
    rows: list[dict[str, Any]] = []
    for batching in asked.batching.split(","):
        for variation in map(float, asked.variation.split(",")):
            print(f"\n{batching}, coefficient of variation {variation:g}: requests/s")
            print("SLO / l(1)" + "".join(f"{_name(group):>14}" for group in groups), flush=True)
            for factor in map(float, asked.slo.split(",")):
                found: dict[str, float] = {}
                for group in groups:
                    config = parse_config(document(group, batching, factor, variation), Path())
                    found[_name(group)] = median(
                        goodput_rps(config, seed, asked.requests) for seed in range(1, asked.seeds + 1)
                    )
                print(f"{factor:10g}" + "".join(f"{rps:14.1f}" for rps in found.values()), flush=True)
                rows.append(
                    {"batching": batching, "variation": variation, "slo_factor": factor, "goodput_rps": found}
                )
    if asked.json is not None:
        asked.json.write_text(json.dumps(rows, indent=1))


def _name(group: int) -> str:
    return "replicas" if group == 1 else f"groups of {group}"


if __name__ == "__main__":
    main()
