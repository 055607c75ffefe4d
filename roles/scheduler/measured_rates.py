"""What comes in and what becomes of it, per model: the rates that plans follow, and the advice on GPUs.

Nothing here is on the way of a request: counts are kept per batch and per refusal, and what arrived between two looks
is what was decided between them and what waits now.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from fabric.ids import ModelId
from policies.scaling import ObservedLoad, ScaleAdvice, ScaleAdvisor

MEAN_LOOKS = 5  # looks of a second whose mean is one reading of the rate (as Symphony's 5 s)
HISTORY_LOOKS = 30  # gpulet: the rate is the highest reading of 30 s
SIGMAS = 3.0  # what a Poisson process does by itself is no drift


@dataclass(slots=True)
class Tally:
    """A model's counts since the start. `busy_gpu_ms` is weighted by the share of the GPU."""

    granted: int = 0
    dropped: int = 0
    refused: int = 0
    withdrawn: int = 0
    returned: int = 0
    busy_gpu_ms: float = 0.0


Tallies = defaultdict[ModelId, Tally]


def new_tallies() -> Tallies:
    """One of each model that is asked for."""
    return defaultdict(Tally)


@dataclass(slots=True)
class _Past:
    """A model at the last look, and its readings."""

    decided: int
    queued: int
    bad: int
    busy_gpu_ms: float
    arrived: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MEAN_LOOKS))
    readings: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY_LOOKS))


class MeasuredRates:
    """Looked at about once a second."""

    def __init__(self, tallies: Tallies) -> None:
        self._tallies = tallies
        self._advisor = ScaleAdvisor()
        self._past: dict[ModelId, _Past] = {}
        self._looked_at_ms: float | None = None

    def look(
        self, models: Iterable[ModelId], queued: Callable[[ModelId], int], gpus: int, now_ms: float
    ) -> None:
        """Take note of what happened since the last look."""
        span_ms = 0.0 if self._looked_at_ms is None else now_ms - self._looked_at_ms
        self._looked_at_ms = now_ms
        former, self._past = self._past, {}
        loads: dict[ModelId, ObservedLoad] = {}
        models = tuple(models)
        for gone in self._tallies.keys() - set(models):
            del self._tallies[gone]
        for model_id in models:
            tally = self._tallies[model_id]
            decided = tally.granted + tally.dropped + tally.refused + tally.withdrawn - tally.returned
            waiting, bad = queued(model_id), tally.dropped + tally.refused
            past = self._past[model_id] = former.get(model_id) or _Past(
                decided, waiting, bad, tally.busy_gpu_ms
            )
            arrived = max(0, decided - past.decided + waiting - past.queued)
            loads[model_id] = ObservedLoad(
                arrived, min(arrived, bad - past.bad), tally.busy_gpu_ms - past.busy_gpu_ms
            )
            if span_ms > 0 and model_id in former:
                past.arrived.append((arrived, span_ms))
                if len(past.arrived) == MEAN_LOOKS:
                    past.readings.append(_mean_rps(past.arrived))
            past.decided, past.queued, past.bad, past.busy_gpu_ms = decided, waiting, bad, tally.busy_gpu_ms
        self._advisor.observe(gpus, loads, now_ms)

    def rate_rps(self, model_id: ModelId) -> float | None:
        """The highest 5 s mean of the last 30 s; None before the first one."""
        past = self._past.get(model_id)
        return max(past.readings) if past is not None and past.readings else None

    def has_history(self, model_id: ModelId) -> bool:
        """Whether that is the highest of 30 s already."""
        past = self._past.get(model_id)
        return past is not None and len(past.readings) == HISTORY_LOOKS

    def rates_rps(self) -> Mapping[ModelId, float]:
        """The rates of all models that have one."""
        found = {model_id: self.rate_rps(model_id) for model_id in self._past}
        return {model_id: rate_rps for model_id, rate_rps in found.items() if rate_rps is not None}

    def advice(self) -> ScaleAdvice:
        """How many GPUs the load asks for (Symphony section 3.5)."""
        return self._advisor.advice()


def has_drifted(rate_rps: float, planned_for_rps: float) -> bool:
    """Over 5 % or 10 r/s more, or over 10 % less (gpulet's rule); and more than chance.

    Of arrivals that are a Poisson process a 5 s mean wanders by sqrt(rate / 5 s) by itself, so small rates need a
    larger step.
    """
    more_rps = rate_rps - planned_for_rps
    chance_rps = SIGMAS * math.sqrt(max(rate_rps, planned_for_rps) / MEAN_LOOKS)
    if abs(more_rps) <= chance_rps:
        return False
    return more_rps > min(10.0, 0.05 * planned_for_rps) or -more_rps > 0.1 * planned_for_rps


def with_headroom(rate_rps: float) -> float:
    """What to plan for at a measured rate: half as much again where it is small, else a fifth (gpulet)."""
    return rate_rps * (1.5 if rate_rps < 125 else 1.2)


def _mean_rps(arrived: Iterable[tuple[int, float]]) -> float:
    count, span_ms = 0, 0.0
    for one_count, one_span_ms in arrived:
        count += one_count
        span_ms += one_span_ms
    return 1000.0 * count / span_ms
