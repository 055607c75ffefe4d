from __future__ import annotations

from collections.abc import Sequence

import pytest

from deploy.local.core import SupervisorCore
from deploy.local.events import (
    Announce,
    AnnounceEnd,
    KillRole,
    RolePlan,
    RoleServes,
    Settled,
    SpawnRole,
    SupervisorAction,
    SupervisorEvent,
    SupervisorOutcome,
    TerminateRole,
)
from roles.runtime.core import Tick
from roles.runtime.exit_codes import EXIT_CONFIG, EXIT_DEFECT, EXIT_NOT_STARTED
from roles.runtime.process_events import ProcessExited, StopAsked, Warn

SCHEDULER, AGENT, FRONTEND = "scheduler-0", "node-a", "frontend-0"
PLANS = (
    RolePlan(SCHEDULER, ("scheduler",), 0, 2, 2_000.0),
    RolePlan(AGENT, ("agent",), 1, 1, 8_000.0),
    RolePlan(FRONTEND, ("frontend",), 1, 0, 3_000.0),
)


class Up:
    """A supervisor with its time."""

    def __init__(self) -> None:
        self.core = SupervisorCore(PLANS)
        self.now_ms = 1_000.0
        self.first = self.feed(Tick())

    def feed(self, event: SupervisorEvent) -> Sequence[SupervisorAction]:
        return self.core.handle(event, self.now_ms)

    def serve(self) -> None:
        for plan in PLANS:
            self.feed(RoleServes(plan.role_id))
        self.feed(Settled())

    def exit(self, role_id: str, code: int = -9, words: str = "") -> Sequence[SupervisorAction]:
        return self.feed(ProcessExited(role_id, code, words))

    def until(self, moment_ms: float) -> list[SupervisorAction]:
        done: list[SupervisorAction] = []
        while self.core.wake_at_ms is not None and self.core.wake_at_ms <= moment_ms:
            self.now_ms = max(self.now_ms, self.core.wake_at_ms)
            done.extend(self.feed(Tick()))
        self.now_ms = moment_ms
        return done


def spawned(actions: Sequence[SupervisorAction]) -> list[str]:
    return [action.role_id for action in actions if isinstance(action, SpawnRole)]


def terminated(actions: Sequence[SupervisorAction]) -> list[str]:
    return [action.role_id for action in actions if isinstance(action, TerminateRole)]


def test_the_first_turn_starts_the_scheduler_alone() -> None:
    assert SupervisorCore(PLANS).wake_at_ms == 0.0
    assert spawned(Up().first) == [SCHEDULER]


def test_the_others_start_when_the_scheduler_serves() -> None:
    assert spawned(Up().feed(RoleServes(SCHEDULER))) == [AGENT, FRONTEND]


def test_it_is_announced_once_when_every_role_serves_and_every_slice_is_settled() -> None:
    up = Up()
    up.feed(RoleServes(SCHEDULER))
    assert up.feed(Settled()) == []
    up.feed(RoleServes(AGENT))
    up.feed(RoleServes(FRONTEND))
    assert up.feed(Settled()) == [Announce()]
    assert up.feed(Settled()) == []


def test_that_everything_ends_is_announced_once_whyever_it_does() -> None:
    for event in (StopAsked(), Settled("no weights"), ProcessExited(FRONTEND, 1, "")):
        up = Up()
        up.feed(RoleServes(SCHEDULER))
        if isinstance(event, Settled):
            up.feed(RoleServes(AGENT))
            up.feed(RoleServes(FRONTEND))
        assert AnnounceEnd() in up.feed(event)
        assert AnnounceEnd() not in [*up.feed(StopAsked()), *up.until(up.now_ms + 60_000.0)]


def test_a_line_of_its_log_does_not_explain_an_end() -> None:
    up = Up()
    up.feed(RoleServes(SCHEDULER))
    up.exit(FRONTEND, 1, "2026-07-01 10:00:00,123 level=INFO role=frontend-0 listening address=x\n")
    up.exit(AGENT, 0)
    up.exit(SCHEDULER, 0)
    assert up.core.outcome == SupervisorOutcome(1, "frontend-0 did not start: it ended with code 1")


def test_a_cluster_that_serves_no_model_ends_with_the_reason() -> None:
    up = Up()
    for plan in PLANS:
        up.feed(RoleServes(plan.role_id))
    assert terminated(up.feed(Settled("slice x failed: no weights"))) == [FRONTEND]
    for role_id in (FRONTEND, AGENT, SCHEDULER):
        up.exit(role_id, 0)
    assert up.core.outcome == SupervisorOutcome(1, "no model can be served: slice x failed: no weights")


@pytest.mark.parametrize(("code", "exit_code"), [(1, 1), (3, 3), (0, 1), (127, 1)])
def test_a_role_that_ends_before_it_served_ends_everything_with_its_words(code: int, exit_code: int) -> None:
    up = Up()
    up.feed(RoleServes(SCHEDULER))
    words = "level=INFO something\ntenuto: cannot bind tcp://127.0.0.1:1: it is in use\n"
    actions = up.exit(FRONTEND, code, words)
    assert terminated(actions) == [AGENT]
    assert terminated(up.exit(AGENT, 0)) == [SCHEDULER]
    up.exit(SCHEDULER, 0)
    assert up.core.outcome == SupervisorOutcome(
        exit_code, "frontend-0 did not start: cannot bind tcp://127.0.0.1:1: it is in use"
    )


def test_a_role_killed_while_it_starts_is_started_again() -> None:
    up = Up()
    assert spawned(up.exit(SCHEDULER, -9)) == [SCHEDULER]


def test_a_role_that_ends_with_a_defect_while_it_starts_is_started_again() -> None:
    up = Up()
    warning, again = up.exit(SCHEDULER, EXIT_DEFECT, "tenuto: a defect of Tenuto ended scheduler-0\n")
    assert warning == Warn(
        "scheduler-0 ended with code 70 (a defect of Tenuto ended scheduler-0); starting it again"
    )
    assert spawned([again]) == [SCHEDULER]


@pytest.mark.parametrize("role_id", [SCHEDULER, AGENT, FRONTEND])
def test_a_role_that_dies_is_started_again_at_once_and_then_after_a_pause_and_the_others_stay(
    role_id: str,
) -> None:
    up = Up()
    up.serve()
    start = SpawnRole(role_id, next(p.command for p in PLANS if p.role_id == role_id))
    assert up.exit(role_id) == [Warn(f"{role_id} was killed by signal 9; starting it again"), start]
    up.feed(RoleServes(role_id))
    assert up.exit(role_id) == [Warn(f"{role_id} was killed by signal 9; starting it again")]
    assert up.until(1_099.0) == []
    assert up.until(1_100.0) == [start]


def test_two_roles_that_die_together_do_not_wait_for_each_other() -> None:
    up = Up()
    up.serve()
    assert spawned(up.exit(SCHEDULER)) == [SCHEDULER]
    assert spawned(up.exit(FRONTEND)) == [FRONTEND]
    up.exit(SCHEDULER)
    up.exit(FRONTEND)
    assert spawned(up.until(1_100.0)) == [SCHEDULER, FRONTEND]


def test_five_deaths_before_it_ever_served_end_everything_with_a_reason() -> None:
    up = Up()
    up.feed(RoleServes(SCHEDULER))
    up.feed(RoleServes(AGENT))
    actions: Sequence[SupervisorAction] = ()
    for _ in range(4):
        actions = up.exit(FRONTEND)
        while FRONTEND not in spawned(actions):
            actions = up.until(up.now_ms + 10.0)
    assert terminated(up.exit(FRONTEND)) == [AGENT]
    up.exit(AGENT, 0)
    up.exit(SCHEDULER, 0)
    assert up.core.outcome == SupervisorOutcome(
        1, "frontend-0 is given up after 5 failures in a row: frontend-0 was killed by signal 9"
    )


@pytest.mark.parametrize("words", ["cannot write the run file: No space left on device", ""])
@pytest.mark.parametrize("code", [1, EXIT_CONFIG, EXIT_DEFECT, EXIT_NOT_STARTED, -9])
@pytest.mark.parametrize("role_id", [SCHEDULER, AGENT, FRONTEND])
def test_a_role_that_has_served_is_started_again_however_often_it_fails_and_the_others_serve_on(
    role_id: str, code: int, words: str
) -> None:
    """A disk that is full for an hour ends what starts in that hour: no reason to end what still serves."""
    up = Up()
    up.serve()
    hour_ends_ms = up.now_ms + 3_600_000.0
    pauses_ms = []
    while up.now_ms < hour_ends_ms:
        failed_at_ms = up.now_ms
        actions = up.exit(role_id, code, words)
        while role_id not in spawned(actions):
            assert terminated(actions) == []
            assert up.core.outcome is None
            assert up.core.wake_at_ms is not None
            actions = up.until(up.core.wake_at_ms)
        pauses_ms.append(up.now_ms - failed_at_ms)
    assert pauses_ms[:3] == [0.0, 100.0, 200.0]
    assert max(pauses_ms) == 5_000.0
    up.feed(RoleServes(role_id))
    assert up.core.is_serving


def test_a_role_that_never_serves_is_killed_and_started_again() -> None:
    up = Up()
    assert up.until(61_000.0) == [KillRole(SCHEDULER)]
    warning, again = up.exit(SCHEDULER)
    assert warning == Warn("scheduler-0 did not serve within 60 s; starting it again")
    assert spawned([again]) == [SCHEDULER]


def test_a_stop_ends_frontends_then_agents_then_the_scheduler() -> None:
    up = Up()
    up.serve()
    assert terminated(up.feed(StopAsked())) == [FRONTEND]
    assert terminated(up.exit(FRONTEND, 0)) == [AGENT]
    assert up.core.outcome is None
    assert terminated(up.exit(AGENT, 0)) == [SCHEDULER]
    up.exit(SCHEDULER, 0)
    assert up.core.outcome == SupervisorOutcome(0, "")


def test_a_stop_is_bounded_whatever_the_children_do() -> None:
    up = Up()
    up.serve()
    up.feed(StopAsked())
    actions = up.until(60_000.0)
    assert [action.role_id for action in actions if isinstance(action, KillRole)] == [
        FRONTEND,
        AGENT,
        SCHEDULER,
    ]
    assert up.core.outcome == SupervisorOutcome(0, "")
    assert up.core.wake_at_ms is None


def test_a_stop_during_the_start_ends_what_has_been_started() -> None:
    up = Up()
    assert terminated(up.feed(StopAsked())) == [SCHEDULER]
    up.exit(SCHEDULER, -15)
    assert up.core.outcome == SupervisorOutcome(0, "")
    assert up.until(60_000.0) == []


def test_a_stop_before_anything_was_started_is_over_at_once() -> None:
    core = SupervisorCore(PLANS)
    assert core.handle(StopAsked(), 0.0) == [AnnounceEnd()]
    assert core.outcome == SupervisorOutcome(0, "")


def test_a_stop_while_a_role_waits_for_its_restart_does_not_start_it() -> None:
    up = Up()
    up.serve()
    up.exit(FRONTEND)
    up.feed(RoleServes(FRONTEND))
    assert spawned(up.exit(FRONTEND)) == []
    assert terminated(up.feed(StopAsked())) == [AGENT]
    assert spawned(up.until(60_000.0)) == []


def test_the_first_reason_to_end_is_the_one_that_is_told() -> None:
    up = Up()
    up.serve()
    up.feed(StopAsked())
    up.exit(FRONTEND, 1, "could not flush")
    up.exit(AGENT, -9)
    up.exit(SCHEDULER, 1)
    assert up.core.outcome == SupervisorOutcome(0, "")


def test_who_was_stopped_itself_hears_what_came_meanwhile_before_it_ends_anybody() -> None:
    up = Up()
    up.feed(RoleServes(SCHEDULER))
    up.now_ms += 1_000_000.0
    for role_id in (AGENT, FRONTEND):
        assert up.feed(RoleServes(role_id)) == []
        assert up.feed(Tick()) == []
    assert up.feed(Settled()) == [Announce()]
    up.feed(StopAsked())
    up.now_ms += 1_000_000.0
    assert up.feed(Tick()) == []
    up.until(up.now_ms + 60_000.0)
    assert up.core.outcome == SupervisorOutcome(0, ""), "and from then on judges as ever"
