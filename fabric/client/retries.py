"""When a client may send a request once more, and when it leaves a frontend alone. Sans-IO: moments in, answers out.

A client that sends everything again whenever a frontend is in trouble doubles the load just then, and all clients do so
at once. So what is sent again is a small part of what is sent (a retry budget, as Finagle's), and a frontend that leaves
requests unanswered gets none for a while (a circuit breaker).
"""

from __future__ import annotations

from dataclasses import dataclass

RETRY_SHARE = 0.1
"""Of the requests: so many may be sent again."""
RETRIES_AT_FIRST = 10.0  # a client that has just begun may lose its frontend too
RETRIES_SAVED_MAX = 1_000.0  # a quiet week does not pay for a storm
FAILURES_MAX = 5
PAUSE_MS = 1_000.0


class RetryBudget:
    """Each new request pays a part of a retry in; each retry costs a whole one."""

    def __init__(self) -> None:
        self._saved = RETRIES_AT_FIRST

    def note_request(self) -> None:
        """A new request was sent."""
        self._saved = min(self._saved + RETRY_SHARE, RETRIES_SAVED_MAX)

    def take(self) -> bool:
        """Whether one may be sent again; it counts as sent then."""
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        return True


@dataclass(slots=True)
class Circuit:
    """Whether a frontend gets requests: not for a second after it left five in a row unanswered.

    After that second one request tries it, and its fate decides about the next.
    """

    failures: int = 0
    try_at_ms: float = 0.0

    @property
    def is_closed(self) -> bool:
        """Whether requests go to it as to any other."""
        return self.failures < FAILURES_MAX

    def allows(self, now_ms: float) -> bool:
        """Whether it gets the request that is about to be sent; if it is the one that tries, no other is for a while."""
        if self.is_closed:
            return True
        if now_ms < self.try_at_ms:
            return False
        self.try_at_ms = now_ms + PAUSE_MS
        return True

    def note_answer(self) -> None:
        """It said something about a request, whatever it was."""
        self.failures = 0

    def note_unanswered(self, now_ms: float) -> None:
        """A request's time is over and nothing came."""
        self.failures += 1
        self.try_at_ms = now_ms + PAUSE_MS
