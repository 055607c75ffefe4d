from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric.errors import ConfigError
from fabric.ids import ModelId
from roles.config.cluster import ClusterConfig
from roles.config.read_config import parse_config
from roles.simulator.simulation import SimulatedRun, simulate
from roles.workload.arrivals import NO_PRIORITY, workload_of
from roles.workload.outcomes import Window

MIX: dict[str, Any] = {
    "seed": 5,
    "models": [
        {"name": "resnet50", "slo_ms": 25, "rate_rps": 900, "profile": {"alpha_ms": 1.053, "beta_ms": 5.072}},
        {
            "name": "bert",
            "slo_ms": 60,
            "rate_rps": 200,
            "arrival": {"process": "gamma", "shape": 0.2},
            "profile": {"alpha_ms": 2, "beta_ms": 6},
        },
    ],
    "cluster": {
        "gpus": 3,
        "frontends": 2,
        "network": {"control_ms": 0.1, "data_ms_per_item": 0.02, "result_ms": 0.3, "jitter_ms": 0.05},
    },
}


def config(**changes: Any) -> ClusterConfig:
    return parse_config({**MIX, **changes}, Path())


def played(of: ClusterConfig, duration_ms: float = 2000.0, seed: int | None = None) -> SimulatedRun:
    return simulate(of, workload_of(of, seed), Window(500.0, 500.0 + duration_ms))


def history(run: SimulatedRun) -> str:
    return json.dumps([run.outcome.as_json(), run.batches])


def test_one_seed_is_one_history_and_another_seed_is_another() -> None:
    of = config()
    assert history(played(of)) == history(played(of))
    assert history(played(of)) != history(played(of, seed=6))


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("batching", ["tenuto", "deferred", "eager", {"timeout": {"timeout_ms": 5}}])
def test_in_an_overload_requests_of_a_lower_priority_go_first(
    tmp_path: Path, batching: Any, is_full: bool
) -> None:
    """Two of three ask for no priority, of a model whose priority is 1."""
    rows = "".join(f"{n * 0.25},{7 if n % 3 == 0 else ''}\n" for n in range(4_000))
    (tmp_path / "busy.csv").write_text(f"at_ms,priority\n{rows}", encoding="utf-8")
    trace = {"process": "trace", "path": "busy.csv"}
    of = parse_config(
        {
            "models": [
                {
                    "name": "m",
                    "slo_ms": 40,
                    "priority": 1,
                    "arrival": trace,
                    "profile": {"alpha_ms": 1, "beta_ms": 5, "max_batch": 16},
                }
            ],
            "cluster": {"gpus": 2, "frontends": 2},
            "batching": batching,
        },
        tmp_path,
    )
    run = simulate(of, workload_of(of), Window(200.0, 900.0), is_full=is_full)
    (traffic,) = run.traffic
    assert traffic.priorities is not None
    inside = (traffic.arrived_at_ms >= 200.0) & (traffic.arrived_at_ms < 900.0)
    is_served = ~np.isnan(traffic.finished_at_ms)
    important, other = (is_served[inside & (traffic.priorities == one)].mean() for one in (7, NO_PRIORITY))
    # Eager batches, with the simple drop, serve next to nothing here; what they serve is important.
    assert important > (0.2 if batching == "eager" else 0.9)
    assert other < (0.02 if important < 0.9 else 0.3)


def test_a_history_does_not_depend_on_the_hash_seed_of_the_process(tmp_path: Path) -> None:
    file = tmp_path / "mix.json"
    file.write_text(json.dumps(MIX), encoding="utf-8")
    command = [sys.executable, "-m", "roles.cli", "simulate", str(file), "--duration", "1", "--json"]
    outputs = {
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_every_request_has_one_fate_and_every_gpu_one_batch_at_a_time() -> None:
    run = played(config(rate_rps=None, cluster={"gpus": 1}))  # overload: some are dropped
    for model_id, model in run.outcome.models.items():
        assert model.offered == model.good + model.late + model.dropped
        ran = sum(batch.batch_size for batch in run.batches if batch.model_id == model_id)
        (traffic,) = (traffic for traffic in run.traffic if traffic.model_id == model_id)
        assert ran == np.count_nonzero(~np.isnan(traffic.finished_at_ms))
    assert run.outcome.bad_rate > 0.1
    ends_at_ms = 0.0
    for batch in sorted(run.batches, key=lambda batch: batch.started_at_ms):
        assert batch.started_at_ms >= ends_at_ms - 1e-9
        ends_at_ms = batch.finished_at_ms


def test_a_model_that_cannot_be_served_is_dropped_and_harms_nobody() -> None:
    tight = {"name": "tight", "slo_ms": 5, "rate_rps": 300, "profile": {"alpha_ms": 2, "beta_ms": 6}}
    plain = {"gpus": 3}  # jitter is drawn per message, whoever sends it
    alone = played(config(cluster=plain)).outcome
    beside = played(config(cluster=plain, models=[*MIX["models"], tight])).outcome
    models = beside.as_json()["models"]
    assert isinstance(models, dict)
    lost = models.pop("tight")
    assert lost["dropped"] == lost["offered"] > 500
    assert models == alone.as_json()["models"]


def test_no_requests_is_a_result_too() -> None:
    silent = [{**model, "rate_rps": 0} for model in MIX["models"]]
    outcome = played(config(models=silent)).outcome.as_json()
    assert (outcome["offered_rps"], outcome["goodput_rps"], outcome["bad_rate"]) == (0.0, 0.0, 0.0)
    assert outcome["gpus"] == {"count": 3, "busy_fraction": [0.0, 0.0, 0.0], "used": 0}


def test_more_requests_than_memory_holds_are_refused_before_they_are_drawn() -> None:
    greedy = [{**MIX["models"][0], "rate_rps": 1e9}]
    with pytest.raises(ConfigError, match="holds at most"):
        played(config(models=greedy), duration_ms=1e6)


def test_slices_of_one_gpu_run_side_by_side() -> None:
    given = {
        "given": {
            "slices": [
                {"gpu": 0, "share_percent": 60, "models": [{"model": "resnet50"}]},
                {"gpu": 0, "share_percent": 40, "models": [{"model": "bert"}]},
            ]
        }
    }
    run = played(config(placement=given, cluster={"gpus": 1}))
    assert 0.5 < run.outcome.gpus.busy_fraction[0] <= 1.0
    by_start = sorted(run.batches, key=lambda batch: batch.started_at_ms)
    assert any(after.started_at_ms < before.finished_at_ms for before, after in itertools.pairwise(by_start))


@pytest.mark.parametrize("exec_ms", [10.0, 100_000.0])
@pytest.mark.parametrize("slo_s", [0.1, 300.0, 7200.0])
@pytest.mark.parametrize("discipline", ["deferred", "eager", "tenuto", "clockwork"])
def test_a_run_lasts_until_the_last_request_has_met_its_fate(
    discipline: str, slo_s: float, exec_ms: float
) -> None:
    """However long a batch is held, and however long it takes."""
    of = parse_config(
        {
            "models": [
                {
                    "name": "patient",
                    "slo_ms": slo_s * 1000,
                    "rate_rps": [[0, 1], [10, 0]],
                    "arrival": {"process": "uniform", "phase": 0.5},
                    "profile": {"alpha_ms": 0.001, "beta_ms": exec_ms, "max_batch": 64},
                }
            ],
            "cluster": {"gpus": 1},
            "batching": discipline,
        },
        Path(),
    )
    run = simulate(of, workload_of(of), Window(0.0, 20_000.0))
    model = run.outcome.models[ModelId("patient")]
    assert model.offered == 10
    assert model.good == (10 if exec_ms < slo_s * 1000 / 2 else 0)
