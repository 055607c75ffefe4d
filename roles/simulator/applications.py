"""Applications in the fast simulation: their cores, and what a frontend does around them.

Tasks have numbers from `TASKS_FROM` on, of each model and frontend, beside those of the model's own requests.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from fabric.errors import Overloaded, ProfileError
from fabric.ids import ModelId
from fabric.messages import Arrivals, SeqRun, Withdraw
from profiles.device_model import without_profile
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
    TimeUp,
)
from roles.applications.served import FanOutDraws, ServedApplication
from roles.applications.tally import StageTally
from roles.config.cluster import ClusterConfig
from roles.frontend.arrivals import cut_runs
from roles.frontend.estimates import OVERDUE_MAX
from roles.frontend.requests import LATE_RETURNS_MAX, TRIES_MAX
from roles.frontend.return_margin import ReturnMargin
from roles.simulator.traffic import ModelTraffic, Moments
from roles.workload.arrivals import Workload
from roles.workload.outcomes import (
    ApplicationOutcome,
    ModelOutcome,
    Window,
    model_outcome,
    stage_outcome,
)

TASKS_FROM = 1 << 41
GRACE_MS = 1e-6
"""By which a frontend's own timer is later than the deadline: without jitter a batch may end at that to the digit."""


@dataclass(slots=True, frozen=True)
class PlayedApplication:
    """What is played: an application, and its requests, which take their fates."""

    served: ServedApplication
    traffic: ModelTraffic


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

    core: int
    task: int
    stage: str
    due_at_ms: float
    asked_at_ms: float
    tries: int = 0


class ApplicationPlay:
    """All applications of a run, at F frontends, each with a core of its own for each: request i is that of frontend i % F.

    The core of application a at frontend f has the number a · F + f.
    """

    def __init__(self, played: Sequence[PlayedApplication], frontends: int) -> None:
        plans = [one.served.plan for one in played]
        self.tallies = [
            {stage.name: StageTally(fates=array("d")) for stage in plan.graph.stages} for plan in plans
        ]
        self.progress_at_ms = 0.0
        self._played = played
        self._cores = []
        for one in played:
            plan = one.served.plan
            for _ in range(frontends):
                rule, measured = plan.rule(one.served.rule)
                core = ApplicationCore(
                    plan.graph, plan.least_ms, rule, measured, is_drawn=one.served.is_drawn
                )
                self._cores.append(core)
        self._draws = [FanOutDraws(one.served) for one in played]
        self._frontends = frontends
        self._world: ApplicationSurroundings
        self._announced: dict[tuple[ModelId, int], dict[int, _Announced]] = {}
        self._next_seq: dict[tuple[ModelId, int], int] = {}
        self._seq_of: dict[tuple[int, int], tuple[ModelId, int, int]] = {}
        self._overdue: dict[tuple[ModelId, int, int], _Announced] = {}

    @property
    def ends_at_ms(self) -> float:
        """The last deadline, and the last moment at which something happened to a task."""
        ends = [
            float(one.traffic.arrived_at_ms[-1]) + one.traffic.slo_ms
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

    # ------------------------------------------------------------ what the world says

    def answered(
        self,
        model_id: ModelId,
        frontend: int,
        runs: Iterable[SeqRun],
        span_ms: tuple[float, float],
        answered_at_ms: float,
    ) -> list[tuple[int, TaskAnswered]]:
        """Those tasks ran, from when until when: what their frontend is to hear (`hear`) at `answered_at_ms`, when the outputs are with it."""
        started_at_ms, finished_at_ms = span_ms
        known, path = self._announced[model_id, frontend], self._world.return_of(model_id)
        run_ms, return_ms = finished_at_ms - started_at_ms, answered_at_ms - finished_at_ms
        heard: list[tuple[int, TaskAnswered]] = []
        for run in runs:
            for seq in range(run.first_seq, run.first_seq + run.count):
                one = known.pop(seq, None)
                late = self._overdue.pop((model_id, frontend, seq), None) if one is None else one
                if late is not None:
                    path.note_answer(answered_at_ms - late.due_at_ms, late.due_at_ms - late.asked_at_ms)
                if one is None:
                    continue  # cancelled, but granted before
                del self._seq_of[one.core, one.task]
                waited_ms = started_at_ms - one.asked_at_ms
                # To a rule the way back is a wait.
                heard.append((one.core, TaskAnswered(one.task, waited_ms + return_ms, run_ms)))
                tally = self.tallies[one.core // self._frontends][one.stage]
                tally.note_answered(one, answered_at_ms, waited_ms, run_ms)
        if heard:
            path.note_batch(return_ms)
        return heard

    def dropped(
        self, model_id: ModelId, frontend: int, runs: Iterable[SeqRun], code: str
    ) -> list[tuple[int, TaskDropped]]:
        """The scheduler gave those up: what their frontend is to hear."""
        known = self._announced[model_id, frontend]
        heard: list[tuple[int, TaskDropped]] = []
        for run in runs:
            for seq in range(run.first_seq, run.first_seq + run.count):
                one = known.pop(seq, None)
                if one is not None:
                    del self._seq_of[one.core, one.task]
                    tally = self.tallies[one.core // self._frontends][one.stage]
                    tally.note_dropped(one)
                    heard.append((one.core, TaskDropped(one.task, code)))
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
                    gone = self.dropped(model_id, frontend, [SeqRun(seq, 1)], Overloaded.code)
                    self.hear(gone, now_ms)
        self._announce(model_id, frontend, again, now_ms)

    def hear(self, heard: Sequence[tuple[int, ApplicationEvent]], now_ms: float) -> None:
        """These events have come to a frontend, in one turn of its loop."""
        asked: dict[tuple[ModelId, int], list[_Announced]] = {}
        cancelled: dict[tuple[ModelId, int], list[SeqRun]] = {}
        for core, event in heard:
            self._handle(core, event, now_ms, asked, cancelled)
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
            answer_by_ms = self._played[place].served.answer_by_ms(traffic.slo_ms)
            deadline_at_ms = float(traffic.arrived_at_ms[index]) + answer_by_ms
            core = place * self._frontends + index % self._frontends
            heard.append((core, Entered(index, deadline_at_ms)))
            self._world.schedule(deadline_at_ms + GRACE_MS, self._time_up, (core, index))
            index += 1
        if index < traffic.arrived_at_ms.size:
            self._world.schedule(float(traffic.arrived_at_ms[index]), self._enter, (place, index))
        self.hear(heard, now_ms)

    def _time_up(self, which: tuple[int, int], now_ms: float) -> None:
        core, index = which
        self.hear([(core, TimeUp(index))], now_ms)

    def _handle(
        self,
        core: int,
        event: ApplicationEvent,
        now_ms: float,
        asked: dict[tuple[ModelId, int], list[_Announced]],
        cancelled: dict[tuple[ModelId, int], list[SeqRun]],
    ) -> None:
        place = core // self._frontends
        tallies = self.tallies[place]
        for action in self._cores[core].handle(event, now_ms):
            match action:
                case Ask(task, number, stage, model_id, due_at_ms, _):
                    key = (model_id, number % self._frontends)
                    asked.setdefault(key, []).append(_Announced(core, task, stage, due_at_ms, now_ms))
                    tallies[stage].asked += 1
                case Follow(follow, number, stage):
                    count = self._draws[place].count(number, stage, now_ms)
                    self._handle(core, Followed(follow, count), now_ms, asked, cancelled)
                case Cancel(task, model_id):
                    found = self._seq_of.pop((core, task), None)
                    if (
                        found is not None
                        and (one := self._announced[found[:2]].pop(found[2], None)) is not None
                    ):
                        tallies[one.stage].note_cancelled(one)
                        if now_ms >= one.due_at_ms:
                            self._expire(found, one)
                        cancelled.setdefault(found[:2], []).append(SeqRun(found[2], 1))
                    elif found is None:  # asked in this very turn
                        for tasks in asked.values():
                            for one in [one for one in tasks if (one.core, one.task) == (core, task)]:
                                tasks.remove(one)
                                tallies[one.stage].note_cancelled(one)
                case Ended(number, is_answered):
                    self._draws[place].forget(number)
                    if is_answered:
                        self._played[place].traffic.answered(number, 1, 1, math.nan, now_ms)

    def _expire(self, seq: tuple[ModelId, int, int], task: _Announced) -> None:
        """Cancelled when it was due: its outputs, if a worker is at it, may still tell how late they are."""
        if len(self._overdue) >= OVERDUE_MAX:
            del self._overdue[next(iter(self._overdue))]
        self._overdue[seq] = task

    def _announce(self, model_id: ModelId, frontend: int, tasks: Sequence[_Announced], now_ms: float) -> None:
        key = (model_id, frontend)
        known = self._announced.setdefault(key, {})
        path = self._world.return_of(model_id)
        for run, budget_ms, span_ms in cut_runs(tasks, path, now_ms):
            first_seq = self._next_seq.get(key, TASKS_FROM)
            self._next_seq[key] = first_seq + len(run)
            for seq, one in enumerate(run, first_seq):
                known[seq] = one
                self._seq_of[one.core, one.task] = (model_id, frontend, seq)
            slack_ms = path.slack_ms(run[0].due_at_ms - now_ms)
            message = Arrivals(model_id, first_seq, len(run), budget_ms, span_ms, slack_ms=slack_ms)
            self._world.tell_scheduler(frontend, message, now_ms)


def application_outcomes(
    played: Sequence[PlayedApplication], tallies: Sequence[Mapping[str, StageTally]], window: Window
) -> dict[str, ApplicationOutcome]:
    """What became of the requests that came in the window, and of all tasks; after `settle`."""
    return {
        one.served.plan.name: ApplicationOutcome(
            model_outcome(one.traffic.arrived_at_ms, one.traffic.finished_at_ms, one.traffic.slo_ms, window),
            {stage: stage_outcome(tally) for stage, tally in of_stages.items()},
        )
        for one, of_stages in zip(played, tallies, strict=True)
    }


def with_stages(
    traffic: Sequence[ModelTraffic],
    played: Sequence[PlayedApplication],
    tallies: Sequence[Mapping[str, StageTally]],
    window: Window,
    sizes: Mapping[ModelId, Sequence[int]],
) -> dict[ModelId, ModelOutcome]:
    """Of each model that stages ask: its own requests and those of stages, which have SLOs of their own; after `settle`."""
    of_stages: dict[ModelId, list[Moments]] = {}
    for one, by_stage in zip(played, tallies, strict=True):
        for stage in one.served.plan.graph.stages:
            fates = np.array(by_stage[stage.name].fates).reshape(-1, 3)
            of_stages.setdefault(stage.model_id, []).append(fates)
    found = {}
    for model in traffic:
        if model.model_id not in of_stages:
            continue
        due_at_ms = model.arrived_at_ms + model.slo_ms
        own = np.column_stack((model.arrived_at_ms, due_at_ms, model.finished_at_ms))
        asked_at_ms, due_at_ms, answered_at_ms = np.concatenate([own, *of_stages[model.model_id]]).T
        found[model.model_id] = model_outcome(
            asked_at_ms, answered_at_ms, due_at_ms - asked_at_ms, window, sizes.get(model.model_id, ())
        )
    return found


def played_applications(
    config: ClusterConfig, workload: Workload, until_ms: float
) -> list[PlayedApplication]:
    """The applications of a configuration, whose requests come until that moment."""
    played = []
    for one, source in zip(config.applications, workload.applications, strict=True):
        if not one.plan.is_known:
            unknown = next(
                stage.model_id
                for stage in one.plan.graph.stages
                if not any(map(config.model(stage.model_id).find_profile, config.gpu_types))
            )
            what = without_profile(unknown, " or ".join(config.gpu_types))
            raise ProfileError(f"application {one.name} cannot be played: {what}")
        traffic = ModelTraffic(ModelId(one.name), one.slo_ms, source.arrivals(workload.seed, until_ms))
        played.append(PlayedApplication(one.served(config.graph_deadlines, workload.seed), traffic))
    return played
