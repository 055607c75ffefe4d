"""A real node agent with real child processes, for tests that play its scheduler."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fabric.ids import PeerId
from fabric.messages import (
    DesiredSlices,
    NodeHello,
    Ping,
    Pong,
    SliceChanged,
    SliceSpec,
    SliceStatus,
    Telemetry,
)
from fabric.sockets import RouterLink
from roles.runtime.process import RunFile, child_environment, write_run_file
from tests.integration.proc import WAIT_MS, processes_naming, until

AGENT_SCRIPT = Path(__file__).with_name("stand_in_agent.py")


class Stage:
    """A real agent with real child processes; the scheduler is this test."""

    def __init__(
        self,
        run_dir: Path,
        options: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.options = dict(options or {})
        self.environment = {"PYTHONPATH": str(Path(__file__).parents[2]), **(environment or {})}
        self.telemetry: list[Telemetry] = []
        self.hellos: list[NodeHello] = []
        self.changes: list[SliceChanged] = []
        self.agent_peer = PeerId("")
        self.killed_peers: set[PeerId] = set()
        self.wanted: tuple[SliceSpec, ...] = ()
        self.open_scheduler("one")
        self.start_agent()

    @property
    def command(self) -> list[str]:
        """How the agent is started."""
        return [sys.executable, str(AGENT_SCRIPT), str(self.run_dir), json.dumps(self.options)]

    @property
    def child_environment(self) -> dict[str, str]:
        """The agent's."""
        return child_environment() | self.environment

    def start_agent(self) -> None:
        self.hellos.clear()
        self.agent = subprocess.Popen(self.command, env=self.child_environment)
        until(self.heard_hello, what="a hello")

    def kill_agent(self) -> None:
        self.agent.kill()
        self.agent.wait(10)
        self.killed_peers.add(self.agent_peer)

    def open_scheduler(self, incarnation: str) -> None:
        self.link = RouterLink.bind([f"ipc://{self.run_dir}/scheduler-{incarnation}"])
        addresses = {"control": list(self.link.addresses)}
        write_run_file(self.run_dir, RunFile("scheduler-0", os.getpid(), incarnation, addresses))

    def listen(self) -> None:
        for received in self.link.receive(100):
            if received.peer in self.killed_peers:
                continue  # its last words may arrive after its successor's first ones
            match received.message:
                case NodeHello() as hello:
                    self.hellos.append(hello)
                    self.agent_peer = received.peer
                    self.compare(hello)
                    self.link.send(received.peer, DesiredSlices(1, self.wanted))
                case Ping(number):
                    self.link.send(received.peer, Pong(number))
                case SliceChanged() as change:
                    self.changes.append(change)
                case Telemetry() as telemetry:
                    self.telemetry.append(telemetry)

    def compare(self, hello: NodeHello) -> None:
        """Take a hello's word, as a scheduler does: what was said while the agent thought us silent is lost."""
        known = {change.status.slice_id: change.status for change in self.changes}
        alive = {status.slice_id: status for status in hello.slices}
        for status in known.values():
            if status.state in ("starting", "ready") and status.slice_id not in alive:
                gone = SliceStatus(status.slice_id, status.incarnation, "lost", "not in the agent's hello")
                self.changes.append(SliceChanged(hello.node_id, gone))
        for slice_id, status in alive.items():
            if known.get(slice_id) != status:
                self.changes.append(SliceChanged(hello.node_id, status))

    def heard_hello(self) -> bool:
        self.listen()
        return bool(self.hellos)

    def want(self, *specs: SliceSpec) -> None:
        self.wanted = specs
        self.link.send(self.agent_peer, DesiredSlices(1, specs))

    def states(self, slice_id: str) -> list[str]:
        self.listen()
        return [change.status.state for change in self.changes if change.status.slice_id == slice_id]

    def until_state(self, slice_id: str, state: str, limit_ms: float = WAIT_MS) -> float:
        return until(lambda: state in self.states(slice_id)[-1:], limit_ms, f"{slice_id} {state}")

    def until_was(self, slice_id: str, state: str, limit_ms: float = WAIT_MS) -> str:
        """Wait for a state that the next one may follow before this test is on the processor again; its reason."""
        until(lambda: state in self.states(slice_id), limit_ms, f"{slice_id} {state}")
        statuses = [change.status for change in self.changes if change.status.slice_id == slice_id]
        return next(status.reason for status in statuses if status.state == state)

    def incarnation(self, slice_id: str) -> str:
        self.listen()
        return [change.status.incarnation for change in self.changes if change.status.slice_id == slice_id][
            -1
        ]

    def reason(self, slice_id: str) -> str:
        return [change.status.reason for change in self.changes if change.status.slice_id == slice_id][-1]

    @property
    def mark(self) -> str:
        """What is in the command line of every worker here and nowhere else."""
        return f"ipc://{self.run_dir}/node-a.control"

    def workers(self) -> list[int]:
        return sorted(processes_naming(self.mark))

    def close(self) -> None:
        self.kill_agent()
        self.link.close()
        if self.options.get("node", {}).get("workers_outlive_agent"):
            for pid in self.workers():  # they would serve on for longer than a test waits
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        until(lambda: not self.workers(), what="the end of all workers")
