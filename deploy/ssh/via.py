"""`--via HOST`: a command looks at the cluster of another host, through a tunnel that it opens itself.

The sockets of that host's run directory appear here, in a directory of our own with run files that name them, and the command does what it
does on that host. It is ssh that says who may: the sockets are that user's, so no key of the cluster is needed.
"""

from __future__ import annotations

import contextlib
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from deploy.ssh.connection import HostConnection
from fabric.clock import MonotonicClock
from fabric.errors import FabricError, PeerLost
from fabric.ipc import IPC
from roles.config.checks import name_like
from roles.config.hosts import DeployConfig
from roles.runtime.process import RunFile, write_run_file
from roles.runtime.run_directory import UpFile, write_up_file
from roles.runtime.running_cluster import endpoints_in

OPEN_LIMIT_MS: Final = 20_000.0
PURPOSES: Final = ("control", "client")


@contextlib.contextmanager
def tunnel(host: str) -> Iterator[Path]:
    """A run directory here that stands for the one there. Raises PeerLost where there is none, or no way to it."""
    connection = HostConnection(host, DeployConfig())
    told = connection.ask({"do": "run_files"})
    folder = Path(tempfile.mkdtemp(prefix="tenuto-via-"))
    try:
        there = {path: folder / Path(path).name for one in told["run_files"] for path in _sockets(one)}
        if not there:
            raise PeerLost(f"no cluster runs on {host} (looked in {', '.join(told['looked_in'])})")
        with _forwarded(connection, there) as ssh:
            for one in told["run_files"]:
                _write(folder, one, ssh.pid)
            write_up_file(folder, UpFile(ssh.pid, is_ready=True, endpoints=endpoints_in(folder)))
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _forwarded(connection: HostConnection, there: Mapping[str, Path]) -> Iterator[subprocess.Popen[bytes]]:
    forwards = [word for path, here in there.items() for word in ("-L", f"{here}:{path}")]
    command = [
        *connection.command_before_host(),
        "-N",
        "-o",
        "ExitOnForwardFailure=yes",
        *forwards,
        "--",
        connection.host,
    ]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said)  # noqa: S603
        try:
            clock = MonotonicClock()
            until_ms = clock.now_ms() + OPEN_LIMIT_MS
            while not all(here.is_socket() for here in there.values()):
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


def _sockets(run_file: Mapping[str, Any]) -> Sequence[str]:
    return [
        address.removeprefix(IPC)
        for purpose in PURPOSES
        for address in run_file["addresses"].get(purpose, ())
        if address.startswith(IPC)
    ]


def _write(folder: Path, told: Mapping[str, Any], pid: int) -> None:
    """As that role's own, with our sockets and the process that lives as long as they do."""
    try:
        role_id = name_like(str(told["role_id"]), "a role's name")
        addresses = {
            purpose: [f"{IPC}{folder / Path(address.removeprefix(IPC)).name}"]
            for purpose in PURPOSES
            for address in told["addresses"].get(purpose, ())
            if address.startswith(IPC)
        }
        write_run_file(folder, RunFile(role_id, pid, str(told["incarnation"]), addresses))
    except (KeyError, TypeError) as error:
        raise FabricError(f"its run files cannot be understood: {error!r}") from error
