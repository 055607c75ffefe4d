"""The agent's process, as a worker that may outlive it sees it: a source of the driver.

A pidfd becomes readable when the agent ends, however that happens. From then on nobody reads what this process
prints, and a print into a closed pipe is an error in users' code: both streams go nowhere. Should the loop here hang
as well, an alarm of the kernel ends the process a little after its time.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Sequence
from typing import Protocol

from roles.gpu_worker.events import AgentGone
from roles.runtime.loop.sources import Source

ALARM_AFTER_MS = 5_000.0


class WatchesAgent(Source[AgentGone], Protocol):
    """`AgentWatch`, or what stands in for it."""

    def watch(self, pid: int) -> None:
        """This process is the agent from now on."""
        ...

    def close(self) -> None:
        """Give the descriptors back."""
        ...


class AgentWatch:
    """Gives `AgentGone` once for each process it is told to watch. `outlive_ms` 0: watches nobody."""

    def __init__(self, outlive_ms: float = 0.0) -> None:
        self._outlive_ms = outlive_ms
        self._epoll = select.epoll()
        self._pid = 0
        self._handle = -1
        self._is_gone = False

    def watch(self, pid: int) -> None:
        """This process is the agent from now on."""
        if not self._outlive_ms or pid in (0, self._pid):
            return
        self._drop()
        self._pid = pid
        self._is_gone = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        try:
            self._handle = os.pidfd_open(pid)
        except OSError:
            self._is_gone = True
            return
        self._epoll.register(self._handle, select.EPOLLIN)

    def close(self) -> None:
        """Give the descriptors back."""
        self._drop()
        self._epoll.close()

    def fileno(self) -> int:
        """The same for all agents."""
        return self._epoll.fileno()

    @property
    def has_more(self) -> bool:
        """Whether the agent had ended before it was watched; otherwise the descriptor says so."""
        return self._is_gone

    @property
    def wake_at_ms(self) -> float | None:
        """Never by itself."""
        return None

    def take(self, limit: int, now_ms: float) -> Sequence[AgentGone]:  # noqa: ARG002  a Source's signature
        """The end of the agent, once."""
        if not self._is_gone and not (self._handle >= 0 and self._epoll.poll(0, 1)):
            return ()
        self._is_gone = False
        self._pid = 0  # whoever has that number next is watched like any other
        self._drop()
        signal.setitimer(signal.ITIMER_REAL, (self._outlive_ms + ALARM_AFTER_MS) / 1e3)
        _go_quiet()
        return (AgentGone(),)

    def _drop(self) -> None:
        if self._handle >= 0:
            self._epoll.unregister(self._handle)
            os.close(self._handle)
            self._handle = -1


def _go_quiet() -> None:
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(nowhere, descriptor)
        os.close(nowhere)
