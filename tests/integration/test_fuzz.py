"""The search: what it finds, what it says of it, and that the verdict is the same every time."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RARE = """
from hypothesis import given, settings, strategies as st

@settings(max_examples=2_000)
@given(st.integers(0, 1_000))
def test_rare(number):
    assert number < 990

@given(st.integers())
def test_never(number):
    assert number == number
"""


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=115,
        check=False,
    )


def test_a_finding_is_told_with_what_makes_it_happen_again(tmp_path: Path) -> None:
    file = tmp_path / "test_rare.py"
    file.write_text(RARE)
    searched = run("tests.fuzz", "--rounds", "1", "--jobs", "1", "--seed", "1", str(file))
    assert searched.returncode == 1, searched.stdout + searched.stderr
    assert "test_rare.py::test_rare" in searched.stdout
    assert "test_never" not in searched.stdout
    assert "number=990" in searched.stdout
    assert "@reproduce_failure" in searched.stdout
    assert "examples/s; findings: 1" in searched.stdout
    told = next(line for line in searched.stdout.splitlines() if line.startswith("reproduce: "))
    words = shlex.split(told.removeprefix("reproduce: "))
    variables = dict(word.split("=", 1) for word in words[:2])
    assert words[-1].endswith("test_rare.py::test_rare")
    again = run(*words[4:-1], f"{file}::test_rare", **variables)  # a file of the suite has its path there
    assert again.returncode == 1
    assert "number=990" in again.stdout


def test_the_verdict_draws_the_same_examples_every_time(tmp_path: Path) -> None:
    file = tmp_path / "test_drawn.py"
    file.write_text(
        "from hypothesis import given, strategies as st\n"
        "@given(st.lists(st.floats()))\n"
        "def test_drawn(values):\n"
        "    print(values)\n"
    )
    verdicts = [run("pytest", "-q", "-s", "-p", "tests.conftest", str(file)).stdout for _ in range(2)]
    drawn = [[line for line in verdict.splitlines() if line.startswith("[")] for verdict in verdicts]
    assert len(drawn[0]) > 50
    assert drawn[0] == drawn[1]


def test_children_of_a_suite_that_ignores_ctrl_c_do_not() -> None:
    ask = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    code = f"import subprocess, sys, tests.conftest; subprocess.run([sys.executable, '-c', {ask!r}])"
    said = subprocess.run(
        ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert said.stdout == "True\n", said.stderr
