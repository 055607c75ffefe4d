"""Applications in the fast simulation: their cores, and what a frontend does around them.

Tasks have numbers from `TASKS_FROM` on, of each model and frontend, beside those of the model's own requests. How many
tasks follow an answer is drawn by the seed, the request and the stage alone: the same under every rule and discipline.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fabric.errors import ConfigError
from fabric.ids import ModelId
from fabric.messages import Arrivals, SeqRun, Withdraw
from policies.graphs import ApplicationPlan
from policies.graphs.graph import FAN_OUT_MAX
from roles.applications.core import ApplicationCore
from roles.applications.events import (
    ApplicationEvent,
    Ask,
    Cancel,
    Ended,
    Entered,
    Follow,
    Followed,
    TaskAnswered,
    TaskDropped,
)
from roles.config.cluster import ClusterConfig, FanOutConfig
from roles.frontend.arrivals import cut_runs
from roles.frontend.requests import LATE_RETURNS_MAX, TRIES_MAX
from roles.frontend.return_margin import ReturnMargin
from roles.simulator.traffic import ModelTraffic
from roles.workload.arrivals import Workload
from roles.workload.outcomes import ApplicationOutcome, StageOutcome, Window, model_outcome

TASKS_FROM = 1 << 41
_DRAWS = 1 << 18
_STRIDES = (7_919, 104_729, 15_485_863)  # of request, stage and place into the draws: primes


@dataclass(slots=True, frozen=True)
class PlayedApplication:
    """What is played: an application's plan, its fan-outs by stage, and its requests, which take their fates."""

    plan: ApplicationPlan
    fan_outs: Mapping[str, FanOutConfig]
    traffic: ModelTraffic


@dataclass(slots=True)
class StageTally:
    """What became of a stage's tasks, whenever they came."""

    asked: int = 0
    answered: int = 0
    dropped: int = 0
    cancelled: int = 0
    waited_ms: float = 0.0
    run_ms: float = 0.0

    def outcome(self) -> StageOutcome:
        """As it is reported."""
        means = [total / self.answered if self.answered else None for total in (self.waited_ms, self.run_ms)]
        return StageOutcome(self.asked, self.answered, self.dropped, self.cancelled, *means)


class ApplicationSurroundings(Protocol):
    """What applications need of the world."""

    def schedule(self, at_ms: float, callback: Any, argument: object) -> None:
        """Call back at that moment, with the argument and the moment."""
        ...

    def tell_scheduler(self, frontend: int, message: Arrivals | Withdraw, now_ms: float) -> None:
        """Send as the frontend of that number."""
        ...

    def return_of(self, model_id: ModelId) -> ReturnMargin:
        """What is kept back of budgets for the way back."""
        ...


@dataclass(slots=True)
class _Announced:
    """A task that the scheduler knows, or heard of."""

    application: int
    task: int
    stage: str
    due_at_ms: float
    announced_at_ms: float
    tries: int = 0


class ApplicationPlay:
    """All applications of a run, at `frontends` frontends: request i is that of frontend i % F."""

    def __init__(self, played: Sequence[PlayedApplication], rule: str, seed: int, frontends: int) -> None:
        self.tallies = [{stage.name: StageTally() for stage in one.plan.graph.stages} for one in played]
        self.progress_at_ms = 0.0
        self._played = played
        self._cores = []
        for one in played:
            own_rule, measured = one.plan.rule(rule)
            self._cores.append(ApplicationCore(one.plan.graph, one.plan.least_ms, own_rule, measured))
        self._draws = [_FanOuts(one, seed) for one in played]
        self._frontends = frontends
        self._world: ApplicationSurroundings
        self._announced: dict[tuple[ModelId, int], dict[int, _Announced]] = {}
        self._next_seq: dict[tuple[ModelId, int], int] = {}
        self._seq_of: dict[tuple[int, int], tuple[ModelId, int, int]] = {}

    @property
    def ends_at_ms(self) -> float:
        """The last deadline, and the last moment at which something happened to a task."""
        ends = [
            float(one.traffic.arrived_at_ms[-1]) + one.plan.slo_ms
            for one in self._played
            if one.traffic.arrived_at_ms.size
        ]
        return max(self.progress_at_ms, *ends, 0.0)

    def begin(self, world: ApplicationSurroundings) -> None:
        """Let the requests come."""
        self._world = world
        for place, one in enumerate(self._played):
            if one.traffic.arrived_at_ms.size:
                world.schedule(float(one.traffic.arrived_at_ms[0]), self._enter, (place, 0))

    def settle(self) -> None:
        """Write down the fates of requests; those without any were dropped."""
        for one in self._played:
            one.traffic.settle()

    def outcomes(self, window: Window) -> dict[str, ApplicationOutcome]:
        """What became of the requests that came in the window, and of all tasks; after `settle`."""
        return {
            one.plan.name: ApplicationOutcome(
                model_outcome(
                    one.traffic.arrived_at_ms, one.traffic.finished_at_ms, one.traffic.slo_ms, window
                ),
                {stage: tally.outcome() for stage, tally in tallies.items()},
            )
            for one, tallies in zip(self._played, self.tallies, strict=True)
        }

    # ------------------------------------------------------------ what the world says

    def answered(
        self,
        model_id: ModelId,
        frontend: int,
        runs: Iterable[SeqRun],
        started_at_ms: float,
        finished_at_ms: float,
    ) -> list[tuple[int, TaskAnswered]]:
        """Those tasks ran: what their frontend is to hear (`hear`) when the outputs are with it."""
        known = self._announced[model_id, frontend]
        heard: list[tuple[int, TaskAnswered]] = []
        for run in runs:
            for seq in range(run.first_seq, run.first_seq + run.count):
                one = known.pop(seq, None)
                if one is None:
                    continue  # cancelled, but granted before
                del self._seq_of[one.application, one.task]
                waited_ms = started_at_ms - one.announced_at_ms
                heard.append(
                    (one.application, TaskAnswered(one.task, waited_ms, finished_at_ms - started_at_ms))
                )
                tally = self.tallies[one.application][one.stage]
                tally.answered += 1
                tally.waited_ms += waited_ms
                tally.run_ms += finished_at_ms - started_at_ms
        return heard

    def dropped(
        self, model_id: ModelId, frontend: int, runs: Iterable[SeqRun]
    ) -> list[tuple[int, TaskDropped]]:
        """The scheduler gave those up: what their frontend is to hear."""
        known = self._announced[model_id, frontend]
        heard: list[tuple[int, TaskDropped]] = []
        for run in runs:
            for seq in range(run.first_seq, run.first_seq + run.count):
                one = known.pop(seq, None)
                if one is not None:
                    del self._seq_of[one.application, one.task]
                    self.tallies[one.application][one.stage].dropped += 1
                    heard.append((one.application, TaskDropped(one.task)))
        return heard

    def returned(self, model_id: ModelId, frontend: int, runs: Sequence[SeqRun], now_ms: float) -> None:
        """Granted, but not run: each is announced again while its budget lasts."""
        known = self._announced[model_id, frontend]
        again: list[_Announced] = []
        for run in runs:
            for seq in range(run.first_seq, run.first_seq + run.count):
                one = known.get(seq)
                if one is None:
                    continue
                if one.due_at_ms > now_ms and one.tries < TRIES_MAX + LATE_RETURNS_MAX:
                    del known[seq]
                    one.tries += 1
                    again.append(one)
                else:
                    self.hear(self.dropped(model_id, frontend, [SeqRun(seq, 1)]), now_ms)
        self._announce(model_id, frontend, again, now_ms)

    def hear(self, heard: Sequence[tuple[int, ApplicationEvent]], now_ms: float) -> None:
        """These events have come to a frontend, in one turn of its loop."""
        asked: dict[tuple[ModelId, int], list[_Announced]] = {}
        cancelled: dict[tuple[ModelId, int], list[SeqRun]] = {}
        for place, event in heard:
            self._handle(place, event, now_ms, asked, cancelled)
        for (model_id, frontend), runs in cancelled.items():
            self._world.tell_scheduler(frontend, Withdraw(model_id, tuple(runs)), now_ms)
        for (model_id, frontend), tasks in asked.items():
            self._announce(model_id, frontend, tasks, now_ms)
        self.progress_at_ms = now_ms

    # ------------------------------------------------------------ frontends

    def _enter(self, which: tuple[int, int], now_ms: float) -> None:
        place, index = which
        traffic = self._played[place].traffic
        heard: list[tuple[int, ApplicationEvent]] = []
        while index < traffic.arrived_at_ms.size and traffic.arrived_at_ms[index] <= now_ms:
            heard.append((place, Entered(index, float(traffic.arrived_at_ms[index]) + traffic.slo_ms)))
            index += 1
        if index < traffic.arrived_at_ms.size:
            self._world.schedule(float(traffic.arrived_at_ms[index]), self._enter, (place, index))
        self.hear(heard, now_ms)

    def _handle(
        self,
        place: int,
        event: ApplicationEvent,
        now_ms: float,
        asked: dict[tuple[ModelId, int], list[_Announced]],
        cancelled: dict[tuple[ModelId, int], list[SeqRun]],
    ) -> None:
        tallies = self.tallies[place]
        for action in self._cores[place].handle(event, now_ms):
            match action:
                case Ask(task, number, stage, model_id, due_at_ms):
                    key = (model_id, number % self._frontends)
                    asked.setdefault(key, []).append(_Announced(place, task, stage, due_at_ms, now_ms))
                    tallies[stage].asked += 1
                case Follow(number, stage, _):
                    count = self._draws[place].count(number, stage, now_ms)
                    self._handle(place, Followed(number, stage, count), now_ms, asked, cancelled)
                case Cancel(task, model_id):
                    found = self._seq_of.pop((place, task), None)
                    if (
                        found is not None
                        and (one := self._announced[found[:2]].pop(found[2], None)) is not None
                    ):
                        tallies[one.stage].cancelled += 1
                        cancelled.setdefault(found[:2], []).append(SeqRun(found[2], 1))
                    elif found is None:  # asked in this very turn
                        for tasks in asked.values():
                            tasks[:] = [one for one in tasks if (one.application, one.task) != (place, task)]
                case Ended(number, is_answered):
                    self._draws[place].forget(number)
                    if is_answered:
                        self._played[place].traffic.answered(number, 1, 1, math.nan, now_ms)

    def _announce(self, model_id: ModelId, frontend: int, tasks: Sequence[_Announced], now_ms: float) -> None:
        key = (model_id, frontend)
        known = self._announced.setdefault(key, {})
        path = self._world.return_of(model_id)
        for run, budget_ms, span_ms in cut_runs(tasks, path, now_ms):
            first_seq = self._next_seq.get(key, TASKS_FROM)
            self._next_seq[key] = first_seq + len(run)
            for seq, one in enumerate(run, first_seq):
                known[seq] = one
                self._seq_of[one.application, one.task] = (model_id, frontend, seq)
            slack_ms = path.slack_ms(run[0].due_at_ms - now_ms)
            message = Arrivals(model_id, first_seq, len(run), budget_ms, span_ms, slack_ms=slack_ms)
            self._world.tell_scheduler(frontend, message, now_ms)


def application_play(config: ClusterConfig, workload: Workload, until_ms: float) -> ApplicationPlay | None:
    """The applications of a configuration, whose requests come until that moment; None where there are none."""
    played = []
    for one, source in zip(config.applications, workload.applications, strict=True):
        if one.plan is None:
            raise ConfigError(
                f"application {one.name}: a model of its stages has no profile for the GPUs there are: it cannot be played"
            )
        traffic = ModelTraffic(ModelId(one.name), one.slo_ms, source.arrivals(workload.seed, until_ms))
        played.append(PlayedApplication(one.plan, one.fan_outs, traffic))
    if not played:
        return None
    return ApplicationPlay(played, config.graph_deadlines, workload.seed, config.frontends)


class _FanOuts:
    """Draws of one application."""

    def __init__(self, played: PlayedApplication, seed: int) -> None:
        own = random.Random(f"{seed}/fan-outs/{played.plan.name}")
        # numpy's frozen stream (NEP 19), as in roles/workload/arrivals.py.
        self._uniform = np.random.RandomState([own.getrandbits(32) for _ in range(8)]).random_sample(_DRAWS)
        self._fan_outs = played.fan_outs
        self._places = {stage.name: place for place, stage in enumerate(played.plan.graph.stages)}
        self._drawn: dict[int, Counter[str]] = {}

    def forget(self, number: int) -> None:
        """The request has ended."""
        self._drawn.pop(number, None)

    def count(self, number: int, stage: str, now_ms: float) -> int:
        """How many tasks of that stage follow an answer of that request."""
        fan_out = self._fan_outs[stage]
        mean = fan_out.mean(now_ms)
        if fan_out.process == "fixed":
            return int(mean)
        drawn = self._drawn.setdefault(number, Counter())
        nth = drawn[stage]
        drawn[stage] += 1
        place = sum(one * by for one, by in zip((number, self._places[stage], nth), _STRIDES, strict=True))
        uniform = float(self._uniform[place % _DRAWS])
        if fan_out.process == "share":
            return int(uniform < mean)
        # The smallest count whose probability of as many or fewer reaches the draw.
        count, term = 0, math.exp(-mean)
        reached = term
        while reached < uniform and count < FAN_OUT_MAX:
            count += 1
            term *= mean / count
            reached += term
        return count
