"""The virtual connections themselves: what they tell of who reads what."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence

from fabric import frames
from fabric.ids import PeerId
from fabric.messages import AnyMessage, CancelRequest
from tests.chaos.virtual.processes.links import VirtualPeers, VirtualServer
from tests.chaos.virtual.processes.network import End, Network

SERVER, CLIENT = PeerId("server"), PeerId("client.1")
ADDRESS = "ipc:///server"


class Timeline:
    def __init__(self) -> None:
        self.now_ms = 0.0
        self._happening: list[tuple[float, int, Callable[[], object]]] = []

    def at(self, at_ms: float, callback: Callable[[], object]) -> None:
        heapq.heappush(self._happening, (at_ms, len(self._happening), callback))

    def run_until(self, until_ms: float) -> None:
        while self._happening and self._happening[0][0] <= until_ms:
            self.now_ms, _, callback = heapq.heappop(self._happening)
            callback()
        self.now_ms = until_ms


class Someone:
    """A process that does nothing by itself."""

    is_dead = is_stopped = False

    def __init__(self, time: Timeline, place: str) -> None:
        self.place = place
        self.ends: list[End] = []
        self._time = time

    def now_ms(self) -> float:
        return self._time.now_ms

    def wake(self, at_ms: float) -> None:
        """It is asked by the test."""

    def when_running(self, callback: Callable[[], None]) -> None:
        callback()


def test_of_what_travels_together_a_message_is_read_in_the_turn_that_takes_it() -> None:
    """A turn takes so many: what is left of them waits for the next one, and no process has seen it."""
    time = Timeline()
    network = Network(time, random.Random(0), lambda *_: (1.0, 0.0))
    server = VirtualPeers(network, Someone(time, "server"), [ADDRESS])
    client = VirtualServer(network, Someone(time, "client"), CLIENT, SERVER, [ADDRESS])
    read: list[tuple[End, AnyMessage]] = []
    network.read = lambda wire, end, sent_at_ms, received: read.append((end, received.message))
    time.run_until(100.0)
    said: Sequence[AnyMessage] = [CancelRequest(number) for number in range(3)]
    assert client.send_packed(SERVER, [frames.pack(one) for one in said])
    time.run_until(200.0)

    assert [one.message for one in server.receive(2)] == said[:2]
    assert read == [(server, one) for one in said[:2]]
    assert server.has_more
    assert [one.message for one in server.receive(2)] == said[2:]
    assert read == [(server, one) for one in said]
