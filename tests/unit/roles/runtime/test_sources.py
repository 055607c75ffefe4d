"""What a role hears of a watched link, on virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import pytest

from fabric.ids import PeerId
from fabric.link import Received
from fabric.loopback import LoopbackLink, LoopbackNetwork
from fabric.messages import Ping, Pong, StatusAsked
from roles.runtime.core import Heard, Lost
from roles.runtime.loop.client_source import ClientLinkSource
from roles.runtime.loop.sources import CLOSED, REFUSED, LinkSource, WatchedLinkSource

OWN, PEER = PeerId("scheduler"), PeerId("frontend-0/1")


@dataclass
class HandClock:
    at_ms: float = 0.0

    def now_ms(self) -> float:
        return self.at_ms


def test_a_peer_that_was_lost_and_comes_back_is_not_late_by_the_time_its_clock_stood_still() -> None:
    clock, theirs = HandClock(), HandClock()
    network = LoopbackNetwork(clock, random.Random(1))
    own, peer = network.link(OWN), network.link(PEER)
    source = WatchedLinkSource(own, clock)

    def say() -> Heard:
        network.clock = theirs  # stamped by the peer's own clock
        peer.send(OWN, StatusAsked())
        network.clock = clock
        (heard,) = source.take(10, clock.at_ms)
        assert isinstance(heard, Heard)
        return heard

    say()
    for _ in range(100):  # its host sleeps, and its clock with it
        clock.at_ms += 100.0
        if any(isinstance(event, Lost) for event in source.take(10, clock.at_ms)):
            break
    else:
        raise AssertionError("nobody noticed")
    assert say().late_ms == 0.0


def test_who_is_lost_is_told_of_before_what_comes_by_its_next_connection() -> None:
    clock = HandClock()
    network = LoopbackNetwork(clock, random.Random(1))
    own, peer = network.link(OWN), network.link(PEER)
    watched, heard = WatchedLinkSource(own, clock), LinkSource(own, lambda one: one.message, lambda one: one)
    for source in (watched, heard):
        peer.close()
        own.send(PEER, StatusAsked())
        peer = network.link(PEER)
        peer.send(OWN, StatusAsked())
        first, second = source.take(10, clock.at_ms)
        assert first in (PEER, Lost(PEER, CLOSED))
        assert second in (StatusAsked(), Heard(PEER, StatusAsked()))


def test_a_core_hears_of_a_heartbeat_that_is_the_first_thing_a_peer_says() -> None:
    clock = HandClock()
    network = LoopbackNetwork(clock, random.Random(1))
    own, peer = network.link(OWN), network.link(PEER)
    source = WatchedLinkSource(own, clock)
    for message in (Ping(7), Ping(8)):
        peer.send(OWN, message)
    assert list(source.take(10, clock.at_ms)) == [Heard(PEER, Ping(7))]
    answers = [one.message for one in peer.receive(10)]
    assert answers[0] == Pong(8)


def test_a_peer_that_missed_what_it_had_to_hear_is_lost_and_begins_anew_with_its_next_word() -> None:
    clock = HandClock()
    network = LoopbackNetwork(clock, random.Random(1))
    own, peer = network.link(OWN), network.link(PEER)
    source = WatchedLinkSource(own, clock)
    peer.send(OWN, StatusAsked())
    source.take(10, clock.at_ms)
    source.give_up(PEER)
    had_more = source.has_more
    assert had_more
    assert list(source.take(10, clock.at_ms)) == [Lost(PEER, REFUSED)]
    assert not source.has_more
    peer.send(OWN, Ping(7))
    assert list(source.take(10, clock.at_ms)) == [Heard(PEER, Ping(7))], (
        "the core hears of it, whatever it says"
    )


def test_a_source_knows_how_long_it_has_left_something_to_be_read() -> None:
    clock = HandClock()
    network = LoopbackNetwork(clock, random.Random(1))
    own, peer = network.link(OWN), network.link(PEER)
    source = LinkSource(own, lambda one: one.message)
    backlogs_ms = []
    for came, at_ms in ((5, 0.0), (0, 3.0), (0, 4.0), (2, 9.0), (3, 50.0), (0, 60.0), (3, 61.0)):
        clock.at_ms = at_ms
        for _ in range(came):
            peer.send(OWN, StatusAsked())
        source.take(2, at_ms)
        backlogs_ms.append(source.backlog_ms)
    # 3, 1 and 0 are left of the five; two at once are all there is; one is left of the three, and then nothing.
    assert backlogs_ms == [0.0, 3.0, 4.0, 0.0, 0.0, 10.0, 0.0]


def test_what_is_always_busy_is_not_behind_while_each_message_waits_little() -> None:
    """As many come as are read, and some are always left: one waits for four turns, however long that goes on. Then too few are read."""
    clock = HandClock()
    network = LoopbackNetwork(clock, random.Random(1))
    own, peer = network.link(OWN), network.link(PEER)
    waited_ms: list[float] = []

    def note(received: Received) -> None:
        waited_ms.append(source.waited_ms(received))

    source: LinkSource[None] = LinkSource(own, note)
    peer.send(OWN, StatusAsked())
    source.take(2, 0.0)
    for turn in range(400):
        clock.at_ms += 1.0
        for _ in range(10 if not turn else 2 if turn < 300 else 4):
            peer.send(OWN, StatusAsked())
        source.take(2, clock.at_ms)
        if turn == 299:
            assert source.backlog_ms > 290.0
            assert 3.0 <= waited_ms[-1] <= 5.0
            assert max(waited_ms) <= 5.0
    assert 50.0 <= waited_ms[-1] <= 60.0


def _lateness_of_clients(own: LoopbackLink, clock: HandClock) -> Callable[[], list[float]]:
    source = ClientLinkSource[float](own, clock, lambda one: one.late_ms)
    return lambda: list(source.take(10, clock.at_ms))


def _lateness_of_watched(own: LoopbackLink, clock: HandClock) -> Callable[[], list[float]]:
    source = WatchedLinkSource(own, clock)
    return lambda: [one.late_ms for one in source.take(10, clock.at_ms) if isinstance(one, Heard)]


@pytest.mark.parametrize("listened", [_lateness_of_clients, _lateness_of_watched])
@pytest.mark.parametrize("slept_ms", [15.0, 400.0, 1_200.0])
def test_a_peer_whose_host_slept_is_late_for_a_second_at_most(
    listened: Callable[[LoopbackLink, HandClock], Callable[[], list[float]]], slept_ms: float
) -> None:
    """And whose connection stands, so that nobody has lost it."""
    clock, theirs = HandClock(), HandClock()
    network = LoopbackNetwork(clock, random.Random(1))
    own, peer = network.link(OWN), network.link(PEER)
    heard = listened(own, clock)

    def say(message: StatusAsked | Pong) -> None:
        network.clock = theirs
        peer.send(OWN, message)
        network.clock = clock

    def turn(ms: float, *, is_asleep: bool = False) -> float:
        """It says something, and answers what it was asked."""
        clock.at_ms += ms
        theirs.at_ms += 0.0 if is_asleep else ms
        say(StatusAsked())
        (late_ms,) = heard()
        for one in peer.receive(10):
            if isinstance(one.message, Ping):
                say(Pong(one.message.number))
        heard()
        return late_ms

    assert all(turn(20.0) == 0.0 for _ in range(200))
    assert turn(slept_ms, is_asleep=True) == slept_ms
    late_for_ms = next(20.0 * turns for turns in count(1) if turn(20.0) < 1.0)
    assert late_for_ms <= 1_020.0
    assert own.counters["messages_out"] <= 6
