"""Starting `tenuto up` in the background, and ending it."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fabric.clock import MonotonicClock
from fabric.errors import ConfigError, FabricError, PeerLost
from roles.runtime.exit_codes import EXIT_CONFIG
from roles.runtime.process_events import explaining_lines
from roles.runtime.run_directory import (
    LOG_FILE,
    UP_STOP_LIMIT_MS,
    UpFile,
    is_claimed,
    read_up_file,
    sweep,
    unusable,
)
from roles.runtime.running_cluster import processes_in

START_LIMIT_MS = 900_000.0  # five tries of a model that takes its 150 s each, and a little
KILL_LIMIT_MS = 5_000.0
_LOOK_EVERY_S = 0.05
_LOG_END_BYTES: Final = 64 << 10
_WARNED: Final = re.compile(r" level=(?:WARNING|ERROR|CRITICAL) role=(\S+) (.*)")


def stop_running(run_dir: Path) -> None:
    """End the cluster of a run directory, in order if it lets us. PeerLost when none runs."""
    up_file = read_up_file(run_dir) if is_claimed(run_dir) else None
    if up_file is None:
        raise PeerLost(f"no cluster runs in {run_dir}")
    try:
        handle = os.pidfd_open(up_file.pid)
    except ProcessLookupError as error:
        raise PeerLost(f"no cluster runs in {run_dir}") from error
    try:
        if not is_claimed(run_dir):  # it ended just now, and the pid may be somebody else's
            return
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        if _has_ended(handle, UP_STOP_LIMIT_MS):
            if run_dir.is_dir():  # a second signal ends it without tidying up
                _clear(run_dir)
            return
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        if not _has_ended(handle, KILL_LIMIT_MS):
            raise FabricError(f"process {up_file.pid} cannot be killed")
    finally:
        os.close(handle)
    _clear(run_dir)


def start_detached(arguments: Sequence[str], run_dir: Path, *, is_removed: bool) -> UpFile:
    """Start `tenuto up` with these arguments in a session of its own, and wait until everything serves.

    Its log goes to `up.log` in the run directory, which goes at its end if `is_removed`. Raises what it ended
    with instead, with its last line.
    """
    if is_claimed(run_dir):
        raise FabricError(f"a cluster runs in {run_dir} already; end it with 'tenuto down'")
    is_removed = is_removed or not run_dir.exists()
    flags = ["--remove-run-dir"] if is_removed else []
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        (run_dir / LOG_FILE).unlink(missing_ok=True)
        opened = (run_dir / LOG_FILE).open("ab+")  # all append, so that it can be cut while they write
    except OSError as error:
        raise unusable(run_dir, error) from error
    with opened as log:
        process = subprocess.Popen(  # noqa: S603  the command line is ours, and no shell reads it
            [sys.executable, "-P", "-m", "roles.cli", "up", *arguments, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )
        try:
            up_file = _until_ready(process, run_dir)
        except BaseException:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(UP_STOP_LIMIT_MS / 1e3)
            process.kill()
            _forget_log(run_dir, is_removed=is_removed)
            raise
        if up_file is not None:
            process.returncode = 0  # it lives on without us: nothing to warn of when this handle goes
            return up_file
        log.seek(0)
        lines = explaining_lines(log.read().decode("utf-8", "replace"))
    reason = next((line for line in reversed(lines) if line.startswith("tenuto: ")), "\n".join(lines[-3:]))
    _forget_log(run_dir, is_removed=is_removed)
    kind = ConfigError if process.returncode == EXIT_CONFIG else FabricError
    raise kind(reason.removeprefix("tenuto: ") or f"it ended with code {process.returncode}")


def not_ready(run_dir: Path, limit_ms: float) -> FabricError:
    """The error of a start that takes too long, with the last thing in its log that may say why."""
    text = f"the cluster was not ready within {limit_ms / 1e3:g} s"
    with contextlib.suppress(OSError), (run_dir / LOG_FILE).open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_END_BYTES))
        for line in reversed(log.read().decode("utf-8", "replace").splitlines()):
            if line.startswith("tenuto: "):
                return FabricError(f"{text}; the last that its log says: {line.removeprefix('tenuto: ')}")
            if warned := _WARNED.search(line):
                return FabricError(f"{text}; the last that its log says: {warned[1]}: {warned[2]}")
    return FabricError(text)


def _forget_log(run_dir: Path, *, is_removed: bool) -> None:
    (run_dir / LOG_FILE).unlink(missing_ok=True)
    if is_removed:
        with contextlib.suppress(OSError):  # gone already, or not empty: somebody else's files
            run_dir.rmdir()


def _until_ready(process: subprocess.Popen[bytes], run_dir: Path) -> UpFile | None:
    """None: it ended before it was ready."""
    clock = MonotonicClock()
    until_ms = clock.now_ms() + START_LIMIT_MS
    handle = os.pidfd_open(process.pid)
    try:
        while clock.now_ms() < until_ms:
            if select.select([handle], [], [], _LOOK_EVERY_S)[0]:
                process.wait()
                return None
            up_file = read_up_file(run_dir)
            if up_file is not None and up_file.pid == process.pid and up_file.is_ready:
                return up_file
    finally:
        os.close(handle)
    raise not_ready(run_dir, START_LIMIT_MS)


def _has_ended(handle: int, limit_ms: float) -> bool:
    return bool(select.select([handle], [], [], limit_ms / 1e3)[0])


def _clear(run_dir: Path) -> None:
    """After a hard end: its children die with it, each as soon as the kernel gets to it."""
    clock = MonotonicClock()
    until_ms = clock.now_ms() + KILL_LIMIT_MS
    while any(process.alive for process in processes_in(run_dir)) and clock.now_ms() < until_ms:
        select.select([], [], [], _LOOK_EVERY_S)
    if not is_claimed(run_dir):
        sweep(run_dir)
