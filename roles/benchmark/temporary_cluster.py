"""A cluster of one's own for a while: started as a child, gone with its run directory at the end."""

from __future__ import annotations

import contextlib
import json
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from fabric.clock import MonotonicClock
from fabric.errors import FabricError
from roles.runtime.defects import SUFFIX
from roles.runtime.process import child_environment, end_by_force, module_command
from roles.runtime.run_directory import UP_STOP_LIMIT_MS

START_LIMIT_MS = 150_000.0  # torch alone takes seconds to import on a cold disk
LAST_WORDS_BYTES = 2_000


@dataclass(frozen=True, slots=True)
class TemporaryCluster:
    """Where it is: `endpoints` by purpose (client, control), its run directory, the pid of its `tenuto up`."""

    endpoints: Mapping[str, Sequence[str]]
    run_dir: Path
    pid: int


@contextmanager
def temporary_cluster(config: Path, flags: Sequence[str] = ()) -> Iterator[TemporaryCluster]:
    """Run `tenuto up` on `config` in a private directory until the block is left. Call from the main thread.

    `flags`: more of `tenuto up`'s, such as `--apart`.

    Raises FabricError with the cluster's last words when it does not come up.
    """
    with tempfile.TemporaryDirectory(prefix="tenuto-") as directory:
        run_dir = Path(directory)
        with (run_dir / "up.err").open("wb") as errors:
            process = subprocess.Popen(  # noqa: S603  our own command
                module_command(
                    "roles.cli",
                    "up",
                    str(config.absolute()),
                    "--json",
                    "--run-dir",
                    directory,
                    *flags,
                ),
                stdout=subprocess.PIPE,
                stderr=errors,
                env=child_environment(),
                process_group=0,  # Ctrl-C at the terminal is for us, and we end it
            )
        try:
            assert process.stdout is not None
            line = _first_line(process.stdout)
            if not line:
                raise FabricError(f"the cluster did not come up:\n{_last_words(run_dir)}")
            yield TemporaryCluster(json.loads(line)["endpoints"], run_dir, process.pid)
        finally:
            _end(process)
            _save_reports(run_dir)


def _first_line(stdout: IO[bytes]) -> bytes:
    """The one line `tenuto up --json` prints when everything serves; empty if it ends or takes too long."""
    clock = MonotonicClock()
    until_ms = clock.now_ms() + START_LIMIT_MS
    line = b""
    while not line.endswith(b"\n"):
        left_ms = until_ms - clock.now_ms()
        if left_ms <= 0 or not select.select([stdout], [], [], left_ms / 1e3)[0]:
            return b""
        chunk = stdout.read1(65_536)  # type: ignore[attr-defined]  # Popen's pipe is a BufferedReader
        if not chunk:
            return b""
        line += chunk
    return line


def _end(process: subprocess.Popen[bytes]) -> None:
    """In order; by force where that takes too long, or somebody presses Ctrl-C again: what the supervisor started dies with it."""
    try:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=UP_STOP_LIMIT_MS / 1e3)
    finally:
        end_by_force(process)


def _save_reports(run_dir: Path) -> None:
    """Of defects: they outlive the directory."""
    for report in run_dir.glob(f"*{SUFFIX}"):
        saved = shutil.move(report, Path(tempfile.gettempdir(), report.name))
        sys.stderr.write(f"tenuto: {report.name} is kept as {saved}\n")


def _last_words(run_dir: Path) -> str:
    return (run_dir / "up.err").read_bytes()[-LAST_WORDS_BYTES:].decode(errors="replace")
