"""What benchmarks with processes share: a cluster from its configuration, rivals' processes, what each one costs."""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from roles.benchmark.targets import one_of_each
from roles.benchmark.temporary_cluster import temporary_cluster
from roles.config.cluster import ClusterConfig
from roles.config.read_config import load_config
from roles.runtime.running_cluster import processes_in

context = multiprocessing.get_context("spawn")
_TOGETHER = " with "
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Stage:
    """A running cluster. `pids` by role, its supervisor (`up`) included; of roles in one process by all their names."""

    config: ClusterConfig
    run_dir: Path
    clients: tuple[str, ...]
    """Where clients connect: ipc first, then tcp."""
    pids: Mapping[str, int]
    start_s: float

    @property
    def targets(self) -> tuple[str, ...]:
        """One address of each frontend, for the load tool."""
        return one_of_each(self.clients)

    @property
    def frontend_pid(self) -> int:
        """The first frontend's process."""
        return next(pid for name, pid in self.pids.items() if "frontend-0" in name.split(_TOGETHER))

    @property
    def tcp(self) -> str:
        """The first frontend's TCP address."""
        return next(address for address in self.clients if address.startswith("tcp://"))


@contextmanager
def cluster(document: str) -> Iterator[Stage]:
    """Run the cluster of a configuration, given as YAML, until the block is left."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "cluster.yaml"
        file.write_text(document, encoding="utf-8")
        began_s = time.perf_counter()
        with temporary_cluster(file) as running:
            start_s = time.perf_counter() - began_s
            roles = {process.role_id: process.pid for process in processes_in(running.run_dir)}
            agents = [pid for role_id, pid in roles.items() if role_id.startswith("node-")]
            workers = [pid for agent in agents for pid in children(agent)]
            pids = {
                **_by_process(roles),
                **{f"worker-{number}": pid for number, pid in enumerate(workers)},
                "up": running.pid,
            }
            yield Stage(load_config(file), running.run_dir, tuple(running.endpoints["client"]), pids, start_s)


@contextmanager
def processes(*targets: tuple[Callable[..., None], tuple[Any, ...]]) -> Iterator[list[SpawnProcess]]:
    """Run functions in processes of their own until the block is left; then they are killed."""
    started = [context.Process(target=target, args=arguments, daemon=True) for target, arguments in targets]
    for process in started:
        process.start()
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.join()


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody listens at."""
    with ExitStack() as stack:
        bound = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in bound]


# ---------------------------------------------------------------- what processes cost


def children(pid: int) -> list[int]:
    """Processes whose parent it is, oldest first."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields is not None and int(fields[1]) == pid:
                found.append((int(fields[19]), int(entry.name)))
    return [child for _, child in sorted(found)]


def cpu_s(pid: int) -> float:
    """User and system time of all its threads so far, to 10 ms; 0 for one that is gone."""
    fields = _stat(pid)
    return 0.0 if fields is None else (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def rss_bytes(pid: int) -> int:
    """Memory it holds; 0 for one that is gone."""
    fields = _stat(pid)
    return 0 if fields is None else int(fields[21]) * _PAGE_BYTES


def _by_process(roles: Mapping[str, int]) -> dict[str, int]:
    names: dict[int, list[str]] = {}
    for role_id, pid in roles.items():
        names.setdefault(pid, []).append(role_id)
    return {_TOGETHER.join(role_ids): pid for pid, role_ids in names.items()}


def _stat(pid: int) -> list[str] | None:
    """Fields of `/proc/PID/stat` from the third (state) on: the second is a name that may hold blanks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


@dataclass(slots=True)
class CpuMeter:
    """CPU of processes between two looks."""

    pids: Mapping[str, int]
    _before: dict[str, float] = field(default_factory=dict)
    _began_s: float = 0.0

    def begin(self) -> None:
        """Count from here."""
        self._before = {name: cpu_s(pid) for name, pid in self.pids.items()}
        self._began_s = time.perf_counter()

    def spent(self) -> tuple[float, dict[str, float]]:
        """Seconds that have passed, and CPU seconds of each process in them."""
        spent_s = {name: cpu_s(pid) - self._before[name] for name, pid in self.pids.items()}
        return time.perf_counter() - self._began_s, spent_s


def by_kind(spent_s: Mapping[str, float]) -> dict[str, float]:
    """CPU by kind of role: `worker-0` and `worker-1` are both `worker`; the agent and `up` only keep the rest alive."""
    summed: dict[str, float] = {}
    for name, seconds in spent_s.items():
        kind = _TOGETHER.join(role_id.partition("-")[0] for role_id in name.split(_TOGETHER))
        kind = "agent and up" if kind in ("node", "up") else kind
        summed[kind] = summed.get(kind, 0.0) + seconds
    return summed
