"""What a role hears of a watched link, on virtual time."""

from __future__ import annotations

import random
from dataclasses import dataclass

from fabric.ids import PeerId
from fabric.loopback import LoopbackNetwork
from fabric.messages import StatusAsked
from roles.runtime.core import Heard, Lost
from roles.runtime.loop.sources import WatchedLinkSource

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
