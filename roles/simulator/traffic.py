"""The requests of a simulated run, one column for each moment: when they came, started and were answered."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fabric.ids import ModelId

Moments = NDArray[np.float64]
Priorities = NDArray[np.int8]


@dataclass(slots=True)
class ModelTraffic:
    """A model's requests. Request i is the number i // F of frontend i % F, of F frontends.

    `started_at_ms[i]` is when its batch started, `finished_at_ms[i]` when its outputs reached its frontend; NaN
    while, or because, it never ran. `priorities`: of each request, where they have their own. `heads`: of a model that has
    any, which its clients ask in turn.
    """

    model_id: ModelId
    slo_ms: float
    arrived_at_ms: Moments
    priorities: Priorities | None = None
    heads: tuple[ModelId, ...] = ()
    started_at_ms: Moments = field(init=False)
    finished_at_ms: Moments = field(init=False)
    _answered: list[tuple[int, int, int, float, float]] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.started_at_ms = np.full(self.arrived_at_ms.size, np.nan)
        self.finished_at_ms = np.full(self.arrived_at_ms.size, np.nan)

    def priority(self, index: int) -> int | None:
        """Of one request; None: the model's."""
        if self.priorities is None or self.priorities[index] < 0:
            return None
        return int(self.priorities[index])

    def asked_name(self, turn: int) -> ModelId:
        """By which its client asks."""
        return self.heads[turn % len(self.heads)] if self.heads else self.model_id

    def answered(
        self, first: int, count: int, step: int, started_at_ms: float, finished_at_ms: float
    ) -> None:
        """Note the fate of requests `first`, `first + step`, …; read it after `settle`."""
        self._answered.append((first, count, step, started_at_ms, finished_at_ms))

    def settle(self) -> None:
        """Write down what was noted, all at once: the first answer to a request counts."""
        if not self._answered:
            return
        first, count, step, started_at_ms, finished_at_ms = (
            np.array(one) for one in zip(*self._answered, strict=True)
        )
        self._answered.clear()
        place = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)  # of each within its run
        index = np.repeat(first, count) + place * np.repeat(step, count)
        index, first_answer = np.unique(index, return_index=True)
        self.started_at_ms[index] = np.repeat(started_at_ms, count)[first_answer]
        self.finished_at_ms[index] = np.repeat(finished_at_ms, count)[first_answer]
