"""Requests of applications in a frontend: each is asked stage by stage, and has one answer and one ledger.

To the rest of the frontend a stage's request, a *task*, is a request like any other, without a client: it is announced, granted, given
back and refused by the same rules. What becomes of it is told here; here the application's core decides what follows,
and `steps` says what the frontend is to do. Events wait until the frontend has done with what it is at:
the end of one task may end others that the same message speaks of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from msgspec.structs import replace

from fabric.errors import (
    REQUEST_ERRORS,
    Internal,
    InvalidInput,
)
from fabric.ids import ModelId, PeerId
from fabric.messages import Answer, Ledger, ModelInfo, StageResult, TensorSpec
from fabric.tensors import size_of
from roles.applications.core import ApplicationCore
from roles.applications.events import (
    Abandoned,
    ApplicationAction,
    ApplicationEvent,
    Ask,
    Cancel,
    Ended,
    Entered,
    Follow,
    Followed,
    FollowFailed,
    TaskAnswered,
    TaskDropped,
    TimeUp,
)
from roles.applications.served import FanOutDraws, ServedApplication
from roles.applications.tally import StageTally
from roles.applications.trip import Trip
from roles.frontend.admission import NotAdmitted, budget_left_ms, wrong_inputs
from roles.frontend.events import Asked, FrontendAction, MadeInputs, MakeInputs, Release, ReplyWithAll
from roles.frontend.graphs.application_info import application_info, lack_of, why_unserved
from roles.frontend.graphs.stage_ledgers import stage_lines, whole_ledger
from roles.frontend.graphs.steps import AnswerRequest, AskTask, CancelTask, RefuseRequest, Step
from roles.frontend.requests import Request, RequestState, TaskId
from roles.frontend.shards import Shards
from roles.runtime.core import NO_PAYLOAD, Handle


@dataclass(slots=True)
class _Task:
    request: Request
    stage: str
    kept: Handle = NO_PAYLOAD  # its outputs
    kept_tensors: int = 0
    kept_bytes: int = 0
    ledger: Ledger | None = None


@dataclass(slots=True)
class _Running:
    """One request of an application, and all its tasks so far."""

    number: int
    request: Request
    tasks: dict[int, _Task] = field(default_factory=dict)
    jobs: dict[int, int] = field(default_factory=dict)
    """By `Follow`, the job that makes its inputs."""


class Applications:
    """All that a frontend serves. `since_ms`: its start."""

    def __init__(self, served: Sequence[ServedApplication], since_ms: float) -> None:
        self._served = {ModelId(one.plan.name): _Application(one) for one in served}
        self._since_ms = since_ms
        self.events: deque[tuple[_Application, ApplicationEvent]] = deque()
        """What `steps` has not looked at."""
        self._jobs: dict[int, tuple[_Application, Follow]] = {}
        self._made: dict[tuple[ModelId, int], deque[MadeInputs]] = {}
        self._job_numbers, self._kept_numbers = count(1), count(1)
        self.kept_bytes = 0
        """Of outputs of stages whose requests have not ended."""

    # ------------------------------------------------------------ what there is

    @property
    def tallies(self) -> dict[ModelId, dict[str, StageTally]]:
        """What became of the tasks of each stage, by application."""
        return {name: application.tallies for name, application in self._served.items()}

    def __contains__(self, name: ModelId) -> bool:
        return name in self._served

    def listed(self, shards: Shards, now_ms: float) -> Iterator[ModelInfo]:
        """All applications, as clients see models; one that lacks a stage has no replicas."""
        for one in self._served.values():
            lack = lack_of(one.name, one.served.plan.graph.stages, shards, now_ms)
            yield application_info(one.served, shards, lack)

    def asked(self, asked: Asked, shards: Shards, now_ms: float) -> ModelInfo | NotAdmitted:
        """An application as a request sees it: it may bring any tensors; or why no request of it can be answered now."""
        application = self._served[asked.message.model_id]
        lack = lack_of(application.name, application.always_asked, shards, now_ms)
        info = replace(application_info(application.served, shards, lack), inputs=(), image=None)
        if lack is None:
            return info
        if lack.retry_after_ms is not None and budget_left_ms(asked, info) > lack.retry_after_ms:
            return info  # the scheduler knows best, and decides when its stage is announced
        return replace(lack, retry_after_ms=lack.retry_after_ms or None)

    # ------------------------------------------------------------ what happens

    def enter(self, request: Request) -> None:
        """A client's request of an application was taken on. If it may be answered in part, its deadline is when that has to leave."""
        application = self._served[request.model_id]
        if application.served.may_be_partial:
            budget_ms = application.served.answer_by_ms(request.due_at_ms - request.asked_at_ms)
            request.deadline_at_ms = request.asked_at_ms + budget_ms
        number = next(application.numbers)
        application.running[number] = _Running(number, request)
        application.number_of[request] = number
        due_at_ms = min(request.due_at_ms, request.deadline_at_ms)  # its way to the client is kept back
        self.events.append((application, Entered(number, due_at_ms)))

    def left(self, request: Request) -> None:
        """It has its answer, or nobody waits for one: what it has under way ends too."""
        application = self._served[request.model_id]
        number = application.number_of.get(request)
        if number is not None:  # before what else is known of it: nothing may follow from that any more
            self.events.appendleft((application, Abandoned(number)))

    def time_up(self, request: Request) -> bool:
        """Its deadline has come. Whether `steps` has its end: it may have been given one before."""
        application = self._served[request.model_id]
        number = application.number_of.get(request)
        if number is None:
            return False
        self.events.append((application, TimeUp(number)))
        return True

    def keep(self, task: TaskId, specs: Sequence[TensorSpec], ledger: Ledger) -> Handle:
        """A task was answered, in a batch whose outputs are such: where its own row is to be kept, if anybody wants it."""
        application = self._served[task.application]
        known = application.task(task.number)
        if known is None:
            return NO_PAYLOAD
        known.kept = Handle(-next(self._kept_numbers))
        known.kept_tensors, known.ledger = len(specs), ledger
        known.kept_bytes = sum(size_of(spec) // max(1, spec.shape[0]) for spec in specs)
        self.kept_bytes += known.kept_bytes
        waited_ms = max(0.0, ledger.total_ms - ledger.gpu_ms - ledger.return_ms)
        tally, answered_at_ms = application.tally(task.number), known.request.asked_at_ms + ledger.total_ms
        tally.note_answered(known.request, answered_at_ms, waited_ms, ledger.gpu_ms)
        waited_ms += ledger.return_ms  # to a rule the way back is a wait
        self.events.append((application, TaskAnswered(task.number, waited_ms, ledger.gpu_ms)))
        return known.kept

    def dropped(self, task: TaskId, code: str, reason: str, retry_after_ms: float | None) -> None:
        """A task has ended without outputs."""
        application = self._served[task.application]
        known = application.task(task.number)
        if known is not None:
            application.tally(task.number).note_dropped(known.request)
        self.events.append((application, TaskDropped(task.number, code, reason, retry_after_ms)))

    def made(
        self, job: int, made: Sequence[MadeInputs], shards: Shards, no_room: str
    ) -> list[FrontendAction]:
        """Inputs of a stage's tasks are there. `no_room`: why they cannot be taken on; empty: they can."""
        known = self._jobs.pop(job, None)
        if known is None:
            return [Release(one.payload) for one in made]
        application, follow = known
        number = follow.follow
        del application.running[follow.number].jobs[number]
        code, reason = application.wrong(follow.stage, made, shards)
        if no_room and made:
            code, reason = "Overloaded", no_room
        if reason:
            self.events.append((application, FollowFailed(number, code, reason)))
            return [Release(one.payload) for one in made]
        self._made[application.name, number] = deque(made)
        self.events.append((application, Followed(number, len(made))))
        return []

    def not_made(self, job: int, code: str, reason: str) -> None:
        """They cannot be."""
        known = self._jobs.pop(job, None)
        if known is not None:
            application, follow = known
            del application.running[follow.number].jobs[follow.follow]
            self.events.append((application, FollowFailed(follow.follow, code, reason)))

    # ------------------------------------------------------------ what follows

    def steps(self, models: Mapping[ModelId, ModelInfo], now_ms: float) -> Iterator[Step]:
        """What to do for all that happened, in order. What happens as it is done comes in the same turn."""
        while self.events:
            application, event = self.events.popleft()
            actions = application.core.handle(event, now_ms)
            yield from self._done(application, actions, models, now_ms)
            if isinstance(event, Abandoned):
                yield from self._forget(application, event.number)
            if isinstance(event, Followed):
                left = self._made.pop((application.name, event.follow), ())
                yield from (Release(one.payload) for one in left)

    def _done(
        self,
        application: _Application,
        actions: Iterable[ApplicationAction],
        models: Mapping[ModelId, ModelInfo],
        now_ms: float,
    ) -> Iterator[Step]:
        for action in actions:
            match action:
                case Ask():
                    yield self._ask(application, action, models, now_ms)
                case Follow():
                    yield self._make(application, action, models, now_ms)
                case Cancel(task):
                    known = application.task(task)
                    # One that has just ended is counted as what it ended as; its event has not been looked at yet.
                    if known is not None and known.request.stage is not RequestState.ANSWERED:
                        application.tally(task).note_cancelled(known.request)
                        yield CancelTask(known.request)
                case Ended(number, is_answered, trip, code, reason, retry_after_ms):
                    running = application.running[number]
                    if is_answered:
                        yield _answer(application, running, trip, now_ms)
                    else:
                        error = REQUEST_ERRORS.get(code, Internal)
                        yield RefuseRequest(running.request, error, reason, retry_after_ms)
                    yield from self._forget(application, number)

    def _ask(
        self, application: _Application, ask: Ask, models: Mapping[ModelId, ModelInfo], now_ms: float
    ) -> AskTask:
        running = application.running[ask.number]
        whole = running.request
        made = self._made[application.name, ask.follow].popleft()
        request = Request(
            client=application.client,
            number=ask.task,
            model_id=ask.model_id,
            payload=made.payload,
            tensors=len(made.specs),
            size_bytes=made.size_bytes,
            asked_at_ms=now_ms,
            due_at_ms=ask.due_at_ms,
            deadline_at_ms=whole.deadline_at_ms,
            is_ready=True,
            priority=whole.priority,
            request_id=f"{whole.request_id}.{len(running.tasks) + 1}",
            task=TaskId(application.name, ask.task),
        )
        running.tasks[ask.task] = _Task(request, ask.stage)
        whole.tasks.append(request)
        application.number_of_task[ask.task] = ask.number
        application.tallies[ask.stage].asked += 1
        return AskTask(request, models[ask.model_id], made.specs)

    def _make(
        self,
        application: _Application,
        follow: Follow,
        models: Mapping[ModelId, ModelInfo],
        now_ms: float,
    ) -> MakeInputs:
        running = application.running[follow.number]
        stage = application.served.plan.graph.stage(follow.stage)
        info = models.get(stage.model_id)
        job = next(self._job_numbers)
        self._jobs[job] = application, follow
        running.jobs[follow.follow] = job
        source = application.served.fan_outs[stage.name].source or ""
        is_decided_by_data = bool(source) or stage.name in application.served.glue
        drawn = None
        if not is_decided_by_data:
            drawn = application.draws.count(follow.number, stage.name, now_ms - self._since_ms)
        return MakeInputs(
            job,
            application.name,
            stage.name,
            tuple((name, tuple(running.tasks[one].kept for one in tasks)) for name, tasks in follow.after),
            running.request.payload,
            () if info is None else tuple(tensor.name for tensor in info.inputs),
            running.request.deadline_at_ms,
            drawn,
            source,
        )

    def _forget(self, application: _Application, number: int) -> Iterator[Step]:
        running = application.running.pop(number, None)
        if running is None:
            return
        application.draws.forget(number)
        del application.number_of[running.request]
        for job in running.jobs.values():
            del self._jobs[job]
        for number_of_task, task in running.tasks.items():
            del application.number_of_task[number_of_task]
            if task.kept:
                self.kept_bytes -= task.kept_bytes
                yield Release(task.kept)


class _Application:
    """One that is served: its core, and its requests."""

    def __init__(self, served: ServedApplication) -> None:
        plan = served.plan
        self.served = served
        self.name = ModelId(plan.name)
        self.always_asked = plan.graph.always_asked
        self.client = PeerId(f"/{plan.name}")
        """Whose its tasks are; no client can be called so."""
        rule, measured = plan.rule(served.rule)
        self.core = ApplicationCore(plan.graph, plan.least_ms, rule, measured, is_drawn=served.is_drawn)
        self.draws = FanOutDraws(served)
        self.numbers = count(*served.numbers)
        self.tallies = {stage.name: StageTally() for stage in plan.graph.stages}
        self.running: dict[int, _Running] = {}
        self.number_of: dict[Request, int] = {}
        self.number_of_task: dict[int, int] = {}

    def task(self, number: int) -> _Task | None:
        """One that was asked, of a request that has not ended."""
        of = self.number_of_task.get(number)
        return None if of is None else self.running[of].tasks[number]

    def tally(self, number: int) -> StageTally:
        """Of the stage of a task that `task` knows."""
        return self.tallies[self.running[self.number_of_task[number]].tasks[number].stage]

    def wrong(self, name: str, made: Sequence[MadeInputs], shards: Shards) -> tuple[str, str]:
        """Why the stage's model cannot take these, and whose fault that is; empty: it can, or is not asked."""
        if not made:
            return "", ""
        stage = self.served.plan.graph.stage(name)
        info = shards.models.get(stage.model_id)
        if info is None or (not info.replicas and info.coming_in_ms is None):
            error, reason = why_unserved(stage.model_id, shards)
            return error.code, reason
        is_clients = not stage.after and name not in self.served.glue
        for one in made:
            wrong = wrong_inputs(info, one.specs)
            if wrong is not None:
                return (InvalidInput if is_clients else Internal).code, wrong
        return "", ""


def _answer(application: _Application, running: _Running, trip: Trip, now_ms: float) -> AnswerRequest:
    request, graph = running.request, application.served.plan.graph
    ledgers = {number: task.ledger for number, task in running.tasks.items() if task.ledger is not None}
    results = trip.results(graph)
    lines = stage_lines(graph, trip, ledgers)
    ledger = whole_ledger(trip, lines, request.request_id, now_ms)
    tasks = [running.tasks[number] for _, _, number in results]
    answer = Answer(
        request.number,
        ledger,
        tuple(lines),
        tuple(
            StageResult(stage, place, task.kept_tensors)
            for (stage, place, _), task in zip(results, tasks, strict=True)
        ),
        request.may_be_read,
    )
    reply = ReplyWithAll(request.client, answer, tuple(task.kept for task in tasks))
    return AnswerRequest(request, ledger, reply)
