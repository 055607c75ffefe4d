"""What shells are told, and how they ask."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from click.shell_completion import get_completion_class

from roles.cli.group import COMMANDS, tenuto


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_its_script(shell: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "roles.cli", "completion", shell], capture_output=True, text=True, check=True
    )
    assert "_TENUTO_COMPLETE" in done.stdout
    checker = shutil.which(shell)
    if checker is not None:
        subprocess.run([checker, "-n"], input=done.stdout, text=True, check=True)


def completed(*words: str) -> list[str]:
    kind = get_completion_class("bash")
    assert kind is not None
    return [
        item.value for item in kind(tenuto, {}, "tenuto", "_X").get_completions(list(words[:-1]), words[-1])
    ]


def test_commands_and_options_are_completed() -> None:
    assert completed("to") == ["top"]
    assert set(COMMANDS) <= set(completed(""))
    assert "--arrivals" in completed("simulate", "--a")
    assert completed("models", "a") == ["add"]
    assert completed("completion", "z") == ["zsh"]


def test_names_are_completed_without_importing_commands() -> None:
    script = (
        "import sys; from roles.cli.group import tenuto; import click;"
        "tenuto.shell_complete(click.Context(tenuto), '');"
        "assert not [name for name in sys.modules if name.startswith(('roles.simulator', 'roles.scheduler'))]"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=dict(os.environ))
