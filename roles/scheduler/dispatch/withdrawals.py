"""Requests that their frontends want no more: gathered where a queue is long, so that each look at it is for many.

Taking requests out of a queue costs a look at every run in it. A client that goes with thousands of requests makes its
frontend say so in thousands of messages, and twenty thousand looks at twenty thousand runs would stop the scheduler
for minutes. A long queue is looked at once in a while that grows with it; a request that is granted meanwhile is left
out by its frontend.
"""

from __future__ import annotations

from typing import Final

from fabric.ids import FrontendId, ModelId, PeerId
from fabric.messages import Withdraw
from policies.batching.base import NEVER_MS, Discipline
from roles.scheduler.dispatch.unserved import Unserved
from roles.scheduler.measured_rates import Tallies

AT_ONCE_MAX: Final = 1_000  # requests in a queue that is looked at for every message
QUEUED_PER_MS: Final = (
    500  # of a pause: a look takes about a third of a µs a run, so a sixth of the time at the most
)
GATHERED_MAX: Final = 65_536  # spans of seqs, of all frontends and models


class Withdrawals:
    """On their way to `discipline`, and to what is `unserved`. `due_at_ms`: when the next look is; inf: nothing is gathered."""

    def __init__(self, discipline: Discipline, unserved: Unserved, tallies: Tallies) -> None:
        self.due_at_ms = NEVER_MS
        self._discipline = discipline
        self._unserved = unserved
        self._tallies = tallies
        self._gathered: dict[ModelId, dict[FrontendId, list[tuple[int, int]]]] = {}
        self._count = 0

    def take(self, peer: PeerId, message: Withdraw, now_ms: float) -> None:
        """Of a model that is served."""
        model_id, frontend_id = message.model_id, FrontendId(peer)
        queued = self._discipline.queued(model_id) + self._unserved.count(model_id)
        if not queued:
            return
        spans = [(run.first_seq, run.count) for run in message.runs]
        if queued <= AT_ONCE_MAX and model_id not in self._gathered:
            self._withdraw(model_id, frontend_id, spans, now_ms)
            return
        self._gathered.setdefault(model_id, {}).setdefault(frontend_id, []).extend(spans)
        self._count += len(spans)
        self.due_at_ms = min(self.due_at_ms, now_ms + queued / QUEUED_PER_MS)
        if self._count > GATHERED_MAX:
            self.due_at_ms = now_ms

    def look(self, now_ms: float) -> None:
        """Take out what was gathered, from one queue; the others have their turn at once after it."""
        for model_id in list(self._gathered)[:1]:
            for frontend_id, spans in self._gathered.pop(model_id).items():
                self._count -= len(spans)
                self._withdraw(model_id, frontend_id, spans, now_ms)
        self.due_at_ms = now_ms if self._gathered else NEVER_MS

    def forget(self, frontend_id: FrontendId) -> None:
        """All it has queued is forgotten."""
        for of_frontends in self._gathered.values():
            self._count -= len(of_frontends.pop(frontend_id, ()))

    def forget_model(self, model_id: ModelId) -> None:
        """It is served no more."""
        self._count -= sum(map(len, self._gathered.pop(model_id, {}).values()))

    def _withdraw(
        self, model_id: ModelId, frontend_id: FrontendId, spans: list[tuple[int, int]], now_ms: float
    ) -> None:
        queued = self._discipline.queued(model_id)
        self._discipline.withdraw(model_id, frontend_id, spans, now_ms)
        self._tallies[model_id].withdrawn += queued - self._discipline.queued(model_id)
        self._unserved.withdraw(model_id, frontend_id, spans)
