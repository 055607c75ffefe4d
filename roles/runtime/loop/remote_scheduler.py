"""The way to a scheduler on another host: for a node agent or another scheduler, whose configuration says where it is.

Where this host's scheduler is `LocalScheduler`'s question; here the address is known and stays. A scheduler that starts again
behind its address refuses at least a heartbeat in between, so it is noticed too.
"""

from __future__ import annotations

from collections.abc import Sequence

from fabric.clock import Clock
from fabric.heartbeats import HeartbeatTiming
from fabric.ids import PeerId
from fabric.keys import Keyring
from fabric.transport import ZMQ, Transport
from roles.runtime.core import SCHEDULER_ID
from roles.runtime.loop.scheduler_source import SchedulerSource
from roles.runtime.process_events import SchedulerFound


class RemoteScheduler(SchedulerSource):
    """Connects at once, and again whenever that breaks. Raises ConfigError for what is no address."""

    def __init__(
        self,
        own: PeerId,
        addresses: Sequence[str],
        clock: Clock,
        keyring: Keyring | None = None,
        role_id: str = SCHEDULER_ID,
        heartbeats: HeartbeatTiming | None = None,
        transport: Transport = ZMQ,
    ) -> None:
        super().__init__(own, clock, keyring, role_id, heartbeats, transport)
        self._addresses = tuple(addresses)
        self._is_found = False
        self._refused = 0.0
        self._connection.open(addresses)

    def _was_refused(self) -> bool:
        before, self._refused = self._refused, self._connection.counters["full_out"]
        return self._refused > before

    def _look(self) -> Sequence[SchedulerFound]:
        """Once: it stays there."""
        if self._is_found:
            return ()
        self._is_found = True
        return (SchedulerFound(self._addresses, self._scheduler),)
