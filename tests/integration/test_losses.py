"""A real cluster loses its processes, one after another, while requests come: who had time left notices nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fabric.client import BlockingClient, ask_status
from fabric.errors import NoReplica, PeerLost, WorkerLost
from fabric.messages import SliceState
from roles.benchmark.temporary_cluster import TemporaryCluster, temporary_cluster
from roles.runtime.process import read_run_file
from tests.integration.proc import CLOCK, until
from tests.integration.steady_load import steady_load

ROOT = Path(__file__).parents[2]
PROFILE = "profile: {alpha_ms: 0.1, beta_ms: 2, max_batch: 16}"
# Budgets far over what a busy host takes to start a process: what is lost here is lost by us.
PAIRS = f"""
models:
 - {{name: m, slo_ms: 30000, {PROFILE}}}
cluster:
  frontends: 2
  nodes:
   - {{host: a, gpus: 1}}
   - {{host: b, gpus: 1}}
batching: eager
"""
ALONE = f"""
models:
 - {{name: m, slo_ms: 30000, {PROFILE}}}
 - {{name: once, slo_ms: 30000, idempotent: false, profile: {{alpha_ms: 0, beta_ms: 300, max_batch: 1}}}}
cluster: {{gpus: 1}}
batching: eager
"""
INPUT = {"input": np.zeros(4, np.float32)}


@pytest.fixture
def pairs(tmp_path: Path) -> Iterator[TemporaryCluster]:
    file = tmp_path / "pairs.yaml"
    file.write_text(PAIRS)
    with temporary_cluster(file) as cluster:
        yield cluster


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[TemporaryCluster]:
    file = tmp_path / "alone.yaml"
    file.write_text(ALONE)
    with temporary_cluster(file) as cluster:
        yield cluster


def pid_of(cluster: TemporaryCluster, role_id: str) -> int:
    until(lambda: read_run_file(cluster.run_dir / f"{role_id}.json") is not None, what=f"{role_id}'s start")
    found = read_run_file(cluster.run_dir / f"{role_id}.json")
    assert found is not None
    return found.pid


def worker_of(cluster: TemporaryCluster, node: str) -> int:
    agent = pid_of(cluster, f"node-{node}")
    children = Path(f"/proc/{agent}/task/{agent}/children")
    until(lambda: bool(children.read_text()), what="the worker's start")
    return int(children.read_text().split()[0])


def is_whole(cluster: TemporaryCluster, slices: int) -> bool:
    try:
        states = [one.state for one in ask_status(cluster.endpoints["control"]).slices]
    except PeerLost:
        return False
    return states == [SliceState.READY] * slices


def command(cluster: TemporaryCluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "roles.cli", *arguments, "--run-dir", str(cluster.run_dir)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def test_kill_after_kill_fails_no_request_that_has_time(pairs: TemporaryCluster) -> None:
    with steady_load(pairs.endpoints["client"], {"m": 100.0}) as fates:
        for kill in ("worker", "frontend-0", "node-a", "scheduler-0"):
            time.sleep(0.5)
            pid = worker_of(pairs, "b") if kill == "worker" else pid_of(pairs, kill)
            os.kill(pid, signal.SIGKILL)
            until(lambda: not Path(f"/proc/{pid}").exists())  # noqa: B023  it is waited for in here
            until(lambda: is_whole(pairs, 2), what=f"the return after the loss of {kill}")
    assert len(fates.of["m"]) > 100
    assert fates.refused("m") == []


def test_a_rolling_restart_fails_no_request(pairs: TemporaryCluster) -> None:
    roles = ("scheduler-0", "node-a", "node-b", "frontend-0", "frontend-1")
    before = {role: pid_of(pairs, role) for role in roles}
    workers = {worker_of(pairs, "a"), worker_of(pairs, "b")}
    endpoints = pairs.endpoints["client"]
    with steady_load(endpoints, {"m": 100.0}) as fates:
        done = command(pairs, "restart", "--rolling", "--json")
    assert (done.returncode, json.loads(done.stdout)["restarted"]) == (0, len(roles)), done.stderr
    assert fates.refused("m") == []
    assert all(pid_of(pairs, role) != pid for role, pid in before.items())
    assert not workers & {worker_of(pairs, "a"), worker_of(pairs, "b")}
    tcp = [address for address in endpoints if address.startswith("tcp://")]
    with BlockingClient(tcp) as client:  # clients of other hosts find them where they were
        client.infer("m", INPUT)


def test_a_role_is_drained_and_comes_back(pairs: TemporaryCluster) -> None:
    with steady_load(pairs.endpoints["client"], {"m": 100.0}) as fates:
        pid = pid_of(pairs, "frontend-0")
        assert command(pairs, "drain", "frontend-0").returncode == 0
        assert not Path(f"/proc/{pid}").exists()
        refused = command(pairs, "drain", "frontend-1")
        assert (refused.returncode, "no frontend would be left" in refused.stderr) == (3, True)
        assert command(pairs, "drain", "node-b").returncode == 0
        assert command(pairs, "drain", "frontend-0", "--back").returncode == 0
        assert command(pairs, "drain", "node-b", "--back").returncode == 0
        until(lambda: is_whole(pairs, 2), what="the node's return")
    assert fates.refused("m") == []


def test_requests_wait_for_the_only_worker_that_is_started_again(alone: TemporaryCluster) -> None:
    with BlockingClient(alone.endpoints["client"]) as client:
        client.infer("m", INPUT)
        first = worker_of(alone, "local")
        os.kill(first, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{first}").exists())
        futures = [client.submit("m", INPUT) for _ in range(20)]
        time.sleep(0.05)
        with pytest.raises(NoReplica):
            client.infer("m", INPUT, budget_ms=20.0)  # no process starts in so short a time
        for future in futures:
            assert future.result(40.0) is not None


def test_what_must_not_run_twice_is_refused_when_its_worker_is_lost(alone: TemporaryCluster) -> None:
    with BlockingClient(alone.endpoints["client"]) as client:
        client.infer("once", INPUT)
        future = client.submit("once", INPUT)
        time.sleep(0.15)  # of the 300 ms that it runs
        os.kill(worker_of(alone, "local"), signal.SIGKILL)
        with pytest.raises(WorkerLost, match="must not run it twice"):
            future.result(40.0)


def test_a_frontend_answers_what_it_has_before_it_ends(alone: TemporaryCluster) -> None:
    address = alone.endpoints["client"][0]
    with BlockingClient(address) as client:
        future = client.submit("once", INPUT)
        until(lambda: ask_status([address]).counters["accepted"] == 1, what="the request")
        role = "frontend-0"
        pid = pid_of(alone, role)
        began_ms = CLOCK.now_ms()
        os.kill(pid, signal.SIGTERM)
        assert future.result(10.0) is not None
        until(lambda: not Path(f"/proc/{pid}").exists(), what="its end")
        assert CLOCK.now_ms() - began_ms < 5_000
        until(lambda: is_whole(alone, 1), what="the cluster's return")
