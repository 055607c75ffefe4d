"""Requests of one application on their way through its graph: what is asked next, and when a request is given up.

Every task is announced to the scheduler like any request, with the deadline that the application's rule gives it. A
request is given up at the first moment at which its end is provably missed: a stage starts so late that even l(1) of all
models on the longest way from there is too long, or one of its tasks ended without outputs. What else it has under way is
cancelled. Of an optional stage only that part is given up, with all that would have come after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fabric.errors import DeadlineExceeded, Internal, Overloaded
from policies.graphs.deadline_rules import DeadlineRule
from policies.graphs.graph import FAN_OUT_MAX, REQUESTS_MAX, Graph, Stage
from policies.graphs.stage_times import Measured
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
from roles.applications.trip import Leg, Place, Trip

_ROUNDING_MS = 1e-6  # a moment that is a sum of durations may lie so much behind its deadline


@dataclass(slots=True)
class _Task:
    number: int
    stage: Stage
    place: Place
    leg: Leg


@dataclass(slots=True)
class _Follow:
    number: int
    stage: Stage
    place: Place  # of what it follows
    before: Leg | None
    begun_at_ms: float


class ApplicationCore:
    """Sans-IO: events and the time in, actions out. `least_ms`: the least from the start of a stage to the end of the graph.

    `is_drawn`: as `ServedApplication` has it.
    """

    def __init__(
        self,
        graph: Graph,
        least_ms: dict[str, float],
        rule: DeadlineRule,
        measured: Measured,
        *,
        is_drawn: bool = False,
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
        self._is_drawn = is_drawn
        self._trips: dict[int, Trip] = {}
        self._tasks: dict[int, _Task] = {}
        self._follows: dict[int, _Follow] = {}
        self._last_task = self._last_follow = 0

    @property
    def under_way(self) -> int:
        """Requests that have not ended."""
        return len(self._trips)

    def handle(self, event: ApplicationEvent, now_ms: float) -> Sequence[ApplicationAction]:
        """What follows. Events of what has ended meanwhile are silently nothing."""
        match event:
            case TaskAnswered():
                return self._on_answered(event, now_ms)
            case Followed(number, count):
                follow = self._taken(number)
                return () if follow is None else self._on_followed(number, follow, count, now_ms)
            case FollowFailed(number, code, reason):
                follow = self._taken(number)
                if follow is None:
                    return ()
                return self._lose(follow.number, follow.stage, _unasked(follow, now_ms), code, reason, now_ms)
            case Entered(number, deadline_at_ms):
                assert number not in self._trips
                trip = self._trips[number] = Trip(now_ms, deadline_at_ms)
                return [self._follow(number, trip, stage, None, now_ms) for stage in self._roots]
            case TaskDropped(task, code, reason, retry_after_ms):
                known = self._tasks.pop(task, None)
                if known is None:
                    return ()
                self._trips[known.number].tasks.remove(task)
                return self._lose(known.number, known.stage, known.leg, code, reason, now_ms, retry_after_ms)
            case Abandoned(number):
                return self._forget(number) if number in self._trips else ()
            case TimeUp(number):
                return self._on_time_up(number, now_ms)

    # ------------------------------------------------------------ stages

    def _follow(
        self, number: int, trip: Trip, stage: Stage, task: _Task | None, now_ms: float, after: int = 0
    ) -> Follow:
        """Start a stage: after that task, or after all that was answered before it."""
        trip.open[stage.name] = trip.open.get(stage.name, 0) + 1
        self._last_follow += 1
        before, place = (trip.last, ()) if task is None else (task.leg, task.place)
        self._follows[self._last_follow] = _Follow(number, stage, place, before, now_ms)
        trip.follows.add(self._last_follow)
        made_from = (
            tuple((name, trip.tasks_of(name)) for name in stage.after)
            if task is None
            else ((task.stage.name, (after,)),)
        )
        return Follow(self._last_follow, number, stage.name, made_from)

    def _taken(self, number: int) -> _Follow | None:
        follow = self._follows.pop(number, None)
        if follow is not None:
            self._trips[follow.number].follows.remove(number)
        return follow

    def _on_followed(
        self, number: int, follow: _Follow, count: int, now_ms: float
    ) -> Sequence[ApplicationAction]:
        stage, trip = follow.stage, self._trips[follow.number]
        count = min(count, FAN_OUT_MAX)
        self._measured.followed(stage.name, count)
        if count and now_ms + self._least_ms[stage.name] > trip.deadline_at_ms + _ROUNDING_MS:
            reason = "the models that are left take longer than the rest of the budget"
            leg = _unasked(follow, now_ms)
            return self._lose(follow.number, stage, leg, DeadlineExceeded.code, reason, now_ms)
        if trip.asked_in_all + count > REQUESTS_MAX:
            reason = f"one request came to more than {REQUESTS_MAX} requests of models"
            leg = _unasked(follow, now_ms)
            error = Overloaded if self._is_drawn else Internal  # data decide: asked again it comes to as many
            return self._lose(follow.number, stage, leg, error.code, reason, now_ms)
        trip.asked_in_all += count
        trip.asked[stage.name] = trip.asked.get(stage.name, 0) + count
        budget_ms = trip.deadline_at_ms - trip.begun_at_ms
        due_at_ms = self._rule.due_at_ms(stage.name, trip.deadline_at_ms, now_ms, budget_ms)
        actions: list[ApplicationAction] = []
        for nth in range(count):
            self._last_task += 1
            leg = Leg(stage.name, follow.before, follow.begun_at_ms, now_ms, now_ms, self._last_task)
            task = _Task(follow.number, stage, (*follow.place, nth), leg)
            self._tasks[self._last_task] = task
            trip.tasks.add(self._last_task)
            actions.append(Ask(self._last_task, follow.number, stage.name, stage.model_id, due_at_ms, number))
        if not count:
            trip.last = _unasked(follow, now_ms)
        trip.open[stage.name] += count - 1
        if not count:
            self._close(follow.number, trip, now_ms, actions)
        return actions

    def _on_answered(self, event: TaskAnswered, now_ms: float) -> Sequence[ApplicationAction]:
        task = self._tasks.pop(event.task, None)
        if task is None:
            return ()
        stage, number = task.stage, task.number
        self._measured.ran(stage.name, event.waited_ms, event.run_ms)
        trip = self._trips[number]
        trip.tasks.remove(event.task)
        task.leg.ended_at_ms = now_ms
        trip.last = task.leg
        following = self._following[stage.name]
        if now_ms > trip.deadline_at_ms + _ROUNDING_MS and self._graph.successors[stage.name]:
            reason = "it ended after the deadline"
            return self._lose(number, stage, task.leg, DeadlineExceeded.code, reason, now_ms)
        trip.answered.setdefault(stage.name, []).append((task.place, event.task))
        trip.open[stage.name] -= 1
        actions: list[ApplicationAction] = [
            self._follow(number, trip, one, task, now_ms, event.task) for one in following
        ]
        self._close(number, trip, now_ms, actions)
        return actions

    def _close(self, number: int, trip: Trip, now_ms: float, actions: list[ApplicationAction]) -> None:
        """Something is done: start the joins that waited for it last, or end the request."""
        if self._joins:
            is_closed: dict[str, bool] = {}
            for one in self._graph.stages:
                before = all(is_closed[name] for name in one.after)
                is_closed[one.name] = before and not trip.open.get(one.name)
                if len(one.after) > 1 and one.name not in trip.open and before:
                    is_closed[one.name] = False
                    actions.append(self._follow(number, trip, one, None, now_ms))
        if not any(trip.open.values()):
            del self._trips[number]
            actions.append(Ended(number, is_answered=True, trip=trip))

    # ------------------------------------------------------------ giving up

    def _lose(
        self,
        number: int,
        stage: Stage,
        leg: Leg,
        code: str,
        reason: str,
        now_ms: float,
        retry_after_ms: float | None = None,
    ) -> Sequence[ApplicationAction]:
        """A task or a `Follow` of the stage came to nothing."""
        trip = self._trips[number]
        leg.ended_at_ms = now_ms
        trip.last = leg
        if stage.is_optional:
            trip.lose(stage.name, int(leg.task != 0), code, reason)
            trip.open[stage.name] -= 1
            actions: list[ApplicationAction] = []
            self._close(number, trip, now_ms, actions)
            return actions
        reason = f"stage {stage.name}: {reason}" if reason else f"stage {stage.name} was given up"
        ended = Ended(
            number, is_answered=False, trip=trip, code=code, reason=reason, retry_after_ms=retry_after_ms
        )
        return [*self._forget(number), ended]

    def _on_time_up(self, number: int, now_ms: float) -> Sequence[ApplicationAction]:
        trip = self._trips.get(number)
        if trip is None:
            return ()
        open_ones = [name for name, left in trip.open.items() if left]
        if self._can_do_without(trip):
            tasks = Counter(self._tasks[task].stage.name for task in trip.tasks)
            for name in open_ones:
                trip.lose(name, tasks[name], DeadlineExceeded.code, "no answer within the budget")
            # It waited for the first of them until now.
            ended_at_ms = trip.begun_at_ms if trip.last is None else trip.last.ended_at_ms
            trip.last = Leg(open_ones[0], trip.last, ended_at_ms, ended_at_ms, now_ms)
            return [*self._forget(number), Ended(number, is_answered=True, trip=trip)]
        ended = Ended(
            number,
            is_answered=False,
            trip=trip,
            code=DeadlineExceeded.code,
            reason=f"no answer within the budget; still open: {', '.join(open_ones)}",
        )
        return [*self._forget(number), ended]

    def _can_do_without(self, trip: Trip) -> bool:
        """Whether all that is open is optional, and so are the joins that can only start when that is done.

        What comes after an optional stage alone is left out with it; a join behind that starts all the same.
        """
        waits: set[str] = set()
        for stage in self._graph.stages:
            is_open = bool(trip.open.get(stage.name))
            if is_open or waits.intersection(stage.after):
                if not stage.is_optional and (is_open or len(stage.after) > 1):
                    return False
                waits.add(stage.name)
        return True

    def _forget(self, number: int) -> list[ApplicationAction]:
        """Cancel what it has under way."""
        trip = self._trips.pop(number)
        for follow in trip.follows:
            del self._follows[follow]
        return [Cancel(task, self._tasks.pop(task).stage.model_id) for task in sorted(trip.tasks)]


def _unasked(follow: _Follow, now_ms: float) -> Leg:
    """The end of a way: no task came of it."""
    return Leg(follow.stage.name, follow.before, follow.begun_at_ms, now_ms, now_ms)
