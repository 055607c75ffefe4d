"""`pip install tenuto` alone serves, plans and simulates: whatever an extra brings is refused here in every process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.timeout(240)
ROOT = Path(__file__).resolve().parents[2]
IMPORTED_AS = {
    "pillow": "PIL",
    "nvidia-ml-py": "pynvml",
    "scikit-learn": "sklearn",
    "grpcio": "grpc",
    "protobuf": "google",
    "opentelemetry-sdk": "opentelemetry",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
    "prometheus-client": "prometheus_client",
    "mkdocs-material": "mkdocs",
}
FOR_DEVELOPERS = {"all", "test", "bench"}
REFUSE = """
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name.partition(".")[0] in {names} else find(name, *rest)
"""
FILE = """
models: [{name: m, slo_ms: 2000, rate_rps: 20, profile: {alpha_ms: 1, beta_ms: 5, max_batch: 32}}]
cluster: {gpus: 2}
"""


def of_extras() -> set[str]:
    """The modules that extras bring and the core does not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    names = {
        re.split(r"[<>=\[ ]", one)[0].lower()
        for extra, wanted in extras.items()
        if extra not in FOR_DEVELOPERS
        for one in wanted
    }
    return {IMPORTED_AS.get(name, name) for name in names}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    found = tmp_path_factory.mktemp("c")
    (found / "sitecustomize.py").write_text(REFUSE.format(names=of_extras()), encoding="utf-8")
    (found / "cluster.yaml").write_text(FILE, encoding="utf-8")
    np.save(found / "x.npy", np.zeros(4, np.float32))
    yield found
    subprocess.run(
        [sys.executable, "-m", "roles.cli", "down", "--run-dir", str(found / "run")],
        check=False,
        capture_output=True,
    )


def tenuto(home: Path, *arguments: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-m", "roles.cli", *arguments],
        cwd=home,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{home}:{ROOT}", "TENUTO_RUN_DIR": str(home / "run")},
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_what_extras_bring_is_really_refused(home: Path) -> None:
    assert {"torch", "scipy", "matplotlib", "prometheus_client", "httptools", "PIL"} <= of_extras()
    ran = subprocess.run(
        [sys.executable, "-c", "import torch"],
        env={**os.environ, "PYTHONPATH": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "No module named 'torch'" in ran.stderr


def test_a_file_is_planned_and_simulated(home: Path) -> None:
    assert json.loads(tenuto(home, "plan", "cluster.yaml", "--json"))["gpu_count"] > 0
    played = json.loads(tenuto(home, "simulate", "cluster.yaml", "--duration", "5", "--json"))
    assert played["models"]["m"]["good"] > 0


def test_a_scheduler_a_frontend_and_a_client_serve(home: Path) -> None:
    tenuto(home, "up", "cluster.yaml", "--detach", "--apart")
    answer = json.loads(tenuto(home, "infer", "m", "x.npy", "--json"))
    assert answer["ledger"]["batch_size"] == 1
    roles = {one["role_id"] for one in json.loads(tenuto(home, "status", "--json"))["processes"]}
    assert {"scheduler-0", "frontend-0"} <= roles
    tenuto(home, "doctor", "--json")
    tenuto(home, "down")
