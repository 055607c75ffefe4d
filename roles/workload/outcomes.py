"""What became of the requests: goodput, bad rate, latency, batch sizes, busy GPUs (design section 10).

Simulated and live runs are judged by the same lines. Each request counts where its *intended* arrival lies in
the window and is followed to its fate, however late that comes: good (finished within its SLO), late (ran and
finished later) or dropped (never ran); offered is their sum. A living frontend refuses a request at its deadline, so what is
measured there has percentiles of answers in time alone, and requests that would have been late are among the dropped.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fabric.ids import ModelId, SliceId
from policies.scaling import ObservedLoad, advised_gpus, missing_for_models, of_the_served
from roles.applications.tally import StageTally

# Moments are sums of durations: a batch planned to end at its deadline may end a rounding later.
ROUNDING_MS = 1e-6
_DECIMALS = 6  # of everything reported: a nanosecond, a millionth


class BatchRecord(NamedTuple):
    """One batch. `batch_size` is 0 where it was cut off before its end; `gpu` counts through the cluster.

    `stages`, of a slice over several GPUs: each one's GPU, and from when until when it had the batch.
    """

    model_id: ModelId
    batch_size: int
    slice_id: SliceId
    gpu: int
    share_percent: float | None
    sent_at_ms: float
    started_at_ms: float
    finished_at_ms: float
    stages: tuple[tuple[int, float, float], ...] = ()

    @property
    def spans(self) -> tuple[tuple[int, float, float], ...]:
        """Which GPU it kept busy, and from when until when."""
        return self.stages or ((self.gpu, self.started_at_ms, self.finished_at_ms),)


@dataclass(slots=True, frozen=True)
class Window:
    """The part of a run that counts: arrivals from `from_ms` on, before `until_ms`."""

    from_ms: float
    until_ms: float

    @property
    def duration_s(self) -> float:
        """Its length in seconds."""
        return (self.until_ms - self.from_ms) / 1000


class GpuUse(NamedTuple):
    """What GPUs did in a window. `busy_fraction`: of each GPU.

    `of_model`: device time by model in GPUs, how many each kept busy on average; their sum is that of `busy_fraction`.
    """

    busy_fraction: tuple[float, ...]
    of_model: Mapping[ModelId, float] = MappingProxyType({})

    @property
    def used(self) -> int:
        """How many GPUs had a batch."""
        return sum(fraction > 0 for fraction in self.busy_fraction)


@dataclass(slots=True, frozen=True)
class ModelOutcome:
    """The fates of a model's requests in the window, and the batches of it that started there."""

    offered: int
    good: int
    late: int
    dropped: int
    p50_ms: float | None
    p99_ms: float | None
    batch_mean: float | None
    batch_p50: float | None

    @property
    def bad_rate(self) -> float:
        """1 - good / offered; 0 where nothing was offered."""
        return 1 - self.good / self.offered if self.offered else 0.0


@dataclass(slots=True, frozen=True)
class StageOutcome:
    """The requests of a stage in the whole run: answered, given up by the scheduler, or cancelled as their application's was lost.

    Means are over those that were answered: from when they were asked until they ran, and how long they ran.
    """

    asked: int
    answered: int
    dropped: int
    cancelled: int
    waited_mean_ms: float | None
    run_mean_ms: float | None


def stage_outcome(tally: StageTally) -> StageOutcome:
    """As it is reported."""
    means = [total / tally.answered if tally.answered else None for total in (tally.waited_ms, tally.run_ms)]
    return StageOutcome(tally.asked, tally.answered, tally.dropped, tally.cancelled, *means)


@dataclass(slots=True, frozen=True)
class ApplicationOutcome:
    """An application's requests in the window, counted from end to end, and its stages."""

    requests: ModelOutcome
    stages: Mapping[str, StageOutcome]


def _load(one: ModelOutcome, gpus: float = 0.0) -> ObservedLoad:
    return ObservedLoad(one.offered, one.offered - one.good, gpus)


@dataclass(slots=True, frozen=True)
class Outcome:
    """A whole run, judged. `models` count the requests that were sent to them, without those of stages.

    `with_stages`: of models that stages ask, with the requests of these, where they are known. What is said of all requests
    counts an application's request once, from end to end. `is_work_known`: whether all that GPUs did is in `gpus`.
    `gpus_min`: of the model that is cut over most, or runs in most ranks.
    """

    duration_s: float
    models: Mapping[ModelId, ModelOutcome]
    gpus: GpuUse
    applications: Mapping[str, ApplicationOutcome] = field(default_factory=dict)
    with_stages: Mapping[ModelId, ModelOutcome] = field(default_factory=dict)
    is_work_known: bool = True
    gpus_min: int = 1

    @property
    def fates(self) -> dict[str, ModelOutcome]:
        """Of everybody who has requests, by name: models, then applications from end to end."""
        found: dict[str, ModelOutcome] = {str(name): one for name, one in self.models.items()}
        found.update((name, one.requests) for name, one in self.applications.items())
        return found

    @property
    def told(self) -> dict[str, ModelOutcome]:
        """The same as it is told of each: models with the requests of stages, too."""
        return {**self.fates, **{str(name): one for name, one in self.with_stages.items()}}

    @property
    def offered(self) -> int:
        """Requests of all models and applications."""
        return sum(one.offered for one in self.fates.values())

    @property
    def good(self) -> int:
        """Requests of all models and applications that finished within their SLO."""
        return sum(one.good for one in self.fates.values())

    @property
    def bad_rate(self) -> float:
        """Of all requests together."""
        return 1 - self.good / self.offered if self.offered else 0.0

    @property
    def worst_bad_rate(self) -> float:
        """Of the model or application that fares worst."""
        return max((one.bad_rate for one in self.fates.values()), default=0.0)

    def gpus_of(self, name: str) -> float | None:
        """Device time of a model in GPUs: how many it kept busy on average. None where not all is known, and for an application.

        With it go the requests of stages, wherever these are counted.
        """
        known = self.is_work_known and name in self.models
        return self.gpus.of_model.get(ModelId(name), 0.0) if known else None

    @property
    def advice_gpus(self) -> int | None:
        """How many GPUs the load asks for in total; None where not all of their work is known."""
        if not self.is_work_known:
            return None
        busy_fraction = self.gpus.busy_fraction
        count = len(busy_fraction)
        idle_fraction = 1 - sum(busy_fraction) / count if count else 0.0
        served = of_the_served(_load(one) for one in self.fates.values())
        bad_rate = served.bad / served.offered if served.offered else 0.0
        models = {**self.models, **self.with_stages}
        loads = {name: _load(one, self.gpus.of_model.get(name, 0.0)) for name, one in models.items()}
        if self.offered and not self.good:  # that GPUs are idle says nothing then
            return max(count, self.gpus_min)
        advised = advised_gpus(count, bad_rate, idle_fraction)
        if missing := missing_for_models(count, loads):
            advised = max(advised, count + missing)
        return max(min(count, self.gpus_min), advised)

    def as_json(self) -> dict[str, object]:
        """The contract of `simulate --json` and `bench --json`."""
        return {
            "offered_rps": _rounded(self.offered / self.duration_s),
            "goodput_rps": _rounded(self.good / self.duration_s),
            "bad_rate": _rounded(self.bad_rate),
            "models": {
                model_id: {
                    **_fate_json(model),
                    "batch_mean": _rounded(model.batch_mean),
                    "batch_p50": _rounded(model.batch_p50),
                    "gpus": _rounded(self.gpus_of(model_id)),
                }
                for model_id, model in {**self.models, **self.with_stages}.items()
            },
            "applications": _applications_json(self.applications),
            "gpus": {
                "count": len(self.gpus.busy_fraction),
                "busy_fraction": [_rounded(fraction) for fraction in self.gpus.busy_fraction],
                "used": self.gpus.used,
            },
            "advice_gpus": self.advice_gpus,
        }


def _fate_json(one: ModelOutcome) -> dict[str, object]:
    return {
        "offered": one.offered,
        "good": one.good,
        "late": one.late,
        "dropped": one.dropped,
        "bad_rate": _rounded(one.bad_rate),
        "p50_ms": _rounded(one.p50_ms),
        "p99_ms": _rounded(one.p99_ms),
    }


def _applications_json(applications: Mapping[str, ApplicationOutcome]) -> dict[str, object]:
    return {
        name: {
            **_fate_json(one.requests),
            "stages": {
                stage: {
                    "asked": told.asked,
                    "answered": told.answered,
                    "dropped": told.dropped,
                    "cancelled": told.cancelled,
                    "waited_mean_ms": _rounded(told.waited_mean_ms),
                    "run_mean_ms": _rounded(told.run_mean_ms),
                }
                for stage, told in one.stages.items()
            },
        }
        for name, one in applications.items()
    }


def model_outcome(
    arrived_at_ms: NDArray[np.float64],
    finished_at_ms: NDArray[np.float64],
    slo_ms: float | NDArray[np.float64],
    window: Window,
    batch_sizes: Sequence[int] = (),
) -> ModelOutcome:
    """Judge one model's requests, all of the run; `finished_at_ms` is NaN for those that never ran. `slo_ms`: of all, or of each."""
    inside = (arrived_at_ms >= window.from_ms) & (arrived_at_ms < window.until_ms)
    latency_ms = finished_at_ms[inside] - arrived_at_ms[inside]
    allowed_ms = np.broadcast_to(slo_ms, arrived_at_ms.shape)[inside] + ROUNDING_MS
    good = int(np.count_nonzero(latency_ms <= allowed_ms))
    latency_ms = np.sort(latency_ms[~np.isnan(latency_ms)])
    offered, ran = int(np.count_nonzero(inside)), latency_ms.size
    sizes = np.sort(np.asarray(batch_sizes, dtype=np.float64))
    return ModelOutcome(
        offered=offered,
        good=good,
        late=ran - good,
        dropped=offered - ran,
        p50_ms=nearest_rank(latency_ms, 0.5),
        p99_ms=nearest_rank(latency_ms, 0.99),
        batch_mean=float(sizes.mean()) if sizes.size else None,
        batch_p50=nearest_rank(sizes, 0.5),
    )


def batch_sizes_in(batches: Sequence[BatchRecord], window: Window) -> dict[ModelId, list[int]]:
    """The sizes of the batches that started in the window, by model."""
    sizes: dict[ModelId, list[int]] = {}
    for batch in batches:
        if batch.batch_size and window.from_ms <= batch.started_at_ms < window.until_ms:
            sizes.setdefault(batch.model_id, []).append(batch.batch_size)
    return sizes


def gpu_use(batches: Sequence[BatchRecord], gpus: int, window: Window) -> GpuUse:
    """How busy each GPU was, and with which models.

    A batch counts with its slice's share of the GPU, with all of it where the share is not limited; several
    such at once are still one busy GPU, which is divided between them evenly.
    """
    spent_ms: list[defaultdict[ModelId, float]] = [defaultdict(float) for _ in range(gpus)]
    whole: list[list[tuple[float, float, ModelId]]] = [[] for _ in range(gpus)]
    for batch in batches:
        for gpu, began_at_ms, ended_at_ms in batch.spans:
            start_at_ms = max(began_at_ms, window.from_ms)
            end_at_ms = min(ended_at_ms, window.until_ms)
            if start_at_ms >= end_at_ms:
                continue
            if batch.share_percent is None:
                whole[gpu].append((start_at_ms, end_at_ms, batch.model_id))
            else:
                spent_ms[gpu][batch.model_id] += (end_at_ms - start_at_ms) * batch.share_percent / 100
    for own_ms, spans in zip(spent_ms, whole, strict=True):
        _divide(spans, own_ms)
    return use_of(spent_ms, window)


def use_of(spent_ms: Sequence[Mapping[ModelId, float]], window: Window) -> GpuUse:
    """By what each GPU spent on each model in the window, weighted by shares. More than all of a GPU is all of it."""
    span_ms = window.until_ms - window.from_ms
    of_model: defaultdict[ModelId, float] = defaultdict(float)
    busy_fraction = []
    for own_ms in spent_ms:
        fraction = sum(own_ms.values()) / span_ms
        busy_fraction.append(min(1.0, fraction))
        for model_id, spent in own_ms.items():
            of_model[model_id] += spent / span_ms / max(1.0, fraction)
    return GpuUse(tuple(busy_fraction), dict(of_model))


def _divide(spans: list[tuple[float, float, ModelId]], spent_ms: defaultdict[ModelId, float]) -> None:
    """Add the time of a GPU to the models that had it (start, end, model); those of one moment have even parts of it."""
    running: list[tuple[float, ModelId]] = []  # a heap: the first to end is first
    at_ms = -math.inf
    for start_at_ms, end_at_ms, model_id in [*sorted(spans), (math.inf, math.inf, ModelId(""))]:
        while running and at_ms < start_at_ms:
            until_ms = min(running[0][0], start_at_ms)
            for _, running_id in running:
                spent_ms[running_id] += (until_ms - at_ms) / len(running)
            at_ms = until_ms
            while running and running[0][0] <= at_ms:
                heapq.heappop(running)
        at_ms = start_at_ms
        heapq.heappush(running, (end_at_ms, model_id))


def nearest_rank(ascending: NDArray[np.float64], fraction: float) -> float | None:
    """A percentile that is one of the values: the smallest with at least that fraction at or below it."""
    if ascending.size == 0:
        return None
    return float(ascending[math.ceil(fraction * ascending.size) - 1])


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, _DECIMALS)
