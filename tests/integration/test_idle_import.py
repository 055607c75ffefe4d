"""Processes that import gently: what the kernel was asked for, and what happens where there is no idle core."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from roles.runtime.idle_import import ALWAYS, AT_ONCE_VARIABLE

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, sys
from roles.runtime.idle_import import import_at_idle_priority
import_at_idle_priority("asked_for", limit_s=float(sys.argv[1]))
import asked_for
print(asked_for.THREAD, asked_for.POLICY, os.sched_getscheduler(0), "TENUTO_AT_ONCE" in os.environ, *sys.argv[2:])
"""
ASKED_FOR = """
import os, threading, time
THREAD = threading.current_thread().name
POLICY = os.sched_getscheduler(0)
"""


def run(
    tmp_path: Path, asked_for: str, limit_s: float, **environment: str
) -> subprocess.CompletedProcess[str]:
    (tmp_path / "asked_for.py").write_text(asked_for, encoding="utf-8")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    gently = {name: value for name, value in os.environ.items() if name != AT_ONCE_VARIABLE}
    return subprocess.run(
        [sys.executable, str(script), str(limit_s), "an argument"],
        env={**gently, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_imports_make_way_and_the_process_itself_does_not(tmp_path: Path) -> None:
    ended = run(tmp_path, ASKED_FOR, 30.0)
    ours = os.sched_getscheduler(0)
    assert ended.stdout.split() == ["import", str(os.SCHED_IDLE), str(ours), "False", "an", "argument"], (
        ended.stderr
    )


def test_where_no_core_is_idle_the_process_begins_anew_at_once(tmp_path: Path) -> None:
    starving = f"{ASKED_FOR}\nif THREAD == 'import':\n    time.sleep(60)\n"
    ended = run(tmp_path, starving, 0.05)
    ours = str(os.sched_getscheduler(0))
    assert ended.stdout.split() == ["MainThread", ours, ours, "False", "an", "argument"], ended.stderr


def test_who_asks_for_it_imports_at_once_and_so_does_what_it_starts(tmp_path: Path) -> None:
    ended = run(tmp_path, ASKED_FOR, 30.0, **{AT_ONCE_VARIABLE: ALWAYS})
    ours = str(os.sched_getscheduler(0))
    assert ended.stdout.split() == ["MainThread", ours, ours, "True", "an", "argument"], ended.stderr


def test_an_import_that_fails_is_reported_where_it_is_needed(tmp_path: Path) -> None:
    ended = run(tmp_path, "raise ImportError('it lacks something')", 30.0)
    assert ended.returncode == 1
    assert ended.stderr.count("Traceback") == ended.stderr.count("ImportError: it lacks something") == 1
