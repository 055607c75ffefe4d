"""Local streams beside ZeroMQ's sockets: what arrives, what breaks their bounds, and who goes by ZeroMQ instead."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import select
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fabric import codec, frames
from fabric.clock import MonotonicClock, VirtualClock
from fabric.codec import Buffer
from fabric.errors import ConfigError
from fabric.ids import Incarnation, PeerId
from fabric.ipc import PATH_BYTES_MAX, IpcPath
from fabric.link import Link, NamedTensor
from fabric.messages import WIRE_VERSION, Envelope, Parcel, Ping, Pong
from fabric.sockets import (
    CONTROL,
    DealerLink,
    LinkOptions,
    PullLink,
    PushOptions,
    PushPool,
    RouterLink,
    local_stream,
)
from fabric.sockets.local_stream import LocalStream
from fabric.sockets.local_streams import GREET_WITHIN_MS, LocalStreams, are_allowed
from fabric.sockets.routes import Routes, new_route
from tests.raw_streams import HELLO, framed, greeting, numbers

pytestmark = pytest.mark.skipif(not are_allowed(), reason="this system has no local streams")

CLOCK = MonotonicClock()
PYTHON = Path("/usr/bin/python3")
"""An interpreter that other users may run; that of an environment mostly lies in somebody's home."""
as_another_user = pytest.mark.skipif(
    os.geteuid() != 0 or not PYTHON.exists(), reason="only root can be another user, who needs a Python"
)
SMALL = LinkOptions(header_bytes_max=1_000, payload_bytes_max=100_000)
CLIENT, SERVER, SLICE = PeerId("client/1"), PeerId("server/1"), PeerId("node/gpu0/0")


def whole(*messages: Ping | Pong) -> bytes:
    header = codec.encode(Envelope(WIRE_VERSION, 0, 0.0, tuple(Parcel((), one) for one in messages)))
    return framed(header)


class Opened(list[Link]):
    def until(self, is_true: Callable[[], bool], limit_ms: float = 20_000.0) -> None:
        """Let all links go on until it is so."""
        end_ms = CLOCK.now_ms() + limit_ms
        while not is_true():
            assert CLOCK.now_ms() < end_ms, "it did not happen in time"
            for link in self:
                link.receive(0)
            select.select([link.fileno() for link in self if link.fileno() >= 0], [], [], 0.002)


@pytest.fixture
def opened() -> Iterator[Opened]:
    links = Opened()
    yield links
    for link in links:
        link.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tenuto-streams-") as made:
        yield Path(made)


def bound(folder: Path, opened: Opened, options: LinkOptions | None = None) -> RouterLink:
    router = RouterLink.bind([f"ipc://{folder}/server"], options)
    opened.append(router)
    return router


def connected(folder: Path, opened: Opened, name: PeerId = CLIENT) -> DealerLink:
    dealer = DealerLink.connect(name, SERVER, [f"ipc://{folder}/server"], CONTROL)
    opened.append(dealer)
    return dealer


def met(folder: Path, opened: Opened) -> tuple[RouterLink, DealerLink]:
    router, dealer = bound(folder, opened), connected(folder, opened)
    greet(router, dealer, opened)
    return router, dealer


def greet(router: RouterLink, dealer: DealerLink, opened: Opened) -> None:
    assert dealer.send(SERVER, Ping(1))
    opened.until(lambda: [one.message for one in router.receive(1)] == [Ping(1)])
    assert router.send(CLIENT, Pong(1))
    opened.until(lambda: [one.message for one in dealer.receive(1)] == [Pong(1)])


def raw(folder: Path, name: str = "server") -> socket.socket:
    stranger = socket.socket(socket.AF_UNIX)
    stranger.settimeout(10.0)
    stranger.connect(f"{folder}/{name}.stream")
    return stranger


def is_hung_up(stranger: socket.socket) -> bool:
    try:
        return stranger.recv(1) == b""
    except ConnectionResetError:
        return True


# ------------------------------------------------------------ what arrives


@settings(max_examples=100, deadline=None)
@given(
    messages=st.lists(
        st.lists(
            st.sampled_from([0, 1, 7, 8, 9, 100, 65_535, 65_536, 65_537, 90_000]), min_size=1, max_size=5
        ),
        min_size=1,
        max_size=6,
    ),
    chunk=st.sampled_from([1_000, 65_535, 65_536, 1 << 20]),
    seed=st.integers(0, 1 << 32),
)
def test_frames_arrive_as_they_were_sent_however_they_are_cut(
    messages: list[list[int]], chunk: int, seed: int
) -> None:
    """The writer of these bytes is this test, not the code that is looked at."""
    draws = random.Random(seed)
    sent = [[draws.randbytes(size) for size in sizes] for sizes in messages]
    data = framed(HELLO) + b"".join(framed(*parts) for parts in sent)
    came: list[Sequence[Buffer]] = []
    with tempfile.TemporaryDirectory() as made:
        streams = LocalStreams(LinkOptions())
        streams.listen(Path(made) / "s.stream")
        try:
            with raw(Path(made), "s") as writer:
                writer.setblocking(False)
                while len(came) < len(sent):
                    if data:
                        with contextlib.suppress(BlockingIOError):
                            data = data[writer.send(data[:chunk]) :]
                    streams.look()
                    while (taken := streams.take()) is not None:
                        came.append(taken[1])
        finally:
            streams.close()
    assert [[bytes(part) for part in parts] for parts in came] == sent


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(
        st.lists(st.sampled_from([0, 1, 8, 3_000, 65_536, 400_001]), min_size=1, max_size=4),
        min_size=1,
        max_size=8,
    ),
    seed=st.integers(0, 1 << 32),
)
def test_what_one_end_sends_is_what_docs_say_and_waits_where_nobody_reads(
    sizes: list[list[int]], seed: int
) -> None:
    """The reader is this test."""
    draws = random.Random(seed)
    sent = [[draws.randbytes(size) for size in parts] for parts in sizes]
    wanted = framed(HELLO + b"me") + b"".join(framed(*parts) for parts in sent)
    with tempfile.TemporaryDirectory() as made, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{made}/s.stream")
        listener.listen()
        streams = LocalStreams(LinkOptions())
        try:
            stream = streams.connect(Path(made) / "s.stream", b"me")
            assert stream is not None
            for parts in sent:
                assert stream.send(parts, sum(map(len, parts)))
            reader, _ = listener.accept()
            with reader:
                reader.setblocking(False)
                came = b""
                while len(came) < len(wanted):
                    try:
                        came += reader.recv(draws.choice((100, 70_000, 1 << 20)))
                    except BlockingIOError:
                        streams.look()
            assert came == wanted
            assert not stream.has_unsent
        finally:
            streams.close()


def test_links_of_one_host_meet_by_streams_and_say_so(folder: Path, opened: Opened) -> None:
    router, dealer = bound(folder, opened), connected(folder, opened)
    assert dealer.send(SERVER, Ping(1)), "nobody waits for a handshake"
    opened.until(lambda: [one.message for one in router.receive(1)] == [Ping(1)])
    assert router.send(CLIENT, Pong(1))
    opened.until(lambda: [one.message for one in dealer.receive(1)] == [Pong(1)])
    assert (router.counters["local_streams"], dealer.counters["local_streams"]) == (1, 1)
    dealer.close()
    opened.until(lambda: list(router.take_lost()) == [CLIENT])
    assert router.counters["local_streams"] == 0


def test_the_last_words_of_a_peer_are_heard_before_it_is_lost(folder: Path, opened: Opened) -> None:
    router, dealer = bound(folder, opened), connected(folder, opened)
    for number in range(200):
        assert dealer.send(SERVER, Ping(number))
    dealer.close()
    heard: list[int] = []
    lost: list[PeerId] = []

    def is_over() -> bool:
        lost.extend(router.take_lost())
        came = router.receive(16)
        assert not (lost and came)
        heard.extend(one.message.number for one in came if isinstance(one.message, Ping))
        return bool(lost)

    opened.until(is_over)
    assert (heard, lost) == (list(range(200)), [CLIENT])


def test_a_server_that_spoke_and_went_is_told_lost_though_something_was_said_in_between(
    folder: Path, opened: Opened
) -> None:
    router, dealer = met(folder, opened)
    assert router.send(CLIENT, Pong(2))
    router.close()
    assert [one.message for one in dealer.receive(64)] == [Pong(2)]
    dealer.send(SERVER, Ping(3))  # an answer to what came
    assert list(dealer.take_lost()) == [SERVER]
    assert not dealer.take_lost()


@pytest.mark.parametrize("is_answered", [False, True])
def test_all_that_travelled_together_is_heard_before_its_sender_is_lost(
    is_answered: bool,
    folder: Path,
    opened: Opened,
) -> None:
    router, dealer = met(folder, opened)
    assert router.send_packed(CLIENT, [frames.pack(Pong(number)) for number in range(4)])
    opened.until(lambda: dealer.has_more)
    heard = [one.message for one in dealer.receive(1)]
    router.close()
    if is_answered:
        opened.until(lambda: not dealer.send(SERVER, Ping(3)))
    while not dealer.take_lost():
        (one,) = dealer.receive(1)
        heard.append(one.message)
        if is_answered:
            dealer.send(SERVER, Ping(4))
    assert heard == [Pong(number) for number in range(4)]
    assert not dealer.receive(1)


def test_a_server_that_is_back_is_reached_where_it_was_and_not_by_the_network(
    folder: Path, opened: Opened
) -> None:
    router = RouterLink.bind([f"ipc://{folder}/server", "tcp://127.0.0.1:0"])
    dealer = DealerLink.connect(CLIENT, SERVER, router.addresses, CONTROL)
    opened += [router, dealer]
    greet(router, dealer, opened)
    router.close()
    opened.until(lambda: bool(dealer.take_lost()))
    dealer.send(SERVER, Ping(2))  # nobody is there, which ZeroMQ may see a moment later
    router = bound(folder, opened)

    def is_heard() -> bool:
        dealer.take_lost()
        dealer.send(SERVER, Ping(3))
        return Ping(3) in [one.message for one in router.receive(16)]

    opened.until(is_heard)
    assert dealer.is_by_ipc


def test_a_flood_by_one_stream_does_not_starve_another(folder: Path, opened: Opened) -> None:
    router = bound(folder, opened)
    flood, friend = (
        connected(folder, opened, PeerId("flood/1")),
        connected(folder, opened, PeerId("friend/1")),
    )
    for number in range(500):
        assert flood.send(SERVER, Ping(number))
    assert friend.send(SERVER, Ping(7))
    opened.until(lambda: router.counters["local_streams"] == 2)
    assert "friend/1" in [one.peer for one in router.receive(4)]


def test_one_that_does_not_read_is_refused_at_its_bound_and_others_are_served(
    folder: Path, opened: Opened
) -> None:
    router = bound(folder, opened, LinkOptions(payload_bytes_max=0, queue_messages_max=100))
    sleeper, friend = connected(folder, opened), connected(folder, opened, PeerId("friend/1"))
    for one in (sleeper, friend):
        assert one.send(SERVER, Ping(0))
    opened.until(lambda: router.counters["messages_in"] + len(router.receive(1)) >= 2)
    sent = 0
    while router.send(CLIENT, Pong(sent)):
        sent += 1
        assert sent < 100_000
    assert router.counters["full_out"] == 1
    assert router.send(PeerId("friend/1"), Pong(1))
    heard: list[int] = []

    def is_all_heard() -> bool:
        heard.extend(one.message.number for one in sleeper.receive(64) if isinstance(one.message, Pong))
        return len(heard) == sent

    opened.until(is_all_heard)
    assert heard == list(range(sent)), "what was accepted arrives, in order"
    assert router.send(CLIENT, Pong(1))


def test_what_waits_is_flushed_by_close(folder: Path, opened: Opened) -> None:
    read: list[bytes] = []

    def read_all(listener: socket.socket) -> None:
        with listener.accept()[0] as reader:
            reader.settimeout(10.0)
            while data := reader.recv(1 << 16):
                read.append(data)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/server.stream")
        listener.listen()
        streams = LocalStreams(LinkOptions())
        stream = streams.connect(folder / "server.stream", b"")
        assert stream is not None
        sent = [bytes([number]) * 100_000 for number in range(50)]
        for part in sent:
            assert stream.send((part,), len(part))
        assert stream.has_unsent
        reading = threading.Thread(target=read_all, args=(listener,))
        reading.start()
        streams.close()
        reading.join(10.0)
    assert b"".join(read) == framed(HELLO) + b"".join(framed(part) for part in sent)


@pytest.mark.parametrize("words", [1, 2, 65, 200])
def test_whoever_says_something_and_leaves_is_told_lost_once_and_nothing_of_it_is_kept(
    words: int, folder: Path, opened: Opened
) -> None:
    router = bound(folder, opened)
    heard: Counter[PeerId] = Counter()
    lost: Counter[PeerId] = Counter()
    names = [PeerId(f"client/{number}") for number in range(5)]
    for name in names:
        dealer = DealerLink.connect(name, SERVER, [f"ipc://{folder}/server"], CONTROL)
        for number in range(words):
            assert dealer.send(SERVER, Ping(number))
        dealer.close()

    def is_over() -> bool:
        lost.update(router.take_lost())
        for one in router.receive(64):
            heard[one.peer] += 1
            router.send(one.peer, Pong(0))  # an answer to who has left
        return lost.total() >= len(names) and not router.has_more

    opened.until(is_over)
    assert lost == Counter(names)
    assert heard == Counter(dict.fromkeys(names, words))
    assert router.counters["local_streams"] == 0
    assert not any(router.send(name, Pong(1)) for name in names)


@pytest.mark.parametrize("looks", [1, 2, 3])
def test_what_follows_a_large_message_is_taken_however_often_somebody_looks(
    looks: int, folder: Path, opened: Opened
) -> None:
    pull = PullLink.bind([f"ipc://{folder}/in"])
    opened.append(pull)
    sent = [bytes(100_000), b"abc", b"def"]
    with raw(folder, "in") as writer:
        writer.settimeout(None)
        writer.sendall(framed(HELLO) + b"".join(framed(part) for part in sent))
        writer.shutdown(socket.SHUT_WR)
        for _ in range(20):
            for _ in range(looks):
                pull.receive(0)
            pull.receive(1)
        opened.until(lambda: not pull.receive(16) and pull.counters["garbage_in"] == len(sent))
    assert pull.counters["bytes_in"] == sum(map(len, sent))


def test_a_peer_whose_name_was_forgotten_is_answered_again_once_it_speaks(
    folder: Path, opened: Opened
) -> None:
    router = bound(folder, opened)
    router._routes = Routes(names_max=2)
    dealers = [connected(folder, opened, PeerId(f"client/{number}")) for number in range(3)]
    for dealer in (*dealers, dealers[0]):
        assert dealer.send(SERVER, Ping(1))
        opened.until(lambda: bool(router.receive(1)))
    assert router.send(PeerId("client/0"), Pong(1))
    opened.until(lambda: [one.message for one in dealers[0].receive(1)] == [Pong(1)])


def test_peers_by_zeromq_are_heard_beside_a_flood_by_streams(folder: Path, opened: Opened) -> None:
    router = RouterLink.bind(
        [f"ipc://{folder}/server", "tcp://127.0.0.1:0"], LinkOptions(payload_bytes_max=0)
    )
    far = DealerLink.connect(PeerId("far/1"), SERVER, router.addresses[1:], CONTROL)
    opened += [router, far]
    flood = connected(folder, opened, PeerId("flood/1"))
    opened.until(lambda: far.send(SERVER, Ping(0)))
    heard: Counter[PeerId] = Counter()
    waiting = 200  # of each, at the begin of each turn

    def is_heard() -> bool:
        for _ in range(waiting):
            flood.send(SERVER, Ping(1))
            far.send(SERVER, Ping(2))
        router.take_lost()
        heard.update(one.peer for one in router.receive(64))
        return heard[PeerId("far/1")] >= 500

    opened.until(is_heard)
    assert heard[PeerId("flood/1")] < 5 * heard[PeerId("far/1")], "each turn hears both"


def test_closing_waits_for_nobody(folder: Path) -> None:
    links: list[Link] = []
    for number in range(5):
        pull = PullLink.bind([f"ipc://{folder}/{number}"])
        pool = PushPool()
        pool.know(SLICE, Incarnation("one"), pull.addresses)
        while pool.send(SLICE, Ping(1), [NamedTensor("x", np.zeros(500_000, np.uint8))]):
            pass  # nobody reads
        links += [pool, pull]
    began_ms = CLOCK.now_ms()
    for link in links:
        link.close()
    assert CLOCK.now_ms() - began_ms < 50.0


def test_what_is_dropped_and_not_read_is_let_go_after_a_moment(folder: Path, opened: Opened) -> None:
    pull = PullLink.bind([f"ipc://{folder}/in"])
    pool = PushPool()
    opened += [pull, pool]
    pool.know(SLICE, Incarnation("one"), pull.addresses)
    payload = np.zeros(500_000, np.uint8)
    seen = weakref.ref(payload)
    assert pool.send(SLICE, Ping(1), [NamedTensor("x", payload)])
    assert (pool.counters["local_streams"], pool.counters["sockets_open"]) == (1, 0)
    del payload
    assert seen() is not None
    pool.drop(SLICE)
    assert pool.counters["local_streams"] == 0
    until_ms = CLOCK.now_ms() + 10_000.0
    while seen() is not None:
        assert CLOCK.now_ms() < until_ms


def test_a_push_queue_by_a_stream_is_bounded_in_bytes(folder: Path, opened: Opened) -> None:
    pull = PullLink.bind([f"ipc://{folder}/in"])
    pool = PushPool(PushOptions(queue_bytes_max=4_000_000))
    opened += [pull, pool]
    pool.know(SLICE, Incarnation("one"), pull.addresses)
    sent = 0
    while pool.send(SLICE, Ping(1), [NamedTensor("x", np.zeros(500_000, np.uint8))]):
        sent += 1
        assert sent < 20
    assert pool.counters["full_out"] == 1


# ------------------------------------------------------------ who goes by ZeroMQ


def test_a_peer_that_is_turned_away_is_lost_once_and_then_served_by_zeromq(
    folder: Path, opened: Opened
) -> None:
    router = bound(folder, opened)
    (folder / "server.stream").unlink()
    with socket.socket(socket.AF_UNIX) as unwilling:
        unwilling.bind(f"{folder}/server.stream")
        unwilling.listen()
        dealer = connected(folder, opened)
        assert dealer.send(SERVER, Ping(1))
        unwilling.accept()[0].close()
        lost: list[PeerId] = []

        def is_lost() -> bool:
            dealer.receive(1)
            lost.extend(dealer.take_lost())
            return bool(lost)

        opened.until(is_lost)
        opened.until(lambda: dealer.send(SERVER, Ping(2)))
        opened.until(lambda: [one.message for one in router.receive(1)] == [Ping(2)])
        assert router.send(CLIENT, Pong(2))
        opened.until(lambda: [one.message for one in dealer.receive(1)] == [Pong(2)])
        assert not dealer.take_lost()
        assert dealer.counters["local_streams"] == 0


def test_payload_for_one_who_turns_streams_away_arrives_by_zeromq(folder: Path, opened: Opened) -> None:
    pull = PullLink.bind([f"ipc://{folder}/in"])
    opened.append(pull)
    (folder / "in.stream").unlink()
    pool = PushPool()
    opened.append(pool)
    pool.know(SLICE, Incarnation("one"), pull.addresses)
    with socket.socket(socket.AF_UNIX) as unwilling:
        unwilling.bind(f"{folder}/in.stream")
        unwilling.listen()
        assert pool.send(SLICE, Ping(1))
        unwilling.accept()[0].close()
        opened.until(lambda: pool.counters["local_streams"] == 0)
        assert pool.send(SLICE, Ping(2))
        opened.until(lambda: [one.message for one in pull.receive(1)] == [Ping(2)])


def test_a_server_without_a_descriptor_left_is_reached_by_zeromq() -> None:
    """ZeroMQ's own connection has to be there before: libzmq 4.3.5 aborts the process where its ipc listener finds none left."""
    told = subprocess.run(
        [sys.executable, "-c", COUNTS_SOCKETS + NO_DESCRIPTORS],
        capture_output=True,
        timeout=60,
        check=False,
        text=True,
    )
    assert (told.returncode, told.stdout.strip()) == (0, "heard by ZeroMQ"), told.stderr


def test_without_a_descriptor_a_send_is_refused_or_goes_by_zeromq_and_later_there_are_streams_again() -> None:
    told = subprocess.run(
        [sys.executable, "-c", COUNTS_SOCKETS + SENDS_WITHOUT],
        capture_output=True,
        timeout=60,
        check=False,
        text=True,
    )
    assert (told.returncode, told.stdout.split()) == (0, ["True", "1.0"]), told.stderr


COUNTS_SOCKETS = """
import os
def sockets():
    held = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum(os.readlink(one).startswith("socket:") for one in held if os.path.islink(one))
"""

SENDS_WITHOUT = """
import os, resource, tempfile
from fabric.ids import Incarnation, PeerId
from fabric.messages import Ping
from fabric.sockets import DealerLink, PullLink, PushPool, RouterLink
server = PeerId("server/1")
with tempfile.TemporaryDirectory() as folder:
    router, pull = RouterLink.bind([f"ipc://{folder}/server"]), PullLink.bind([f"ipc://{folder}/in"])
    before = sockets()
    dealer = DealerLink.connect(PeerId("client/1"), server, router.addresses)
    while sockets() < before + 2:  # see above
        pass
    pool = PushPool()
    pool.know(PeerId("slice"), Incarnation("one"), pull.addresses)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    dealer.send(server, Ping(1))
    assert not pool.send(PeerId("slice"), Ping(1))
    for one in held:
        os.close(one)
    print(pool.send(PeerId("slice"), Ping(2)))
    while not pull.receive(1):
        pass
    print(pool.counters["local_streams"])
"""


def test_a_process_that_dies_of_broken_pipes_by_default_does_not_die_of_ours() -> None:
    told = subprocess.run(
        [sys.executable, "-c", PIPES], capture_output=True, timeout=60, check=False, text=True
    )
    assert (told.returncode, told.stdout.strip()) == (0, "False"), told.stderr


PIPES = """
import signal, tempfile
from fabric.ids import PeerId
from fabric.messages import Ping
from fabric.sockets import DealerLink, RouterLink
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
server = PeerId("server/1")
with tempfile.TemporaryDirectory() as folder:
    router = RouterLink.bind([f"ipc://{folder}/server"])
    dealer = DealerLink.connect(PeerId("client/1"), server, router.addresses)
    assert dealer.send(server, Ping(1))
    while not router.receive(1):
        pass
    router.close()
    print(dealer.send(server, Ping(2)))
"""


NO_DESCRIPTORS = """
import os, resource, tempfile
from fabric.ids import PeerId
from fabric.messages import Ping
from fabric.sockets import DealerLink, RouterLink
server = PeerId("server/1")
with tempfile.TemporaryDirectory() as folder:
    router = RouterLink.bind([f"ipc://{folder}/server"])
    before = sockets()
    dealer = DealerLink.connect(PeerId("client/1"), server, router.addresses)
    while sockets() < before + 2:
        pass
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    os.close(held.pop())
    assert dealer.send(server, Ping(1))
    router.receive(16)
    for one in held:
        os.close(one)
    heard = []
    while not heard:
        dealer.receive(16)
        dealer.take_lost()
        dealer.send(server, Ping(2))
        heard = [one for one in router.receive(16)]
    assert dealer.counters["local_streams"] == 0
    print("heard by ZeroMQ")
"""


def test_a_name_too_long_for_a_stream_is_served_by_zeromq(opened: Opened) -> None:
    with tempfile.TemporaryDirectory(prefix="t") as made:
        name = "x" * (PATH_BYTES_MAX - len(made) - 1)
        address = f"ipc://{made}/{name}"
        assert IpcPath(address).stream_path is None
        router = RouterLink.bind([address])
        dealer = DealerLink.connect(CLIENT, SERVER, [address], CONTROL)
        opened += [router, dealer]
        opened.until(lambda: dealer.send(SERVER, Ping(1)))
        opened.until(lambda: [one.message for one in router.receive(1)] == [Ping(1)])
        assert dealer.counters["local_streams"] == 0


@as_another_user
def test_another_users_process_is_hung_up_on(folder: Path, opened: Opened) -> None:
    router = bound(folder, opened)
    folder.chmod(0o755)
    (folder / "server.stream").chmod(0o777)
    stranger = subprocess.Popen(
        [str(PYTHON), "-c", STRANGER, f"{folder}/server.stream"], user=65_534, stdout=subprocess.PIPE
    )
    with stranger:
        assert stranger.stdout is not None
        opened.until(lambda: stranger.poll() is not None)
        assert stranger.stdout.read().strip() == b"hung up on"
    assert router.counters["bytes_in"] == 0


STRANGER = """
import socket, sys
with socket.socket(socket.AF_UNIX) as stranger:
    stranger.settimeout(10.0)
    stranger.connect(sys.argv[1])
    try:
        print("hung up on" if stranger.recv(1) == b"" else "answered")
    except ConnectionResetError:
        print("hung up on")
"""


@as_another_user
def test_another_users_server_is_not_spoken_to(folder: Path, opened: Opened) -> None:
    folder.chmod(0o777)
    command = [str(PYTHON), "-c", LISTENER, f"{folder}/server.stream"]
    with subprocess.Popen(command, user=65_534, stdout=subprocess.PIPE) as listener:
        assert listener.stdout is not None
        assert listener.stdout.readline()
        streams = LocalStreams(LinkOptions())
        with pytest.raises(ConfigError, match="another user"):
            streams.connect(folder / "server.stream", b"secret")
        streams.close()
        assert listener.stdout.readline().strip() == b"b''"


LISTENER = """
import socket, sys
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(sys.argv[1])
    listener.listen()
    print("listens", flush=True)
    print(listener.accept()[0].recv(100))
"""


# ------------------------------------------------------------ what breaks the bounds


BROKEN = {
    "no greeting": framed(b"hello"),
    "a greeting of two frames": framed(HELLO + b"a/1#1.a", b""),
    "a name that is none": framed(HELLO + b"\xff\xfe") + whole(Ping(1)),
    "a message of no frames": greeting("a/1") + bytes(8),
    "a message of too many frames": greeting("a/1") + numbers(5_000, 0),
    "a frame that is too long": greeting("a/1") + numbers(1, 1 << 30),
    "frames that are too long together": greeting("a/1") + numbers(3, 60_000, 60_000, 60_000) + bytes(64),
}


@pytest.mark.parametrize("how", BROKEN)
def test_whoever_breaks_the_bounds_is_hung_up_on_and_counted(how: str, folder: Path, opened: Opened) -> None:
    router, dealer = bound(folder, opened, SMALL), connected(folder, opened)
    with raw(folder) as stranger:
        stranger.sendall(BROKEN[how])
        opened.until(lambda: not router.receive(16) and router.counters["garbage_in"] == 1)
        assert is_hung_up(stranger)
    assert dealer.send(SERVER, Ping(9))
    opened.until(lambda: [one.message for one in router.receive(1)] == [Ping(9)])


def test_garbage_in_a_right_frame_is_counted_and_the_stream_goes_on(folder: Path, opened: Opened) -> None:
    router = bound(folder, opened)
    with raw(folder) as stranger:
        stranger.sendall(greeting("a/1") + framed(b"garbage") + whole(Ping(3)))
        opened.until(lambda: [one.message for one in router.receive(16)] == [Ping(3)])
    assert router.counters["garbage_in"] == 1


def test_a_claimed_size_takes_no_memory_before_it_is_filled(folder: Path, opened: Opened) -> None:
    router = bound(folder, opened, LinkOptions(payload_bytes_max=1 << 30))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    strangers = [raw(folder) for _ in range(4)]
    try:
        claim = numbers(2, 8, 1 << 30, 0)
        for number, stranger in enumerate(strangers):
            stranger.sendall(greeting(f"a/{number}") + claim + bytes(8))
        opened.until(lambda: router.counters["local_streams"] == 4)
        for _ in range(5):
            assert not router.receive(16)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_newer_connection_ends_the_older_one_and_what_still_waits_there(
    folder: Path, opened: Opened
) -> None:
    router = bound(folder, opened)
    old_route, new_route_ = new_route(PeerId("a/1")), new_route(PeerId("a/1"))
    with raw(folder) as older, raw(folder) as newer:
        older.sendall(framed(HELLO + old_route) + whole(Ping(1)))
        opened.until(lambda: [one.message for one in router.receive(1)] == [Ping(1)])
        newer.sendall(framed(HELLO + new_route_) + whole(Ping(2)))
        opened.until(lambda: [one.message for one in router.receive(1)] == [Ping(2)])
        assert is_hung_up(older)
        assert router.send(PeerId("a/1"), Pong(2))
        assert newer.recv(1_000).endswith(whole(Pong(2))[-3:])
        with raw(folder) as late:
            late.sendall(framed(HELLO + old_route) + whole(Ping(3)))
            opened.until(lambda: not router.receive(16) and router.counters["outdated_in"] >= 1)
            assert is_hung_up(late)
    assert list(router.take_lost()) in ([], [PeerId("a/1")])


class SetClock:
    def __init__(self) -> None:
        self.at_ms = 0.0

    def now_ms(self) -> float:
        return self.at_ms


@pytest.mark.parametrize("said", [b"", framed(b"TENUTO")[:5]])
def test_whoever_connects_and_never_greets_is_hung_up_on(said: bytes, folder: Path, opened: Opened) -> None:
    clock = SetClock()
    router = bound(folder, opened, replace(SMALL, clock=clock))
    with raw(folder) as silent, raw(folder) as friend:
        opened.until(lambda: router.counters["local_streams"] == 2)
        silent.sendall(said)
        router.receive(1)
        clock.at_ms = GREET_WITHIN_MS - 1.0
        friend.sendall(greeting(CLIENT))  # and says nothing more for now
        opened.until(lambda: bool(select.select([router.fileno()], [], [], 0.0)[0]))
        clock.at_ms = GREET_WITHIN_MS  # before we have read that
        opened.until(lambda: router.counters["local_streams"] == 1)
        assert is_hung_up(silent)
        friend.sendall(whole(Ping(1)))
        opened.until(lambda: [one.message for one in router.receive(1)] == [Ping(1)])
        clock.at_ms = 3 * GREET_WITHIN_MS
        router.receive(1)
        assert router.counters["local_streams"] == 1


def test_a_message_for_which_there_is_no_memory_costs_its_sender_the_stream(
    folder: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    router, dealer = bound(folder, opened, SMALL), connected(folder, opened)
    greet(router, dealer, opened)
    with raw(folder) as stranger:
        stranger.sendall(greeting("another/1") + numbers(2, 500, 90_000) + bytes(4))
        with monkeypatch.context() as patched:
            patched.setattr(local_stream, "_room", Mock(side_effect=MemoryError))
            opened.until(lambda: not router.receive(1) and router.counters["garbage_in"] == 1)
        assert is_hung_up(stranger)
    assert dealer.send(SERVER, Ping(2))
    opened.until(lambda: [one.message for one in router.receive(1)] == [Ping(2)])


class NoMemory(socket.socket):
    """The kernel has none for what is to be sent."""

    def send(self, *_: object) -> int:
        raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))

    sendmsg = send


def test_both_ends_find_the_end_where_the_kernel_had_no_memory_for_a_message() -> None:
    one, other = socket.socketpair()
    with select.epoll() as poll, other:
        stream = LocalStream(NoMemory(fileno=one.detach()), SMALL, poll, lambda *_: None)
        other.sendall(whole(Ping(1)))
        assert not stream.send([b"x"], 1)
        assert stream.is_broken
        assert is_hung_up(other)
        assert not stream.find_end(), "what the other end said is there"
        assert stream.receive() is not None
        assert stream.find_end()
        stream.close()


def test_what_has_only_begun_to_wait_is_not_copied_for_who_has_read_all_before() -> None:
    one, other = socket.socketpair()
    one.setblocking(False)
    noted: list[float] = []
    clock = VirtualClock(0.0)
    batch = np.zeros((4, 1 << 20), np.uint8)
    with select.epoll() as poll, other:
        options = replace(LinkOptions(), clock=clock)
        stream = LocalStream(one, options, poll, lambda _, since_ms: noted.append(since_ms))

        def read_all() -> None:
            while stream.has_unsent:
                other.recv(1 << 20)
                stream.flush()

        for row in batch[:2]:
            assert stream.send([b"head", memoryview(row)], (1 << 20) + 4)
            read_all()
            clock.advance(clock.now_ms() + 9.0)
        assert stream.send([b"head", memoryview(batch[2])], (1 << 20) + 4)
        whole_batch = weakref.ref(batch)
        del batch, row
        for since_ms in noted[:-1]:
            stream.keep_apart(since_ms)
        assert whole_batch() is not None, "the batch is there, as the row that waits is a part of it"
        stream.keep_apart(noted[-1])
        assert whole_batch() is None
        read_all()
        stream.close()


def test_whoever_connects_and_leaves_without_a_word_leaves_nothing(folder: Path, opened: Opened) -> None:
    router = bound(folder, opened)
    for _ in range(300):
        raw(folder).close()
        router.receive(16)
    opened.until(lambda: router.counters["local_streams"] == 0)
    assert not router.take_lost()
    assert router.counters["garbage_in"] == 0


def test_a_closed_link_leaves_no_file(folder: Path) -> None:
    router = RouterLink.bind([f"ipc://{folder}/server"])
    assert (folder / "server.stream").is_socket()
    router.close()
    assert list(folder.iterdir()) == []


def test_the_name_of_a_dead_process_is_taken_over(folder: Path, opened: Opened) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{folder}/server.stream")
    router, dealer = bound(folder, opened), connected(folder, opened)
    assert dealer.send(SERVER, Ping(1))
    opened.until(lambda: [one.message for one in router.receive(1)] == [Ping(1)])
    assert dealer.counters["local_streams"] == 1
