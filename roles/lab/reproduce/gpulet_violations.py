"""gpulet's figure 14: SLO violations of plans made with and without its model of interference, emulated.

Each plan is played at the highest rate at which its scheduler still calls the workload schedulable, as in the figure; the GPUs run
with gpulet's own linear interference. The latency table is SYNTHETIC (see `gpulet.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from profiles.gpu import gpu_profile
from roles.config.cluster import ClusterConfig
from roles.config.read_config import parse_config
from roles.lab.reproduce.gpulet import (
    GPU_COUNT,
    GPU_TYPE,
    SCHEDULERS,
    SYNTHETIC,
    Scheduler,
    WorkloadModel,
    highest_rps,
    workloads,
)
from roles.lab.reproduce.report import Grid, Reproduction, Row, Value
from roles.scheduler.settings import settings_from
from roles.simulator.simulation import simulate
from roles.workload.arrivals import workload_of
from roles.workload.outcomes import Window

WINDOW = Window(2000.0, 12_000.0)
ALLOWED_PERCENT = 1.0
COMPARED = tuple(one for one in SCHEDULERS if one.search == "elastic")


def cluster(members: Sequence[WorkloadModel], scheduler: Scheduler, rate_rps: float) -> ClusterConfig:
    """The workload at that rate of every model, planned by that scheduler."""
    document: dict[str, Any] = {
        "models": [
            {
                "name": str(member.model_id),
                "slo_ms": member.slo_ms,
                "rate_rps": rate_rps,
                "profile": {"by_type": {GPU_TYPE: {"ref": f"gpulet-2080ti/{member.profile}"}}},
            }
            for member in members
        ],
        "cluster": {
            "nodes": [{"host": "server", "gpus": GPU_COUNT, "type": GPU_TYPE}],
            "interference": "gpulet",
        },
        "placement": {"gpulet": {"search": scheduler.search, "interference": scheduler.has_interference}},
    }
    return parse_config(document, Path(), source="gpulet's workloads")


def violations_percent(members: Sequence[WorkloadModel], scheduler: Scheduler, rate_rps: float) -> float:
    """Requests that miss their SLO, late or refused, of all models together."""
    config = cluster(members, scheduler, rate_rps)
    run = simulate(config, workload_of(config), WINDOW, settings_from(config))
    return 100 * run.outcome.bad_rate


def figure_14() -> Reproduction:
    """Seven workloads, two schedulers."""
    bars: list[tuple[str, tuple[Value, ...]]] = []
    found: dict[str, list[float]] = {scheduler.name: [] for scheduler in COMPARED}
    for name, members in workloads().items():
        cells: list[Value] = []
        for scheduler in COMPARED:
            rate_rps = highest_rps(members, GPU_COUNT, scheduler)
            percent = violations_percent(members, scheduler, rate_rps)
            found[scheduler.name].append(percent)
            cells += [round(rate_rps * len(members)), round(percent, 2)]
        bars.append((name, tuple(cells)))
    plain, aware = found.values()
    count = len(plain)
    return Reproduction(
        "gpulet-figure-14",
        "gpulet: SLO violations with and without its interference model",
        f"gpulet (ATC 2022), figure 14, here emulated on {GPU_COUNT} GPUs of {gpu_profile(GPU_TYPE).memory_bytes / 2**30:.0f} GiB "
        "under the discipline `tenuto`. The figure's bars are not labelled.",
        (
            Row(
                f"gpulet with interference: workloads of {count} under 1 % of violations",
                "all that it schedules (figure 13's caption)",
                sum(one < ALLOWED_PERCENT for one in aware),
                SYNTHETIC,
            ),
            Row(
                f"gpulet: workloads of {count} under 1 % of violations",
                "fewer",
                sum(one < ALLOWED_PERCENT for one in plain),
                SYNTHETIC,
            ),
            Row("worst workload, gpulet, % of violations", None, round(max(plain), 2)),
            Row("worst workload, gpulet with interference, % of violations", None, round(max(aware), 2)),
        ),
        (
            Grid(
                "Highest schedulable rate of all models together, requests/s, and % of violations there:",
                tuple(
                    f"{scheduler.name}: {what}" for scheduler in COMPARED for what in ("rate", "violations")
                ),
                tuple(bars),
            ),
        ),
    )
