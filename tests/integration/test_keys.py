"""Keys on TCP connections: who gets in, under which name, and until when."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from click.testing import CliRunner

from fabric.client import BlockingClient, ClientOptions
from fabric.curve import CONTROL_KINDS, LinkAccess, guarded, may_be_called, new_pair
from fabric.errors import ConfigError, Unauthorised
from fabric.ids import BatchId, Incarnation, ModelId, PeerId, SliceId
from fabric.keys import (
    FRONTEND,
    LOOK_EVERY_MS,
    NODE,
    SCHEDULER,
    TRUSTED_FILE,
    Keyring,
    Trusted,
    checked_principal,
    read_pair,
    read_trusted,
)
from fabric.link import NamedTensor
from fabric.messages import BatchFailed, Ping, Pong
from fabric.sockets import DealerLink, PullLink, PushPool, RouterLink, context
from roles.cli.keys import keys
from tests.integration.test_links import TCP, Opened, opened, take, until
from tests.integration.test_up import CLUSTER, Home, home, infer

__all__ = ["home", "opened"]

OWN, SERVER = PeerId("frontend-0/1"), PeerId("scheduler-0")
QUIET_MS = 300.0


@dataclass
class Now:
    at_ms: float = 0.0

    def now_ms(self) -> float:
        return self.at_ms


def run(*arguments: str) -> str:
    result = CliRunner().invoke(keys, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    run("create", str(path))
    for node in ("a", "b"):
        run("add", str(path), f"node/{node}")
    run("add", str(path), "client/alice", "--out", str(tmp_path / "alice.key"))
    return path


def test_what_a_command_did_is_told_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def told(*arguments: str) -> Any:
        return json.loads(run(arguments[0], "keys", *arguments[1:], "--json"))

    principals = ["scheduler", "frontend", "operator"]
    dry = {"written": False, "dry_run": True}
    assert told("create", "--dry-run") == {"folder": "keys", "principals": principals} | dry
    assert not (tmp_path / "keys").exists()
    assert told("create") == {"folder": "keys", "principals": principals, "written": True}
    assert told("add", "client/alice") == {"principal": "client/alice", "file": "alice.key", "written": True}
    rotated = {"principal": "frontend", "file": "keys/frontend.key", "written": True}
    rotated |= {"clients_behind": ["client/alice"]}
    assert told("rotate", "frontend", "--dry-run") == rotated | dry, "as it will be"
    assert told("rotate", "frontend") == rotated
    trusted = {one["principal"]: one["public"] for one in told("show")["keys"]}  # the oldest stays
    revoked = told("revoke", "frontend", "--old")
    assert revoked == {
        "principal": "frontend",
        "revoked": [trusted["frontend"]],
        "written": True,
        "clients_behind": ["client/alice"],
    }
    assert told("add", "client/bob")["written"]
    both = ["client/bob", "client/alice"]
    forced = ("revoke", "frontend", "--force")
    assert told(*forced, "--dry-run")["clients_behind"] == both, "no key is left"
    assert told(*forced)["clients_behind"] == both


@pytest.mark.parametrize("principal", ["scheduler", "frontend", "operator"])
@pytest.mark.parametrize("words", [[], ["--dry-run"]])
def test_the_last_key_of_the_cluster_itself_is_revoked_by_force_only(
    folder: Path, principal: str, words: list[str]
) -> None:
    before = read_trusted(folder / "trusted.json")
    run("rotate", str(folder), principal)
    run("revoke", str(folder), principal, "--old")
    result = CliRunner().invoke(keys, ["revoke", str(folder), principal, *words])
    assert isinstance(result.exception, ConfigError)
    assert f"without a key of {principal} " in str(result.exception)
    assert "tenuto keys rotate" in str(result.exception)
    assert (folder / f"{principal}.key").exists()
    assert len(read_trusted(folder / "trusted.json").keys) == len(before.keys)
    run("revoke", str(folder), principal, "--force")
    assert not read_trusted(folder / "trusted.json").of(principal)


def test_who_adds_a_key_is_told_to_let_the_hosts_know(tmp_path: Path) -> None:
    """Else they refuse it."""
    path, own = str(tmp_path / "keys"), ("--out", str(tmp_path / "alice.key"))
    run("create", path)
    assert TRUSTED_FILE not in run("add", path, "client/alice", *own, "--dry-run")
    assert f"copy {TRUSTED_FILE} to every host" in run("add", path, "client/alice", *own)


@pytest.fixture
def control(folder: Path, opened: Opened) -> tuple[RouterLink, LinkAccess]:
    guard = LinkAccess(Keyring.of_folder(folder, SCHEDULER), CONTROL_KINDS, names=True)
    router = RouterLink.bind([TCP], guard=guard)
    opened(router)
    return router, guard


def dealer(own: str, addresses: object, guard: LinkAccess | None, opened: Opened) -> DealerLink:
    link = DealerLink.connect(PeerId(own), SERVER, list(addresses), guard=guard)  # type: ignore[call-overload]
    opened(link)
    return link


def says(link: DealerLink, number: int) -> None:
    until(lambda: link.send(SERVER, Ping(number)), link)


def hears_nothing(link: RouterLink | PullLink, milliseconds: float = QUIET_MS) -> None:
    """Beside a link that is heard, so that silence is not slowness."""
    assert link.receive(16) == []
    with pytest.raises(AssertionError):
        until(lambda: bool(link.receive(16)), link, limit_ms=milliseconds)


def bare(router: RouterLink | PullLink) -> str:
    return bare_address(router.addresses[0])


def bare_address(address: str) -> str:
    """Without the key in it."""
    return address.partition("?")[0]


def test_a_key_gets_in_and_the_answer_comes_back(
    folder: Path, control: tuple[RouterLink, LinkAccess], opened: Opened
) -> None:
    router, guard = control
    for addresses in (router.addresses, [bare(router)]):  # with its key in the address, and without
        name = f"frontend-0/{len(addresses[0])}"
        link = dealer(name, addresses, guarded(Keyring.of_folder(folder, FRONTEND)), opened)
        says(link, 1)
        assert [(one.peer, one.message) for one in take(router, 1)] == [(name, Ping(1))]
        assert router.send(PeerId(name), Pong(1))
        assert take(link, 1)[0].message == Pong(1)
    assert guard.refused == 0


def test_whoever_is_refused_while_the_link_counts_is_counted_too(
    control: tuple[RouterLink, LinkAccess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys are judged on another thread, which may run at any moment."""
    router, guard = control

    def one_failed() -> int:
        assert not guard.callback("", b"nobody's")
        return 1

    monkeypatch.setattr(router._connections, "count_failed", one_failed)
    for looks in (1, 2, 3):
        assert router.counters["keys_refused"] == 2 * looks


def test_strangers_get_nothing_in_and_are_counted(
    folder: Path, control: tuple[RouterLink, LinkAccess], opened: Opened, tmp_path: Path
) -> None:
    router, guard = control
    stranger = Keyring(new_pair(FRONTEND), read_trusted(folder / TRUSTED_FILE))
    client = Keyring.of_file(tmp_path / "alice.key")
    client._take(read_trusted(folder / TRUSTED_FILE))  # it knows where the scheduler is, and its key
    for name, keyring in (("frontend-0/2", stranger), ("client/1", client)):
        refused = guard.refused
        link = dealer(name, router.addresses, guarded(keyring), opened)
        until(lambda: guard.refused > refused, router)  # noqa: B023  ended before the next turn
        until(lambda: not link.send(SERVER, Ping(1)) and "our key" in link.refusal, link)  # noqa: B023  likewise
    plain = context().socket(zmq.DEALER)
    try:
        plain.setsockopt(zmq.LINGER, 0)
        plain.connect(bare(router))
        plain.send(b"hello")
        hears_nothing(router)
    finally:
        plain.close()
    assert router.counters["keys_refused"] == guard.refused >= 2
    friend = dealer("frontend-0/3", router.addresses, guarded(Keyring.of_folder(folder, FRONTEND)), opened)
    says(friend, 4)
    assert [one.message for one in take(router, 1)] == [Ping(4)]


@pytest.mark.parametrize("name", ["worker-b-1/1", "node-b/1", "frontend-0/1", "operator/1", "worker-a-b/1"])
def test_a_node_speaks_under_no_other_name(
    folder: Path, control: tuple[RouterLink, LinkAccess], opened: Opened, name: str
) -> None:
    router, guard = control
    keyring = Keyring.of_folder(folder, f"{NODE}/a")
    own = dealer("worker-a-1/1", router.addresses, guarded(keyring), opened)
    says(own, 1)
    take(router, 1)
    other = dealer(name, router.addresses, guarded(keyring), opened)
    says(other, 2)
    until(lambda: router.receive(16) == [] and guard.refused == 1, router)
    assert router.counters["garbage_in"] == 1
    says(own, 3)
    assert [one.message for one in take(router, 1)] == [Ping(3)]


def test_a_node_has_no_say_in_anothers_slice(folder: Path, opened: Opened) -> None:
    guard = guarded(Keyring.of_folder(folder, FRONTEND), {NODE}, names=False)
    assert guard is not None
    pull = PullLink.bind([TCP], guard=guard)
    opened(pull)
    pool = PushPool(guard=guarded(Keyring.of_folder(folder, f"{NODE}/a")))
    opened(pool)
    pool.know(PeerId("frontend-0"), Incarnation("one"), pull.addresses)
    for slice_id in ("b/gpu0/0", "a/gpu0/0"):
        failed = BatchFailed(BatchId(1), SliceId(slice_id), ModelId("m"), (1,), "Internal", "no")
        assert pool.send(PeerId("frontend-0"), failed)
    (received,) = take(pull, 1)
    assert received.message.slice_id == "a/gpu0/0"  # type: ignore[union-attr]
    assert guard.refused == 1


def test_who_was_refused_is_let_in_once_it_is_known(folder: Path, opened: Opened) -> None:
    """ZeroMQ does not ask again by itself where it is told that the refusal is final."""
    clock = Now()
    keyring = Keyring.of_folder(folder, f"{NODE}/a")
    keyring.clock = clock
    keyring._take(Trusted())  # of before the frontends had that key
    guard = guarded(keyring, {FRONTEND}, names=False)
    assert guard is not None
    pull = PullLink.bind([TCP], guard=guard)
    opened(pull)
    pool = PushPool(guard=guarded(Keyring.of_folder(folder, FRONTEND)))
    opened(pool)
    pool.know(PeerId("a/gpu0/0"), Incarnation("one"), pull.addresses)
    assert pool.send(PeerId("a/gpu0/0"), Ping(1))
    until(lambda: guard.refused > 0, pull)
    keyring._take(read_trusted(folder / TRUSTED_FILE))
    assert [one.message for one in take(pull, 1)] == [Ping(1)]


def test_a_server_whose_key_is_gone_is_only_not_there(folder: Path, opened: Opened) -> None:
    clock = Now()
    theirs = Keyring.of_folder(folder, FRONTEND)
    theirs.clock = clock
    router = RouterLink.bind([TCP], guard=guarded(Keyring.of_folder(folder, SCHEDULER), CONTROL_KINDS))
    opened(router)
    link = dealer("frontend-0/1", router.addresses, guarded(theirs), opened)
    says(link, 1)
    run("revoke", str(folder), SCHEDULER, "--force")
    clock.at_ms += LOOK_EVERY_MS
    link.reconnect()
    with pytest.raises(AssertionError):
        until(lambda: link.send(SERVER, Ping(2)), link, limit_ms=QUIET_MS)


def test_a_revoked_key_is_refused_at_its_next_message_and_at_the_door(folder: Path, opened: Opened) -> None:
    clock = Now()
    keyring = Keyring.of_folder(folder, SCHEDULER)
    keyring.clock = clock
    guard = LinkAccess(keyring, CONTROL_KINDS, names=True)
    router = RouterLink.bind([TCP], guard=guard)
    opened(router)
    theirs = Keyring.of_folder(folder, FRONTEND)
    link = dealer("frontend-0/1", router.addresses, guarded(theirs), opened)
    says(link, 1)
    take(router, 1)
    run("revoke", str(folder), FRONTEND, "--force")
    assert link.send(SERVER, Ping(2))
    until(
        lambda: not router.receive(0) and router.has_more, router
    )  # it is there before its connection is ended
    clock.at_ms += LOOK_EVERY_MS
    assert router.receive(16) == []
    assert router.counters["garbage_in"] == 1
    link.close()  # else it knocks too
    theirs.path = None  # on another host, which does not know yet
    dealer("frontend-0/2", router.addresses, guarded(theirs), opened)
    until(lambda: guard.refused >= 2, router)


def test_a_servers_key_is_rotated_while_all_talk_to_it(folder: Path, opened: Opened) -> None:
    before = RouterLink.bind([TCP], guard=guarded(Keyring.of_folder(folder, SCHEDULER), CONTROL_KINDS))
    opened(before)
    clock = Now()
    theirs = Keyring.of_folder(folder, FRONTEND)
    theirs.clock = clock
    run("rotate", str(folder), SCHEDULER)
    clock.at_ms += LOOK_EVERY_MS
    after = RouterLink.bind([TCP], guard=guarded(Keyring.of_folder(folder, SCHEDULER), CONTROL_KINDS))
    opened(after)
    assert len(theirs.public_keys(SCHEDULER)) == 2
    for place, router in enumerate((before, after)):
        link = dealer(f"frontend-0/{place}", router.addresses, guarded(theirs), opened)
        says(link, 1)
        take(router, 1)
    run("revoke", str(folder), SCHEDULER, "--old")
    clock.at_ms += LOOK_EVERY_MS
    with pytest.raises(ConfigError, match="its key is not one of scheduler"):
        dealer("frontend-0/8", before.addresses, guarded(theirs), opened)
    says(dealer("frontend-0/9", after.addresses, guarded(theirs), opened), 1)
    take(after, 1)


def test_an_address_without_a_key_is_tried_with_each_that_is_trusted(folder: Path, opened: Opened) -> None:
    old = RouterLink.bind([TCP], guard=guarded(Keyring.of_folder(folder, SCHEDULER), CONTROL_KINDS))
    opened(old)
    run("rotate", str(folder), SCHEDULER)
    guard = guarded(Keyring.of_folder(folder, FRONTEND))
    link = dealer("frontend-0/1", [bare(old)], guard, opened)  # with the newest, which is not the right one
    says(link, 2)
    assert [one.message for one in take(old, 1)] == [Ping(2)]


def test_links_that_are_closed_leave_nothing(folder: Path) -> None:
    keyring = Keyring.of_folder(folder, SCHEDULER)
    asked = None
    for _ in range(20):
        guard = guarded(keyring, CONTROL_KINDS)
        assert guard is not None
        RouterLink.bind([TCP], guard=guard).close()
        asked = guard._asked_by
    assert asked is not None
    assert not any(one.keyring is keyring for one in asked.credentials_providers.values())


def test_payload_goes_to_the_node_it_is_meant_for(folder: Path, opened: Opened) -> None:
    guard = guarded(Keyring.of_folder(folder, f"{NODE}/a"), {FRONTEND}, names=False)
    pull = PullLink.bind([TCP], guard=guard)
    opened(pull)
    pool = PushPool(guard=guarded(Keyring.of_folder(folder, FRONTEND)))
    opened(pool)
    sent = np.random.default_rng(1).random((3, 224, 224), np.float32)
    for slice_id in ("a/gpu0/0", "b/gpu0/0"):
        pool.know(PeerId(slice_id), Incarnation("one"), pull.addresses)
    assert pool.send(PeerId("a/gpu0/0"), Ping(1), [NamedTensor("x", sent)])
    (received,) = take(pull, 1)
    np.testing.assert_array_equal(received.tensors[0].array, sent)
    assert not pool.send(
        PeerId("b/gpu0/0"), Ping(1), [NamedTensor("x", sent)]
    )  # at that address is somebody else
    assert pool.counters["unroutable_out"] == 1


def test_a_worker_takes_no_payload_from_a_worker(folder: Path, opened: Opened) -> None:
    guard = guarded(Keyring.of_folder(folder, f"{NODE}/a"), {FRONTEND}, names=False)
    assert guard is not None
    pull = PullLink.bind([TCP], guard=guard)
    opened(pull)
    pool = PushPool(guard=guarded(Keyring.of_folder(folder, f"{NODE}/b")))
    opened(pool)
    pool.know(PeerId("a/gpu0/0"), Incarnation("one"), pull.addresses)
    pool.send(PeerId("a/gpu0/0"), Ping(1))
    until(lambda: guard.refused > 0, pull)
    hears_nothing(pull)


def test_processes_of_one_host_need_no_key(folder: Path, opened: Opened, tmp_path: Path) -> None:
    guard = guarded(Keyring.of_folder(folder, SCHEDULER), CONTROL_KINDS)
    router = RouterLink.bind([TCP, f"ipc://{tmp_path}/s"], guard=guard)
    opened(router)
    assert [address.partition(":")[0] for address in router.addresses] == ["ipc", "tcp"]
    link = dealer("frontend-0/1", router.addresses, None, opened)
    says(link, 1)
    assert take(router, 1)[0].message == Ping(1)


@pytest.mark.parametrize(
    ("principal", "name", "may"),
    [
        ("node/a", "node-a/1", True),
        ("node/a", "worker-a-12/1", True),
        ("node/a", "worker-a-1-2/1", False),
        ("node/a", "worker-a-/1", False),
        ("node/a-1", "worker-a-1-2/1", True),
        ("frontend", "frontend-3/1", True),
        ("frontend", "scheduler-0/1", False),
        ("client/alice", "client/alice/1", True),
        ("client/alice", "client/bob/1", False),
        ("client/alice", "client/1", False),
        ("client/alice", "operator/1", False),
        ("operator", "operator/1", True),
        ("operator", "planner", False),
    ],
)
def test_names_belong_to_keys(principal: str, name: str, may: bool) -> None:
    assert may_be_called(principal, PeerId(name)) is may


# ---------------------------------------------------------------- the folder and its command


def test_secrets_are_for_their_owner_alone_and_never_shown(folder: Path, tmp_path: Path) -> None:
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = [*folder.glob("*.key"), tmp_path / "alice.key"]
    assert {path.name for path in files} == {
        *("scheduler.key", "frontend.key", "operator.key", "node-a.key", "node-b.key", "alice.key")
    }
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    shown = run("show", str(folder)) + run("show", str(folder), "--json")
    for path in files:
        pair = read_pair(path)
        assert pair.secret not in shown + repr(pair)
        assert pair.public in shown
    listed = {
        row["principal"]: row["secret_here"] for row in json.loads(run("show", str(folder), "--json"))["keys"]
    }
    assert listed == {
        **dict.fromkeys(("scheduler", "frontend", "operator", "node/a", "node/b"), True),
        "client/alice": False,
    }


def test_a_client_knows_frontends_and_nobody_else(tmp_path: Path, folder: Path) -> None:
    del folder
    trusted = read_pair(tmp_path / "alice.key").trusted
    assert {key.principal for key in trusted} == {FRONTEND}


@pytest.mark.parametrize("principal", [SCHEDULER, "node/a"])
def test_a_rotation_that_ends_early_leaves_a_role_that_starts(
    folder: Path, principal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed, or the disk is full, between the two files that it writes."""

    def full(folder: Path, trusted: Trusted) -> None:
        raise ConfigError(f"{folder}: no space left on device")

    before = {path: path.read_bytes() for path in folder.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr("roles.cli.keys._write", full)
        with pytest.raises(ConfigError, match="no space left"):
            run("rotate", str(folder), principal)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    own = Keyring.of_folder(folder, principal).own
    run("rotate", str(folder), principal)
    assert Keyring.of_folder(folder, principal).own != own


def test_a_client_whose_key_was_not_made_gets_one_at_the_next_try(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, trusted: Trusted) -> None:
        raise ConfigError(f"{folder}: no space left on device")

    words = ("add", str(folder), "client/bob", "--out", str(tmp_path / "bob.key"))
    with monkeypatch.context() as patch:
        patch.setattr("roles.cli.keys._write", full)
        with pytest.raises(ConfigError, match="no space left"):
            run(*words)
    run(*words)
    assert Keyring.of_file(tmp_path / "bob.key").own.public in read_trusted(folder / TRUSTED_FILE).of(
        "client/bob"
    )


def test_a_list_replaced_under_its_former_time_is_taken_over(folder: Path) -> None:
    """In the same file, as `cp -p` and `rsync --inplace -t` write."""
    path = folder / TRUSTED_FILE
    former = path.read_bytes()
    run("revoke", str(folder), "node/a")
    revoked = path.read_bytes()
    path.write_bytes(former)
    os.utime(path, ns=(1, 1))
    keyring = Keyring.of_folder(folder, SCHEDULER)
    keyring.clock = Now(LOOK_EVERY_MS)
    path.write_bytes(revoked)
    os.utime(path, ns=(1, 1))
    keyring.look_again()
    assert not keyring.trusted.of("node/a")


def test_a_dry_run_writes_nothing(folder: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    run("add", str(folder), "node/c", "--dry-run")
    run("rotate", str(folder), "node/a", "--dry-run")
    run("revoke", str(folder), "node/a", "--dry-run")
    run("create", str(tmp_path / "other"), "--dry-run")
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("create", "{folder}"), "has keys already"),
        (("create", "{folder}/.."), "is there already"),
        (("create", "/proc/keys-of-ours"), "no such file"),
        (("add", "{folder}", "client/alice2", "--out", "{folder}/scheduler.key"), "is there already"),
        (("add", "{folder}", "client/.."), "is no principal"),
        (("add", "{folder}", "node/c", "--out", "{folder}/c.key"), "is for clients"),
        (("add", "{folder}", "node/a"), "has a key already"),
        (("add", "{folder}", "node"), "is no principal"),
        (("add", "{folder}", "node/../x"), "is no principal"),
        (("add", "{folder}", "scheduler/x"), "is no principal"),
        (("rotate", "{folder}", "node/zz"), "has no key"),
        (("revoke", "{folder}", "node/a", "--old"), "has no older key"),
        (("show", "{folder}/none"), "no such file"),
    ],
)
def test_what_cannot_be_done_is_said(folder: Path, arguments: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        run(*(one.format(folder=folder) for one in arguments))


def test_keys_that_cannot_be_used_are_refused_with_the_reason(folder: Path) -> None:
    path = folder / "node-a.key"
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="others may read it"):
        Keyring.of_folder(folder, "node/a")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="no such file"):
        Keyring.of_folder(folder, "node/nobody")
    (folder / "node-c.key").write_bytes(path.read_bytes())
    (folder / "node-c.key").chmod(0o600)
    with pytest.raises(ConfigError, match="is the key of node/a"):
        Keyring.of_folder(folder, "node/c")
    run("revoke", str(folder), "node/b")
    with pytest.raises(ConfigError, match="no such file"):
        Keyring.of_folder(folder, "node/b")
    (folder / TRUSTED_FILE).write_bytes(msgspec.json.encode(Trusted()))
    with pytest.raises(ConfigError, match="does not trust"):
        Keyring.of_folder(folder, "node/a")
    for nonsense in (
        b"",
        b"{}{",
        b"[]",
        os.urandom(100),
        b'{"keys":[{"principal":"x","public":"","since":""}]}',
    ):
        (folder / TRUSTED_FILE).write_bytes(nonsense)
        with pytest.raises(ConfigError):
            Keyring.of_folder(folder, "node/a")


def test_a_list_that_others_may_write_is_refused(folder: Path) -> None:
    (folder / TRUSTED_FILE).chmod(0o666)
    with pytest.raises(ConfigError, match="others may write it"):
        Keyring.of_folder(folder, SCHEDULER)


def test_changes_at_one_moment_lose_nothing(folder: Path) -> None:
    names = [f"node/n{number}" for number in range(6)]
    commands = [
        subprocess.Popen([sys.executable, "-m", "roles.cli", "keys", *words])
        for words in [*(["add", str(folder), name] for name in names), ["revoke", str(folder), "node/a"]]
    ]
    assert [command.wait(60) for command in commands] == [0] * len(commands)
    trusted = {key.principal for key in read_trusted(folder / TRUSTED_FILE).keys}
    assert trusted >= set(names)
    assert "node/a" not in trusted


@pytest.mark.parametrize("wrong", ["others may write it", "it is gone"])
def test_a_list_that_is_not_taken_over_is_counted_and_said_once_until_it_is(
    wrong: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else whoever has revoked a key believes it refused."""
    keyring = Keyring.of_folder(folder, SCHEDULER)
    keyring.clock = clock = Now()
    path, away = folder / TRUSTED_FILE, folder / "away"
    link = RouterLink.bind(["tcp://127.0.0.1:0"], guard=guarded(keyring))
    try:
        for _ in range(2):
            caplog.clear()
            before = link.counters["keys_not_taken_over"]
            if wrong == "it is gone":
                path.rename(away)
            else:
                content = path.read_bytes()
                path.unlink()  # another file, as `keys revoke` makes it
                path.write_bytes(content)
                path.chmod(0o664)
            with caplog.at_level("INFO", "tenuto"):
                for _ in range(3):
                    clock.at_ms += LOOK_EVERY_MS
                    keyring.look_again()
                assert link.counters["keys_not_taken_over"] == before + 3
                (line,) = caplog.messages
                assert line.startswith("keys_not_taken_over reason=")
                assert str(path) in line
                assert keyring.own.secret not in line
                if wrong == "it is gone":
                    away.rename(path)
                path.chmod(0o600)
                for _ in range(2):
                    clock.at_ms += LOOK_EVERY_MS
                    keyring.look_again()
            assert link.counters["keys_not_taken_over"] == before + 3
            assert caplog.messages[1:] == [f"keys_taken_over path={path}"]
    finally:
        link.close()


def test_a_list_that_is_half_written_changes_nothing(folder: Path) -> None:
    keyring = Keyring.of_folder(folder, SCHEDULER)
    keyring.clock = clock = Now()
    known = keyring.public_keys(FRONTEND)
    (folder / TRUSTED_FILE).write_bytes(b'{"keys": [')
    clock.at_ms += LOOK_EVERY_MS
    assert keyring.public_keys(FRONTEND) == known
    (folder / TRUSTED_FILE).unlink()
    clock.at_ms += LOOK_EVERY_MS
    assert keyring.public_keys(FRONTEND) == known
    assert keyring.failures == 2


@pytest.mark.parametrize(
    "name", ["", "x", "node/", "node/a/b", "client/" + "x" * 129, "scheduler/", "node/ä"]
)
def test_a_principal_is_one_of_five_kinds(name: str) -> None:
    with pytest.raises(ConfigError, match="is no principal"):
        checked_principal(name)


# ---------------------------------------------------------------- a cluster


@pytest.fixture
def locked(home: Home, tmp_path: Path) -> Home:
    run("create", str(tmp_path / "keys"))
    run("add", str(tmp_path / "keys"), "node/local")
    run("add", str(tmp_path / "keys"), "client/alice", "--out", str(tmp_path / "alice.key"))
    home.file.write_text(CLUSTER + "security: {keys: keys}\n")
    return home


def test_a_cluster_with_keys_serves_whoever_has_one(locked: Home, tmp_path: Path) -> None:
    _, started = locked.up()
    ipc, tcp = started["endpoints"]["client"]
    assert ipc.startswith("ipc:")
    infer([ipc])
    allowed = ClientOptions(key_file=tmp_path / "alice.key")
    for address in (tcp, tcp.partition("?")[0]):
        with BlockingClient(address, allowed) as client:
            client.infer("resnet50", {"input": np.zeros(4, np.float32)}, budget_ms=2_000.0)
    with pytest.raises(ConfigError, match="asks for a key"), BlockingClient(tcp):
        pass
    with pytest.raises(Unauthorised, match="asks for a key"), BlockingClient(tcp.partition("?")[0]):
        pass
    code, out, line = locked.run("status", "--json")
    assert code == 0, line
    secret = read_pair(tmp_path / "alice.key").secret
    assert secret not in out


def test_a_node_without_its_key_says_so(locked: Home, tmp_path: Path) -> None:
    run("revoke", str(tmp_path / "keys"), "node/local")
    code, _, line = locked.run("up", str(locked.file))
    assert code in {1, 3}
    assert "node-local.key" in line
