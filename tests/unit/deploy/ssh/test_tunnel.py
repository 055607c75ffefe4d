"""Which addresses a tunnel leads to, and which options open one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from deploy.ssh import tunnel as tunnels
from deploy.ssh.connection import HostConnection
from deploy.ssh.tunnel import _addresses_of, _Forward, _forwarded, _sockets_of, tunnel
from fabric.errors import FabricError, PeerLost
from fabric.messages import Changed, RestartRoles
from roles.cli import restart as restarts
from roles.cli.options import key_option, via_option
from roles.config.hosts import DeployConfig
from roles.runtime.identities import is_over
from roles.runtime.run_directory import UP_SOCKET, claim, drained_roles, is_claimed, run_files
from tests.unit.deploy.ssh.stage import CLUSTER, Stage


def test_by_key_all_schedulers_and_frontends_of_the_deployed_cluster_are_reached() -> None:
    stage = Stage(
        cluster={
            **CLUSTER,
            "schedulers": [{"host": "head"}, {"host": "g1", "standby": True, "port": 7}],
            "frontends": [
                {"host": "head"},
                {"host": "head"},
                {"host": "g1", "listen": {"client": "tcp://eth0:9"}},
                {"host": "g2", "listen": {"client": "ipc:///run/here-alone"}},
            ],
        }
    )
    document = json.loads(stage.goods.config.files["cluster.json"])  # type: ignore[arg-type]
    told = {key: document.get(key, {}) for key in ("cluster", "listen", "security")}
    found = _addresses_of(told)
    assert [(one.role_id, one.purpose, one.there) for one in found] == [
        ("scheduler-0", "control", "tcp://10.0.0.1:5550"),
        ("scheduler-1", "control", "tcp://10.0.0.2:7"),
        ("frontend-0", "client", "tcp://10.0.0.1:5555"),
        ("frontend-1", "client", "tcp://10.0.0.1:5556"),
        ("frontend-2", "client", "tcp://10.0.0.2:9"),
    ]
    assert len({one.here for one in found}) == len(found)
    assert all(one.here.startswith("tcp://127.0.0.1:") for one in found)
    assert found[0].option.endswith(":10.0.0.1:5550")
    assert found[0].option.startswith("127.0.0.1:")


def test_without_one_it_is_the_sockets_of_that_host(tmp_path: Path) -> None:
    addresses = {
        "control": ["ipc:///run/t/scheduler-0.control", "tcp://10.0.0.1:5550"],
        "payload": ["ipc:///x"],
    }
    (one,) = _sockets_of([{"role_id": "scheduler-0", "incarnation": "1", "addresses": addresses}], tmp_path)
    assert one.option == f"{tmp_path}/scheduler-0.control:/run/t/scheduler-0.control"
    with pytest.raises(FabricError, match="cannot be understood"):
        _sockets_of([{"role_id": "scheduler-0"}], tmp_path)


SSH = """#!{python}
import os, socket, sys, time
words = sys.argv[1:]
with open(os.path.dirname(sys.argv[0]) + "/words", "w") as told:
    told.write(" ".join(words))
for at, word in enumerate(words):
    if word == "-L":
        socket.socket(socket.AF_UNIX).bind(words[at + 1].partition(":")[0])
if "-N" in words:
    time.sleep(60)
sys.stdin.read()
"""
KILLED = """
import sys
from deploy.ssh.tunnel import _forwarded
from deploy.ssh.connection import HostConnection
from roles.config.hosts import DeployConfig
with _forwarded(HostConnection("h", DeployConfig()), []) as ssh:
    print(ssh.pid, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def _stand_in_for_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It forwards as it is told, and runs for as long as what it runs there would."""
    ssh = tmp_path / "bin/ssh"
    ssh.parent.mkdir()
    ssh.write_text(SSH.format(python=sys.executable))
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")


@pytest.mark.usefixtures("_stand_in_for_ssh")
def test_ssh_ends_with_a_command_that_is_killed() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", KILLED], stdin=pipe, stdout=pipe) as command:
        assert command.stdout is not None
        handle = os.pidfd_open(int(command.stdout.readline()))
        command.kill()
    try:
        assert is_over(handle, 10.0)
    finally:
        os.close(handle)


@pytest.mark.usefixtures("_stand_in_for_ssh")
def test_a_tunnel_is_a_connection_of_its_own_whatever_the_users_ssh_shares(tmp_path: Path) -> None:
    """A shared one stays open when the command ends, and its forwards with it."""
    one = _Forward("s", "1", "control", "ipc:///there", f"ipc://{tmp_path}/here")
    with _forwarded(HostConnection("h", DeployConfig()), [one]):
        pass
    options = (tmp_path / "bin/words").read_text().split()
    assert {"ControlMaster=no", "ControlPath=none"} <= set(options)


def test_looking_whether_ssh_listens_is_never_in_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        one = _Forward("s", "1", "control", "tcp://10.0.0.1:5550", f"tcp://127.0.0.1:{port}")
        assert (one.is_open,) == (True,)
    plain, opened = socket.socket, list[int]()

    class Probe(socket.socket):
        def bind(self, address: Any) -> None:
            super().bind(address)
            with plain() as ssh:  # at this very moment
                ssh.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                ssh.bind(address)
                ssh.listen()
                opened.append(ssh.getsockname()[1])

    monkeypatch.setattr(socket, "socket", Probe)
    assert (one.is_open, opened) == (False, [port])


@pytest.mark.usefixtures("_stand_in_for_ssh")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_told_to_end_takes_its_tunnel_along(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    role = {
        "role_id": "scheduler-0",
        "incarnation": "1",
        "addresses": {"control": ["ipc:///run/t/s.control"]},
    }
    answer = {"cluster": None, "run_files": [role], "looked_in": [], "up": None}
    monkeypatch.setattr(HostConnection, "ask", lambda *_: answer)
    seen: list[Path] = []

    def command() -> None:
        with tunnel("h") as folder:
            assert (folder / "scheduler-0.json").exists()
            seen.append(folder)
            signal.raise_signal(number)

    former = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(SystemExit) as ended:
            command()
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, former)
    assert ended.value.code == 128 + number
    assert not seen[0].exists()


@pytest.mark.usefixtures("_stand_in_for_ssh")
@pytest.mark.parametrize("is_up", [True, False])
def test_where_tenuto_up_runs_there_it_is_asked_for_changes_as_here(
    is_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    role = {
        "role_id": "node-a",
        "incarnation": "1",
        "addresses": {"control": ["ipc:///run/t/node-a.control"]},
    }
    up = {"socket": "/run/t/up.control", "drained": ["frontend-1"]}
    answer = {"cluster": None, "run_files": [role], "looked_in": [], "up": up if is_up else None}
    monkeypatch.setattr(HostConnection, "ask", lambda *_: answer)
    with tunnel("h") as folder:
        assert is_claimed(folder) is is_up
        assert (folder / UP_SOCKET).is_socket() is is_up
        assert drained_roles(folder) == (["frontend-1"] if is_up else [])
        assert [one.role_id for one in run_files(folder)] == ["node-a"]
    assert not folder.exists()


def test_a_restart_by_via_is_of_that_hosts_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENUTO_RUN_DIR", "before")

    @contextmanager
    def open_tunnel(host: str, key_file: Path | None = None) -> Iterator[Path]:
        assert (host, key_file) == ("h", None)
        yield tmp_path

    monkeypatch.setattr(tunnels, "tunnel", open_tunnel)
    asked: list[Path] = []

    def ask_supervisor(run_dir: Path, change: RestartRoles) -> Changed:
        asked.append(run_dir)
        return Changed(change.request_no, "ok", started=3)

    monkeypatch.setattr(restarts, "ask_supervisor", ask_supervisor)
    with pytest.raises(PeerLost, match="no `tenuto up` runs in the run directory that was found on h "):
        CliRunner().invoke(restarts.restart, ["--rolling", "--via", "h"], catch_exceptions=False)
    with claim(tmp_path):
        done = CliRunner().invoke(restarts.restart, ["--rolling", "--via", "h", "--json"])
    assert json.loads(done.stdout)["restarted"] == 3, done.output
    assert asked == [tmp_path]
    here = tmp_path / "here"
    with claim(here):
        done = CliRunner().invoke(restarts.restart, ["--rolling", "--via", "h", "--run-dir", str(here)])
    assert (done.exit_code, asked) == (2, [tmp_path]), "not the cluster of this host"
    assert "give either --run-dir or --via" in done.output


@pytest.mark.parametrize("is_key_first", [True, False])
def test_a_tunnel_is_opened_once_with_host_and_key_in_either_order(
    is_key_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[str, Path | None]] = []

    @contextmanager
    def open_tunnel(host: str, key_file: Path | None = None) -> Iterator[Path]:
        opened.append((host, key_file))
        yield tmp_path

    monkeypatch.setattr(tunnels, "tunnel", open_tunnel)
    monkeypatch.setenv("TENUTO_RUN_DIR", "before")
    key = tmp_path / "operator.key"
    key.touch()

    @click.command()
    @via_option
    @key_option
    def command(key_file: Path | None) -> None:
        click.echo(f"{key_file}")

    words = [["--key", str(key)], ["--via", "a"]]
    given = [word for pair in (words if is_key_first else words[::-1]) for word in pair]
    done = CliRunner().invoke(command, given)
    assert (done.exit_code, done.output) == (0, f"{key}\n")
    assert CliRunner().invoke(command, ["--via", "b"]).output == "None\n"
    assert CliRunner().invoke(command, []).output == "None\n"
    assert opened == [("a", key), ("b", None)]
