"""The placement follows the load, in virtual time: the controller that runs live, in the simulated world."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric.ids import ModelId
from policies.batching.registry import DISCIPLINES
from roles.config.read_config import ClusterConfig, parse_config
from roles.simulator.replanning import simulate_replanning
from roles.simulator.simulation import SimulatedRun
from roles.workload.arrivals import ArrivalSource, Workload
from roles.workload.outcomes import Window

GROWS, STEADY = ModelId("grows"), ModelId("steady")
STEP_AT_MS = 40_000.0
UNTIL_MS = 160_000.0


def played(document: Mapping[str, Any], workload: Workload, window: Window) -> SimulatedRun:
    config: ClusterConfig = parse_config(document, Path())
    return simulate_replanning(config, document, "", workload, window)


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
            ArrivalSource(GROWS, "uniform", ((0.0, 300.0), (STEP_AT_MS, 900.0))),
            ArrivalSource(STEADY, "uniform", ((0.0, 50.0),)),
        ),
    )
    run = played(document, workload, Window(0.0, UNTIL_MS))
    assert good(run, GROWS, 0.0, STEP_AT_MS) > 0.99
    assert good(run, GROWS, STEP_AT_MS, STEP_AT_MS + 10_000) < 0.9  # before the plan followed
    assert good(run, GROWS, UNTIL_MS - 60_000, UNTIL_MS) > 0.99, "\n".join(run.log)
    assert good(run, STEADY, 0.0, UNTIL_MS) == 1.0
    assert any("grows has drifted" in line for line in run.log)


def test_a_rate_that_falls_gives_gpus_back() -> None:
    line = {"alpha_ms": 1.2, "beta_ms": 6, "max_batch": 16}
    document = {
        "models": [{"name": "grows", "slo_ms": 60, "rate_rps": 300, "profile": line}],
        "cluster": {"gpus": 4},
        "placement": {"gpulet": {"interference": False}},
    }
    steps = ((0.0, 300.0), (30_000.0, 900.0), (100_000.0, 100.0))
    run = played(document, Workload(7, (ArrivalSource(GROWS, "uniform", steps),)), Window(0.0, 220_000.0))
    used = {
        at_ms: {one.slice_id for one in run.batches if at_ms <= one.started_at_ms < at_ms + 10_000}
        for at_ms in (10_000, 85_000, 200_000)
    }
    assert [len(slices) > 1 for slices in used.values()] == [False, True, False], "\n".join(run.log)
    assert good(run, GROWS, 70_000, 220_000) > 0.999, "\n".join(run.log)


def test_a_slice_that_breaks_its_promise_gives_way_to_a_larger_one() -> None:
    """Four models beside each other run longer than each alone, and 15 % of the GPU are free (iGniter 4.2)."""
    rates = {"alexnet": (15, 600.0), "resnet50": (20, 150.0), "vgg19": (30, 150.0), "ssd": (20, 60.0)}
    slices = [
        {"gpu": 0, "share_percent": share, "models": [{"model": name}]} for name, (share, _) in rates.items()
    ]
    document = {
        "models": [
            {"name": name, "slo_ms": 200, "rate_rps": rate, "profile": {"ref": f"igniter-v100/{name}"}}
            for name, (_, rate) in rates.items()
        ],
        "cluster": {"gpus": 1, "gpu_type": "v100", "interference": "igniter"},
        "batching": "eager",
        "placement": {"given": {"slices": slices}},
    }
    sources = tuple(
        ArrivalSource(ModelId(name), "uniform", ((0.0, rate),)) for name, (_, rate) in rates.items()
    )
    run = played(document, Workload(3, sources), Window(0.0, 20_000.0))
    assert any("moved: local/gpu0/4 for local/gpu0/1" in line for line in run.log), "\n".join(run.log)
    (share,) = {one.share_percent for one in run.batches if one.slice_id == "local/gpu0/4"}
    assert share == 30
    starts_at_ms = min(one.started_at_ms for one in run.batches if one.slice_id == "local/gpu0/4")
    ends_at_ms = max(one.finished_at_ms for one in run.batches if one.slice_id == "local/gpu0/1")
    assert abs(ends_at_ms - starts_at_ms) < 50, "the old one serves until the new one does, and no longer"
    assert all(good(run, ModelId(name), 0.0, 20_000.0) == 1.0 for name in rates)


@pytest.mark.parametrize("discipline", sorted(DISCIPLINES))
def test_every_discipline_takes_new_slices_and_lets_old_ones_go(discipline: str) -> None:
    """At 3 s more comes than was planned for; at 20 s the plan follows, and at 40 s it settles."""
    line = {"alpha_ms": 1.2, "beta_ms": 6, "max_batch": 16}
    options = {"fixed": {"batch": 8}, "timeout": {"slo_percent": 20}}.get(discipline)
    document = {
        "models": [
            {"name": "grows", "slo_ms": 100, "rate_rps": 60, "profile": line},
            {"name": "steady", "slo_ms": 100, "rate_rps": 60, "profile": line},
        ],
        "cluster": {"gpus": 4},
        "batching": discipline if options is None else {discipline: options},
        "placement": {"gpulet": {"interference": False}},
    }
    steps = ((0.0, 60.0), (3_000.0, 450.0))
    sources = (ArrivalSource(GROWS, "uniform", steps), ArrivalSource(STEADY, "uniform", ((0.0, 60.0),)))
    run = played(document, Workload(3, sources), Window(0.0, 60_000.0))
    assert any(line.startswith("moved") for line in run.log), "\n".join(run.log)
    for model_id in (GROWS, STEADY):
        assert good(run, model_id, 45_000, 60_000) > 0.8, "\n".join(run.log)
