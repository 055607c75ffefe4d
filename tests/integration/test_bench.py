"""`tenuto bench` as a process, at a living cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from roles.benchmark.temporary_cluster import TemporaryCluster, temporary_cluster

pytestmark = pytest.mark.timeout(180)

# An SLO that a busy host keeps: this test is about the account, not about speed.
EASY = """
models: [{name: easy, slo_ms: 2000, rate_rps: 50, profile: {alpha_ms: 1, beta_ms: 5, max_batch: 32}}]
cluster: {gpus: 1}
batching: eager
"""
# The same cluster asked for ten times what its device can do: a batch of one takes 60 ms at least.
HARD = (
    EASY.replace("easy", "hard")
    .replace("rate_rps: 50", "rate_rps: 200")
    .replace("beta_ms: 5, max_batch: 32", "beta_ms: 60, max_batch: 1")
    .replace("2000", "200")
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TemporaryCluster]:
    file = tmp_path_factory.mktemp("bench") / "cluster.yaml"
    models = [text.splitlines()[1].removeprefix("models: [").removesuffix("]") for text in (EASY, HARD)]
    file.write_text(
        f"models: [{', '.join(models)}]\ncluster: {{gpus: 1}}\nbatching: eager\n"
        'listen: {http: "127.0.0.1:0", grpc: "127.0.0.1:0"}\n',
        encoding="utf-8",
    )
    with temporary_cluster(file) as running:
        yield running


def bench(text: str, target: str, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    file = directory / "load.yaml"
    file.write_text(text, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-m", "roles.cli", "bench", str(file), "--target", target, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "TENUTO_RUN_DIR": str(directory / "run")},
    )


def test_every_request_of_the_window_is_accounted_for(cluster: TemporaryCluster, tmp_path: Path) -> None:
    ended = bench(
        EASY,
        cluster.endpoints["client"][0],
        tmp_path,
        "--duration",
        "3",
        "--warmup",
        "1",
        "--processes",
        "2",
        "--json",
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    model = found["models"]["easy"]
    assert model["offered"] == model["good"] + model["late"] + model["dropped"] > 100
    assert model["batch_mean"] >= 1
    assert found["breakdown_ms"]["gpu_ms"]["p50"] >= 5.9
    assert found["latency_ms"]["p50"] <= found["latency_ms"]["p95"] <= found["latency_ms"]["p999"]
    assert found["gpus"]["count"] == 1
    assert 0 < found["gpus"]["busy_fraction"][0] <= 1
    assert set(found["sender"]) == {"late_ms", "late_allowed_ms", "is_valid"}


def test_a_missed_slo_has_an_exit_code_of_its_own(cluster: TemporaryCluster, tmp_path: Path) -> None:
    ended = bench(
        HARD, cluster.endpoints["client"][0], tmp_path, "--duration", "3", "--warmup", "0", "--json"
    )
    found = json.loads(ended.stdout)
    assert found["bad_rate"] > 0.5
    assert found["errors"]
    # On a host too busy to send in time the run says so instead.
    assert ended.returncode == (4 if found["sender"]["is_valid"] else 1)


@pytest.mark.parametrize(
    ("target", "code", "said"),
    [
        ("tcp://127.0.0.1:9", 5, "no frontend answers"),
        ("http://127.0.0.1:9", 5, "nobody answers at http://127.0.0.1:9"),
        ("grpc://127.0.0.1", 2, "it must be like grpc://127.0.0.1:8001"),
        ("ftp://127.0.0.1:8000", 2, "tcp://"),
        ("nowhere", 2, "tcp://"),
    ],
)
def test_a_target_that_cannot_be_loaded_is_said_in_a_line(
    tmp_path: Path, target: str, code: int, said: str
) -> None:
    ended = bench(EASY, target, tmp_path, "--duration", "1", "--json")
    assert ended.returncode == code, ended.stderr
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""


@pytest.mark.parametrize("way", ["http", "grpc"])
def test_a_gateway_is_a_target_too_and_tells_stages_and_errors(
    cluster: TemporaryCluster, tmp_path: Path, way: str
) -> None:
    both = EASY.replace(
        "models: [",
        "models: [{name: nobody, slo_ms: 2000, rate_rps: 10, profile: {alpha_ms: 1, beta_ms: 5}}, ",
    )
    both = both.replace(
        "2000", "20000"
    )  # a host that starves the senders makes requests late, and none of them bad
    ended = bench(both, cluster.endpoints[way][0], tmp_path, "--duration", "2", "--warmup", "0", "--json")
    assert ended.returncode in (1, 4), (ended.stdout, ended.stderr)  # 1: the senders were late
    told = json.loads(ended.stdout)
    easy, nobody = told["models"]["easy"], told["models"]["nobody"]
    assert (easy["good"], nobody["dropped"]) == (easy["offered"], nobody["offered"])
    assert told["by_model"]["nobody"]["errors"] == {"ModelNotFound": nobody["offered"]}
    assert told["by_model"]["easy"]["errors"] == {}
    stages = told["by_model"]["easy"]["breakdown_ms"]
    assert stages["gpu_ms"]["p50"] >= 6
    assert told["gpus"]["busy_fraction"][0] > 0
    assert easy["batch_mean"] >= 1
