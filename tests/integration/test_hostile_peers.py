"""Strangers at every listening socket of every role: what is not a message ends nothing, stalls nothing, keeps nothing.

A cluster of real processes, each role in its own. The sockets are found by looking at which there are, so that one
that is added later is attacked too. A steady client is served meanwhile, and loses nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import zmq

from fabric.client import BlockingClient, ask_status
from fabric.ipc import STREAM_SUFFIX
from fabric.messages import StatusListed
from fabric.sockets.local_streams import are_allowed
from roles.benchmark.temporary_cluster import TemporaryCluster, temporary_cluster
from roles.runtime.process import read_run_file
from tests.integration.proc import forget_peak, peak_rss_mb, processes_naming, rss_mb, until
from tests.integration.raw_zmtp import connect, frame_start, shake_hands, socket_type
from tests.integration.steady_load import steady_load
from tests.raw_streams import framed, greeting, numbers
from tests.unit.fabric.test_codec import COSTLY

MB = 1 << 20
NUMBERS = itertools.count()  # a router ignores a second connection of one name
GROWTH_MB = 400.0  # of a role: 64 messages of 5 MB are the most that a case below leaves unread
TURN_MS_MAX = (
    400.0  # by the clock of a machine that others share; a turn's work is held to account in test_links.py
)
LISTENING = (
    "client_garbage_in",
    "outputs_garbage_in",
    "garbage_in",
    "operator_garbage_in",
)  # two of the frontend, then scheduler and `up`
ROLES = {"frontend", "scheduler", "node", "worker"}
CONFIG = """
models: [{name: good, slo_ms: 20000, profile: {alpha_ms: 0.5, beta_ms: 2, max_batch: 32}}]
cluster: {gpus: 1}
"""


@dataclass(frozen=True)
class Door:
    """A listening socket: where it is, and who may connect to it."""

    address: str
    peer: int

    @property
    def name(self) -> str:
        return self.address.rpartition("/")[2]

    @contextmanager
    def connected(self) -> Iterator[zmq.Socket[bytes]]:
        with zmq.Context() as context, context.socket(self.peer) as raw:
            raw.setsockopt(zmq.LINGER, 10_000)  # all of it is to arrive
            raw.setsockopt(zmq.SNDTIMEO, 10_000)
            raw.setsockopt(zmq.IDENTITY, b"frontend-9/%d" % next(NUMBERS))
            raw.connect(self.address)
            yield raw

    def shaken_hands(self) -> socket.socket:
        kind = zmq.SocketType(self.peer).name
        return shake_hands(self.address, f"frontend-9/{next(NUMBERS)}", kind)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TemporaryCluster]:
    path = tmp_path_factory.mktemp("hostile") / "cluster.yaml"
    path.write_text(CONFIG, encoding="utf-8")
    with (
        temporary_cluster(path, ["--apart"]) as running,
        BlockingClient(running.endpoints["client"]) as client,
    ):
        client.infer("good", {"x": b"1"})
        yield running


def doors(cluster: TemporaryCluster) -> list[Door]:
    """Every ZeroMQ socket of the cluster that listens: those in its run directory, and their addresses by TCP."""
    found = [
        f"ipc://{path}"
        for path in cluster.run_dir.iterdir()
        if path.is_socket() and path.suffix != STREAM_SUFFIX
    ]
    for path in cluster.run_dir.glob("*.json"):
        if path.name.startswith(("frontend", "scheduler", "node")):
            run_file = read_run_file(path)
            assert run_file is not None
            found += [address for own in run_file.addresses.values() for address in own]
    return [Door(address, _peer_kind(address)) for address in sorted(set(found))]


def _peer_kind(address: str) -> int:
    return {"ROUTER": zmq.DEALER, "PULL": zmq.PUSH}[socket_type(address, f"frontend-9/{next(NUMBERS)}")]


def garbage(door: Door) -> None:
    draws = random.Random(7)
    with door.connected() as raw:
        for _ in range(300):
            raw.send_multipart([draws.randbytes(draws.randrange(80)) for _ in range(draws.randint(1, 6))])


def costly_headers(door: Door) -> None:
    with door.connected() as raw:
        for header in COSTLY.values():
            if len(header) <= MB:
                for _ in range(20):
                    raw.send(header)


def enormous_headers(door: Door) -> None:
    for header in COSTLY.values():  # a socket that takes none so large closes the connection
        with door.connected() as raw:
            raw.send(header)
            raw.send(b"still there?")


def enormous_frames(door: Door) -> None:
    for announced in (20 * MB, 300 * MB, 2_000 * MB, 1 << 40, (1 << 63) - 1):
        with (
            door.shaken_hands() as connection,
            contextlib.suppress(ConnectionError, TimeoutError),  # it may be closed before all of this is out
        ):
            connection.sendall(frame_start(announced) + bytes(MB))


def too_many_frames(door: Door) -> None:
    with door.connected() as raw:
        raw.send_multipart(
            [b""] * 50_000
        )  # what is sent to this socket later waits until they are passed over
        raw.send_multipart([b"x"] * 5_000)


def half_messages(door: Door) -> None:
    whole = COSTLY["a MB of tensors"]
    for end in (0, 1, 100, MB // 2):
        with door.shaken_hands() as connection:
            connection.sendall(frame_start(len(whole), more=True) + whole[:end])
    for bytes_sent in (
        b"",
        b"\xff",
        b"\xff" + bytes(8) + b"\x7f\x03",
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(4_096),
    ):
        with connect(door.address) as connection:
            connection.sendall(bytes_sent)


def many_strangers(door: Door) -> None:
    for _ in range(100):
        with door.shaken_hands() as connection:
            connection.sendall(b"\x00\x01\xc1")


ATTACKS: list[Callable[[Door], None]] = [
    garbage,
    costly_headers,
    enormous_headers,
    enormous_frames,
    too_many_frames,
    half_messages,
    many_strangers,
]


@contextmanager
def unharmed(cluster: TemporaryCluster) -> Iterator[None]:
    """What happens in the block ends no role, stalls none for long, costs none much memory, and a steady client nothing."""
    pids = sorted(processes_naming(str(cluster.run_dir)))
    before_mb = {pid: rss_mb(pid) for pid in pids}
    for pid in pids:
        forget_peak(pid)
    with steady_load(cluster.endpoints["client"], {"good": 20}) as fates:
        yield
        for status in statuses(cluster):
            assert status.counters["turn_ms_max"] < TURN_MS_MAX, status.role_id
        until(lambda: len(fates.of["good"]) >= 10, what="answers to the steady client")
    assert fates.refused("good") == []
    assert sorted(processes_naming(str(cluster.run_dir))) == pids, "nobody ended, nobody was started again"
    grown_mb = {pid: peak_rss_mb(pid) - before_mb[pid] for pid in pids}
    assert max(grown_mb.values()) < GROWTH_MB, grown_mb


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_what_is_no_message_harms_no_role(cluster: TemporaryCluster, attack: Callable[[Door], None]) -> None:
    attacked = doors(cluster)
    assert {door.name.partition("-")[0] for door in attacked} >= ROLES
    garbage_before = garbage_counted(cluster)
    with unharmed(cluster):
        for door in attacked:
            attack(door)
        if attack in (garbage, costly_headers, too_many_frames):
            until(
                lambda: all(
                    count > before
                    for count, before in zip(garbage_counted(cluster), garbage_before, strict=True)
                ),
                what="the garbage",
            )


STREAM_ATTACKS: dict[str, list[bytes]] = {
    "garbage": [random.Random(7).randbytes(size) for size in range(1, 300)],
    "garbage in right frames": [greeting("frontend-9/1") + framed(b"\xc1" * 80) * 50],
    "costly headers": [
        greeting(f"frontend-9/{number}") + framed(header) * 20
        for number, header in enumerate(COSTLY.values())
        if len(header) <= MB
    ],
    "enormous frames": [
        greeting("frontend-9/1") + numbers(1, 0xFFFF_FFFF) + bytes(MB),
        greeting("frontend-9/2") + framed(bytes(20 * MB)),
    ],
    "too many frames": [greeting("frontend-9/1") + framed(*([b""] * 300_000))],
    "half messages": [(greeting("frontend-9/1") + framed(bytes(1_000)))[:size] for size in range(0, 900, 50)],
    "many strangers": [b""] * 300,
}


@pytest.mark.skipif(not are_allowed(), reason="this system has no local streams")
@pytest.mark.parametrize("attack", STREAM_ATTACKS)
def test_what_is_no_message_by_a_local_stream_harms_no_role(cluster: TemporaryCluster, attack: str) -> None:
    attacked = sorted(cluster.run_dir.glob(f"*{STREAM_SUFFIX}"))
    assert {path.name.partition("-")[0] for path in attacked} >= ROLES
    with unharmed(cluster):
        for path in attacked:
            for data in STREAM_ATTACKS[attack]:
                with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as stranger:  # it hangs up
                    stranger.settimeout(5.0)
                    stranger.connect(str(path))
                    stranger.sendall(data)


def garbage_counted(cluster: TemporaryCluster) -> list[float]:
    """By each socket of a role that tells."""
    counted = [
        status.counters[name] for status in statuses(cluster) for name in LISTENING if name in status.counters
    ]
    assert len(counted) == len(LISTENING)
    return counted


def statuses(cluster: TemporaryCluster) -> list[StatusListed]:
    """What each role that can be asked says of itself."""
    addresses = [door.address for door in doors(cluster) if door.name.endswith((".client", ".control"))]
    assert len(addresses) >= 3
    return [ask_status(address, timeout_ms=30_000.0) for address in addresses]
