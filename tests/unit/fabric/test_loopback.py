from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest

from fabric.errors import LocalProtocolError
from fabric.ids import PeerId
from fabric.link import NamedTensor
from fabric.loopback import LinkConditions, LoopbackLink, LoopbackNetwork
from fabric.messages import Ping

LEFT, RIGHT = PeerId("left/1"), PeerId("right/1")


@dataclass
class HandClock:
    at_ms: float = 0.0

    def now_ms(self) -> float:
        return self.at_ms


def pair(
    conditions: LinkConditions, queue_messages_max: int = 1_000
) -> tuple[HandClock, LoopbackLink, LoopbackLink]:
    clock = HandClock()
    network = LoopbackNetwork(clock, random.Random(7), conditions, queue_messages_max)
    return clock, network.link(LEFT), network.link(RIGHT)


def numbers(link: LoopbackLink) -> list[int]:
    return [received.message.number for received in link.receive(1_000) if isinstance(received.message, Ping)]


def test_a_message_arrives_after_its_delay_and_not_before() -> None:
    clock, left, right = pair(LinkConditions(delay_ms=5))
    assert left.send(RIGHT, Ping(1))
    assert right.next_arrival_at_ms == 5
    assert right.receive(10) == []
    clock.at_ms = 5
    assert right.has_more
    assert numbers(right) == [1]


def test_queueing_shows_as_lateness() -> None:
    clock, left, right = pair(LinkConditions())
    left.send(RIGHT, Ping(1))
    right.receive(1)
    left.send(RIGHT, Ping(2))
    clock.at_ms = 8
    assert right.receive(1)[0].late_ms == 8


def test_jitter_keeps_the_order_and_reordering_breaks_it() -> None:
    clock, left, right = pair(LinkConditions(delay_ms=1, jitter_ms=3))
    for number in range(50):
        left.send(RIGHT, Ping(number))
    clock.at_ms = 100
    assert numbers(right) == list(range(50))

    clock, left, right = pair(LinkConditions(delay_ms=1, reordered_share=0.3))
    for number in range(50):
        left.send(RIGHT, Ping(number))
    clock.at_ms = 100
    came = numbers(right)
    assert came != sorted(came)
    assert sorted(came) == list(range(50))


def test_lost_messages_are_accepted_and_never_arrive() -> None:
    _, left, right = pair(LinkConditions(lost_share=0.5))
    assert all(left.send(RIGHT, Ping(number)) for number in range(100))
    assert 20 < len(numbers(right)) < 80


def test_a_full_queue_refuses() -> None:
    _, left, _ = pair(LinkConditions(), queue_messages_max=3)
    assert [left.send(RIGHT, Ping(number)) for number in range(5)] == [True] * 3 + [False] * 2
    assert left.counters["full_out"] == 2


def test_a_closed_peer_is_refused_and_reported() -> None:
    _, left, right = pair(LinkConditions())
    right.close()
    right.close()
    assert not left.send(RIGHT, Ping(1))
    assert left.take_lost() == [RIGHT]
    assert left.take_lost() == []
    assert not right.send(LEFT, Ping(1))


def test_garbage_is_counted() -> None:
    _, _, right = pair(LinkConditions())
    right.arrive((0.0, 0, LEFT, [b"garbage"]))
    assert right.receive(10) == []
    assert right.counters["garbage_in"] == 1


def test_an_anonymous_sender_is_not_named() -> None:
    network = LoopbackNetwork(HandClock(), random.Random(1))
    pool, slice_ = network.link(PeerId("pool"), is_anonymous=True), network.link(PeerId("node/gpu0/0"))
    tensor = NamedTensor("x", np.arange(3))
    assert pool.send(PeerId("node/gpu0/0"), Ping(1), [tensor])
    received = slice_.receive(1)[0]
    assert received.peer == ""
    np.testing.assert_array_equal(received.tensors[0].array, tensor.array)


def test_what_cannot_be_encoded_fails_here_too() -> None:
    _, left, _ = pair(LinkConditions())
    with pytest.raises(LocalProtocolError):
        left.send(RIGHT, Ping(-1))


def test_the_next_link_is_where_the_next_message_arrives_whatever_was_received_or_overtaken() -> None:
    """Held against a look at every link, after each of many sends, receipts and closes."""
    clock, draws = HandClock(), random.Random(7)
    network = LoopbackNetwork(clock, draws, LinkConditions(1.0, 3.0, reordered_share=0.3, reorder_ms=4.0))
    links = [network.link(PeerId(f"peer-{number}")) for number in range(4)]
    for step in range(3_000):
        link = draws.choice(links)
        match draws.randrange(4):
            case 0 | 1:
                link.send(PeerId(f"peer-{draws.randrange(4)}"), Ping(step))
            case 2:
                link.receive(draws.randint(1, 3))
            case _:
                clock.at_ms += draws.uniform(0.0, 1.0)
        if step == 2_000:
            links.pop().close()
        expecting = [one for one in links if one.queued]
        naive = min(expecting, key=LoopbackLink.next_arrival, default=None)
        assert network.next_link is naive
    assert len(network._arrivals) < 200, "what was received is forgotten"
