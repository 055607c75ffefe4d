"""An application's requests on their way through its graph, on virtual time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fabric.ids import ModelId
from policies.graphs import ApplicationPlan
from policies.graphs.graph import FAN_OUT_MAX, REQUESTS_MAX, Stage, graph_of
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
from roles.applications.trip import Lost
from tests.builders import of_type


class Play:
    """One core; `follow` answers what it asks of stages by name, in the order in which it asked."""

    def __init__(self, *stages: Stage, slo_ms: float = 100.0, is_drawn: bool = False) -> None:
        """Every model takes 10 ms alone; a stage may use what is left of its equal part."""
        graph = graph_of(stages)
        plan = ApplicationPlan("app", graph, slo_ms, {stage.name: [10.0, 15.0] for stage in stages}, 1)
        rule, measured = plan.rule("equal")
        self.graph = graph
        self.core = ApplicationCore(graph, plan.least_ms, rule, measured, is_drawn=is_drawn)
        self.follows: list[Follow] = []

    def do(self, event: ApplicationEvent, now_ms: float) -> Sequence[ApplicationAction]:
        actions = self.core.handle(event, now_ms)
        self.follows += of_type(Follow, actions)
        return actions

    def enter(self, number: int = 1, deadline_at_ms: float = 100.0, now_ms: float = 0.0) -> None:
        self.do(Entered(number, deadline_at_ms), now_ms)

    def follow(self, stage: str, count: int, now_ms: float) -> Sequence[ApplicationAction]:
        follow = next(one for one in self.follows if one.stage == stage)
        self.follows.remove(follow)
        return self.do(Followed(follow.follow, count), now_ms)

    def ask(self, stage: str, count: int, now_ms: float) -> list[int]:
        return tasks(self.follow(stage, count, now_ms))

    def answer(self, task: int, now_ms: float) -> Sequence[ApplicationAction]:
        return self.do(TaskAnswered(task, 0.0, 10.0), now_ms)

    def open_stages(self) -> list[str]:
        return [one.stage for one in self.follows]


def stage(name: str, *after: str, is_optional: bool = False, is_answer: bool = False) -> Stage:
    return Stage(name, ModelId(f"model-{name}"), after, is_optional=is_optional, is_answer=is_answer)


def tasks(actions: Sequence[ApplicationAction]) -> list[int]:
    return [ask.task for ask in of_type(Ask, actions)]


def ended(actions: Sequence[ApplicationAction]) -> Ended:
    (found,) = of_type(Ended, actions)
    return found


def test_a_chain_is_asked_one_after_the_other_and_ends_with_its_last_answer() -> None:
    play = Play(stage("a"), stage("b", "a"))
    assert play.do(Entered(7, 100.0), 0.0) == [Follow(1, 7, "a")]
    (ask,) = play.follow("a", 1, 0.0)
    assert ask == Ask(1, 7, "a", ModelId("model-a"), 50.0, 1)
    assert play.answer(1, 20.0) == [Follow(2, 7, "b", (("a", (1,)),))]
    assert play.follow("b", 1, 20.0) == [Ask(2, 7, "b", ModelId("model-b"), 70.0, 2)]
    assert ended(play.answer(2, 40.0)).is_answered
    assert play.core.under_way == 0


def test_a_stage_that_nothing_follows_is_skipped() -> None:
    play = Play(stage("a"), stage("b", "a"), stage("c", "b"))
    play.enter()
    (task,) = play.ask("a", 1, 0.0)
    play.answer(task, 10.0)
    assert ended(play.follow("b", 0, 10.0)).is_answered


def test_a_request_ends_when_all_that_was_started_is_answered() -> None:
    play = Play(stage("a"), stage("b", "a"), stage("c", "a"))
    play.enter()
    (root,) = play.ask("a", 1, 0.0)
    play.answer(root, 10.0)
    b, c = play.ask("b", 2, 10.0), play.ask("c", 1, 10.0)
    assert play.answer(b[0], 30.0) == []
    assert play.answer(c[0], 30.0) == []
    assert ended(play.answer(b[1], 31.0)).is_answered


def test_a_join_waits_for_all_before_it_and_starts_once_with_all_their_answers_in_order() -> None:
    play = Play(stage("a"), stage("b"), stage("c", "b"), stage("d", "a", "c"))
    play.enter()
    (a,) = play.ask("a", 1, 0.0)
    b = play.ask("b", 2, 0.0)
    assert play.answer(a, 10.0) == []
    play.answer(b[1], 10.0)
    second = play.ask("c", 1, 10.0)
    play.answer(b[0], 12.0)
    first = play.ask("c", 2, 12.0)
    play.answer(second[0], 25.0)
    play.answer(first[1], 26.0)
    (join,) = of_type(Follow, play.answer(first[0], 27.0))
    assert join.after == (("a", (a,)), ("c", (first[0], first[1], second[0])))
    (d,) = play.ask("d", 1, 27.0)
    assert ended(play.answer(d, 40.0)).is_answered


def test_a_dropped_task_loses_the_request_and_cancels_its_siblings() -> None:
    play = Play(stage("a"), stage("b"))
    play.enter()
    (a,) = play.ask("a", 1, 0.0)
    b = play.ask("b", 2, 0.0)
    *cancels, end = play.do(TaskDropped(a, "Overloaded", "too much", 7.0), 50.0)
    assert cancels == [Cancel(b[0], ModelId("model-b")), Cancel(b[1], ModelId("model-b"))]
    assert isinstance(end, Ended)
    assert (end.is_answered, end.code, end.reason) == (False, "Overloaded", "stage a: too much")
    assert end.retry_after_ms == 7.0
    assert play.answer(b[0], 60.0) == ()  # it was granted already
    assert play.do(TaskDropped(b[1], "Overloaded"), 60.0) == ()


def test_inputs_that_cannot_be_made_lose_the_request_and_what_is_made_later_is_nobodys() -> None:
    play = Play(stage("a"), stage("b", "a"), stage("c", "a"))
    play.enter()
    play.answer(play.ask("a", 1, 0.0)[0], 10.0)
    b, c = play.follows
    end = ended(play.do(FollowFailed(b.follow, "Internal", "its glue raised"), 11.0))
    assert (end.code, end.reason) == ("Internal", "stage b: its glue raised")
    assert play.do(Followed(c.follow, 3), 12.0) == ()


def test_a_request_nobody_waits_for_takes_its_tasks_along() -> None:
    play = Play(stage("a"))
    play.enter()
    (task,) = play.ask("a", 1, 0.0)
    assert play.do(Abandoned(1), 5.0) == [Cancel(task, ModelId("model-a"))]
    assert play.do(Abandoned(1), 5.0) == ()
    assert play.answer(task, 6.0) == ()


@pytest.mark.parametrize(("answered_at_ms", "is_lost"), [(80.0, False), (80.1, True)])
def test_a_request_is_given_up_at_the_first_stage_from_which_the_end_is_provably_missed(
    answered_at_ms: float, is_lost: bool
) -> None:
    play = Play(stage("a"), stage("b", "a"), stage("c", "b"))
    play.enter()
    play.answer(play.ask("a", 1, 0.0)[0], answered_at_ms)
    actions = play.follow("b", 1, answered_at_ms)  # 20 ms for b and c at the least
    assert bool(of_type(Ended, actions)) is is_lost
    assert bool(of_type(Ask, actions)) is not is_lost


@pytest.mark.parametrize(("is_drawn", "code"), [(False, "Internal"), (True, "Overloaded")])
def test_what_follows_an_answer_is_bounded(is_drawn: bool, code: str) -> None:
    """Where data decide it comes to as many when it is asked again; where it is drawn, perhaps not."""
    play = Play(stage("a"), stage("b", "a"), stage("c", "b"), is_drawn=is_drawn)
    play.enter()
    roots = play.ask("a", 10_000, 0.0)
    assert len(roots) == FAN_OUT_MAX
    asked = FAN_OUT_MAX
    for root in roots:
        play.answer(root, 10.0)
        actions = play.follow("b", 10_000, 10.0)
        asked += len(of_type(Ask, actions))
        if of_type(Ended, actions):
            break
    assert asked == REQUESTS_MAX
    assert ended(actions).code == code
    assert play.core.under_way == 0


# ---------------------------------------------------------------- optional stages, and what is in an answer


def test_a_request_does_without_an_optional_stage_and_all_behind_it() -> None:
    play = Play(stage("a"), stage("b", "a", is_optional=True), stage("c", "b"), stage("d", "a"))
    play.enter()
    play.answer(play.ask("a", 1, 0.0)[0], 10.0)
    b, d = play.ask("b", 2, 10.0), play.ask("d", 1, 10.0)
    assert play.do(TaskDropped(b[0], "Overloaded", "too much"), 20.0) == []
    play.answer(b[1], 21.0)
    play.answer(play.ask("c", 1, 21.0)[0], 30.0)
    trip = ended(play.answer(d[0], 31.0)).trip
    assert trip.lost == {"b": Lost(1, "Overloaded", "too much")}
    assert sorted(name for name, _, _ in trip.results(play.graph)) == ["c", "d"]


def test_an_optional_stage_that_starts_too_late_is_left_out() -> None:
    play = Play(stage("a"), stage("b", "a", is_optional=True))
    play.enter()
    play.answer(play.ask("a", 1, 0.0)[0], 95.0)
    end = ended(play.follow("b", 1, 95.0))
    assert end.is_answered
    assert (end.trip.lost["b"].count, end.trip.lost["b"].code) == (0, "DeadlineExceeded"), "nothing was asked"


def test_of_an_optional_stage_no_more_is_lost_than_was_asked() -> None:
    play = Play(stage("a"), stage("b", "a", is_optional=True))
    play.enter()
    first, second = play.ask("a", 2, 0.0)
    play.answer(first, 10.0)
    play.answer(second, 11.0)
    play.ask("b", 1, 11.0)  # and one is never known to follow
    trip = ended(play.do(TimeUp(1), 98.0)).trip
    assert (trip.asked["b"], trip.lost["b"].count) == (1, 1)


def test_a_join_starts_with_what_its_optional_stages_answered() -> None:
    play = Play(stage("a"), stage("b", is_optional=True), stage("c", "a", "b"))
    play.enter()
    (a,), (b,) = play.ask("a", 1, 0.0), play.ask("b", 1, 0.0)
    play.answer(a, 10.0)
    (join,) = of_type(Follow, play.do(TaskDropped(b, "WorkerLost"), 12.0))
    assert join.after == (("a", (a,)), ("b", ()))


def test_when_its_time_is_up_a_request_has_an_answer_if_only_optional_stages_are_open() -> None:
    play = Play(stage("a"), stage("b", "a", is_optional=True), stage("c", "a"))
    for number, is_answered in ((1, True), (2, False)):
        play.enter(number)
        play.answer(play.ask("a", 1, 0.0)[0], 10.0)
        (b,), (c,) = play.ask("b", 1, 10.0), play.ask("c", 1, 10.0)
        if is_answered:
            play.answer(c, 20.0)
        actions = play.do(TimeUp(number), 98.0)
        assert Cancel(b, ModelId("model-b")) in actions
        end = ended(actions)
        assert end.is_answered is is_answered
        assert end.code == ("" if is_answered else "DeadlineExceeded")
        assert play.do(TimeUp(number), 99.0) == ()


def test_a_join_that_is_needed_cannot_be_done_without() -> None:
    play = Play(stage("a"), stage("b", is_optional=True), stage("c", "a", "b"))
    play.enter()
    (a,), _ = play.ask("a", 1, 0.0), play.ask("b", 1, 0.0)
    play.answer(a, 10.0)
    assert not ended(play.do(TimeUp(1), 98.0)).is_answered


@pytest.mark.parametrize("is_optional", [True, False])
def test_a_join_behind_what_is_left_out_with_an_optional_stage_is_waited_for_too(is_optional: bool) -> None:
    """c is left out with b, before it was ever reached; the join starts all the same, and has not run."""
    play = Play(
        stage("a"),
        stage("b", "a", is_optional=True),
        stage("c", "b"),
        stage("join", "a", "c", is_optional=is_optional),
    )
    play.enter()
    play.answer(play.ask("a", 1, 0.0)[0], 10.0)
    play.ask("b", 1, 10.0)
    assert ended(play.do(TimeUp(1), 98.0)).is_answered is is_optional


def test_what_comes_after_an_optional_stage_alone_is_left_out_with_it_when_the_time_is_up() -> None:
    play = Play(stage("a"), stage("b", "a", is_optional=True), stage("c", "b"), stage("d", "c"))
    play.enter()
    play.answer(play.ask("a", 1, 0.0)[0], 10.0)
    play.ask("b", 1, 10.0)
    assert ended(play.do(TimeUp(1), 98.0)).is_answered


def test_a_request_is_not_given_up_for_what_may_never_run() -> None:
    """At 85 ms a and b fit; c, behind the optional b, is of no concern to a."""
    play = Play(stage("root"), stage("a", "root"), stage("b", "a", is_optional=True), stage("c", "b"))
    play.enter()
    play.answer(play.ask("root", 1, 0.0)[0], 85.0)
    (a,) = play.ask("a", 1, 85.0)
    play.answer(a, 95.0)
    end = ended(play.follow("b", 1, 95.0))
    assert end.is_answered
    assert end.trip.lost["b"].code == "DeadlineExceeded"


def test_an_early_exit_has_the_outputs_of_the_stage_that_was_enough() -> None:
    play = Play(stage("small", is_answer=True), stage("large", "small"))
    play.enter()
    (small,) = play.ask("small", 1, 0.0)
    play.answer(small, 10.0)
    trip = ended(play.follow("large", 0, 11.0)).trip
    assert trip.results(play.graph) == [("small", (0,), small)]


def test_the_path_of_a_request_takes_all_of_its_time() -> None:
    play = Play(stage("a"), stage("b"), stage("c", "a", "b"), stage("d", "c"))
    play.enter(now_ms=3.0)
    (a,), (b,) = play.ask("a", 1, 4.0), play.ask("b", 1, 5.0)
    play.answer(b, 20.0)
    play.answer(a, 30.0)
    (c,) = play.ask("c", 1, 32.0)
    play.answer(c, 50.0)
    first, second = play.ask("d", 2, 51.0)
    play.answer(second, 60.0)
    path = ended(play.answer(first, 65.0)).trip.path()
    assert [(leg.stage, leg.task) for leg in path] == [("a", a), ("c", c), ("d", first)]
    assert [(leg.begun_at_ms, leg.asked_at_ms, leg.ended_at_ms) for leg in path] == [
        (3.0, 4.0, 30.0),
        (30.0, 32.0, 50.0),
        (50.0, 51.0, 65.0),
    ]
