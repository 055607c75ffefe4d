"""gpulet's schedulability grid: how many of 3^9 - 1 scenarios each scheduler serves on 2, 3 and 4 GPUs.

python -m benchmarks.gpulet_schedulability [--sample N] [--exhaustive N] [--processes N] [--json FILE]

Nine models, each at 0, 100 or 200 requests per second (Choi et al., ATC 2022, figures 5 and 16), on a SYNTHETIC
latency table (docs/results/gpulet.md). Exhaustive search looks at a seeded sample, and so does everyone else beside it.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from roles.lab.parallel import executor_of
from roles.lab.reproduce.gpulet import (
    SCHEDULERS,
    Scheduler,
    gpus_needed,
    grid_sample,
    grid_size,
    highest_rps,
    workloads,
)

GPU_COUNTS = (2, 3, 4)
CHUNK = 100
SEED = 1


def needed_by(
    pool: Executor, numbers: Sequence[int], scheduler: Scheduler, chunk: int = CHUNK
) -> dict[int, int]:
    """The fewest GPUs that serve each scenario, worked out by all processes."""
    chunks = [numbers[start : start + chunk] for start in range(0, len(numbers), chunk)]
    futures = [pool.submit(gpus_needed, part, max(GPU_COUNTS), scheduler) for part in chunks]
    return {number: count for future in futures for number, count in future.result().items()}


def grid(pool: Executor, sample: int, exhaustive: int) -> list[dict[str, Any]]:
    """One row for each scheduler and number of GPUs; `in_sample` counts the scenarios of exhaustive search."""
    numbers = grid_sample(sample, SEED)
    few = sorted(random.Random(SEED).sample(numbers, min(exhaustive, len(numbers))))
    rows: list[dict[str, Any]] = []
    print(
        f"{'scheduler':<36}  {'GPUs':>4}  {'served':>7}  {'scenarios':>9}  {'%':>6}  {'in sample':>9}  {'s':>6}"
    )
    for scheduler in SCHEDULERS:
        is_ideal = scheduler.search == "exhaustive"
        looked_at = few if is_ideal else numbers
        started_s = time.perf_counter()
        needed = needed_by(pool, looked_at, scheduler, 5 if is_ideal else CHUNK)
        took_s = round(time.perf_counter() - started_s, 1)
        for gpu_count in GPU_COUNTS:
            found = {number for number, count in needed.items() if count <= gpu_count}
            row = {
                "scheduler": scheduler.name,
                "gpus": gpu_count,
                "served": len(found),
                "scenarios": len(looked_at),
                "sample": len(few),
                "served_in_sample": len(found.intersection(few)),
                "seconds_for_all_counts": took_s,
            }
            rows.append(row)
            print(
                f"{scheduler.title:<36}  {gpu_count:>4}  {len(found):>7}  {len(looked_at):>9}"
                f"  {100 * len(found) / len(looked_at):>6.2f}  {row['served_in_sample']:>4}/{len(few):<4}  {took_s:>6}",
                flush=True,
            )
    return rows


def throughput(pool: Executor) -> list[dict[str, Any]]:
    """The highest total rate of each workload, on each number of GPUs."""
    futures = {
        (gpu_count, name, scheduler.name): pool.submit(highest_rps, members, gpu_count, scheduler)
        for gpu_count in GPU_COUNTS
        for name, members in workloads().items()
        for scheduler in SCHEDULERS
        if scheduler.search != "exhaustive"
    }
    rows = []
    print(f"{'GPUs':>4}  {'workload':<8}  {'scheduler':<12}  {'rps':>8}")
    for (gpu_count, name, scheduler), future in futures.items():
        total_rps = len(workloads()[name]) * future.result()
        rows.append({"gpus": gpu_count, "workload": name, "scheduler": scheduler, "rps": round(total_rps, 1)})
        print(f"{gpu_count:>4}  {name:<8}  {scheduler:<12}  {total_rps:>8.0f}", flush=True)
    return rows


def main() -> None:
    """Both tables, and all of it as JSON where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sample", type=int, default=grid_size(), help="scenarios, drawn with a seed; default all"
    )
    parser.add_argument("--exhaustive", type=int, default=300, help="scenarios for exhaustive search")
    parser.add_argument("--processes", type=int, default=None, help="default: one per core")
    parser.add_argument("--json", type=Path, default=None, help="also write the results there")
    asked = parser.parse_args()
    with executor_of(asked.processes) as (pool, _):
        found = {"grid": grid(pool, asked.sample, asked.exhaustive), "throughput": throughput(pool)}
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
