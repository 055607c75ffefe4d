"""Keeps every core from going idle while a command runs, as `idle=poll` does on hosts that are tuned for latency.

    python -m benchmarks.awake COMMAND …

A virtual core that goes idle is given to somebody else by its host and may come back many milliseconds late, which
hits whoever sleeps most. So each core gets a loop of the kernel's idle class, which runs when nothing else wants
to. Rivals run on the same cores. The figures say that it was so.
"""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks.figures import AWAKE_VARIABLE
from roles.process import child_environment, die_with_parent

_LOOP = "--loop"


def main(arguments: list[str]) -> int:
    """The command's exit code."""
    if not arguments:
        print(__doc__)
        return 2
    if arguments[0] == _LOOP:
        _loop(int(arguments[1]))
    loops = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.awake", _LOOP, str(core)], env=child_environment()
        )
        for core in sorted(os.sched_getaffinity(0))
    ]
    try:
        return subprocess.run(arguments, env={**os.environ, AWAKE_VARIABLE: "1"}, check=False).returncode
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _loop(core: int) -> None:
    die_with_parent()
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while True:
        pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
