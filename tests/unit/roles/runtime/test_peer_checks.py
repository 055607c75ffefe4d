"""What becomes of those who say what they may not."""

from __future__ import annotations

import pytest

from fabric import frames
from fabric.errors import RemoteProtocolError
from fabric.ids import Incarnation, PeerId
from fabric.messages import AnyMessage, Ping, StatusAsked, Stop
from roles.runtime.core import PLANNER, SCHEDULER
from roles.runtime.peer_checks import (
    CUT_OFF_MS,
    LINE_EVERY_MS,
    LINES_A_SECOND,
    NOT_OWNER,
    OFFENCES_MAX,
    OFFENDERS_MAX,
    WINDOW_MS,
    Offences,
    PeerChecks,
    Verdict,
    anybody,
    require_identity,
)

STRANGER, OTHER = PeerId("stranger/1"), PeerId("other/1")
ERROR = RemoteProtocolError("it is not its batch", NOT_OWNER)


def refuse(peer: PeerId, message: AnyMessage) -> None:
    raise ERROR


def checks(trusted: frozenset[PeerId] = frozenset()) -> PeerChecks:
    return PeerChecks({Ping: anybody, StatusAsked: refuse}, Offences(), trusted)


def test_what_has_no_rule_is_refused_and_counted() -> None:
    on = checks()
    assert on.check(STRANGER, Ping(1), 0.0) is None
    assert on.check(STRANGER, Stop(0.0), 0.0) is Verdict.IGNORE
    assert on.check(STRANGER, StatusAsked(), 0.0) is Verdict.IGNORE
    assert on.offences.counters == {"offences_wrong_type": 1, "offences_not_owner": 1}


def test_who_offends_too_often_is_not_heard_for_a_while() -> None:
    on = checks()
    verdicts = [on.check(STRANGER, StatusAsked(), 0.0) for _ in range(OFFENCES_MAX)]
    assert verdicts == [Verdict.IGNORE] * (OFFENCES_MAX - 1) + [Verdict.CUT_OFF]
    assert on.check(STRANGER, Ping(1), CUT_OFF_MS - 1.0) is Verdict.IGNORE
    assert on.check(OTHER, Ping(1), 0.0) is None, "others are heard"
    assert on.offences.counters["peers_cut_off"] == 1
    assert on.offences.counters["messages_ignored"] == 1
    assert on.check(STRANGER, Ping(1), CUT_OFF_MS) is None


def test_a_few_offences_are_forgotten() -> None:
    on = checks()
    for minute in range(4):
        for _ in range(OFFENCES_MAX - 1):
            assert on.check(STRANGER, StatusAsked(), minute * (WINDOW_MS + 1.0)) is Verdict.IGNORE


def test_a_server_of_ours_is_never_cut_off() -> None:
    on = checks(frozenset({STRANGER}))
    verdicts = {on.check(STRANGER, StatusAsked(), 0.0) for _ in range(4 * OFFENCES_MAX)}
    assert verdicts == {Verdict.IGNORE}


def test_a_peer_has_one_line_a_second_in_the_log() -> None:
    offences = Offences()
    for step in range(30):
        offences.note(STRANGER, ERROR, step * LINE_EVERY_MS / 10, may_cut_off=False)
    first, second, third = offences.lines
    assert first == "message_refused peer=stranger/1 reason=not_owner times=1 text='it is not its batch'"
    assert "times=10" in second
    assert "times=10" in third


def test_a_peer_of_many_names_does_not_fill_the_log_nor_the_tables() -> None:
    offences = Offences()
    told = 0
    for number in range(3 * OFFENDERS_MAX):
        for _ in range(1 + number % 2 * OFFENCES_MAX):
            offences.note(PeerId(f"stranger/{number}"), ERROR, 0.0)
            told += len(offences.lines)
            offences.lines.clear()
    assert told == LINES_A_SECOND
    assert len(offences) <= 2 * OFFENDERS_MAX


def test_who_is_lost_is_forgotten_and_who_is_cut_off_after_its_minute() -> None:
    on = checks()
    for number in range(5):
        on.check(PeerId(f"stranger/{number}"), StatusAsked(), 0.0)
        on.offences.forget(PeerId(f"stranger/{number}"))
    assert len(on.offences) == 0
    for at_ms in (0.0, 1.0):
        for _ in range(OFFENCES_MAX):
            on.check(PeerId(f"stranger/{at_ms}"), StatusAsked(), at_ms)
        on.offences.forget(PeerId(f"stranger/{at_ms}"))
    assert len(on.offences) == 2, "it could be back at once"
    on.check(OTHER, Ping(1), CUT_OFF_MS)
    assert list(on.offences.cut_off) == ["stranger/1.0"]
    on.check(OTHER, Ping(1), CUT_OFF_MS + 1.0)
    assert len(on.offences) == 0


def test_a_claim_must_fit_the_identity() -> None:
    require_identity(PeerId("frontend-0/a"), "frontend-0", Incarnation("a"))
    with pytest.raises(RemoteProtocolError, match="frontend-0/b"):
        require_identity(PeerId("frontend-0/a"), "frontend-0", Incarnation("b"))


@pytest.mark.parametrize("name", [PLANNER, SCHEDULER, "agent", "/1", "worker/"])
def test_nobody_outside_has_a_name_that_is_given_inside(name: str) -> None:
    with pytest.raises(RemoteProtocolError):
        frames.peer_from(name.encode())
