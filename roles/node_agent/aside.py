"""Calls that block, away from the agent's loop: each on a thread of its own, its answer back as an event.

Who asks keeps the number bounded: one sample and one check for each GPU at a time, one ending for each worker. A
call that never comes back keeps its thread, which does not keep the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from roles.gpu_worker.executors.mailbox import Mailbox

EventT = TypeVar("EventT")


class Aside(Generic[EventT]):
    """A source of the driver: gives what the calls returned."""

    def __init__(self) -> None:
        self._mailbox: Mailbox[EventT] = Mailbox()

    def run(self, call: Callable[[], EventT]) -> None:
        """Start a call, which must turn everything it expects to go wrong into its answer."""
        threading.Thread(target=lambda: self._mailbox.post(call()), daemon=True).start()

    def close(self) -> None:
        """Answers that come later go nowhere."""
        self._mailbox.close()

    def fileno(self) -> int:
        """Readable when there is an answer."""
        return self._mailbox.fileno()

    @property
    def has_more(self) -> bool:
        """Whether there is an answer."""
        return self._mailbox.has_more

    @property
    def wake_at_ms(self) -> float | None:
        """Never by itself."""
        return None

    def take(self, limit: int, now_ms: float) -> Sequence[EventT]:  # noqa: ARG002  a Source's signature
        """At most `limit` answers."""
        return self._mailbox.take(limit)
