"""The hub: a router for peers elsewhere and queues for those of this process, which cannot be told apart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fabric.errors import LocalProtocolError
from fabric.ids import Epoch, PeerId
from fabric.inproc import QUEUE_MESSAGES_MAX, HubLink, LocalLink
from fabric.link import NamedTensor
from fabric.messages import Ping, Pong
from fabric.sockets import DealerLink, RouterLink
from tests.integration.proc import until

HERE, THERE, SERVER = PeerId("here/1"), PeerId("there/1"), PeerId("server")


class HandClock:
    at_ms = 100.0

    def now_ms(self) -> float:
        return self.at_ms


CLOCK = HandClock()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubLink]:
    made = HubLink(RouterLink.bind([f"ipc://{tmp_path}/hub"]), SERVER, CLOCK)
    yield made
    made.close()


@pytest.fixture
def here(hub: HubLink) -> LocalLink:
    return hub.connect(HERE)


def test_what_one_end_sends_the_other_receives_in_order(hub: HubLink, here: LocalLink) -> None:
    for number in range(3):
        assert here.send(SERVER, Ping(number))
    assert (hub.has_more, here.has_more) == (True, False)
    received = hub.receive(2)
    assert [(one.peer, one.message) for one in received] == [(HERE, Ping(0)), (HERE, Ping(1))]
    assert [one.message for one in hub.receive(2)] == [Ping(2)]
    assert (hub.has_more, here.has_more) == (False, False)
    assert hub.send(HERE, Pong(7))
    assert (hub.has_more, here.has_more) == (False, True)
    assert [(one.peer, one.message) for one in here.receive(64)] == [(SERVER, Pong(7))]
    assert (hub.has_more, here.has_more) == (False, False)


def test_a_message_is_as_late_as_it_lay_in_the_queue(hub: HubLink, here: LocalLink) -> None:
    here.send(SERVER, Ping(1))
    CLOCK.at_ms += 2.5
    assert [one.late_ms for one in hub.receive(1)] == [2.5]


def test_the_epoch_is_stamped_on_both_kinds(hub: HubLink, here: LocalLink) -> None:
    hub.epoch = Epoch(4)
    hub.send(HERE, Pong(1))
    assert [one.epoch for one in here.receive(1)] == [4]


def test_a_full_queue_refuses(hub: HubLink, here: LocalLink) -> None:
    for number in range(QUEUE_MESSAGES_MAX):
        assert here.send(SERVER, Ping(number))
        assert hub.send(HERE, Pong(number))
    assert not here.send(SERVER, Ping(0))
    assert not hub.send(HERE, Pong(0))
    assert here.counters["full_out"] == 1
    assert len(hub.receive(2 * QUEUE_MESSAGES_MAX)) == QUEUE_MESSAGES_MAX
    assert here.send(SERVER, Ping(0))


def test_tensors_have_channels_of_their_own(here: LocalLink) -> None:
    with pytest.raises(LocalProtocolError, match="tensors"):
        here.send(SERVER, Ping(1), [NamedTensor("x", np.zeros(3, np.float32))])


def test_an_end_reaches_only_its_server(here: LocalLink) -> None:
    assert not here.send(THERE, Ping(1))


def test_an_end_that_is_closed_is_gone_like_any_other_peer(hub: HubLink, here: LocalLink) -> None:
    here.close()
    assert not hub.send(HERE, Pong(1))
    assert list(hub.take_lost()) == [HERE]


def test_peers_elsewhere_are_reached_as_ever(hub: HubLink, here: LocalLink) -> None:
    there = DealerLink.connect(THERE, SERVER, hub.addresses)
    try:
        until(lambda: there.send(SERVER, Ping(2)), what="a connection")
        here.send(SERVER, Ping(1))
        came: list[tuple[PeerId, object]] = []

        def both() -> bool:
            came.extend((one.peer, one.message) for one in hub.receive(8))
            return len(came) == 2

        until(both, what="two messages")
        assert sorted(came, key=str) == [(HERE, Ping(1)), (THERE, Ping(2))]
        for number in range(9):
            assert here.send(SERVER, Ping(number))
        assert there.send(SERVER, Ping(99))
        came = []

        def beside_a_flood() -> bool:
            came.extend((one.peer, one.message) for one in hub.receive(1))
            return (THERE, Ping(99)) in came

        until(beside_a_flood, what="a message beside a flood from here")
        assert hub.send(THERE, Pong(3))
        answers: list[object] = []

        def answered() -> bool:
            answers.extend(one.message for one in there.receive(8))
            return bool(answers)

        until(answered, what="an answer")
        assert answers == [Pong(3)]
    finally:
        there.close()


def test_a_hub_at_rest_wakes_nobody(hub: HubLink, here: LocalLink) -> None:
    assert (hub.has_more, here.has_more) == (False, False)
    assert here.fileno() == -1
    assert hub.fileno() >= 0
