"""How the command ends where its output cannot be written, and on Ctrl-C."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CLI = [sys.executable, "-m", "roles.cli"]
FULL = Path("/dev/full")
FILE = """\
models: [{name: a, slo_ms: 50, rate_rps: 50, profile: {alpha_ms: 1, beta_ms: 5}}]
cluster: {gpus: 1}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE, encoding="utf-8")
    return path


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("is_buffered", [True, False])
@pytest.mark.parametrize("command", ["--help", "plan FILE", "plan FILE --json", "config schema", "--version"])
def test_an_output_that_cannot_be_written_is_one_line_and_exit_1(
    file: Path, tmp_path: Path, command: str, *, is_buffered: bool
) -> None:
    words = [str(file) if word == "FILE" else word for word in command.split()]
    environment = {**os.environ, "PYTHONUNBUFFERED": "" if is_buffered else "1", "TMPDIR": str(tmp_path)}
    with FULL.open("w") as full:
        ended = subprocess.run(
            [*CLI, *words], stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False
        )
    assert ended.stderr == "tenuto: the output cannot be written: No space left on device\n"
    assert ended.returncode == 1
    assert not list(tmp_path.glob("*.defect"))


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    ("command", "code"), [("plan /missing.yaml", 3), ("plan", 2), ("status --run-dir /missing", 5)]
)
def test_an_error_that_cannot_be_told_keeps_its_code(command: str, code: int) -> None:
    with FULL.open("w") as full:
        ended = subprocess.run([*CLI, *command.split()], stderr=full, stdout=subprocess.PIPE, check=False)
    assert ended.returncode == code


# From inside, at a chosen moment, since what a sleep hits is luck.
INTERRUPTED = """\
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == MODULE:
            os.kill(os.getpid(), signal.SIGINT)
        return None
from roles.cli import main
sys.meta_path.insert(0, Interrupt())
sys.argv = ["tenuto", *ARGUMENTS]
main()
"""


@pytest.mark.parametrize(
    "module",
    [
        "roles.cli.group",
        "click",
        "click.core",
        "fabric.errors",
        "roles.cli.simulate",
        "numpy",
        "roles.simulator.fast_world",
    ],
)
def test_ctrl_c_during_any_import_is_130_without_a_traceback(file: Path, module: str) -> None:
    code = f"MODULE = {module!r}; ARGUMENTS = ['simulate', {str(file)!r}]\n{INTERRUPTED}"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.strip()) == (130, "")


def test_a_signal_that_is_ignored_stays_ignored_to_the_end(file: Path) -> None:
    code = (
        "import atexit, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "atexit.register(lambda: print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN))\n"
        f"from roles.cli import main; sys.argv = ['tenuto', 'plan', {str(file)!r}]; main()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "True"
