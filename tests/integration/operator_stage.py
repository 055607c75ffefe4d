"""Somebody with a laptop who deploys to hosts without a package index (`hosts_stage.py`), as a test or a benchmark has it done."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.integration.hosts_stage import NETWORK, ROOT, Host, hosts, loaded, with_keys

NEEDED = ("pyzmq", "msgspec", "msgpack", "numpy", "sortedcontainers", "click", "rich", "PyYAML", "supervisor")
CLIENT = """
import sys
from pathlib import Path
import numpy as np
from fabric.client import BlockingClient, ClientOptions
number, *addresses = sys.argv[1:]
for address in addresses:
    with BlockingClient(address, ClientOptions(key_file=Path("alice.key"))) as client:
        for value in range(int(number)):
            client.infer("fast", {"input": np.full(4, value, np.float32)}, budget_ms=60_000.0)
print("served")
"""
LIMIT_S = 400


def fetch_wheels(folder: Path, more: Sequence[str] = ()) -> str:
    """Fill a wheelhouse for the system's own Python, with `more` distributions for extras; why that cannot be, empty where it could."""
    version = subprocess.run(
        ["/usr/bin/python3", "-c", "import sys, ensurepip; print('%d.%d' % sys.version_info[:2])"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    if version not in ("3.11", "3.12"):
        return (
            f"needs /usr/bin/python3 of 3.11 or 3.12 with ensurepip (Debian: python3-venv), has {version!r}"
        )
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--dest",
        str(folder),
        "--only-binary=:all:",
    ]
    done = subprocess.run(
        [*command, "--python-version", version, *NEEDED, *more],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return f"no package index: {done.stderr.strip().splitlines()[-1]}" if done.returncode else ""


@contextmanager
def operator_of(folder: Path, text: str, wheelhouse: Path, servers: Sequence[str]) -> Iterator[Operator]:
    """Hosts with sshd, a laptop, and on it the file with its keys."""
    own = folder / "laptop"
    own.mkdir()
    (own / "wheels").symlink_to(wheelhouse)
    (own / "client.py").write_text(CLIENT)
    with_keys(own, text)
    with hosts([*servers, "laptop"], folder / "home", servers) as made:
        yield Operator(made, own)


class Operator:
    """Somebody on the laptop, with the file, its keys and an ssh configuration."""

    def __init__(self, made: dict[str, Host], folder: Path) -> None:
        self.hosts = made
        self.laptop = made["laptop"]
        self.folder = folder
        self.file = folder / "cluster.yaml"

    def command(self, *words: str) -> list[str]:
        config = self.laptop.ssh / "ssh_config"
        environment = [f"PYTHONPATH={ROOT}", f"SSH_CONFIG={config}", f"HOME={self.laptop.home}"]
        line = shlex.join(["env", *environment, sys.executable, "-m", "roles.cli", *words])
        return self.laptop.inside("sh", "-c", f"cd {self.folder} && exec {line}")

    def tenuto(self, *words: str) -> tuple[int, str, str]:
        done = subprocess.run(
            self.command(*words), capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
        return done.returncode, done.stdout, done.stderr

    def plan(self) -> dict[str, Any]:
        _, out, err = self.tenuto("deploy", "plan", str(self.file), "--json")
        assert out, err
        found: dict[str, Any] = json.loads(out)
        return found

    def up(self) -> dict[str, Any]:
        code, out, err = self.tenuto("deploy", "up", str(self.file), "--json")
        assert code == 0, err
        found: dict[str, Any] = json.loads(out)
        return found

    def serves(self, number: int = 5) -> None:
        line = f"cd {self.folder} && PYTHONPATH={ROOT} {sys.executable} client.py {number}"
        line += f" tcp://{NETWORK}.1:5555 tcp://{NETWORK}.2:5555"
        assert self.laptop.run(line).stdout == b"served\n"

    @contextmanager
    def load(self, rate_rps: float = 300.0, budget_ms: float = 20_000.0) -> Iterator[dict[str, Any]]:
        """Requests at both frontends by the SDK alone while the block lasts; then their fates."""
        addresses = [f"tcp://{NETWORK}.1:5555", f"tcp://{NETWORK}.2:5555"]
        with loaded(self.laptop, "fast", rate_rps, budget_ms, addresses, self.folder / "alice.key") as found:
            yield found

    def processes(self, name: str) -> dict[int, str]:
        """Of a host: what runs there of ours, by pid."""
        lines = self.hosts[name].run("ps -ww -eo pid=,args=").stdout.decode().splitlines()
        found = {int(line.split()[0]): line.partition(" ")[2] for line in map(str.strip, lines)}
        return {pid: args for pid, args in found.items() if "/.tenuto/" in args}
