"""What every role's process does at its start and at its end.

It dies with its parent, ends in order on SIGTERM, SIGINT and SIGHUP, at once on the second SIGTERM or SIGINT if no other process of ours started it, may
have as many descriptors as the kernel lets it, logs as logfmt to stderr, and leaves a *run file*
`<run dir>/<role id>.json` while it serves: who it is and where it can be reached. Run files are how processes of one host
find each other, and what `tenuto status` reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Self, TextIO

from msgspec import Struct
from msgspec.structs import asdict, replace

from fabric.addresses import check_address
from fabric.errors import ConfigError, FabricError
from fabric.json_files import read_json, write_whole
from roles.runtime.exit_codes import EXIT_FAILURE, EXIT_INTERRUPTED
from roles.runtime.identities import is_running, started_at
from roles.runtime.peer_checks import Offences
from roles.runtime.process_events import StopAsked

PARENT_VARIABLE = "TENUTO_PARENT_PID"
CONNECTED_TO = ("control", "client")
"""What roles and commands connect to by the addresses of a run file; at others (http, page, metrics) people look."""
OUTLIVE_VARIABLE = "TENUTO_OUTLIVE_MS"
_PR_SET_PDEATHSIG = 1
_PID_MAX = 2**31 - 1  # of what the kernel takes for one
_PR_SET_TIMERSLACK = 29

log = logging.getLogger("tenuto")


def die_with_parent() -> bool:
    """Ask the kernel to kill this process when the one that started it ends; whether that is one of ours.

    The signal is tied to the *thread* of the parent that started us, so parents spawn from their main thread.
    Between our start and this call the parent may already be gone: whoever spawns us says its pid in the
    environment, and a different parent means we are an orphan now.
    """
    expected = os.environ.pop(PARENT_VARIABLE, None)
    if expected is None:
        return False  # started by a person or by an init system: not ours to tie
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(expected):
        raise SystemExit(EXIT_FAILURE)
    return True


def leave_the_end_to_parent() -> None:
    """SIGTERM means nothing to this process, which its parent kills once it needs it no more.

    Who ends a whole cluster may signal all of its processes, and what was accepted is finished first.
    """
    # A handler: that a signal is ignored is inherited by what a user's code starts, through exec too.
    signal.signal(signal.SIGTERM, lambda *_: None)


def wake_exactly() -> None:
    """From now on this thread's sleeps end when they were meant to.

    Linux lets every sleep run up to 50 us over, so that it can serve several wake-ups with one: the most of what
    a precise sleep is late, and it is what whoever sleeps seldom would have saved.
    """
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


def set_up_descriptors() -> None:
    """Let this process have as many descriptors as it may, the first three of them for what they stand for.

    The usual 1024 are for programs that use `select`; a frontend has one for every connection of every client. A
    standard stream that is closed at the start would give its number, and what is printed there, to a socket. Files
    that are made from here on are for this user alone, wherever they are: run files, journals, logs, reports.
    """
    os.umask(0o077)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


def outlive_parent() -> tuple[int, float] | None:
    """Instead of `die_with_parent`, where our parent lets us outlive it: its pid, and for how long (ms).

    None: it does not.
    """
    said_ms = os.environ.pop(OUTLIVE_VARIABLE, None)
    if said_ms is None:
        return None
    return int(os.environ.pop(PARENT_VARIABLE, "0")), float(said_ms)


def end_by_force(child: subprocess.Popen[bytes]) -> int:
    """End a child, if it has not ended, and give back what it holds of ours; its exit code. Nobody reads or writes its pipes any more."""
    child.kill()
    code = child.wait()
    for pipe in (child.stdin, child.stdout, child.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was not written goes nowhere
                pipe.close()
    return code


def child_environment(inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a child that must die with this process. `inherited`: other than all of ours."""
    return {**(os.environ if inherited is None else inherited), PARENT_VARIABLE: str(os.getpid())}


def module_command(module: str, *arguments: str) -> tuple[str, ...]:
    """The command line that runs a module of ours.

    Not one of its name in the current directory (-P), which may be a user's, or one where anybody may write. A child does not inherit that.
    Who loads users' modules appends the directory to `sys.path` itself, behind all that is installed.
    """
    return (sys.executable, "-P", "-m", module, *arguments)


class StopSignal:
    """SIGTERM, SIGINT and SIGHUP as a claim to read and a descriptor to sleep on. Install from the main thread.

    For a core that ends in its own time it is a source too: the first signal is one `StopAsked`.
    The second SIGTERM or SIGINT ends the process at once: a person who presses Ctrl-C twice means it. A terminal that
    goes means nothing: for one of them the kernel, a shell and systemd each send SIGHUP, and systemd SIGTERM beside it.
    A SIGHUP that is ignored (nohup) stays so.

    Nor does any further one mean anything to a child of ours (`is_child`): who signals all processes of a cluster, as systemd and
    pkill do, signals its parent too, which sends each child the second one in its turn, and SIGKILL where it takes too long.
    """

    def __init__(self, *, is_child: bool = False) -> None:
        self.is_set = False
        self._is_child = is_child
        self._is_told = False
        self._is_last = False  # the next SIGTERM or SIGINT ends the process at once
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._taken: Sequence[signal.Signals] = ()

    def __enter__(self) -> Self:
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        is_hup_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._taken = (signal.SIGTERM, signal.SIGINT, *([] if is_hup_ignored else [signal.SIGHUP]))
        for number in self._taken:
            signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc: object) -> None:
        signal.set_wakeup_fd(-1)
        for number in self._taken:
            if self._is_child:  # what is left is the interpreter's end, which the second signal may meet
                signal.signal(number, signal.SIG_IGN)
            else:
                signal.signal(
                    number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
                )
        self._read.close()
        self._write.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002  the handler's signature
        if self._is_last and number != signal.SIGHUP:
            os._exit(EXIT_INTERRUPTED if number == signal.SIGINT else 128 + number)
        self._is_last = not self._is_child and (self._is_last or number != signal.SIGHUP)
        self.is_set = True

    def fileno(self) -> int:
        """Readable after a signal."""
        return self._read.fileno()

    @property
    def has_more(self) -> bool:
        """Whether there is a signal to tell of."""
        return self.is_set and not self._is_told

    @property
    def wake_at_ms(self) -> float | None:
        """Never by itself."""
        return None

    def take(self, limit: int, now_ms: float) -> Sequence[StopAsked]:  # noqa: ARG002  a Source's signature
        """The stop, once."""
        told: Sequence[StopAsked] = ()
        if self.has_more:  # asked once: a signal between two looks would be taken for told
            told, self._is_told = (StopAsked(),), True
        with contextlib.suppress(BlockingIOError):
            # Quiet again: the end takes a while, and the driver sleeps in it.
            os.read(self._read.fileno(), 4_096)
        return told


class RunFile(Struct, frozen=True):
    """What `<run dir>/<role id>.json` says."""

    role_id: str
    pid: int
    incarnation: str
    addresses: Mapping[str, Sequence[str]]
    """By purpose: control, payload, client, …"""
    started_at: int | None = None
    """Of the process, by which it is told from a later one of that pid (`identities.py`); None: of an older version."""

    @property
    def is_alive(self) -> bool:
        """Whether that very process lives."""
        return is_running(self.pid, self.started_at)


def write_run_file(run_dir: Path, run_file: RunFile) -> Path:
    """Write it, with when its process started; FabricError where it cannot be written."""
    path = run_dir / f"{run_file.role_id}.json"
    run_file = replace(run_file, started_at=started_at(run_file.pid))
    try:
        write_whole(path, json.dumps(asdict(run_file)))
    except OSError as error:
        raise FabricError(f"cannot write the run file {path}: {error.strerror}") from error
    return path


def remove_file(path: Path) -> None:
    """Take it away if that is possible: whose disk is read-only, or is full and needs room for that too, serves on beside it."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("file_not_removed path=%s reason=%r", path, error.strerror)


def read_run_file(path: Path) -> RunFile | None:
    """None when the role is not (or no longer) there, or what is there is no run file: loops read these."""
    try:
        found = read_json(path, RunFile)
        for purpose in CONNECTED_TO:
            for address in found.addresses.get(purpose, ()):
                check_address(address)
    except (OSError, ValueError, ConfigError):
        return None
    is_one = found.role_id == path.stem and 0 < found.pid <= _PID_MAX
    return found if is_one else None


def remove_run_file(run_dir: Path, run_file: RunFile) -> None:
    """Remove our own run file; that of a successor with our name stays."""
    path = run_dir / f"{run_file.role_id}.json"
    found = read_run_file(path)
    if found is not None and (found.pid, found.incarnation) == (run_file.pid, run_file.incarnation):
        remove_file(path)


def speak_to_nobody(descriptor: int = 1) -> None:
    """From now on what this process prints there goes nowhere: whoever read it is gone, and its end need not complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def takes_more(descriptor: int) -> bool:
    """Whether a page that is written there now is taken at once: a pipe or terminal that nobody reads would hold us up.

    Not where the reader is gone: what is written then stays in the stream's buffer, and the interpreter ends with 120 for it.
    """
    room = select.poll()
    room.register(descriptor, select.POLLOUT)
    return any(not events & (select.POLLERR | select.POLLHUP) for _, events in room.poll(0))


class _UnlessUnread(logging.StreamHandler[TextIO]):
    """Writes to stderr. A line that nobody takes is lost, as a loop that waits for its reader would serve nobody."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            is_taken = takes_more(self.stream.fileno())
        except (OSError, ValueError, AttributeError):  # what stands in for it
            is_taken = True
        if is_taken:
            super().emit(record)


def log_offences(offences: Offences) -> None:
    """Write down what was said of peers since the last time."""
    while offences.lines:
        log.warning(offences.lines.popleft())


def set_up_logging(role_id: str, level: str = "INFO") -> None:
    """Logfmt on stderr: ``level=info role=frontend-0 batch_sent model=resnet50 size=8``."""
    handler = _UnlessUnread()
    handler.setFormatter(logging.Formatter(f"%(asctime)s level=%(levelname)s role={role_id} %(message)s"))
    logging.raiseExceptions = (
        False  # a full disk or a closed stream under a log takes its lines, and nothing else
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
