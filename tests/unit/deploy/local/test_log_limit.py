"""The log of a cluster in the background does not grow for ever."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from roles.runtime.run_directory import LOG_FILE, OLD_LOG_FILE

WRITES = """
import os, sys
from pathlib import Path
from deploy.local.log_limit import LOOK_EVERY_MS, LogLimit
limit = LogLimit(Path(sys.argv[1]), bytes_max=10_000)
for number in range(1_000):
    os.write(2, f"line {number:04d} of the supervisor, and of nobody else\\n".encode())
    assert list(limit.take(1, number * LOOK_EVERY_MS)) == []
print(limit.wake_at_ms)
"""


def test_a_long_log_is_copied_aside_and_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / LOG_FILE
    with path.open("ab+") as log:
        command = [sys.executable, "-c", WRITES, str(tmp_path)]
        subprocess.run(command, stderr=log, stdout=subprocess.PIPE, check=True, timeout=60)
        os.write(log.fileno(), b"somebody else\n")
    whole = (tmp_path / OLD_LOG_FILE).read_text() + path.read_text()
    assert path.stat().st_size <= 10_100
    assert (tmp_path / OLD_LOG_FILE).stat().st_size <= 10_100
    numbers = [int(line.split()[1]) for line in whole.splitlines()[:-1]]
    assert numbers == list(range(numbers[0], 1_000)), "in their order, and the newest are there"
    assert whole.endswith("somebody else\n")


def test_where_there_is_a_terminal_nothing_wakes_up_for_a_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITES, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    assert done.stdout == b"None\n"
    assert not list(tmp_path.iterdir())


FORGETS = "import sys; from pathlib import Path; from deploy.local.log_limit import forget_former_log; forget_former_log(Path(sys.argv[1]))"


@pytest.mark.parametrize("is_in_the_background", [False, True])
def test_what_a_killed_cluster_said_is_not_taken_for_the_next_ones_words(
    tmp_path: Path, *, is_in_the_background: bool
) -> None:
    for name in (LOG_FILE, OLD_LOG_FILE):
        (tmp_path / name).write_text("words\n")
    command = [sys.executable, "-c", FORGETS, str(tmp_path)]
    with (tmp_path / LOG_FILE).open("ab+") as log:
        stderr = log if is_in_the_background else None
        subprocess.run(command, stderr=stderr, check=True, timeout=60)
    left = [path.name for path in tmp_path.iterdir()]
    assert left == ([LOG_FILE] if is_in_the_background else [])
