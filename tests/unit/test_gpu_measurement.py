"""tests/gpu/measure.sh without a GPU: what it would run, and that it goes on where it was."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "gpu" / "measure.sh"
STAND_IN = """#!/bin/sh
case "$*" in *served*) exit 1;; *stand_ins*) exit 0;; esac
echo "asked for $*"
"""


def measured(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """With a Python that does nothing, and fails to serve."""
    python = tmp_path / "python"
    python.write_text(STAND_IN, encoding="utf-8")
    python.chmod(0o755)
    env = {**os.environ, "PYTHON": str(python), "DEVICE": "stand-in"}
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments], env=env, capture_output=True, text=True, check=False, timeout=60
    )


def words(output: str) -> list[tuple[str, str]]:
    """What became of each step."""
    lines = [line.split() for line in output.splitlines() if not line.startswith(" ")]
    return [(line[0], line[-1]) for line in lines]


def test_it_says_what_it_would_run_and_runs_nothing(tmp_path: Path) -> None:
    told = measured(tmp_path, "--dry-run", str(tmp_path / "out"))
    assert told.returncode == 0
    assert "to run  worker: at most 10 min" in told.stdout
    assert "to run  kernels: at most 15 min" in told.stdout
    assert not list((tmp_path / "out").glob("*.log"))


def test_what_failed_is_run_again_and_what_is_done_is_not(tmp_path: Path) -> None:
    out = tmp_path / "out"
    steps = ("profile:resnet18", "served", "demo")
    first, again = measured(tmp_path, str(out), *steps), measured(tmp_path, str(out), *steps)
    assert (first.returncode, again.returncode) == (1, 1)
    assert words(first.stdout) == [("ok", "profile:resnet18"), ("FAILED", "served"), ("ok", "demo")]
    assert words(again.stdout) == [("done", "profile:resnet18"), ("FAILED", "served"), ("done", "demo")]
    assert "--device cuda" in (out / "profile:resnet18.log").read_text(encoding="utf-8")
    with tarfile.open(out / "results.tar.gz") as packed:
        assert {"served.log", "demo.done"} <= set(packed.getnames())
