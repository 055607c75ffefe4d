"""Requests to hosts through the system's own ssh, so that a user's configuration of it applies.

What a host does is code of this package, sent along (`deploy/ssh/on_host/`); it answers in lines of JSON. No secret is on a command
line: all of it goes by stdin.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import subprocess
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from deploy.ssh.on_host.system import MARK
from deploy.ssh.steps import SentFile
from fabric.errors import FabricError, PeerLost
from fabric.keys import naming_path
from roles.config.hosts import DeployConfig

CONNECT_LIMIT_S: Final = 10
PYTHON_MIN: Final = (3, 11)
_CHUNK: Final = 1 << 20
_BOOT: Final = (
    "import sys,os;"
    f"sys.version_info>={PYTHON_MIN} or sys.exit('{MARK}python '+sys.version.split()[0]);"
    "i=sys.stdin.buffer;n=int(i.readline());f=os.memfd_create('tenuto');os.write(f,i.read(n));"
    "sys.path.insert(0,'/proc/self/fd/%d'%f);"
    "from deploy.ssh.on_host.requests import main;main()"
)
_MEANINGS: Final = (
    (
        "Permission denied",
        "refuses this user's key: try `ssh {host}` by hand, and set deploy.user or an IdentityFile",
    ),
    (
        "Host key verification failed",
        "has a host key that is not known here: run `ssh {host}` once and look at it",
    ),
    ("REMOTE HOST IDENTIFICATION", "has another host key than before: make sure that it is the same host"),
    ("Could not resolve hostname", "is an unknown host: add it to ~/.ssh/config or to DNS"),
    ("Connection refused", "takes no ssh connections: start sshd on it, or set deploy.port"),
    ("timed out", "does not answer: it is down, or a firewall is in between"),
    ("No route to host", "cannot be reached: there is no route to it"),
)


class HostConnection:
    """Asks one host, each time by a connection of its own."""

    def __init__(self, host: str, deploy: DeployConfig) -> None:
        self.host = host
        self._deploy = deploy
        self._endless: subprocess.Popen[bytes] | None = None
        self._common = {"host": host, "directory": deploy.directory, "units": deploy.units}

    def ask(
        self,
        request: Mapping[str, Any],
        sent: Sequence[SentFile] = (),
        limit_s: float | None = 60.0,
        on_progress: Callable[[Any], None] = lambda _: None,
    ) -> dict[str, Any]:
        """Its answer. Raises PeerLost where it cannot be reached, FabricError where it cannot do that.

        `limit_s` None: the request goes on until it is over or `end` is called.
        """
        line = json.dumps({**self._common, **request}).encode() + b"\n"
        code = _package()
        with tempfile.TemporaryFile() as said:
            command = self.command(f"exec {shlex.quote(self._deploy.python)} -I -c {shlex.quote(_BOOT)}")
            pipe = subprocess.PIPE
            with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=said) as process:  # noqa: S603  ssh, and a host's name
                timer = threading.Timer(limit_s or 0.0, process.kill)
                timer.daemon = True
                if limit_s is None:
                    self._endless = process
                else:
                    timer.start()
                try:
                    head = [b"%d\n" % len(code), code, line]
                    answer = _exchange(process, head, sent, on_progress, is_open=limit_s is None)
                    code_of_end = process.wait()
                finally:
                    timer.cancel()
                    process.kill()
            if answer is not None:
                return answer
            said.seek(0)
            raise self._why(code_of_end, said.read().decode("utf-8", "replace"), limit_s)

    def end(self) -> None:
        """End a request that has no limit."""
        if self._endless is not None:
            self._endless.kill()

    def command(self, words: str) -> list[str]:
        """The command line that runs a shell's words there."""
        return [*self.command_before_host(), "-T", "--", self.host, words]

    def command_before_host(self) -> list[str]:
        """Of every connection: how ssh is to go about it."""
        deploy, config = self._deploy, os.environ.get("SSH_CONFIG")
        return [
            "ssh",
            *(["-F", config] if config else []),
            *("-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_LIMIT_S}"),
            *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
            *(["-p", str(deploy.port)] if deploy.port else []),
            *(["-l", deploy.user] if deploy.user else []),
        ]

    def _why(self, code: int, said: str, limit_s: float | None) -> FabricError:
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        last = lines[-1] if lines else ""
        python = self._deploy.python
        if f"{MARK}python" in said:
            found = said.rpartition(f"{MARK}python")[2].split()[0]
            return FabricError(f"its {python} is {found}; Tenuto needs 3.11 or 3.12: set deploy.python")
        if code == 127:
            return FabricError(f"has no {python}: install Python 3.11 or 3.12, or set deploy.python")
        for sign, meaning in _MEANINGS:
            if sign in said:
                return PeerLost(meaning.format(host=self.host))
        if code == -9:
            return PeerLost("was ended" if limit_s is None else f"did not answer within {limit_s:g} s")
        error = PeerLost if code == 255 else FabricError
        return error(last or f"ssh ended with code {code}")


def _exchange(
    process: subprocess.Popen[bytes],
    head: Sequence[bytes],
    sent: Sequence[SentFile],
    on_progress: Callable[[Any], None],
    *,
    is_open: bool,
) -> dict[str, Any] | None:
    """Say it all, then hear it all; None where there was no answer. Raises FabricError for a refusal.

    `is_open`: stdin stays open, and its end is what ends the request.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it has an answer already, or is gone
        for part in head:
            process.stdin.write(part)
        for file in sent:
            for chunk in _content(file):
                process.stdin.write(chunk)
        process.stdin.flush()
    with contextlib.suppress(BrokenPipeError):
        if not is_open:
            process.stdin.close()
    for line in process.stdout:
        told = _told(line)
        if "progress" in told:
            on_progress(told["progress"])
        elif "error" in told:
            raise FabricError(str(told["error"]))
        elif isinstance(told.get("ok"), dict):
            answer: dict[str, Any] = told["ok"]
            return answer
    return None


def _told(line: bytes) -> Mapping[str, Any]:
    """What a line says; nothing where it is a login shell's greeting, or the connection ended in its middle."""
    if line.startswith(MARK.encode()):
        with contextlib.suppress(ValueError, RecursionError):
            told = json.loads(line[len(MARK) :])
            if isinstance(told, dict):
                return told
    return {}


def _content(file: SentFile) -> Iterator[bytes]:
    """Raises ConfigError where it cannot be read any more."""
    if isinstance(file.source, bytes):
        yield file.source
        return
    left = file.size  # a file that has grown meanwhile is refused for its hash, and no later one is misread
    with naming_path(file.source), file.source.open("rb") as opened:
        while left and (chunk := opened.read(min(left, _CHUNK))):
            left -= len(chunk)
            yield chunk


@cache
def _package() -> bytes:
    """The code for hosts, as an archive that Python imports from."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("deploy/__init__.py", "deploy/ssh/__init__.py"):
            archive.writestr(name, "")
        for path in files("deploy.ssh.on_host").iterdir():
            if path.name.endswith(".py"):
                archive.writestr(f"deploy/ssh/on_host/{path.name}", path.read_bytes())
    return out.getvalue()


def is_ssh_there() -> bool:
    """Whether this host has the ssh command."""
    return any((Path(folder) / "ssh").exists() for folder in os.get_exec_path())
