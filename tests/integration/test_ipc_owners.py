"""Whoever connects by ipc speaks to sockets of their own user only, with streams beside them and without."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fabric.clock import MonotonicClock
from fabric.errors import ConfigError
from fabric.ids import Incarnation, PeerId
from fabric.ipc import nearest
from fabric.link import Link
from fabric.messages import Ping
from fabric.sockets import DealerLink, PullLink, PushPool, RouterLink
from fabric.sockets.local_streams import are_allowed

pytestmark = pytest.mark.usefixtures("streams_or_not")

CLOCK = MonotonicClock()
CLIENT, SERVER, SLICE = PeerId("client/1"), PeerId("server/1"), PeerId("node/gpu0/0")
TCP = "tcp://127.0.0.1:1"
NOBODY_S = 65_534
PYTHON = Path("/usr/bin/python3")
"""An interpreter that other users may run."""
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a socket to another user")


@pytest.fixture
def opened() -> Iterator[list[Link]]:
    links: list[Link] = []
    yield links
    for link in links:
        link.close()


def until(is_true: Callable[[], bool], links: list[Link]) -> None:
    until_ms = CLOCK.now_ms() + 20_000
    while not is_true():
        assert CLOCK.now_ms() < until_ms, "it did not happen in time"
        for link in links:
            link.receive(0)


def taken_by_others(kind: str, path: Path) -> None:
    """Something that is no socket of ours lies at `path`, where one of ours was."""
    match kind:
        case "another user's socket":
            os.chown(path, NOBODY_S, NOBODY_S)
        case "a link to a socket":
            path.rename(path.with_name("elsewhere"))
            path.symlink_to(path.with_name("elsewhere"))
        case "a file":
            path.unlink()
            path.touch()


KINDS = [pytest.param("another user's socket", marks=as_root), "a link to a socket", "a file"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_socket_of_ours_is_not_connected_to(kind: str, tmp_path: Path, opened: list[Link]) -> None:
    address = f"ipc://{tmp_path}/s"
    router, pull = RouterLink.bind([address]), PullLink.bind([f"ipc://{tmp_path}/p"])
    opened += [router, pull]
    assert nearest((address, TCP)) == address
    for name in ("s", "p"):
        taken_by_others(kind, tmp_path / name)
    assert nearest((address, TCP)) == TCP, "the next address is taken"
    with pytest.raises(ConfigError, match=rf"{tmp_path}/s is .* of user \d+; it must be a socket of user"):
        DealerLink.connect(CLIENT, SERVER, [address])
    pool = PushPool()
    opened.append(pool)
    pool.know(SLICE, Incarnation("one"), [f"ipc://{tmp_path}/p"])
    assert not pool.send(SLICE, Ping(1))
    assert pool.counters["sockets_open"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_who_came_after_the_connection_was_begun_is_told_nothing_either(
    kind: str, tmp_path: Path, opened: list[Link]
) -> None:
    """Where nothing is at a path yet ZeroMQ connects once something is. Once it is ours it is spoken to."""
    path = tmp_path / "s"
    dealer = DealerLink.connect(CLIENT, SERVER, [f"ipc://{path}"])
    opened.append(dealer)
    router = RouterLink.bind([f"ipc://{path}"])
    opened.append(router)
    taken_by_others(kind, path)
    for _ in range(20):
        assert not dealer.send(SERVER, Ping(1))
    assert f"{path} is not connected to" in dealer.trouble.replace("ipc://", "")
    path.unlink()
    router.close()
    again = RouterLink.bind([f"ipc://{path}"])
    opened.append(again)
    until(lambda: dealer.send(SERVER, Ping(2)), [dealer])
    until(lambda: [one.message for one in again.receive(1)] == [Ping(2)], [dealer])
    assert not dealer.trouble


@as_root
@pytest.mark.skipif(not PYTHON.exists(), reason="another user needs a Python")
def test_who_finds_another_users_stream_does_not_go_by_zeromq_beside_it(
    tmp_path: Path, opened: list[Link]
) -> None:
    if not are_allowed():
        pytest.skip("by ZeroMQ only")
    router, pull = RouterLink.bind([f"ipc://{tmp_path}/s"]), PullLink.bind([f"ipc://{tmp_path}/p"])
    opened += [router, pull]
    dealer = DealerLink.connect(CLIENT, SERVER, [f"ipc://{tmp_path}/s"])
    pool = PushPool()
    opened += [dealer, pool]
    pool.know(SLICE, Incarnation("one"), [f"ipc://{tmp_path}/p"])
    tmp_path.chmod(0o777)
    for name in ("s", "p"):
        (tmp_path / f"{name}.stream").unlink()
    command = [str(PYTHON), "-I", "-S", "-c", LISTENER, f"{tmp_path}/s.stream", f"{tmp_path}/p.stream"]
    with subprocess.Popen(command, user=NOBODY_S, stdout=subprocess.PIPE, text=True) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "listens\n"
        assert not dealer.send(SERVER, Ping(1))
        assert not pool.send(SLICE, Ping(1))
        assert stranger.stdout.read() == "heard 0\nheard 0\n"
    assert "a process of another user listens there" in dealer.trouble
    for link in (router, pull):
        assert not link.receive(1)
        assert link.counters["bytes_in"] == 0


LISTENER = """
import socket, sys
listeners = [socket.socket(socket.AF_UNIX) for _ in sys.argv[1:]]
for one, path in zip(listeners, sys.argv[1:]):
    one.settimeout(20.0)
    one.bind(path)
    one.listen()
print("listens", flush=True)
for one in listeners:
    print("heard", len(one.accept()[0].recv(100)), flush=True)
"""
