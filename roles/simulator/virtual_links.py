"""Loopback links on a virtual clock, whose ways are the modelled network's."""

from __future__ import annotations

import random
from collections.abc import Callable

from fabric.clock import VirtualClock
from fabric.ids import PeerId
from fabric.loopback import LoopbackNetwork
from fabric.transit_time import TransitMeter

QUEUE_MAX = 1 << 20  # messages on their way to one link


class VirtualLinks(LoopbackNetwork):
    """Each message takes what `arrival` says of (sender, receiver, the moment it is sent); every receiver knows it."""

    def __init__(self, clock: VirtualClock, arrival: Callable[[PeerId, PeerId, float], float]) -> None:
        super().__init__(clock, random.Random(0), queue_messages_max=QUEUE_MAX)
        self._arrival = arrival

    def arrives_at_ms(self, sender: PeerId, peer: PeerId, sent_at_ms: float) -> float:
        """As the model says."""
        return self._arrival(sender, peer, sent_at_ms)

    def late_ms(self, meter: TransitMeter, peer: PeerId, sent_at_ms: float) -> float:
        """All of its way, as there is one clock."""
        del meter, peer
        return self.clock.now_ms() - sent_at_ms
