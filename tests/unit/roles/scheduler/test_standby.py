"""One of several schedulers: what it does with what it hears while it stands by, takes over, and is replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from msgspec.structs import replace

from fabric.ids import OPERATOR, Epoch, FrontendId, Incarnation, ModelId, NodeId, PeerId, SliceId, peer_id
from fabric.limits import INTEGER_MAX
from fabric.messages import (
    ITEMS_MAX,
    AnyMessage,
    Arrivals,
    Changed,
    Directory,
    DrainAsked,
    EpochGranted,
    FrontendHello,
    LeaseAsked,
    LeaseReport,
    Left,
    ModelSpec,
    ModelsRemove,
    NodeHello,
    Ping,
    PlanCopy,
    PlanMade,
    Pong,
    ReplicaInfo,
    SchedulerHello,
    SliceReady,
    SliceSpec,
    SliceState,
    SliceStatus,
    StatusAsked,
    StatusListed,
    TakeOver,
)
from policies.batching.registry import make_discipline
from roles.runtime.core import PLANNER, Heard, Lost, Send, Tick
from roles.runtime.epochs import HELD_MS
from roles.runtime.journal import packed, unpacked
from roles.runtime.loop.sources import CLOSED, SILENT
from roles.runtime.process_events import SchedulerFound, StopAsked
from roles.scheduler.availability.election import (
    FIRST_STAGGER_MS,
    STAGGER_MS,
    Electorate,
    EpochTaken,
    LeaseLapsed,
)
from roles.scheduler.availability.replica import (
    ASKED_MAX,
    GATHER_FIRST_MS,
    GATHER_MS,
    HANDED_OVER_MS,
    HEIR_WITHIN_MS,
    NOT_ACTIVE,
    OTHERS_WITHIN_MS,
    PREPARE_AFTER_MS,
    SETTLED_MS,
    TELL_AGAIN_MS,
    CopyPlan,
    KeepPlan,
    PrepareCore,
    ReplicaAction,
    ReplicaSettings,
    SchedulerReplica,
)
from roles.scheduler.core import SchedulerCore
from roles.scheduler.settings import SchedulerSettings

BORN = Incarnation("0")
NODE = NodeId("a")
AGENT = PeerId("node-a/0")
FRONTEND = peer_id("frontend-0", BORN)
WORKER = PeerId("worker-a-1/0")
OTHER = PeerId("scheduler-0/9")
OF_OTHER = SchedulerHello("scheduler-0", Incarnation("9"), is_electable=True)
HELLO = FrontendHello(FrontendId("frontend-0"), BORN, ())
READY = SliceReady(SliceId("a/gpu0/0"), BORN, NODE, 0, (), ())


class Core:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.wake_at_ms: float | None = None
        self.heard: list[AnyMessage] = []
        self.answers: dict[type[AnyMessage], Send] = {}
        self.lost: Callable[[PeerId], object] = str

    def handle(self, event: Heard | Lost | Tick, now_ms: float) -> Sequence[Send]:
        del now_ms
        if isinstance(event, Lost):
            self.lost(event.peer)
        if not isinstance(event, Heard):
            return ()
        self.heard.append(event.message)
        answer = self.answers.get(type(event.message))
        return () if answer is None else (answer,)


class Stage:
    def __init__(
        self, *, schedulers: int = 2, number: int = 1, others: str = "", kept_epoch: int = 0
    ) -> None:
        self.cores: list[Core] = []
        electorate = Electorate(frozenset({NODE, *map(NodeId, others)}), schedulers)
        settings = ReplicaSettings(BORN, electorate, number, 7, kept_epoch=kept_epoch)
        self.replica = SchedulerReplica(settings, self._make)
        self.now_ms = 0.0

    def _make(self) -> Core:
        self.cores.append(Core())
        return self.cores[-1]

    def hear(self, peer: PeerId, message: AnyMessage) -> list[ReplicaAction]:
        return list(self.replica.handle(Heard(peer, message), self.now_ms))

    def tick(self) -> list[ReplicaAction]:
        assert self.replica.wake_at_ms is not None
        self.now_ms = max(self.now_ms, self.replica.wake_at_ms)
        return list(self.replica.handle(Tick(), self.now_ms))

    def take_over(self, epoch: int = 17) -> list[ReplicaAction]:
        """Its agent was granted to another before, is free now, and grants."""
        self.hear(AGENT, LeaseReport(NODE, epoch - 1, "scheduler-0", BORN, is_free=True))
        actions = self.tick()
        if PrepareCore() in actions:
            actions = self.tick()
        (ask,) = [action.message for action in actions if isinstance(action, Send)]
        assert isinstance(ask, LeaseAsked)
        report = LeaseReport(NODE, ask.epoch, "scheduler-1", BORN, is_free=False, number=ask.number)
        return self.hear(AGENT, report)

    def slice_ready(self, epoch: int | None = None) -> list[ReplicaAction]:
        """Its worker obeys us, or whoever has that epoch."""
        return self.hear(WORKER, replace(READY, epoch=self.replica.epoch if epoch is None else epoch))

    def node_hello(self, *ready: SliceId) -> list[ReplicaAction]:
        slices = tuple(SliceStatus(slice_id, BORN, SliceState.READY) for slice_id in ready)
        hello = NodeHello(NODE, BORN, (), slices, False, self.replica.epoch, "scheduler-1", BORN, False)
        return self.hear(AGENT, hello)


def test_a_standby_has_no_core_and_says_what_it_is() -> None:
    stage = Stage()
    assert stage.hear(FRONTEND, Arrivals(ModelId("m"), 0, 1, 5.0, 0.0, 0.0, 0.0)) == []
    (refused,) = stage.hear(PeerId(f"{OPERATOR}/1"), ModelsRemove(3, ()))
    assert isinstance(refused, Send)
    assert isinstance(refused.message, Changed)
    assert (refused.message.request_no, refused.message.code) == (3, NOT_ACTIVE)
    (told,) = stage.hear(PeerId(f"{OPERATOR}/1"), StatusAsked())
    assert isinstance(told, Send)
    assert isinstance(told.message, StatusListed)
    assert told.message.standing is not None
    assert told.message.standing.state == "standby"
    assert stage.cores == []


def test_frontends_are_told_last() -> None:
    stage = Stage()
    stage.hear(FRONTEND, HELLO)
    actions = stage.take_over()
    assert EpochTaken(stage.replica.epoch) in actions
    assert CopyPlan(()) in actions
    (core,) = stage.cores
    stage.node_hello(READY.slice_id)
    assert [type(message) for message in core.heard] == [NodeHello]
    stage.slice_ready()
    assert [type(message) for message in core.heard] == [NodeHello, SliceReady, FrontendHello]


def test_nobody_is_linked_in_an_epoch_that_begins_whatever_they_said_in_the_one_before() -> None:
    stage = Stage()
    stage.hear(FRONTEND, replace(HELLO, is_linked=True))
    stage.take_over()
    stage.node_hello(READY.slice_id)
    stage.slice_ready()
    assert stage.cores[0].heard[-1] == HELLO


def test_they_do_not_wait_for_ever() -> None:
    stage = Stage()
    stage.hear(FRONTEND, HELLO)
    stage.take_over()
    stage.hear(PeerId("frontend-1/0"), FrontendHello(FrontendId("frontend-1"), BORN, ()))
    stage.node_hello(READY.slice_id, SliceId("a/gpu1/0"))
    stage.slice_ready()
    assert [type(message) for message in stage.cores[0].heard] == [NodeHello, SliceReady]
    stage.now_ms += GATHER_MS
    stage.replica.handle(Tick(), stage.now_ms)
    assert [type(message) for message in stage.cores[0].heard[2:]] == [FrontendHello, FrontendHello]


def test_while_nothing_is_ready_they_wait_longer() -> None:
    stage = Stage()
    stage.hear(FRONTEND, HELLO)
    stage.take_over()
    stage.node_hello(READY.slice_id, SliceId("a/gpu1/0"))
    stage.now_ms += GATHER_MS
    stage.replica.handle(Tick(), stage.now_ms)
    assert FrontendHello not in map(type, stage.cores[0].heard)
    stage.slice_ready()
    assert type(stage.cores[0].heard[-1]) is FrontendHello, "one of two is enough by then"


def test_what_is_said_before_a_majority_has_granted_is_not_lost() -> None:
    stage = Stage()
    stage.hear(FRONTEND, HELLO)
    stage.slice_ready(33)
    hello = NodeHello(NODE, BORN, (), (SliceStatus(READY.slice_id, BORN, SliceState.READY),), False, 33)
    stage.hear(AGENT, hello)
    stage.take_over()
    assert [type(message) for message in stage.cores[0].heard] == [NodeHello, SliceReady, FrontendHello]


def test_a_slice_is_there_once_its_worker_obeys_us() -> None:
    """What we sent it before came back at once, and went out again, until its requests had no try left."""
    stage = Stage()
    stage.take_over()
    (core,) = stage.cores
    stage.node_hello(READY.slice_id)
    stage.slice_ready(stage.replica.epoch - 16)
    assert [type(message) for message in core.heard] == [NodeHello]
    stage.slice_ready()
    assert [type(message) for message in core.heard] == [NodeHello, SliceReady]
    stage.slice_ready(stage.replica.epoch - 16)
    assert [type(message) for message in core.heard] == [NodeHello, SliceReady], (
        "also when frontends have heard of us"
    )


def test_a_worker_may_obey_us_before_we_know_of_it() -> None:
    """Its agent tells it and us at one moment; a scheduler without a standby has its core by then."""
    stage = Stage()
    stage.replica = SchedulerReplica(ReplicaSettings(BORN, Electorate(frozenset({NODE}))), stage._make)
    asked = stage.hear(AGENT, LeaseReport(NODE, 16, "scheduler-0", Incarnation("9"), is_free=True))
    (ask,) = [one.message for one in asked if isinstance(one, Send) and isinstance(one.message, LeaseAsked)]
    stage.slice_ready(16)
    stage.slice_ready(ask.epoch)
    assert SliceReady not in [type(message) for message in stage.cores[0].heard]
    stage.hear(AGENT, LeaseReport(NODE, ask.epoch, "scheduler-0", BORN, is_free=False, number=ask.number))
    assert [type(message) for message in stage.cores[0].heard].count(SliceReady) == 1


def test_who_left_before_is_not_told() -> None:
    stage = Stage()
    stage.hear(FRONTEND, HELLO)
    stage.replica.handle(Lost(FRONTEND, "gone"), 0.0)
    stage.take_over()
    stage.node_hello()
    assert [type(message) for message in stage.cores[0].heard] == [NodeHello]


@pytest.mark.parametrize("word", [Ping(1), Pong(1), Arrivals(ModelId("m"), 0, 1, 5.0, 0.0, 0.0, 0.0)])
def test_a_frontend_that_was_only_silent_is_told_though_it_says_no_other_hello(word: AnyMessage) -> None:
    """It was stopped for a while: its connection stands, and nothing tells it that it was given up."""
    stage = Stage()
    stage.hear(FRONTEND, HELLO)
    stage.replica.handle(Lost(FRONTEND, SILENT), 0.0)
    stage.hear(FRONTEND, word)
    stage.take_over()
    stage.node_hello()
    assert [type(message) for message in stage.cores[0].heard] == [NodeHello, FrontendHello]


def test_one_whose_connection_was_closed_is_gone() -> None:
    stage = Stage()
    stage.hear(FRONTEND, HELLO)
    stage.replica.handle(Lost(FRONTEND, SILENT), 0.0)
    stage.replica.handle(Lost(FRONTEND, CLOSED), 0.0)
    stage.take_over()
    stage.node_hello()
    assert [type(message) for message in stage.cores[0].heard] == [NodeHello]


def test_one_that_pings_without_a_hello_is_shown_to_the_core_once() -> None:
    """Which sends it the directory, upon which it says hello: its next pings nobody shows."""
    stage = Stage()
    stage.hear(FRONTEND, Ping(1))
    stage.hear(peer_id("frontend-1", BORN), Ping(1))
    stage.replica.handle(Lost(peer_id("frontend-1", BORN), CLOSED), 0.0)
    stage.take_over()
    stage.hear(FRONTEND, Ping(2))
    stage.node_hello()
    assert stage.cores[0].heard[1:] == [Ping(2)]


def test_a_lapsed_lease_is_noticed_before_anything_else_is_decided() -> None:
    stage = Stage()
    stage.take_over()
    stage.node_hello()
    stage.now_ms += 10 * HELD_MS
    heard = len(stage.cores[0].heard)
    actions = stage.hear(FRONTEND, Arrivals(ModelId("m"), 0, 1, 5.0, 0.0, 0.0, 0.0))
    assert LeaseLapsed() in actions
    assert len(stage.cores[0].heard) == heard
    assert stage.replica.core is None


def test_an_operator_hears_that_the_scheduler_which_took_the_change_is_active_no_more() -> None:
    stage = Stage()
    stage.take_over()
    operator, asked = PeerId("operator/bbbbbbbb"), DrainAsked(7, NodeId("a"))
    stage.hear(operator, asked)
    stage.now_ms += 10 * HELD_MS
    told = [one.message for one in stage.hear(operator, Ping(1)) if isinstance(one, Send)]
    (answer,) = [one for one in told if isinstance(one, Changed)]
    assert (answer.request_no, answer.status, answer.code) == (7, "refused", "NotActive")
    assert LeaseLapsed() not in stage.hear(operator, Ping(2))


@pytest.mark.parametrize("reason", [SILENT, CLOSED])
def test_an_operator_who_was_lost_meanwhile_hears_that_too(reason: str) -> None:
    """One that was stopped for a moment waits on. So does one whose connection was begun anew."""
    stage = Stage()
    stage.take_over()
    operator = PeerId("operator/bbbbbbbb")
    stage.hear(operator, DrainAsked(7, NodeId("a")))
    stage.replica.handle(Lost(operator, reason), stage.now_ms)
    stage.now_ms += 10 * HELD_MS
    ((peer, answer),) = told(stage.hear(operator, Ping(1)), Changed)
    assert isinstance(answer, Changed)
    assert (peer, answer.request_no, answer.code) == (operator, 7, NOT_ACTIVE)


def test_changes_that_others_than_operators_ask_for_take_nobody_s_place_among_those_that_hear_of_it() -> None:
    """They are refused, and not answered."""
    stage = Stage()
    stage.take_over()
    for number in range(ASKED_MAX):
        stage.hear(FRONTEND, DrainAsked(number, NodeId("a")))
    operator = PeerId("operator/bbbbbbbb")
    stage.hear(operator, DrainAsked(7, NodeId("a")))
    stage.now_ms += 10 * HELD_MS
    assert [peer for peer, _ in told(stage.hear(operator, Ping(1)), Changed)] == [operator]


@pytest.mark.parametrize("with_which", [DrainAsked, PlanMade])
def test_an_operator_whose_change_was_answered_hears_nothing_more_of_it(with_which: type[AnyMessage]) -> None:
    stage = Stage()
    stage.take_over()
    operator = PeerId("operator/bbbbbbbb")
    stage.cores[0].answers[with_which] = Send(operator, Changed(7, "ok"))
    told = stage.hear(operator, DrainAsked(7, NodeId("a")))
    told += stage.hear(PLANNER, PlanMade(1))
    told += stage.hear(WORKER, Ping(1))
    stage.now_ms += 10 * HELD_MS
    told += stage.hear(operator, Ping(1))
    answers = [one.message for one in told if isinstance(one, Send) and isinstance(one.message, Changed)]
    assert [answer.status for answer in answers] == ["ok"]


def test_the_newest_copy_is_kept_of_whatever_configuration() -> None:
    stage, source = Stage(), PeerId("scheduler-0")
    copy = PlanCopy(16, 2, "digest", "{}")
    assert stage.hear(source, copy) == [KeepPlan(copy)]
    assert stage.hear(source, PlanCopy(16, 1, "digest", "{}")) == []
    assert stage.hear(PeerId("scheduler-0/9"), PlanCopy(32, 0, "digest", "{}")) == []
    assert stage.replica.offences.counters["offences_wrong_identity"] == 1
    newer = PlanCopy(32, 0, "another", "{}")
    assert stage.hear(source, newer) == [KeepPlan(newer)]


def test_one_that_was_overtaken_and_does_not_know_it_keeps_the_next_ones_plan() -> None:
    stage, source = Stage(), PeerId("scheduler-0")
    stage.take_over(17)
    assert stage.hear(source, PlanCopy(16, 9, "digest", "{}")) == []
    assert stage.hear(source, PlanCopy(int(stage.replica.epoch), 9, "digest", "{}")) == []
    newer = PlanCopy(stage.replica.epoch + 16, 0, "digest", "{}")
    assert stage.hear(source, newer) == [KeepPlan(newer)]


def test_a_standby_that_did_not_take_its_copy_of_the_plan_is_sent_it_again() -> None:
    stage = Stage()
    stage.hear(OTHER, SchedulerHello("scheduler-0", Incarnation("9")))
    assert CopyPlan((OTHER,)) in stage.take_over()
    stage.replica.refused(OTHER, PlanCopy(17, 0, "digest", "{}"), stage.now_ms)
    assert not stage.replica.standing().standbys[0].has_plan
    until_ms, copies = stage.now_ms + TELL_AGAIN_MS, []
    while stage.now_ms < until_ms:
        copies = [one for one in stage.tick() if isinstance(one, CopyPlan)]
    assert copies == [CopyPlan((OTHER,))]
    assert stage.replica.standing().standbys[0].has_plan


def test_a_standby_that_was_lost_is_asked_who_it_is_until_it_takes_that_or_its_connection_is_closed() -> None:
    """It need not know: where only what we said to it was refused, its own connection stands, and it says hello to nobody."""
    stage = Stage()
    stage.take_over()
    theirs = SchedulerHello("scheduler-0", Incarnation("9"))
    ours = SchedulerHello("scheduler-1", BORN, is_electable=True)
    stage.hear(OTHER, theirs)
    asked = Send(OTHER, ours)

    def told() -> list[ReplicaAction]:
        until_ms, done = stage.now_ms + TELL_AGAIN_MS, list[ReplicaAction]()
        while stage.replica.wake_at_ms is not None and stage.replica.wake_at_ms <= until_ms:
            done += [one for one in stage.tick() if one == asked or isinstance(one, CopyPlan)]
        stage.now_ms = until_ms
        return done

    assert asked in stage.replica.handle(Lost(OTHER, SILENT), stage.now_ms)
    for _ in range(3):
        stage.replica.refused(OTHER, ours, stage.now_ms)
        assert told() == [asked]
    assert told() == []
    assert CopyPlan((OTHER,)) in stage.hear(OTHER, theirs)
    stage.replica.handle(Lost(OTHER, SILENT), stage.now_ms)
    stage.replica.refused(OTHER, ours, stage.now_ms)
    stage.replica.handle(Lost(OTHER, CLOSED), stage.now_ms)
    assert told() == []


SOURCE = PeerId("scheduler-0")


def told(actions: Sequence[ReplicaAction], kind: type[AnyMessage]) -> list[tuple[PeerId, AnyMessage]]:
    sends = [action for action in actions if isinstance(action, Send)]
    return [(one.peer, one.message) for one in sends if isinstance(one.message, kind)]


def test_a_standby_that_is_told_to_take_over_asks_at_once_and_says_in_whose_place() -> None:
    stage = Stage()
    stage.hear(AGENT, LeaseReport(NODE, 16, "scheduler-0", BORN, is_free=False))
    ((_, ask),) = told(stage.hear(SOURCE, TakeOver(16)), LeaseAsked)
    assert isinstance(ask, LeaseAsked)
    assert (ask.epoch, ask.in_place_of) == (33, 16)
    report = LeaseReport(NODE, 33, "scheduler-1", BORN, is_free=False, number=ask.number)
    assert EpochTaken(Epoch(33)) in stage.hear(AGENT, report)


def test_nobody_but_a_scheduler_it_found_may_tell_it_to_take_over() -> None:
    stage = Stage()
    stage.hear(AGENT, LeaseReport(NODE, 16, "scheduler-0", BORN, is_free=False))
    assert stage.hear(OTHER, TakeOver(16)) == []
    assert stage.replica.offences.counters


def handing_over() -> Stage:
    stage = Stage()
    stage.take_over()
    stage.hear(OTHER, OF_OTHER)
    stage.node_hello(READY.slice_id)
    stage.slice_ready()
    assert not stage.replica.has_left
    (word,) = told(stage.replica.handle(StopAsked(), stage.now_ms), TakeOver)
    assert word == (OTHER, TakeOver(stage.replica.epoch))
    return stage


def granted_to_another(stage: Stage) -> LeaseReport:
    return LeaseReport(NODE, stage.replica.epoch + 15, "scheduler-0", Incarnation("9"), is_free=False)


def test_it_serves_on_until_a_majority_has_granted_the_next_one() -> None:
    stage = handing_over()
    stage.hear(FRONTEND, Ping(1))
    assert stage.cores[0].heard[-1] == Ping(1)
    assert LeaseLapsed(is_handed_over=True) in stage.hear(AGENT, granted_to_another(stage))
    assert not stage.replica.has_left
    stage.now_ms += SETTLED_MS
    stage.tick()
    assert stage.replica.has_left


def test_workers_that_go_to_the_next_one_are_not_taken_for_lost() -> None:
    stage = handing_over()
    lost: list[PeerId] = []
    stage.cores[0].lost = lost.append
    for peer in (WORKER, AGENT, FRONTEND):
        stage.replica.handle(Lost(peer, CLOSED), stage.now_ms)
    assert lost == [FRONTEND]


def test_operators_are_turned_away_while_it_hands_over() -> None:
    stage = handing_over()
    ((_, answer),) = told(stage.hear(PeerId(f"{OPERATOR}/1"), ModelsRemove(3, ())), Changed)
    assert isinstance(answer, Changed)
    assert (answer.code, "hands over" in answer.reason) == (NOT_ACTIVE, True)


@pytest.mark.parametrize("how", ["nobody takes over", "the heir is lost", "the heir does not hear it"])
def test_a_handover_does_not_wait_for_ever(how: str) -> None:
    """Nor does whoever runs it sleep: it asks after a turn whether it is over."""
    stage = handing_over()
    if how == "the heir is lost":
        stage.replica.handle(Lost(OTHER, CLOSED), stage.now_ms)
    elif how == "the heir does not hear it":
        stage.replica.refused(OTHER, TakeOver(1), stage.now_ms)
    else:
        stage.now_ms += HANDED_OVER_MS
        stage.tick()
    assert stage.replica.has_left
    assert stage.replica.wake_at_ms == 0.0


def test_it_serves_on_until_a_majority_of_the_agents_is_connected_to_a_standby() -> None:
    """One that has just started would ask nobody, and the former one would end before it is active."""
    stage = Stage()
    stage.take_over()
    stage.hear(OTHER, replace(OF_OTHER, is_electable=False))
    stage.node_hello(READY.slice_id)
    stage.slice_ready()
    operator = PeerId(f"{OPERATOR}/1")
    stage.hear(operator, ModelsRemove(3, ()))
    asked_to_end = stage.replica.handle(StopAsked(), stage.now_ms)
    assert told(asked_to_end, TakeOver) == []
    assert [peer for peer, _ in told(asked_to_end, Changed)] == [operator]
    stage.now_ms += HELD_MS / 2
    stage.hear(FRONTEND, Ping(1))
    assert stage.cores[0].heard[-1] == Ping(1)
    assert not stage.replica.has_left
    assert told(stage.hear(OTHER, OF_OTHER), TakeOver) == [(OTHER, TakeOver(stage.replica.epoch))]


def test_it_does_not_wait_for_ever_for_one_that_agents_are_connected_to() -> None:
    stage = Stage()
    stage.take_over()
    stage.hear(OTHER, replace(OF_OTHER, is_electable=False))
    stage.replica.handle(StopAsked(), stage.now_ms)
    asked_at_ms = stage.now_ms
    words: list[tuple[PeerId, AnyMessage]] = []
    while not words:
        renewed = LeaseReport(NODE, stage.replica.epoch, "scheduler-1", BORN, is_free=False)
        done = stage.tick()
        words += told(done, TakeOver)
        for _, ask in told(done, LeaseAsked):
            assert isinstance(ask, LeaseAsked)
            stage.hear(AGENT, replace(renewed, number=ask.number))
        assert stage.now_ms <= asked_at_ms + HEIR_WITHIN_MS
        assert not stage.replica.has_left


@pytest.mark.parametrize("what", ["the standby", "the agents"])
def test_it_waits_for_nobody_when_there_is_nobody_left(what: str) -> None:
    stage = Stage()
    stage.take_over()
    stage.hear(OTHER, replace(OF_OTHER, is_electable=False))
    stage.replica.handle(StopAsked(), stage.now_ms)
    stage.replica.handle(Lost(OTHER if what == "the standby" else AGENT, CLOSED), stage.now_ms)
    assert stage.replica.has_left


def test_the_first_that_could_be_elected_takes_over_before_one_that_could_not() -> None:
    stage = Stage(schedulers=3, number=2)
    stage.hear(SOURCE, PlanCopy(16, 1, "digest", "{}"))
    stage.hear(AGENT, LeaseReport(NODE, 16, "scheduler-0", BORN, is_free=True))
    (ask,) = [action.message for action in stage.tick() if isinstance(action, Send)]
    assert isinstance(ask, LeaseAsked)
    stage.hear(AGENT, LeaseReport(NODE, ask.epoch, "scheduler-2", BORN, is_free=False, number=ask.number))
    able = PeerId("scheduler-1/9")
    stage.hear(OTHER, replace(OF_OTHER, is_electable=False))
    stage.hear(able, replace(OF_OTHER, scheduler_id="scheduler-1"))
    ((heir, _),) = told(stage.replica.handle(StopAsked(), stage.now_ms), TakeOver)
    assert heir == able


def test_a_standby_waits_a_second_for_agents_beyond_a_majority_before_it_is_electable() -> None:
    """What is on their nodes it could not go on with."""
    stage, other = Stage(others="bc"), PeerId("scheduler-0")
    stage.replica.handle(SchedulerFound(("ipc://s",), other), 0.0)

    def comes(node: str) -> list[tuple[PeerId, AnyMessage]]:
        report = LeaseReport(NodeId(node), 16, "scheduler-0", BORN, is_free=False)
        return told(stage.hear(PeerId(f"node-{node}/0"), report), SchedulerHello)

    able = [(other, SchedulerHello("scheduler-1", BORN, is_electable=True))]
    assert [comes("a"), comes("b")] == [[], []]
    assert told(stage.tick(), SchedulerHello) == able
    assert stage.now_ms == OTHERS_WITHIN_MS
    stage = Stage(others="bc")
    stage.replica.handle(SchedulerFound(("ipc://s",), other), 0.0)
    assert [comes("a"), comes("b"), comes("c")] == [[], [], able]


def test_schedulers_are_told_when_a_majority_of_the_agents_comes_or_goes() -> None:
    stage, other = Stage(), PeerId("scheduler-0")
    stage.replica.handle(SchedulerFound(("ipc://s",), other), 0.0)
    came = stage.hear(AGENT, LeaseReport(NODE, 16, "scheduler-0", BORN, is_free=False))
    assert told(came, SchedulerHello) == [(other, SchedulerHello("scheduler-1", BORN, is_electable=True))]
    assert (
        told(stage.hear(AGENT, LeaseReport(NODE, 16, "scheduler-0", BORN, is_free=False)), SchedulerHello)
        == []
    )
    gone = stage.replica.handle(Lost(AGENT, CLOSED), 0.0)
    assert told(gone, SchedulerHello) == [(other, SchedulerHello("scheduler-1", BORN))]


def test_an_operator_who_was_turned_away_hears_nothing_more() -> None:
    stage = Stage()
    stage.take_over()
    stage.hear(OTHER, OF_OTHER)
    operator = PeerId(f"{OPERATOR}/1")
    stage.hear(operator, ModelsRemove(3, ()))
    ((_, answer),) = told(stage.replica.handle(StopAsked(), stage.now_ms), Changed)
    assert isinstance(answer, Changed)
    assert (answer.request_no, answer.code) == (3, NOT_ACTIVE)
    stage.cores[0].answers[PlanMade] = Send(operator, Changed(3, "ok"))
    assert told(stage.hear(PLANNER, PlanMade(1)), Changed) == []


def test_only_what_its_successor_was_granted_replaces_it() -> None:
    stage = handing_over()
    of_another = LeaseReport(NODE, stage.replica.epoch + 17, "scheduler-2", BORN, is_free=True)
    assert stage.hear(AGENT, of_another) == []


def test_nobody_hands_over_to_one_that_hands_over() -> None:
    stage = Stage()
    stage.hear(OTHER, SchedulerHello("scheduler-0", Incarnation("9")))
    stage.hear(AGENT, LeaseReport(NODE, 16, "scheduler-0", BORN, is_free=False))
    ((_, ask),) = told(stage.hear(SOURCE, TakeOver(16)), LeaseAsked)
    assert isinstance(ask, LeaseAsked)
    stage.hear(AGENT, LeaseReport(NODE, 33, "scheduler-1", BORN, is_free=False, number=ask.number))
    assert told(stage.replica.handle(StopAsked(), stage.now_ms), TakeOver) == []
    assert stage.replica.has_left


@pytest.mark.parametrize("epoch", [0, 17, 18])
def test_nobody_gives_up_what_is_not_its_own(epoch: int) -> None:
    stage = Stage()
    stage.hear(AGENT, LeaseReport(NODE, 16, "scheduler-0", BORN, is_free=False))
    assert stage.hear(SOURCE, TakeOver(epoch)) == []
    assert stage.replica.offences.counters


def test_a_word_that_comes_when_a_majority_has_gone_on_means_nothing() -> None:
    stage = Stage()
    stage.hear(AGENT, LeaseReport(NODE, 32, "scheduler-0", BORN, is_free=False))
    assert stage.hear(SOURCE, TakeOver(16)) == []


def test_without_a_standby_that_has_the_plan_it_ends_at_once() -> None:
    for stage in (Stage(), Stage(schedulers=1, number=0)):
        assert told(stage.replica.handle(StopAsked(), 0.0), TakeOver) == []
        assert stage.replica.has_left


def test_a_core_is_made_of_a_plan_that_nothing_newer_follows() -> None:
    stage = Stage()
    stage.hear(SOURCE, PlanCopy(16, 1, "digest", "{}"))
    stage.now_ms += PREPARE_AFTER_MS / 2
    stage.hear(SOURCE, PlanCopy(16, 2, "digest", "{}"))
    stage.now_ms += PREPARE_AFTER_MS / 2
    assert PrepareCore() not in stage.replica.handle(Tick(), stage.now_ms)
    assert PrepareCore() in stage.tick()


def test_one_that_is_sent_no_plan_makes_a_core_of_its_own_before_it_can_be_elected() -> None:
    """Not sooner: it hears nobody meanwhile."""
    stage = Stage()
    stage.hear(AGENT, LeaseReport(NODE, 0, "", BORN, is_free=True))
    assert stage.tick() == [PrepareCore()]
    assert stage.now_ms == FIRST_STAGGER_MS
    assert told(stage.tick(), LeaseAsked), "and asks for an epoch then"


@pytest.mark.parametrize("number", [0, 1])
def test_where_agents_have_an_epoch_it_makes_one_before_it_asks_for_the_next_and_after_those_that_have_one(
    number: int,
) -> None:
    """To plan may take longer than a lease lasts, and loses what an operator changed."""
    stage, informed = Stage(number=number), Stage(number=1)
    informed.hear(SOURCE, PlanCopy(16, 1, "digest", "{}"))
    report = LeaseReport(NODE, 16, "scheduler-2", BORN, is_free=True)
    stage.hear(AGENT, report)
    informed.hear(AGENT, report)
    assert told(informed.tick(), LeaseAsked)
    assert stage.tick() == [PrepareCore()]
    assert informed.now_ms < stage.now_ms <= STAGGER_MS * 5
    stage.now_ms += 5_000.0
    assert told(stage.tick(), LeaseAsked)


def test_where_all_hosts_start_again_who_kept_the_newest_plan_goes_first() -> None:
    """Others have been away, and know nothing of what operators changed since."""
    asked_at_ms = {}
    for number, kept_epoch in ((0, 0), (0, 16), (1, 33)):
        stage = Stage(number=number, kept_epoch=kept_epoch)
        if kept_epoch:
            stage.hear(AGENT, LeaseReport(NODE, 33, "scheduler-2", BORN, is_free=False))
            assert stage.tick() == [PrepareCore()]
            assert stage.now_ms == PREPARE_AFTER_MS
        stage.now_ms = began_ms = 1_000.0
        actions = stage.hear(AGENT, LeaseReport(NODE, 33, "scheduler-2", BORN, is_free=True))
        while not told(actions, LeaseAsked):
            actions = stage.tick()
        asked_at_ms[number, kept_epoch] = stage.now_ms - began_ms
    assert asked_at_ms[1, 33] < asked_at_ms[0, 16] < asked_at_ms[0, 0]


def test_one_that_ends_makes_no_plan() -> None:
    stage = Stage()
    stage.hear(AGENT, LeaseReport(NODE, 16, "scheduler-0", BORN, is_free=True))
    assert stage.replica.wake_at_ms is not None
    stage.now_ms = stage.replica.wake_at_ms
    assert PrepareCore() not in stage.replica.handle(StopAsked(), stage.now_ms)


def test_one_that_was_sent_a_plan_makes_none() -> None:
    stage = Stage()
    stage.hear(SOURCE, PlanCopy(16, 1, "digest", "{}"))
    assert stage.tick() == [PrepareCore()]
    stage.now_ms += 10 * PREPARE_AFTER_MS
    assert stage.replica.handle(Tick(), stage.now_ms) == []


def test_schedulers_greet_each_other_until_they_are_heard() -> None:
    stage = Stage()
    hello = Send(PeerId("scheduler-0"), SchedulerHello("scheduler-1", BORN))
    assert stage.replica.handle(SchedulerFound(("ipc://s",), PeerId("scheduler-0")), 0.0) == [hello]
    assert stage.replica.handle(Lost(PeerId("scheduler-0"), "refused"), 0.0) == [hello]
    assert stage.hear(OTHER, SchedulerHello("scheduler-0", Incarnation("9"))) == []
    assert CopyPlan((OTHER,)) in stage.take_over()
    assert [one.scheduler_id for one in stage.replica.standing().standbys] == ["scheduler-0"]
    assert stage.replica.plan_changed() == (OTHER,)


def test_a_standby_that_was_lost_is_asked_to_say_hello_again() -> None:
    stage = Stage()
    stage.hear(OTHER, SchedulerHello("scheduler-0", Incarnation("9")))
    (asked,) = stage.replica.handle(Lost(OTHER, "silent"), 0.0)
    assert asked == Send(OTHER, SchedulerHello("scheduler-1", BORN))
    assert stage.hear(PeerId("scheduler-0"), SchedulerHello("scheduler-0", BORN)) == [
        Send(PeerId("scheduler-0"), SchedulerHello("scheduler-1", BORN))
    ]


def alone() -> Stage:
    """Granted by its agent, whose slice is ready."""
    stage = Stage(schedulers=1, number=0)
    stage.hear(FRONTEND, HELLO)
    free = LeaseReport(NODE, 0, "", BORN, is_free=True)
    asked = [one.message for one in stage.hear(AGENT, free) if isinstance(one, Send)]
    asked = asked or [one.message for one in stage.tick() if isinstance(one, Send)]
    (ask,) = asked
    assert isinstance(ask, LeaseAsked)
    stage.hear(AGENT, LeaseReport(NODE, ask.epoch, "scheduler-0", BORN, is_free=False, number=ask.number))
    return stage


def test_one_alone_has_its_core_from_the_start_and_keeps_it() -> None:
    stage = alone()
    (core,) = stage.cores
    stage.node_hello(READY.slice_id)
    stage.slice_ready()
    assert [type(message) for message in core.heard] == [EpochGranted, NodeHello, SliceReady, FrontendHello]
    stage.now_ms = 100 * HELD_MS
    stage.hear(FRONTEND, Arrivals(ModelId("m"), 0, 1, 5.0, 0.0, 0.0, 0.0))
    assert type(core.heard[-1]) is Arrivals


def test_one_alone_lists_no_frontend_before_an_agent_has_granted_it_an_epoch() -> None:
    """What it would list is a cluster without slices: requests were refused NoReplica at each of its starts."""
    stage = Stage(schedulers=1, number=0)
    (core,) = stage.cores
    for at_ms in (0.0, 10.0, 2 * GATHER_FIRST_MS):
        stage.now_ms = at_ms
        stage.hear(FRONTEND, HELLO)
        assert stage.hear(FRONTEND, Arrivals(ModelId("m"), 0, 1, 5.0, 0.0, 0.0, 0.0)) == []
        assert stage.hear(FRONTEND, Ping(4)) == [Send(FRONTEND, Pong(4))], "it is alive"
    assert core.heard == []
    asked = PeerId(f"{OPERATOR}/1"), StatusAsked()
    stage.hear(*asked)
    assert [type(message) for message in core.heard] == [StatusAsked], "people are told"


def test_one_that_stands_by_knows_who_is_active() -> None:
    stage = Stage(schedulers=2, number=1)
    assert stage.replica.standing().active == ""
    stage.hear(AGENT, LeaseReport(NODE, 16, "scheduler-0", BORN, is_free=False))
    assert stage.replica.standing().active == "scheduler-0"
    stage.hear(AGENT, LeaseReport(NODE, 16, "scheduler-0", BORN, is_free=True))
    assert stage.replica.standing().active == ""


def real_core() -> SchedulerCore:
    spec = SliceSpec(READY.slice_id, 0, "emulated", None, (ModelSpec(ModelId("m"), 100.0, 8),))
    return SchedulerCore(SchedulerSettings(spec.models, ((NODE, spec),)), make_discipline("eager", {}))


@pytest.mark.parametrize(
    "message",
    [Ping(1), Arrivals(ModelId("m"), 0, 1, 5.0, 0.0, 0.0, 0.0), Left(ModelId("m"))],
    ids=lambda message: type(message).__name__,
)
def test_a_frontend_hears_nothing_of_a_cluster_that_is_not_known_yet(message: AnyMessage) -> None:
    """By a directory without slices it would give up what runs there, and turn new requests away."""
    settings = ReplicaSettings(BORN, Electorate(frozenset({NODE}), 2), 1)
    stage = Stage()
    stage.replica = SchedulerReplica(settings, real_core)
    stage.hear(FRONTEND, HELLO)
    stage.take_over()
    stage.node_hello(READY.slice_id)
    for peer in (
        FRONTEND,
        peer_id("frontend-1", BORN),
    ):  # the other one's hello was lost, or it was taken for lost
        said = [one for one in stage.hear(peer, message) if isinstance(one, Send)]
        assert not [one for one in said if isinstance(one.message, Directory)]
        if isinstance(message, Ping):
            assert said == [Send(peer, Pong(1))], "it is there"
    opened = [one.message for one in stage.slice_ready() if isinstance(one, Send)]
    (directory,) = [one for one in opened if isinstance(one, Directory) and one.frontends][-1:]
    assert len(directory.slices) == 1


def test_nor_of_a_scheduler_without_a_standby_that_was_started_again() -> None:
    """It has its core, and knows its frontends, before an agent grants it an epoch that they believe."""
    stage = Stage()
    stage.replica = SchedulerReplica(ReplicaSettings(BORN, Electorate(frozenset({NODE}))), real_core)
    stage.hear(FRONTEND, HELLO)
    asked = stage.hear(AGENT, LeaseReport(NODE, 16, "scheduler-0", Incarnation("9"), is_free=True))
    (ask,) = [one.message for one in asked if isinstance(one, Send) and isinstance(one.message, LeaseAsked)]
    granted = LeaseReport(NODE, ask.epoch, "scheduler-0", BORN, is_free=False, number=ask.number)
    said = stage.hear(AGENT, granted)
    assert EpochTaken(stage.replica.epoch) in said
    said += stage.node_hello(READY.slice_id) + stage.hear(FRONTEND, Ping(1))
    stage.now_ms += 5.0
    said += stage.replica.handle(Tick(), stage.now_ms)
    assert not [one for one in said if isinstance(one, Send) and isinstance(one.message, Directory)]
    opened = [one.message for one in stage.slice_ready() if isinstance(one, Send)]
    (directory,) = [one for one in opened if isinstance(one, Directory) and one.frontends][-1:]
    assert len(directory.slices) == 1


def test_frontends_wait_longer_too_while_not_one_agent_has_introduced_itself() -> None:
    stage = Stage()
    stage.hear(FRONTEND, HELLO)
    stage.take_over()
    began_ms = stage.now_ms
    while FrontendHello not in map(type, stage.cores[0].heard):
        for action in stage.tick():
            if isinstance(action, Send) and isinstance(ask := action.message, LeaseAsked):
                granted = LeaseReport(NODE, ask.epoch, "scheduler-1", BORN, is_free=False, number=ask.number)
                stage.hear(AGENT, granted)
    assert stage.now_ms == began_ms + GATHER_FIRST_MS


def test_an_epoch_that_no_election_comes_to_is_an_offence_and_asked_for_by_nobody() -> None:
    """With the greatest one that a message holds every question would be one that cannot be sent."""
    stage = Stage()
    stage.take_over()
    bad = LeaseReport(NODE, INTEGER_MAX, "scheduler-0", BORN, is_free=True)
    actions = stage.hear(AGENT, bad)
    actions += stage.hear(AGENT, NodeHello(NODE, BORN, (), (), False, INTEGER_MAX, "scheduler-0", BORN, True))
    assert not any(isinstance(one, Send) and isinstance(one.message, LeaseAsked) for one in actions)
    assert stage.replica.offences.counters["offences_out_of_range"] == 2


# ---------------------------------------------------------------- what is said early


def large(number: int, worker: PeerId = WORKER) -> SliceReady:
    """Some 90 KiB as a message."""
    replicas = tuple(ReplicaInfo(ModelId(f"m{one}"), 512, (1.5,) * 512) for one in range(20))
    nonce = Incarnation(worker.rpartition("/")[2])
    return replace(READY, slice_id=SliceId(f"a/gpu0/{number}"), incarnation=nonce, replicas=replicas)


def kept(stage: Stage) -> list[SliceReady]:
    return [event.message for event in stage.replica._early.take() if isinstance(event.message, SliceReady)]


@pytest.mark.parametrize("is_active", [False, True])
@pytest.mark.parametrize(
    ("peer", "ready", "reason"),
    [
        (PeerId("anybody/1"), READY, "wrong_identity"),
        (PeerId("worker-a-1/9"), READY, "wrong_identity"),
        (PeerId("worker-b-1/0"), READY, "wrong_identity"),
        (PeerId("worker-b-1/0"), replace(READY, node_id=NodeId("b")), "not_owner"),
    ],
)
def test_what_is_said_early_is_kept_only_of_whom_it_may_come_from(
    peer: PeerId, ready: SliceReady, reason: str, *, is_active: bool
) -> None:
    stage = Stage()
    if is_active:
        stage.take_over()
    stage.hear(peer, replace(ready, epoch=stage.replica.epoch + 16))
    stranger = NodeHello(NodeId("b"), BORN, (), ())
    stage.hear(PeerId("node-b/0"), stranger)
    assert stage.replica.offences.counters[f"offences_{reason}"] == 1
    assert not stage.replica._early.take()


def test_what_is_said_early_is_kept_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said again; who says the same again or is gone takes no room."""
    stage = Stage()
    size = len(packed(large(0)))
    fit = 10
    monkeypatch.setattr("roles.scheduler.availability.early_words.EARLY_BYTES_MAX", fit * size + size // 2)
    for _ in range(3):
        stage.hear(WORKER, large(0))
    for number in range(1, fit + 5):
        stage.hear(WORKER, large(number))
    assert len(kept(stage)) == fit
    other = PeerId("worker-a-2/0")
    for number in range(fit):
        stage.hear(WORKER, large(number))
    stage.hear(other, large(0, other))
    stage.replica.handle(Lost(WORKER, CLOSED), 0.0)
    stage.hear(other, large(1, other))
    assert [ready.slice_id for ready in kept(stage)] == ["a/gpu0/1"]


def test_what_is_said_early_and_is_longer_as_we_would_write_it_is_not_kept() -> None:
    """A peer may write whole numbers for floats, of which each takes us eight bytes more."""
    stage = Stage()
    replica = ReplicaInfo(ModelId("m"), 1, (1,) * ITEMS_MAX)
    heard = unpacked(packed(replace(large(0), replicas=(replica,) * 30)))
    stage.hear(WORKER, heard)
    assert kept(stage) == []
