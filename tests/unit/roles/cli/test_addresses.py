"""Options that take an address: one without its scheme is named, with what it should look like."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from roles.cli.group import tenuto
from roles.cli.options import ConnectAddress
from tests.unit.roles.cli.test_every_command import COMMANDS

WRONG = "10.0.0.1:7000"
ASKED = {
    "bench FILE --target",
    "drain NAME --scheduler",
    "frontend FILE --scheduler",
    "gateway FILE --frontend",
    "infer NAME FILE --target",
    "models add FILE --scheduler",
    "models list --scheduler",
    "models move NAME --to 0 --scheduler",
    "models remove NAME --scheduler",
    "models set NAME --scheduler",
    "status --scheduler",
    "worker --worker-id w --agent",
}


def test_every_option_that_takes_an_address_to_connect_to_is_in_the_list() -> None:
    found = {
        (name, option.opts[-1])
        for name, command in COMMANDS.items()
        for option in command.params
        if isinstance(option, click.Option)
        and (
            isinstance(option.type, ConnectAddress)
            or option.opts[-1] in ("--scheduler", "--target", "--agent")
        )
    }
    listed = {
        (name, asked.split()[-1])
        for asked in ASKED
        for name in [next(name for name in sorted(COMMANDS, reverse=True) if asked.startswith(f"{name} "))]
    }
    assert found == listed


@pytest.mark.parametrize("asked", sorted(ASKED))
def test_an_address_without_its_scheme_is_named_with_what_would_be_right(tmp_path: Path, asked: str) -> None:
    file = tmp_path / "file.yaml"
    file.write_text("models: []\n", encoding="utf-8")
    words = [{"FILE": str(file), "NAME": "a"}.get(word, word) for word in asked.split()]
    result = CliRunner().invoke(tenuto, [*words, WRONG])
    assert result.exit_code == 2
    assert f"'{WRONG}' is no address; it must be like tcp://{WRONG}" in result.output
    assert f"'{words[-1]}'" in result.output, "which option"


def test_of_several_schedulers_the_wrong_one_is_named() -> None:
    result = CliRunner().invoke(tenuto, ["status", "--scheduler", f"tcp://10.0.0.2:7000,{WRONG}"])
    assert result.exit_code == 2
    assert f"'{WRONG}' is no address" in result.output


@pytest.mark.parametrize("wrong", ["http://[::1", "http://a b:1", "grpc://a", "https://a/x"])
def test_a_wrong_address_of_a_gateway_is_a_usage_error(tmp_path: Path, wrong: str) -> None:
    file = tmp_path / "file.yaml"
    file.write_text("models: []\n", encoding="utf-8")
    result = CliRunner().invoke(tenuto, ["bench", str(file), "--target", wrong])
    assert result.exit_code == 2
    assert f"'{wrong}' is no gateway's address; it must be like " in result.output
