"""Keeps the MPS daemon of one GPU, as a process of its own: ``python -m roles.node_agent.mps.daemon_keeper DIRECTORY …``.

NVIDIA's daemon starts servers that outlive it, and nobody tells it that the agent is gone. The guard stands between:

- it starts the daemon in the foreground, tied to itself: should the guard be killed, the kernel ends the daemon;
- it ends daemon and servers in order (`quit`, then SIGKILL) when it is told to, and when its agent is gone for
  longer than `--outlive-ms`; until then another agent may take over by writing itself into ``owner.json``;
- it ends when the daemon does, after the servers, and says why;
- at its start it ends what a killed guard left. Our daemons and servers carry a mark in their environment, so that
  only ours are ended. A daemon without the mark in our directory is somebody else's: then the guard gives way.

One guard serves in a directory: it holds the lock there. A former guard that is about to end is waited for.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import fcntl
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fabric.clock import MonotonicClock
from roles.node_agent.mps.control import (
    BINARY,
    MARK,
    PIPE,
    LegacyControl,
    MpsError,
    MpsMissing,
    MpsPlace,
    MpsTaken,
    MpsWrongUser,
    end_leftovers,
)
from roles.node_agent.mps.environment import daemon_environment, without_mps
from roles.runtime.exit_codes import EXIT_FAILURE, EXIT_GUARD_REFUSED
from roles.runtime.identities import (
    ProcessIdentity,
    identity_in,
    identity_of,
    is_over,
    open_handle,
    processes_with,
    read_record,
    write_record,
)
from roles.runtime.process import PARENT_VARIABLE, StopSignal

LOCK_WITHIN_MS: Final = 8_000.0  # longer than a former guard takes for its end
QUIT_WITHIN_S: Final = 2.0
LOOK_EVERY_S: Final = 0.1
_PR_SET_PDEATHSIG = 1
_NO_PROGRAM: Final = (
    errno.ENOENT,
    errno.EACCES,
    errno.ENOEXEC,
)  # other errors pass: no memory, no process, no descriptor
_CLOCK = MonotonicClock()


def main() -> int:
    """The guard's exit code; what happened is said on stderr."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--uid", required=True)
    parser.add_argument("--binary", default=BINARY)
    parser.add_argument("--outlive-ms", type=float, default=0.0)
    options = parser.parse_args()
    os.environ.pop(PARENT_VARIABLE, None)  # the daemon's parent is somebody else
    place = MpsPlace(options.directory)
    with StopSignal(is_child=True) as stop:
        try:
            place.make()
            with _locked(place):
                return _serve(place, options.uid, options.binary, options.outlive_ms, stop)
        except (MpsTaken, MpsMissing, MpsWrongUser) as error:
            _say(str(error))
            return EXIT_GUARD_REFUSED
        except MpsError as error:
            _say(str(error))
            return EXIT_FAILURE


def _serve(place: MpsPlace, uid: str, binary: str, outlive_ms: float, stop: StopSignal) -> int:
    stranger = _stranger(place)
    if stranger is not None:
        raise MpsTaken(
            f"a daemon that we did not start (process {stranger.pid}) serves in {place.pipe}; end it first"
        )
    _clear_up(place)
    out = place.log / "daemon.out"
    daemon = _start(place, uid, binary, out)
    handle = os.pidfd_open(daemon.pid)
    write_record(
        place.record_file, {"guard": identity_of(os.getpid()), "daemon": identity_of(daemon.pid), "uid": uid}
    )
    try:
        why = _watch(place, handle, outlive_ms, stop)
        if why:
            _say(why)
            _quit(place, binary, handle)
    finally:
        daemon.kill()
        daemon.wait()
        os.close(handle)
        _clear_up(place)
        place.record_file.unlink(missing_ok=True)
    if why:
        return 0
    said = _tail(out)
    how = f"was killed by signal {-daemon.returncode}" if daemon.returncode < 0 else ""
    how = how or f"ended with code {daemon.returncode}"
    _say(f"the MPS daemon {how}{': ' if said else ''}{said}")
    return EXIT_GUARD_REFUSED if "already running" in said else EXIT_FAILURE


def _watch(place: MpsPlace, daemon: int, outlive_ms: float, stop: StopSignal) -> str:
    """Why the daemon should end; empty: it has ended by itself."""
    lost_at_ms: float | None = None
    owner = None
    try:
        while not stop.is_set:
            if owner is None:
                identity = identity_in(read_record(place.owner_file), "owner")
                owner = None if identity is None else open_handle(identity)
                lost_at_ms = None if owner is not None else lost_at_ms or _CLOCK.now_ms()
            if lost_at_ms is not None and _CLOCK.now_ms() >= lost_at_ms + outlive_ms:
                return "its agent is gone"
            watched = [daemon, stop.fileno(), *([] if owner is None else [owner])]
            ready = select.select(watched, [], [], LOOK_EVERY_S if owner is None else None)[0]
            if daemon in ready:
                return ""
            if owner is not None and owner in ready:
                os.close(owner)
                owner = None
    finally:
        if owner is not None:
            os.close(owner)
    return "its agent says so"


def _start(place: MpsPlace, uid: str, binary: str, out: Path) -> subprocess.Popen[bytes]:
    """Raises MpsMissing where no other try will do better, MpsError where one may."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        said = out.open("wb")
    except OSError as error:
        raise MpsError(f"{out} cannot be written: {error.strerror}") from error
    with said:
        try:
            return subprocess.Popen(  # noqa: S603  the program is the configured one, and no shell reads it
                [binary, "-f"],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                env={**without_mps(os.environ), **daemon_environment(place, uid)},
                process_group=0,
                preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509  this process has one thread
            )
        except OSError as error:
            kind = MpsMissing if error.errno in _NO_PROGRAM else MpsError
            raise kind(f"{binary} cannot be run: {error.strerror}") from error


def _quit(place: MpsPlace, binary: str, daemon: int) -> None:
    try:
        LegacyControl(place, binary).quit()
        if is_over(daemon, QUIT_WITHIN_S):
            return
        _say(f"the MPS daemon did not quit within {QUIT_WITHIN_S:g} s; it is killed")
    except MpsError as error:
        _say(f"the MPS daemon does not quit ({error}); it is killed")


def _clear_up(place: MpsPlace) -> None:
    end_leftovers(place)
    for path in place.pipe.iterdir():
        with contextlib.suppress(OSError):
            path.unlink()


def _stranger(place: MpsPlace) -> ProcessIdentity | None:
    ours = set(processes_with(MARK, str(place.directory)))
    for identity in processes_with(PIPE, str(place.pipe)):
        with contextlib.suppress(OSError):
            arguments = Path(f"/proc/{identity.pid}/cmdline").read_bytes().split(b"\0")
            # Without an option it is somebody who asks a daemon, such as our own agent.
            if identity not in ours and {b"-d", b"-f"} & set(arguments) and _names_mps(arguments):
                return identity
    return None


def _names_mps(arguments: list[bytes]) -> bool:
    return any(argument.endswith(BINARY.encode()) for argument in arguments)


@contextlib.contextmanager
def _locked(place: MpsPlace) -> Iterator[None]:
    descriptor = os.open(place.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until_ms = _CLOCK.now_ms() + LOCK_WITHIN_MS
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if _CLOCK.now_ms() >= until_ms:
                    raise MpsError(f"another guard serves in {place.directory} and does not end") from None
                select.select([], [], [], LOOK_EVERY_S)
        yield
    finally:
        os.close(descriptor)


def _tail(path: Path) -> str:
    with contextlib.suppress(OSError):
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        return " | ".join([line.strip() for line in lines if line.strip()][-2:])[-400:]
    return ""


def _say(words: str) -> None:
    with contextlib.suppress(OSError):  # who would read it is gone
        sys.stderr.write(f"{words}\n")
        sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
