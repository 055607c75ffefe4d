from __future__ import annotations

from collections.abc import Sequence

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
    SpawnRole,
    SupervisorAction,
    SupervisorEvent,
    TerminateRole,
)
from deploy.local.rolling import (
    ASK_LIMIT_MS,
    HEAL_LIMIT_MS,
    REST_MS,
    Health,
    health_of,
)
from fabric.ids import PeerId
from fabric.messages import (
    Changed,
    RestartRoles,
    RoleDrain,
    RoleDrainDryRun,
    RoleRequest,
    SchedulerStanding,
    SliceReport,
    SliceState,
    StatusListed,
)
from roles.node_agent.events import AgentLimits
from roles.runtime.core import Tick
from roles.runtime.process_events import ProcessExited, StopAsked

OPERATOR = PeerId("operator/1")
WELL = Health(is_ready=True, slices_ready=2, frontends=2)
PLANS = (
    RolePlan("scheduler-0", (), 0, 2, 2_000.0, restart_rank=3, kind="scheduler"),
    RolePlan("node-a", (), 1, 1, 8_000.0, restart_rank=0, kind="node"),
    RolePlan("frontend-0", (), 1, 0, 3_000.0, restart_rank=1, kind="frontend"),
    RolePlan("frontend-1", (), 1, 0, 3_000.0, restart_rank=1, kind="frontend"),
)
ORDER = ["node-a", "frontend-0", "frontend-1", "scheduler-0"]


class Up:
    """A supervisor whose roles all serve."""

    def __init__(self, plans: Sequence[RolePlan] = PLANS) -> None:
        self.core = SupervisorCore(plans)
        self.now_ms = 1_000.0
        self.done: list[SupervisorAction] = []
        self.feed(Tick())
        for plan in plans:
            self.feed(RoleServes(plan.role_id))
        self.done.clear()

    def feed(self, event: SupervisorEvent) -> list[SupervisorAction]:
        actions = list(self.core.handle(event, self.now_ms))
        self.done += actions
        return actions

    def ask(self, change: RoleRequest) -> list[SupervisorAction]:
        return self.feed(RoleAsked(OPERATOR, change))

    def wait(self, ms: float) -> list[SupervisorAction]:
        until_ms = self.now_ms + ms
        actions: list[SupervisorAction] = []
        while self.core.wake_at_ms is not None and self.core.wake_at_ms <= until_ms:
            self.now_ms = max(self.now_ms, self.core.wake_at_ms)
            actions += self.feed(Tick())
        self.now_ms = until_ms
        return actions

    def restart(self, role_id: str, health: Health = WELL) -> None:
        """It ends, is started again, serves, and says how it is."""
        assert self.core.asks == role_id
        assert TerminateRole(role_id) in self.feed(RoleReported(role_id, WELL))
        assert self.core.asks == ""
        assert SpawnRole(role_id, ()) in self.feed(ProcessExited(role_id, 0, ""))
        self.feed(RoleServes(role_id))
        self.feed(RoleReported(role_id, health))

    @property
    def answers(self) -> list[Changed]:
        return [action.message for action in self.done if isinstance(action, Reply)]


def test_each_role_is_back_in_health_before_the_next_one_ends() -> None:
    up = Up()
    up.ask(RestartRoles(7))
    for role_id in ORDER:
        up.restart(role_id)
        others = [one for one in up.wait(REST_MS - 1) if isinstance(one, TerminateRole)]
        assert not others, "clients need a moment to come back to it"
        up.wait(1)
    assert up.answers == [Changed(7, "ok", started=4)]
    ended = [action.role_id for action in up.done if isinstance(action, TerminateRole)]
    assert ended == ORDER


@pytest.mark.parametrize(
    "health", [Health(False, 2, 2), Health(True, 1, 2), Health(True, 2, 1)], ids=["unready", "slice", "link"]
)
def test_it_stops_at_the_first_that_does_not_come_back(health: Health) -> None:
    up = Up()
    up.ask(RestartRoles(7))
    up.restart("node-a")
    up.wait(REST_MS)
    up.restart("frontend-0", health)
    up.wait(HEAL_LIMIT_MS)
    assert up.answers == [Changed(7, "failed", reason="frontend-0 did not come back as it was", started=1)]
    assert up.core.asks == ""
    assert TerminateRole("frontend-1") not in up.done


def gone(before: Health) -> Up:
    """An agent that was so has ended for a restart, and its next process serves."""
    up = Up()
    up.ask(RestartRoles(7))
    up.feed(RoleReported("node-a", before))
    up.feed(ProcessExited("node-a", 0, ""))
    up.feed(RoleServes("node-a"))
    return up


@pytest.mark.parametrize("takes_ms", [30_000.0 + 3 * 105_000.0, 1_000_000.0])
def test_a_role_has_the_time_in_which_a_worker_may_load_all_models_of_a_slice(takes_ms: float) -> None:
    before = Health(True, 1, 0, models_max=3)
    up = gone(before)
    up.feed(RoleReported("node-a", replace(before, slices_ready=0)))
    up.wait(min(takes_ms, HEAL_LIMIT_MS + 2 * AgentLimits().load_ms))
    up.feed(RoleReported("node-a", before))
    up.wait(REST_MS)
    is_late = takes_ms == 1_000_000.0
    assert [one.reason for one in up.answers] == (["node-a did not come back as it was"] if is_late else [])
    assert up.core.asks == ("" if is_late else "frontend-0")


@pytest.mark.parametrize("ready", [(0, 1, 2, 3), (0, 1, 0, 1)])
def test_a_role_has_more_time_with_each_slice_that_is_ready(ready: tuple[int, ...]) -> None:
    """As where a worker loads several. One that comes and goes is not more."""
    up = gone(Health(True, 3, 0))
    for slices in ready:
        up.feed(RoleReported("node-a", Health(True, slices, 0)))
        up.wait(REST_MS if slices == 3 else HEAL_LIMIT_MS - 10_000.0)
    is_back = ready[-1] == 3
    assert [one.reason for one in up.answers] == ([] if is_back else ["node-a did not come back as it was"])


SHARDS = tuple(
    RolePlan(
        f"scheduler-{number}", (), 0, 2, 2_000.0, restart_rank=2, kind=f"scheduler of shard {number % 2}"
    )
    for number in range(6)
)


class Elected(Up):
    """Two shards with three schedulers each; `active`: of each. When it ends the one of the next number takes over."""

    def __init__(self, active: Sequence[int]) -> None:
        super().__init__((*SHARDS, *PLANS[2:]))
        self.active = {shard: 2 * number + shard for shard, number in enumerate(active)}
        self.slices_ready = dict.fromkeys(self.active, 2)
        self.frontends = dict.fromkeys(self.active, 2)

    def health(self, role_id: str) -> Health:
        if role_id.startswith("frontend"):
            return WELL
        number = int(role_id.removeprefix("scheduler-"))
        shard = number % 2
        if self.active[shard] != number:
            return Health(True, 0, 0, "standby")
        return Health(True, self.slices_ready[shard], self.frontends[shard], "active")

    def go_on(self, ms: float) -> list[str]:
        """So long, in steps of 100 ms in which whoever is asked says how it is; who ended in that time, in turn."""
        ended = []
        for _ in range(int(ms / 100)):
            if not self.answers:
                self.wait(100.0)
            if self.core.asks:
                told = self.feed(RoleReported(self.core.asks, self.health(self.core.asks)))
                for role_id in [one.role_id for one in told if isinstance(one, TerminateRole)]:
                    ended.append(role_id)
                    self.end(role_id)
        return ended

    def end(self, role_id: str) -> None:
        for shard, number in self.active.items():
            if role_id == f"scheduler-{number}":
                self.active[shard] = (number + 2) % 6
        assert SpawnRole(role_id, ()) in self.feed(ProcessExited(role_id, 0, ""))
        self.feed(RoleServes(role_id))


@pytest.mark.parametrize("active", [(first, second) for first in range(3) for second in range(3)], ids=str)
def test_the_active_scheduler_of_each_shard_ends_last_whichever_it_is(active: Sequence[int]) -> None:
    """So there is one take-over, by a process that is new already."""
    up = Elected(active)
    up.ask(RestartRoles(7))
    former = {shard: f"scheduler-{number}" for shard, number in up.active.items()}
    ended = up.go_on(60_000.0)
    assert up.answers == [Changed(7, "ok", started=8)]
    assert sorted(ended) == sorted(plan.role_id for plan in (*SHARDS, *PLANS[2:]))
    for shard, role_id in former.items():
        assert [one for one in ended[2:] if int(one[-1]) % 2 == shard][-1] == role_id


@pytest.mark.parametrize("missing", ["slices_ready", "frontends"])
@pytest.mark.parametrize("comes_back", [True, False])
def test_a_scheduler_is_back_when_the_one_that_took_over_has_what_it_had(
    missing: str, comes_back: bool
) -> None:
    up = Elected((1, 2))
    up.ask(RestartRoles(7))
    while up.go_on(100.0) != ["scheduler-2"]:
        pass
    getattr(up, missing)[0] = 1
    assert up.go_on(HEAL_LIMIT_MS - 10_000.0) == []
    if comes_back:
        getattr(up, missing)[0] = 2
        up.go_on(20_000.0)
        assert up.answers == [Changed(7, "ok", started=8)]
    else:
        assert up.go_on(20_000.0) == []
        assert [answer.reason for answer in up.answers] == ["scheduler-2 did not come back as it was"]


def test_a_role_that_is_killed_on_its_way_back_is_waited_for() -> None:
    up = Up()
    up.ask(RestartRoles(7))
    up.feed(RoleReported("node-a", WELL))
    up.feed(ProcessExited("node-a", 0, ""))
    for _ in range(2):
        up.feed(ProcessExited("node-a", -9, ""))
        up.wait(1_000.0)
        up.feed(RoleServes("node-a"))
    up.feed(RoleReported("node-a", WELL))
    up.wait(REST_MS)
    assert (up.core.asks, up.answers) == ("frontend-0", [])


def test_none_ends_while_another_one_does_not_serve() -> None:
    up = Up()
    up.ask(RestartRoles(7))
    up.restart("node-a")
    up.feed(ProcessExited("frontend-1", -9, ""))
    up.wait(REST_MS)
    assert up.core.asks == "frontend-0"
    assert up.feed(RoleReported("frontend-0", WELL)) == []
    up.feed(RoleServes("frontend-1"))
    assert TerminateRole("frontend-0") in up.feed(RoleReported("frontend-0", WELL))


def test_it_is_over_where_another_one_stays_away() -> None:
    up = Up()
    up.ask(RestartRoles(7))
    up.feed(ProcessExited("frontend-1", -9, ""))
    up.feed(RoleReported("node-a", WELL))
    up.wait(ASK_LIMIT_MS)
    assert up.answers == [Changed(7, "failed", reason="node-a serves on: frontend-1 does not serve")]
    assert not any(isinstance(action, TerminateRole) for action in up.done)


def test_a_role_that_does_not_say_how_it_is_is_not_restarted() -> None:
    up = Up()
    up.ask(RestartRoles(7))
    up.wait(60_000.0)
    assert up.answers == [Changed(7, "failed", reason="node-a does not say how it is")]
    assert not any(isinstance(action, TerminateRole) for action in up.done)


def test_a_role_that_was_away_for_a_while_is_not_blamed_later() -> None:
    up = Up()
    up.ask(RestartRoles(7))
    up.feed(RoleReported("node-a", WELL))
    up.feed(ProcessExited("node-a", 0, ""))
    up.feed(RoleServes("node-a"))
    up.feed(ProcessExited("frontend-1", -9, ""))
    up.feed(RoleReported("node-a", WELL))
    up.feed(RoleServes("frontend-1"))
    up.wait(REST_MS)
    assert up.core.asks == "frontend-0"
    up.wait(ASK_LIMIT_MS)
    assert [one.reason for one in up.answers] == ["frontend-0 does not say how it is"]


def test_a_role_that_does_not_serve_itself_is_said_to_be_the_one() -> None:
    up = Up()
    up.ask(RestartRoles(7))
    up.feed(ProcessExited("node-a", -9, ""))
    up.wait(ASK_LIMIT_MS)
    assert [one.reason for one in up.answers] == ["node-a does not serve"]


@pytest.mark.parametrize("role_id", [ORDER[0], ORDER[-1]])
def test_a_role_that_ends_right_after_it_was_back_is_waited_for(role_id: str) -> None:
    up = Up()
    up.ask(RestartRoles(7))
    for before in ORDER[: ORDER.index(role_id)]:
        up.restart(before)
        up.wait(REST_MS)
    up.restart(role_id)
    up.feed(ProcessExited(role_id, -9, ""))
    up.wait(10 * REST_MS)
    assert (up.core.asks, up.answers) == ("", [])
    up.feed(RoleServes(role_id))
    up.feed(RoleReported(role_id, WELL))
    up.wait(REST_MS)
    is_last = role_id == ORDER[-1]
    assert up.core.asks == ("" if is_last else ORDER[ORDER.index(role_id) + 1])
    assert up.answers == ([Changed(7, "ok", started=4)] if is_last else [])


def test_a_role_that_does_not_end_is_killed_and_started_again() -> None:
    up = Up()
    up.ask(RestartRoles(7))
    up.feed(RoleReported("node-a", WELL))
    assert KillRole("node-a") in up.wait(8_000.0)
    assert SpawnRole("node-a", ()) in up.feed(ProcessExited("node-a", -9, ""))
    up.feed(RoleServes("node-a"))
    up.feed(RoleReported("node-a", WELL))
    up.wait(REST_MS)
    assert up.core.asks == "frontend-0"


def test_a_role_that_was_drained_stays_down_until_it_is_wanted_back() -> None:
    up = Up()
    assert TerminateRole("frontend-1") in up.ask(RoleDrain(1, "frontend-1"))
    assert up.answers == []
    up.feed(ProcessExited("frontend-1", 0, ""))
    assert up.answers == [Changed(1, "ok", ended=1)]
    assert not any(isinstance(action, SpawnRole) for action in up.wait(120_000.0))
    assert SpawnRole("frontend-1", ()) in up.ask(RoleDrain(2, "frontend-1", is_back=True))
    up.feed(RoleServes("frontend-1"))
    assert up.answers[1:] == [Changed(2, "ok", started=1)]


def test_what_is_so_already_is_said_and_nothing_is_done() -> None:
    up = Up()
    up.ask(RoleDrain(1, "frontend-1", is_back=True))
    up.ask(RoleDrain(2, "frontend-1"))
    up.feed(ProcessExited("frontend-1", 0, ""))
    for request in (RoleDrain(3, "frontend-1"), RoleDrainDryRun(4, "frontend-1")):
        assert not any(isinstance(action, TerminateRole | SpawnRole) for action in up.ask(request))
    assert up.answers == [
        Changed(1, "ok", reason="frontend-1 is not drained"),
        Changed(2, "ok", ended=1),
        Changed(3, "ok", reason="frontend-1 is drained already"),
        Changed(4, "ok", reason="frontend-1 is drained already"),
    ]


def test_while_a_role_is_drained_a_rolling_restart_says_which_and_how_it_comes_back() -> None:
    up = Up()
    up.ask(RoleDrain(1, "frontend-1"))
    up.feed(ProcessExited("frontend-1", 0, ""))
    assert up.core.drained == ("frontend-1",)
    up.ask(RestartRoles(2))
    assert up.answers[-1].code == "Busy"
    assert (
        up.answers[-1].reason == "frontend-1 is drained; first use it again: tenuto drain frontend-1 --back"
    )


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (RoleDrain(1, "frontend-7"), "UnknownRole"),
        (RoleDrain(1, "scheduler-0"), "InvalidConfig"),
        (RoleDrain(1, "node-a"), "InvalidConfig"),
    ],
)
def test_what_cannot_be_is_refused(change: RoleDrain, code: str) -> None:
    up = Up()
    up.ask(change)
    (answer,) = up.answers
    assert (answer.status, answer.code) == ("refused", code)
    assert not any(isinstance(action, TerminateRole) for action in up.done)


TOGETHER = (replace(PLANS[0], frontend="frontend-0"), PLANS[1], PLANS[3])


def test_a_frontend_in_the_schedulers_process_says_so_and_how_it_could_be_drained() -> None:
    up = Up(TOGETHER)
    for request in (RoleDrainDryRun(1, "frontend-0"), RoleDrain(1, "frontend-0")):
        up.ask(request)
        answer = up.answers[-1]
        assert (answer.status, answer.code) == ("refused", "InvalidConfig")
        assert "frontend-0 runs in the process of scheduler-0" in answer.reason
        assert "tenuto up --apart" in answer.reason


def test_a_frontend_in_the_schedulers_process_stands_in_for_another_one() -> None:
    assert TerminateRole("frontend-1") in Up(TOGETHER).ask(RoleDrain(1, "frontend-1"))


def test_what_is_only_said_is_refused_as_it_would_be_and_else_answered_as_if_it_were_done() -> None:
    up = Up()
    up.ask(RoleDrainDryRun(1, "frontend-1"))
    up.ask(RoleDrainDryRun(2, "frontend-7"))
    assert up.answers[0] == Changed(1, "ok", ended=1)
    assert (up.answers[1].status, up.answers[1].code) == ("refused", "UnknownRole")
    assert not any(isinstance(action, TerminateRole) for action in up.done)
    assert TerminateRole("frontend-1") in up.ask(RoleDrain(3, "frontend-1")), "nothing is under way"


def test_one_change_at_a_time() -> None:
    up = Up()
    up.ask(RestartRoles(1))
    up.ask(RoleDrain(2, "frontend-1"))
    assert [(answer.request_no, answer.code) for answer in up.answers] == [(2, "Busy")]


def test_a_role_that_is_ending_already_is_not_told_again_when_everything_ends() -> None:
    up = Up()
    up.ask(RestartRoles(1))
    up.feed(RoleReported("node-a", WELL))
    up.feed(StopAsked())
    up.feed(ProcessExited("frontend-0", 0, ""))
    up.feed(ProcessExited("frontend-1", 0, ""))
    up.feed(ProcessExited("node-a", 0, ""))
    up.feed(ProcessExited("scheduler-0", 0, ""))
    assert up.core.outcome is not None
    assert up.done.count(TerminateRole("node-a")) == 1, "the second signal would mean: now"
    assert up.answers == [Changed(1, "failed", reason="everything ends")]


def test_health_is_what_a_role_says_of_itself() -> None:
    slices = (
        SliceReport("a", SliceState.READY, "", (), 0, 0),  # type: ignore[arg-type]  # a name is a name
        SliceReport("b", SliceState.STARTING, "", ("m", "n", "o"), 0, 0),  # type: ignore[arg-type]  # likewise
    )
    status = StatusListed("scheduler-0", 1, slices, (), {"frontends": 2.0})
    assert health_of(status) == Health(True, 1, 2, models_max=3)
    standing = SchedulerStanding("standby", 16, 0, 3, 0, ())
    assert health_of(replace(status, standing=standing)) == Health(True, 1, 2, "standby", 3)
    assert health_of(StatusListed("frontend-0", 1, (), (), {"is_ready": 0.0})) == Health(False, 0, 0)


def test_a_restart_goes_on_after_its_supervisor_was_stopped_itself() -> None:
    up = Up()
    up.ask(RestartRoles(7))
    for role_id in ORDER:
        up.now_ms += 1_000_000.0
        up.feed(Tick())  # what the role says is there, and is read next
        assert TerminateRole(role_id) in up.feed(RoleReported(role_id, WELL))
        up.feed(ProcessExited(role_id, 0, ""))
        up.feed(RoleServes(role_id))
        up.now_ms += 1_000_000.0
        up.feed(Tick())
        up.feed(RoleReported(role_id, WELL))
        up.wait(REST_MS)
    assert up.answers == [Changed(7, "ok", started=4)]
