"""Child processes of Python's multiprocessing that leave Ctrl-C to their parent.

A terminal sends it to all of them. One that still imports would print a traceback; so would one that waits for work.
"""

from __future__ import annotations

import signal
from multiprocessing.context import SpawnContext, SpawnProcess


class _Deaf(SpawnProcess):
    def start(self) -> None:
        # A mask is inherited, through exec too. What comes meanwhile is delivered to us afterwards.
        former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)


class DeafContext(SpawnContext):
    """As `multiprocessing.get_context("spawn")`. Whoever is interrupted ends its children by `terminate`."""

    Process = _Deaf
