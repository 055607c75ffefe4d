"""One scheduler's part in an election, on virtual time; every history of several is in `tests/property/test_election.py`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import pytest
from msgspec.structs import replace

from fabric.ids import Epoch, Incarnation, NodeId, PeerId
from fabric.limits import INTEGER_MAX
from fabric.messages import LeaseAsked, LeaseReport
from roles.runtime.core import Send
from roles.runtime.epochs import (
    BELIEVED_LEAP_MAX,
    EPOCH_MAX,
    GRANTED_LEAP_MAX,
    HELD_MS,
    RENEW_EVERY_MS,
    epoch_above,
)
from roles.runtime.journal import packed
from roles.scheduler.availability.election import (
    AGAIN_AFTER_MS,
    CANDIDATE_MS,
    NEVER_MS,
    STAGGER_MS,
    Election,
    ElectionAction,
    ElectionState,
    Electorate,
    EpochTaken,
    LeaseLapsed,
)

BORN = Incarnation("0")
NODES = tuple(NodeId(name) for name in "abc")


def election(
    number: int = 0, *, nodes: int = 3, schedulers: int = 2, plan_epoch: int = EPOCH_MAX
) -> Election:
    """Of one with the newest plan, unless told otherwise."""
    one = Election(number, BORN, Electorate(frozenset(NODES[:nodes]), schedulers))
    one.plan_epoch = plan_epoch
    return one


def agent(name: str, born: str = "0") -> PeerId:
    return PeerId(f"node-{name}/{born}")


def free(name: str, epoch: int = 0, holder: str = "") -> LeaseReport:
    return LeaseReport(NodeId(name), epoch, holder, BORN, is_free=True)


def held(name: str, epoch: int, holder: int, question: int = 0) -> LeaseReport:
    return LeaseReport(NodeId(name), epoch, f"scheduler-{holder}", BORN, is_free=False, number=question)


def asked(actions: Sequence[ElectionAction]) -> dict[str, LeaseAsked]:
    found: dict[str, LeaseAsked] = {}
    for action in actions:
        if isinstance(action, Send):
            assert isinstance(action.message, LeaseAsked)
            found[action.peer] = action.message
    return found


def hear(one: Election, reports: Sequence[LeaseReport], now_ms: float) -> list[ElectionAction]:
    return [action for report in reports for action in one.heard(agent(report.node_id), report, now_ms)]


def answer(one: Election, asks: dict[str, LeaseAsked], names: str, now_ms: float) -> list[ElectionAction]:
    """These agents grant what they were asked for."""
    return hear(
        one,
        [
            held(
                name,
                asks[agent(name)].epoch,
                int(asks[agent(name)].scheduler_id[-1]),
                asks[agent(name)].number,
            )
            for name in names
        ],
        now_ms,
    )


def active(one: Election, now_ms: float = 0.0) -> Election:
    """It has asked at that moment, and two of three agents have granted."""
    asks = asked(hear(one, [free("a"), free("b")], now_ms))
    if not asks:
        now_ms = one.wake_at_ms
        asks = asked(one.tick(now_ms))
    answer(one, asks, "ab", now_ms)
    assert one.state is ElectionState.ACTIVE
    return one


def test_an_epoch_names_its_scheduler_and_is_above_the_highest() -> None:
    assert [epoch_above(0, 0), epoch_above(0, 3), epoch_above(16, 0), epoch_above(19, 1)] == [16, 19, 32, 33]


def test_it_campaigns_when_a_majority_is_free_and_a_majority_makes_it_active() -> None:
    one = election()
    assert hear(one, [free("a")], 0.0) == []
    asks = asked(hear(one, [free("b")], 1.0))
    assert {peer: message.epoch for peer, message in asks.items()} == {agent("a"): 16, agent("b"): 16}
    assert answer(one, asks, "a", 2.0) == []
    assert answer(one, asks, "b", 3.0)[0] == EpochTaken(Epoch(16))
    assert (one.epoch, one.state) == (16, ElectionState.ACTIVE)
    assert one.lapses_at_ms == 1.0 + HELD_MS, "counted from before it asked"


def test_a_higher_number_lets_the_lower_ones_go_first() -> None:
    one = election(1)
    assert hear(one, [free("a"), free("b", 16, "scheduler-0")], 0.0) == []
    assert one.wake_at_ms == STAGGER_MS
    assert hear(one, [held("a", 16, 0), held("b", 16, 0)], 5.0) == []
    assert one.wake_at_ms == NEVER_MS
    assert one.tick(100.0) == () or list(one.tick(100.0)) == []


@pytest.mark.parametrize("schedulers", [2, 3])
def test_whose_plan_is_of_the_epoch_granted_last_goes_first_and_who_has_none_last(schedulers: int) -> None:
    def waits_ms(number: int, plan_epoch: int) -> float:
        one = election(number, schedulers=schedulers, plan_epoch=plan_epoch)
        hear(one, [free("a", 16, "scheduler-0"), free("b", 33, "scheduler-1")], 0.0)
        return 0.0 if one.state is ElectionState.CANDIDATE else one.wake_at_ms

    numbers = range(schedulers)
    order = [waits_ms(number, plan_epoch) for plan_epoch in (33, 16, 0) for number in numbers]
    assert order == [STAGGER_MS * place for place in range(3 * schedulers)]


def test_a_grant_of_a_minority_makes_no_plan_older() -> None:
    """An agent that is away may have granted it too."""
    epochs = {"a": 50, "b": 33, "c": 33}

    def waits_ms(names: str, plan_epoch: int) -> float:
        one = election(plan_epoch=plan_epoch)
        one.has_plan = False  # it waits for it once its moment has come, and asks nobody
        hear(one, [free(name, epochs[name], "scheduler-1") for name in names], 0.0)
        return one.wake_at_ms

    assert {waits_ms("".join(names), 33) for names in permutations("abc")} == {0.0}
    assert {waits_ms("".join(names), 16) for names in permutations("abc")} == {2 * STAGGER_MS}
    assert waits_ms("ab", 33) == 2 * STAGGER_MS


@pytest.mark.parametrize(("plan_epoch", "lacking"), [(33, 0), (16, 1), (0, 2)])
def test_nodes_that_are_new_make_no_plan_the_newest(plan_epoch: int, lacking: int) -> None:
    """One node granted 33; the file has two more since, and all hosts start again."""
    one = election(plan_epoch=plan_epoch)
    one.has_plan = False
    hear(one, [free("a", 33, "scheduler-1"), free("b"), free("c")], 0.0)
    assert one.wake_at_ms == lacking * 2 * STAGGER_MS


@pytest.mark.parametrize("plan_epoch", [0, 16])
def test_who_lacks_the_newest_plan_waits_for_its_own_leases_to_end(plan_epoch: int) -> None:
    """Others, that have it, do as well."""
    own = [held(name, 33, 0) for name in "abc"]
    assert asked(hear(election(plan_epoch=33), own, 0.0))
    one = election(plan_epoch=plan_epoch)
    assert (hear(one, own, 0.0), one.wake_at_ms) == ([], NEVER_MS)
    hear(one, [free("a", 33, "scheduler-0"), free("b", 33, "scheduler-0")], 500.0)
    assert one.wake_at_ms >= 500.0 + 2 * STAGGER_MS
    assert asked(one.tick(one.wake_at_ms))


def test_what_it_was_granted_itself_has_a_plan() -> None:
    one = active(election(plan_epoch=0))
    assert asked(one.tick(one.lapses_at_ms)), "at once, as nobody has a newer one"


def test_without_a_standby_nobody_goes_first() -> None:
    one = election(schedulers=1, plan_epoch=0)
    assert asked(hear(one, [free("a", 16, "scheduler-0")], 0.0))


def test_it_asks_for_more_than_it_has_heard_of() -> None:
    one = election()
    asks = asked(hear(one, [free("a", 33, "scheduler-1"), free("b")], 0.0))
    assert {message.epoch for message in asks.values()} == {48}


def test_an_active_one_renews_and_lapses_without_a_majority() -> None:
    one = active(election())
    asks = asked(one.tick(RENEW_EVERY_MS))
    assert set(asks) == {agent("a"), agent("b")}
    answer(one, asks, "a", RENEW_EVERY_MS + 10)
    assert one.lapses_at_ms == HELD_MS, "one of three is not enough"
    answer(one, asks, "b", RENEW_EVERY_MS + 20)
    assert one.lapses_at_ms == RENEW_EVERY_MS + HELD_MS
    actions = one.tick(one.lapses_at_ms)
    assert actions[0] == LeaseLapsed()


def test_an_answer_to_an_older_question_counts_from_when_that_was_asked() -> None:
    one = active(election())
    first = asked(one.tick(RENEW_EVERY_MS))
    asked(one.tick(2 * RENEW_EVERY_MS))
    answer(one, first, "ab", 2 * RENEW_EVERY_MS + 1)
    assert one.lapses_at_ms == RENEW_EVERY_MS + HELD_MS


def test_agents_that_come_later_are_asked_at_once() -> None:
    one = active(election())
    asks = asked(hear(one, [free("c")], 50.0))
    assert list(asks) == [agent("c")]


def test_an_agent_that_has_a_higher_epoch_makes_it_ask_all_for_a_still_higher_one() -> None:
    one = active(election())
    assert hear(one, [held("c", 17, 1)], 50.0)[:0] == []
    asks = asked(hear(one, [LeaseReport(NodeId("c"), 17, "scheduler-1", BORN, is_free=True)], 60.0))
    assert {message.epoch for message in asks.values()} == {32}
    assert set(asks) == {agent("a"), agent("b"), agent("c")}
    assert answer(one, asks, "ac", 70.0) == [EpochTaken(one.epoch)]
    assert (one.epoch, one.takeovers) == (32, 1)


def test_a_campaign_that_fails_is_tried_again_later() -> None:
    one = election()
    hear(one, [free("a"), free("b")], 0.0)
    assert asked(one.tick(CANDIDATE_MS)) == {}
    assert one.state is ElectionState.STANDBY
    again = asked(one.tick(CANDIDATE_MS + AGAIN_AFTER_MS))
    assert {message.epoch for message in again.values()} == {32}


def test_grants_for_which_another_one_stops_are_not_too_late() -> None:
    """Agents may write for longer than a campaign lasts: who hands over serves meanwhile, and stops when they have."""
    one, former = election(1), active(election(0))
    hear(one, [held("a", 16, 0), held("b", 16, 0)], 0.0)
    former.leave("scheduler-1")
    asks = asked(one.take_over(former.epoch, 0.0))
    one.tick(CANDIDATE_MS)
    reports = [held(name, 33, 1, asks[agent(name)].number) for name in "ab"]
    late_ms = HELD_MS - 1.0
    former.heard(agent("c"), held("c", 16, 0), 100.0)
    assert EpochTaken(Epoch(33)) in hear(one, reports, late_ms)


def test_a_lost_agents_grant_ends_by_itself() -> None:
    one = active(election())
    assert list(one.lost(agent("a"), 10.0)) == []
    assert one.state is ElectionState.ACTIVE
    assert set(asked(one.tick(RENEW_EVERY_MS))) == {agent("b")}
    assert one.tick(HELD_MS)[0] == LeaseLapsed()


def test_answers_of_a_former_connection_do_not_count() -> None:
    one = active(election())
    asks = asked(one.tick(RENEW_EVERY_MS))
    one.lost(agent("a"), RENEW_EVERY_MS + 1)
    one.heard(agent("a", "1"), held("a", 16, 0), RENEW_EVERY_MS + 2)
    stale = held("a", 16, 0, asks[agent("a")].number)
    one.heard(agent("a", "1"), stale, RENEW_EVERY_MS + 3)
    answer(one, asks, "b", RENEW_EVERY_MS + 4)
    assert one.lapses_at_ms == HELD_MS


def test_without_a_standby_one_agent_is_enough_and_its_loss_no_reason_to_stop() -> None:
    one = election(schedulers=1)
    asks = asked(hear(one, [free("a")], 0.0))
    assert answer(one, asks, "a", 1.0)[0] == EpochTaken(Epoch(16))
    one.lost(agent("a"), 2.0)
    one.tick(10 * HELD_MS)
    assert one.state is ElectionState.ACTIVE


def test_without_a_standby_it_takes_over_from_its_former_process_at_once() -> None:
    one = Election(0, Incarnation("1"), Electorate(frozenset(NODES), 1))
    asks = asked(hear(one, [held("a", 16, 0)], 0.0))
    assert asks[agent("a")].epoch == 32


def test_an_agent_with_the_former_processs_epoch_gets_a_higher_one() -> None:
    """It was away when the new process asked the others, for the very number that this one had been granted."""
    one = Election(0, Incarnation("1"), Electorate(frozenset(NODES), 1))
    asks = asked(hear(one, [free("b")], 0.0))
    message = asks[agent("b")]
    report = LeaseReport(NodeId("b"), message.epoch, "scheduler-0", Incarnation("1"), False, message.number)
    assert hear(one, [report], 1.0)[0] == EpochTaken(Epoch(16))
    late = asked(hear(one, [held("a", 16, 0)], 2.0))
    assert {ask.epoch for ask in late.values()} >= {32}


def test_nodes_that_the_configuration_does_not_have_do_not_vote() -> None:
    one = election()
    assert list(one.heard(PeerId("node-x/0"), free("x"), 0.0)) == []
    assert list(one.heard(PeerId("node-y/0"), free("y"), 0.0)) == []


# ---------------------------------------------------------------- an agent that names an epoch far up


def sendable(actions: Sequence[ElectionAction]) -> dict[str, LeaseAsked]:
    """What was asked, each question as a message has to hold it."""
    asks = asked(actions)
    for message in asks.values():
        packed(message)
    return asks


@pytest.mark.parametrize(("nodes", "schedulers"), [(1, 2), (2, 1), (2, 2), (3, 1), (3, 2), (5, 2)])
@pytest.mark.parametrize(
    "far", [BELIEVED_LEAP_MAX + 17, INTEGER_MAX // 2, EPOCH_MAX - 1, EPOCH_MAX + 1, INTEGER_MAX]
)
def test_an_agents_word_alone_takes_nobody_to_where_epochs_end(nodes: int, schedulers: int, far: int) -> None:
    """A bad one says so of its node, and then the true one is back: who is active stays that, or is it again."""
    one = Election(0, BORN, Electorate(frozenset("abcde"[:nodes]), schedulers))  # type: ignore[arg-type]  # node ids
    liar, others = "abcde"[nodes - 1], "abcde"[: nodes - 1]
    names = others or liar
    now_ms = 0.0
    asks = sendable(hear(one, [free(name) for name in names], now_ms))
    answer(one, asks, "".join(name for name in names if agent(name) in asks), now_ms)
    if one.state is not ElectionState.ACTIVE:  # the last one's vote is needed
        hear(one, [free(liar)], now_ms)
        asks = sendable(one.tick(now_ms))
    bad = replace(free(liar, far, "scheduler-1"), incarnation=Incarnation("bad"))

    def goes_on(names: str, *liars: LeaseReport) -> None:
        """For 2 s the agents of that name grant what is not too far up for them."""
        nonlocal now_ms
        for _ in range(40):
            now_ms += 50.0
            for report in liars:
                asks.update(sendable(one.heard(agent(liar, "bad"), report, now_ms)))
            asks.update(sendable(one.tick(now_ms)))
            near = [name for name in names if 0 < epoch_asked(name) <= GRANTED_LEAP_MAX]
            asks.update(sendable(answer(one, asks, "".join(near), now_ms)))

    def epoch_asked(name: str) -> int:
        return asks[agent(name)].epoch if agent(name) in asks else 0

    goes_on(others, bad)
    if 2 * len(others) > nodes or schedulers == 1:
        assert (one.state, one.epoch) == (ElectionState.ACTIVE, 16), "the others are enough"
    sendable(one.lost(agent(liar, "bad"), now_ms))
    asks |= sendable(one.heard(agent(liar), free(liar), now_ms))
    goes_on(others + liar)
    assert one.state is ElectionState.ACTIVE


def test_what_a_majority_has_come_to_is_believed_however_far_it_is() -> None:
    one = election()
    far = 5 * BELIEVED_LEAP_MAX
    assert hear(one, [free("a", far, "scheduler-1")], 0.0) == []
    assert not one.believes(NodeId("a"))
    asks = asked(hear(one, [free("b", far, "scheduler-1")], 1.0))
    assert one.believes(NodeId("a"))
    assert {message.epoch for message in asks.values()} == {epoch_above(far, 0)}
