"""The placement follows the load, in virtual time: the controller that runs live, in the simulated world."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fabric.ids import ModelId
from roles.config import ClusterConfig, parse_config
from roles.outcomes import Window
from roles.scheduler.desired import controller_settings
from roles.scheduler.settings import settings_from
from roles.sim.simulation import Replanning, SimulatedRun, simulate
from roles.workload import Source, Workload

GROWS, STEADY = ModelId("grows"), ModelId("steady")
STEP_AT_MS = 40_000.0
UNTIL_MS = 160_000.0


def played(document: Mapping[str, Any], workload: Workload, window: Window) -> SimulatedRun:
    config: ClusterConfig = parse_config(document, Path())
    placement = config.place()
    settings = settings_from(config, placement)
    controller = controller_settings(config, document, "", placement, settings)
    return simulate(config, workload, window, settings, Replanning(controller))


def good(run: SimulatedRun, model_id: ModelId, from_ms: float, until_ms: float) -> float:
    """The fraction of what arrived in that time that was answered within its SLO."""
    (traffic,) = [one for one in run.traffic if one.model_id == model_id]
    is_in = (traffic.arrived_at_ms >= from_ms) & (traffic.arrived_at_ms < until_ms)
    took_ms = (traffic.finished_at_ms - traffic.arrived_at_ms)[is_in]
    return float(np.mean(np.nan_to_num(took_ms, nan=np.inf) <= traffic.slo_ms + 1e-6))


def test_when_a_rate_triples_the_plan_follows_and_nobody_else_notices() -> None:
    """A GPU of its own carries 16 / 25.2 ms = 635 r/s of `grows` at best, so 900 r/s need two."""
    line = {"alpha_ms": 1.2, "beta_ms": 6, "max_batch": 16}
    document = {
        "models": [
            {"name": "grows", "slo_ms": 60, "rate_rps": 300, "profile": line},
            {"name": "steady", "slo_ms": 60, "rate_rps": 50, "profile": line},
        ],
        "cluster": {"gpus": 6, "gpu_type": "v100"},
        "placement": "exclusive",
    }
    workload = Workload(
        7,
        (
            Source(GROWS, "uniform", ((0.0, 300.0), (STEP_AT_MS, 900.0))),
            Source(STEADY, "uniform", ((0.0, 50.0),)),
        ),
    )
    run = played(document, workload, Window(0.0, UNTIL_MS))
    assert good(run, GROWS, 0.0, STEP_AT_MS) > 0.99
    assert good(run, GROWS, STEP_AT_MS, STEP_AT_MS + 10_000) < 0.9  # before the plan followed
    assert good(run, GROWS, UNTIL_MS - 60_000, UNTIL_MS) > 0.99, "\n".join(run.log)
    assert good(run, STEADY, 0.0, UNTIL_MS) == 1.0
    assert any("grows has drifted" in line for line in run.log)
