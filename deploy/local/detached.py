"""Starting `tenuto up` in the background, and ending it."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

from deploy.local.log_limit import forget_former_log
from fabric.clock import MonotonicClock
from fabric.errors import ConfigError, FabricError
from roles.node_agent.left_behind import end_what_agents_left
from roles.runtime.exit_codes import EXIT_CONFIG
from roles.runtime.identities import open_handle
from roles.runtime.process import module_command
from roles.runtime.process_events import explaining_lines
from roles.runtime.run_directory import (
    LOG_FILE,
    UP_FILE,
    UP_STOP_LIMIT_MS,
    UpFile,
    claim,
    is_at,
    is_claimed,
    nothing_runs,
    read_up_file,
    take,
    unusable,
)
from roles.runtime.running_cluster import processes_in

START_LIMIT_MS = 900_000.0  # five tries of a model that takes its 150 s each, and a little
KILL_LIMIT_MS = 5_000.0
BEGIN_LIMIT_MS = 30_000.0  # from the lock of a start to its first file; a second, on a host that is not busy
_LOOK_EVERY_S = 0.05
_LOG_END_BYTES: Final = 64 << 10
_WARNED: Final = re.compile(r" level=(?:WARNING|ERROR|CRITICAL) role=(\S+) (.*)")


def stop_running(run_dir: Path) -> None:
    """End the cluster of a run directory, in order if it lets us. PeerLost when none runs."""
    up_file, handle = _begun(run_dir)
    try:
        if not is_claimed(run_dir):  # it ended just now
            return
        if not up_file.is_ending:  # else that would be the second signal, which means: at once
            _send(handle, signal.SIGTERM)
        if _has_ended(handle, UP_STOP_LIMIT_MS):
            _clear(run_dir)  # a second signal ends it without tidying up
            return
        _send(handle, signal.SIGKILL)
        if not _has_ended(handle, KILL_LIMIT_MS):
            raise FabricError(f"process {up_file.pid} cannot be killed")
    finally:
        os.close(handle)
    _clear(run_dir)


def _begun(run_dir: Path) -> tuple[UpFile, int]:
    """What the process that holds the directory says, and a handle of it. One that starts says only after its imports who it is."""
    clock = MonotonicClock()
    until_ms = clock.now_ms() + BEGIN_LIMIT_MS
    while is_claimed(run_dir):
        up_file = read_up_file(run_dir)
        # A killed cluster's file is there until the next one begins: whoever has that pid by now is left alone.
        process = None if up_file is None else up_file.process
        handle = None if process is None else open_handle(process)
        if up_file is not None and handle is not None:
            return up_file, handle
        if clock.now_ms() >= until_ms:
            raise FabricError(
                f"a cluster is being started in {run_dir}, and has not said by which process; try again"
            )
        select.select([], [], [], _LOOK_EVERY_S)
    raise nothing_runs(run_dir)


def start_detached(
    arguments: Sequence[str], run_dir: Path, *, is_removed: bool, has_page: bool = False
) -> UpFile:
    """Start `tenuto up` with these arguments in a session of its own, and wait until everything serves.

    Its log goes to `up.log` in the run directory, which goes at its end if `is_removed`. Raises what it ended
    with instead, with its last line. `has_page`: it is to serve a page of its own.
    """
    is_removed = is_removed or not run_dir.exists()
    lock = take(run_dir, has_page=has_page)  # before the log of who has it is touched
    flags = [*(["--remove-run-dir"] if is_removed else []), "--lock", str(lock)]
    try:
        up_file = _start([*arguments, *flags], run_dir, lock)
    except BaseException:
        os.close(lock)  # a cluster that does not even die of SIGKILL holds it on
        _clear(run_dir, is_removed=is_removed)
        raise
    os.close(lock)  # from here on it is the cluster's alone
    return up_file


def _start(arguments: Sequence[str], run_dir: Path, lock: int) -> UpFile:
    path = run_dir / LOG_FILE
    try:
        (run_dir / UP_FILE).unlink(missing_ok=True)  # of a killed cluster, whose pid the next one may have
        forget_former_log(run_dir)
        opened = path.open("ab+")  # all append, so that it can be cut while they write
    except OSError as error:
        raise unusable(run_dir, error) from error
    with opened as log:
        try:
            return _run(arguments, run_dir, lock, log)
        except BaseException:
            if is_at(log.fileno(), path):  # else another one's, which has the directory by now
                path.unlink(missing_ok=True)
            raise


def _run(arguments: Sequence[str], run_dir: Path, lock: int, log: IO[bytes]) -> UpFile:
    process = subprocess.Popen(  # noqa: S603  the command line is ours, and no shell reads it
        module_command("roles.cli", "up", *arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=log,
        start_new_session=True,
        pass_fds=(lock,),
    )
    try:
        up_file = _until_ready(process, run_dir)
    except BaseException:
        _end(process)
        raise
    if up_file is None:
        raise _why_it_ended(log, process.returncode)
    process.returncode = 0  # it lives on without us: nothing to warn of when this handle goes
    return up_file


def _end(process: subprocess.Popen[bytes]) -> None:
    """In order; by force where that takes too long, or somebody presses Ctrl-C again."""
    process.terminate()
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(UP_STOP_LIMIT_MS / 1e3)
    finally:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILL_LIMIT_MS / 1e3)


def _why_it_ended(log: IO[bytes], code: int) -> FabricError:
    log.seek(0)
    lines = explaining_lines(log.read().decode("utf-8", "replace"))
    reason = next((line for line in reversed(lines) if line.startswith("tenuto: ")), "\n".join(lines[-3:]))
    kind = ConfigError if code == EXIT_CONFIG else FabricError
    return kind(reason.removeprefix("tenuto: ") or f"it ended with code {code}")


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


def _send(handle: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # ended just now
        signal.pidfd_send_signal(handle, number)


def _has_ended(handle: int, limit_ms: float) -> bool:
    return bool(select.select([handle], [], [], limit_ms / 1e3)[0])


def _clear(run_dir: Path, *, is_removed: bool = False) -> None:
    """After a hard end: its children die with it, each as soon as the kernel gets to it, but for workers that may outlive their agent."""
    if not run_dir.is_dir():
        return
    clock = MonotonicClock()
    until_ms = clock.now_ms() + KILL_LIMIT_MS
    while any(process.alive for process in processes_in(run_dir)) and clock.now_ms() < until_ms:
        select.select([], [], [], _LOOK_EVERY_S)
    with (
        contextlib.suppress(FabricError),
        claim(run_dir, is_removed=is_removed),
    ):  # else it is another one's by now
        end_what_agents_left(run_dir)
