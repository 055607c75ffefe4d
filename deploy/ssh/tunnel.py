"""`--via HOST`: a command looks at the cluster of another host, through a tunnel that it opens itself.

Without a key it is the sockets of that host's run directory that appear here: it is ssh that says who may, for they are that user's,
and one sees what runs on that host. With one (the operator's, or a client's), and where the cluster was deployed, it is the TCP
addresses of all schedulers and frontends, as that host reaches them. Either way there is a directory of our own with run files that
name them, and the command does what it does on a host of the cluster. Where `tenuto up` runs there, the directory is claimed as by it.
"""

from __future__ import annotations

import contextlib
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

from deploy.ssh.connection import HostConnection
from fabric.clock import MonotonicClock
from fabric.errors import FabricError, PeerLost
from fabric.ids import frontend_id, scheduler_id
from fabric.ipc import IPC
from roles.config.checks import name_like
from roles.config.hosts import DeployConfig
from roles.config.read_config import parse_config
from roles.runtime.process import RunFile, write_run_file
from roles.runtime.run_directory import UP_SOCKET, UpFile, give_back, take, write_up_file
from roles.runtime.running_cluster import endpoints_in

OPEN_LIMIT_MS: Final = 20_000.0
PURPOSES: Final = ("control", "client")
TCP: Final = "tcp://"
_ANY_MODEL: Final = {"name": "any", "slo_ms": 1_000, "profile": {"alpha_ms": 1, "beta_ms": 1}}


@dataclass(frozen=True, slots=True)
class _Forward:
    """An address of a role there, and where it appears here."""

    role_id: str
    incarnation: str
    purpose: str
    there: str
    here: str

    @property
    def option(self) -> str:
        """As ssh is told."""
        return ":".join(address.removeprefix(IPC).removeprefix(TCP) for address in (self.here, self.there))

    @property
    def is_open(self) -> bool:
        """Whether ssh listens here by now."""
        if self.here.startswith(IPC):
            return Path(self.here.removeprefix(IPC)).is_socket()
        host, _, port = self.here.removeprefix(TCP).rpartition(":")
        # A connection would reach the role there, which counts one that says nothing as a stranger's.
        with socket.socket() as probe:
            # So is ssh's own socket: neither is in the other's way before one listens.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, int(port)))
            except OSError:
                return True
        return False


@contextlib.contextmanager
def tunnel(host: str, key_file: Path | None = None) -> Iterator[Path]:
    """A run directory here that stands for the one there. Raises PeerLost where there is none, or no way to it."""
    connection = HostConnection(host, DeployConfig())
    name = (
        host.removeprefix("ssh://").rpartition("@")[2].strip("/")
    )  # as ssh takes it; the file may have another one
    told = connection.ask({"do": "run_files", "host": name})
    with _ending_in_order(), _folder() as folder:
        has_tcp = key_file is not None and bool(told["cluster"])
        forwards = _addresses_of(told["cluster"]) if has_tcp else _sockets_of(told["run_files"], folder)
        if not forwards:
            raise PeerLost(f"no cluster runs on {host} (looked in {', '.join(told['looked_in'])})")
        supervisor = None if has_tcp else told["up"]
        sockets = [] if supervisor is None else [_socket_of_up(supervisor, folder)]
        with (
            _claimed(folder, is_up=supervisor is not None),
            _forwarded(connection, [*forwards, *sockets]) as ssh,
        ):
            for role_id in dict.fromkeys(one.role_id for one in forwards):
                own = [one for one in forwards if one.role_id == role_id]
                addresses = {one.purpose: [one.here] for one in own}
                write_run_file(folder, RunFile(role_id, ssh.pid, own[0].incarnation, addresses))
            drained = [] if supervisor is None else [str(one) for one in supervisor["drained"]]
            up_file = UpFile(ssh.pid, is_ready=True, endpoints=endpoints_in(folder), drained=drained)
            write_up_file(folder, up_file)
            yield folder


@contextlib.contextmanager
def _claimed(folder: Path, *, is_up: bool) -> Iterator[None]:
    """As `tenuto up` there claims its run directory, where one runs."""
    if not is_up:
        yield
        return
    lock = take(folder)
    try:
        yield
    finally:
        give_back(folder, lock, is_removed=False)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="tenuto-via-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """A command that is told to end, or whose terminal is closed, takes its tunnel and its folder along."""
    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is signal.SIG_DFL  # else `nohup`, or who sees to it already
    ]
    for number in numbers:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _exit(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  the handler's signature
    sys.exit(128 + number)


@contextlib.contextmanager
def _forwarded(connection: HostConnection, forwards: Sequence[_Forward]) -> Iterator[subprocess.Popen[bytes]]:
    command = [
        *connection.command_before_host(),
        "-T",
        *("-o", "ExitOnForwardFailure=yes"),
        # A connection of its own: one that is shared would keep the forwards when this process ends.
        *("-o", "ControlMaster=no", "-o", "ControlPath=none"),
        *(word for one in forwards for word in ("-L", one.option)),
        "--",
        connection.host,
        "exec cat",  # whose stdin ends with this process, whatever ends that: with `-N` ssh would run on
    ]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=said)  # noqa: S603
        assert process.stdin is not None, "asked for a pipe"
        try:
            clock = MonotonicClock()
            until_ms = clock.now_ms() + OPEN_LIMIT_MS
            while not all(one.is_open for one in forwards):
                if process.poll() is not None or clock.now_ms() > until_ms:
                    said.seek(0)
                    lines = said.read().decode("utf-8", "replace").strip().splitlines()
                    raise PeerLost(f"{connection.host}: {lines[-1] if lines else 'the tunnel does not open'}")
                select.select([], [], [], 0.02)
            yield process
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
            process.kill()
            process.wait()
            process.stdin.close()


def _sockets_of(run_files: Sequence[Mapping[str, Any]], folder: Path) -> list[_Forward]:
    """By the run files there: the roles of that host."""
    try:
        return [
            _Forward(
                name_like(str(told["role_id"]), "a role's name"),
                str(told["incarnation"]),
                purpose,
                address,
                f"{IPC}{folder / Path(address.removeprefix(IPC)).name}",
            )
            for told in run_files
            for purpose in PURPOSES
            for address in told["addresses"].get(purpose, ())
            if address.startswith(IPC)
        ]
    except (KeyError, TypeError) as error:
        raise FabricError(f"its run files cannot be understood: {error!r}") from error


def _socket_of_up(supervisor: Mapping[str, Any], folder: Path) -> _Forward:
    return _Forward("up", "", "control", f"{IPC}{supervisor['socket']}", f"{IPC}{folder / UP_SOCKET}")


def _addresses_of(deployed: Mapping[str, Any]) -> list[_Forward]:
    """By the configuration there: the schedulers and frontends of all hosts."""
    places = parse_config({**deployed, "models": [_ANY_MODEL]}, Path(), is_whole=False).places
    found = [
        (scheduler_id(at), "control", places.control_address(at)) for at in range(len(places.schedulers))
    ]
    for index, place in enumerate(places.frontends):
        address = places.addresses.get(place.host, place.host)
        listens = places.client_address(index, address)
        if listens.startswith(TCP):
            found.append((frontend_id(index), "client", f"{TCP}{address}:{listens.rpartition(':')[2]}"))
    with contextlib.ExitStack() as taken:  # all at once, so that no two are the same
        ports = [taken.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in found]
        here = [f"{TCP}127.0.0.1:{one.getsockname()[1]}" for one in ports]
    return [
        _Forward(role_id, "", purpose, there, own)
        for (role_id, purpose, there), own in zip(found, here, strict=True)
    ]
