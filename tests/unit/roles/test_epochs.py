"""What workers, frontends and agents do with words of another epoch than the one that they go by."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from fabric.ids import Epoch, Incarnation, NodeId, PeerId, SliceId
from fabric.messages import (
    Arrivals,
    DesiredSlices,
    Directory,
    Done,
    EpochGranted,
    FrontendHello,
    InputsReturned,
    LeaseAsked,
    LeaseReport,
    NodeHello,
    SliceReady,
    SliceState,
    SliceStatus,
    Withdraw,
)
from roles.frontend.core import FrontendCore
from roles.frontend.events import SchedulerLost, SchedulerSaid, Tell, TurnEnded, UseScheduler
from roles.gpu_worker.events import Execute, JoinScheduler, PushOutputs
from roles.gpu_worker.peer_checks import AGENT
from roles.node_agent.core import AgentSelf, FoundDevices, NodeAgentCore
from roles.node_agent.events import AgentAction, FollowScheduler, Orphan
from roles.node_agent.lease import KeepLease, LeaseKept, LeaseRecord
from roles.runtime.core import SCHEDULER, Heard, Lost, Send, Tick
from roles.runtime.epochs import GRANTED_LEAP_MAX
from roles.runtime.loop.sources import CLOSED
from roles.runtime.process_events import SchedulerFound
from tests.builders import asked, directory, frontend_settings
from tests.worker_builders import SCHEDULER_AT, actions_of, inputs, run_batch, sent, serving_core

FIRST, SECOND = PeerId("scheduler-0"), PeerId("scheduler-1")
BORN = Incarnation("0")

# ---------------------------------------------------------------- a worker


def of_epoch(heard: Heard, epoch: int) -> Heard:
    return replace(heard, epoch=Epoch(epoch))


def granted(epoch: int, addresses: tuple[str, ...] = SCHEDULER_AT) -> Heard:
    return Heard(AGENT, EpochGranted(epoch, addresses))


def test_a_worker_runs_what_has_its_agents_epoch_and_gives_back_all_else() -> None:
    core = serving_core()
    core.handle(granted(33), 0.0)
    for epoch in (0, 16, 48):
        (done,) = sent(Done, core.handle(of_epoch(run_batch(batch_id=epoch + 1), epoch), 1.0))
        assert (done.status, done.ran, bool(done.missing)) == ("expired", 0, True)
    assert core.counters["epochs_refused"] == 3
    core.handle(of_epoch(run_batch(batch_id=5), 33), 1.0)
    assert actions_of(Execute, core.handle(inputs(0, batch_id=5), 2.0))


def test_a_worker_introduces_itself_to_whoever_begins_an_epoch_and_goes_where_that_is() -> None:
    core = serving_core()
    same_place = core.handle(granted(16), 0.0)
    assert len(sent(SliceReady, same_place)) == 1
    assert not actions_of(JoinScheduler, same_place)
    assert core.handle(granted(16), 1.0) == []
    assert actions_of(JoinScheduler, core.handle(granted(33, ("ipc:///other",)), 2.0))


def test_what_a_worker_runs_goes_on_when_the_epoch_ends() -> None:
    core = serving_core()
    core.handle(run_batch(), 0.0)
    assert actions_of(Execute, core.handle(inputs(0), 0.0))
    assert sent(Done, core.handle(granted(33, ("ipc:///other",)), 1.0)) == []


def test_inputs_without_a_batch_go_back_at_once_when_the_epoch_ends() -> None:
    """Their batch is with the former scheduler's connection, which is heard no more."""
    core = serving_core()
    core.handle(granted(16), 0.0)
    core.handle(inputs(3, batch_id=9), 1.0)
    core.handle(of_epoch(run_batch(batch_id=10), 16), 1.0)
    returned = [
        push.message
        for push in actions_of(PushOutputs, core.handle(granted(33, ("ipc:///other",)), 2.0))
        if isinstance(push.message, InputsReturned)
    ]
    assert [(one.batch_id, one.seqs) for one in returned] == [(9, (3,))]
    assert actions_of(Execute, core.handle(inputs(0, batch_id=10), 3.0)), "what has come runs"


# ---------------------------------------------------------------- a frontend


def said(scheduler: int, epoch: int, *, lists_frontend: bool = True) -> SchedulerSaid:
    return replace(directory(lists_frontend=lists_frontend), epoch=epoch, scheduler=scheduler)


def test_a_frontend_goes_by_the_highest_epoch_and_announces_what_was_never_granted() -> None:
    core = FrontendCore(frontend_settings())
    core.handle(said(0, 16), 0.0)
    core.handle(asked(1), 0.0)
    core.handle(TurnEnded(), 0.0)
    actions = core.handle(said(1, 33), 1.0)
    assert UseScheduler(1) in actions
    (again,) = [action.message for action in core.handle(TurnEnded(), 1.0) if isinstance(action, Tell)]
    assert isinstance(again, Arrivals)
    assert (again.first_seq, again.count) == (1, 1)
    assert core.handle(said(0, 16), 2.0) == []
    assert core.counters["epochs_refused"] == 1
    core.handle(SchedulerLost(0), 3.0)
    assert not any(isinstance(a, Tell) for a in core.handle(Tick(), 3.0)), "that one is none of its concern"


def test_a_frontend_announces_again_to_the_same_scheduler_when_that_begins_an_epoch() -> None:
    """It may have lost its lease, and with it all that it knew."""
    core = FrontendCore(frontend_settings())
    core.handle(said(0, 16), 0.0)
    core.handle(asked(1), 0.0)
    core.handle(TurnEnded(), 0.0)
    actions = core.handle(said(0, 32), 1.0)
    told = [
        action.message for action in (*actions, *core.handle(TurnEnded(), 1.0)) if isinstance(action, Tell)
    ]
    assert [type(message) for message in told] == [Withdraw, Arrivals]


def test_a_frontend_that_the_next_scheduler_does_not_list_says_hello_at_once() -> None:
    core = FrontendCore(frontend_settings())
    core.handle(said(0, 16), 0.0)
    core.handle(said(1, 33, lists_frontend=False), 1.0)
    (hello,) = [action.message for action in core.handle(Tick(), 1.0) if isinstance(action, Tell)]
    assert isinstance(hello, FrontendHello)


# ---------------------------------------------------------------- an agent


class Agent:
    def __init__(self, lease: LeaseRecord | None = None) -> None:
        own = AgentSelf(NodeId("a"), BORN) if lease is None else AgentSelf(NodeId("a"), BORN, lease=lease)
        self.core = NodeAgentCore(own, FoundDevices(()))
        self.now_ms = 0.0

    def feed(self, event: object) -> Sequence[AgentAction]:
        return self.core.handle(event, self.now_ms)  # type: ignore[arg-type]  # one of its events

    def ask(self, scheduler: PeerId, epoch: int) -> LeaseRecord:
        asking = LeaseAsked(str(scheduler), BORN, epoch, 1)
        (keep,) = self.feed(Heard(scheduler, asking))
        assert isinstance(keep, KeepLease)
        return keep.record

    def grant(self, scheduler: PeerId, epoch: int) -> Sequence[AgentAction]:
        return self.feed(LeaseKept(self.ask(scheduler, epoch), is_written=True))


def messages(actions: Sequence[AgentAction]) -> list[tuple[PeerId, type]]:
    return [(action.peer, type(action.message)) for action in actions if isinstance(action, Send)]


def found(agent: Agent) -> None:
    agent.feed(SchedulerFound(("ipc://s0",), FIRST))
    agent.feed(SchedulerFound(("ipc://s1",), SECOND))


def test_an_agent_answers_first_and_then_follows_whom_it_granted_an_epoch() -> None:
    agent = Agent()
    found(agent)
    actions = agent.grant(SECOND, 17)
    assert messages(actions)[0] == (SECOND, LeaseReport)
    assert messages(actions)[-1] == (SCHEDULER, NodeHello)
    assert FollowScheduler(SECOND) in actions
    hello = next(a.message for a in actions if isinstance(a, Send) and isinstance(a.message, NodeHello))
    assert (hello.epoch, hello.holder_id, hello.is_lease_free) == (17, "scheduler-1", False)


def test_workers_obey_who_hands_over_until_the_next_one_commands() -> None:
    agent = Agent()
    found(agent)
    agent.grant(FIRST, 16)
    (keep,) = agent.feed(Heard(SECOND, LeaseAsked(str(SECOND), BORN, 33, 1, in_place_of=16)))
    assert isinstance(keep, KeepLease)
    actions = agent.feed(LeaseKept(keep.record, is_written=True))
    told = {(action.peer, type(action.message)) for action in actions if isinstance(action, Send)}
    assert told == {(SECOND, LeaseReport), (FIRST, LeaseReport), (SECOND, NodeHello)}
    assert not any(isinstance(action, FollowScheduler) for action in actions)
    agent.feed(Heard(SCHEDULER, DesiredSlices(1, ()), epoch=Epoch(16)))
    assert agent.core.counters["epochs_refused"] == 1
    assert FollowScheduler(SECOND) in agent.feed(Heard(SCHEDULER, DesiredSlices(1, ()), epoch=Epoch(33)))


def handed_over(agent: Agent, now_ms: float) -> Sequence[AgentAction]:
    """The first one's lease, to the second."""
    asking = LeaseAsked(str(SECOND), BORN, 33, 1, in_place_of=16)
    (keep,) = (one for one in agent.core.handle(Heard(SECOND, asking), now_ms) if isinstance(one, KeepLease))
    return agent.core.handle(LeaseKept(keep.record, is_written=True), now_ms)


def commanded(agent: Agent, now_ms: float) -> list[tuple[PeerId, type]]:
    """What the second one hears when it commands for the first time, beside a status."""
    return messages(agent.core.handle(Heard(SCHEDULER, DesiredSlices(1, ()), epoch=Epoch(33)), now_ms))


def test_a_successor_hears_what_changed_before_it_commanded() -> None:
    for is_changed in (False, True):
        agent = Agent()
        found(agent)
        agent.grant(FIRST, 16)
        handed_over(agent, 0.0)
        if is_changed:
            agent.core._reports._status[SliceId("x")] = SliceStatus(SliceId("x"), BORN, SliceState.READY)
        assert ((SCHEDULER, NodeHello) in commanded(agent, 1.0)) == is_changed


def test_a_successor_hears_nothing_of_slices_before_the_agents_orphans_are_settled() -> None:
    """It would have started them twice."""
    own = AgentSelf(NodeId("a"), BORN, "node-a", 1, True, LeaseRecord(Epoch(16), str(FIRST), BORN))
    orphan = Orphan("worker-a-7", 77, Incarnation("old"), is_mps=False)
    agent = Agent()
    agent.core = NodeAgentCore(own, FoundDevices((), orphans=(orphan,)))
    found(agent)
    said = [*messages(handed_over(agent, 100.0)), *commanded(agent, 101.0)]
    assert NodeHello not in {kind for _, kind in said}


def test_an_agent_whose_holder_gave_up_another_epoch_keeps_to_it() -> None:
    agent = Agent()
    found(agent)
    agent.grant(FIRST, 32)
    (answer,) = agent.feed(Heard(SECOND, LeaseAsked(str(SECOND), BORN, 49, 1, in_place_of=16)))
    assert isinstance(answer, Send)
    assert isinstance(answer.message, LeaseReport)
    assert (answer.message.holder_id, answer.message.is_free) == (FIRST, False)


def test_the_other_schedulers_hear_that_the_lease_is_free_no_more() -> None:
    """Else they ask for it a while later, in vain, and are not yet through with that should the holder be lost then."""
    agent = Agent()
    found(agent)
    told = [(one.peer, one.message) for one in agent.grant(SECOND, 17) if isinstance(one, Send)]
    assert (FIRST, LeaseReport(NodeId("a"), 17, "scheduler-1", BORN, is_free=False)) in told


def test_the_holder_alone_hears_that_its_lease_goes_on_where_a_higher_epoch_cannot_be_written() -> None:
    agent = Agent()
    found(agent)
    agent.grant(FIRST, 16)
    told = agent.feed(LeaseKept(agent.ask(FIRST, 32), is_written=False))
    assert told == [Send(FIRST, LeaseReport(NodeId("a"), 16, "scheduler-0", BORN, is_free=False, number=1))]
    agent.feed(Lost(FIRST, CLOSED))
    assert agent.feed(LeaseKept(agent.ask(SECOND, 33), is_written=False)) == []
    assert (agent.core.counters["epochs_granted"], agent.core.counters["leases_not_kept"]) == (1, 2)


def test_the_other_schedulers_hear_that_a_lease_is_free_whose_asker_was_gone_before_it_was_granted() -> None:
    agent = Agent()
    found(agent)
    record = agent.ask(SECOND, 33)
    agent.feed(Lost(SECOND, CLOSED))
    told = [one for one in agent.feed(LeaseKept(record, is_written=True)) if isinstance(one, Send)]
    assert Send(FIRST, LeaseReport(NodeId("a"), 33, "scheduler-1", BORN, is_free=True)) in told


def test_an_agent_wants_what_its_epoch_wants_and_nothing_else() -> None:
    agent = Agent()
    found(agent)
    agent.grant(SECOND, 17)
    for epoch in (0, 16, 33):
        assert agent.feed(Heard(SCHEDULER, DesiredSlices(1, ()), epoch=Epoch(epoch))) == []
        assert agent.feed(Heard(SCHEDULER, Directory(1, (), (), ()), epoch=Epoch(epoch))) == []
    assert agent.core.counters["epochs_refused"] == 6
    assert agent.core.wake_at_ms is not None
    agent.feed(Heard(SCHEDULER, DesiredSlices(1, ()), epoch=Epoch(17)))
    assert agent.core.counters["epochs_refused"] == 6


def test_all_schedulers_hear_when_the_holders_connection_is_closed() -> None:
    agent = Agent()
    found(agent)
    agent.grant(FIRST, 16)
    assert messages(agent.feed(Lost(SECOND, CLOSED))) == [(SECOND, NodeHello)], "it held nothing"
    told = messages(agent.feed(Lost(FIRST, CLOSED)))
    assert told == [(FIRST, LeaseReport), (SECOND, LeaseReport)]


def test_all_schedulers_hear_when_the_lease_ends() -> None:
    agent = Agent()
    found(agent)
    agent.grant(FIRST, 16)
    agent.now_ms = 500.0
    told = messages(agent.feed(Tick()))
    assert {(FIRST, LeaseReport), (SECOND, LeaseReport)} <= set(told)


def test_an_agent_that_starts_anew_follows_the_holder_it_finds_on_its_disk() -> None:
    agent = Agent(LeaseRecord(Epoch(33), "scheduler-1", BORN))
    first = agent.feed(SchedulerFound(("ipc://s0",), FIRST))
    assert messages(first) == [(FIRST, NodeHello)]
    assert FollowScheduler(FIRST) not in first
    assert FollowScheduler(SECOND) in agent.feed(SchedulerFound(("ipc://s1",), SECOND))


def test_nobody_may_ask_for_a_lease_in_anothers_name() -> None:
    agent = Agent()
    found(agent)
    assert agent.feed(Heard(FIRST, LeaseAsked("scheduler-1", BORN, 17, 1))) == []
    assert agent.core.offences.counters["offences_wrong_identity"] == 1
    assert agent.feed(Heard(PeerId("worker-a-1/0"), LeaseAsked("scheduler-1", BORN, 17, 1))) == []
    assert agent.core.offences.counters["offences_wrong_type"] == 1


def test_an_agent_grants_no_epoch_so_far_up_that_there_would_soon_be_none_above_it() -> None:
    """It would be on its disk for ever. One that has granted none yet takes what the others have come to."""
    agent = Agent(LeaseRecord(Epoch(16), "scheduler-0", BORN))
    found(agent)
    far = 17 + GRANTED_LEAP_MAX
    assert agent.feed(Heard(FIRST, LeaseAsked("scheduler-0", BORN, far, 1))) == []
    assert agent.core.offences.counters["offences_out_of_range"] == 1
    assert agent.grant(FIRST, far - 1)
    fresh = Agent()
    found(fresh)
    assert fresh.grant(FIRST, far)
