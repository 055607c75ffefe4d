"""Messages that are begun and do not end, and peers whose ZMTP is too old to say anything of their connection."""

from __future__ import annotations

import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import pytest
import zmq

from fabric.clock import MonotonicClock
from fabric.curve import guarded, new_pair
from fabric.ids import Incarnation, PeerId
from fabric.keys import SCHEDULER, Keyring, Trusted, TrustedKey
from fabric.messages import Ping
from fabric.sockets import DealerLink, LinkOptions, PullLink, PushPool, RouterLink, context, unfinished
from fabric.sockets.routes import new_route
from tests.integration.raw_zmtp import connect, frame_start, shake_hands

Server = RouterLink | PullLink
MIB = 1 << 20
TCP = "tcp://127.0.0.1:0"
SERVER, SLICE = PeerId("server/1"), PeerId("node/gpu0/0")
NAME = new_route(PeerId("x/1")).decode()
PIECE = frame_start(60_000, more=True) + bytes(60_000)
LISTENING: dict[str, Callable[[], Server]] = {
    "DEALER": lambda: RouterLink.bind([TCP], LinkOptions(header_bytes_max=MIB, payload_bytes_max=0)),
    "PUSH": lambda: PullLink.bind([TCP], LinkOptions(header_bytes_max=MIB, payload_bytes_max=MIB)),
}


@pytest.fixture(params=LISTENING)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(unfinished, "LOOK_EVERY_MS", 1.0)
    link = LISTENING[kind]()
    yield link
    link.close()


def until(is_true: Callable[[], bool], server: Server) -> None:
    clock = MonotonicClock()
    end_ms = clock.now_ms() + 20_000
    while not is_true():
        assert clock.now_ms() < end_ms, "it did not happen in time"
        server.take_lost()
        server.receive(16)


def has_ended(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    finally:
        connection.settimeout(10)


def has_more_garbage(server: Server, before: float = 0) -> bool:
    return server.counters["garbage_in"] > before


def a_friend_is_heard(server: Server) -> None:
    with ExitStack() as stack:
        if isinstance(server, RouterLink):
            dealer = DealerLink.connect(PeerId("client/1"), SERVER, server.addresses)
            stack.callback(dealer.close)
            send: Callable[[], bool] = partial(dealer.send, SERVER, Ping(9))
        else:
            pool = PushPool()
            stack.callback(pool.close)
            pool.know(SLICE, Incarnation("one"), server.addresses)
            send = partial(pool.send, SLICE, Ping(9))
        clock = MonotonicClock()
        end_ms = clock.now_ms() + 20_000
        while not send():
            assert clock.now_ms() < end_ms
        heard: list[object] = []
        while not heard:
            assert clock.now_ms() < end_ms
            heard += [received.message for received in server.receive(16)]
        assert heard == [Ping(9)]


@contextmanager
def busy(server: Server, kind: str, count: int = 1) -> Iterator[Callable[[], None]]:
    """So many connections that always have a message waiting; what is given takes one message of all that wait."""
    with ExitStack() as stack:
        floods = []
        for number in range(count):
            flood = stack.enter_context(context().socket(getattr(zmq, kind)))
            flood.identity = new_route(PeerId(f"flood/{number}"))
            flood.connect(server.addresses[0])
            floods.append(flood)

        def take_one() -> None:
            clock = MonotonicClock()
            end_ms = clock.now_ms() + 20_000
            is_waiting = False
            while not is_waiting:
                assert clock.now_ms() < end_ms
                for one in floods:
                    with suppress(zmq.Again):
                        while True:
                            one.send(b"", zmq.NOBLOCK)
                is_waiting = server._is_zmq_waiting()
            server.receive(1)
            server.take_lost()

        yield take_one


@pytest.mark.parametrize(
    "frame",
    [PIECE, b"\x01\x00" * 10_000],
    ids=["long", "empty"],
)
def test_a_message_without_an_end_costs_its_sender_the_connection(
    server: Server, kind: str, frame: bytes
) -> None:
    with shake_hands(server.addresses[0], NAME, kind) as endless:
        sent = 0

        def is_ended() -> bool:
            nonlocal sent
            if has_ended(endless):
                return True
            try:
                endless.sendall(frame)
                sent += len(frame)
            except ConnectionError:
                return True
            return False

        until(is_ended, server)
        assert sent < 64 * MIB, (
            "two at most, and what the kernel keeps of it, which where it is told to is a lot"
        )
        assert server.counters["garbage_in"] == 1
    a_friend_is_heard(server)


def test_it_is_ended_too_where_no_descriptor_is_left(server: Server, kind: str) -> None:
    former = resource.getrlimit(resource.RLIMIT_NOFILE)
    with shake_hands(server.addresses[0], NAME, kind) as endless:
        resource.setrlimit(resource.RLIMIT_NOFILE, (8, former[1]))  # fewer than are open
        try:
            with suppress(ConnectionError):
                while not has_ended(endless):
                    endless.sendall(PIECE)
                    server.take_lost()
                    server.receive(16)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, former)
    assert server.counters["garbage_in"] == 1
    a_friend_is_heard(server)


def test_it_is_ended_too_where_another_message_always_waits(server: Server, kind: str) -> None:
    with shake_hands(server.addresses[0], NAME, kind) as endless, busy(server, kind) as take_one:
        sent = 0
        while not has_ended(endless):
            assert sent < 64 * MIB
            endless.sendall(PIECE)
            sent += len(PIECE)
            take_one()
    a_friend_is_heard(server)


def test_whole_messages_that_wait_in_a_busy_link_end_no_connection(server: Server, kind: str) -> None:
    """Those of several are more than one that has not ended may have."""
    piece = PIECE * 10
    with shake_hands(server.addresses[0], NAME, kind) as friend, busy(server, kind, 3) as take_one:
        friend.setblocking(False)
        unsent = memoryview((piece + b"\x00\x00") * 30)
        while unsent:
            with suppress(BlockingIOError):
                unsent = unsent[friend.send(unsent) :]
            take_one()
        for _ in range(100):
            take_one()
        assert not has_ended(friend)


def test_one_that_ends_late_is_heard_however_slowly_it_comes(server: Server, kind: str) -> None:
    limit = MIB if kind == "DEALER" else 2 * MIB
    with shake_hands(server.addresses[0], NAME, kind) as slow:
        for _ in range(5):  # five in a row are more than one may have
            for _ in range(limit // len(PIECE)):
                slow.sendall(PIECE)
                server.receive(16)
            garbage = server.counters["garbage_in"]
            slow.sendall(b"\x00\x00")
            until(partial(has_more_garbage, server, garbage), server)  # for its frames say nothing
        assert not has_ended(slow)
    assert server.counters["garbage_in"] == 5


def test_all_together_may_have_begun_no_more_than_four_of_the_largest(server: Server, kind: str) -> None:
    begun = (MIB if kind == "DEALER" else 2 * MIB) - 60_000
    with ExitStack() as stack:
        strangers = [stack.enter_context(shake_hands(server.addresses[0], NAME, kind)) for _ in range(8)]
        for one in strangers:
            for _ in range(begun // len(PIECE)):
                with suppress(ConnectionError):  # it may be one of those that end
                    one.sendall(PIECE)
                server.receive(16)
        until(partial(has_more_garbage, server, 2), server)
        ended = sum(map(has_ended, strangers))
        assert 3 <= ended <= 5, "what is over four of the largest"
    a_friend_is_heard(server)


def test_a_handshake_of_who_has_no_key_is_ended_when_it_is_larger_than_any(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a message of who has one is not, as large as it may be, though it is the first by its connection."""
    monkeypatch.setattr(unfinished, "LOOK_EVERY_MS", 1.0)
    pair = new_pair(SCHEDULER)
    guard = guarded(
        Keyring(pair, Trusted((TrustedKey(SCHEDULER, pair.public, ""),))), {SCHEDULER}, names=False
    )
    link = RouterLink if kind == "DEALER" else PullLink
    with ExitStack() as stack:
        server = link.bind([TCP], LinkOptions(header_bytes_max=MIB, payload_bytes_max=0), guard)
        stack.callback(server.close)
        friend = stack.enter_context(context().socket(getattr(zmq, kind)))
        address, _ = guard.connect_to(friend, server.addresses[0], SCHEDULER) if guard else ("", "")
        friend.connect(address)
        friend.send(bytes(MIB - 1_000))
        stranger = stack.enter_context(connect(address))
        stranger.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32))
        stranger.sendall(b"\x06" + (MIB // 2).to_bytes(8, "big") + bytes(MIB // 4))

        until(partial(has_more_garbage, server, 1), server)  # the message, which says nothing, and the end
        until(partial(has_ended, stranger), server)
        assert len(server._connections.standing) == 1


@pytest.mark.parametrize("identity", [b"", NAME.encode(), bytes(20)], ids=["none", "a name", "zeros"])
@pytest.mark.parametrize("version", [1, 2])
def test_a_peer_that_speaks_an_older_zmtp_is_refused_and_ends_nothing(
    server: Server, kind: str, identity: bytes, version: int
) -> None:
    sizes = (len(identity) + 1, 0, 6, 0) if version == 1 else (0, len(identity), 0, 5)
    own_type = bytes([{"DEALER": 5, "PUSH": 8}[kind]])
    greeting = b"" if version == 1 else b"\xff" + bytes(8) + b"\x7f\x01" + own_type
    with connect(server.addresses[0]) as old:
        old.sendall(greeting + bytes(sizes[:2]) + identity + bytes(sizes[2:]) + b"hello")
        until(partial(has_more_garbage, server), server)
        a_friend_is_heard(server)
