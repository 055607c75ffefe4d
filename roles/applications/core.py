"""Requests of one application on their way through its graph: what is asked next, and when a request is given up.

Every task is announced to the scheduler like any request, with the deadline that the application's rule gives it. A
request is given up at the first moment at which its end is provably missed: a stage starts so late that even l(1) of all
models on the longest way from there is too long, or the scheduler gave one of its tasks up. What else it has under way is cancelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from policies.graphs.graph import FAN_OUT_MAX, REQUESTS_MAX, Graph, Stage
from policies.graphs.measured import Measured
from policies.graphs.rules import DeadlineRule
from roles.applications.events import (
    ApplicationAction,
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

_ROUNDING_MS = 1e-6  # a moment that is a sum of durations may lie so much behind its deadline


@dataclass(slots=True)
class _Request:
    """`open`: of each stage that was reached, its tasks and `Follow`s without an answer."""

    deadline_at_ms: float
    open: dict[str, int] = field(default_factory=dict)
    tasks: set[int] = field(default_factory=set)
    asked: int = 0


@dataclass(slots=True)
class _Task:
    number: int
    stage: str
    asked_at_ms: float
    due_at_ms: float


class ApplicationCore:
    """Sans-IO: events and the time in, actions out. `least_ms`: the least from the start of a stage to the end of the graph."""

    def __init__(
        self, graph: Graph, least_ms: dict[str, float], rule: DeadlineRule, measured: Measured
    ) -> None:
        self._graph = graph
        self._stages = {stage.name: stage for stage in graph.stages}
        self._roots = [stage for stage in graph.stages if not stage.after]
        self._joins = [stage for stage in graph.stages if len(stage.after) > 1]
        self._following = {
            name: [self._stages[one] for one in names if len(self._stages[one].after) == 1]
            for name, names in graph.successors.items()
        }
        self._least_ms = least_ms
        self._rule = rule
        self._measured = measured
        self._requests: dict[int, _Request] = {}
        self._tasks: dict[int, _Task] = {}
        self._next_task = 0

    @property
    def under_way(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def handle(self, event: ApplicationEvent, now_ms: float) -> Sequence[ApplicationAction]:
        """What follows. Events of what has ended meanwhile are silently nothing."""
        match event:
            case TaskAnswered():
                return self._on_answered(event, now_ms)
            case Followed(number, stage, count):
                request = self._requests.get(number)
                if request is None:
                    return ()
                return self._on_followed(number, request, self._stages[stage], count, now_ms)
            case Entered(number, deadline_at_ms):
                return self._on_entered(number, deadline_at_ms)
            case TaskDropped(task):
                known = self._tasks.pop(task, None)
                if known is None:
                    return ()
                self._requests[known.number].tasks.remove(task)
                return self._give_up(known.number)

    def _on_entered(self, number: int, deadline_at_ms: float) -> Sequence[ApplicationAction]:
        assert number not in self._requests
        request = self._requests[number] = _Request(deadline_at_ms)
        return [self._follow(number, request, stage, None) for stage in self._roots]

    def _on_followed(
        self, number: int, request: _Request, stage: Stage, count: int, now_ms: float
    ) -> Sequence[ApplicationAction]:
        count = min(count, FAN_OUT_MAX)
        self._measured.followed(stage.name, count)
        request.asked += count
        if count and now_ms + self._least_ms[stage.name] > request.deadline_at_ms + _ROUNDING_MS:
            return self._give_up(number)
        if request.asked > REQUESTS_MAX:
            return self._give_up(number)
        request.open[stage.name] += count - 1
        due_at_ms = self._rule.due_at_ms(stage.name, request.deadline_at_ms, now_ms)
        actions: list[ApplicationAction] = []
        for _ in range(count):
            self._next_task += 1
            self._tasks[self._next_task] = _Task(number, stage.name, now_ms, due_at_ms)
            request.tasks.add(self._next_task)
            actions.append(Ask(self._next_task, number, stage.name, stage.model_id, due_at_ms))
        if not count:
            self._close(number, request, stage.name, actions)
        return actions

    def _on_answered(self, event: TaskAnswered, now_ms: float) -> Sequence[ApplicationAction]:
        task = self._tasks.pop(event.task, None)
        if task is None:
            return ()
        self._measured.ran(task.stage, event.waited_ms, event.run_ms)
        number, request = task.number, self._requests[task.number]
        request.tasks.remove(event.task)
        if now_ms > request.deadline_at_ms + _ROUNDING_MS and self._graph.successors[task.stage]:
            return self._give_up(number)
        request.open[task.stage] -= 1
        actions: list[ApplicationAction] = [
            self._follow(number, request, stage, event.task) for stage in self._following[task.stage]
        ]
        self._close(number, request, task.stage, actions)
        return actions

    def _follow(self, number: int, request: _Request, stage: Stage, after: int | None) -> Follow:
        request.open[stage.name] = request.open.get(stage.name, 0) + 1
        return Follow(number, stage.name, after)

    def _close(self, number: int, request: _Request, stage: str, actions: list[ApplicationAction]) -> None:
        """Something of that stage is done: start the joins behind it that waited for it last, or end the request."""
        if request.open[stage]:
            return
        if self._joins:
            is_closed: dict[str, bool] = {}
            for one in self._graph.stages:
                is_closed[one.name] = all(is_closed[name] for name in one.after) and not request.open.get(
                    one.name
                )
                if (
                    len(one.after) > 1
                    and one.name not in request.open
                    and all(is_closed[name] for name in one.after)
                ):
                    is_closed[one.name] = False
                    actions.append(self._follow(number, request, one, None))
        if not any(request.open.values()):
            del self._requests[number]
            actions.append(Ended(number, is_answered=True))

    def _give_up(self, number: int) -> Sequence[ApplicationAction]:
        request = self._requests.pop(number)
        actions: list[ApplicationAction] = []
        for task in sorted(request.tasks):
            model_id = self._stages[self._tasks.pop(task).stage].model_id
            actions.append(Cancel(task, model_id))
        actions.append(Ended(number, is_answered=False))
        return actions
