"""An application's requests on their way through its graph, on virtual time."""

from __future__ import annotations

from collections.abc import Sequence

from fabric.ids import ModelId
from policies.graphs import ApplicationPlan
from policies.graphs.graph import FAN_OUT_MAX, Stage, graph_of
from roles.applications.core import ApplicationCore
from roles.applications.events import (
    ApplicationAction,
    Ask,
    Cancel,
    Ended,
    Entered,
    Follow,
    Followed,
    TaskAnswered,
    TaskDropped,
)
from tests.builders import of_type


def core_of(*stages: Stage, slo_ms: float = 100.0) -> ApplicationCore:
    """Every model takes 10 ms alone; a stage may use what is left of its equal part."""
    graph = graph_of(stages)
    plan = ApplicationPlan("app", graph, slo_ms, {stage.name: [10.0, 15.0] for stage in stages}, 1)
    rule, measured = plan.rule("equal")
    return ApplicationCore(graph, plan.least_ms, rule, measured)


def stage(name: str, *after: str) -> Stage:
    return Stage(name, ModelId(f"model-{name}"), after)


def answered(task: int) -> TaskAnswered:
    return TaskAnswered(task, 0.0, 10.0)


def tasks(actions: Sequence[ApplicationAction]) -> list[int]:
    return [ask.task for ask in of_type(Ask, actions)]


def test_a_chain_is_asked_one_after_the_other_and_ends_with_its_last_answer() -> None:
    core = core_of(stage("a"), stage("b", "a"))
    assert core.handle(Entered(7, 100.0), 0.0) == [Follow(7, "a", None)]
    (ask,) = core.handle(Followed(7, "a", 1), 0.0)
    assert ask == Ask(1, 7, "a", ModelId("model-a"), 50.0)
    assert core.handle(answered(1), 20.0) == [Follow(7, "b", 1)]
    assert core.handle(Followed(7, "b", 1), 20.0) == [Ask(2, 7, "b", ModelId("model-b"), 70.0)]
    assert core.handle(answered(2), 40.0) == [Ended(7, is_answered=True)]
    assert core.under_way == 0


def test_a_stage_that_nothing_follows_is_skipped() -> None:
    core = core_of(stage("a"), stage("b", "a"), stage("c", "b"))
    core.handle(Entered(1, 100.0), 0.0)
    (task,) = tasks(core.handle(Followed(1, "a", 1), 0.0))
    core.handle(answered(task), 10.0)
    assert core.handle(Followed(1, "b", 0), 10.0) == [Ended(1, is_answered=True)]


def test_a_request_ends_when_all_that_was_started_is_answered() -> None:
    core = core_of(stage("a"), stage("b", "a"), stage("c", "a"))
    core.handle(Entered(1, 100.0), 0.0)
    (root,) = tasks(core.handle(Followed(1, "a", 1), 0.0))
    assert core.handle(answered(root), 10.0) == [Follow(1, "b", root), Follow(1, "c", root)]
    b = tasks(core.handle(Followed(1, "b", 2), 10.0))
    c = tasks(core.handle(Followed(1, "c", 1), 10.0))
    assert core.handle(answered(b[0]), 30.0) == []
    assert core.handle(answered(c[0]), 30.0) == []
    assert core.handle(answered(b[1]), 31.0) == [Ended(1, is_answered=True)]


def test_a_join_waits_for_all_before_it_and_starts_once() -> None:
    core = core_of(stage("a"), stage("b"), stage("c", "b"), stage("d", "a", "c"))
    assert core.handle(Entered(1, 100.0), 0.0) == [Follow(1, "a", None), Follow(1, "b", None)]
    (a,) = tasks(core.handle(Followed(1, "a", 1), 0.0))
    b = tasks(core.handle(Followed(1, "b", 2), 0.0))
    assert core.handle(answered(a), 10.0) == []
    assert core.handle(answered(b[0]), 10.0) == [Follow(1, "c", b[0])]
    assert core.handle(Followed(1, "c", 0), 10.0) == []
    assert core.handle(answered(b[1]), 12.0) == [Follow(1, "c", b[1])]
    (c,) = tasks(core.handle(Followed(1, "c", 1), 12.0))
    assert core.handle(answered(c), 25.0) == [Follow(1, "d", None)]
    (d,) = tasks(core.handle(Followed(1, "d", 1), 25.0))
    assert core.handle(answered(d), 40.0) == [Ended(1, is_answered=True)]


def test_a_dropped_task_loses_the_request_and_cancels_its_siblings() -> None:
    core = core_of(stage("a"), stage("b"))
    core.handle(Entered(1, 100.0), 0.0)
    (a,) = tasks(core.handle(Followed(1, "a", 1), 0.0))
    b = tasks(core.handle(Followed(1, "b", 2), 0.0))
    assert core.handle(TaskDropped(a), 50.0) == [
        Cancel(b[0], ModelId("model-b")),
        Cancel(b[1], ModelId("model-b")),
        Ended(1, is_answered=False),
    ]
    assert core.handle(answered(b[0]), 60.0) == ()  # it was granted already
    assert core.handle(TaskDropped(b[1]), 60.0) == ()


def test_a_request_is_given_up_at_the_first_stage_from_which_the_end_is_provably_missed() -> None:
    for answered_at_ms, is_lost in ((80.0, False), (80.1, True)):
        core = core_of(stage("a"), stage("b", "a"), stage("c", "b"))
        core.handle(Entered(1, 100.0), 0.0)
        (task,) = tasks(core.handle(Followed(1, "a", 1), 0.0))
        core.handle(answered(task), answered_at_ms)
        actions = core.handle(Followed(1, "b", 1), answered_at_ms)  # 20 ms for b and c at the least
        assert bool(of_type(Ended, actions)) is is_lost
        assert bool(of_type(Ask, actions)) is not is_lost


def test_what_follows_an_answer_is_bounded() -> None:
    core = core_of(stage("a"), stage("b", "a"), stage("c", "b"))
    core.handle(Entered(1, 100.0), 0.0)
    roots = tasks(core.handle(Followed(1, "a", 10_000), 0.0))
    assert len(roots) == FAN_OUT_MAX
    under_way = FAN_OUT_MAX
    for root in roots:
        core.handle(answered(root), 10.0)
        actions = core.handle(Followed(1, "b", 10_000), 10.0)
        under_way += len(of_type(Ask, actions))
        if of_type(Ended, actions):
            break
    assert under_way == 1024
    assert core.under_way == 0
