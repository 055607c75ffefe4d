"""Roles that a person starts, with something wrong in the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FILE = """\
models: [{name: a, slo_ms: 50, rate_rps: 50, profile: {alpha_ms: 1, beta_ms: 5}}]
cluster: {gpus: 1}
"""
ROLES = {
    "scheduler": "scheduler FILE",
    "scheduler with frontend": "scheduler FILE --with-frontend",
    "frontend": "frontend FILE",
    "node agent": "node-agent FILE",
    "gateway": "gateway FILE --http 127.0.0.1:0",
    "page": "page FILE",
    "worker": "worker --agent tcp://127.0.0.1:1 --worker-id w",
}


@pytest.mark.parametrize("role", ROLES)
def test_a_run_directory_that_is_missing_is_named_with_what_would_be_right(tmp_path: Path, role: str) -> None:
    file, missing = tmp_path / "cluster.yaml", tmp_path / "missing"
    file.write_text(FILE, encoding="utf-8")
    words = [str(file) if word == "FILE" else word for word in ROLES[role].split()]
    ended = subprocess.run(
        [sys.executable, "-m", "roles.cli", *words, "--run-dir", str(missing)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 3
    assert f"the run directory {missing} is not there: name that of the cluster" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert not missing.exists()
