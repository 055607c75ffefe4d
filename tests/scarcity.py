"""Hosts that have run out of something, for the length of a block."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from unittest import mock


@contextmanager
def limited(kind: int, amount: int) -> Iterator[None]:
    """This process may have so much of it, and no more."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (amount, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def full_disk() -> AbstractContextManager[None]:
    """Whatever is written to a file is refused."""
    return limited(resource.RLIMIT_FSIZE, 0)


def no_descriptors() -> AbstractContextManager[None]:
    """Every descriptor is in use."""
    return limited(resource.RLIMIT_NOFILE, 3)


def no_threads() -> AbstractContextManager[object]:
    """No thread can be started, as in a container that has as many as it may."""
    return mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't start new thread"))


def read_only_disk() -> AbstractContextManager[object]:
    """No file can be removed."""
    refused = OSError(errno.EROFS, os.strerror(errno.EROFS))
    return mock.patch.object(Path, "unlink", side_effect=refused)
