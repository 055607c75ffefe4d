"""Exit codes and messages of the `tenuto` command as a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment import AT_ONCE

WORKLOAD = """
models: [{name: a, slo_ms: 25, rate_rps: 100, profile: {alpha_ms: 1, beta_ms: 5}}]
cluster: {gpus: 1}
"""
SOLVED = """
models: [{name: a, slo_ms: 25, rate_rps: 100, profile: &all {alpha_ms: 1, beta_ms: 5}}, {name: b, slo_ms: 25, rate_rps: 50, profile: *all}]
cluster: {gpus: 2}
placement: {symphony: {subclusters: 2}}
"""


def tenuto(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "roles.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=cwd,
        env=AT_ONCE
        | {"PYTHONPATH": str(Path(__file__).resolve().parents[2]), "TENUTO_RUN_DIR": str(cwd / "run")},
    )


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--help",), 0, "simulate"),
        (("--version",), 0, "tenuto"),
        (("nonsense",), 2, "nonsense"),
        (("simulate", "--nonsense"), 2, "nonsense"),
        (("simulate", "missing.yaml"), 3, "missing.yaml"),
        (("simulate", "good.yaml", "--duration", "2", "--json"), 0, "goodput_rps"),
        (("config", "show", "good.yaml"), 0, "slo_ms"),
        (("status",), 5, "no cluster"),
        (("infer", "a", "good.yaml"), 5, "no frontend runs here"),
        (("infer", "a", "missing.png"), 2, "missing.png"),
        (("doctor", "--json"), 0, "python"),
        (("plan", "good.yaml", "--json"), 0, "gpu_count"),
        (("plan", "good.yaml", "--placement", "exclusive", "--check"), 0, "GPUs used: 1 of 1"),
        (("plan", "good.yaml", "--placement", "symfony"), 3, "did you mean symphony"),
        (("plan", "missing.yaml"), 3, "missing.yaml"),
        (("plan", "hopeless.yaml", "--json"), 0, "below the 6 ms"),
        (("plan", "hopeless.yaml", "--check"), 4, "unplaced: a"),
        (("plan", "solved.yaml", "--json"), 0, "gpu_count"),
        (
            ("compare", "good.yaml", "--placements", "exclusive", "--duration", "2", "--json"),
            0,
            "goodput_rps",
        ),
        (("compare", "good.yaml"), 2, "--placements"),
        (("reproduce", "--json"), 0, "["),
        (("reproduce", "nonsense"), 3, "no experiment 'nonsense'"),
    ],
)
def test_a_command_ends_with_its_code_and_a_readable_word(
    tmp_path: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    (tmp_path / "good.yaml").write_text(WORKLOAD, encoding="utf-8")
    (tmp_path / "hopeless.yaml").write_text(WORKLOAD.replace("slo_ms: 25", "slo_ms: 2"), encoding="utf-8")
    (tmp_path / "solved.yaml").write_text(SOLVED, encoding="utf-8")
    ended = tenuto(*arguments, cwd=tmp_path)
    assert ended.returncode == code, ended.stderr
    assert said in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "run").exists(), "a command that runs no cluster leaves no directory"
    if "--json" in arguments:
        assert ended.stdout.count("\n") == 1, "stdout holds the JSON alone"


def test_what_nobody_foresaw_is_one_line_and_a_file(tmp_path: Path) -> None:
    """Planted: a placement that raises."""
    (tmp_path / "good.yaml").write_text(WORKLOAD, encoding="utf-8")
    planted = (
        "import sys, roles.config.cluster\n"
        "roles.config.cluster.ClusterConfig.place = lambda *_: 1 / 0\n"
        "from roles.cli import main\n"
        "sys.argv = ['tenuto', 'scheduler', 'good.yaml']\n"
        "main()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", planted],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
        env=AT_ONCE
        | {
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
            "TENUTO_RUN_DIR": str(tmp_path / "run"),
            "TMPDIR": str(tmp_path),
        },
    )
    (report,) = tmp_path.glob("*.defect")
    assert ended.returncode == 70
    assert ended.stderr == (
        f"tenuto: a defect of Tenuto ended scheduler (ZeroDivisionError); what is known of it is in {report}\n"
    )
    assert "ZeroDivisionError: division by zero" in report.read_text()
