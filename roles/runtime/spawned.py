"""Child processes of Python's multiprocessing that leave Ctrl-C to their parent, and import what it does.

A terminal sends Ctrl-C to all of them. One that still imports would print a traceback; so would one that waits for work. And each
would look for Python's own modules in the current directory first, as `python -c` does (see `module_command`).
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.resource_tracker import ensure_running

_SAFE_PATH = "PYTHONSAFEPATH"


@contextlib.contextmanager
def _not_in_the_current_directory() -> Iterator[None]:
    former = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        if former is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = former


class _Deaf(SpawnProcess):
    def start(self) -> None:
        # A mask is inherited, through exec too. What comes meanwhile is delivered to us afterwards.
        former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with _not_in_the_current_directory():
                super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)


class DeafContext(SpawnContext):
    """As `multiprocessing.get_context("spawn")`. Whoever is interrupted ends its children by `terminate`."""

    Process = _Deaf

    def __init__(self) -> None:
        super().__init__()
        with _not_in_the_current_directory():
            ensure_running()  # it comes with the first lock, and is one for all of the process
