"""Requests for models that nothing serves just now, while a slice that will is on its way.

They wait for it if their budgets outlast its measured start; the discipline hears of them when it is ready. Who cannot
wait so long, and everybody once nothing starts any more, gets NoReplica.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from fabric.ids import FrontendId, ModelId
from policies.batching.base import NEVER_MS, RequestRun
from policies.batching.run_queue import RunQueue
from roles.scheduler.measured_rates import Tallies

WAITING_MAX: Final = 65_536  # requests of all models
LOOK_EVERY_MS: Final = 20.0  # while any waits


class Unserved:
    """The runs that wait. `due_at_ms`: when to look which of them wait in vain; inf: none waits."""

    def __init__(self, tallies: Tallies, coming_at_ms: Callable[[ModelId, float], float]) -> None:
        """`coming_at_ms`: when a model will be served again, as of a moment."""
        self.due_at_ms = NEVER_MS
        self._tallies = tallies
        self._coming_at_ms = coming_at_ms
        self._waiting: dict[ModelId, RunQueue] = {}

    def count(self, model_id: ModelId) -> int:
        """Requests of a model that wait."""
        queue = self._waiting.get(model_id)
        return 0 if queue is None else queue.count

    def take(self, model_id: ModelId, run: RequestRun, now_ms: float) -> bool:
        """Whether it waits; False: its budget does not allow it, nothing is coming, or too many wait already."""
        waiting = sum(queue.count for queue in self._waiting.values())
        if waiting + run.count > WAITING_MAX or run.deadline_at_ms <= self._coming_at_ms(model_id, now_ms):
            return False
        self._waiting.setdefault(model_id, RunQueue()).push(run)
        self.due_at_ms = min(self.due_at_ms, now_ms + LOOK_EVERY_MS)
        return True

    def served(self, model_ids: Iterable[ModelId]) -> Iterator[tuple[ModelId, RequestRun]]:
        """What waited for these models, which waits no more."""
        for model_id in model_ids:
            queue = self._waiting.pop(model_id, None)
            if queue is not None:
                yield from ((model_id, run) for run in queue.runs)

    def in_vain(self, now_ms: float) -> Iterator[tuple[ModelId, RequestRun]]:
        """Those whose budgets do not last until a slice will be ready, by what is known now."""
        for model_id, queue in list(self._waiting.items()):
            ready_from_ms = math.nextafter(self._coming_at_ms(model_id, now_ms), NEVER_MS)
            yield from ((model_id, run) for run in queue.drop_before(ready_from_ms))
            self._keep(model_id, queue)
        self.due_at_ms = now_ms + LOOK_EVERY_MS if self._waiting else NEVER_MS

    def withdraw(self, model_id: ModelId, frontend_id: FrontendId, spans: Sequence[tuple[int, int]]) -> None:
        """Their frontend does not want these any more. `spans`: first seq and count of each."""
        queue = self._waiting.get(model_id)
        if queue is not None:
            self._tallies[model_id].withdrawn += queue.withdraw(frontend_id, spans)
            self._keep(model_id, queue)

    def forget_frontend(self, frontend_id: FrontendId) -> None:
        """Nothing of it is worth a batch any more."""
        for model_id, queue in list(self._waiting.items()):
            self._tallies[model_id].withdrawn += queue.forget(frontend_id)
            self._keep(model_id, queue)

    def _keep(self, model_id: ModelId, queue: RunQueue) -> None:
        if not queue.count:
            del self._waiting[model_id]
