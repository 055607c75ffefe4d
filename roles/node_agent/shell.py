"""The node agent's process: real children, real sockets, the real clock around its core."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fabric.clock import Clock, MonotonicClock
from fabric.errors import ConfigError
from fabric.ids import new_incarnation, peer_id
from fabric.sockets import RouterLink
from roles.cluster import ClusterConfig, NodeConfig
from roles.core import Heard, Send
from roles.drive import Driver
from roles.environment import RunDir
from roles.node_agent.core import (
    SCHEDULER,
    AgentAction,
    AgentEvent,
    AgentLimits,
    Kill,
    NodeAgentCore,
    Reconnect,
    Spawn,
    StopAsked,
    Terminate,
)
from roles.node_agent.gpus import discover
from roles.node_agent.processes import Processes
from roles.node_agent.scheduler_door import SchedulerDoor
from roles.process import RunFile, StopSignal, read_run_file, remove_run_file, write_run_file

SCHEDULER_RUN_FILE = "scheduler-0.json"

log = logging.getLogger("tenuto")


def role_id_of_node(host: str) -> str:
    """The role id of a node's agent, which is also its run file's name."""
    return f"node-{host}"


def worker_command(address: str, worker_id: str, run_dir: Path) -> list[str]:
    """How a worker is started."""
    command = [sys.executable, "-m", "roles.cli", "worker"]
    return [*command, "--agent", address, "--worker-id", worker_id, "--run-dir", str(run_dir)]


@dataclass(slots=True, frozen=True)
class AgentOptions:
    """`command`: (agent address, worker id, run directory) -> the worker's command line."""

    limits: AgentLimits = field(default_factory=AgentLimits)
    command: Callable[[str, str, Path], Sequence[str]] = worker_command
    clock: Clock = field(default_factory=MonotonicClock)


def run_node_agent(
    config: ClusterConfig, host: str, run_dir: Path, stop: StopSignal, options: AgentOptions | None = None
) -> None:
    """Serve as the agent of `host` until told to stop, then end the workers. Call from the main thread.

    Raises ConfigError for a host that the configuration does not have, or whose GPUs are not here.
    """
    agent = _Agent(_node(config, host), run_dir, options or AgentOptions(), stop)
    try:
        agent.run()
    finally:
        agent.close()


class StopSource:
    """Turns the first SIGTERM or SIGINT into one `StopAsked`."""

    def __init__(self, stop: StopSignal) -> None:
        self._stop = stop
        self._is_told = False

    def fileno(self) -> int:
        """Readable after a signal."""
        return self._stop.fileno()

    @property
    def has_more(self) -> bool:
        """Whether there is a signal to tell of."""
        return self._stop.is_set and not self._is_told

    @property
    def wake_at_ms(self) -> float | None:
        """Never by itself."""
        return None

    def take(self, limit: int, now_ms: float) -> Sequence[StopAsked]:  # noqa: ARG002  a Source's signature
        """The stop, once."""
        self._is_told = True
        with contextlib.suppress(BlockingIOError):
            os.read(
                self._stop.fileno(), 4_096
            )  # quiet again: the end takes a while, and the driver sleeps in it
        return (StopAsked(),)


class _WorkerDoor:
    """What the workers say."""

    def __init__(self, link: RouterLink) -> None:
        self._link = link
        self.fileno = link.fileno

    @property
    def has_more(self) -> bool:
        return self._link.has_more

    @property
    def wake_at_ms(self) -> float | None:
        return None

    def take(self, limit: int, now_ms: float) -> Sequence[Heard]:
        del now_ms
        self._link.take_lost()  # the end of a worker is seen at its process
        received = self._link.receive(limit)
        return [Heard(each.peer, each.message, each.late_ms) for each in received if each.peer != SCHEDULER]


class _Agent:
    def __init__(self, node: NodeConfig, run_dir: Path, options: AgentOptions, stop: StopSignal) -> None:
        incarnation = new_incarnation()
        role_id = role_id_of_node(node.host)
        gpus = discover(node)
        self._run_dir = run_dir
        self._command = options.command
        self._link = RouterLink.bind([RunDir(run_dir).ipc_address(f"{role_id}.control")])
        self._scheduler = SchedulerDoor(
            peer_id(role_id, incarnation), lambda: read_run_file(run_dir / SCHEDULER_RUN_FILE), options.clock
        )
        self._processes = Processes()
        self._core = NodeAgentCore(
            node.node_id, incarnation, gpus, options.limits, role_id=role_id, pid=os.getpid()
        )
        self._driver = Driver[AgentEvent, AgentAction](
            self._core,
            # Words before ends: what a worker said last is heard before it counts as gone.
            [StopSource(stop), _WorkerDoor(self._link), self._scheduler, self._processes],
            self._perform,
            options.clock,
        )
        self._run_file = RunFile(role_id, os.getpid(), incarnation, {"control": list(self._link.addresses)})

    def run(self) -> None:
        write_run_file(self._run_dir, self._run_file)
        log.info("agent_serves role=%s pid=%d", self._run_file.role_id, self._run_file.pid)
        try:
            self._driver.run(lambda: self._core.is_stopped)
        finally:
            remove_run_file(self._run_dir, self._run_file)

    def close(self) -> None:
        self._processes.close()
        self._driver.close()
        self._scheduler.close()
        self._link.close()

    def _perform(self, action: AgentAction) -> None:
        match action:
            case Send(peer, message) if peer == SCHEDULER:
                self._scheduler.send(message)
            case Send(peer, message):
                self._link.send(peer, message)  # refused: it is ending, or its time limit will end it
            case Spawn(worker_id):
                command = self._command(self._link.addresses[0], worker_id, self._run_dir)
                self._processes.spawn(worker_id, command)
            case Terminate(worker_id):
                self._processes.terminate(worker_id)
            case Kill(worker_id):
                self._processes.kill(worker_id)
            case Reconnect():
                self._scheduler.reconnect()


def _node(config: ClusterConfig, host: str) -> NodeConfig:
    for node in config.nodes:
        if node.host == host:
            return node
    known = ", ".join(node.host for node in config.nodes)
    raise ConfigError(f"the configuration has no node {host!r}; it has {known}")
