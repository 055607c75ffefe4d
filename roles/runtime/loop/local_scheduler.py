"""The way to one of this host's schedulers, wherever it is at the moment: for the node agent, `tenuto up`, and the others.

A scheduler that is started again writes a new run file, perhaps with another address. So the run file is read
again and again, and a new incarnation gets a new connection. The end of the former one is heard at once, by its connection or by a
message that is refused, so while neither happens a look a second is enough: each one wakes up a process that may have nothing else to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from fabric.clock import Clock
from fabric.heartbeats import HeartbeatTiming
from fabric.ids import PeerId
from fabric.keys import Keyring
from fabric.messages import AnyMessage
from fabric.transport import ZMQ, Transport
from roles.runtime.core import SCHEDULER_ID, Lost
from roles.runtime.loop.scheduler_source import LOOK_EVERY_MS, SchedulerEvent, SchedulerSource
from roles.runtime.process import read_run_file
from roles.runtime.process_events import SchedulerFound

LOOK_IN_PEACE_MS: Final = 1_000.0
UNSURE_MS: Final = 5_000.0  # after a connection ended or a message was refused; a restart takes less


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
        self._clock = clock
        self._unsure_until_ms = 0.0

    def send(self, message: AnyMessage) -> bool:
        """See `SchedulerSource`; before the run file was there nothing follows."""
        is_out = super().send(message)
        if not is_out:
            self._is_behind = self._connection.is_open
            self._doubt(self._clock.now_ms())
        return is_out

    def take(self, limit: int, now_ms: float) -> Sequence[SchedulerEvent]:
        """See `SchedulerSource`."""
        events = super().take(limit, now_ms)
        if any(isinstance(event, Lost) for event in events):
            self._doubt(now_ms)
        return events

    def _doubt(self, now_ms: float) -> None:
        """It may be about to start anew: look for it soon."""
        self._unsure_until_ms = now_ms + UNSURE_MS
        self._look_at_ms = min(self._look_at_ms, now_ms + LOOK_EVERY_MS)

    def _look_every_ms(self, now_ms: float) -> float:
        is_sure = self._incarnation and now_ms >= self._unsure_until_ms
        return LOOK_IN_PEACE_MS if is_sure else LOOK_EVERY_MS

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
        self._connection.open(addresses, is_patient=True)
        self._incarnation = found.incarnation
        return (SchedulerFound(addresses, self._scheduler),)
