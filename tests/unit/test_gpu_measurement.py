"""tests/gpu/measure.sh without a GPU: what it would run, and that it goes on where it was."""

from __future__ import annotations

import os
import re
import subprocess
import tarfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "gpu" / "measure.sh"
STAND_IN = """#!/bin/sh
case "$*" in *served*) exit 1;; *stand_ins*) exit 0;; esac
echo "asked for $*"
"""


def measured(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """With a Python that does nothing, and fails to serve."""
    python = tmp_path / "python"
    python.write_text(STAND_IN, encoding="utf-8")
    python.chmod(0o755)
    env = {**os.environ, "PYTHON": str(python), "DEVICE": "stand-in", **environment}
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments], env=env, capture_output=True, text=True, check=False, timeout=60
    )


def words(output: str, place: int = 1) -> list[tuple[str, str]]:
    """What became of each step; its name is the word at `place`."""
    lines = [line.split() for line in output.splitlines() if not line.startswith((" ", "about"))]
    return [(line[0], line[place]) for line in lines]


def test_it_says_what_it_would_run_and_runs_nothing(tmp_path: Path) -> None:
    told = measured(tmp_path, "--dry-run", str(tmp_path / "out"))
    assert told.returncode == 0
    assert "to run  worker:resnet18: about 1 min, at most 6" in told.stdout
    assert "to run  kernels: about 10 min, at most 45" in told.stdout
    assert not list((tmp_path / "out").glob("*.log"))


def test_what_is_no_device_is_refused(tmp_path: Path) -> None:
    told = measured(tmp_path, "--dry-run", str(tmp_path / "out"), DEVICE="cpu")
    assert (told.returncode, told.stdout) == (2, "")
    assert "stand-in" in told.stderr


README = (SCRIPT.parent / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("minutes", "group"), re.findall(r"MINUTES=(\d+) tests/gpu/measure.sh results (\w+)", README)
)
def test_a_group_fits_its_minutes_in_the_readme_by_what_its_steps_usually_take(
    tmp_path: Path, minutes: str, group: str
) -> None:
    told = measured(tmp_path, "--dry-run", str(tmp_path / "out"), group, DEVICE="cuda", GPU_TYPE="h200")
    assert 60 * int(minutes) >= int(told.stdout.splitlines()[-1].split()[1]) * 60 + 50  # to end, and to pack


def test_the_first_group_is_what_is_worth_most(tmp_path: Path) -> None:
    told = measured(tmp_path, "--dry-run", str(tmp_path / "out"), "first", DEVICE="cuda", GPU_TYPE="h200")
    steps = ["tests", "profile:resnet50", "worker:resnet50", "worker:mobilenet_v2", "worker:resnet18"]
    steps += ["worker:squeezenet1_1", "served", "copies"]
    assert [name.rstrip(":") for _, name in words(told.stdout, 2)] == steps


@pytest.mark.parametrize(
    ("asked", "steps"),
    [
        ("worker", ["worker:a", "worker:z/b"]),
        ("worker@float16", ["worker:a@float16", "worker:z/b@float16"]),
        ("colocation:a,z/b", ["profile:a", "profile:z/b", "colocation:a,z/b"]),
        ("third", ["profile:a", "profile:z/b", "colocation:a,z/b", "colocation:a,z/b,a"]),
    ],
)
def test_a_step_brings_what_it_needs_before_it(tmp_path: Path, asked: str, steps: list[str]) -> None:
    told = measured(tmp_path, "--dry-run", str(tmp_path / "out"), asked, DEVICE="cuda", MODELS="a z/b")
    assert [name.rstrip(":") for _, name in words(told.stdout, 2)] == steps


def test_what_would_hardly_fit_into_the_time_is_left_out(tmp_path: Path) -> None:
    out = tmp_path / "out"
    told = measured(tmp_path, str(out), "tests", "worker:a", MINUTES="2")
    assert words(told.stdout) == [("left", "tests:"), ("ok", "worker:a")]
    assert told.returncode == 1
    again = measured(tmp_path, str(out), "tests", "worker:a")
    assert words(again.stdout) == [("ok", "tests"), ("done", "worker:a")]


def test_half_precision_is_another_step_with_files_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "out"
    measured(tmp_path, str(out), "worker:transformers/bert@float16", "profile:a@bfloat16")
    log = (out / "worker:transformers-bert@float16.log").read_text(encoding="utf-8")
    assert "--zoo transformers --arch bert --dtype float16" in log
    assert log.rstrip().endswith("worker-bert@float16.json")
    log = (out / "profile:a@bfloat16.log").read_text(encoding="utf-8")
    assert "profile a --dtype bfloat16" in log
    assert log.rstrip().endswith("a@bfloat16-stand-in.json")


def test_what_failed_is_run_again_and_what_is_done_is_not(tmp_path: Path) -> None:
    out = tmp_path / "out"
    steps = ("profile:resnet18", "served", "demo")
    first, again = measured(tmp_path, str(out), *steps), measured(tmp_path, str(out), *steps)
    assert (first.returncode, again.returncode) == (1, 1)
    assert words(first.stdout) == [("ok", "profile:resnet18"), ("FAILED", "served"), ("ok", "demo")]
    assert words(again.stdout) == [("done", "profile:resnet18"), ("FAILED", "served"), ("done", "demo")]
    log = (out / "profile:resnet18.log").read_text(encoding="utf-8")
    assert log.startswith("asked for -m benchmarks.device cuda\n")  # what it was measured on
    assert "--device cuda" in log
    with tarfile.open(out / "packed" / "results.tar.gz") as packed:
        assert {"served.log", "demo.done"} <= set(packed.getnames())


def test_few_files_hold_all_and_what_is_good_to_read_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for number in range(9):
        (out / f"timeline-m{number}.json.gz").touch()
    measured(tmp_path, str(out), "demo", "served")
    packed = sorted(path.name for path in (out / "packed").iterdir())
    assert packed == [
        "figures.txt",
        "results.tar.gz",
        *(f"timeline-m{number}.json.gz" for number in range(6)),
    ]
    figures = (out / "packed" / "figures.txt").read_text(encoding="utf-8")
    assert [line for line in figures.splitlines() if line.startswith("==")] == [
        "== ok demo",
        "== FAILED served",
    ]
