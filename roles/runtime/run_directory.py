"""The run directory of one cluster: whose it is, what says so, and what to clear away.

`up.lock` is locked (flock) by the process that runs the cluster for as long as it lives; the kernel gives the
lock back however it ends, so a lock that can be taken means that nothing runs, whatever files say. `up.json`
says who holds it and where the cluster can be reached.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import select
import socket
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import asdict, replace

from fabric.errors import ConfigError, FabricError, PeerLost
from fabric.ids import PAGE_ID
from fabric.json_files import read_json, write_whole
from roles.runtime.environment import check_ours
from roles.runtime.identities import ProcessIdentity, named_process, started_at
from roles.runtime.process import RunFile, log, read_run_file, remove_file

LOCK_FILE, UP_FILE, LOG_FILE = "up.lock", "up.json", "up.log"
OLD_LOG_FILE = "up.old.log"
"""What was in the log before it became too long."""
CONFIG_FILE, JSON_CONFIG_FILE = "up.config.yaml", "up.config.json"
"""What the cluster's file said at its start: its roles read it at each of theirs. The second one for a file of JSON."""
_OURS = re.compile(r"(up|page|(scheduler|frontend|gateway|node|worker)-.+)\.")
"""How names of our files begin: after the role that writes them. Whatever else is there is somebody else's."""
UP_SOCKET = "up.control"
"""Where `tenuto up` is asked for changes of its processes."""
UP_STOP_LIMIT_MS = 70_000.0
"""How long `tenuto up` may take for its end in order: more than the limits of its roles, rank after rank, and of what agents left, add up to."""


class UpFile(Struct, frozen=True):
    """What `up.json` says. `endpoints`: addresses by purpose; empty while the cluster starts.

    `problems`: what could not be served when it was ready; `warnings`: what is served otherwise than expected.
    """

    pid: int
    is_ready: bool
    endpoints: Mapping[str, Sequence[str]]
    problems: Sequence[str] = ()
    warnings: Sequence[str] = ()
    started_at: int | None = None
    """Of the process; see `RunFile`."""
    drained: Sequence[str] = ()
    """Roles that an operator keeps down."""
    is_ending: bool = False
    """It was told to end, or gives up: a further signal would end it at once, without tidying up."""

    @property
    def process(self) -> ProcessIdentity | None:
        """None: that very process is gone."""
        return named_process(self.pid, self.started_at)


def write_up_file(run_dir: Path, up_file: UpFile) -> None:
    """Write it whole or not at all, with OSError then; when its process started goes with it."""
    up_file = replace(up_file, started_at=started_at(up_file.pid))
    write_whole(run_dir / UP_FILE, json.dumps(asdict(up_file)))


def read_up_file(run_dir: Path) -> UpFile | None:
    """None when there is none. Says nothing about whether that process still lives: see `is_claimed`."""
    path = run_dir / UP_FILE
    try:
        return read_json(path, UpFile)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


@contextlib.contextmanager
def claim(
    run_dir: Path, *, is_removed: bool = False, lock: int | None = None, has_page: bool = False
) -> Iterator[None]:
    """Hold the run directory; at the end nothing of ours is left in it, nor it itself if it was not there.

    `is_removed`: it is not to stay even if it was. `lock`: its, where who started us took it. Otherwise as `take`.
    """
    is_removed = is_removed or not run_dir.exists()
    if lock is None:
        lock = take(run_dir, has_page=has_page)
    elif not is_at(lock, run_dir / LOCK_FILE):
        raise FabricError(f"descriptor {lock} is not the lock of {run_dir}")
    try:
        sweep(run_dir)
        try:
            yield
        finally:
            sweep(run_dir)
    finally:
        give_back(run_dir, lock, is_removed=is_removed)


def take(run_dir: Path, *, has_page: bool = False) -> int:
    """Make the run directory if it is missing, and lock it: who has that descriptor, or a copy of it, holds the directory.

    Raises FabricError when it is not ours alone to write in, another cluster has it, or a role started by hand still runs in it.
    A page may: it shows the cluster that begins, unless that `has_page` of its own.
    """
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_ours(run_dir)
        lock = _lock_for_long(run_dir)
    except OSError as error:
        raise unusable(run_dir, error) from error
    if lock is None:
        raise runs_already(run_dir)
    try:
        _refuse_strangers(run_dir, has_page=has_page)  # before anything of theirs is touched
    except BaseException:
        give_back(run_dir, lock, is_removed=False)
        raise
    return lock


def give_back(run_dir: Path, lock: int, *, is_removed: bool) -> None:
    """Hold it no longer, and no copy of the lock either; the directory goes too if it is to and is empty."""
    if is_at(lock, run_dir / LOCK_FILE):
        remove_file(run_dir / LOCK_FILE)
    os.close(lock)
    if is_removed:
        with contextlib.suppress(OSError):  # not empty: somebody else's files
            run_dir.rmdir()


def is_at(descriptor: int, path: Path) -> bool:
    """Whether what is open there is what has that name now."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def unusable(run_dir: Path, error: OSError) -> FabricError:
    """What is said of a directory that cannot be made, or in which nothing can be."""
    return FabricError(f"the run directory {run_dir} cannot be made or written to: {error.strerror}")


def runs_already(run_dir: Path) -> FabricError:
    """What is said to who wants to start another one in a directory that is claimed."""
    holder = read_up_file(run_dir)
    process = None if holder is None else holder.process
    who = "" if process is None else f" as process {process.pid}"
    return FabricError(
        f"a cluster runs in {run_dir} already{who}; end it with 'tenuto down', "
        "or give this one another directory with --run-dir"
    )


def nothing_runs(run_dir: Path) -> PeerLost:
    """What is said to who wants something of the `tenuto up` of a directory that none holds."""
    roles = [run_file.role_id for run_file in _living(run_dir)]
    if not roles:
        return PeerLost(f"no cluster runs in {run_dir}")
    were = "was" if len(roles) == 1 else "were"
    return PeerLost(
        f"no `tenuto up` runs in {run_dir}: {', '.join(roles)} {were} not started by it; end, restart and read such roles where they"
        " were started"
    )


def drained_roles(run_dir: Path) -> Sequence[str]:
    """Those that an operator keeps down, of the cluster that runs there; none where its file cannot be read."""
    up_file = None
    with contextlib.suppress(ConfigError):
        up_file = read_up_file(run_dir)
    return () if up_file is None or up_file.process is None else up_file.drained


def is_claimed(run_dir: Path) -> bool:
    """Whether a living process holds the directory; nobody holds one that is not there. FabricError where it cannot be looked at."""
    try:
        descriptor = _lock(run_dir, os.O_RDONLY, fcntl.LOCK_SH)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise unusable(run_dir, error) from error
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None


def sweep(run_dir: Path) -> None:
    """Remove what dead processes left: run files, plans, leases, half-written files, sockets nobody listens on.

    Of a role that lives all of it stays: it may have been started by hand beside the cluster that ends. So does, with a line
    in the log, what cannot be removed (another user's lock, a folder of that name): whoever needs its place will say so.
    """
    living = tuple(f"{run_file.role_id}." for run_file in _living(run_dir))
    entries: Sequence[Path] = ()
    with contextlib.suppress(OSError):  # the directory itself is gone
        entries = list(run_dir.iterdir())
    for path in entries:
        if _OURS.match(path.name) and not path.name.startswith(living):
            try:
                _remove_left(path)
            except OSError as error:
                log.warning("file_not_removed path=%s reason=%r", path, error.strerror)


def _remove_left(path: Path) -> None:
    if path.name in (UP_FILE, CONFIG_FILE, JSON_CONFIG_FILE) or path.suffix in (".tmp", ".plan", ".lease"):
        path.unlink(missing_ok=True)
    elif stat.S_ISSOCK(path.lstat().st_mode):
        if not _is_listening(path):
            path.unlink(missing_ok=True)
    elif path.suffix == ".lock" and path.name != LOCK_FILE:
        _remove_if_free(path)
    elif path.suffix == ".json" and read_run_file(path) is not None:  # else not ours to remove
        path.unlink(missing_ok=True)


def run_files(run_dir: Path) -> list[RunFile]:
    """Of the roles in a directory, by name."""
    return [found for path in sorted(run_dir.glob("*.json")) if (found := read_run_file(path)) is not None]


def _lock_for_long(run_dir: Path) -> int | None:
    """None: a living process holds the directory. Those that only look (`is_claimed`) are waited for: 100 ms at the most."""
    for _ in range(20):
        lock = _lock(run_dir, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX)
        if lock is not None or is_claimed(run_dir):
            return lock
        select.select([], [], [], 0.005)
    return None


def _lock(run_dir: Path, flags: int, kind: int) -> int | None:
    """Open and lock the lock file; None: another process has it in a way that excludes this one."""
    path = run_dir / LOCK_FILE
    while True:
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        if is_at(descriptor, path):
            return descriptor
        os.close(descriptor)  # its holder took the file away while we opened it: lock the new one


def _remove_if_free(path: Path) -> None:
    """The lock beside an ipc socket (`fabric/ipc.py`), unless a living process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except BlockingIOError:
        pass
    finally:
        os.close(descriptor)


def _living(run_dir: Path) -> list[RunFile]:
    return [run_file for run_file in run_files(run_dir) if run_file.is_alive]


def _refuse_strangers(run_dir: Path, *, has_page: bool) -> None:
    for run_file in _living(run_dir):
        if run_file.role_id == PAGE_ID and not has_page:
            continue
        raise FabricError(
            f"{run_file.role_id} runs in {run_dir} already as process {run_file.pid}; "
            "end it first, or give this cluster another directory with --run-dir"
        )


def _is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # alive, and busy
    return True
