"""Keeps every core from going idle while a command runs, as hosts that are tuned for latency do.

    python -m benchmarks.awake COMMAND …

A virtual core that goes idle is given to somebody else by its host and may come back many milliseconds late, which
hits whoever sleeps most. Whoever holds `/dev/cpu_dma_latency` open with a zero in it tells Linux that no idle
state may take time to leave (power management's quality of service, what `tuned`'s latency profiles do): cores without work poll
for some. It takes root; without, the command runs all the same and figures do not claim it. Rivals run on the
same cores.

A loop of the idle class on each core, the usual way without root, costs what it brings: a core that runs one is not
idle, so it fetches no process that waits for another core, which then waits for a tick of the kernel's, 4 ms.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys

from benchmarks.figures import AWAKE_VARIABLE

LATENCY_FILE = "/dev/cpu_dma_latency"


def main(arguments: list[str]) -> int:
    """The command's exit code."""
    if not arguments:
        print(__doc__)
        return 2
    environment = dict(os.environ)
    try:
        held = os.open(LATENCY_FILE, os.O_WRONLY)
        os.write(held, struct.pack("i", 0))  # in force until whoever holds it ends
        environment[AWAKE_VARIABLE] = "1"
    except OSError as error:
        print(f"cores may go idle: {error}", file=sys.stderr)
    return subprocess.run(arguments, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
