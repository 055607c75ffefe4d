"""What commands print: users' data as it is, for people and as JSON."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.table import Table

from fabric.client import InferResult
from fabric.messages import Ledger
from roles.cli.console import plain_console
from roles.cli.infer import echo_result, print_result

ROOT = Path(__file__).parents[4]
OWN_WORDS_ONLY = {"roles/cli/console.py", "roles/cli/progress.py", "deploy/local/demo/command.py"}


@pytest.mark.parametrize("text", ["[bold]x[/]", "[1, 2]", "[/]", ":smile:", r"\[x]", "[nan nan nan]"])
def test_nothing_in_a_users_data_is_markup(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    console = plain_console()
    console.print(text)
    table = Table(text, title=text)
    table.add_row(text)
    console.print(table)
    assert capsys.readouterr().out.count(text) == 4


def test_every_command_prints_on_the_plain_console() -> None:
    own = [
        path
        for room in ("roles", "deploy")
        for path in (ROOT / room).rglob("*.py")
        if re.search(r"\bConsole\(", path.read_text("utf-8"))
        and str(path.relative_to(ROOT)) not in OWN_WORDS_ONLY
    ]
    assert own == []


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "ascii:surrogateescape"])
def test_a_terminal_that_has_not_all_letters_gets_question_marks(encoding: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "roles.cli", "plan", "examples/cluster.yaml", "--why"],
        env={**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "40"},
        cwd=ROOT,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"?" in done.stdout


def result(**outputs: object) -> InferResult:
    return InferResult({name: np.asarray(value) for name, value in outputs.items()}, Ledger(total_ms=2.0))


def test_an_answer_is_json_whatever_its_numbers_are(capsys: pytest.CaptureFixture[str]) -> None:
    """NaN and infinity are no JSON."""
    answer = result(
        x=np.array([[np.nan, 1.5], [np.inf, -np.inf]], np.float32), n=[1, 2], ok=[True], s=np.float16(np.nan)
    )

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    echo_result(answer)
    read = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert read["outputs"] == {"x": [[None, 1.5], [None, None]], "n": [1, 2], "ok": [True], "s": None}
    assert read["ledger"]["total_ms"] == 2.0


def test_an_answer_is_shown_with_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(result(scores=np.full(3, np.nan, np.float32), indices=[3, 4]))
    shown = capsys.readouterr().out
    assert "scores float32 [3]: [nan nan nan]" in shown
    assert "indices int64 [2]: [3 4]" in shown
