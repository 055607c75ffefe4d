"""How many GPUs the load asks for (Symphony section 3.5).

Two signals of one window suffice when batches keep their size whatever the load: requests that go bad say how
many GPUs are missing, idle time says how many are too many. `advised_gpus` is the paper's rule for one window that
is over. `ScaleAdvisor` is the same rule for a cluster that runs on: it asks soon, releases late, and does not
change its mind over a single burst.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Iterable, Mapping
from itertools import takewhile

from msgspec import Struct

from fabric.ids import ModelId
from policies.rounding import ROUNDING
from policies.slo import BAD_RATE_ALLOWED

# Advice once given stands until things are clearly better than what raised it.
_BAD_RATE_CALM = BAD_RATE_ALLOWED / 2
_IDLE_WORTH_RELEASING = 0.1
_IDLE_TIGHT = _IDLE_WORTH_RELEASING / 2
# Long enough for a burst of a second to be outweighed, short against the minutes in which a GPU is had.
ASK_WINDOW_MS = 10_000.0
# The paper adjusts over epochs of a few minutes. Within one, the busiest moment decides what can be spared.
RELEASE_WINDOW_MS = 120_000.0
_SAMPLES_MAX = 1_200  # observed ten times a second; more often, and the oldest are forgotten sooner
_REQUESTS_MIN = 100  # of fewer than these one bad request would be more than 1 %


def advised_gpus(gpus: int, bad_rate: float, idle_fraction: float) -> int:
    """The recommended total for a cluster of `gpus`, at least 1 if there is one.

    Over 1 % bad, N r / (1 - r) more are asked for; else N f are released, f being the idle fraction of all
    GPUs together. Asking rounds up and releasing rounds down. `bad_rate` is below 1: where
    nothing at all is served (`of_the_served`), more of the same would not help.
    """
    if gpus == 0:
        return 0
    if bad_rate >= BAD_RATE_ALLOWED:
        return gpus + math.ceil(gpus * bad_rate / (1 - bad_rate) - ROUNDING)
    return max(1, gpus - math.floor(gpus * idle_fraction + ROUNDING))


class ObservedLoad(Struct, frozen=True):
    """What became of a model's requests since the last look, and the GPU time its batches took."""

    offered: int
    bad: int
    busy_gpu_ms: float


def of_the_served(loads: Iterable[ObservedLoad]) -> ObservedLoad:
    """Models together, without those of which nothing at all was good: these cannot be served here, and more GPUs would not help."""
    return _sum(load for load in loads if load.bad < load.offered)


def missing_for_models(gpus: int, loads: Mapping[ModelId, ObservedLoad]) -> int:
    """How many more GPUs are asked for by what each model lacks, which counts GPU time and not requests.

    Where requests of an expensive model are lost, few lost requests are many GPUs.
    """
    asking = {
        model_id
        for model_id, load in loads.items()
        if load.offered >= _REQUESTS_MIN and load.bad >= BAD_RATE_ALLOWED * load.offered
    }
    return math.ceil(sum(_lacking(gpus, loads, asking).values()) - ROUNDING)


class ScaleAdvice(Struct, frozen=True):
    """`gpus`: the recommended total. `models`: GPUs' worth that each model lacks, or (negative) leaves idle."""

    gpus: int
    models: Mapping[ModelId, float]


class _Sample(Struct, frozen=True):
    at_ms: float
    span_ms: float
    models: Mapping[ModelId, ObservedLoad]
    idle_fraction: float


class ScaleAdvisor:
    """Watches a cluster of changing size. The same observations give the same advice, whoever asks for it in between."""

    def __init__(self) -> None:
        self._gpus = 0
        self._observed_at_ms: float | None = None
        self._sized_at_ms = 0.0
        self._samples: deque[_Sample] = deque(maxlen=_SAMPLES_MAX)
        self._asking: set[ModelId | None] = set()  # None stands for all models together
        self._is_releasing = False

    def observe(self, gpus: int, models: Mapping[ModelId, ObservedLoad], now_ms: float) -> None:
        """What happened since the last call, about once a second; the first one only starts the clock.

        When the number of GPUs changes, what was seen before says nothing about the new size.
        """
        last_at_ms, self._observed_at_ms = self._observed_at_ms, now_ms
        if gpus != self._gpus or last_at_ms is None:
            self._gpus, self._sized_at_ms = gpus, now_ms
            self._samples.clear()
            self._asking.clear()
            self._is_releasing = False
            return
        span_ms = now_ms - last_at_ms
        if span_ms <= 0 or gpus == 0:
            return
        busy_ms = sum(load.busy_gpu_ms for load in models.values())
        idle_fraction = min(1.0, max(0.0, 1 - busy_ms / (gpus * span_ms)))
        self._samples.append(_Sample(now_ms, span_ms, dict(models), idle_fraction))
        while self._samples[0].at_ms <= now_ms - RELEASE_WINDOW_MS:
            self._samples.popleft()
        self._decide(now_ms)

    def advice(self) -> ScaleAdvice:
        """What is recommended as of the last observation; the present size where nothing else can be justified.

        A model's share of the cluster is its share of the busy time. N r / (1 - r) is asked of that share, so a
        model whose requests never run asks for nothing: more GPUs would not help it. Idle time is shared out
        alike.
        """
        loads = self._recent_loads()
        if self._asking:
            lacking = _lacking(self._gpus, loads, self._asking)
            total = of_the_served(loads.values())
            missing = self._gpus * _missing_fraction(total) if None in self._asking else 0.0
            missing = max(missing, sum(lacking.values()))
            return ScaleAdvice(self._gpus + math.ceil(missing - ROUNDING), lacking)
        if not self._is_releasing:
            return ScaleAdvice(self._gpus, {})
        idle_fraction = self._busiest_idle_fraction()
        gpus = advised_gpus(self._gpus, 0.0, idle_fraction)
        return ScaleAdvice(
            gpus,
            {
                model_id: 0.0 - gpus_of * idle_fraction
                for model_id, gpus_of in _shares(self._gpus, loads).items()
            },
        )

    def _decide(self, now_ms: float) -> None:
        """Who asks, and whether GPUs are released: both depend on what was so before."""
        recent = self._recent_loads()
        loads: list[tuple[ModelId | None, ObservedLoad]] = [
            (None, of_the_served(recent.values())),
            *recent.items(),
        ]
        self._asking = {whose for whose, load in loads if self._asks(whose, load)}
        total = _sum(recent.values())
        if 0 < total.offered == total.bad:  # nothing is served: that GPUs are idle says nothing then
            self._sized_at_ms = now_ms
            self._samples.clear()
        # What was idle all through a whole release window, in its busiest ask window.
        is_over = now_ms - self._sized_at_ms >= RELEASE_WINDOW_MS
        least = _IDLE_TIGHT if self._is_releasing else _IDLE_WORTH_RELEASING
        self._is_releasing = not self._asking and is_over and self._busiest_idle_fraction() >= least

    def _asks(self, whose: ModelId | None, load: ObservedLoad) -> bool:
        """Not who cannot be served at all: it would keep idle GPUs from being released for good."""
        threshold = _BAD_RATE_CALM if whose in self._asking else BAD_RATE_ALLOWED
        return load.offered >= _REQUESTS_MIN and threshold * load.offered <= load.bad < load.offered

    def _recent_loads(self) -> dict[ModelId, ObservedLoad]:
        """By model, of the ask window that ends with the last observation."""
        from_ms = self._samples[-1].at_ms - ASK_WINDOW_MS if self._samples else 0.0
        found: dict[ModelId, list[ObservedLoad]] = {}
        for sample in takewhile(lambda sample: sample.at_ms > from_ms, reversed(self._samples)):
            for model_id, load in sample.models.items():
                found.setdefault(model_id, []).append(load)
        return {model_id: _sum(found[model_id]) for model_id in sorted(found)}

    def _busiest_idle_fraction(self) -> float:
        least = 1.0
        window: deque[_Sample] = deque()
        idle_ms = span_ms = 0.0
        for sample in self._samples:
            window.append(sample)
            idle_ms += sample.idle_fraction * sample.span_ms
            span_ms += sample.span_ms
            while window[0].at_ms <= sample.at_ms - ASK_WINDOW_MS:
                gone = window.popleft()
                idle_ms -= gone.idle_fraction * gone.span_ms
                span_ms -= gone.span_ms
            if sample.at_ms - self._sized_at_ms >= ASK_WINDOW_MS:
                least = min(least, idle_ms / span_ms)
        return least


def _sum(loads: Iterable[ObservedLoad]) -> ObservedLoad:
    offered, bad, busy_ms = 0, 0, 0.0
    for load in loads:
        offered, bad, busy_ms = offered + load.offered, bad + load.bad, busy_ms + load.busy_gpu_ms
    return ObservedLoad(offered, bad, busy_ms)


def _shares(gpus: int, loads: Mapping[ModelId, ObservedLoad]) -> dict[ModelId, float]:
    """Each model's share of the cluster, in GPUs: that of the busy time."""
    busy_ms = sum(load.busy_gpu_ms for load in loads.values())
    return {
        model_id: gpus * load.busy_gpu_ms / busy_ms if busy_ms else 0.0 for model_id, load in loads.items()
    }


def _lacking(
    gpus: int, loads: Mapping[ModelId, ObservedLoad], asking: Container[ModelId | None]
) -> dict[ModelId, float]:
    """GPUs' worth that each model of `asking` lacks: r / (1 - r) of its share."""
    return {
        model_id: share * _missing_fraction(loads[model_id])
        for model_id, share in _shares(gpus, loads).items()
        if model_id in asking
    }


def _missing_fraction(load: ObservedLoad) -> float:
    """What is missing, r / (1 - r), of what there is; 0 where nothing at all is good."""
    return load.bad / (load.offered - load.bad) if load.bad < load.offered else 0.0
