"""Requests for models that nothing serves just now, while a slice that will is on its way.

They wait for it if their budgets outlast its measured start; the discipline hears of them when it is ready. Who cannot
wait so long, and everybody once the slice is not expected any more, gets NoReplica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from fabric.ids import ModelId, PeerId
from policies.batching.base import NEVER_MS, RequestRun
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
        self._waiting: dict[ModelId, list[RequestRun]] = {}
        self._count = 0

    def take(self, model_id: ModelId, run: RequestRun, now_ms: float) -> bool:
        """Whether it waits; False: its budget does not allow it, nothing is coming, or too many wait already."""
        if self._count + run.count > WAITING_MAX or run.deadline_at_ms <= self._coming_at_ms(
            model_id, now_ms
        ):
            return False
        self._waiting.setdefault(model_id, []).append(run)
        self._count += run.count
        self.due_at_ms = min(self.due_at_ms, now_ms + LOOK_EVERY_MS)
        return True

    def served(self, model_ids: Iterable[ModelId]) -> Iterator[tuple[ModelId, RequestRun]]:
        """What waited for these models, which waits no more."""
        for model_id in model_ids:
            for run in self._waiting.pop(model_id, ()):
                self._count -= run.count
                yield model_id, run

    def in_vain(self, now_ms: float) -> Iterator[tuple[ModelId, RequestRun]]:
        """Those whose budgets do not last until a slice will be ready, by what is known now."""
        for model_id, runs in list(self._waiting.items()):
            coming_at_ms = self._coming_at_ms(model_id, now_ms)
            kept = [run for run in runs if run.deadline_at_ms > coming_at_ms]
            if len(kept) < len(runs):
                for run in runs:
                    if run.deadline_at_ms <= coming_at_ms:
                        self._count -= run.count
                        yield model_id, run
                self._keep(model_id, kept)
        self.due_at_ms = now_ms + LOOK_EVERY_MS if self._waiting else NEVER_MS

    def forget_frontend(self, peer: PeerId) -> None:
        """Nothing of it is worth a batch any more."""
        for model_id, runs in list(self._waiting.items()):
            kept = [run for run in runs if PeerId(run.frontend_id) != peer]
            gone = sum(run.count for run in runs) - sum(run.count for run in kept)
            self._count -= gone
            self._tallies[model_id].withdrawn += gone
            self._keep(model_id, kept)

    def _keep(self, model_id: ModelId, runs: list[RequestRun]) -> None:
        if runs:
            self._waiting[model_id] = runs
        else:
            del self._waiting[model_id]
