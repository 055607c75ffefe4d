"""NVIDIA MPS as the agent sees it: where a GPU's daemon lives, how one speaks to it. What its clients are told: `environment.py`.

Without MPS, processes take turns on a GPU: whoever has the turn has all of it, and a share means nothing. With MPS
their kernels run side by side, each process on at most its percentage of the multiprocessors. A process asks for
that percentage by its environment when it starts, and keeps it for life. A client that finds no daemon in its pipe
directory runs *without* MPS and says nothing, so nobody may be started before the daemon answers.

Each physical GPU has a daemon of its own, so that what ends one GPU's daemon ends nothing on another. Clients and
daemon name the GPU by its UUID: ordinals are renumbered between them.

Everything here blocks for a bounded time. Reference: NVIDIA, Multi-Process Service, legacy (v2) interface.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

from msgspec import Struct

from fabric.errors import FabricError
from fabric.ipc import PATH_BYTES_MAX
from fabric.messages import GpuInfo
from roles.runtime.identities import end, processes_with, send_signal

BINARY: Final = "nvidia-cuda-mps-control"
MARK: Final = "TENUTO_MPS_DIRECTORY"
"""In the environment of our daemons and of the servers they start, so that they are known as ours."""
PIPE, LOG = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
CONTROL_LIMIT_S: Final = 3.0
KILL_LIMIT_S = 1.0
LONGEST_NAME_IN_PIPE: Final = len("/control_privileged")
OLDEST, OLDEST_WITH_SHARES = (3, 5), (7, 0)

log = logging.getLogger("tenuto")


class MpsError(FabricError):
    """MPS cannot be had, or does not do as it should; the text says why, for people."""


class MpsMissing(MpsError):
    """The control program is not installed here."""


class MpsUnsupported(MpsError):
    """This GPU cannot do it."""


class MpsWrongUser(MpsError):
    """The directory belongs to another user: MPS serves one user at a time."""


class MpsTaken(MpsError):
    """A daemon that we did not start serves in our directory."""


class MpsSilent(MpsError):
    """The daemon does not answer in time."""


class MpsRefused(MpsError):
    """The daemon answers, and says no."""


class MpsControl(Protocol):
    """What the agent asks of a GPU's daemon. Every call is bounded and may raise MpsError."""

    def servers(self) -> Sequence[int]:
        """Pids of its servers: one once there has been a client."""
        ...

    def clients(self, server: int) -> Sequence[int]:
        """Pids of a server's clients."""
        ...

    def terminate_client(self, server: int, client: int) -> None:
        """End a client's outstanding work on the GPU: only then can it be killed without harm to the others."""
        ...

    def quit(self) -> None:
        """End the daemon and its servers."""
        ...


class LegacyControl:
    """The v2 interface: one line in, some lines out, through a short-lived process of the control program."""

    def __init__(self, place: MpsPlace, binary: str = BINARY, limit_s: float = CONTROL_LIMIT_S) -> None:
        self._place = place
        self._binary = binary
        self._limit_s = limit_s

    def servers(self) -> Sequence[int]:
        """See `MpsControl`."""
        return _pids(self._say("get_server_list"))

    def clients(self, server: int) -> Sequence[int]:
        """See `MpsControl`."""
        return _pids(self._say(f"get_client_list {server}"))

    def terminate_client(self, server: int, client: int) -> None:
        """See `MpsControl`."""
        self._say(f"terminate_client {server} {client}")

    def quit(self) -> None:
        """See `MpsControl`."""
        self._say("quit")

    def _say(self, command: str) -> str:
        try:
            asked = subprocess.Popen(  # noqa: S603  the program is the configured one, and no shell reads it
                [self._binary],
                env={**os.environ, PIPE: str(self._place.pipe), LOG: str(self._place.log)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                process_group=0,
            )
        except FileNotFoundError as error:
            raise MpsMissing(f"{self._binary} is not installed here") from error
        except OSError as error:
            raise MpsError(f"{self._binary} cannot be run: {error}") from error
        try:
            out, err = asked.communicate(f"{command}\n", self._limit_s)
        except subprocess.TimeoutExpired as error:
            raise MpsSilent(f"no answer to '{command}' within {self._limit_s:g} s") from error
        finally:
            _end(asked)
        if asked.returncode:
            said = " ".join((out + " " + err).split())
            raise MpsRefused(f"'{command}' failed with code {asked.returncode}: {said or 'no reason given'}")
        return out


def _end(process: subprocess.Popen[str]) -> None:
    """If it has not ended. One that is stuck in the driver is left to the kernel, and reaped when the next one starts."""
    if process.poll() is None:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILL_LIMIT_S)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was not written goes nowhere
                pipe.close()


def end_client(control: MpsControl, client: int) -> bool:
    """End a process's work on its GPU through the daemon; False when it was no client (yet)."""
    for server in control.servers():
        if client in control.clients(server):
            control.terminate_client(server, client)
            return True
    return False


class MpsPlace(Struct, frozen=True):
    """The directory of one GPU's daemon, and what is in it. All of it is ours alone (0700)."""

    directory: Path

    @classmethod
    def of(cls, run_dir: Path, host: str, gpu: int) -> MpsPlace:
        """For one GPU of one node."""
        return cls(run_dir / f"mps-{host}" / f"gpu{gpu}")

    @property
    def pipe(self) -> Path:
        """Where daemon and clients meet."""
        return self.directory / "pipe"

    @property
    def log(self) -> Path:
        """Where the daemon writes, in files of its own."""
        return self.directory / "log"

    @property
    def owner_file(self) -> Path:
        """Which agent this is for."""
        return self.directory / "owner.json"

    @property
    def record_file(self) -> Path:
        """Which processes we started here, by pid and start."""
        return self.directory / "guard.json"

    @property
    def lock_file(self) -> Path:
        """Held by the one guard that serves here."""
        return self.directory / "guard.lock"

    def make(self) -> None:
        """Make what is missing. Raises MpsWrongUser where it is not ours, MpsError where it cannot be."""
        size = len(os.fsencode(self.pipe)) + LONGEST_NAME_IN_PIPE
        if size > PATH_BYTES_MAX:
            raise MpsError(
                f"{self.pipe} is too long for sockets in it ({size} bytes of at most {PATH_BYTES_MAX}); "
                "set TENUTO_RUN_DIR to a shorter directory"
            )
        for path in (self.directory.parent, self.directory, self.pipe, self.log):
            try:
                path.mkdir(mode=0o700, parents=path == self.directory.parent, exist_ok=True)
                status = path.lstat()
            except OSError as error:
                raise MpsError(f"{path} cannot be made: {error.strerror}") from error
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                raise MpsWrongUser(
                    f"{path} is no directory of user {os.getuid()} (it belongs to user {status.st_uid})"
                )
            path.chmod(0o700)

    def clear_away(self) -> None:
        """Take it away, after its guard; that of the node too, with the last one in it.

        A guard that was killed has left servers, and no other one follows.
        """
        try:
            end_leftovers(self)
        except MpsError as error:
            log.warning("mps_stuck directory=%s reason=%r", self.directory, str(error))
        shutil.rmtree(self.directory, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.directory.parent.rmdir()


def end_leftovers(place: MpsPlace) -> None:
    """End our daemons and servers of this directory, and only ours. Raises MpsError for one that cannot be."""
    found = list(processes_with(MARK, str(place.directory)))
    for identity in found:  # all at once, as each takes its time
        send_signal(identity, signal.SIGKILL)
    for identity in found:
        if not end(identity, KILL_LIMIT_S):
            raise MpsError(f"process {identity.pid} of a former MPS daemon cannot be killed")


def check_gpu(info: GpuInfo) -> bool:
    """Whether shares can be enforced there. Raises MpsUnsupported where MPS itself cannot run."""
    if info.is_mig:
        raise MpsUnsupported("MIG is on: its partitions are left as they are")
    capability = tuple(map(int, info.compute_capability.split(".")))
    if capability < OLDEST:
        raise MpsUnsupported(f"compute capability {info.compute_capability} is below 3.5")
    return capability >= OLDEST_WITH_SHARES


def _pids(said: str) -> Sequence[int]:
    return tuple(int(word) for word in said.split() if word.isdigit())
