"""The end of a frontend, in order: its clients go elsewhere, what it has taken on is answered.

It takes on what still comes: a request may have left its client before that heard of the end. So it stays for a moment
after it told them, and then until nothing is pending, but no longer than `DRAIN_MS_MAX`.
"""

from __future__ import annotations

from typing import Final

from fabric.ids import Incarnation, PeerId
from fabric.messages import Pong, Unready

UNDERWAY_MS: Final = 150.0  # from a client that has not heard yet to us
DRAIN_MS_MAX: Final = 5_000.0  # who has a longer budget asks another frontend when the connection ends
CLIENTS_MAX: Final = 65_536  # as many as there can be connections


class Drain:
    """Whether a frontend wants requests, and which clients have to hear of it."""

    def __init__(self, incarnation: Incarnation, memory: str) -> None:
        self._incarnation = incarnation
        self._memory = memory
        self._clients: dict[PeerId, None] = {}
        self._since_ms: float | None = None
        self.has_begun = False
        """No requests are wanted any more. It is asked after every event."""

    def heard(self, client: PeerId) -> None:
        """It is there."""
        if client not in self._clients:
            if len(self._clients) >= CLIENTS_MAX:
                del self._clients[next(iter(self._clients))]
            self._clients[client] = None

    def gone(self, client: PeerId) -> None:
        """Its connection has ended."""
        self._clients.pop(client, None)

    def pong(self, number: int, *, is_linked: bool) -> Pong | Unready:
        """The answer to a client's ping."""
        if is_linked and self._since_ms is None:
            return Pong(number, self._memory, self._incarnation)
        return Unready(self._incarnation)

    def begin(self, now_ms: float) -> list[tuple[PeerId, Unready]]:
        """Want no requests any more; what to tell whom. Nothing more the second time."""
        if self._since_ms is not None:
            return []
        self._since_ms, self.has_begun = now_ms, True
        return [(client, Unready(self._incarnation)) for client in self._clients]

    def wake_at_ms(self, now_ms: float) -> float | None:
        """When it may be over though nothing happens; None: it is over by now, or does not end."""
        if self._since_ms is None:
            return None
        moments = self._since_ms + UNDERWAY_MS, self._since_ms + DRAIN_MS_MAX
        return next((moment for moment in moments if now_ms < moment), None)

    def is_over(self, pending: int, now_ms: float) -> bool:
        """Whether this process may end."""
        if self._since_ms is None or now_ms < self._since_ms + UNDERWAY_MS:
            return False
        return pending == 0 or now_ms >= self._since_ms + DRAIN_MS_MAX
