"""Workers of a former agent of this host: waited for until they are adopted, sent away, or known to have ended."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from roles.node_agent.events import AgentAction, AgentLimits, Kill, Orphan
from roles.runtime.process_events import Warn
from roles.runtime.time_limits import is_looked_at_late


class Orphans:
    """Adds to the core's own `actions`."""

    def __init__(self, found: Iterable[Orphan], limits: AgentLimits, actions: list[AgentAction]) -> None:
        self._waited_for = {orphan.worker_id: orphan for orphan in found}
        self._adopt_ms = limits.adopt_ms
        self._end_ms = limits.client_end_ms + limits.kill_ms
        self._actions = actions
        self._strays: dict[str, float | None] = {}
        """Those that were killed and whose end is not known yet: until when it is waited for; None: no more."""
        self.adopt_until_ms: float | None = None
        """When they are given up."""

    def __bool__(self) -> bool:
        """Whether any is waited for."""
        return bool(self._waited_for)

    @property
    def waited_for(self) -> Mapping[str, Orphan]:
        """Who may still say hello, by worker id: the same mapping at all times."""
        return self._waited_for

    @property
    def are_gone(self) -> bool:
        """Whether the end of none that was sent away is waited for."""
        return all(until_ms is None for until_ms in self._strays.values())

    @property
    def number_max(self) -> int:
        """The highest number at the end of a worker's id: a new agent counts on from there.

        Also those that will not be adopted live until they are known to have ended.
        """
        return max(map(_number, self._waited_for), default=0)

    @property
    def wake_at_ms(self) -> float | None:
        """When they are given up, before their time began at once; or the end of one that was killed is."""
        own = 0.0 if self._waited_for and self.adopt_until_ms is None else self.adopt_until_ms
        moments = (own, *self._strays.values())
        return min((moment for moment in moments if moment is not None), default=None)

    def begin(self, now_ms: float) -> None:
        """Their time begins with the first event."""
        if self._waited_for and self.adopt_until_ms is None:
            self.adopt_until_ms = now_ms + self._adopt_ms

    def adopted(self, worker_id: str) -> None:
        """It is a worker of ours now."""
        del self._waited_for[worker_id]

    def send_away(self, worker_id: str, now_ms: float) -> None:
        """It is of no use."""
        del self._waited_for[worker_id]
        self._strays[worker_id] = now_ms + self._end_ms
        self._actions.append(Kill(worker_id))

    def send_all_away(self, now_ms: float) -> None:
        """They have not come in time, or nobody wants them."""
        for worker_id in list(self._waited_for):
            self.send_away(worker_id, now_ms)

    def tick(self, now_ms: float) -> None:
        """Send away who has not come in time. Who does not even die of SIGKILL in time is stuck in the kernel, and holds nobody up."""
        if self.adopt_until_ms is not None and self.adopt_until_ms <= now_ms:
            if is_looked_at_late(self.adopt_until_ms, now_ms):
                self.adopt_until_ms = now_ms + self._adopt_ms
            else:
                self.send_all_away(now_ms)
        for worker_id, until_ms in self._strays.items():
            if until_ms is not None and until_ms <= now_ms:
                self._strays[worker_id] = None
                self._actions.append(
                    Warn(f"orphan_abandoned worker={worker_id} after_s={self._end_ms / 1e3:g}")
                )

    def exited(self, worker_id: str) -> bool:
        """A process has ended; whether it was one of them."""
        if worker_id not in self._strays and worker_id not in self._waited_for:
            return False
        self._strays.pop(worker_id, None)
        self._waited_for.pop(worker_id, None)
        return True

    def settle(self) -> bool:
        """Whether their time is over with this call: nobody is waited for any more."""
        is_over = not self._waited_for and self.adopt_until_ms is not None
        if is_over:
            self.adopt_until_ms = None
        return is_over


def _number(worker_id: str) -> int:
    found = re.search(r"\d+$", worker_id)
    return int(found[0]) if found else 0
