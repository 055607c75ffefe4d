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
from click.testing import CliRunner
from rich.console import Console
from rich.table import Table

from fabric.client import InferResult
from fabric.messages import Ledger
from roles.cli.cluster_tables import plain_table
from roles.cli.console import plain_console, print_with_whole_names
from roles.cli.infer import echo_result, infer, print_result

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


@pytest.mark.parametrize(
    ("width", "gone"),
    [
        (80, []),
        (34, []),
        (33, ["late"]),
        (25, ["late", "good"]),
        (20, []),
    ],  # 20: a name is folded all the same
)
def test_names_stay_whole_where_a_column_less_makes_room(
    width: int, gone: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    table = plain_table("Models", "model", "good", "late", "bad %")
    table.add_row("inception_v3", "1", "2", "3")
    print_with_whole_names(Console(markup=False, emoji=False, width=width), table, ("late", "good"))
    words = capsys.readouterr().out.partition("left out, ")
    assert ("inception_v3" in words[0]) is (width != 20)
    assert [name for name in ("late", "good") if name not in words[0]] == gone
    told = f"as the terminal is narrow: {', '.join(gone)}"
    assert " ".join(words[2].split()) == (told if gone else "")


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_gateways_address_is_told_what_asks_it(tmp_path: Path, scheme: str) -> None:
    (tmp_path / "x.npy").touch()
    result = CliRunner().invoke(
        infer, ["m", str(tmp_path / "x.npy"), "--target", f"{scheme}://127.0.0.1:8000"]
    )
    assert result.exit_code == 2
    assert "infer speaks the SDK's protocol with frontends: give tcp://HOST:PORT" in result.output
    assert "tenuto bench FILE --target http://HOST:PORT" in result.output
