"""Starts what is measured, one setting at a time, and stops all of it: our cluster, or a peer's servers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.peers.cases import Case
from benchmarks.peers.catalog import PEERS, Peer, Setting
from benchmarks.peers.install import Interpreter
from benchmarks.peers.sender import SdkTarget
from fabric.errors import FabricError
from roles.benchmark.http_connections import HttpTarget
from roles.benchmark.temporary_cluster import TemporaryCluster, temporary_cluster

SERVERS = Path(__file__).parent / "servers"
START_LIMIT_S = 120.0
STOP_LIMIT_S = 15.0
LAST_WORDS_BYTES = 2_000


@contextmanager
def our_cluster(batching: str, case: Case, *, has_graphs: bool = True) -> Iterator[SdkTarget]:
    """A cluster of this host with the case's devices, one frontend and one scheduler. `has_graphs`: real models may run as CUDA graphs."""
    document = case.document()
    if not has_graphs:
        for model in document["models"]:
            model["loader"] = {**model["loader"], "cuda_graphs": False}
    with _cluster({**document, "batching": batching}) as cluster:
        yield SdkTarget(tuple(cluster.endpoints["client"]))


@contextmanager
def our_gateway(batching: str, case: Case) -> Iterator[HttpTarget]:
    """The same by HTTP, asked as Triton is: one process more, on the same cores."""
    listen = {"http": "127.0.0.1:0"}
    with _cluster({**case.document(), "batching": batching, "listen": listen}) as cluster:
        port = int(cluster.endpoints["http"][0].rpartition(":")[2])
        asked = PEERS["triton"]
        yield HttpTarget({model: [(port, asked.request(port, model, case))] for model in case.model_names})


@contextmanager
def _cluster(document: Mapping[str, Any]) -> Iterator[TemporaryCluster]:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "cluster.json"
        file.write_text(json.dumps(document), encoding="utf-8")
        with temporary_cluster(file) as cluster:
            yield cluster


@contextmanager
def peer_servers(peer: Peer, interpreter: Interpreter, setting: Setting, case: Case) -> Iterator[HttpTarget]:
    """A peer's server or servers. Raises FabricError with its last words when one does not come up."""
    if setting.is_together:
        groups = [(case.model_names, case.devices_each)]
    else:
        groups = [((model,), 1) for model in case.model_names for _ in range(case.devices_each)]
    requests: dict[str, list[tuple[int, bytes]]] = {model: [] for model in case.model_names}
    with ExitStack() as stack:
        ports = _free_ports(2 * len(groups))
        started = []
        for (models, devices), port, port_2 in zip(groups, ports[::2], ports[1::2], strict=True):
            started.append(
                stack.enter_context(_server(peer, interpreter, setting, case, models, devices, port, port_2))
            )
            for model in models:
                requests[model].append((port, peer.request(port, model, case)))
        for server in started:
            server.wait_until_it_listens()
        yield HttpTarget(requests)


class _Started:
    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self._process, self._port, self._log = process, port, log

    def wait_until_it_listens(self) -> None:
        until_s = time.monotonic() + START_LIMIT_S
        while self._process.poll() is None and time.monotonic() < until_s:
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1.0).close()
            except OSError:
                time.sleep(0.1)
            else:
                return
        words = self._log.read_bytes()[-LAST_WORDS_BYTES:].decode(errors="replace")
        raise FabricError(f"it did not come up:\n{words}")


@contextmanager
def _server(
    peer: Peer,
    interpreter: Interpreter,
    setting: Setting,
    case: Case,
    models: Sequence[str],
    devices: int,
    port: int,
    port_2: int,
) -> Iterator[_Started]:
    with tempfile.TemporaryDirectory(prefix=f"{peer.name}-") as directory:
        told = {
            **case.told(models),
            "devices": devices,
            "port": port,
            "port_2": port_2,
            "max_batch": setting.max_batch,
            "wait_ms": setting.wait_ms,
            "directory": directory,
            **setting.extra,
        }
        environment = {
            **os.environ,
            "PEER": json.dumps(told),
            "PATH": f"{interpreter.python.parent}:{os.environ.get('PATH', '')}",
            "PYTHONPATH": ":".join(filter(None, (*interpreter.path, os.environ.get("PYTHONPATH", "")))),
            "PYTHONUSERBASE": str(
                interpreter.base
            ),  # mosec looks for its binary where Python's commands are, and there
            "PYTHONWARNINGS": "ignore",
        }
        log = Path(directory) / "server.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [str(interpreter.python), str(SERVERS / peer.server)],
                stdout=output,
                stderr=output,
                cwd=directory,
                env=environment,
                start_new_session=True,
            )
        try:
            yield _Started(process, port, log)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The whole group: in order if it can be, by force if not."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_LIMIT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # also what outlived the first of them
    process.wait()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        bound = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in bound]
