from __future__ import annotations

import contextlib
import os
import random
import select
import socket as plain
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import zmq

from fabric import codec, frames
from fabric.clock import MonotonicClock, VirtualClock
from fabric.errors import ConfigError, LocalProtocolError
from fabric.ids import Epoch, Incarnation, ModelId, PeerId
from fabric.ipc import PATH_BYTES_MAX, nearest
from fabric.link import Link, NamedTensor, Received
from fabric.messages import WIRE_VERSION, Envelope, Infer, Parcel, Ping, Pong, SeqRun, Withdraw
from fabric.shared_memory import Arena, memory_address
from fabric.sockets import (
    CONNECT_MS,
    CONTROL,
    RECONNECT_AFTER_MS,
    TURN_HEADER_BYTES,
    DealerLink,
    LinkOptions,
    PullLink,
    PushOptions,
    PushPool,
    RouterLink,
    context,
)
from fabric.sockets.local_streams import SWITCH, are_allowed
from fabric.tensors import share

CLIENT, SERVER, SLICE = PeerId("client/1"), PeerId("server/1"), PeerId("node/gpu0/0")
TCP = "tcp://127.0.0.1:0"
CLOCK = MonotonicClock()
INFER = Infer(1, ModelId("m"))


class Opened(list[Link]):
    def __call__(self, link: Link) -> None:
        self.append(link)


OPENED = Opened()


@pytest.fixture
def opened() -> Iterator[Opened]:
    yield OPENED
    for link in OPENED:
        link.close()
    OPENED.clear()


@pytest.fixture(params=["tcp", "ipc", "stream"])
def address(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """By ZeroMQ's TCP, by its ipc, and by a local stream beside that."""
    if request.param == "ipc":
        monkeypatch.setenv(SWITCH, "0")
    are_allowed.cache_clear()
    yield TCP if request.param == "tcp" else f"ipc://{tmp_path}/socket"
    are_allowed.cache_clear()


def until(is_true: Callable[[], bool], *links: Link, limit_ms: float = 60_000.0) -> None:
    """Wait for a state, waking on the links' descriptors. All that are open go on, as in their loops."""
    end_ms = CLOCK.now_ms() + limit_ms
    while not is_true():
        for link in OPENED:
            link.receive(0)
        assert CLOCK.now_ms() < end_ms, "it did not happen in time"
        if not any(link.has_more for link in links):
            select.select([link.fileno() for link in links], [], [], 0.005)


def take(link: Link, count: int) -> list[Received]:
    got: list[Received] = []

    def is_enough() -> bool:
        got.extend(link.receive(16))
        return len(got) >= count

    until(is_enough, link)
    return got


def pair(address: str, opened: Opened, options: LinkOptions | None = None) -> tuple[RouterLink, DealerLink]:
    """Like a client and its frontend."""
    options = options or LinkOptions()
    router = RouterLink.bind([address], options)
    opened(router)
    dealer = DealerLink.connect(CLIENT, SERVER, router.addresses, options)
    opened(dealer)
    until(lambda: dealer.send(SERVER, Ping(0)), dealer)
    take(router, 1)
    return router, dealer


def fed(address: str, opened: Opened, options: PushOptions | None = None) -> tuple[PullLink, PushPool]:
    pull = PullLink.bind([address])
    opened(pull)
    pool = PushPool(options)
    opened(pool)
    pool.know(SLICE, Incarnation("one"), pull.addresses)
    return pull, pool


def image(count: int = 1) -> list[NamedTensor]:
    draws = np.random.default_rng(3)
    return [NamedTensor(f"input{i}", draws.random((3, 224, 224), np.float32)) for i in range(count)]


def test_a_question_is_answered_under_the_given_names(address: str, opened: Opened) -> None:
    router, dealer = pair(address, opened)
    dealer.epoch = Epoch(4)
    assert dealer.send(SERVER, Ping(1))
    asked = take(router, 1)[0]
    assert (asked.peer, asked.message, asked.epoch) == (CLIENT, Ping(1), 4)
    assert router.send(CLIENT, Pong(1))
    answered = take(dealer, 1)[0]
    assert (answered.peer, answered.message) == (SERVER, Pong(1))
    assert dealer.counters["messages_out"] == 2
    assert dealer.counters["bytes_out"] == router.counters["bytes_in"]


def test_a_payload_arrives_bit_exact(address: str, opened: Opened) -> None:
    pull, pool = fed(address, opened)
    sent = image(8)
    assert pool.send(SLICE, Ping(1), sent)
    received = take(pull, 1)[0]
    assert received.peer == ""
    assert [tensor.name for tensor in received.tensors] == [tensor.name for tensor in sent]
    for there, here in zip(received.tensors, sent, strict=True):
        assert here.array.nbytes == 602_112
        np.testing.assert_array_equal(there.array, here.array)
        assert not there.array.flags.writeable


def test_a_payload_goes_both_ways_between_client_and_frontend(address: str, opened: Opened) -> None:
    router, dealer = pair(address, opened)
    assert dealer.send(SERVER, Ping(1), image())
    request = take(router, 1)[0]
    assert router.send(CLIENT, Pong(1), request.tensors)
    np.testing.assert_array_equal(take(dealer, 1)[0].tensors[0].array, image()[0].array)


def test_one_link_is_reached_at_several_addresses(tmp_path: Path, opened: Opened) -> None:
    pull = PullLink.bind([TCP, f"ipc://{tmp_path}/in"])
    opened(pull)
    ipc, tcp = pull.addresses
    assert ipc == f"ipc://{tmp_path}/in"
    assert not tcp.endswith(":0")
    for place, way in enumerate((ipc, tcp)):
        pool = PushPool()
        opened(pool)
        pool.know(SLICE, Incarnation("one"), [way])
        assert pool.send(SLICE, Ping(place))
        assert take(pull, 1)[0].message == Ping(place)


def test_an_ipc_address_that_cannot_be_looked_at_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> os.stat_result:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "lstat", refuse)
    assert nearest(("ipc:///private/socket", "tcp://127.0.0.1:1")) == "tcp://127.0.0.1:1"
    assert nearest(("ipc:///private/socket",)) == "ipc:///private/socket"


def test_an_ipc_address_of_another_host_is_passed_over(tmp_path: Path, opened: Opened) -> None:
    pull = PullLink.bind([TCP])
    opened(pull)
    pool = PushPool()
    opened(pool)
    pool.know(SLICE, Incarnation("one"), [f"ipc://{tmp_path}/elsewhere", *pull.addresses])
    assert pool.send(SLICE, Ping(1))
    assert take(pull, 1)[0].message == Ping(1)


def test_a_send_without_a_connection_is_refused(opened: Opened) -> None:
    with plain.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        dealer = DealerLink.connect(CLIENT, SERVER, [f"tcp://127.0.0.1:{taken.getsockname()[1]}"])
        opened(dealer)
        assert not dealer.send(SERVER, Ping(1))
    assert dealer.counters["full_out"] == 1


def test_a_peer_that_left_is_refused_and_reported(address: str, opened: Opened) -> None:
    router, dealer = pair(address, opened)
    assert not router.send(PeerId("nobody/1"), Ping(1))
    assert list(router.take_lost()) == ["nobody/1"]
    dealer.close()
    until(lambda: not router.send(CLIENT, Ping(1)), router)
    assert list(router.take_lost()) == [CLIENT]
    assert not router.take_lost()
    assert router.counters["unroutable_out"] == 2


TALKER = """
import sys, time
from fabric.ids import PeerId
from fabric.messages import Ping
from fabric.sockets import DealerLink
link = DealerLink.connect(PeerId("talker/1"), PeerId("server/1"), [sys.argv[1]])
while not link.send(PeerId("server/1"), Ping(1)):
    time.sleep(0.005)
time.sleep(600)
"""
LISTENER = """
import sys, time
from fabric.sockets import RouterLink
link = RouterLink.bind([sys.argv[1]])
print(link.addresses[0], flush=True)
while True:
    link.receive(1)
    time.sleep(0.005)
"""


def test_a_process_that_is_killed_is_lost_at_once_to_whoever_listens(address: str, opened: Opened) -> None:
    router = RouterLink.bind([address])
    opened(router)
    with subprocess.Popen([sys.executable, "-c", TALKER, router.addresses[0]]) as talker:
        try:
            take(router, 1)
            assert not router.take_lost()
        finally:
            talker.kill()
    until(lambda: list(router.take_lost()) == ["talker/1"], router, limit_ms=1_000)
    assert not router.take_lost()
    assert not router.send(PeerId("talker/1"), Ping(1))


FORKING = """
import os, sys, time
from fabric.ids import PeerId
from fabric.messages import Ping
from fabric.sockets import DealerLink

def says(own, number):
    link = DealerLink.connect(PeerId(own), PeerId("server/1"), [sys.argv[1]])
    while not link.send(PeerId("server/1"), Ping(number)):
        time.sleep(0.005)
    return link

link = says("parent/1", 1)
child = os.fork()
if not child:
    says("child/1", 2).close()
    sys.exit(0)
_, status = os.waitpid(child, 0)
while not link.send(PeerId("server/1"), Ping(3)):
    time.sleep(0.005)
link.close()
sys.exit(status)
"""


def test_a_fork_of_a_process_that_has_links_opens_its_own_and_ends(address: str, opened: Opened) -> None:
    router = RouterLink.bind([address])
    opened(router)
    with subprocess.Popen([sys.executable, "-c", FORKING, router.addresses[0]]) as process:
        try:
            heard = take(router, 3)
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert {(one.peer, one.message) for one in heard} == {
        ("parent/1", Ping(1)),
        ("child/1", Ping(2)),
        ("parent/1", Ping(3)),
    }


def test_a_server_that_is_killed_is_lost_at_once_to_whoever_is_connected(
    address: str, opened: Opened
) -> None:
    command = [sys.executable, "-c", LISTENER, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listener:
        try:
            assert listener.stdout is not None
            dealer = DealerLink.connect(CLIENT, SERVER, [listener.stdout.readline().strip()])
            opened(dealer)
            until(lambda: dealer.send(SERVER, Ping(1)), dealer)
            assert not dealer.take_lost()
        finally:
            listener.kill()
    until(lambda: list(dealer.take_lost()) == [SERVER], dealer, limit_ms=1_000)
    assert not dealer.take_lost()


def test_what_a_peer_said_before_its_end_is_heard_after_it_and_reaches_nobody(
    address: str, opened: Opened
) -> None:
    """The router looks only when its end has come too."""
    router, dealer = pair(address, opened)
    router.receive(16)
    assert dealer.send(SERVER, Ping(2))
    is_by_stream = bool(router.counters["local_streams"])  # there the end comes behind what was said
    dealer.close()
    assert is_by_stream or select.select([router._connections.descriptor], [], [], 10)[0]
    lost, heard = list(router.take_lost()), take(router, 1)
    until(lambda: bool(lost) or router.has_more, router)
    lost += router.take_lost()
    assert [one.message for one in heard] == [Ping(2)]
    assert lost == [CLIENT]
    assert not router.send(CLIENT, Ping(3))
    assert len(router._routes) == 0
    assert not router._routes._at


@pytest.mark.parametrize("hears_first", ["of their ends", "what they said"])
def test_peers_that_have_left_before_anybody_read_what_they_said_are_lost_and_nothing_is_kept(
    address: str, opened: Opened, hears_first: str
) -> None:
    """Each has the descriptor of one before it, as a rule."""
    router = RouterLink.bind([address])
    opened(router)
    peers = [PeerId(f"client/{number}") for number in range(30)]
    for peer in peers:
        dealer = DealerLink.connect(peer, SERVER, router.addresses)
        opened(dealer)
        for number in range(2):
            until(lambda: dealer.send(SERVER, Ping(number)), dealer)  # noqa: B023  ended before the next turn
        dealer.close()
    heard: list[PeerId] = []
    lost: list[PeerId] = []

    def is_over() -> bool:
        if hears_first == "of their ends":
            lost.extend(router.take_lost())
        heard.extend(one.peer for one in router.receive(16))
        lost.extend(router.take_lost())
        return len(heard) == 2 * len(peers) and len(lost) >= len(peers)

    until(is_over, router)
    assert sorted(heard) == sorted(peers * 2)
    assert sorted(lost) == sorted(peers)
    assert (len(router._routes), router._routes._at, router._stream_of) == (0, {}, {})


def test_the_descriptor_tells_of_a_connection_that_ended(address: str, opened: Opened) -> None:
    router, dealer = pair(address, opened)
    router.receive(16)
    assert not router.has_more
    dealer.close()
    assert select.select([router.fileno()], [], [], 10)[0], "nobody has to look by himself"
    until(lambda: list(router.take_lost()) == [CLIENT], router)


def test_a_peer_that_is_back_by_another_connection_is_not_lost(address: str, opened: Opened) -> None:
    router, dealer = pair(address, opened)
    dealer.reconnect()
    until(lambda: not router.receive(1) and dealer.send(SERVER, Ping(2)), dealer)
    take(router, 1)
    lost = list(router.take_lost())
    until(lambda: router.send(CLIENT, Pong(2)), router)
    take(dealer, 1)
    assert not router.take_lost()
    assert lost in ([], [CLIENT]), "by the end of its first connection, if that came before its second"
    assert not dealer.take_lost(), "it gave the connection up itself"


def test_a_full_queue_is_refused(address: str, opened: Opened) -> None:
    router, dealer = pair(address, opened, LinkOptions(queue_messages_max=8))
    tensors = image()
    until(lambda: not router.send(CLIENT, Ping(1), tensors), router)
    assert router.counters["full_out"] == 1
    assert not router.take_lost()
    came = take(dealer, int(router.counters["messages_out"]))
    assert len(came) == router.counters["messages_out"]  # what was accepted arrives


def test_what_waits_for_one_peer_of_a_router_is_bounded_in_bytes(address: str, opened: Opened) -> None:
    options = LinkOptions(queue_messages_max=16, queue_bytes_max=4_000_000)
    router, dealer = pair(address, opened, options)
    other = DealerLink.connect(PeerId("client/2"), SERVER, router.addresses, options)
    opened(other)
    until(lambda: other.send(SERVER, Ping(0)), other)
    take(router, 1)
    tensors = image(2)
    until(lambda: not router.send(CLIENT, Ping(1), tensors), router)
    assert router.counters["full_out"] == 1
    assert not router.take_lost()
    assert router.send(CLIENT, Ping(2)), "what is small is bounded by the number of messages"
    assert router.send(PeerId("client/2"), Ping(3), tensors), "others have queues of their own"
    assert take(other, 1)[0].message == Ping(3)
    accepted = int(router.counters["messages_out"]) - 1
    assert len(take(dealer, accepted)) == accepted
    until(lambda: router.send(CLIENT, Ping(4), tensors), router)  # delivered bytes are free again


def test_a_push_queue_is_bounded_in_bytes(address: str, opened: Opened) -> None:
    options = PushOptions(queue_bytes_max=4_000_000)
    pull, pool = fed(address, opened, options)
    tensors = image(2)
    until(lambda: not pool.send(SLICE, Ping(1), tensors), pull)
    assert pool.counters["full_out"] == 1
    accepted = int(pool.counters["messages_out"])
    assert len(take(pull, accepted)) == accepted
    until(lambda: pool.send(SLICE, Ping(2), tensors), pull)  # delivered bytes are free again


@pytest.mark.parametrize("is_pushed", [False, True], ids=["router", "push"])
def test_what_waits_for_who_does_not_read_is_no_more_in_memory_than_it_is_by_count(
    address: str, opened: Opened, is_pushed: bool
) -> None:
    """A row of each of many batches, of which only the row is to be sent."""
    options = LinkOptions(queue_messages_max=100)
    sender: RouterLink | PushPool
    receiver: Link
    if is_pushed:
        receiver, sender = fed(address, opened, PushOptions(link=options))
    else:
        sender, receiver = pair(address, opened, options)
    batches = []
    for number in range(60):
        batch = np.full((8, 200_000), number, np.uint8)
        batches.append(weakref.ref(batch))
        row = [NamedTensor("y", batch[3, ...])]
        assert sender.send(SLICE if is_pushed else CLIENT, Ping(number), row)
        del batch, row
        if number == 9:
            threading.Event().wait(0.03)
    end_ms = CLOCK.now_ms() + 5_000.0  # ZeroMQ may be about to send some
    while sum(batch() is not None for batch in batches) > 10:
        assert CLOCK.now_ms() < end_ms, "rows keep their batches"
        threading.Event().wait(0.01)
    came = take(receiver, 60)
    assert [one.message for one in came] == [Ping(number) for number in range(60)]
    assert all((one.tensors[0].array == number).all() for number, one in enumerate(came))


@pytest.mark.parametrize("is_pushed", [False, True], ids=["router", "push"])
def test_what_waits_for_many_who_do_not_read_keeps_nothing_larger_that_it_is_part_of(
    address: str, opened: Opened, is_pushed: bool
) -> None:
    """Each is sent one row, of a batch of its own."""
    peers = [PeerId(f"peer/{number}") for number in range(20)]
    receivers: list[Link] = []
    clock = VirtualClock(0.0)
    options = LinkOptions(clock=clock)
    sender = PushPool(PushOptions(link=options)) if is_pushed else RouterLink.bind([address], options)
    opened(sender)
    for number, peer in enumerate(peers):
        if isinstance(sender, PushPool):
            pull = PullLink.bind([TCP if address == TCP else f"{address}{number}"])
            sender.know(peer, Incarnation("one"), pull.addresses)
            receivers.append(pull)
        else:
            dealer = DealerLink.connect(peer, SERVER, sender.addresses, LinkOptions())
            until(partial(dealer.send, SERVER, Ping(0)), dealer)
            receivers.append(dealer)
        opened(receivers[-1])
    if not is_pushed:
        take(sender, len(peers))
    batches = []
    for number, peer in enumerate(peers):
        batch = np.full((8, 1_000_000), number, np.uint8)
        batches.append(weakref.ref(batch))
        if peer == peers[-1]:
            clock.advance(11.0)
        row = [NamedTensor("y", batch[3, ...])]
        assert sender.send(peer, Ping(number), row)
        del batch, row
    assert sum(batch() is not None for batch in batches) <= 1, "rows keep their batches"
    for number, receiver in enumerate(receivers):
        (came,) = take(receiver, 1)
        assert came.message == Ping(number)
        assert (came.tensors[0].array == number).all()


def test_one_message_over_the_byte_budget_still_fits_an_empty_queue(opened: Opened) -> None:
    pull, pool = fed(TCP, opened, PushOptions(queue_bytes_max=1_000))
    assert pool.send(SLICE, Ping(1), image())
    assert take(pull, 1)


def test_a_push_queue_to_nobody_is_bounded_in_messages(opened: Opened) -> None:
    pool = PushPool(PushOptions(link=LinkOptions(queue_messages_max=5)))
    opened(pool)
    with plain.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        pool.know(SLICE, Incarnation("one"), [f"tcp://127.0.0.1:{taken.getsockname()[1]}"])
        assert [pool.send(SLICE, Ping(1)) for _ in range(7)] == [True] * 5 + [False] * 2


def test_a_dropped_peer_is_unknown_and_its_socket_is_closed(opened: Opened) -> None:
    _, pool = fed(TCP, opened)
    assert pool.send(SLICE, Ping(1))
    assert pool.counters["sockets_open"] == 1
    pool.drop(SLICE)
    pool.drop(SLICE)
    assert pool.counters["sockets_open"] == 0
    assert not pool.send(SLICE, Ping(1))
    assert pool.counters["unroutable_out"] == 1


def test_what_was_sent_to_a_peer_before_it_is_dropped_arrives(address: str, opened: Opened) -> None:
    pull, pool = fed(address, opened)
    assert pool.send(SLICE, Ping(1))  # its socket is not connected yet
    assert pool.send(SLICE, Ping(2), image())
    pool.drop(SLICE)
    assert len(take(pull, 2)) == 2


def test_a_new_incarnation_gets_a_new_socket(opened: Opened) -> None:
    old, pool = fed(TCP, opened)
    assert pool.send(SLICE, Ping(1))
    take(old, 1)
    new = PullLink.bind([TCP])
    opened(new)
    pool.know(SLICE, Incarnation("one"), old.addresses)
    assert pool.counters["sockets_open"] == 1
    pool.know(SLICE, Incarnation("two"), new.addresses)
    assert pool.counters["sockets_open"] == 0
    assert pool.send(SLICE, Ping(2))
    assert take(new, 1)[0].message == Ping(2)


def test_an_idle_push_socket_is_closed_and_opens_again(opened: Opened) -> None:
    pull, pool = fed(TCP, opened)
    assert pool.send(SLICE, Ping(1))
    take(pull, 1)
    pool.close_idle(CLOCK.now_ms() + 59_000)
    assert pool.counters["sockets_open"] == 1
    pool.close_idle(CLOCK.now_ms() + 61_000)
    assert pool.counters["sockets_open"] == 0
    assert pool.send(SLICE, Ping(2))
    assert take(pull, 1)[0].message == Ping(2)


@pytest.mark.parametrize("nonsense", ["nowhere", "tcp://", "ipc://relative", "tcp://127.0.0.1:no"])
def test_nonsense_in_the_directory_only_makes_a_peer_unreachable(nonsense: str, opened: Opened) -> None:
    pool = PushPool()
    opened(pool)
    pool.know(SLICE, Incarnation("one"), [nonsense])
    assert not pool.send(SLICE, Ping(1))
    pool.know(SLICE, Incarnation("two"), [])
    assert not pool.send(SLICE, Ping(1))


def test_a_taken_port_is_named(opened: Opened) -> None:
    first = RouterLink.bind([TCP])
    opened(first)
    with pytest.raises(ConfigError, match=rf"{first.addresses[0]}.*in use"):
        RouterLink.bind([TCP, first.addresses[0]])


@pytest.mark.parametrize(
    "nonsense", ["nowhere", "tcp://256.0.0.1:80", "tcp://127.0.0.1", "udp://127.0.0.1:1"]
)
def test_an_address_that_cannot_be_bound_is_named(nonsense: str) -> None:
    with pytest.raises(ConfigError, match=nonsense):
        PullLink.bind([nonsense])


def test_a_living_ipc_path_cannot_be_stolen_and_a_closed_one_leaves_nothing(
    tmp_path: Path, opened: Opened
) -> None:
    address = f"ipc://{tmp_path}/socket"
    first = PullLink.bind([address])
    with pytest.raises(ConfigError, match="in use"):
        PullLink.bind([address])
    first.close()
    first.close()
    assert list(tmp_path.iterdir()) == []
    second = PullLink.bind([address])
    opened(second)
    pool = PushPool()
    opened(pool)
    pool.know(SLICE, Incarnation("one"), [address])
    assert pool.send(SLICE, Ping(1))
    assert take(second, 1)[0].message == Ping(1)


def test_what_a_dead_process_left_is_taken_over(tmp_path: Path, opened: Opened) -> None:
    left = tmp_path / "socket"
    with plain.socket(plain.AF_UNIX) as dead:
        dead.bind(str(left))
    (tmp_path / "socket.lock").touch()
    assert left.is_socket()
    opened(PullLink.bind([f"ipc://{left}"]))


def test_an_ipc_path_too_long_or_nowhere_is_named(tmp_path: Path) -> None:
    long = f"ipc://{tmp_path}/{'x' * PATH_BYTES_MAX}"
    with pytest.raises(ConfigError, match="over 107 bytes"):
        PullLink.bind([long])
    with pytest.raises(ConfigError, match=r"missing/socket: No such file"):
        PullLink.bind([f"ipc://{tmp_path}/missing/socket"])
    with pytest.raises(ConfigError, match="absolute"):
        PullLink.bind(["ipc://socket"])


def test_garbage_is_counted_and_harms_nothing(address: str, opened: Opened) -> None:
    router, dealer = pair(address, opened)
    pull, pool = fed(TCP if address == TCP else f"{address}-pull", opened)
    draws = random.Random(5)
    whole = [b"\x95\x01\x00\xcb" + bytes(8) + b"\x90\x92\x07\x01", b""]
    for link, kind in ((router, zmq.DEALER), (pull, zmq.PUSH)):
        with context().socket(kind) as raw:
            raw.linger = 1_000
            raw.connect(link.addresses[0])
            for _ in range(200):
                raw.send_multipart([draws.randbytes(draws.randrange(60)) for _ in range(draws.randint(1, 6))])
            for end in range(len(whole[0])):
                raw.send_multipart([whole[0][:end]])
            raw.send_multipart(whole)
            raw.send_multipart([b""] * 5_000)
            sent = 202 + len(whole[0])

            def is_all_in(link: Link = link, sent: int = sent) -> bool:
                assert list(link.receive(64)) == []
                return link.counters["garbage_in"] >= sent

            until(is_all_in, link)
    assert router.counters["garbage_in"] == sent
    assert dealer.send(SERVER, Ping(9))
    assert take(router, 1)[0].message == Ping(9)
    assert pool.send(SLICE, Ping(9))
    assert take(pull, 1)[0].message == Ping(9)


def test_bytes_that_are_not_even_zeromq_harm_nothing(opened: Opened) -> None:
    router, dealer = pair(TCP, opened)
    host, port = router.addresses[0].removeprefix("tcp://").split(":")
    with plain.create_connection((host, int(port))) as stranger:
        stranger.sendall(os.urandom(4_096))
    assert dealer.send(SERVER, Ping(9))
    assert take(router, 1)[0].message == Ping(9)


def test_a_frame_over_the_limit_costs_its_sender_the_connection(opened: Opened) -> None:
    pull = PullLink.bind([TCP], LinkOptions(payload_bytes_max=100_000))
    opened(pull)
    with context().socket(zmq.PUSH) as raw:
        raw.linger = 0
        raw.connect(pull.addresses[0])
        raw.send(bytes(20 << 20))
        pool = PushPool()
        opened(pool)
        pool.know(SLICE, Incarnation("one"), pull.addresses)
        assert pool.send(SLICE, Ping(1))
        assert [received.message for received in take(pull, 1)] == [Ping(1)]
        assert pull.counters["bytes_in"] < 100_000


def test_a_client_can_connect_anew(address: str, opened: Opened) -> None:
    router, dealer = pair(address, opened)
    came: list[Received] = []

    def is_back() -> bool:
        # The server goes on with its turns, in one of which it notices that the old connection is gone.
        came.extend(router.receive(16))
        dealer.send(SERVER, Ping(2))
        return bool(came)

    dealer.reconnect()
    assert not dealer.send(SERVER, Ping(1))
    until(is_back, dealer, router)
    assert came[0].peer == CLIENT


@pytest.mark.parametrize("patience_ms", [2.0, 25.0, 75.0])
def test_a_client_that_is_asked_to_connect_anew_again_and_again_does(
    address: str, patience_ms: float, opened: Opened
) -> None:
    """A patience may be shorter than the pause before the new connection, and than that takes to come about."""
    clock = VirtualClock(0.0)
    router, dealer = pair(address, opened, LinkOptions(clock=clock))

    def is_back() -> bool:
        router.receive(16)
        dealer.reconnect()
        if dealer._connect_at_ms is not None:
            clock.advance(clock.now_ms() + patience_ms)
        return dealer.send(SERVER, Ping(2))

    until(is_back, dealer)
    assert clock.now_ms() <= RECONNECT_AFTER_MS + patience_ms


def test_a_connection_that_does_not_come_about_in_time_is_given_up(opened: Opened) -> None:
    clock = VirtualClock(0.0)
    with plain.create_server(("127.0.0.1", 0)) as silent:
        dealer = DealerLink.connect(
            CLIENT, SERVER, [f"tcp://127.0.0.1:{silent.getsockname()[1]}"], LinkOptions(clock=clock)
        )
        opened(dealer)
        dealer.reconnect()
        assert dealer._connect_at_ms is None
        clock.advance(CONNECT_MS)
        dealer.reconnect()
        assert dealer._connect_at_ms == CONNECT_MS + RECONNECT_AFTER_MS


def test_nothing_said_before_is_heard_after_what_a_newer_connection_says(
    address: str, opened: Opened
) -> None:
    """A server that hangs for so long that its client connects anew finds both connections' messages waiting."""
    router, dealer = pair(address, opened)
    for number in range(1, 41):
        assert dealer.send(SERVER, Ping(number))
    dealer.reconnect()
    until(lambda: dealer.send(SERVER, Ping(41)), dealer)
    heard: list[int] = []

    def is_all_heard() -> bool:
        # One a turn, so that the newer connection is there before all of the older one is read.
        router.take_lost()
        for received in router.receive(1):
            assert isinstance(received.message, Ping)
            heard.append(received.message.number)
        return 41 in heard and not router.has_more

    until(is_all_heard, dealer)
    assert heard == sorted(heard)
    assert len(heard) + router.counters["outdated_in"] == 41


@pytest.mark.parametrize("was_in", [False, True])
def test_connections_that_end_at_once_mean_a_missing_key_only_before_the_first_that_did_not(
    was_in: bool, opened: Opened
) -> None:
    router = RouterLink.bind([TCP])
    opened(router)
    port = int(router.addresses[0].rpartition(":")[2])
    if not was_in:
        router.close()
    dealer = DealerLink.connect(CLIENT, SERVER, [f"tcp://127.0.0.1:{port}"])
    opened(dealer)
    if was_in:
        until(lambda: dealer.send(SERVER, Ping(1)), dealer)
        router.close()
    with plain.socket() as proxy:
        proxy.setsockopt(plain.SOL_SOCKET, plain.SO_REUSEADDR, 1)

        def is_bound() -> bool:
            with contextlib.suppress(OSError):  # its last owner is closed in the background
                proxy.bind(("127.0.0.1", port))
                return True
            return False

        until(is_bound)
        proxy.listen()
        proxy.settimeout(0.02)
        taken = 0
        until_ms = CLOCK.now_ms() + 30_000.0
        while taken < 12 and not dealer.refusal and CLOCK.now_ms() < until_ms:
            dealer.send(SERVER, Ping(2))
            with contextlib.suppress(TimeoutError):
                proxy.accept()[0].close()
                taken += 1
    assert bool(dealer.refusal) is not was_in, (dealer.refusal, taken)


def test_a_closed_link_neither_sends_nor_receives(address: str) -> None:
    router = RouterLink.bind([address])
    dealer = DealerLink.connect(CLIENT, SERVER, router.addresses)
    for link in (router, dealer):
        link.close()
        assert not link.send(CLIENT if link is router else SERVER, Ping(1))
        assert link.receive(1) == []
        assert not link.has_more
        assert link.fileno() == -1


def test_what_was_sent_last_is_flushed_by_close(opened: Opened) -> None:
    pull, pool = fed(TCP, opened)
    for number in range(20):
        assert pool.send(SLICE, Ping(number), image())
    pool.close()
    assert len(take(pull, 20)) == 20


def test_a_message_of_endless_frames_is_passed_over_in_turns_and_others_come_through(
    address: str, opened: Opened
) -> None:
    router, dealer = pair(address, opened, CONTROL)
    with context().socket(zmq.DEALER) as raw:
        raw.linger = 1_000
        raw.connect(router.addresses[0])
        raw.send_multipart([b""] * 300_000)
        turns = 0

        def is_passed_over() -> bool:
            nonlocal turns
            assert list(router.receive(64)) == []
            turns += 1
            return router.counters["garbage_in"] == 1 and not router.has_more

        until(is_passed_over, router)
    assert turns > 300_000 // 4_098  # all at once it took half a second
    assert dealer.send(SERVER, Ping(9))
    assert [received.message for received in take(router, 1)] == [Ping(9)]
    assert router.counters["garbage_in"] == 1


def test_one_turn_decodes_a_bounded_number_of_header_bytes(address: str, opened: Opened) -> None:
    router, dealer = pair(address, opened, CONTROL)
    long = Withdraw(ModelId("m"), tuple(SeqRun(1, 1) for _ in range(4_096)))  # 12 kB
    sent = 100
    for _ in range(sent):
        assert dealer.send(SERVER, long)
    came = 0

    def is_all_in() -> bool:
        nonlocal came
        before = router.counters["bytes_in"]
        came += len(router.receive(64))
        assert router.counters["bytes_in"] - before < TURN_HEADER_BYTES + codec.HEADER_BYTES_MAX
        return came == sent

    until(is_all_in, router)
    assert router.counters["bytes_in"] > 10 * TURN_HEADER_BYTES


def test_a_control_socket_takes_no_payload_and_no_large_frame(address: str, opened: Opened) -> None:
    router, dealer = pair(address, opened, CONTROL)
    with context().socket(zmq.DEALER) as raw:
        raw.linger = 0
        raw.identity = b"client/9"
        raw.connect(router.addresses[0])
        raw.send_multipart([codec.encode(Envelope(WIRE_VERSION, 0, 0.0, (Parcel((), Ping(1)),))), bytes(100)])
        until(lambda: not router.receive(1) and router.counters["garbage_in"] == 1, router)
        with raw.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
            raw.send(bytes(CONTROL.frame_bytes_max + 1))
            assert monitor.poll(5_000), "it costs the connection"
            raw.disable_monitor()
    assert CONTROL.frame_bytes_max == 16 << 20
    assert router.counters["bytes_in"] < 1 << 20
    with pytest.raises(LocalProtocolError, match="payload"):
        dealer.send(SERVER, Ping(1), image())


def mapped(name: str) -> int:
    """How often this process has mapped that memory beyond its owner's own mapping."""
    own_name = name.rpartition("/")[2]
    return Path("/proc/self/maps").read_text().count(own_name) - 1


@pytest.mark.skipif(not memory_address(), reason="this system has no memory to share")
def test_shared_memory_is_lent_only_by_ipc(address: str, opened: Opened) -> None:
    pull = PullLink.bind([address], LinkOptions(is_sharing=True))
    opened(pull)
    array = image()[0].array
    arena = Arena(1 << 20)
    lying = NamedTensor("x", array)
    assert share(lying, arena)
    sent = frames.join((frames.pack(INFER, [lying], is_sharing=True),), epoch=Epoch(0), sent_at_ms=0.0)
    with context().socket(zmq.PUSH) as raw:
        raw.linger = 1_000
        raw.connect(pull.addresses[0])
        raw.send_multipart(sent)
        if address.startswith("ipc"):
            np.testing.assert_array_equal(take(pull, 1)[0].tensors[0].array, array)
            assert mapped(arena.name)
            arena.close()
            until(lambda: not pull.receive(1) and not mapped(arena.name), pull)
            return
        until(lambda: not pull.receive(1) and pull.counters["garbage_in"] == 1, pull)


@pytest.mark.skipif(not memory_address(), reason="this system has no memory to share")
def test_a_push_socket_shares_memory_only_by_ipc(address: str, opened: Opened) -> None:
    pull = PullLink.bind([address], LinkOptions(is_sharing=True))
    opened(pull)
    pool = PushPool(PushOptions(shared_bytes_max=1 << 20))
    opened(pool)
    pool.know(SLICE, Incarnation("one"), pull.addresses)
    assert pool.send(SLICE, Ping(1), image())
    np.testing.assert_array_equal(take(pull, 1)[0].tensors[0].array, image()[0].array)
    assert (pull.counters["shared_bytes_in"] > 0) is address.startswith("ipc")


OUT_OF_DESCRIPTORS = """
import os, resource, sys
from fabric.errors import PeerLost
from fabric.ids import Incarnation, PeerId
from fabric.messages import Ping
from fabric.sockets import DealerLink, PullLink, PushPool
pull = PullLink.bind(["tcp://127.0.0.1:0"])
pool = PushPool()
pool.know(PeerId("slice"), Incarnation("one"), pull.addresses)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
assert not pool.send(PeerId("slice"), Ping(1))
assert pool.counters["unroutable_out"] == 1
try:
    DealerLink.connect(PeerId("a/1"), PeerId("b/1"), pull.addresses)
except PeerLost as error:
    print(error)
for descriptor in held:
    os.close(descriptor)
assert pool.send(PeerId("slice"), Ping(2))
came = []
while not came:
    came = pull.receive(1)
print(came[0].message)
"""


FIRST_SOCKET_WITH_FEW_DESCRIPTORS = """
import os, resource, sys
from fabric.client import BlockingClient, ClientOptions
from fabric.errors import PeerLost

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
for spare in range(24):
    child = os.fork()
    if child:
        print(spare, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        continue
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    for descriptor in held[:spare]:
        os.close(descriptor)
    try:
        BlockingClient("tcp://127.0.0.1:9", ClientOptions(connect_timeout_ms=50.0)).open()
    except PeerLost:
        os._exit(7)
    os._exit(8)
"""


def test_a_process_that_has_few_descriptors_left_for_its_first_socket_is_told_so_and_lives() -> None:
    """libzmq aborts a process in which one is missing for its threads."""
    told = subprocess.run(
        [sys.executable, "-c", FIRST_SOCKET_WITH_FEW_DESCRIPTORS],
        capture_output=True,
        timeout=60,
        check=False,
        text=True,
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines() == [f"{spare} 7" for spare in range(24)]


def test_without_a_descriptor_left_a_peer_is_unreachable_for_now() -> None:
    told = subprocess.run(
        [sys.executable, "-c", OUT_OF_DESCRIPTORS], capture_output=True, timeout=60, check=False, text=True
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines() == ["no socket can be opened: Too many open files", str(Ping(2))]


FLOODED = """
import sys
from fabric.sockets import LinkOptions, RouterLink
link = RouterLink.bind(["tcp://127.0.0.1:0"], LinkOptions(queue_messages_max=10))
print(link.addresses[0], flush=True)
sys.stdin.readline()
print(sum(1 for _ in iter(lambda: link.receive(1_000), [])), flush=True)
link.close()
"""


def test_a_process_survives_a_peer_that_fills_its_queue_and_leaves() -> None:
    """libzmq 4.3.5 aborts the process here when the receiver has ZeroMQ's heartbeats on."""
    receiver = subprocess.Popen(
        [sys.executable, "-c", FLOODED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with receiver:
        assert receiver.stdout is not None
        assert receiver.stdin is not None
        address = receiver.stdout.readline().strip()
        with zmq.Context() as context, context.socket(zmq.DEALER) as flood:
            flood.setsockopt(zmq.LINGER, 0)
            flood.setsockopt(zmq.SNDTIMEO, 300)
            flood.setsockopt(zmq.HEARTBEAT_IVL, 100)
            flood.setsockopt(zmq.HEARTBEAT_TIMEOUT, 300)
            flood.connect(address)
            with contextlib.suppress(zmq.Again):
                for _ in range(1_000_000):
                    flood.send(b"y" * 2_000)
        with pytest.raises(subprocess.TimeoutExpired):
            receiver.wait(timeout=1.0)
        receiver.stdin.write("\n")
        receiver.stdin.flush()
        assert receiver.stdout.readline().strip().isdigit()
        assert receiver.wait(timeout=10) == 0
