"""A batching discipline alone on virtual time: what Symphony calls scheduler-only (its section 5.1).

No frontend, network or worker: requests reach the discipline the moment they arrive, and what it dispatches runs exactly
l(b) from its start on. A request that is not refused is then in time, so goodput can be asked at a fraction of what the
simulator needs for it. GPUs are equal and host all models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fabric.ids import FrontendId, ModelId, SliceId
from policies.batching.base import (
    BatchDecision,
    BatchModel,
    BatchSlice,
    Delay,
    Discipline,
    Dispatch,
    Drop,
    HostedModel,
    Preempt,
    RequestRun,
)
from policies.batching.registry import make_discipline
from policies.batching.rehearsing.question import Rehearses
from policies.batching.rehearsing.replay import rehearse
from policies.slo import BAD_RATE_ALLOWED
from roles.workload.arrivals import ArrivalSource, Workload
from roles.workload.outcomes import BatchRecord, Window

GRID = 1.005
"""All disciplines are asked at the same rates, this far apart, so that alike ones cannot differ by chance."""
STEP, GROWTH = 8, 1.6  # grid steps of the first look around where a search begins, and how they grow
BEGIN, LOWEST, HIGHEST = 0.75, 0.001, 1.02  # of the bound: where a search begins, what is nothing, the most
BATCH_MAX = 512
NO_DELAY = Delay()

Moments = NDArray[np.float64]
Hear = Callable[[Sequence[BatchDecision], float], bool]
"""Gets what was decided and when; False: enough was heard."""


@dataclass(frozen=True)
class Model:
    """l(b) = alpha_ms · b + beta_ms; `weight`: its part of the total rate."""

    name: str
    alpha_ms: float
    beta_ms: float
    slo_ms: float
    weight: float = 1.0

    def exec_ms(self, batch: int) -> float:
        """l(b)."""
        return self.alpha_ms * batch + self.beta_ms


@dataclass(frozen=True)
class Case:
    """Models on equal GPUs that host all of them; `shape` of the gamma gaps (1: Poisson), `delay` to the devices."""

    name: str
    models: tuple[Model, ...]
    gpus: int
    shape: float = 1.0
    delay: Delay = NO_DELAY

    @property
    def bound_rps(self) -> float:
        """No schedule carries more: every request in the largest batch its SLO allows."""
        weights = sum(model.weight for model in self.models)
        work_ms = 0.0
        for model in self.models:
            size = max(1, int((model.slo_ms - model.beta_ms) / model.alpha_ms))
            work_ms += model.weight / weights * (model.alpha_ms + model.beta_ms / size)
        return 1000 * self.gpus / work_ms

    @property
    def rarest(self) -> float:
        """The smallest part of the total rate that a model has."""
        return min(model.weight for model in self.models) / sum(model.weight for model in self.models)

    def rates_rps(self, total_rps: float) -> dict[str, float]:
        """Each model's part."""
        weights = sum(model.weight for model in self.models)
        return {model.name: total_rps * model.weight / weights for model in self.models}

    def arrivals(self, seed: int, rate_rps: float, until_ms: float) -> list[Moments]:
        """Ascending moments of each model; a seed is one burst pattern at every rate."""
        return self.stepped_arrivals(
            seed, {name: ((0.0, rate),) for name, rate in self.rates_rps(rate_rps).items()}, until_ms
        )

    def stepped_arrivals(
        self, seed: int, steps: Mapping[str, tuple[tuple[float, float], ...]], until_ms: float
    ) -> list[Moments]:
        """The same with (from_ms, rps) of each model."""
        sources = (
            ArrivalSource(ModelId(model.name), "gamma", steps[model.name], self.shape)
            for model in self.models
        )
        return list(Workload(seed, tuple(sources)).arrivals(until_ms))


def made(case: Case, name: str, options: Mapping[str, Any]) -> Discipline:
    """The discipline with the models and GPUs of the case."""
    discipline = make_discipline(name, options)
    hosted = []
    for model in case.models:
        model_id = ModelId(model.name)
        size_max = min(BATCH_MAX, max(1, int((model.slo_ms - model.beta_ms) / model.alpha_ms) + 2))
        hosted.append(HostedModel(model_id, tuple(model.exec_ms(size) for size in range(1, size_max + 1))))
        discipline.add_model(BatchModel(model_id, model.slo_ms, case.delay), 0.0)
    for gpu in range(case.gpus):
        discipline.add_slice(BatchSlice(SliceId(f"gpu-{gpu}"), gpu, tuple(hosted)), 0.0)
    return discipline


def drive(
    case: Case, discipline: Discipline, arrived: Sequence[Moments], hear: Hear, run_ms: float = 0.0
) -> bool:
    """Play those arrivals to the end; False as soon as `hear` has heard enough.

    `run_ms` over 0: what arrives at one model within so long is told as one run, as a frontend does (design section 4).
    """
    rehearsing = discipline if isinstance(discipline, Rehearses) else None

    def tell(decisions: Sequence[BatchDecision], now_ms: float) -> bool:
        preempted = [one.dispatch for one in decisions if isinstance(one, Preempt)]
        stopped = [batch for batch in preempted if batch.start_at_ms + batch.exec_ms > now_ms]
        if not hear(decisions, now_ms):
            return False
        return all(
            tell(discipline.arrive_again(batch.model_id, batch.runs, now_ms), now_ms) for batch in stopped
        )

    def tick_until(at_ms: float) -> bool:
        # Exclusively: who comes at the moment a batch leaves is still in it.
        now_ms = 0.0
        while (wake_at_ms := discipline.wake_at_ms) is not None and wake_at_ms < at_ms:
            now_ms = max(now_ms, wake_at_ms, last_ms)
            decisions = discipline.tick(now_ms)
            if decisions and not tell(decisions, now_ms):
                return False
            if rehearsing is not None and now_ms >= rehearsing.rehearsal_at_ms:
                question = rehearsing.rehearsal(now_ms)
                if question is not None:
                    rehearsing.rehearsed(rehearse(question), now_ms)
        return True

    names = [ModelId(one.name) for one in case.models]
    slos_ms = [one.slo_ms for one in case.models]
    frontend, arrive, last_ms = FrontendId("f"), discipline.arrive, 0.0
    for at_ms, index, seq, count, first_ms in _runs(arrived, run_ms):
        wake_at_ms = discipline.wake_at_ms
        if wake_at_ms is not None and wake_at_ms < at_ms and not tick_until(at_ms):
            return False
        last_ms = at_ms
        run = RequestRun(frontend, seq, count, first_ms + slos_ms[index], first_ms, at_ms - first_ms)
        decisions = arrive(names[index], run, at_ms)
        if decisions and not tell(decisions, at_ms):
            return False
    return tick_until(math.inf)


def _runs(arrived: Sequence[Moments], run_ms: float) -> Iterator[tuple[float, int, int, int, float]]:
    """In the order of their last arrivals: that moment, the model, first seq, count, first arrival."""
    columns: list[list[NDArray[Any]]] = [[], [], [], [], []]
    for index, at_ms in enumerate(arrived):
        first = np.arange(at_ms.size)
        if run_ms > 0 and at_ms.size:
            first = np.flatnonzero(np.diff(np.floor(at_ms / run_ms), prepend=-1.0))
        count = np.diff(first, append=at_ms.size)
        found = (at_ms[first + count - 1], np.full(first.size, index), first, count, at_ms[first])
        for column, values in zip(columns, found, strict=True):
            column.append(values)
    joined = [np.concatenate(column) for column in columns]
    order = np.argsort(joined[0], kind="stable")
    return zip(*(column[order].tolist() for column in joined), strict=True)


def is_good(
    case: Case, discipline: Discipline, seed: int, rate_rps: float, window: Window, run_ms: float = 0.0
) -> bool:
    """Whether every model's bad rate stays under 1 % in the window; gives up as soon as one's does not."""
    from_ms, until_ms = window.from_ms, window.until_ms
    arrived = case.arrivals(seed, rate_rps, until_ms + 2 * max(model.slo_ms for model in case.models))
    losses_left = {
        ModelId(model.name): max(
            0, math.ceil(BAD_RATE_ALLOWED * np.count_nonzero((at_ms >= from_ms) & (at_ms < until_ms))) - 1
        )
        for model, at_ms in zip(case.models, arrived, strict=True)
    }

    def hear(decisions: Sequence[BatchDecision], _: float) -> bool:
        for decision in decisions:
            if isinstance(decision, Drop):
                lost = sum(run.count for run in decision.runs if from_ms <= run.arrived_at_ms < until_ms)
                losses_left[decision.model_id] -= lost
                if losses_left[decision.model_id] < 0:
                    return False
        return True

    return drive(case, discipline, arrived, hear, run_ms)


def goodput_rps(
    case: Case, is_good_at: Callable[[float], bool], near_rps: float = 0.0, grid: float = GRID
) -> float:
    """The highest good rate of the grid, bisected between steps from `near_rps` outwards (0: from 0.75 of the bound)."""
    bound = case.bound_rps
    lowest, highest = math.floor(math.log(LOWEST, grid)), math.ceil(math.log(HIGHEST, grid))
    at = round(math.log(near_rps / bound, grid)) if near_rps else math.floor(math.log(BEGIN, grid))
    low, high, step = lowest, highest, float(STEP)
    while high - low > 1:
        at = min(max(at, low + 1), high - 1)
        if is_good_at(bound * grid**at):
            low = at
        else:
            high = at
        if high == highest:
            at = low + int(step)
        elif low == lowest:
            at = high - int(step)
        else:
            at = (low + high) // 2
        step *= GROWTH
    return float(bound * grid**low) if low > lowest else 0.0


@dataclass
class Fates:
    """Of one model: when each request came, when its batch started and ended (nan: it was refused), when a refusal was known."""

    arrived_at_ms: Moments
    started_at_ms: Moments = field(init=False)
    finished_at_ms: Moments = field(init=False)
    refused_at_ms: Moments = field(init=False)

    def __post_init__(self) -> None:
        for name in ("started_at_ms", "finished_at_ms", "refused_at_ms"):
            setattr(self, name, np.full(self.arrived_at_ms.size, np.nan))

    def inside(self, window: Window) -> NDArray[np.bool_]:
        """Which of them came in the window."""
        return (self.arrived_at_ms >= window.from_ms) & (self.arrived_at_ms < window.until_ms)

    def good_rps(self, window: Window) -> float:
        """Of those that came in the window."""
        ran = self.inside(window) & ~np.isnan(self.finished_at_ms)
        return float(np.count_nonzero(ran)) / window.duration_s


@dataclass
class Played:
    """Every request's fate, by the model's name, and every batch."""

    fates: Mapping[str, Fates]
    batches: list[BatchRecord]

    def good_rps(self, window: Window) -> float:
        """Of all models."""
        return sum(one.good_rps(window) for one in self.fates.values())

    def bad_rate(self, window: Window) -> float:
        """Of all models' requests."""
        came = sum(int(np.count_nonzero(one.inside(window))) for one in self.fates.values())
        return 1 - self.good_rps(window) * window.duration_s / came if came else 0.0


def play(case: Case, discipline: Discipline, arrived: Sequence[Moments], run_ms: float = 0.0) -> Played:
    """Play those arrivals and write down what became of them."""
    fates = {ModelId(model.name): Fates(at_ms) for model, at_ms in zip(case.models, arrived, strict=True)}
    gpu_of = {SliceId(f"gpu-{gpu}"): gpu for gpu in range(case.gpus)}
    batches: list[BatchRecord] = []
    last: dict[SliceId, int] = {}

    def hear(decisions: Sequence[BatchDecision], now_ms: float) -> bool:
        for one in decisions:
            if isinstance(one, Dispatch):
                fate, ends_at_ms = fates[one.model_id], one.start_at_ms + one.exec_ms
                for run in one.runs:
                    requests = slice(run.first_seq, run.first_seq + run.count)
                    fate.started_at_ms[requests] = one.start_at_ms
                    fate.finished_at_ms[requests] = ends_at_ms
                last[one.slice_id] = len(batches)
                where = (one.slice_id, gpu_of[one.slice_id], None)
                moments = (now_ms, one.start_at_ms, ends_at_ms)
                batches.append(BatchRecord(one.model_id, one.batch_size, *where, *moments))
            elif isinstance(one, Drop):
                for run in one.runs:
                    requests = slice(run.first_seq, run.first_seq + run.count)
                    fates[one.model_id].refused_at_ms[requests] = now_ms
                    fates[one.model_id].finished_at_ms[requests] = np.nan
            elif batches[place := last[one.dispatch.slice_id]].finished_at_ms > now_ms:
                batches[place] = batches[place]._replace(batch_size=0, finished_at_ms=now_ms)
        return True

    drive(case, discipline, arrived, hear, run_ms)
    return Played({str(name): one for name, one in fates.items()}, batches)
