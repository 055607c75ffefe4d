"""The demo as a user runs it, and the example that made its weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(240)
def test_the_demo_recognises_digits_and_leaves_nothing(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "roles.cli", "demo", "--json"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert ended.returncode == 0, ended.stderr
    summary = json.loads(ended.stdout)
    assert summary["accuracy"] >= 0.97
    assert summary["verdict"].startswith("it works")
    assert summary["models"]["digits"]["answered"] > 100
    assert summary["models"]["resnet50-like"]["batch_max"] > 1
    assert summary["ledger"]["gpu_ms"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(300)
def test_the_training_example_makes_weights_as_good_as_the_committed_ones(tmp_path: Path) -> None:
    ended = subprocess.run(
        [
            sys.executable,
            "examples/train_digits.py",
            "--weights",
            str(tmp_path / "digits.safetensors"),
            "--held-out",
            str(tmp_path / "digits.npz"),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=ROOT,
    )
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout.split("accuracy ")[1].split(" %")[0]) >= 97.0
    assert (tmp_path / "digits.safetensors").stat().st_size < 300_000
    with (
        np.load(tmp_path / "digits.npz") as mine,
        np.load(ROOT / "deploy/local/demo/digits_test.npz") as theirs,
    ):
        assert np.array_equal(mine["labels"], theirs["labels"]), "the held-out part is always the same"
