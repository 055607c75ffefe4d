"""The ways to a server over real sockets: one that is not there yet, one that falls silent, one that moves."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from fabric.clock import MonotonicClock
from fabric.curve import LinkAccess
from fabric.errors import UntrustedKey
from fabric.heartbeats import HeartbeatTiming
from fabric.ids import PeerId
from fabric.inproc import ServerLink
from fabric.link import Received
from fabric.messages import Directory, Ping, Pong, StatusAsked
from fabric.sockets import DealerLink, RouterLink
from fabric.transport import ZMQ
from roles.gpu_worker.events import SchedulerAnswers
from roles.gpu_worker.scheduler_connection import SchedulerConnection
from roles.runtime.core import SCHEDULER, SCHEDULER_ID, Heard, Lost
from roles.runtime.loop.local_scheduler import LocalScheduler
from roles.runtime.loop.server_connection import ServerConnection
from roles.runtime.loop.sources import REFUSED
from roles.runtime.process import RunFile, write_run_file

OWN = PeerId("worker-0/1")
NEWS = Directory(1, (), (), ())
WITHIN_MS = 20_000.0


class Stage:
    """A door, the server at its end, and what each has heard."""

    def __init__(self, run_dir: Path) -> None:
        self.address = f"ipc://{run_dir}/server.sock"
        self.clock = MonotonicClock()
        self.stack = ExitStack()
        self.server: RouterLink | None = None
        self.at_server: list[Received] = []

    def serve(self, address: str = "") -> RouterLink:
        self.server = RouterLink.bind([address or self.address])
        self.stack.callback(self.server.close)
        return self.server

    def until(
        self,
        door: SchedulerConnection | LocalScheduler | ServerConnection,
        is_so: Callable[[Sequence[object]], bool],
        *,
        answers: bool = True,
    ) -> Sequence[object]:
        """Turn until what the door gave is enough; pings are answered if `answers`."""
        events: list[object] = []
        until_ms = self.clock.now_ms() + WITHIN_MS
        while not is_so(events):
            assert self.clock.now_ms() < until_ms, events
            for received in self.server.receive(64) if self.server else ():
                self.at_server.append(received)
                if answers and isinstance(received.message, Ping):
                    assert self.server is not None
                    self.server.send(received.peer, Pong(received.message.number))
            events.extend(door.take(64, self.clock.now_ms()))
            if not door.has_more:
                select.select([door.fileno()], [], [], 0.002)
        return events


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    with made.stack:
        yield made


def worker_door(stage: Stage) -> SchedulerConnection:
    door = SchedulerConnection(OWN, stage.clock)
    stage.stack.callback(door.close)
    return door


def test_a_worker_whose_first_word_is_refused_knocks_until_the_scheduler_answers(stage: Stage) -> None:
    door = worker_door(stage)
    assert not door.send(StatusAsked(), stage.clock.now_ms())  # nobody has said where the scheduler is
    door.open([stage.address], HeartbeatTiming(), stage.clock.now_ms())
    assert not door.send(StatusAsked(), stage.clock.now_ms())  # it is not there yet
    assert list(door.take(64, stage.clock.now_ms())) == []
    stage.serve()
    assert stage.until(door, bool) == [SchedulerAnswers()]
    assert stage.at_server[0].message == Ping(0)
    assert door.send(StatusAsked(), stage.clock.now_ms())


def test_the_scheduler_answers_before_what_it_says(stage: Stage) -> None:
    door = worker_door(stage)
    stage.serve()
    door.open([stage.address], HeartbeatTiming(), stage.clock.now_ms())
    stage.until(door, lambda _: bool(stage.at_server), answers=False)
    assert stage.server is not None
    assert stage.server.send(OWN, NEWS)
    first, second = stage.until(door, bool, answers=False)
    assert first == SchedulerAnswers()
    assert isinstance(second, Heard)
    assert second.message == NEWS


def test_a_worker_hears_that_a_scheduler_is_back_which_restarted_behind_its_address(stage: Stage) -> None:
    door = worker_door(stage)
    stage.serve()
    door.open([stage.address], HeartbeatTiming(), stage.clock.now_ms())
    stage.until(door, bool)
    assert stage.server is not None
    stage.server.close()
    stage.until(door, lambda _: not door.send(StatusAsked(), stage.clock.now_ms()))
    stage.serve()
    stage.until(door, lambda events: SchedulerAnswers() in events)


@pytest.mark.parametrize("patience_ms", [200.0, 50.0])
def test_a_silent_server_is_lost_again_and_again_until_a_new_connection_is_answered(
    stage: Stage, patience_ms: float
) -> None:
    door = ServerConnection(OWN, SCHEDULER, stage.clock, HeartbeatTiming(20.0, patience_ms))
    stage.stack.callback(door.close)
    stage.serve()
    door.open([stage.address])
    lost = stage.until(door, lambda events: len(events) == 2, answers=False)
    assert all(isinstance(event, Lost) and event.peer == SCHEDULER for event in lost)
    stage.at_server.clear()
    stage.until(door, lambda _: len(stage.at_server) > 1)
    assert stage.server is not None
    assert stage.server.send(OWN, NEWS)
    stage.until(door, lambda events: any(isinstance(event, Heard) for event in events))


def test_a_server_that_moves_is_heard_by_the_same_descriptor(stage: Stage) -> None:
    door = ServerConnection(OWN, SCHEDULER, stage.clock)
    stage.stack.callback(door.close)
    descriptor = door.fileno()
    for address in (stage.address, f"{stage.address}.moved"):
        server = stage.serve(address)
        door.open([address])
        stage.until(door, lambda _: door.send(StatusAsked()))
        stage.until(door, lambda _: any(r.message == StatusAsked() for r in stage.at_server))
        assert server.send(OWN, NEWS)
        stage.until(door, bool)
        stage.at_server.clear()
    assert door.fileno() == descriptor


def test_an_agent_hears_that_a_word_was_refused_before_anybody_is_taken_for_silent(
    stage: Stage, tmp_path: Path
) -> None:
    write_run_file(tmp_path, RunFile("scheduler-0", 1, "one", {"control": [stage.address]}))
    door = LocalScheduler(OWN, tmp_path, stage.clock)
    stage.stack.callback(door.close)
    stage.until(door, bool)  # it knows the place, where nobody is yet
    assert not door.send(StatusAsked())
    events = stage.until(door, lambda events: any(isinstance(event, Lost) for event in events))
    assert events[-1] == Lost(PeerId("scheduler-0"), REFUSED)
    stage.serve()
    stage.until(door, lambda _: door.send(StatusAsked()))  # the hello that follows
    stage.until(door, lambda _: any(isinstance(one.message, StatusAsked) for one in stage.at_server))


OUT_OF_DESCRIPTORS = """
import os, resource, sys
from fabric.clock import MonotonicClock
from fabric.ids import PeerId
from fabric.messages import StatusAsked
from fabric.sockets import DealerLink, RouterLink
from roles.runtime.loop.server_connection import ServerConnection
clock = MonotonicClock()
server = RouterLink.bind(["tcp://127.0.0.1:0"])
door = ServerConnection(PeerId("a/1"), PeerId("b/1"), clock)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
door.open(server.addresses)
until_ms = clock.now_ms() + 300.0
while clock.now_ms() < until_ms:
    assert not door.take(1, clock.now_ms()) and not door.send(StatusAsked())
assert door.is_open and door.wake_at_ms > until_ms
for descriptor in held:
    os.close(descriptor)
while not door.send(StatusAsked()):
    door.take(1, clock.now_ms())
said = None
while not isinstance(said, StatusAsked):  # the door's own heartbeats may come before
    said = next((one.message for one in server.receive(1)), None)
print(said)
"""


def test_without_a_descriptor_left_a_server_is_tried_again() -> None:
    told = subprocess.run(
        [sys.executable, "-c", OUT_OF_DESCRIPTORS], capture_output=True, timeout=60, check=False, text=True
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout.strip() == str(StatusAsked())


def test_a_link_that_begins_anew_reads_nothing_of_its_former_connection(tmp_path: Path) -> None:
    """It may be of before the silence for which the server was given up. The virtual links have the same rule."""
    clock = MonotonicClock()
    with ExitStack() as stack:
        server = RouterLink.bind([f"ipc://{tmp_path}/server.sock"])
        stack.callback(server.close)
        client = DealerLink.connect(OWN, SCHEDULER, server.addresses)
        stack.callback(client.close)
        heard: list[object] = []

        def say(number: int) -> None:
            """Until the server hears that very ping by the connection there is now."""
            until_ms = clock.now_ms() + WITHIN_MS
            while not any(one.message == Ping(number) for one in server.receive(64)):
                assert clock.now_ms() < until_ms
                client.send(SCHEDULER, Ping(number))
                select.select([], [], [], 0.005)

        say(1)
        assert server.send(OWN, Directory(1, (), (), ()))
        select.select([], [], [], 0.05)  # its descriptor may have told of it already
        client.reconnect()
        say(2)
        assert server.send(OWN, Directory(2, (), (), ()))
        until_ms = clock.now_ms() + WITHIN_MS
        while not heard:
            assert clock.now_ms() < until_ms
            heard += [one.message for one in client.receive(64) if isinstance(one.message, Directory)]
            select.select([], [], [], 0.005)
        assert heard == [Directory(2, (), (), ())]


class TrustedLater:
    """Sockets as they are, and a server whose key is trusted from the third connection on."""

    def __init__(self) -> None:
        self.tries = 0

    def connect(
        self, own: PeerId, server: PeerId, addresses: Sequence[str], guard: LinkAccess | None = None
    ) -> ServerLink:
        self.tries += 1
        if self.tries < 3:
            raise UntrustedKey(f"{addresses[0]}: no key of {server} is trusted")
        return ZMQ.connect(own, server, addresses, guard)

    bind_peers = staticmethod(ZMQ.bind_peers)
    bind_payload = staticmethod(ZMQ.bind_payload)
    push = staticmethod(ZMQ.push)


def test_a_worker_that_starts_while_no_key_of_the_scheduler_is_trusted_joins_when_one_is(
    stage: Stage,
) -> None:
    """Keys are rotated while workers start. It ended the worker, and five such ends gave its slices up."""
    stage.serve()
    transport = TrustedLater()
    door = SchedulerConnection(OWN, stage.clock, transport=transport)
    stage.stack.callback(door.close)
    door.open([stage.address], HeartbeatTiming(), stage.clock.now_ms())
    assert not door.send(Ping(1), stage.clock.now_ms())
    stage.until(door, lambda events: any(isinstance(event, SchedulerAnswers) for event in events))
    assert transport.tries == 3


@pytest.mark.parametrize(
    "wrong", ["", "nonsense", "tcp://127.0.0.1", "tcp://127.0.0.1:0", "ipc://server.sock"]
)
def test_a_worker_that_was_told_what_is_no_address_joins_when_it_is_told_another(
    stage: Stage, wrong: str
) -> None:
    """It ended the worker, and five such ends gave its slices up."""
    stage.serve()
    door = worker_door(stage)
    door.open([wrong], HeartbeatTiming(), stage.clock.now_ms())
    assert not door.send(Ping(1), stage.clock.now_ms())
    assert list(door.take(64, stage.clock.now_ms() + 1_000.0)) == []
    door.open([stage.address], HeartbeatTiming(), stage.clock.now_ms())
    stage.until(door, lambda events: any(isinstance(event, SchedulerAnswers) for event in events))


def test_an_agent_whose_scheduler_is_back_with_a_key_that_is_not_trusted_yet_waits_for_it(
    stage: Stage, tmp_path: Path
) -> None:
    stage.serve()
    transport = TrustedLater()
    door = LocalScheduler(OWN, tmp_path, stage.clock, transport=transport)
    stage.stack.callback(door.close)
    write_run_file(tmp_path, RunFile(SCHEDULER_ID, os.getpid(), "x", {"control": [stage.address]}))
    stage.until(door, lambda _: door.send(Ping(1)))
    assert transport.tries == 3


def test_others_are_told_at_once_that_no_key_of_the_server_is_trusted(stage: Stage) -> None:
    door = ServerConnection(OWN, SCHEDULER, stage.clock, transport=TrustedLater())
    stage.stack.callback(door.close)
    with pytest.raises(UntrustedKey, match="no key of scheduler is trusted"):
        door.open([stage.address])
