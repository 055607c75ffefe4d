"""Children that play runs or send load, when somebody presses Ctrl-C."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from roles.lab.parallel import executor_of
from tests.integration.proc import CLOCK, until


def mask() -> list[int]:
    return sorted(int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def play_until_interrupted() -> None:
    with executor_of(2) as (pool, _):
        running = [pool.submit(signal.pause) for _ in range(5)]
        until(lambda: any(one.running() for one in running), 60_000.0)
        raise KeyboardInterrupt


def test_ctrl_c_is_left_to_the_parent_from_a_childs_first_moment_on() -> None:
    """While it imports it would print a traceback."""
    before = mask()
    with executor_of(1) as (pool, _):
        assert int(signal.SIGINT) in pool.submit(mask).result(60)
    assert mask() == before


def test_an_interrupted_command_does_not_wait_for_what_its_children_play() -> None:
    began_ms = CLOCK.now_ms()
    with pytest.raises(KeyboardInterrupt):
        play_until_interrupted()
    assert CLOCK.now_ms() - began_ms < 120_000.0
    assert multiprocessing.active_children() == []


def test_a_module_of_pythons_name_in_the_current_directory_is_not_run(tmp_path: Path) -> None:
    """A command is a script elsewhere, and looks there for nothing; its children are `python -c`."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "multiprocessing.py").write_text("raise SystemExit('another one')")
    script = tmp_path / "command.py"
    script.write_text(
        "import os\n"
        "from roles.lab.parallel import executor_of\n"
        "if __name__ == '__main__':\n"
        "    with executor_of(1) as (pool, _):\n"
        "        print(pool.submit(os.getcwd).result(60))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path / "here",
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.stdout, ended.stderr) == (f"{tmp_path / 'here'}\n", "")
