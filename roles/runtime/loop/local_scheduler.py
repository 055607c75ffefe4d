"""The way to one of this host's schedulers, wherever it is at the moment: for the node agent, `tenuto up`, and the others.

A scheduler that is started again writes a new run file, perhaps with another address. So the run file is read
again and again, and a new incarnation gets a new connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fabric.clock import Clock
from fabric.heartbeats import HeartbeatTiming
from fabric.ids import PeerId
from fabric.keys import Keyring
from fabric.messages import AnyMessage
from fabric.transport import ZMQ, Transport
from roles.runtime.core import SCHEDULER_ID
from roles.runtime.loop.scheduler_source import SchedulerSource
from roles.runtime.process import read_run_file
from roles.runtime.process_events import SchedulerFound


class LocalScheduler(SchedulerSource):
    """Closed until the scheduler's run file is there."""

    def __init__(
        self,
        own: PeerId,
        run_dir: Path,
        clock: Clock,
        keyring: Keyring | None = None,
        role_id: str = SCHEDULER_ID,
        heartbeats: HeartbeatTiming | None = None,
        transport: Transport = ZMQ,
    ) -> None:
        super().__init__(own, clock, keyring, role_id, heartbeats, transport)
        self._run_file = run_dir / f"{role_id}.json"
        self._incarnation = ""
        self._is_behind = False

    def send(self, message: AnyMessage) -> bool:
        """See `SchedulerSource`; before the run file was there nothing follows."""
        is_out = super().send(message)
        if not is_out:
            self._is_behind = self._connection.is_open
        return is_out

    def _was_refused(self) -> bool:
        was_refused, self._is_behind = self._is_behind, False
        return was_refused

    def _look(self) -> Sequence[SchedulerFound]:
        found = read_run_file(self._run_file)
        if found is None or found.incarnation == self._incarnation:
            return ()
        addresses = tuple(found.addresses.get("control", ()))
        if not addresses:
            return ()
        self._connection.open(addresses)
        self._incarnation = found.incarnation
        return (SchedulerFound(addresses, self._scheduler),)
