"""The node agent's process: real children, real sockets, the real clock around its core."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fabric.clock import Clock, MonotonicClock
from fabric.errors import ConfigError
from fabric.ids import new_incarnation, peer_id
from fabric.link import Received
from fabric.sockets import RouterLink
from roles.cluster import ClusterConfig, NodeConfig, role_id_of_node
from roles.core import SCHEDULER, Heard, Send
from roles.drive import Driver
from roles.environment import RunDir
from roles.hearing import PlainSource
from roles.node_agent.core import NodeAgentCore
from roles.node_agent.events import AgentAction, AgentEvent, AgentLimits, Kill, Spawn, Terminate
from roles.node_agent.gpus import discover
from roles.process import RunFile, StopSignal, StopSource, remove_run_file, write_run_file
from roles.processes import Processes
from roles.scheduler_door import SchedulerDoor

log = logging.getLogger("tenuto")


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


class _Agent:
    def __init__(self, node: NodeConfig, run_dir: Path, options: AgentOptions, stop: StopSignal) -> None:
        incarnation = new_incarnation()
        role_id = role_id_of_node(node.host)
        gpus = discover(node)
        self._run_dir = run_dir
        self._command = options.command
        self._link = RouterLink.bind([RunDir(run_dir).ipc_address(f"{role_id}.control")])
        self._scheduler = SchedulerDoor(peer_id(role_id, incarnation), run_dir, options.clock)
        self._processes = Processes()
        self._core = NodeAgentCore(
            node.node_id, incarnation, gpus, options.limits, role_id=role_id, pid=os.getpid()
        )
        self._driver = Driver[AgentEvent, AgentAction](
            self._core,
            # Words before ends: what a worker said last is heard before it counts as gone.
            [StopSource(stop), PlainSource(self._link, _from_worker), self._scheduler, self._processes],
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


def _from_worker(received: Received) -> Heard | None:
    """Workers are not watched: the end of one is seen at its process. None may take the scheduler's name."""
    return None if received.peer == SCHEDULER else Heard(received.peer, received.message, received.late_ms)


def _node(config: ClusterConfig, host: str) -> NodeConfig:
    for node in config.nodes:
        if node.host == host:
            return node
    known = ", ".join(node.host for node in config.nodes)
    raise ConfigError(f"the configuration has no node {host!r}; it has {known}")
