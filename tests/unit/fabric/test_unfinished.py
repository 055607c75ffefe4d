"""Which connections are ended for messages that they have begun: real connections, and a clock that the test moves."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from fabric.clock import VirtualClock
from fabric.sockets.monitor import StandingConnection
from fabric.sockets.options import LinkOptions
from fabric.sockets.unfinished import (
    HANDSHAKE_BYTES,
    LOOK_EVERY_MS,
    REFUSED_BYTES,
    TOGETHER_TIMES,
    TURNS,
    UnfinishedMessages,
)
from fabric.tcp_connections import carried_by

HEADER_BYTES = 100_000
MUCH = TOGETHER_TIMES * HEADER_BYTES // 10
"""Of ten who have begun so much each nobody need be ended."""


class Stage:
    """What listens, and what has connected to it."""

    def __init__(self, *, asks_for_keys: bool = False) -> None:
        self.clock = VirtualClock(0.0)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.standing: dict[int, StandingConnection] = {}
        options = LinkOptions(clock=self.clock, header_bytes_max=HEADER_BYTES, payload_bytes_max=0)
        self.unfinished = UnfinishedMessages(
            self.standing, options, {self.listener.getsockname()[1]}, asks_for_keys=asks_for_keys
        )
        self.pairs: list[tuple[socket.socket, socket.socket]] = []

    def connect(self, key: str = "") -> int:
        """The descriptor at our end; `key`: by which a message has come."""
        theirs = socket.create_connection(self.listener.getsockname())
        ours, _ = self.listener.accept()
        self.pairs.append((theirs, ours))
        self.standing[ours.fileno()] = StandingConnection()
        if key:
            self.unfinished.spoke(ours.fileno(), key)
        return ours.fileno()

    def take(self, descriptor: int, size: int) -> None:
        """The other end sends so much, and it is taken here."""
        theirs, ours = next(pair for pair in self.pairs if pair[1].fileno() == descriptor)
        while size:
            theirs.sendall(bytes(min(size, 10_000)))
            size -= len(ours.recv(min(size, 10_000), socket.MSG_WAITALL))

    def acknowledged(self, descriptor: int) -> int:
        carried = carried_by(descriptor, {self.listener.getsockname()[1]})
        assert carried is not None
        return carried.acknowledged

    def look(self, *, is_all_taken: bool = True) -> int:
        self.clock.advance(self.clock.now_ms() + LOOK_EVERY_MS)
        assert self.unfinished.is_due
        return self.unfinished.look(is_all_taken=is_all_taken)

    def close(self) -> None:
        self.listener.close()
        for pair in self.pairs:
            for one in pair:
                one.close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.close()


def test_what_was_taken_at_one_look_is_judged_at_the_next(stage: Stage) -> None:
    whole, endless = stage.connect(), stage.connect()
    for descriptor in (whole, endless):
        stage.take(descriptor, 2 * HEADER_BYTES)
    assert stage.look() == 0, "its end may have been on its way"
    stage.unfinished.ends(whole)
    assert stage.look() == 1
    assert list(stage.standing) == [whole]
    stage.take(whole, HEADER_BYTES)
    assert (stage.look(), stage.look()) == (0, 0)


def test_where_something_always_waits_nobody_is_judged_before_all_had_their_turn(stage: Stage) -> None:
    endless, flood, third = stage.connect(), stage.connect(), stage.connect()
    stage.take(endless, 2 * HEADER_BYTES)
    assert stage.look() == 0
    stage.unfinished.ends(flood)
    for _ in range(TURNS):
        assert stage.look(is_all_taken=False) == 0
        stage.unfinished.ends(flood)
        stage.unfinished.ends(third)
    assert stage.look(is_all_taken=False) == 1
    assert endless not in stage.standing
    assert not stage.unfinished.is_due


def test_whoever_has_begun_most_pays_for_what_is_too_much(stage: Stage) -> None:
    """His connections, though another's is larger; all of them go on growing."""
    friend = stage.connect("friend")
    many = [stage.connect("mallory") for _ in range(20)]
    for _ in range(3):
        stage.take(friend, 2 * MUCH // 3)
        for descriptor in many:
            if descriptor in stage.standing:
                stage.take(descriptor, MUCH // 3)
        stage.look()
    assert stage.look() > 0
    assert friend in stage.standing
    assert 5 < sum(descriptor in stage.standing for descriptor in many) < 11


def test_of_those_of_one_owner_those_that_stand_still_are_ended_first(stage: Stage) -> None:
    """Without keys all who come from one address are one."""
    still = [stage.connect() for _ in range(12)]
    for descriptor in still:
        stage.take(descriptor, 9 * MUCH // 12)
    stage.look()
    growing = stage.connect()
    for _ in range(8):
        stage.take(growing, MUCH // 4)
        stage.look()
    assert growing in stage.standing
    assert len(stage.standing) < 13


def test_where_keys_are_asked_for_a_handshake_may_have_what_one_needs() -> None:
    """Its end is known by what the other side has got of ours."""
    with closing(Stage(asks_for_keys=True)) as stage:
        friend, stranger, small = stage.connect(), stage.connect(), stage.connect()
        theirs, ours = stage.pairs[0]
        ours.sendall(bytes(REFUSED_BYTES + 10))
        theirs.recv(1_000)
        for _, other in stage.pairs[1:]:
            other.sendall(bytes(REFUSED_BYTES - 10))
        while stage.acknowledged(friend) <= REFUSED_BYTES:
            pass
        stage.take(small, HANDSHAKE_BYTES)
        for descriptor in (friend, stranger):
            stage.take(descriptor, HANDSHAKE_BYTES + 1)
        assert stage.look() == 1
        assert set(stage.standing) == {friend, small}
        assert stage.look() == 0


def test_nobody_is_ended_for_a_message_that_has_ended_since_he_was_looked_at(stage: Stage) -> None:
    """Of many connections each is looked at only now and then."""
    honest, *others = (stage.connect(f"key {number}") for number in range(5))
    for descriptor in (honest, *others):
        stage.standing[descriptor].unfinished = HEADER_BYTES
    stage.unfinished.ends(honest)
    assert stage.unfinished._end_over() == 0
    assert honest in stage.standing


def test_many_connections_are_looked_at_in_turn(stage: Stage) -> None:
    descriptors = [stage.connect() for _ in range(150)]
    for descriptor in descriptors:
        stage.take(descriptor, 2 * HEADER_BYTES)
    assert sum(stage.look() for _ in range(5)) == 150
