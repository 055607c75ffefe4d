"""Hosts that have run out of something, for the length of a block."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


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
