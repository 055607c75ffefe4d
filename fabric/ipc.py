"""Who may bind an ipc path, and who is connected to there. ZeroMQ takes a path from whoever has it, living or dead, without a word.

So a binder holds a lock on a file beside the socket. The kernel drops it when the process ends in whatever way:
what a dead process left behind is taken over, what a living one uses is refused. And whoever connects looks whose socket it is:
ZeroMQ asks that only where it listens, so another user's could pose as a role's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fabric.errors import ConfigError
from fabric.shared_memory import SCHEME

IPC: Final = "ipc://"
STREAM_SUFFIX: Final = ".stream"
PATH_BYTES_MAX: Final = 107  # sockaddr_un.sun_path, less the closing zero


class IpcPath:
    """One claimed path. `claim` it before binding, `release` it after closing.

    `stream_path`: of the local stream beside it, see `stream_path_of`.
    """

    def __init__(self, address: str) -> None:
        self.path = Path(path_of(address))
        self.stream_path = stream_path_of(address)
        self._lock_path = self.path.with_name(self.path.name + ".lock")
        self._lock = -1

    def claim(self) -> None:
        """Raises ConfigError if a living process has it, or if its folder cannot be written."""
        while self._lock < 0:
            try:
                lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise ConfigError(
                    f"cannot bind ipc://{self.path}: {error.strerror}; its folder {self.path.parent} must be there and writable"
                ) from error
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(lock)
                raise ConfigError(f"ipc://{self.path} is in use by another process") from error
            if _is_still_there(lock, self._lock_path):
                self._lock = lock
                self._unlink(self.stream_path)  # a dead process's: its name would be in our way
            else:  # its last holder removed the file between our open and our lock: lock the new one
                os.close(lock)

    def release(self) -> None:
        """Remove socket and lock file. Safe to call twice."""
        if self._lock < 0:
            return
        for path in (self.path, self.stream_path, self._lock_path):
            self._unlink(path)
        os.close(self._lock)
        self._lock = -1

    def _unlink(self, path: Path | None) -> None:
        if path is not None:
            with contextlib.suppress(OSError):  # a run directory may already have been removed as a whole
                path.unlink()


def path_of(address: str) -> str:
    """The path in an `ipc://` address. Raises ConfigError unless it is absolute and fits into a socket's address."""
    path = address.removeprefix("ipc://")
    if not path.startswith("/"):
        raise ConfigError(f"{address}: an ipc address needs an absolute path")
    if len(os.fsencode(path)) > PATH_BYTES_MAX:
        raise ConfigError(
            f"{address}: the path has over {PATH_BYTES_MAX} bytes, choose a shorter TENUTO_RUN_DIR"
        )
    return path


def stream_path_of(address: str) -> Path | None:
    """Where the owner of an ipc address also listens without ZeroMQ; None: the name would be too long."""
    path = path_of(address) + STREAM_SUFFIX
    return Path(path) if len(os.fsencode(path)) <= PATH_BYTES_MAX else None


def nearest(addresses: tuple[str, ...]) -> str:
    """The address to connect to: an ipc one at which a socket of our user is, else the first that is not ipc.

    Raises ConfigError where there is none.
    """
    sockets = [address for address in addresses if not address.startswith(SCHEME)]
    if not sockets:
        raise ConfigError("there is no address to connect to")
    for address in sockets:
        if address.startswith(IPC) and is_our_socket(address):
            return address
    return next((address for address in sockets if not address.startswith(IPC)), sockets[0])


def is_our_socket(address: str) -> bool:
    """Whether a socket of our user is at an ipc address; a link is none. Raises ConfigError as `path_of` does."""
    status = _status(Path(path_of(address)))
    return status is not None and _is_our_socket(status)


def check_not_foreign(address: str) -> None:
    """Raises ConfigError where something else than a socket of our user is at an ipc address. Nothing may be there, yet."""
    path = Path(path_of(address))
    status = _status(path)
    if status is not None and not _is_our_socket(status):
        what = "a socket" if stat.S_ISSOCK(status.st_mode) else "no socket"
        raise ConfigError(
            f"{address} is not connected to: {path} is {what} of user {status.st_uid}; it must be a socket of user {os.geteuid()}, who runs this"
        )


def _is_our_socket(status: os.stat_result) -> bool:
    return stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid()


def _status(path: Path) -> os.stat_result | None:
    """None where it cannot be looked at: it may lie in somebody else's folder of the same name."""
    try:
        return path.lstat()
    except OSError:
        return None


def _is_still_there(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """What is made meanwhile, sockets too, is for this user alone. Roles have that mask anyway."""
    former = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(former)
