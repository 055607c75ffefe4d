"""Commands of other distributions, found by their metadata on sys.path as an installed one's would be."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from roles.cli.group import tenuto

MODULE = """
import click

@click.command(help="Works.")
def works():
    click.echo("worked")

number = 7
"""
POINTS = {
    "works": "their_commands:works",
    "raises": "their_broken_commands:command",
    "absent": "their_commands:absent",
    "number": "their_commands:number",
}


@pytest.fixture(autouse=True)
def _distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_commands.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "their_broken_commands.py").write_text("1 / 0\n", encoding="utf-8")
    info = tmp_path / "their_commands-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-commands\nVersion: 1.0\n")
    points = "\n".join(f"{name} = {value}" for name, value in POINTS.items())
    (info / "entry_points.txt").write_text(f"[tenuto.commands]\n{points}\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("raises", "their_broken_commands:command cannot be loaded: ZeroDivisionError: division by zero"),
        ("absent", "their_commands:absent cannot be loaded: AttributeError: "),
        ("number", "their_commands:number is no click command"),
    ],
)
def test_one_that_cannot_be_loaded_says_so_when_it_is_called(name: str, complaint: str) -> None:
    result = CliRunner().invoke(tenuto, [name, "--any", "thing"])
    assert result.exit_code == 1
    assert complaint in result.output
    assert "Traceback" not in result.output


def test_and_hides_no_other() -> None:
    listed = CliRunner().invoke(tenuto, ["--help"])
    assert listed.exit_code == 0, listed.output
    assert all(name in listed.output for name in (*POINTS, "simulate"))
    assert CliRunner().invoke(tenuto, ["works"]).output == "worked\n"
