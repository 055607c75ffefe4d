"""What is started of ours is ours: no module of its name in the current directory, which may be one where anybody may write."""

from __future__ import annotations

import ast
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from roles.frontend.graphs.glue import COMMAND
from roles.node_agent.shell import worker_command
from roles.runtime.process import module_command
from roles.scheduler.planning.plan_launcher import PLAN_COMMAND
from roles.scheduler.rehearsing.rehearsal_launcher import REHEARSAL_COMMAND
from tests.test_rooms import ROOT, sources


def starts(path: Path) -> Iterator[tuple[str, set[str]]]:
    """The command lines in a file that start Python: where, and their words that are known."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.List | ast.Tuple):
            continue
        words = {
            one.value for one in node.elts if isinstance(one, ast.Constant) and isinstance(one.value, str)
        }
        if "-m" in words or any(ast.unparse(one) == "sys.executable" for one in node.elts):
            yield f"{path.relative_to(ROOT)}:{node.lineno}", words


def test_python_is_never_started_to_look_in_the_current_directory_first() -> None:
    found = [start for path in sources() for start in starts(path)]
    assert any(place.startswith("roles/runtime/process.py") for place, _ in found)
    assert [place for place, words in found if not words & {"-P", "-I"}] == []


@pytest.mark.parametrize(
    "command",
    [
        PLAN_COMMAND,
        REHEARSAL_COMMAND,
        (*COMMAND, "1"),
        worker_command("", "", Path()),
        module_command("roles.profiling.child"),
        module_command("roles.node_agent.mps.daemon_keeper"),
        module_command("roles.cli"),
    ],
    ids=lambda command: command[-1] if command[-1].startswith("roles") else command[3],
)
def test_a_module_of_our_name_in_the_current_directory_is_not_run(
    command: Sequence[str], tmp_path: Path
) -> None:
    for name in ("fabric", "roles", "msgspec", "json"):
        (tmp_path / f"{name}.py").write_text("import os\nos.write(2, b'another one')\nos._exit(99)\n")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, input=b"", capture_output=True, timeout=60, check=False
    )
    assert b"another one" not in ended.stderr
    assert ended.returncode != 99
