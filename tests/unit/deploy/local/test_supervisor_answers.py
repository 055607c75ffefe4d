"""Whatever `tenuto up` is asked for is answered in time, and never stands in the way of the next question."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from deploy.local.core import SupervisorCore
from deploy.local.events import (
    KillRole,
    Reply,
    RoleAsked,
    RolePlan,
    RoleReported,
    RoleServes,
    Settled,
    SpawnRole,
    SupervisorAction,
    SupervisorEvent,
    SupervisorLimits,
    TerminateRole,
)
from deploy.local.rolling import ASK_LIMIT_MS, HEAL_LIMIT_MS, REST_MS, Health
from fabric.ids import PeerId
from fabric.messages import Changed, RestartRoles, RoleChange, RoleDrain, RoleDrainDryRun, RoleRequest
from roles.runtime.core import Tick
from roles.runtime.exit_codes import EXIT_CONFIG, EXIT_DEFECT
from roles.runtime.process_events import ProcessExited, Warn

OPERATOR = PeerId("operator/1")
WELL = Health(is_ready=True, slices_ready=1, frontends=2)
LIMITS = SupervisorLimits()
ROLE, OTHER = "frontend-1", "frontend-0"
PLANS = (
    RolePlan("scheduler-0", (), 0, 2, 2_000.0, restart_rank=3, kind="scheduler"),
    RolePlan("node-a", (), 1, 1, 8_000.0, restart_rank=0, kind="node"),
    RolePlan(OTHER, (), 1, 0, 3_000.0, restart_rank=2, kind="frontend"),
    RolePlan(ROLE, (), 1, 0, 3_000.0, restart_rank=1, kind="frontend"),
)


@dataclass(frozen=True)
class Life:
    """What a process does, in ms from its start. `exits_ms`: by itself, with `code`; None: never."""

    serves_ms: float | None = 200.0
    exits_ms: float | None = None
    code: int = EXIT_CONFIG
    heeds_sigterm: bool = True
    tells_health: bool = True


GOOD = Life()
LIVES = {
    "good": GOOD,
    "exits at once, with a reason": Life(None, 20.0),
    "exits at once, with a defect": Life(None, 20.0, EXIT_DEFECT),
    "is killed at once": Life(None, 20.0, -9),
    "exits after a while": Life(None, 30_000.0),
    "writes its run file and dies": Life(20.0, 40.0, EXIT_DEFECT),
    "writes its run file and dies of a reason": Life(20.0, 40.0, EXIT_CONFIG),
    "serves for a while and dies": Life(200.0, 20_000.0, -9),
    "hangs before its run file": Life(None),
    "hangs before its run file, also on SIGTERM": Life(None, heeds_sigterm=False),
    "serves, and hangs on SIGTERM": Life(heeds_sigterm=False),
    "serves, and does not say how it is": Life(tells_health=False),
}


class World:
    """A supervisor and its roles' processes, on a virtual clock. `lives`: of processes that start from now on."""

    def __init__(self, plans: tuple[RolePlan, ...] = PLANS) -> None:
        self.core = SupervisorCore(plans)
        self.now_ms = 0.0
        self.done: list[tuple[float, SupervisorAction]] = []
        self.lives: dict[str, Life] = {}
        self._alive: dict[str, Life] = {}
        self._due: list[tuple[float, str, SupervisorEvent]] = []

    def feed(self, event: SupervisorEvent) -> None:
        for action in self.core.handle(event, self.now_ms):
            self.done.append((self.now_ms, action))
            match action:
                case SpawnRole(role_id):
                    life = self._alive[role_id] = self.lives.get(role_id, GOOD)
                    if life.serves_ms is not None:
                        self._due.append((self.now_ms + life.serves_ms, role_id, RoleServes(role_id)))
                    if life.exits_ms is not None:
                        self._exit(role_id, life.code, life.exits_ms)
                case TerminateRole(role_id) if self._alive[role_id].heeds_sigterm:
                    self._exit(role_id, 0, 50.0)
                case KillRole(role_id):
                    self._exit(role_id, -9, 10.0)
                case _:
                    pass

    def run(self, ms: float, until: Callable[[], bool] = lambda: False) -> None:
        """Let time go by, at most so much."""
        end_ms = self.now_ms + ms
        turns = 0
        while not until() and self.core.outcome is None:
            turns += 1
            assert turns < 100_000, "it does not come to rest"
            wake_at_ms = self.core.wake_at_ms
            moments = [moment for moment, _, _ in self._due]
            moments += [] if wake_at_ms is None else [max(wake_at_ms, self.now_ms)]
            if self.core.asks:
                moments.append(self.now_ms + 100.0)
            if min(moments, default=math.inf) > end_ms:
                break
            self.now_ms = min(moments)
            self._turn(wake_at_ms)
        self.now_ms = end_ms if not until() else self.now_ms

    def start(self) -> None:
        """Until everything serves and is announced."""
        self.feed(Tick())
        self.run(1_000.0)
        self.feed(Settled())
        assert self.core.is_announced

    def ask(self, request: RoleRequest) -> None:
        self.feed(RoleAsked(OPERATOR, request))

    @property
    def answers(self) -> list[Changed]:
        return [action.message for _, action in self.done if isinstance(action, Reply)]

    def answer(self, number: int) -> Changed | None:
        return next((one for one in self.answers if one.request_no == number), None)

    def _exit(self, role_id: str, code: int, in_ms: float) -> None:
        words = "tenuto: cannot bind tcp://127.0.0.1:1: it is in use" if code > 0 else ""
        self._due.append((self.now_ms + in_ms, role_id, ProcessExited(role_id, code, words)))

    def _turn(self, wake_at_ms: float | None) -> None:
        due = sorted((one for one in self._due if one[0] <= self.now_ms), key=lambda one: one[0])
        if due:
            first = due[0]
            self._due.remove(first)
            if isinstance(first[2], ProcessExited):  # the dead say and do nothing more
                self._due = [one for one in self._due if one[1] != first[1]]
                del self._alive[first[1]]
            self.feed(first[2])
        elif wake_at_ms is not None and wake_at_ms <= self.now_ms:
            self.feed(Tick())
        elif (life := self._alive.get(self.core.asks)) is not None and life.tells_health:
            self.feed(RoleReported(self.core.asks, WELL))


def drained(world: World, number: int) -> None:
    world.ask(RoleDrain(number, ROLE))
    world.run(10_000.0, until=lambda: world.answer(number) is not None)
    assert world.answer(number) == Changed(number, "ok", ended=1)


STOP_MS = max(plan.stop_limit_ms for plan in PLANS) + LIMITS.kill_ms
BOUNDS_MS = {
    "drain": STOP_MS,
    "drain --back": LIMITS.serve_ms + LIMITS.kill_ms,
    "restart": len(PLANS) * (ASK_LIMIT_MS + HEAL_LIMIT_MS + REST_MS),
}


def asked(what: str, number: int) -> RoleChange:
    return RestartRoles(number) if what == "restart" else RoleDrain(number, ROLE, what == "drain --back")


@pytest.mark.parametrize("what", BOUNDS_MS)
@pytest.mark.parametrize("life", LIVES)
@pytest.mark.parametrize("since", ["now on", "its start"])
def test_whatever_is_asked_is_answered_in_time_whatever_its_role_does(
    what: str, life: str, since: str
) -> None:
    """Once, within its bound; and then nothing is under way any more: the role can be drained, or is it already."""
    world = World()
    world.start()
    if since == "its start":  # the role misbehaves before it is asked about
        world.lives[ROLE] = LIVES[life]
        world._exit(ROLE, -9, 1.0)
        world.run(5.0)
    if what == "drain --back":
        drained(world, 1)
    world.lives[ROLE] = LIVES[life]
    world.ask(asked(what, 2))
    world.run(BOUNDS_MS[what], until=lambda: world.answer(2) is not None)
    assert world.answer(2) is not None, "nobody is answered"
    assert world.core.outcome is None, "the others serve on"
    world.run(10_000.0)
    assert [answer.request_no for answer in world.answers].count(2) == 1
    for number in (3, 4):
        world.ask(RoleDrain(number, ROLE))
        world.run(STOP_MS, until=lambda number=number: world.answer(number) is not None)  # type: ignore[misc]
        last = world.answers[-1]
        assert (last.request_no, "under way" in last.reason) == (number, False)
    assert "drained already" in world.answers[-1].reason
    world.lives[ROLE] = GOOD
    world.ask(RoleDrain(5, ROLE, is_back=True))
    world.run(1_000.0)
    assert world.answers[-1] == Changed(5, "ok", started=1)
    assert world.core.is_serving


@pytest.mark.parametrize("life", [life for life, what in LIVES.items() if what.serves_ms is None])
def test_a_role_that_does_not_come_back_says_why_at_once_and_is_started_again_and_again(life: str) -> None:
    world = World()
    world.start()
    drained(world, 1)
    world.lives[ROLE] = LIVES[life]
    world.ask(RoleDrain(2, ROLE, is_back=True))
    world.run(BOUNDS_MS["drain --back"], until=lambda: world.answer(2) is not None)
    answer = world.answers[-1]
    assert answer.status == "failed"
    assert answer.reason.startswith(f"{ROLE} ")
    assert answer.reason.endswith("; it is started again until it serves or is drained")
    assert ("cannot bind" in answer.reason) == (LIVES[life].code > 0 and LIVES[life].exits_ms is not None)
    assert "did not serve within 60 s" in answer.reason or LIVES[life].exits_ms is not None
    starts = sum(isinstance(action, SpawnRole) for _, action in world.done)
    world.run(600_000.0)
    assert sum(isinstance(action, SpawnRole) for _, action in world.done) > starts + 5
    world.lives[ROLE] = GOOD
    world.run(120_000.0)
    assert world.core.is_serving


@pytest.mark.parametrize(
    "life", [life for life, what in LIVES.items() if what.exits_ms and not what.serves_ms]
)
def test_a_rolling_restart_ends_with_the_words_of_a_role_that_ends_again_and_again(life: str) -> None:
    world = World()
    world.start()
    world.lives[ROLE] = LIVES[life]
    world.ask(RestartRoles(2))
    world.run(HEAL_LIMIT_MS - 1.0, until=lambda: world.answer(2) is not None)
    answer = world.answers[-1]
    assert answer.status == "failed"
    assert answer.reason.startswith(f"{ROLE} did not come back: {ROLE} ")
    assert answer.reason.endswith("; it is started again until it serves or is drained")
    assert ("cannot bind" in answer.reason) == (LIVES[life].code > 0)
    world.lives[ROLE] = GOOD
    world.run(120_000.0)
    assert world.core.is_serving


@pytest.mark.parametrize("life", [life for life, what in LIVES.items() if what.exits_ms is not None])
def test_a_role_that_is_drained_while_it_waits_for_its_next_start_is_not_started(life: str) -> None:
    world = World()
    world.start()
    world.lives[ROLE] = LIVES[life]
    world._exit(ROLE, -9, 1.0)
    world.run(60_000.0)
    world.ask(RoleDrain(1, ROLE))
    world.run(10_000.0, until=lambda: world.answer(1) is not None)
    assert world.answers == [Changed(1, "ok", ended=1)]
    before = len(world.done)
    world.run(600_000.0)
    assert world.done[before:] == []
    assert world.core.wake_at_ms is None, "it does not wake up for a start that is not wanted"


def test_a_role_that_hangs_at_its_start_after_it_came_back_is_told_of_like_any_other() -> None:
    world = World()
    world.start()
    drained(world, 1)
    world.lives[ROLE] = LIVES["hangs before its run file"]
    world.ask(RoleDrain(2, ROLE, is_back=True))
    world.run(70_000.0)
    warnings = [action.text for _, action in world.done if isinstance(action, Warn)]
    assert warnings == [f"{ROLE} did not serve within 60 s; starting it again"]


@pytest.mark.parametrize(
    "life", [life for life, what in LIVES.items() if what.serves_ms is None or what.exits_ms]
)
@pytest.mark.parametrize("role_id", [plan.role_id for plan in PLANS])
def test_a_start_at_which_a_role_ends_or_hangs_each_time_is_over_in_the_end(role_id: str, life: str) -> None:
    """Nothing is announced, so no service can be lost, and there are people or scripts who wait for it."""
    world = World()
    world.lives[role_id] = LIVES[life]
    world.feed(Tick())
    world.run(900_000.0)
    assert world.core.outcome is not None
    assert world.core.outcome.exit_code in (1, EXIT_CONFIG)
    assert role_id in world.core.outcome.reason


def test_a_start_does_not_wait_for_a_role_that_is_drained_and_does_for_one_that_comes_back() -> None:
    """Neither its announcement nor the next rank: it stays down until somebody wants it again."""
    world = World((*PLANS, RolePlan("gateway-0", (), 2, -1, 3_000.0, kind="gateway")))
    world.lives["node-a"] = Life(5_000.0)
    world.feed(Tick())
    world.run(1_000.0)
    drained(world, 1)
    world.run(5_000.0)
    assert SpawnRole("gateway-0", ()) in [action for _, action in world.done]
    world.ask(RoleDrain(2, ROLE, is_back=True))
    world.feed(Settled())
    assert not world.core.is_announced
    world.run(1_000.0)
    drained(world, 3)
    world.feed(Settled())
    assert world.core.is_announced


def test_who_asks_at_a_start_that_fails_hears_why() -> None:
    world = World()
    world.feed(Tick())
    world.run(1_000.0)
    drained(world, 1)
    world.lives[ROLE] = LIVES["exits at once, with a defect"]
    world.lives[OTHER] = LIVES["writes its run file and dies"]
    world._exit(OTHER, -9, 1.0)
    world.ask(RoleDrain(2, ROLE, is_back=True))
    world.run(900_000.0)
    assert world.core.outcome is not None
    assert world.answer(2) is not None


# ------------------------------------------------------------ who stands in


HOSTING = (
    replace(PLANS[0], frontend=OTHER),
    replace(PLANS[0], role_id="scheduler-1"),
    PLANS[1],
)
"""The only frontend runs in the process of a scheduler, which has a standby."""


@pytest.mark.parametrize(
    ("plans", "role_id", "left_out"),
    [
        (HOSTING, "scheduler-0", "no frontend would be left"),
        (HOSTING, "scheduler-1", ""),
        (HOSTING, "node-a", "no node would be left"),
        ((*HOSTING, PLANS[3]), "scheduler-0", ""),
        ((*HOSTING, PLANS[3]), ROLE, ""),
        ((HOSTING[0], *HOSTING[2:], PLANS[3]), "scheduler-0", "no scheduler would be left"),
        ((HOSTING[0], *HOSTING[2:]), "scheduler-0", "no scheduler and no frontend would be left"),
    ],
)
def test_a_role_is_drained_only_where_others_stand_in_for_all_that_runs_in_its_process(
    plans: tuple[RolePlan, ...], role_id: str, left_out: str
) -> None:
    world = World(plans)
    world.start()
    world.ask(RoleDrainDryRun(1, role_id))
    world.ask(RoleDrain(1, role_id))
    world.run(10_000.0)
    would_be, answer = world.answers
    assert would_be == answer
    assert answer.status == ("refused" if left_out else "ok")
    assert left_out in answer.reason
    assert ("frontend-0 runs in the process of scheduler-0" in answer.reason) == ("frontend" in left_out)


def test_a_role_that_does_not_serve_stands_in_for_nobody() -> None:
    world = World()
    world.start()
    world.lives[ROLE] = LIVES["hangs before its run file"]
    world._exit(ROLE, -9, 1.0)
    world.run(10.0)
    world.ask(RoleDrain(1, OTHER))
    assert (world.answers[-1].status, world.answers[-1].reason) == ("refused", "no frontend would be left")


def test_a_role_that_never_served_is_not_drained() -> None:
    world = World()
    world.lives[ROLE] = LIVES["hangs before its run file"]
    world.feed(Tick())
    world.run(1_000.0)
    world.ask(RoleDrain(1, ROLE))
    assert (world.answers[-1].code, world.answers[-1].reason) == ("Busy", f"{ROLE} has not served yet")
