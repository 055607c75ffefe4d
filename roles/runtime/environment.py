"""The environment of a Tenuto process: where its run files and local sockets live.

`--run-dir` or `$TENUTO_RUN_DIR`, else `$XDG_RUNTIME_DIR/tenuto`, else `tenuto-<uid>` among the temporary files, which must
be ours alone (0700) and goes with the process that made it. However it was named, others may not write in it: who can
puts sockets and files of their own in the place of a role's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from fabric.errors import ConfigError
from fabric.ipc import PATH_BYTES_MAX


class RunDir(Struct, frozen=True):
    """A directory of this user. `is_new`: this process made it; `is_temporary`: and removes it with what is in it."""

    path: Path
    is_temporary: bool = False
    is_new: bool = False

    def ipc_address(self, name: str) -> str:
        """The ``ipc://`` address of a socket in here; ConfigError where the path cannot be one's."""
        path = self.path / name
        if not str(path).isprintable():
            raise ConfigError(
                f"{str(path)!r}: a socket's path has printable characters of UTF-8 only; set TENUTO_RUN_DIR to such a directory"
            )
        size = len(os.fsencode(path))
        if size > PATH_BYTES_MAX:
            raise ConfigError(
                f"{path}: a socket's path has at most {PATH_BYTES_MAX} bytes, this one {size}; "
                "set TENUTO_RUN_DIR to a shorter directory"
            )
        return f"ipc://{path}"

    def remove(self) -> None:
        """Remove a temporary directory, unless another process still has its run file in it, or left a report.

        Another one goes if we made it and nothing came into it.
        """
        if self.is_new and not self.is_temporary:
            with contextlib.suppress(OSError):  # not empty
                self.path.rmdir()
        if self.is_temporary and not any(self.path.glob("*.json")) and not any(self.path.glob("*.defect")):
            shutil.rmtree(self.path, ignore_errors=True)


def check_ours(path: Path, name: str = "the run directory") -> None:
    """Raises ConfigError where another user owns this directory or may write in it; it is there. `name`: of what named it."""
    status = path.stat()
    if status.st_uid != os.getuid():
        raise ConfigError(
            f"{name}: {path} belongs to user {status.st_uid}; it must belong to user {os.getuid()}, who runs this: run this as its owner,"
            " or name another one with TENUTO_RUN_DIR or --run-dir"
        )
    if status.st_mode & 0o022:
        raise ConfigError(
            f"{name}: others may write in {path} (mode {stat.S_IMODE(status.st_mode):04o}), and so pose as its roles; it must be"
            f" its owner's alone: chmod 700 {path}"
        )


def require_usable(path: Path) -> None:
    """Raises ConfigError where no role can be run in this directory: it is missing or not ours, or nothing can be made in it.

    It is not made: who starts a role by hand names the directory of a cluster, and a wrong name would be one of its own.
    """
    if not path.is_dir():
        raise ConfigError(
            f"the run directory {path} is not there: name that of the cluster with --run-dir, or make it first (mkdir -p -m 700 {path})"
        )
    check_ours(path)
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(
            f"the run directory {path} is not writable for user {os.getuid()}: name another one with --run-dir"
        )


def run_dir(environment: Mapping[str, str] | None = None) -> RunDir:
    """Find the run directory, make it where it is missing, and check that it is ours; else ConfigError."""
    variables = os.environ if environment is None else environment
    given = variables.get("TENUTO_RUN_DIR")
    if given:
        path = Path(given).absolute()
        return RunDir(path, is_new=_make(path, "TENUTO_RUN_DIR"))
    runtime = variables.get("XDG_RUNTIME_DIR")
    # After `su` the variable often still names the other user's directory: then it is of no use to us.
    if runtime and Path(runtime).is_dir() and os.access(runtime, os.W_OK | os.X_OK):
        path = Path(runtime).absolute() / "tenuto"
        return RunDir(path, is_new=_make(path, "XDG_RUNTIME_DIR"))
    path = temporary_directory() / f"tenuto-{os.getuid()}"
    is_new = _make(path, "the temporary run directory", is_private=True)
    return RunDir(path, is_temporary=is_new, is_new=is_new)


@contextlib.contextmanager
def kept_from_cleaning(path: Path) -> Iterator[None]:
    """While this lasts `systemd-tmpfiles` leaves what is in that directory, however old (tmpfiles.d(5): a shared lock says so)."""
    descriptor = -1
    try:
        with contextlib.suppress(OSError):  # it is being cleaned just now, or its file system has no locks
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def goes_at_logout(path: Path, root: Path = Path("/")) -> bool:
    """Whether systemd removes that directory at the last logout of this user (pam_systemd(8)): who lingers keeps it.

    `root`: of the file system in which that is looked up.
    """
    if not path.is_relative_to(f"/run/user/{os.getuid()}") or not (root / "run/systemd/system").is_dir():
        return False
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # nobody who logs in
        return False
    return not (root / "var/lib/systemd/linger" / name).exists()


def temporary_directory() -> Path:
    """Where temporary files go. Raises ConfigError where no such directory can be written, as on a full disk."""
    try:
        return Path(tempfile.gettempdir())
    except OSError as error:
        raise ConfigError(
            f"{error.strerror}: free space in one of them, or name another one with TMPDIR, or a run directory with --run-dir"
        ) from error


def _make(path: Path, name: str, *, is_private: bool = False) -> bool:
    """Make the directory where it is missing (then True) and check owner, kind and, if private, mode."""
    is_new = True
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
    except FileExistsError:
        is_new = False
        if not path.parent.is_dir():
            raise ConfigError(f"{name}: {path.parent} is not a directory") from None
    except OSError as error:
        raise ConfigError(f"{name}: {path} cannot be made: {error.strerror}") from error
    # lstat: in a shared directory somebody else may have put a link there for us to follow.
    status = path.lstat() if is_private else path.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"{name}: {path} is not a directory")
    check_ours(path, name)
    if is_private and stat.S_IMODE(status.st_mode) != 0o700:
        raise ConfigError(f"{name}: {path} has mode {stat.S_IMODE(status.st_mode):o}; it must be 700")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"{name}: {path} is not writable for us")
    return is_new
