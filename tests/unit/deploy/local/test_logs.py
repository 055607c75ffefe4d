"""`tenuto logs`: of which role, and of a cluster that is gone."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from deploy.local.logs import logs
from fabric.errors import PeerLost
from roles.runtime.run_directory import LOG_FILE, OLD_LOG_FILE, claim

SAID = """\
2024-05-01 10:00:00,000 level=info role=frontend-0 ready
2024-05-01 10:00:01,000 level=info role=worker-local-1 ready
Traceback of worker-local-1
tenuto is up
"""


def said(run_dir: Path, *words: str) -> Result:
    with claim(run_dir):
        (run_dir / LOG_FILE).write_text(SAID, encoding="utf-8")
        return CliRunner().invoke(logs, ["--run-dir", str(run_dir), *words])


def test_a_role_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    result = said(tmp_path, "--role", "nosuch")
    assert result.exit_code == 2
    assert "there is no role 'nosuch'; there is frontend-0, up, worker-local-1" in result.output
    assert "did you mean frontend-0?" in said(tmp_path, "--role", "frontend-1").output


def test_a_role_is_asked_for_by_its_name(tmp_path: Path) -> None:
    result = said(tmp_path, "--role", "worker-local-1")
    assert result.exit_code == 0
    assert [line[24:] for line in result.output.splitlines()] == [
        "level=info role=worker-local-1 ready",
        "Traceback of worker-local-1",
    ]
    assert said(tmp_path, "--role", "up").output.endswith("tenuto is up\n")


@pytest.mark.parametrize("words", [[], ["--follow"]])
def test_what_a_cluster_that_was_killed_has_said_is_printed(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / LOG_FILE).write_text(SAID, encoding="utf-8")
    result = CliRunner().invoke(logs, ["--run-dir", str(tmp_path), *words])
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == len(SAID.splitlines())
    assert (
        result.stderr == f"tenuto: no cluster runs in {tmp_path} any more; this is what the last one said\n"
    )


@pytest.mark.parametrize("words", [[], ["--since", "3650d"]])
def test_what_was_said_before_the_log_became_too_long_is_printed_too(
    tmp_path: Path, words: list[str]
) -> None:
    (tmp_path / OLD_LOG_FILE).write_text("2024-05-01 09:00:00,000 before\nand more\n", encoding="utf-8")
    lines = [line[24:] for line in said(tmp_path, *words).stdout.splitlines()]
    assert lines[:2] == ["before", "and more"]
    assert len(lines) == 2 + len(SAID.splitlines())


def test_without_a_log_there_is_no_cluster(tmp_path: Path) -> None:
    assert isinstance(CliRunner().invoke(logs, ["--run-dir", str(tmp_path)]).exception, PeerLost)
