"""Calls that block, away from the agent's loop: each on a thread of its own, its answer back as an event.

Who asks keeps the number bounded: one sample and one check for each GPU at a time, one ending for each worker. A
call that never comes back keeps its thread, which does not keep the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from roles.runtime.loop.mailbox import Mailbox

EventT = TypeVar("EventT")


class BlockingCalls(Mailbox[EventT]):
    """A source of the driver: gives what the calls returned."""

    def run(self, call: Callable[[], EventT]) -> None:
        """Start a call, which must turn everything it expects to go wrong into its answer."""
        try:
            threading.Thread(target=lambda: self.post(call()), daemon=True).start()
        except RuntimeError:  # the host has no more threads for us
            self.post(call())  # the loop waits for it: each call is bounded
