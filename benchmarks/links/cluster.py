"""A cluster over emulated links: client and frontend on host `a`, the scheduler on `b`, the workers on `c`."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.links.network import Host, LinkSpec, network, own_directory
from fabric.client import ask_status
from fabric.errors import FabricError
from roles.runtime.core import SCHEDULER_ID
from roles.runtime.process import RunFile, child_environment, read_run_file, write_run_file

ROLE = Path(__file__).parent / "role.py"
UP_LIMIT_S = 60.0
STOP_LIMIT_S = 10.0
HOSTS = ("a", "b", "c")
KEYS = "keys"  # beside the hosts' folders: what others can reach has keys
WORKERS = "c"  # also the node's name in the configuration


@dataclass(frozen=True, slots=True)
class LinkedCluster:
    """Where it is. `home/<host>` are the run directories."""

    home: Path
    config: Path
    hosts: Mapping[str, Host]

    def bench(self, arguments: Sequence[str]) -> dict[str, object]:
        """`tenuto bench --json` on the client's host."""
        target = f"ipc://{self.home / 'a' / 'frontend-a.client'}"
        argv = [sys.executable, "-m", "roles.cli", "bench", str(self.config), "--target", target, "--json"]
        done = subprocess.run(
            self.hosts["a"].command([*argv, *arguments]),
            capture_output=True,
            text=True,
            check=False,
            env=child_environment(),
        )
        try:
            found: dict[str, object] = json.loads(done.stdout)
        except ValueError:
            raise FabricError(f"bench has failed: {done.stderr.strip()}") from None
        return found

    def counters(self, role: str) -> Mapping[str, float]:
        """What `frontend-a` or `scheduler-0` counts."""
        host, purpose = ("b", "control") if role == SCHEDULER_ID else ("a", "client")
        address = f"ipc://{self.home / host / role}.{purpose}"
        return ask_status(address, 5_000.0).counters


@contextlib.contextmanager
def linked_cluster(document: str, link: LinkSpec) -> Iterator[LinkedCluster]:
    """Run the roles until the block is left. `document`: a cluster file whose only node is `c`."""
    with own_directory() as directory, network(HOSTS, link) as hosts:
        home = Path(directory)
        for name in HOSTS:
            (home / name).mkdir(mode=0o700)
        config = home / "cluster.yaml"
        config.write_text(f"{document}\nsecurity: {{keys: {KEYS}}}\n", encoding="utf-8")
        make = [
            sys.executable,
            "-m",
            "roles.cli",
            "keys",
            "create",
            str(home / KEYS),
            "--config",
            str(config),
        ]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL, env=child_environment())
        roles: list[subprocess.Popen[bytes]] = []

        def start(role: str, host: str, *more: str) -> None:
            there = [str(home), host, hosts[host].address, str(config)]
            argv = [sys.executable, str(ROLE), role, *there, *more]
            roles.append(subprocess.Popen(hosts[host].command(argv), env=child_environment()))

        try:
            start("scheduler", "b")
            scheduler = _wait_for(home / "b" / f"{SCHEDULER_ID}.json", roles)
            control = [one for one in scheduler.addresses["control"] if one.startswith("tcp://")]
            # As it is found on its own host: an agent looks for the scheduler in its run directory.
            write_run_file(
                home / WORKERS,
                RunFile(SCHEDULER_ID, scheduler.pid, scheduler.incarnation, {"control": control}),
            )
            start("agent", WORKERS)
            start("frontend", "a", *control)
            _wait_for(home / "a" / "frontend-a.json", roles)
            cluster = LinkedCluster(home, config, hosts)
            _wait_until_ready(cluster)
            yield cluster
        finally:
            for role in roles:
                role.terminate()
            until_s = time.monotonic() + STOP_LIMIT_S
            for role in roles:
                try:
                    role.wait(max(0.1, until_s - time.monotonic()))
                except subprocess.TimeoutExpired:
                    role.kill()
                    role.wait()


def _wait_for(run_file: Path, roles: Sequence[subprocess.Popen[bytes]]) -> RunFile:
    until_s = time.monotonic() + UP_LIMIT_S
    while time.monotonic() < until_s:
        found = read_run_file(run_file)
        if found is not None:
            return found
        if any(role.poll() is not None for role in roles):
            break
        time.sleep(0.02)
    raise FabricError(f"{run_file.name} did not come up")


def _wait_until_ready(cluster: LinkedCluster) -> None:
    """Until every model has a replica, as the frontend's `pending` requests would need."""
    target = f"ipc://{cluster.home / 'a' / 'frontend-a.client'}"
    check = (
        "import asyncio, sys\n"
        "from fabric.client import Client\n"
        "async def main():\n"
        "    async with Client(sys.argv[1]) as client:\n"
        "        while True:\n"
        "            models = await client.models()\n"
        "            if models and all(model.replicas for model in models): return\n"
        "            await asyncio.sleep(0.05)\n"
        "asyncio.run(asyncio.wait_for(main(), float(sys.argv[2])))\n"
    )
    argv = [sys.executable, "-c", check, target, str(UP_LIMIT_S)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=child_environment())
    if done.returncode:
        raise FabricError(f"the cluster did not come up: {done.stderr.strip()[-500:]}")
