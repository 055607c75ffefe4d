"""Four shards with 256 emulated GPUs, as real processes: a model moves under load, and one shard dies alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fabric.client import BlockingClient
from roles.benchmark.temporary_cluster import TemporaryCluster, temporary_cluster
from roles.runtime.process import read_run_file
from roles.runtime.running_cluster import active_schedulers, look
from tests.integration.proc import until
from tests.integration.steady_load import steady_load
from tests.integration.test_cli import tenuto

pytestmark = pytest.mark.timeout(300)

SHARDS, GPUS = 4, 64
DOCUMENT: dict[str, Any] = {
    "models": [
        {
            "name": f"m{at}",
            "slo_ms": 10_000,
            "shard": at % SHARDS,
            "profile": {"alpha_ms": 0.5, "beta_ms": 2, "max_batch": 8},
        }
        for at in range(2 * SHARDS)
    ],
    "cluster": {
        "shards": SHARDS,
        "frontends": 2,
        "nodes": [{"host": f"h{at}", "gpus": GPUS} for at in range(SHARDS)],
    },
    "batching": "eager",
}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[TemporaryCluster]:
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(DOCUMENT), encoding="utf-8")
    with temporary_cluster(path) as running:
        yield running
    assert not running.run_dir.exists()


def where(cluster: TemporaryCluster, model: str) -> list[int]:
    """The shards that have it."""
    active = active_schedulers(cluster.run_dir)
    return [
        shard
        for shard, one in active.items()
        if any(info.model_id == model and info.replicas for info in one.status.models)
    ]


def test_a_model_moves_under_load_and_the_others_do_not_notice_a_dead_shard(
    cluster: TemporaryCluster,
) -> None:
    run_dir = ("--run-dir", str(cluster.run_dir))
    report = look(cluster.run_dir)
    assert [one.scheduler for one in report.shards] == [f"scheduler-{k}" for k in range(SHARDS)]
    assert [(one.slices, one.gpus, len(one.models)) for one in report.shards] == [(GPUS, GPUS, 2)] * SHARDS
    plans = [cluster.run_dir / f"scheduler-{k}.plan" for k in range(SHARDS)]
    until(lambda: all(plan.exists() for plan in plans), what="what the next schedulers go on from")
    clients = list(cluster.endpoints["client"])
    rates = {"m0": 20.0, "m1": 20.0, "m3": 20.0}

    with steady_load(clients, rates) as fates:
        until(lambda: all(len(fates.of[model]) > 20 for model in rates), what="load")
        moved = tenuto("models", "move", "m0", "--to", "3", "--json", *run_dir, cwd=cluster.run_dir)
        assert moved.returncode == 0, moved.stderr
        assert json.loads(moved.stdout)["status"] == "ok"
        asked = len(fates.of["m0"])
        assert where(cluster, "m0") == [3]
        until(lambda: len(fates.of["m0"]) > asked + 20, what="answers of the new shard")
    assert {model: fates.refused(model) for model in rates} == {model: [] for model in rates}

    def what_if(*options: str) -> subprocess.CompletedProcess[str]:
        return tenuto("what-if", *options, "--json", *run_dir, cwd=cluster.run_dir)

    played = what_if("--rate", "m3=2")
    assert played.returncode == 0, played.stderr
    assert set(json.loads(played.stdout)["models"]) == {"m0", "m3", "m7"}, "what its shard plans for"
    for options in (("--rate", "m3=2", "--slo", "m1=90"), ("--gpus", "1")):
        refused = what_if(*options)
        assert (refused.returncode, "shard" in refused.stderr) == (1, True), refused.stderr

    again = tenuto("models", "move", "m0", "--to", "3", *run_dir, cwd=cluster.run_dir)
    assert again.returncode == 0, "it is there already"
    dead = read_run_file(cluster.run_dir / "scheduler-1.json")
    assert dead is not None
    with steady_load(clients, {"m0": 20.0, "m2": 20.0}) as fates:
        until(lambda: len(fates.of["m2"]) > 20, what="load")
        os.kill(dead.pid, signal.SIGKILL)
        until(lambda: _is_anew(cluster, dead.pid), what="its next process")
        asked = len(fates.of["m2"])
        until(lambda: len(fates.of["m2"]) > asked + 20, what="answers meanwhile")
    assert fates.refused("m0") == fates.refused("m2") == []
    with BlockingClient(clients) as client:  # by budget alone: it waits for its scheduler
        client.infer("m1", {"input": np.zeros(4, np.float32)})
    assert where(cluster, "m0") == [3], "the new shard's plan was kept"


def _is_anew(cluster: TemporaryCluster, former: int) -> bool:
    found = read_run_file(cluster.run_dir / "scheduler-1.json")
    return found is not None and found.pid != former
