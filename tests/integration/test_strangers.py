"""Strangers at a cluster that serves, a few of each kind; `benchmarks/strangers.py` says what happened to thousands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_nobody_gets_in_everybody_is_counted_and_friends_are_served() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "benchmarks.strangers", "--tries", "150"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=ROOT,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    assert told.stdout.count("held") == 8 * 4
