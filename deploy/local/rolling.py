"""A rolling restart, sans-IO: one role at a time, each back in health, and all others serving, before the next one ends.

    ASKING --its health--> ENDING --exited--> STARTING --serves--> HEALING --as healthy as before--> RESTING --> next
       |                                          |  ^                |                                 |
       |                                          |  +----------------+---- ends of its own accord -----+
       +------------- too long -------------------+-------------------+--> over, with a reason; so too if it ends again and again

Health is what a role says of itself: whether it is ready, how many slices it has ready, how many frontends it knows. The
rest after it gives clients the time to connect to it again before the next role of its kind ends.

A slice's models load one after the other, and a worker may have several slices: so how long is too long depends on the
largest slice, and counts anew whenever one more slice is ready than ever since the role ended.

Of the schedulers of a shard the active one ends last, so that one that is new takes over, and once. Which one that is they
are asked when it is their turn. It is back when whichever is active then is as healthy as it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum, auto
from typing import Final

from msgspec import Struct

from fabric.messages import SliceState, StatusListed
from roles.node_agent.events import AgentLimits
from roles.runtime.time_limits import is_looked_at_late

ASK_LIMIT_MS: Final = 5_000.0
HEAL_LIMIT_MS: Final = 180_000.0  # from its end on; with one large model a slice may take 150 s
REST_MS: Final = 500.0
ACTIVE: Final = "active"
ENDS_MAX: Final = 3
"""Of its own accord, by the role whose turn it is: what kills it may pass, what it says at each start does not."""


class Health(Struct, frozen=True):
    """What is compared before and after."""

    is_ready: bool
    slices_ready: int
    frontends: int
    standing: str = ""
    """Of a scheduler: whether it is the active one. Another has no slices and no frontends of its own."""
    models_max: int = 1
    """In one slice."""

    @property
    def heal_limit_ms(self) -> float:
        """How long it may take to be so again, or one slice nearer to it."""
        return HEAL_LIMIT_MS + AgentLimits().further_load_ms(self.models_max)

    @property
    def is_active(self) -> bool:
        """Whether it is the active scheduler."""
        return self.standing == ACTIVE

    def is_as_good_as(self, before: Health) -> bool:
        """Whether nothing is missing that was there before. A scheduler that stood by need not be more than ready."""
        if before.standing not in ("", ACTIVE):
            return self.is_ready
        return (
            self.is_ready >= before.is_ready
            and self.slices_ready >= before.slices_ready
            and self.frontends >= before.frontends
        )


def health_of(status: StatusListed) -> Health:
    """As a role's status tells it."""
    return Health(
        status.counters.get("is_ready", 1.0) > 0,
        sum(report.state == SliceState.READY for report in status.slices),
        int(status.counters.get("frontends", 0.0)),
        "" if status.standing is None else status.standing.state,
        max((1, *(len(report.models) for report in status.slices))),
    )


class _Phase(Enum):
    ASKING = auto()
    ENDING = auto()
    STARTING = auto()
    HEALING = auto()
    RESTING = auto()
    OVER = auto()


class RollingRestart:
    """Of these roles, in this order, but for active schedulers. `kinds`: what each one is; `reason`: why it is over before all were restarted."""

    def __init__(self, kinds: Mapping[str, str], now_ms: float) -> None:
        self.restarted = 0
        self.reason = ""
        self._kinds = kinds
        self._role_ids = list(kinds)
        self._witnesses: deque[str] = deque()
        """Who may say that the role whose turn it is is back: itself, or another scheduler that has taken over from it."""
        self._phase = _Phase.ASKING
        self._before: Health | None = None
        self._back_by_ms = 0.0
        self._slices_ready_max = 0
        """Since it ended."""
        self._ends = 0
        self._last_end = ""
        self._limit_at_ms = now_ms + ASK_LIMIT_MS

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do."""
        return self._phase is _Phase.OVER

    @property
    def role_id(self) -> str:
        """Whose turn it is; empty when it is over."""
        return "" if self.is_over else self._role_ids[self.restarted]

    @property
    def asks(self) -> str:
        """Whose health it wants to hear of; empty: nobody's."""
        if self._phase is _Phase.HEALING:
            return self._witnesses[0]
        return self.role_id if self._phase is _Phase.ASKING else ""

    @property
    def wake_at_ms(self) -> float | None:
        """The next time limit, or the end of a rest."""
        return None if self.is_over else self._limit_at_ms

    def reported(self, role_id: str, health: Health, now_ms: float, absent: str = "") -> bool:
        """Somebody said how it is; True: end it now. `absent`: another role that does not serve, for which it waits."""
        if role_id != self.asks:
            return False
        if self._phase is _Phase.ASKING:
            if absent or (health.is_active and self._puts_off()):
                return False
            self._before, self._slices_ready_max = health, 0
            self._back_by_ms = now_ms + health.heal_limit_ms
            self._go_on(_Phase.ENDING, self._back_by_ms)
            return True
        assert self._before is not None, "it was asked before it ended"
        if health.is_as_good_as(self._before):
            self._go_on(_Phase.RESTING, now_ms + REST_MS)
            return False
        if health.slices_ready > self._slices_ready_max:
            self._slices_ready_max = health.slices_ready
            self._limit_at_ms = self._back_by_ms = now_ms + self._before.heal_limit_ms
        if not health.is_active:
            self._witnesses.rotate(-1)
        return False

    def _puts_off(self) -> bool:
        """Whether others of its kind are still to be restarted; then the role whose turn it is goes behind them."""
        kind = self._kinds[self.role_id]
        later = [
            number
            for number, role_id in enumerate(self._role_ids)
            if number > self.restarted and self._kinds[role_id] == kind
        ]
        if later:
            self._role_ids.insert(later[-1], self._role_ids.pop(self.restarted))
        return bool(later)

    def exited(self, role_id: str) -> None:
        """Its process has ended."""
        if role_id == self.role_id and self._phase is _Phase.ENDING:
            self._phase = _Phase.STARTING

    def failed(self, role_id: str, how: str) -> None:
        """Its next process has ended of its own accord; another one is started by itself."""
        if role_id != self.role_id or self._phase not in (_Phase.STARTING, _Phase.HEALING, _Phase.RESTING):
            return
        self._ends, self._last_end = self._ends + 1, f": {how}"
        self._go_on(_Phase.STARTING, self._back_by_ms)
        if self._ends == ENDS_MAX:
            self._end("did not come back")

    def serves(self, role_id: str) -> None:
        """Its next process serves."""
        if role_id == self.role_id and self._phase is _Phase.STARTING:
            assert self._before is not None, "it was asked before it ended"
            others = [
                one for one, kind in self._kinds.items() if kind == self._kinds[role_id] and one != role_id
            ]
            self._witnesses = deque([role_id, *(others if self._before.is_active else ())])
            self._phase = _Phase.HEALING

    def tick(self, now_ms: float, absent: str = "") -> None:
        """Rests and limits that are over. `absent`: the first role that does not serve now."""
        if self.is_over or now_ms < self._limit_at_ms:
            return
        if self._phase is not _Phase.RESTING:
            if is_looked_at_late(self._limit_at_ms, now_ms):
                self._give_time(now_ms)
            elif self._phase is not _Phase.ASKING:
                self._end("did not come back as it was")
            elif absent == self.role_id:
                self._end("does not serve")
            elif absent:
                self._end(f"serves on: {absent} does not serve")
            else:
                self._end("does not say how it is")
            return
        self.restarted += 1
        self._ends, self._last_end = 0, ""
        if self.restarted == len(self._role_ids):
            self._phase = _Phase.OVER
        else:
            self._go_on(_Phase.ASKING, now_ms + ASK_LIMIT_MS)

    def _give_time(self, now_ms: float) -> None:
        if self._phase is _Phase.ASKING:
            self._limit_at_ms = now_ms + ASK_LIMIT_MS
        else:
            assert self._before is not None, "it was asked before it ended"
            self._limit_at_ms = self._back_by_ms = now_ms + self._before.heal_limit_ms

    def _end(self, what: str) -> None:
        self.reason = f"{self.role_id} {what}{self._last_end}"
        self._phase = _Phase.OVER

    def _go_on(self, phase: _Phase, limit_at_ms: float) -> None:
        self._phase, self._limit_at_ms = phase, limit_at_ms
