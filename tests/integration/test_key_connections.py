"""Connections and names that are not one's own, keys that are revoked while they are in use, and what a client is told."""

from __future__ import annotations

import contextlib
import os
import select
import socket as plain
import stat
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from fabric.client import BlockingClient, ClientOptions, ask_status
from fabric.curve import CLIENT_KINDS, CONTROL_KINDS, LinkAccess, guarded, is_wildcard
from fabric.errors import ConfigError, PeerLost, Unauthorised
from fabric.ids import FrontendId, Incarnation, PeerId
from fabric.keys import (
    CLIENT,
    FRONTEND,
    LOOK_EVERY_MS,
    NODE,
    OPERATOR,
    SCHEDULER,
    Keyring,
    TrustedKey,
    read_pair,
    write_private,
)
from fabric.link import Link
from fabric.messages import ModelsListed, Ping, Pong
from fabric.sockets import DealerLink, PullLink, PushPool, RouterLink, context
from fabric.sockets.base import HANDSHAKE_MS
from roles.frontend.shell import FrontendOptions, FrontendShell
from roles.runtime.process import StopSignal
from tests.integration.test_keys import Now, bare, control, dealer, folder, run, says
from tests.integration.test_links import CLOCK, TCP, Opened, opened, take, until

__all__ = ["control", "folder", "opened"]

OWNER, SERVER = PeerId("frontend-0/5f3a9c01"), PeerId("scheduler-0")


def followed(folder: Path, principal: str) -> tuple[Keyring, Now]:
    """A keyring, and its clock."""
    keyring = Keyring.of_folder(folder, principal)
    keyring.clock = clock = Now()
    return keyring, clock


class Squatter:
    """A plain ZeroMQ socket with a key and an identity of its choice; `heard` is what was said to that name."""

    def __init__(self, server: RouterLink, keyring: Keyring, identity: bytes) -> None:
        self._socket = context().socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.identity = identity
        LinkAccess(keyring).connect_to(self._socket, bare(server), "scheduler")
        self._socket.connect(bare(server))

    def says(self, text: bytes) -> None:
        self._socket.send(text)

    def heard(self, within_ms: int = 100) -> list[bytes]:
        came = []
        while self._socket.poll(within_ms):
            came.append(self._socket.recv())
        return came

    def close(self) -> None:
        self._socket.close()


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("thief", "name"),
    [
        (f"{NODE}/a", OWNER),
        (f"{NODE}/a", PeerId("worker-b-1/5f3a9c01")),
        (f"{NODE}/a", PeerId("node-b/5f3a9c01")),
        (f"{NODE}/a", PeerId("operator/5f3a9c01")),
        (FRONTEND, PeerId("node-b/5f3a9c01")),
        (OPERATOR, OWNER),
    ],
)
@pytest.mark.parametrize("mark", ["", "#1.00", "#ffffff." + "0" * 32])
def test_a_name_that_was_squatted_first_is_its_owners_all_the_same(
    folder: Path, control: tuple[RouterLink, LinkAccess], opened: Opened, thief: str, name: PeerId, mark: str
) -> None:
    """Somebody with a key comes before the owner, under its very name and nonce, and speaks."""
    router, guard = control
    squatter = Squatter(router, Keyring.of_folder(folder, thief), f"{name}{mark}".encode())
    try:
        squatter.says(b"garbage")
        until(lambda: router.receive(16) == [] and guard.refused == 1, router)
        role = name.partition("/")[0].partition("-")[0]
        owner = {"frontend": FRONTEND, "operator": OPERATOR}.get(role, f"{NODE}/b")
        link = dealer(name, router.addresses, guarded(Keyring.of_folder(folder, owner)), opened)
        says(link, 1)
        assert [(one.peer, one.message) for one in take(router, 1)] == [(name, Ping(1))]
        assert router.send(name, Pong(1))
        assert take(link, 1)[0].message == Pong(1)
        squatter.says(b"garbage")
        until(lambda: router.receive(16) == [] and guard.refused == 2, router)
        assert router.send(name, Pong(2))
        assert take(link, 1)[0].message == Pong(2)
        assert squatter.heard() == []
    finally:
        squatter.close()


def test_a_client_cannot_take_anothers_name(folder: Path, opened: Opened, tmp_path: Path) -> None:
    run("add", str(folder), "client/bob", "--out", str(tmp_path / "bob.key"))
    guard = LinkAccess(Keyring.of_folder(folder, FRONTEND), CLIENT_KINDS, names=True)
    router = RouterLink.bind([TCP], guard=guard)
    opened(router)
    server = PeerId("frontend")
    name = PeerId("client/alice/1")
    links = [
        DealerLink.connect(
            name, server, router.addresses, guard=guarded(Keyring.of_file(tmp_path / f"{who}.key"))
        )
        for who in ("bob", "alice")
    ]
    for link in links:
        opened(link)
    bobs, alices = links
    until(lambda: bobs.send(server, Ping(1)), bobs)
    until(lambda: router.receive(16) == [] and guard.refused == 1, router)
    until(lambda: alices.send(server, Ping(2)), alices)
    assert [one.message for one in take(router, 1)] == [Ping(2)]
    assert router.send(name, Pong(2))
    assert take(alices, 1)[0].message == Pong(2)
    assert bobs.receive(16) == []


def test_who_reconnects_is_answered_though_its_old_connection_still_stands(opened: Opened) -> None:
    """A cut that nobody noticed: the router still has the old connection, and would keep the name for it."""
    router = RouterLink.bind([TCP])
    opened(router)
    links = []
    for number in range(3):
        link = DealerLink.connect(OWNER, SERVER, router.addresses)
        opened(link)
        until(lambda: link.send(SERVER, Ping(number)), link)  # noqa: B023  ended before the next turn
        assert take(router, 1)[0].peer == OWNER
        assert router.send(OWNER, Pong(number))
        assert take(link, 1)[0].message == Pong(number)
        links.append(link)
    assert links[0].send(SERVER, Ping(8))  # was on its way by the old one
    until(lambda: not router.receive(16) and router.counters["outdated_in"] == 1, router)
    assert router.send(OWNER, Pong(9))
    assert take(links[-1], 1)[0].message == Pong(9)


# ---------------------------------------------------------------- revoked while connected


def established(port: int) -> int:
    """TCP connections to that port that stand, counted at our end: others of this host may have the same port for theirs."""
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            own.add(str(descriptor.readlink()))
    wanted = f":{port:04X}"
    return sum(row[3] == "01" and row[1].endswith(wanted) and f"socket:[{row[9]}]" in own for row in rows)


def port_of(link: RouterLink | PullLink) -> int:
    return int(bare(link).rpartition(":")[2])


def test_a_connection_of_a_revoked_key_is_ended_though_nobody_speaks(folder: Path, opened: Opened) -> None:
    keyring, clock = followed(folder, SCHEDULER)
    router = RouterLink.bind([TCP], guard=guarded(keyring, CONTROL_KINDS))
    opened(router)
    theirs = Keyring.of_folder(folder, FRONTEND)
    theirs.path = None  # on another host, which does not know yet
    links = [dealer(f"frontend-0/{number}", router.addresses, guarded(theirs), opened) for number in range(3)]
    nodes = dealer("node-a/1", router.addresses, guarded(Keyring.of_folder(folder, f"{NODE}/a")), opened)
    for link in (*links, nodes):
        says(link, 1)
        take(router, 1)
    assert established(port_of(router)) == 4
    run("revoke", str(folder), FRONTEND, "--force")
    clock.at_ms += LOOK_EVERY_MS
    assert router.receive(16) == []
    assert sorted(router.take_lost()) == [f"frontend-0/{number}" for number in range(3)]
    assert not router.send(PeerId("frontend-0/0"), Pong(1))
    until(lambda: established(port_of(router)) == 1, router)
    until(lambda: not links[0].send(SERVER, Ping(2)) and "our key" in links[0].refusal, links[0])
    says(nodes, 3)
    assert [one.message for one in take(router, 1)] == [Ping(3)]


def test_who_is_killed_or_has_no_key_is_told_of_by_tcp_with_keys_too(folder: Path, opened: Opened) -> None:
    router = RouterLink.bind([TCP], guard=guarded(Keyring.of_folder(folder, SCHEDULER), CONTROL_KINDS))
    opened(router)
    keyless = DealerLink.connect(PeerId("frontend-1/1"), SERVER, [bare(router)])
    opened(keyless)
    until(lambda: router.counters["keys_refused"] > 0 and not router.take_lost(), router)
    link = dealer("frontend-0/1", router.addresses, guarded(Keyring.of_folder(folder, FRONTEND)), opened)
    says(link, 1)
    take(router, 1)
    assert not router.take_lost()
    link.close()
    until(lambda: list(router.take_lost()) == ["frontend-0/1"], router, limit_ms=10_000)
    assert not router._routes._at


def test_payload_of_a_revoked_key_ends_its_connection(folder: Path, opened: Opened) -> None:
    keyring, clock = followed(folder, f"{NODE}/a")
    pull = PullLink.bind([TCP], guard=guarded(keyring, {FRONTEND}, names=False))
    opened(pull)
    theirs = Keyring.of_folder(folder, FRONTEND)
    theirs.path = None
    pool = PushPool(guard=guarded(theirs))
    opened(pool)
    pool.know(PeerId("a/gpu0/0"), Incarnation("one"), pull.addresses)
    assert pool.send(PeerId("a/gpu0/0"), Ping(1))
    take(pull, 1)
    assert established(port_of(pull)) == 1
    run("revoke", str(folder), FRONTEND, "--force")
    clock.at_ms += LOOK_EVERY_MS
    # PUSH asks again every 3 s; between two tries no connection stands
    until(lambda: pull.receive(16) == [] and established(port_of(pull)) == 0, pull)
    assert pool.send(PeerId("a/gpu0/0"), Ping(2))
    refused = pull.counters["keys_refused"]
    until(lambda: pull.receive(16) == [] and pull.counters["keys_refused"] > refused, pull)


def test_who_is_connected_to_a_server_whose_key_is_revoked_leaves_it(folder: Path, opened: Opened) -> None:
    """Control and payload: nothing is sent to it, and nothing that it says is heard."""
    keyring, clock = followed(folder, FRONTEND)
    servers = Keyring.of_folder(folder, SCHEDULER)
    servers.path = None
    router = RouterLink.bind([TCP], guard=guarded(servers, CONTROL_KINDS))
    opened(router)
    link = dealer("frontend-0/1", router.addresses, guarded(keyring), opened)
    says(link, 1)
    take(router, 1)
    nodes = Keyring.of_folder(folder, f"{NODE}/a")
    nodes.path = None
    pull = PullLink.bind([TCP], guard=guarded(nodes, {FRONTEND}, names=False))
    opened(pull)
    pool = PushPool(guard=guarded(keyring))
    opened(pool)
    slice_id = PeerId("a/gpu0/0")
    pool.know(slice_id, Incarnation("one"), pull.addresses)
    assert pool.send(slice_id, Ping(1))
    take(pull, 1)
    assert router.send(PeerId("frontend-0/1"), Pong(7))  # on its way when the news comes
    run("revoke", str(folder), SCHEDULER, "--force")
    run("revoke", str(folder), f"{NODE}/a")
    clock.at_ms += LOOK_EVERY_MS
    assert list(link.receive(16)) == []
    assert link.has_more
    assert list(link.take_lost()) == [SERVER], "what is in flight there will not be answered"
    assert not link.send(SERVER, Ping(2))
    assert not pool.send(slice_id, Ping(2))

    def is_over() -> bool:
        assert (
            list(link.receive(16)) == []
        )  # what came before it left must be taken off, or the connection stands
        assert not link.take_lost()  # once
        return established(port_of(router)) == 0 and established(port_of(pull)) == 0

    until(is_over, link)
    assert router.receive(16) == []
    assert pull.receive(16) == []


# ---------------------------------------------------------------- what a client is told


class Door:
    """A frontend's door that lists no models, served by the test while it waits."""

    def __init__(self, keyring: Keyring, opened: Opened, address: str = TCP) -> None:
        self.guard = LinkAccess(keyring, CLIENT_KINDS, names=True)
        self.link = RouterLink.bind([address], guard=self.guard)
        opened(self.link)

    def serve(self, until_: Callable[[], bool]) -> None:
        def turn() -> bool:
            for one in self.link.receive(16):
                answer = Pong(one.message.number) if isinstance(one.message, Ping) else ModelsListed(())
                self.link.send(one.peer, answer)
            return until_()

        until(turn, self.link)


def in_thread(work: Callable[[], object]) -> tuple[Callable[[], bool], Callable[[], object]]:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future.done, future.result


def test_a_client_whose_key_is_refused_is_told_so_at_once(
    folder: Path, opened: Opened, tmp_path: Path
) -> None:
    door = Door(Keyring.of_folder(folder, FRONTEND), opened)
    run("revoke", str(folder), f"{CLIENT}/alice")
    door.guard.keyring._looked_at_ms = -LOOK_EVERY_MS
    for options, told in (
        (ClientOptions(key_file=tmp_path / "alice.key"), "does not let our key in"),
        (ClientOptions(), "asks for a key"),
    ):
        began_ms = CLOCK.now_ms()
        with (
            pytest.raises(Unauthorised, match=told),
            BlockingClient(bare(door.link) if options.key_file is None else door.link.addresses[0], options),
        ):
            pass
        assert CLOCK.now_ms() - began_ms < options.connect_timeout_ms / 2


def test_what_a_client_asks_after_its_key_was_revoked_ends_unauthorised(
    folder: Path, opened: Opened, tmp_path: Path
) -> None:
    keyring, clock = followed(folder, FRONTEND)
    door = Door(keyring, opened)
    client = BlockingClient(door.link.addresses[0], ClientOptions(key_file=tmp_path / "alice.key"))
    done, result = in_thread(lambda: _opened(client).models())
    door.serve(done)
    assert result() == ()
    run("revoke", str(folder), f"{CLIENT}/alice")
    clock.at_ms += LOOK_EVERY_MS
    try:
        done, result = in_thread(lambda: _until_unauthorised(client))
        door.serve(done)
        assert "does not let our key in" in str(result())
        with pytest.raises(Unauthorised):  # and at once from then on
            client.infer("m", {"input": np.zeros(4, np.float32)}, budget_ms=20_000.0)
    finally:
        client.close()


def test_who_has_another_key_by_now_is_back_at_once_when_the_one_it_connected_with_is_revoked(
    folder: Path, opened: Opened, tmp_path: Path
) -> None:
    """A client's new file was put in the place of its old one; ZeroMQ tries again with the key of the connection that has ended."""
    door = Door(Keyring.of_folder(folder, FRONTEND), opened)
    keyring = Keyring.of_file(tmp_path / "alice.key")
    keyring.clock = clock = Now()
    server = PeerId("frontend")
    link = DealerLink.connect(PeerId("client/alice/1"), server, door.link.addresses, guard=guarded(keyring))
    opened(link)
    until(lambda: link.send(server, Ping(1)), link)
    assert take(door.link, 1)[0].message == Ping(1)
    run("rotate", str(folder), f"{CLIENT}/alice", "--out", str(tmp_path / "new.key"))
    (tmp_path / "new.key").replace(tmp_path / "alice.key")
    run("revoke", str(folder), f"{CLIENT}/alice", "--old")
    clock.at_ms += LOOK_EVERY_MS
    door.guard.keyring._looked_at_ms = -LOOK_EVERY_MS
    assert door.link.receive(16) == []
    until(lambda: bool(link.take_lost()), link)
    refused = door.guard.refused

    def is_back() -> bool:
        assert not link.refusal
        return link.send(server, Ping(2))

    began_ms = CLOCK.now_ms()
    until(is_back, link)
    assert CLOCK.now_ms() - began_ms < HANDSHAKE_MS / 2
    assert door.guard.refused > refused, "the old one was tried"
    assert [one.message for one in take(door.link, 1)] == [Ping(2)]


def test_a_clients_key_does_not_ask_how_a_frontend_is(folder: Path, tmp_path: Path) -> None:
    keyring = Keyring.of_file(tmp_path / "alice.key")
    with pytest.raises(Unauthorised, match="the operator's key may"):
        ask_status("tcp://127.0.0.1:1", keyring=keyring)


def test_frontends_rotate_their_key_under_clients_that_never_end(
    folder: Path, opened: Opened, tmp_path: Path
) -> None:
    """Rotate, hand out the clients' new files, restart the frontends, revoke: a client that runs sees none of it."""
    path = tmp_path / "alice.key"
    before = Door(Keyring.of_folder(folder, FRONTEND), opened)
    address = bare(before.link)  # as users write it: without a key in it
    clock = Now()
    client = BlockingClient(address, ClientOptions(key_file=path))
    done, _ = in_thread(client.open)
    before.serve(done)
    keyring = client._opened().client._connections[0]._link._guard.keyring  # type: ignore[union-attr]
    keyring.clock, keyring._looked_at_ms = clock, 0.0

    def works(door: Door) -> None:
        clock.at_ms += LOOK_EVERY_MS
        done, result = in_thread(client.models)
        door.serve(done)
        assert result() == ()

    works(before)
    told = run("rotate", str(folder), FRONTEND)
    assert "client/alice" in told
    run("rotate", str(folder), "client/alice", "--out", str(tmp_path / "new.key"))
    assert "client/alice" not in run("rotate", str(folder), f"{NODE}/a")
    before.guard.keyring._looked_at_ms = -LOOK_EVERY_MS
    works(before)  # with the old file
    (tmp_path / "new.key").replace(path)
    works(before)  # with the new one in its place
    before.link.close()
    after = _door_at(address, folder, opened)
    done, result = in_thread(lambda: _until_it_lists(client))
    after.serve(done)
    result()
    run("revoke", str(folder), FRONTEND, "--old")
    run("revoke", str(folder), "client/alice", "--old")
    after.guard.keyring._looked_at_ms = -LOOK_EVERY_MS
    works(after)
    another = BlockingClient(address, ClientOptions(key_file=path))  # that starts now
    done, result = in_thread(lambda: _opened(another).models())
    after.serve(done)
    assert result() == ()
    another.close()
    client.close()


def _door_at(address: str, folder: Path, opened: Opened) -> Door:
    """Where another one was. Until then anybody's outgoing connection may have been given that port for a moment."""
    doors: list[Door] = []

    def is_open() -> bool:
        with contextlib.suppress(ConfigError):
            doors.append(Door(Keyring.of_folder(folder, FRONTEND), opened, address))
        return bool(doors)

    until(is_open)
    return doors[0]


def _until_unauthorised(client: BlockingClient) -> Unauthorised:
    """Before it is known why the connection broke, it is only lost."""
    began_ms = CLOCK.now_ms()
    while CLOCK.now_ms() - began_ms < 20_000.0:
        try:
            client.infer("m", {"input": np.zeros(4, np.float32)}, budget_ms=20_000.0)
        except PeerLost:
            select.select([], [], [], 0.02)
        except Unauthorised as error:
            return error
    raise AssertionError("nobody says why")


def _opened(client: BlockingClient) -> BlockingClient:
    client.open()
    return client


def _until_it_lists(client: BlockingClient) -> None:
    """A frontend that restarts is away for a moment, keys or not."""
    for _ in range(200):
        try:
            client.models()
        except PeerLost:
            select.select([], [], [], 0.02)
        else:
            return
    raise AssertionError("it never came back")


def test_a_client_that_knows_none_of_the_frontends_keys_is_told_what_may_be_wrong(
    folder: Path, opened: Opened, tmp_path: Path
) -> None:
    door = Door(Keyring.of_folder(folder, FRONTEND), opened)
    stranger = Keyring.of_folder(folder, SCHEDULER).own
    theirs = msgspec.structs.replace(
        read_pair(tmp_path / "alice.key"), trusted=(TrustedKey(FRONTEND, stranger.public, ""),)
    )
    write_private(tmp_path / "other.key", theirs)
    options = ClientOptions(key_file=tmp_path / "other.key", connect_timeout_ms=2_000.0)
    with pytest.raises(PeerLost, match="none of the keys"), BlockingClient(bare(door.link), options):
        pass


def test_a_new_client_finds_a_frontend_that_still_has_its_old_key(
    folder: Path, opened: Opened, tmp_path: Path
) -> None:
    door = Door(Keyring.of_folder(folder, FRONTEND), opened)
    run("rotate", str(folder), FRONTEND)
    run("add", str(folder), "client/bob", "--out", str(tmp_path / "bob.key"))
    door.guard.keyring._looked_at_ms = -LOOK_EVERY_MS
    client = BlockingClient(bare(door.link), ClientOptions(key_file=tmp_path / "bob.key"))
    done, result = in_thread(lambda: _opened(client).models())
    door.serve(done)
    assert result() == ()
    client.close()


def test_revoking_the_frontends_old_key_names_the_clients_that_know_no_other(folder: Path) -> None:
    run("rotate", str(folder), FRONTEND)
    told = run("revoke", str(folder), FRONTEND, "--old", "--dry-run")
    assert "client/alice" in told


# ---------------------------------------------------------------- where one may listen


@pytest.mark.parametrize(
    "address",
    [
        "tcp://*:0",
        "tcp://0.0.0.0:0",
        "tcp://[::]:0",
        "tcp://0:0",
        "tcp://[::ffff:0.0.0.0]:0",
        "tcp://:0",
        "tcp://0.0:0",
        "tcp://0x0:0",
        "tcp://00.0:0",
        "tcp://0.0.0:0",
        "tcp://0X0.0:0",
    ],
)
@pytest.mark.parametrize("kind", [RouterLink, PullLink])
def test_nothing_listens_everywhere_with_or_without_keys(
    folder: Path, kind: type[RouterLink | PullLink], address: str
) -> None:
    for guard in (None, guarded(Keyring.of_folder(folder, SCHEDULER), CONTROL_KINDS)):
        with pytest.raises(ConfigError, match="name the interface's own address"):
            kind.bind([address], guard=guard)


@pytest.mark.parametrize(
    "host",
    ["localhost", "127.0.0.1", "::1", "lo", "gpu7", "a.b.example.org", "x0", "0x.org", "7.lab", "eth0"],
)
def test_a_name_and_an_address_in_full_stand_for_themselves(host: str) -> None:
    assert not is_wildcard(host)


@pytest.mark.parametrize("address", ["tcp://10.1.2.3:0", "tcp://eth0:0", "tcp://[fe80::1]:0"])
@pytest.mark.parametrize("kind", [RouterLink, PullLink])
def test_nothing_listens_to_others_without_keys(kind: type[RouterLink | PullLink], address: str) -> None:
    with pytest.raises(ConfigError, match="that needs keys"):
        kind.bind([address])
    with pytest.raises(ConfigError, match="that needs keys"):
        kind.bind([TCP, address])


def test_no_role_listens_to_others_without_keys(tmp_path: Path) -> None:
    options = FrontendOptions(
        FrontendId("frontend-0"), tmp_path, (TCP,), client_addresses=("tcp://10.1.2.3:0",)
    )
    with StopSignal() as stop, pytest.raises(ConfigError, match="that needs keys"):
        FrontendShell(options, stop)


def test_a_local_socket_is_its_users_alone(opened: Opened, tmp_path: Path) -> None:
    former = os.umask(0)  # who has this, and a folder that all may enter, is not helped by the folder's mode
    try:
        tmp_path.chmod(0o777)
        links: list[Link] = [
            RouterLink.bind([f"ipc://{tmp_path}/r"]),
            PullLink.bind([f"ipc://{tmp_path}/p"]),
        ]
        assert os.umask(0) == 0  # it is as it was
    finally:
        os.umask(former)
    for link in links:
        opened(link)
    for name in ("r", "p", "r.lock", "p.lock"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) & 0o077 == 0


PYTHON = "/usr/bin/python3"
CONNECTING = """
import os, sys
os.setgid(65534); os.setuid(65534)
import socket
with socket.socket(socket.AF_UNIX) as connection:
    try:
        connection.connect(sys.argv[1])
        connection.settimeout(5.0)
        connection.sendall(b"\\xff" + bytes(8) + b"\\x7f\\x03\\x00" + b"NULL".ljust(20, b"\\0") + bytes(32))
        print("heard", len(connection.recv(64)))
    except PermissionError:
        print("refused at the file")
    except OSError:
        print("refused")
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or not os.access(PYTHON, os.X_OK),
    reason="only root can try it as another user, by a Python that all may run",
)
def test_another_user_of_the_host_is_not_let_in(opened: Opened, tmp_path: Path) -> None:
    for path in (tmp_path, *tmp_path.parents[:-1]):
        if not path.stat().st_mode & 0o001:
            path.chmod(path.stat().st_mode | 0o001)
    router = RouterLink.bind([f"ipc://{tmp_path}/s"])
    opened(router)

    def tried() -> str:
        code = [PYTHON, "-I", "-S", "-c", CONNECTING, f"{tmp_path}/s"]
        return subprocess.run(code, capture_output=True, text=True, timeout=60, check=False).stdout.strip()

    assert tried() == "refused at the file"
    (tmp_path / "s").chmod(0o777)  # not even where that stands open
    assert tried() in {"heard 0", "refused"}
    with plain.socket(plain.AF_UNIX) as own:
        own.connect(f"{tmp_path}/s")
        own.settimeout(5.0)
        assert own.recv(10), "we are greeted"
