"""Strangers at the doors of a cluster that serves: how many got in, and how many were counted.

    python -m benchmarks.strangers [--tries 10000] [--json FILE]

A real cluster with keys listens by TCP; each kind of stranger tries so often, while a friend asks for an answer ten times a
second. `got in`: connections that stood, or messages that a role took. Exit code 1 where somebody got in, was not counted, or the
friend was not served.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import zmq
from zmq.utils.monitor import parse_monitor_message

from benchmarks.figures import Figures, Line, add_json_option, tell
from fabric.client import BlockingClient, ClientOptions, ask_status
from fabric.curve import LinkAccess, guarded, new_pair
from fabric.errors import FabricError
from fabric.ids import BatchId, Incarnation, ModelId, PeerId, SliceId
from fabric.keys import CLIENT, FRONTEND, NODE, SCHEDULER, Keyring, read_pair, read_trusted
from fabric.messages import BatchFailed, Ping
from fabric.sockets import DealerLink, PushPool, context
from fabric.sockets.routes import new_route
from roles.benchmark.temporary_cluster import temporary_cluster
from roles.runtime.process import read_run_file

CLUSTER = """
models:
 - {name: m, slo_ms: 500, profile: {alpha_ms: 0.5, beta_ms: 1, max_batch: 8}}
cluster: {nodes: [{host: local}]}
batching: eager
listen: {client: "tcp://127.0.0.1:0", control: "tcp://127.0.0.1:0"}
security: {keys: keys}
"""
AT_ONCE = 50
TRY_LIMIT_S = 5.0
COUNTED_WITHIN_S = 10.0
FRIEND_EVERY_S = 0.1
_OUTCOMES = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


@dataclass
class Doors:
    """Where a cluster is reached by TCP, and how its roles are asked over ipc how many they refused."""

    control: str
    client: str
    outputs: str
    status: dict[str, Sequence[str]]

    def refused(self) -> float:
        """By all roles, since their start."""
        return sum(
            value
            for addresses in self.status.values()
            for name, value in ask_status(addresses, 10_000.0).counters.items()
            if name.endswith("keys_refused")
        )

    def refused_by_now(self, expected: float) -> float:
        """The same once it is as many, or after `COUNTED_WITHIN_S`: roles hear of a refused handshake a moment later."""
        end_s = time.monotonic() + COUNTED_WITHIN_S
        while (found := self.refused()) < expected and time.monotonic() < end_s:
            time.sleep(0.05)
        return found


@dataclass
class Friend:
    """A client with a key that asks all the time."""

    address: str
    key_file: Path
    answered: int = 0
    failed: list[str] = field(default_factory=list)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Until the block is left."""
        end = threading.Event()
        thread = threading.Thread(target=self._ask, args=(end,))
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()

    def _ask(self, end: threading.Event) -> None:
        with BlockingClient(self.address, ClientOptions(key_file=self.key_file)) as client:
            while not self.answered or not end.wait(FRIEND_EVERY_S):
                try:
                    client.infer("m", {"input": np.zeros(4, np.float32)}, budget_ms=5_000.0)
                    self.answered += 1
                except FabricError as error:
                    self.failed.append(repr(error))
                    if end.is_set():
                        break


def connect_often(address: str, keyring: Keyring | None, server: str, tries: int) -> int:
    """So many connections, each with a message behind it; how many stood."""
    stood = 0
    for first in range(0, tries, AT_ONCE):
        sockets = []
        for _ in range(min(AT_ONCE, tries - first)):
            socket = context().socket(zmq.DEALER)
            socket.linger = 0
            socket.setsockopt(zmq.RECONNECT_STOP, zmq.RECONNECT_STOP_HANDSHAKE_FAILED)
            socket.routing_id = new_route(PeerId("frontend-0/5f3a9c01"))
            if keyring is not None:
                LinkAccess(keyring).connect_to(socket, address, server)
            monitor = socket.get_monitor_socket(_OUTCOMES)
            socket.connect(address)
            with contextlib.suppress(zmq.Again):  # it was refused already
                socket.send(b"let me in", zmq.NOBLOCK)
            sockets.append((socket, monitor))
        for socket, monitor in sockets:
            if monitor.poll(TRY_LIMIT_S * 1e3):
                event = parse_monitor_message(monitor.recv_multipart())["event"]
                stood += event == zmq.Event.HANDSHAKE_SUCCEEDED
            socket.disable_monitor()
            monitor.close()
            socket.close()
    return stood


def speak_often(address: str, keyring: Keyring, name: str, tries: int) -> int:
    """So many messages under a name that is not the key's; how many were answered."""
    server = PeerId("scheduler-0")
    link = DealerLink.connect(PeerId(name), server, [address], guard=guarded(keyring))
    answered = sent = 0
    until_s = time.monotonic() + 60.0 + tries / 100
    try:
        while sent < tries and time.monotonic() < until_s:
            sent += link.send(server, Ping(sent))
            answered += len(link.receive(16))
        time.sleep(1.0)
        return answered + len(link.receive(16)) + (tries - sent)
    finally:
        link.close()


def forge_often(address: str, keyring: Keyring, slice_id: str, tries: int) -> int:
    """So many results of a slice that is another node's; 0: that nobody took one is told by the counters."""
    pool = PushPool(guard=guarded(keyring))
    frontend = PeerId("frontend-0")
    pool.know(frontend, Incarnation("one"), [address])
    message = BatchFailed(BatchId(1), SliceId(slice_id), ModelId("m"), (1,), "Internal", "forged")
    until_s = time.monotonic() + 60.0 + tries / 100
    sent = 0
    while sent < tries and time.monotonic() < until_s:
        if pool.send(frontend, message):
            sent += 1
        else:
            time.sleep(0.001)
    time.sleep(1.0)
    pool.close()
    return tries - sent


def keys(*arguments: object) -> None:
    """`tenuto keys`."""
    command = [sys.executable, "-m", "roles.cli", "keys", *map(str, arguments)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def measure(tries: int) -> Figures:
    """Each kind of stranger in turn."""
    figures = Figures("Strangers")
    columns = ("stranger", "tries", "got in", "counted", "friend answered", "friend failed", "s")
    table = figures.table(f"{tries:,} tries each, at the TCP ports of a cluster with keys", *columns)
    with tempfile.TemporaryDirectory(prefix="tenuto-strangers-") as directory:
        home = Path(directory)
        folder = home / "keys"
        keys("create", folder)
        for principal in (f"{NODE}/local", f"{NODE}/other"):
            keys("add", folder, principal)
        for name in ("alice", "eve"):
            keys("add", folder, f"{CLIENT}/{name}", "--out", home / f"{name}.key")
        shutil.copy(home / "eve.key", home / "eve.revoked")
        shutil.copy(folder / "node-other.key", home / "gone.revoked")
        keys("revoke", folder, f"{CLIENT}/eve")
        (home / "cluster.yaml").write_text(CLUSTER, encoding="utf-8")
        with temporary_cluster(home / "cluster.yaml", ("--apart",)) as cluster:
            doors = _doors(cluster.run_dir)
            for label, attempt in _strangers(home, folder, doors):
                friend = Friend(doors.client, home / "alice.key")
                before, began_s = doors.refused(), time.monotonic()
                with friend.asking():
                    got_in = attempt(tries)
                seconds = time.monotonic() - began_s
                counted = doors.refused_by_now(before + tries) - before
                sys.stderr.write(
                    f"{label}: {got_in} of {tries} got in, {counted:.0f} counted, {seconds:.1f} s\n"
                )
                table.rows.append(
                    (label, tries, got_in, int(counted), friend.answered, len(friend.failed), seconds)
                )
                figures.lines += [
                    Line(f"{label}: got in", got_in, at_most=0),
                    Line(f"{label}: counted, of the tries", counted / tries, at_least=1.0),
                    Line(
                        f"{label}: requests of a friend that failed meanwhile", len(friend.failed), at_most=0
                    ),
                    Line(f"{label}: requests of a friend that were answered", friend.answered, at_least=1),
                ]
                figures.remarks += friend.failed[:3]
            return figures


def _strangers(home: Path, folder: Path, doors: Doors) -> list[tuple[str, Callable[[int], int]]]:
    trusted = read_trusted(folder / "trusted.json")
    unknown = Keyring(new_pair(FRONTEND), trusted)
    client = Keyring(read_pair(home / "alice.key"), trusted)
    revoked = Keyring(read_pair(home / "eve.revoked"), trusted)
    other = Keyring.of_folder(folder, f"{NODE}/other")
    return [
        ("no key, control", lambda tries: connect_often(doors.control, None, SCHEDULER, tries)),
        ("no key, clients' port", lambda tries: connect_often(doors.client, None, FRONTEND, tries)),
        ("unknown key, control", lambda tries: connect_often(doors.control, unknown, SCHEDULER, tries)),
        ("revoked key, clients' port", lambda tries: connect_often(doors.client, revoked, FRONTEND, tries)),
        ("client's key, control", lambda tries: connect_often(doors.control, client, SCHEDULER, tries)),
        (
            "node's key, as another's worker",
            lambda tries: speak_often(doors.control, other, "worker-local-0/1", tries),
        ),
        ("node's key, as a frontend", lambda tries: speak_often(doors.control, other, "frontend-0/1", tries)),
        (
            "node's key, of another's slice",
            lambda tries: forge_often(doors.outputs, other, "local/gpu0/0", tries),
        ),
    ]


def _doors(run_dir: Path) -> Doors:
    def by_tcp(role_id: str, purpose: str) -> str:
        run_file = read_run_file(run_dir / f"{role_id}.json")
        assert run_file is not None, f"{role_id} runs"
        address = next(one for one in run_file.addresses[purpose] if one.startswith("tcp://"))
        return address.partition("?")[0]

    status = {"scheduler-0": "control", "frontend-0": "client"}
    addresses = {}
    for role_id, purpose in status.items():
        run_file = read_run_file(run_dir / f"{role_id}.json")
        assert run_file is not None, f"{role_id} runs"
        addresses[role_id] = [one for one in run_file.addresses[purpose] if one.startswith("ipc://")]
    return Doors(
        by_tcp("scheduler-0", "control"),
        by_tcp("frontend-0", "client"),
        by_tcp("frontend-0", "payload"),
        addresses,
    )


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description="strangers at the doors of a cluster")
    parser.add_argument("--tries", type=int, default=10_000)
    add_json_option(parser)
    options = parser.parse_args()
    figures = measure(options.tries)
    tell(figures, options.json)
    return 0 if all(line.is_held for line in figures.lines) else 1


if __name__ == "__main__":
    sys.exit(main())
