"""Goodput: the highest total rate at which every model's bad rate stays under 1 % (Symphony section 5.1).

One bisection per seed, on the total with all proportions kept. A seed's arrivals are bent to the rate in
question (`roles/workload/arrivals.py`), so neighbouring rates see the same bursts. Where there are more cores than
bisections, rates that the next steps *may* ask for are tried ahead: the answer is the plain bisection's,
whatever the number of cores.

Where rates change in time, each rate is asked at the same part of the workload, or a rate would be called good for the quiet
hours that its window happened to have. A trace is played faster, so its window is shorter the higher the rate is; rate steps
stay where they are, and so does their window, which has all of them: the last one for as long as the longest before it.
A file with both has the windows of its traces.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, replace
from itertools import pairwise

from fabric.ids import ModelId
from fabric.messages import ModelSpec
from policies.graphs.fan_outs import moments_ms
from policies.placement.common.base import largest_batch
from policies.slo import BAD_RATE_ALLOWED
from roles.config.cluster import ClusterConfig
from roles.scheduler.settings import SchedulerSettings, settings_from
from roles.simulator.simulation import require_run_times, simulate
from roles.workload.arrivals import ArrivalSource, Workload, workload_of
from roles.workload.outcomes import Window

PRECISION = 0.005
ARRIVALS_OF_THE_RAREST = 2000
REQUESTS_MAX = 2_000_000
DURATION_S_MIN = 20.0  # in a few seconds of Poisson arrivals the verdict is still luck
LOWEST = 1 / 1000  # of the bound: a goodput below it is 0
RATE_IS_0 = "its rate is 0"
USUAL_PART = 0.25  # of the bound: a goodput is hardly ever less, and of that much the rarest model is to come often enough
BOUND_MARGIN = 1.05  # over the bound: a sample may have fewer arrivals than its rate says, and 1 % may be bad


@dataclass(slots=True, frozen=True)
class Question:
    """What is asked at every rate: all a probe needs, wherever it runs.

    `rates_rps` are the proportions, as the configuration's own rates, of models and applications; `unserved` ones have none and
    send nothing: (name, reason). `part`: what is played of a workload whose rates change in time, at the configuration's own total.
    """

    config: ClusterConfig
    settings: SchedulerSettings
    workload: Workload
    rates_rps: Mapping[ModelId, float]
    unserved: tuple[tuple[ModelId, str], ...]
    warmup_s: float
    duration_s_min: float
    part: Window | None = None

    @property
    def total_rps(self) -> float:
        """The configuration's own total."""
        return sum(self.rates_rps.values())

    @property
    def is_anybody_left_out(self) -> bool:
        """Whether a model of which requests come is not served at all."""
        return any(reason != RATE_IS_0 for _, reason in self.unserved)

    def remarks(self) -> list[str]:
        """What of the workload is not played, for people."""
        if self.part is None or _longest_round_ms(self.workload):
            return []
        until_ms = self.part.until_ms
        return [
            f"{source.model_id}: its rate from {source.steps[-1][0] / 1000:,.6g} s on is not played: a window of {REQUESTS_MAX:,} requests"
            f" at the highest rate tried ends at {until_ms / 1000:,.6g} s"
            for source in _sources(self.workload)
            if source.steps and source.steps[-1][0] >= until_ms
        ]

    def window(self, total_rps: float) -> Window:
        """Long enough for the rarest model, short enough for the limit on requests; of changing rates always the same part."""
        factor = total_rps / self.total_rps
        if self.part is not None:
            speed = factor if _longest_round_ms(self.workload) else 1.0
            return Window(self.part.from_ms / speed, self.part.until_ms / speed)
        rarest_rps = min(self.rates_rps.values()) * factor
        needed_s = max(self.duration_s_min, ARRIVALS_OF_THE_RAREST / rarest_rps)
        longest_s = REQUESTS_MAX / total_rps
        warmup_s = min(self.warmup_s, longest_s / 5)
        duration_s = min(needed_s, longest_s - warmup_s)
        return Window(warmup_s * 1000, (warmup_s + duration_s) * 1000)

    def offered_rps(self, total_rps: float) -> Mapping[ModelId, float]:
        """What comes of each in the window of that total."""
        return _rates_rps(self.workload.scaled(total_rps / self.total_rps), self.window(total_rps))


@dataclass(slots=True, frozen=True)
class Goodput:
    """The answer. `unserved` are (model, reason) of those no rate can be found for."""

    goodput_rps: float
    per_seed_rps: tuple[float, ...]
    rates_rps: Mapping[ModelId, float]
    duration_s: float
    unserved: tuple[tuple[ModelId, str], ...]

    def as_json(self) -> dict[str, object]:
        """The contract of `goodput --json`."""
        return {
            "goodput_rps": round(self.goodput_rps, 6),
            "per_seed_rps": [round(rate_rps, 6) for rate_rps in self.per_seed_rps],
            "rates": {model_id: round(rate_rps, 6) for model_id, rate_rps in self.rates_rps.items()},
            "duration_s": round(self.duration_s, 6),
            "unserved": [{"model": model_id, "reason": reason} for model_id, reason in self.unserved],
        }


class Bisection:
    """Narrows down the highest rate that is good, between 0 (good) and `high` (bad)."""

    def __init__(self, high: float) -> None:
        self.low = 0.0
        self.high = high
        self._floor = high * LOWEST

    @property
    def is_done(self) -> bool:
        """Within 0.5 %, or so low that it is nothing."""
        return self.high - self.low <= PRECISION * self.low or self.high <= self._floor

    @property
    def progress(self) -> float:
        """The part of the way that is done: each step halves the distance."""
        if self.is_done:
            return 1.0
        start = self._floor / LOWEST
        goal = max(self._floor, PRECISION * self.low)
        return min(1.0, math.log(start / (self.high - self.low)) / math.log(start / goal))

    def next_rates(self) -> Iterator[float]:
        """The rate to try, then those that would follow on either answer, and so on, without end."""
        spans = [(self.low, self.high)]
        while True:
            middles = [(low + high) / 2 for low, high in spans]
            yield from middles
            spans = [
                half
                for (low, high), middle in zip(spans, middles, strict=True)
                for half in ((middle, high), (low, middle))
            ]

    def tell(self, known: Mapping[float, bool]) -> None:
        """Go as far as the known answers lead."""
        while not self.is_done:
            middle = (self.low + self.high) / 2
            if middle not in known:
                return
            if known[middle]:
                self.low = middle
            else:
                self.high = middle


def question_of(config: ClusterConfig, warmup_s: float, duration_s_min: float) -> Question:
    """What to ask about a configuration. Raises ConfigError or ProfileError where it cannot be played at all."""
    workload = workload_of(config)
    steps_ms = max(map(_steps_ms, _sources(workload)), default=0.0)
    duration_s_min = max(duration_s_min, steps_ms / 1000 - warmup_s)
    window = Window(warmup_s * 1000, (warmup_s + duration_s_min) * 1000)
    round_ms = _longest_round_ms(workload)
    first = Window(0.0, max(window.until_ms, round_ms)) if round_ms else window
    question = _question(config, settings_from(config), workload, first, warmup_s, duration_s_min)
    if not question.rates_rps or not (round_ms or steps_ms):
        return question
    part = _part_of_a_trace(question) if _longest_round_ms(question.workload) else _part_of_steps(question)
    question = _question(config, question.settings, workload, part, warmup_s, duration_s_min)
    return replace(question, part=part)


def _question(
    config: ClusterConfig,
    settings: SchedulerSettings,
    workload: Workload,
    window: Window,
    warmup_s: float,
    duration_s_min: float,
) -> Question:
    """With the proportions that the workload has in that window."""
    require_run_times(config, workload, settings, window.until_ms)
    unserved = tuple(_unserved_models(config, settings, workload, window))
    hopeless = {model_id for model_id, _ in unserved}
    rates_rps = {
        name: rate_rps for name, rate_rps in _rates_rps(workload, window).items() if name not in hopeless
    }
    silent = {source.model_id for source in _sources(workload)} - rates_rps.keys()
    heard = workload.without(silent)
    return Question(config, settings, heard, rates_rps, unserved, warmup_s, duration_s_min)


def _sources(workload: Workload) -> tuple[ArrivalSource, ...]:
    return (*workload.sources, *workload.applications)


def _rates_rps(workload: Workload, window: Window) -> dict[ModelId, float]:
    """Of those of whom requests are expected there."""
    counts = {one.model_id: one.expected(window.from_ms, window.until_ms) for one in _sources(workload)}
    return {name: count / window.duration_s for name, count in counts.items() if count > 0}


def _longest_round_ms(workload: Workload) -> float:
    """How long the longest trace is; 0 where there is none."""
    return max((one.trace.period_ms for one in _sources(workload) if one.trace is not None), default=0.0)


def _steps_ms(source: ArrivalSource) -> float:
    """Until when a window has all of its steps, the last one for as long as the longest before it; 0: its rate does not change."""
    if source.trace is not None or len(source.steps) < 2:
        return 0.0
    begins_ms = [from_ms for from_ms, _ in source.steps]
    return begins_ms[-1] + max(later - former for former, later in pairwise(begins_ms))


def _part_of_steps(question: Question) -> Window:
    """All of them, and so much of the last ones that of the rarest model enough comes, but for what would be too many requests at the highest rate that is asked."""
    highest_rps = BOUND_MARGIN * bound_rps(question)
    factor = USUAL_PART * highest_rps / question.total_rps
    longest_s = REQUESTS_MAX / highest_rps
    warmup_s = min(question.warmup_s, longest_s / 5)
    until_s = warmup_s + question.duration_s_min
    more_s = [
        (ARRIVALS_OF_THE_RAREST - factor * source.expected(1000 * warmup_s, 1000 * until_s))
        / (factor * source.steps[-1][1])
        for source in _sources(question.workload)
        if source.steps and source.steps[-1][1] > 0
    ]
    until_s = min(until_s + max([0.0, *more_s]), longest_s)
    return Window(warmup_s * 1000, until_s * 1000)


def _part_of_a_trace(question: Question) -> Window:
    """So much of it that at the highest rate that is asked the window is not too short, and of the rarest model enough comes.

    Whole rounds of the longest trace where it is shorter than that.
    """
    workload, warmups = question.workload, question.warmup_s / question.duration_s_min
    round_ms = _longest_round_ms(workload)
    fastest = BOUND_MARGIN * bound_rps(question) / question.total_rps
    rarest_rps = min(question.rates_rps.values())
    duration_ms = 1000 * max(question.duration_s_min * fastest, ARRIVALS_OF_THE_RAREST / rarest_rps)
    wanted = min(duration_ms / 1000 * question.total_rps, REQUESTS_MAX / (2 + warmups))
    duration_ms = 1000 * wanted / question.total_rps
    while (
        duration_ms < round_ms
        and workload.expected(warmups * duration_ms, (1 + warmups) * duration_ms) < wanted
    ):  # it begins quietly
        duration_ms *= 1.5
    if duration_ms >= round_ms:
        duration_ms = round_ms * math.ceil(duration_ms / round_ms)
    return Window(warmups * duration_ms, (1 + warmups) * duration_ms)


def bound_rps(question: Question) -> float:
    """No schedule carries more: each request takes at least its part of the batch within the SLO in which that is least.

    Of fan-outs that change the moment counts that asks least, of those that ask anything; a run in which some ask nothing may carry more.
    """
    applications = question.config.applications
    moments = moments_ms(fan_out for one in applications for fan_out in one.fan_outs.values())
    return max(bound for at_ms in moments if (bound := _bound_rps(question, at_ms)) < math.inf)


def _bound_rps(question: Question, at_ms: float) -> float:
    """With the fan-outs of that moment; infinite where nothing is asked."""
    settings, config = question.settings, question.config
    asked = [(model.model_id, model.model_id, model.slo_ms, 1.0) for model in config.models]
    asked += [
        (ModelId(one.name), one.plan.graph.stage(name).model_id, one.slo_ms, demand)
        for one in config.applications
        for name, demand in one.demand(at_ms).items()
    ]
    work_ms, bound = 0.0, math.inf
    for sender, model_id, slo_ms, demand in asked:
        rate_rps = question.rates_rps.get(sender)
        if not rate_rps or not demand:
            continue
        fraction = demand * rate_rps / question.total_rps
        if not fraction:  # of a rate so far below the others that no number is so small
            continue
        each_ms = [
            min((model.interval_ms or model.exec_ms)[size - 1] / size for size in range(1, largest + 1))
            for model in _hosted(settings, model_id)
            for largest in (max(1, largest_batch(model.exec_ms, slo_ms)),)
        ]
        work_ms += fraction * min(each_ms)
        bound = min(bound, sum(1000 / ms for ms in each_ms) / fraction)
    return min(bound, 1000 * len(settings.slices) / work_ms) if work_ms else bound


def probe(question: Question, seed: int, total_rps: float) -> bool:
    """Whether every model's bad rate stays under 1 % at that total."""
    workload = replace(question.workload, seed=seed).scaled(total_rps / question.total_rps)
    window = question.window(total_rps)
    run = simulate(question.config, workload, window, question.settings)
    return run.outcome.worst_bad_rate < BAD_RATE_ALLOWED


def find_goodput(
    question: Question,
    seeds: Sequence[int],
    executor: Executor,
    workers: int,
    on_step: Callable[[float], None],
    is_good: Callable[[Question, int, float], bool] = probe,
) -> Goodput:
    """Bisect for each seed, with up to `workers` probes at a time.

    `on_step` hears which part of the way is done, from 0 to 1; `is_good` asks at (question, seed, total rate).
    """
    if not question.rates_rps:
        return Goodput(0.0, tuple(0.0 for _ in seeds), {}, 0.0, question.unserved)
    bound = bound_rps(question) * BOUND_MARGIN
    bisections = {seed: Bisection(bound) for seed in seeds}
    known: dict[int, dict[float, bool]] = {seed: {} for seed in seeds}
    running: dict[Future[bool], tuple[int, float]] = {}
    while not all(bisection.is_done for bisection in bisections.values()):
        asked = set(running.values())
        for seed, rate_rps in _wanted(bisections, known, workers):
            if len(running) >= workers:
                break
            if (seed, rate_rps) not in asked:
                running[executor.submit(is_good, question, seed, rate_rps)] = (seed, rate_rps)
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            seed, rate_rps = running.pop(future)
            known[seed][rate_rps] = future.result()
            bisections[seed].tell(known[seed])
        on_step(statistics.fmean(bisection.progress for bisection in bisections.values()))
    for future in running:
        future.cancel()
    found = [bisections[seed].low for seed in seeds]
    median_rps = statistics.median(found)
    rates_rps: Mapping[ModelId, float] = dict.fromkeys(question.rates_rps, 0.0)
    if median_rps:
        rates_rps = question.offered_rps(median_rps)
    duration_s = question.window(median_rps).duration_s if median_rps else 0.0
    per_seed_rps = tuple(sum(question.offered_rps(low_rps).values()) if low_rps else 0.0 for low_rps in found)
    return Goodput(sum(rates_rps.values()), per_seed_rps, rates_rps, duration_s, question.unserved)


def _wanted(
    bisections: Mapping[int, Bisection], known: Mapping[int, Mapping[float, bool]], limit: int
) -> Iterator[tuple[int, float]]:
    """What is worth trying now: every bisection's next rate first, then what may come after it."""
    ahead = {seed: bisection.next_rates() for seed, bisection in bisections.items() if not bisection.is_done}
    for _ in range(limit):
        for seed, rates_rps in ahead.items():
            rate_rps = next(rates_rps)
            if rate_rps not in known[seed]:
                yield seed, rate_rps


def _hosted(settings: SchedulerSettings, model_id: ModelId) -> list[ModelSpec]:
    """The model on each slice that hosts it."""
    return [model for _, spec in settings.slices for model in spec.models if model.model_id == model_id]


def _unserved_models(
    config: ClusterConfig, settings: SchedulerSettings, workload: Workload, window: Window
) -> list[tuple[ModelId, str]]:
    """Models for which there is no rate to find, and why."""
    network = config.network
    overhead_ms = network.control_ms + network.data_ms_per_item + network.result_ms
    found: list[tuple[ModelId, str]] = []
    asked_by_stages = {stage.model_id for one in config.applications for stage in one.plan.graph.stages}
    for model, source in zip(config.models, workload.sources, strict=True):
        if source.expected(window.from_ms, window.until_ms) <= 0:
            if model.model_id not in asked_by_stages:
                found.append((model.model_id, RATE_IS_0))
            continue
        fastest_ms = min((one.exec_ms[0] for one in _hosted(settings, model.model_id)), default=math.inf)
        if math.isinf(fastest_ms):
            found.append((model.model_id, settings.unplaced.get(model.model_id, "no slice hosts it")))
        elif fastest_ms + overhead_ms > model.slo_ms:
            reason = f"its SLO of {model.slo_ms:g} ms is below the {fastest_ms:g} ms of a single request"
            if overhead_ms:
                reason += f" and {overhead_ms:g} ms of network"
            found.append((model.model_id, reason))
    for one, source in zip(config.applications, workload.applications, strict=True):
        without = [stage.model_id for stage in one.plan.graph.stages if not _hosted(settings, stage.model_id)]
        if source.expected(window.from_ms, window.until_ms) <= 0:
            found.append((ModelId(one.name), RATE_IS_0))
        elif without:
            reason = settings.unplaced.get(without[0], "no slice hosts it")
            found.append((ModelId(one.name), f"{without[0]}: {reason}"))
    return found
