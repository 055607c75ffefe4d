"""Malformed bytes for listening sockets, which are in a process of their own: its end would be a finding.

Three ways in: garbage at the level of ZMTP, over plain TCP and local connections that begin right and go wrong somewhere;
local streams that do; and right ZMTP and right streams whose frames are garbage. With keys and without. In between a friend asks,
and must be answered.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import socket as plain
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import click
import zmq

from fabric import codec
from fabric.clock import MonotonicClock
from fabric.curve import LinkAccess, guarded, new_pair
from fabric.errors import FabricError
from fabric.ids import PeerId
from fabric.ipc import IPC, STREAM_SUFFIX
from fabric.keys import FRONTEND, NODE, SCHEDULER, KeyPair, Keyring, Trusted, TrustedKey
from fabric.messages import WIRE_VERSION, Envelope, Parcel, Ping, Pong
from fabric.sockets import DealerLink, LinkOptions, PullLink, RouterLink, context
from fabric.sockets.routes import new_route
from tests.hostile import TYPES, Hostile
from tests.malformed.mutations import Mutations
from tests.raw_streams import framed, greeting

CLOCK: Final = MonotonicClock()
SERVER: Final = PeerId("scheduler-0")
GROWTH_MB_MAX: Final = 48.0
ANSWER_LIMIT_MS: Final = 60_000.0
ROUND: Final = 10_000
"""Frames between two questions of the friend."""
_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_CURVE_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)


@dataclass
class Keys:
    """What both processes know; none: everything is open."""

    pairs: dict[str, KeyPair] = field(default_factory=dict)

    @classmethod
    def drawn(cls) -> Keys:
        """New ones."""
        return cls({name: new_pair(name) for name in (SCHEDULER, FRONTEND, f"{NODE}/a")})

    def ring(self, principal: str) -> Keyring | None:
        """That one's."""
        if not self.pairs:
            return None
        trusted = tuple(TrustedKey(one.principal, one.public, "") for one in self.pairs.values())
        return Keyring(self.pairs[principal], Trusted(trusted))


def serve(pipe: Connection, keys: Keys, folder: str) -> None:
    """The attacked process: a router and a pull, in turns, until told to end; then how it went."""
    clients = LinkOptions(payload_bytes_max=1 << 20, is_sharing=True)
    router = RouterLink.bind(
        ["tcp://127.0.0.1:0", f"ipc://{folder}/r"],
        clients,
        guarded(keys.ring(SCHEDULER), {FRONTEND}),
    )
    pull = PullLink.bind(
        ["tcp://127.0.0.1:0", f"ipc://{folder}/p"],
        clients,
        guarded(keys.ring(SCHEDULER), {FRONTEND}, names=False),
    )
    pipe.send((list(router.addresses), list(pull.addresses)))
    poller = zmq.Poller()
    for descriptor in (router.fileno(), pull.fileno(), pipe.fileno()):
        poller.register(descriptor, zmq.POLLIN)
    while True:
        if not (router.has_more or pull.has_more):
            poller.poll(100)
        for one in router.receive(256):
            if isinstance(one.message, Ping) and one.peer.startswith("frontend-9/"):
                router.send(one.peer, Pong(one.message.number))
        pull.receive(256)
        if pipe.poll():
            if pipe.recv() is None:
                break
            pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
            memory_mb = int(pages) * os.sysconf("SC_PAGE_SIZE") / 1e6
            descriptors = len(list(Path("/proc/self/fd").iterdir()))
            pipe.send((memory_mb, descriptors, dict(router.counters), dict(pull.counters)))
    router.close()
    pull.close()


@dataclass
class Attack:
    """One run against such a process."""

    addresses: tuple[list[str], list[str]]
    keys: Keys
    draws: random.Random
    frames: Mutations = field(init=False)
    bytes_: Mutations = field(init=False)

    def __post_init__(self) -> None:
        messages = [Hostile(self.draws, {}).message() for _ in range(2 * len(TYPES))]
        headers = [
            codec.encode(Envelope(WIRE_VERSION, 0, 0.0, (Parcel((), message),))) for message in messages
        ]
        self.frames = Mutations(self.draws, headers)
        ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity" + _sized(
            new_route(PeerId("frontend-1/1"))
        )
        command = bytes([4, len(ready)]) + ready
        short = [header for header in headers if len(header) < 255]
        whole = [_GREETING + command + bytes([0, len(header)]) + header for header in short]
        by_zmtp_1 = [_by_zmtp_1(new_route(PeerId("frontend-1/1"))) + _by_zmtp_1(header) for header in short]
        hello = (
            b"\x05HELLO\x01\x00" + bytes(72) + self.draws.randbytes(32) + bytes(8) + self.draws.randbytes(80)
        )
        self.bytes_ = Mutations(
            self.draws,
            [
                *whole,
                *by_zmtp_1[::8],
                _CURVE_GREETING,
                _CURVE_GREETING + bytes([4, len(hello)]) + hello,
                _GREETING + command,
            ],
        )
        greeted = greeting("frontend-1/1")
        self.streams = Mutations(
            self.draws,
            [greeted, *(greeted + framed(header) + framed(header, bytes(40)) for header in short)],
        )

    def send_by_streams(self, count: int) -> None:
        """Right streams whose frames are garbage; whoever is hung up on comes again."""
        paths = [f"{addresses[0].removeprefix('ipc://')}{STREAM_SUFFIX}" for addresses in self.addresses]
        connected: dict[str, plain.socket] = {}
        try:
            for number in range(count):
                path = self.draws.choice(paths)
                with contextlib.suppress(OSError):
                    if path not in connected:
                        connected[path] = _at_stream(path)
                        connected[path].sendall(greeting(f"frontend-{number % 50}/1"))
                    parts = [self.frames.one() for _ in range(self.draws.choice((1, 1, 1, 2, 3)))]
                    connected[path].sendall(framed(*parts))
                    continue
                if path in connected:
                    connected.pop(path).close()
        finally:
            for one in connected.values():
                one.close()

    def send_frames(self, count: int) -> None:
        """Right ZMTP with garbage in it, by TCP to both sockets, and by the local socket too."""
        targets: Sequence[tuple[int, str]] = [
            *((zmq.DEALER, address) for address in self.addresses[0]),
            *((zmq.PUSH, address) for address in self.addresses[1] if not address.startswith("memory")),
        ]
        sockets: list[zmq.Socket[bytes]] = []
        for kind, address in targets:
            socket = context().socket(kind)
            socket.linger = 2_000
            socket.sndtimeo = int(ANSWER_LIMIT_MS)
            socket.routing_id = new_route(PeerId(f"frontend-{len(sockets)}/1"))
            bare = address.partition("?")[0]
            ring = self.keys.ring(FRONTEND)
            if ring is not None and bare.startswith("tcp"):
                LinkAccess(ring).connect_to(socket, bare, SCHEDULER)
            socket.connect(bare)
            sockets.append(socket)
        try:
            for _ in range(count):
                parts = [self.frames.one() for _ in range(self.draws.choice((1, 1, 1, 2, 3)))]
                self.draws.choice(sockets).send_multipart(parts)
        finally:
            for socket in sockets:
                socket.close()

    def send_bytes(self, count: int) -> None:
        """Connections that begin right and go wrong."""
        for _ in range(count):
            address = self.draws.choice(self.addresses[self.draws.randrange(2)])
            if address.startswith("memory"):
                continue
            if address.startswith(IPC) and self.draws.random() < 0.5:
                with (
                    contextlib.suppress(OSError),
                    _at_stream(f"{address.removeprefix(IPC)}{STREAM_SUFFIX}") as stream,
                ):
                    stream.sendall(self.streams.one())
                continue
            with contextlib.suppress(OSError), _connected(address) as connection:  # it may hang up meanwhile
                connection.settimeout(1.0)
                data = self.bytes_.one()
                if self.draws.random() < 0.5:  # it answers in between
                    connection.sendall(data[:64])
                    connection.recv(64)
                    data = data[64:]
                connection.sendall(data)

    def ask(self, number: int) -> bool:
        """Whether a friend is answered in time."""
        guard = guarded(self.keys.ring(FRONTEND))
        link = DealerLink.connect(PeerId(f"frontend-9/{number}"), SERVER, self.addresses[0][-1:], guard=guard)
        until_ms = CLOCK.now_ms() + ANSWER_LIMIT_MS
        try:
            is_asked = False
            while CLOCK.now_ms() < until_ms:
                is_asked = is_asked or link.send(SERVER, Ping(number))
                if any(one.message == Pong(number) for one in link.receive(16)):
                    return True
                if not link.has_more:
                    zmq.select([link.fileno()], [], [], 0.01)
        finally:
            link.close()
        return False


def attack_all(inputs: int, seed: int) -> list[str]:
    """With keys and without: half of the inputs each, one connection of garbage for nine messages of it."""
    return [
        finding
        for keys in (Keys(), Keys.drawn())
        for finding in attack(keys, inputs // 2, random.Random(seed))
    ]


def attack(keys: Keys, inputs: int, draws: random.Random) -> list[str]:
    """So many inputs for one process; what went wrong."""
    label = "sockets with keys" if keys.pairs else "sockets"
    began_ms = CLOCK.now_ms()
    findings: list[str] = []
    with tempfile.TemporaryDirectory(prefix="tenuto-malformed-") as folder:
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(theirs, keys, folder), daemon=True
        )
        process.start()
        run = Attack(ours.recv(), keys, draws)
        done, first = 0, None
        told = None
        try:
            while done < inputs:
                share = min(ROUND, inputs - done)
                run.send_bytes(share // 10)
                run.send_by_streams(share // 4)
                run.send_frames(share - share // 4 - share // 10)
                done += share
                if not run.ask(done):
                    findings.append(f"{label}: after {done} inputs a friend was not answered")
                    break
                ours.send("how are you")
                if not ours.poll(ANSWER_LIMIT_MS / 1e3):
                    findings.append(f"{label}: after {done} inputs the process says nothing")
                    break
                told = ours.recv()
                first = first or told
        except (OSError, EOFError, zmq.ZMQError, FabricError) as error:
            findings.append(f"{label}: after {done} inputs {error!r}")
        with contextlib.suppress(OSError):
            ours.send(None)
        process.join(10.0)
        if process.exitcode != 0:
            findings.append(f"{label}: the process ended with {process.exitcode}")
            process.kill()
            process.join()
    if told is not None and first is not None:
        grown_mb, descriptors = told[0] - first[0], told[1] - first[1]
        garbage = told[2]["garbage_in"] + told[3]["garbage_in"]
        refused = told[2]["keys_refused"] + told[3]["keys_refused"]
        if grown_mb > GROWTH_MB_MAX:
            findings.append(f"{label}: memory grew by {grown_mb:.0f} MB")
        if descriptors > 64:  # those of connections that are being closed
            findings.append(f"{label}: {descriptors} descriptors more")
        seconds = (CLOCK.now_ms() - began_ms) / 1e3
        click.echo(
            f"{label:24} {done:8,} inputs {done / seconds:9,.0f}/s  garbage counted {garbage:,.0f}  refused {refused:,.0f}"
            f"  memory {grown_mb:+6.1f} MB  descriptors {descriptors:+d}  findings {len(findings)}"
        )
    return findings


def _at_stream(path: str) -> plain.socket:
    connection = plain.socket(plain.AF_UNIX)
    connection.settimeout(5.0)
    connection.connect(path)
    return connection


def _connected(address: str) -> plain.socket:
    bare = address.partition("?")[0]
    if bare.startswith("ipc://"):
        connection = plain.socket(plain.AF_UNIX)
        connection.connect(bare.removeprefix("ipc://"))
        return connection
    host, _, port = bare.removeprefix("tcp://").rpartition(":")
    connection = plain.create_connection((host, int(port)), timeout=5.0)
    connection.setsockopt(plain.SOL_SOCKET, plain.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # no ports left waiting
    return connection


def _by_zmtp_1(frame: bytes) -> bytes:
    return bytes((len(frame) + 1, 0)) + frame


def _sized(value: bytes) -> bytes:
    return len(value).to_bytes(4, "big") + value
