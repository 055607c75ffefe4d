"""A worker and its agent: greeted until it says what to host, missed when it is gone, until the next one adopts the worker."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from fabric.messages import SliceSpec, WorkerHello
from roles.gpu_worker.registration import WorkerIdentity
from roles.runtime.time_limits import is_looked_at_late

HELLO_EVERY_MS: Final = (
    25.0  # the first one always comes before the connection: it costs this much at a start
)
HELLO_FOR_MS: Final = 30_000.0  # an agent that has not said what to host by then never will
LAST_GRACE_MS: Final = 2_000.0  # for the batch that runs, when no agent came in time


class Adoption:
    """`outlive_ms`: how long this process may serve on without an agent; 0: it ends with that."""

    def __init__(self, identity: WorkerIdentity, outlive_ms: float) -> None:
        self.may_outlive = outlive_ms > 0.0
        self.hello_at_ms: float | None = -math.inf
        """The next hello; None: there is an agent, or none is wanted."""
        self.orphan_until_ms: float | None = None
        """While there is none: when to end."""
        self._identity = identity
        self._outlive_ms = outlive_ms
        self._hello_until_ms: float | None = None

    def adopted(self) -> bool:
        """An agent has said what to host. Whether another one had gone before."""
        self.hello_at_ms = None
        was_orphan, self.orphan_until_ms = self.orphan_until_ms is not None, None
        return was_orphan

    def orphaned(self, now_ms: float) -> None:
        """The agent is gone: look for the next one."""
        self.orphan_until_ms = now_ms + self._outlive_ms
        self._hello_until_ms = self.orphan_until_ms + LAST_GRACE_MS

    def stop(self) -> None:
        """No agent is wanted any more."""
        self.hello_at_ms = self.orphan_until_ms = None

    def hello(self, slices: Iterable[SliceSpec], now_ms: float) -> WorkerHello | None:
        """What to say again and again, as the agent may not have been there before; None: it has taken too long."""
        if self._hello_until_ms is None or is_looked_at_late(self._hello_until_ms, now_ms):
            self._hello_until_ms = now_ms + HELLO_FOR_MS
        if now_ms >= self._hello_until_ms:
            return None
        self.hello_at_ms = now_ms + HELLO_EVERY_MS
        identity = self._identity
        return WorkerHello(identity.worker_id, identity.incarnation, identity.pid, tuple(slices))
