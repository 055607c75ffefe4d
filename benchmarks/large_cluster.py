"""A cluster of 1,000 hosts with 8 GPUs each, simulated shard by shard: what it serves, and what simulating it takes.

Models have profiles between half and twice Symphony's ResNet50 (table 2), rates by Zipf's law (`--zipf`), SLOs from 50 to 100 ms; the
total is `--load` of what all GPUs could serve with batches that run for half the SLO. The network has 0.1 ms a control message,
0.01 ms an input, 0.2 ms for results and 0.05 ms of jitter. Everything counts: reading the configuration with its partition, placing,
arrivals, the run, the verdict. `--file FILE` writes the configuration, for `tenuto simulate FILE`.

    python -m benchmarks.large_cluster [--hosts 1000] [--gpus 8] [--models 800] [--shards 16] [--load 0.7] [--zipf 0.9] [--seconds 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import time
from pathlib import Path
from typing import Any

from benchmarks.figures import Figures, Line, add_json_option, tell
from roles.config.cluster import ClusterConfig
from roles.config.read_config import parse_config
from roles.simulator.simulation import simulate
from roles.workload.arrivals import workload_of
from roles.workload.outcomes import Window

ALPHA_MS, BETA_MS = 1.053, 5.072
WARMUP_MS = 500.0
BAD_RATE_MAX = 0.01


def configuration(
    hosts: int, gpus: int, models: int, shards: int, load: float, zipf: float
) -> dict[str, Any]:
    """The file, as a document."""
    draws = random.Random(1)
    sections: list[dict[str, Any]] = []
    busy_ms = 0.0
    weights = [number**-zipf for number in range(1, models + 1)]
    for number in range(models):
        factor = draws.uniform(0.5, 2.0)
        slo_ms = draws.choice([50, 60, 75, 100])
        alpha_ms, beta_ms = factor * ALPHA_MS, factor * BETA_MS
        batch = max(1, int((slo_ms / 2 - beta_ms) / alpha_ms))
        busy_ms += weights[number] / sum(weights) * (alpha_ms + beta_ms / batch)
        profile = {"alpha_ms": round(alpha_ms, 4), "beta_ms": round(beta_ms, 4), "max_batch": 64}
        sections.append({"name": f"m{number}", "slo_ms": slo_ms, "profile": profile})
    return {
        "rate_rps": round(load * hosts * gpus * 1000 / busy_ms),
        "popularity": {"zipf": zipf},
        "models": sections,
        "cluster": {
            "shards": shards,
            "frontends": 64,
            "nodes": [{"host": f"h{number}", "gpus": gpus} for number in range(hosts)],
            "network": {
                "control_ms": 0.1,
                "data_ms_per_item": 0.01,
                "result_ms": 0.2,
                "jitter_ms": 0.05,
            },
        },
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=1000)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--models", type=int, default=800)
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--zipf", type=float, default=0.9)
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--file", type=Path)
    add_json_option(parser)
    options = parser.parse_args()
    document = configuration(
        options.hosts, options.gpus, options.models, options.shards, options.load, options.zipf
    )
    if options.file is not None:
        options.file.write_text(json.dumps(document), encoding="utf-8")
        return
    began_s, cpu_s = time.monotonic(), time.process_time()
    config = parse_config(document, Path())
    read_s = time.process_time() - cpu_s
    window = Window(WARMUP_MS, WARMUP_MS + 1000 * options.seconds)
    run = simulate(config, workload_of(config), window)
    took_s, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
    memory_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    outcome = run.outcome
    requests = sum(one.arrived_at_ms.size for one in run.traffic)
    figures = Figures("large cluster, simulated")
    table = figures.table(
        f"{options.hosts} hosts, {options.gpus} GPUs each, {options.models} models, {options.shards} shards",
        *(
            "requests",
            "offered r/s",
            "bad %",
            "busy %",
            "batches",
            "read CPU s",
            "CPU s",
            "wall s",
            "memory GB",
        ),
    )
    busy = sum(outcome.gpus.busy_fraction) / len(outcome.gpus.busy_fraction)
    offered = outcome.offered / outcome.duration_s
    row = (requests, offered, 100 * outcome.bad_rate, 100 * busy, len(run.batches))
    table.rows.append((*row, read_s, cpu_s, took_s, memory_gb))
    shards = figures.table("by shard", "shard", "GPUs", "models", "offered r/s", "bad %", "busy %")
    for shard in range(config.shards):
        own = [run.outcome.models[model.model_id] for model in config.models if model.shard == shard]
        gpus = _gpus_of(config, shard)
        offered = sum(one.offered for one in own)
        bad = 1 - sum(one.good for one in own) / max(1, offered)
        share = sum(outcome.gpus.busy_fraction[index] for index in gpus) / max(1, len(gpus))
        shards.rows.append((shard, len(gpus), len(own), offered / options.seconds, 100 * bad, 100 * share))
    figures.lines.append(Line("bad rate, %", 100 * outcome.bad_rate, at_most=100 * BAD_RATE_MAX))
    tell(figures, options.json)


def _gpus_of(config: ClusterConfig, shard: int) -> list[int]:
    nodes = {node.node_id for node in config.nodes if node.shard == shard}
    return [gpu.index for gpu in config.gpus if gpu.node_id in nodes]


if __name__ == "__main__":
    main()
