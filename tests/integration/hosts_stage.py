"""Several hosts on one machine: namespaces of network, processes, mounts and names, on one switch of their own.

Each host has its own interface and address, its own processes (when its first one is killed, all of it is gone) and its own
home: the same path, other content. Programs and libraries are the machine's. Needs root; `needs_hosts` skips without.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from deploy.ssh.inventory import inventory_of
from fabric.keys import TRUSTED_FILE
from roles.cli.keys import keys
from roles.config.read_config import load_config
from tests.integration.proc import until

NETWORK = "10.83.19"
SSHD = Path("/usr/sbin/sshd")
CRONTABS = Path("/var/spool/cron")
ROOT = Path(__file__).parents[2]
PYTHON = [f"PYTHONPATH={ROOT}", sys.executable]
"""For `env`: this tree, on a host."""
TENUTO = [*PYTHON, "-m", "roles.cli"]
_TOOLS = ("ip", "unshare", "nsenter", "mount")


def _why_not() -> str:
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} is not installed"
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    name = f"tnt{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"no network namespace can be made here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


needs_hosts = pytest.mark.skipif(bool(why := _why_not()), reason=why or "-")


needs_sshd = pytest.mark.skipif(
    not SSHD.exists() or shutil.which("ssh") is None, reason="needs sshd and ssh (Debian: openssh-server)"
)


def sh(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


@dataclass
class Host:
    """One of them. `home`: the folder that every host has for itself."""

    name: str
    address: str
    namespace: str
    home: Path
    is_server: bool = False
    """It runs sshd for the folder `ssh`, and the user's home is empty at its boot."""
    holder: subprocess.Popen[bytes] | None = None
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def boot(self) -> None:
        """Its first process; what was in its home is gone."""
        first = "exec sleep 100000"
        if self.is_server:
            # What a host would have for itself: /run, root's home, the tables of cron.
            own = [Path("/run"), Path("/root"), *([CRONTABS] if CRONTABS.exists() else [])]
            mounts = [f"mount -t tmpfs tmpfs {path}" for path in own]
            first = "; ".join([*mounts, "mkdir /run/sshd", f"exec {SSHD} -D -e"])
            first += f" -f {self.ssh / 'sshd_config'} 2> {self.home}/sshd.log"
        script = f"hostname {self.name}; mount -t tmpfs tmpfs {self.home}; touch {self.home}/.booted; {first}"
        apart = ["--mount", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"]
        self.holder = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, "unshare", *apart, "sh", "-c", script]
        )
        until(lambda: self.run(f"test -e {self.home}/.booted", check=False).returncode == 0, 10_000.0)

    @property
    def ssh(self) -> Path:
        """The folder with the keys of sshd and of the operator, the same for all."""
        return self.home.parent / "ssh"

    @property
    def first_pid(self) -> int:
        """Of the process with which the host ends; 0 while it boots."""
        assert self.holder is not None
        children = Path(f"/proc/{self.holder.pid}/task/{self.holder.pid}/children").read_text().split()
        return int(children[0]) if children else 0

    def inside(self, *command: str) -> list[str]:
        """The command line that runs a command in there."""
        return [
            "nsenter",
            "--target",
            str(self.first_pid),
            "--mount",
            "--uts",
            "--net",
            "--pid",
            "--",
            *command,
        ]

    def run(
        self, script: str, *, check: bool = True, stdin: bytes = b""
    ) -> subprocess.CompletedProcess[bytes]:
        """A shell's script, to its end."""
        done = subprocess.run(
            self.inside("sh", "-c", script), input=stdin, capture_output=True, check=False, timeout=120
        )
        assert not check or done.returncode == 0, f"{self.name}: {script}: {done.stderr.decode()}"
        return done

    def put(self, path: str, content: bytes, mode: str = "644") -> None:
        """A file in its home."""
        place = self.home / path
        self.run(f"mkdir -p {place.parent} && cat > {place} && chmod {mode} {place}", stdin=content)

    def start(
        self, *command: str, environment: Mapping[str, str] | None = None, folder: str = "."
    ) -> subprocess.Popen[str]:
        """A process that goes on; its output is in its home's `log`."""
        line = f"cd {self.home / folder} && exec {' '.join(command)} >> {self.home}/log 2>&1"
        env = {**os.environ, "HOME": str(self.home), **(environment or {})}
        process = subprocess.Popen(self.inside("sh", "-c", line), env=env, text=True)
        self.started.append(process)
        return process

    def log(self) -> str:
        """What its processes have said."""
        return self.run(f"cat {self.home}/log", check=False).stdout.decode()

    def kill(self) -> None:
        """Everything of it, at once."""
        if self.holder is not None:
            if self.first_pid:
                os.kill(self.first_pid, signal.SIGKILL)
            self.holder.kill()
            self.holder.wait()
        for process in self.started:
            process.kill()
            process.wait()
        self.started.clear()
        self.holder = None


@contextmanager
def hosts(names: Sequence[str], home: Path, servers: Sequence[str] = ()) -> Iterator[dict[str, Host]]:
    """Hosts on one switch, with addresses 10.83.19.1, .2, … in the order of their names.

    `servers`: those that run sshd; `ssh_config` in the folder beside the homes names them.
    """
    home.mkdir(exist_ok=True)
    prefix = f"tnt{os.getpid()}"
    switch = f"{prefix}-sw"
    made = {
        name: Host(name, f"{NETWORK}.{place}", f"{prefix}-{name}", home, name in servers)
        for place, name in enumerate(names, start=1)
    }
    try:
        sh("ip", "netns", "add", switch)
        sh("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        sh("ip", "-n", switch, "link", "set", "br0", "up")
        for place, host in enumerate(made.values()):
            sh("ip", "netns", "add", host.namespace)
            port = f"port{place}"
            sh(
                *("ip", "-n", switch, "link", "add", port, "type", "veth"),
                *("peer", "name", "eth0", "netns", host.namespace),
            )
            sh("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
            sh("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            sh("ip", "-n", host.namespace, "link", "set", "eth0", "up")
            sh("ip", "-n", host.namespace, "link", "set", "lo", "up")
        if servers:
            _write_ssh(made, home.parent / "ssh")
        for host in made.values():
            host.boot()
        yield made
    finally:
        for host in made.values():
            host.kill()
            subprocess.run(["ip", "netns", "delete", host.namespace], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "delete", switch], capture_output=True, check=False)


def _write_ssh(made: Mapping[str, Host], folder: Path) -> None:
    """A key for the operator, one for each server, and what both ends read."""
    folder.mkdir(mode=0o700)
    for name in ("operator", "server"):
        sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
    (folder / "sshd_config").write_text(
        f"Port 22\nHostKey {folder}/server\nAuthorizedKeysFile {folder}/operator.pub\nStrictModes no\nUsePAM no\n"
        "PermitRootLogin yes\nPasswordAuthentication no\nPidFile none\nMaxStartups 100\n"
    )
    public = (folder / "server.pub").read_text()
    (folder / "known_hosts").write_text("".join(f"{host.address} {public}" for host in made.values()))
    (folder / "ssh_config").write_text(
        "".join(f"Host {host.name}\n HostName {host.address}\n" for host in made.values() if host.is_server)
        + f"Host *\n User root\n IdentityFile {folder}/operator\n IdentitiesOnly yes\n IdentityAgent none\n"
        f" UserKnownHostsFile {folder}/known_hosts\n GlobalKnownHostsFile none\n StrictHostKeyChecking yes\n"
    )


def with_keys(folder: Path, text: str) -> Path:
    """A file of a cluster in that folder, a key for each of its principals, and `alice.key` for a client."""
    file = folder / "cluster.yaml"
    file.write_text(text)
    for words in (
        ["create", folder / "keys", "--config", file],
        ["add", folder / "keys", "client/alice", "--out", folder / "alice.key"],
    ):
        done = CliRunner().invoke(keys, list(map(str, words)))
        assert done.exit_code == 0, done.output
    return file


def lay_out(file: Path, made: Mapping[str, Host], clients: Sequence[str] = ("laptop",)) -> None:
    """The file and its own keys on each host, as somebody would copy them; alice's on those of `clients`."""
    folder = file.parent
    for wanted in inventory_of(load_config(file)).hosts:
        host = made[wanted.host]
        host.put("cluster.yaml", file.read_bytes())
        host.put(f"keys/{TRUSTED_FILE}", (folder / "keys" / TRUSTED_FILE).read_bytes())
        for name in wanted.keys:
            host.put(f"keys/{name}", (folder / "keys" / name).read_bytes(), "600")
    for name in clients:
        made[name].put("alice.key", (folder / "alice.key").read_bytes(), "600")


def start_role(host: Host, *words: str) -> subprocess.Popen[str]:
    """`tenuto WORDS` in the foreground, as a unit or a shell would."""
    return host.start("env", *TENUTO, *words, environment={"TENUTO_RUN_DIR": f"{host.home}/run"})


def status_on(host: Host) -> dict[str, Any]:
    """What `tenuto status --json` says there; empty where it says nothing."""
    done = host.run(f"TENUTO_RUN_DIR={host.home}/run env {' '.join(TENUTO)} status --json", check=False)
    found: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
    return found


@contextmanager
def loaded(
    host: Host,
    model: str,
    rate_rps: float,
    budget_ms: float,
    addresses: Sequence[str],
    key: Path | str = "alice.key",
) -> Iterator[dict[str, Any]]:
    """`hosts_load.py` on that host, from its first answer to the end of the block; then what it found."""
    line = " ".join(
        [
            *("exec", "env", *PYTHON, "-m", "tests.integration.hosts_load"),
            *(str(host.home / key), model, f"{rate_rps}", f"{budget_ms}", *addresses),
        ]
    )
    command = host.inside("sh", "-c", line)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = {}
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "serving\n"
        yield found
        out, _ = process.communicate(timeout=120)
        found.update(json.loads(out))
    finally:
        process.kill()
        process.wait()


_CAPTURE = """
import socket, sys
listening = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
listening.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
listening.bind(("br0", 0))
with open(sys.argv[1], "wb", buffering=0) as file:
    open(sys.argv[1] + ".on", "w").close()
    while file.tell() < 256 << 20:
        file.write(listening.recv(65536))
"""


@contextmanager
def capture(path: Path) -> Iterator[None]:
    """Everything that passes the switch meanwhile, frame after frame in one file."""
    switch = f"tnt{os.getpid()}-sw"
    sh("ip", "-n", switch, "link", "set", "br0", "promisc", "on")
    process = subprocess.Popen(["ip", "netns", "exec", switch, "python3", "-c", _CAPTURE, str(path)])
    try:
        until(Path(f"{path}.on").exists, 10_000.0)
        yield
    finally:
        process.kill()
        process.wait()
