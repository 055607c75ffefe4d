"""The processes of a virtual cluster: real shells, in the real driver's turns.

Only an agent is its core with the real sources around it: its shell has processes of the operating system, which are virtual here: `Host` keeps what a host keeps when a process ends.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fabric.ids import FrontendId, PeerId, frontend_id, peer_id, role_id_of_node, scheduler_id
from fabric.json_files import write_whole
from fabric.link import NO_EPOCH
from fabric.messages import (
    EpochGranted,
    PlanAsked,
    RehearsalAsked,
)
from fabric.messages import (
    Host as HostMessage,
)
from roles.frontend.shell import FrontendOptions, FrontendShell
from roles.gpu_worker.events import AgentGone
from roles.gpu_worker.shell import WorkerOptions, WorkerShell
from roles.node_agent.core import AgentSelf, FoundDevices, NodeAgentCore
from roles.node_agent.events import (
    AgentAction,
    AgentEvent,
    FollowScheduler,
    Kill,
    Orphan,
    Remember,
    Spawn,
    Terminate,
    WorkerUntold,
)
from roles.node_agent.lease import NO_LEASE, KeepLease, LeaseKept, LeaseRecord
from roles.node_agent.shell import from_scheduler, from_worker
from roles.runtime.core import PLANNER, REHEARSER, SCHEDULER, Heard, Send
from roles.runtime.environment import RunDir
from roles.runtime.loop.driver import Role
from roles.runtime.loop.local_scheduler import LocalScheduler
from roles.runtime.loop.sources import LinkSource, Source, TranslatedSource
from roles.runtime.process_events import ProcessExited, StopAsked
from roles.scheduler.availability.replica import SchedulerReplica
from roles.scheduler.core import SchedulerCore
from roles.scheduler.planning.make_plan import make_plan
from roles.scheduler.rehearsing.make_rehearsal import make_rehearsal
from roles.scheduler.shell import SchedulerShell
from roles.scheduler.surroundings import SchedulerSurroundings
from roles.simulator.hardware import SimulatedNode
from tests.chaos.virtual.processes.base import Posted, Process
from tests.chaos.virtual.processes.devices import VirtualDevices

if TYPE_CHECKING:
    from tests.chaos.virtual.world import World

SIGKILL: Final = -9
OUTLIVE_MS: Final = 30_000.0
PLAN_MS: Final = 40.0


class _Asked(Posted[Heard]):
    """Where a scheduler asks for plans, or for rehearsals: an answer takes `PLAN_MS`."""

    def __init__(self, owner: Process, peer: PeerId, make: Callable[[Any], Any]) -> None:
        super().__init__(owner)
        self._peer = peer
        self._make = make
        self._abandoned = 0

    def start(self, asked: PlanAsked | RehearsalAsked) -> None:
        """As `Asking`."""
        owner, abandoned = self._owner, self._abandoned
        made = Heard(self._peer, self._make(asked))

        def answer() -> None:
            if abandoned == self._abandoned:
                self.post(made)

        owner.world.at(owner.world.now_ms + PLAN_MS, lambda: owner.when_running(answer))

    def abandon(self) -> None:
        """As `Asking`."""
        self._abandoned += 1
        self._events.clear()

    def close(self) -> None:
        """As `Asking`."""
        self.abandon()


class SchedulerProcess(Process):
    """A scheduler in its own shell, active or standing by."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world, scheduler_id(number))
        self.number = number
        surroundings = SchedulerSurroundings(
            self,
            self.incarnation,
            self.transport,
            lambda _: _Asked(self, PLANNER, make_plan),
            lambda: _Asked(self, REHEARSER, make_rehearsal),
            world.next_batch_id,
            self._write_file,
        )
        self.disk_fails_until_ms = 0.0
        self.stops: Posted[StopAsked] = Posted(self)
        self.shell = SchedulerShell(
            world.written, world.run_dir, number=number, surroundings=surroundings, stop=self.stops
        )
        self._epoch = NO_EPOCH
        self.shell.announce()
        self.run(self.shell.role)

    @property
    def replica(self) -> SchedulerReplica:
        """Which stands by, or has a core."""
        return self.shell._replica

    @property
    def core(self) -> SchedulerCore | None:
        """Of one that is active."""
        return self.shell._core

    def _write_file(self, path: Path, text: str) -> None:
        if self.world.now_ms < self.disk_fails_until_ms:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_whole(path, text)

    def turned(self) -> None:
        self.world.answers_due.turned(self)
        if self.replica.epoch != self._epoch:
            self._epoch = self.replica.epoch
            self.world.monitor.elected(self, self._epoch)
        if self.shell.has_left:
            self.end()

    def close(self) -> None:
        self.shell.close()

    def released(self) -> None:
        super().released()
        for other in self.shell._others.values():
            other.close()


class FrontendProcess(Process):
    """A frontend in its own shell."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world, f"frontend-{number}")
        self.number = number
        options = FrontendOptions(
            FrontendId(frontend_id(number)),
            world.run_dir,
            [[one] for one in world.control_addresses],
            client_addresses=(),
            incarnation=self.incarnation,
            clock=self,
            transport=self.transport,
            applications=world.written.config.served_applications(),
        )
        self.stops: Posted[StopAsked] = Posted(self)
        self.shell = FrontendShell(options, self.stops)
        self.run(self.shell.role)

    def turned(self) -> None:
        self.world.answers_due.turned(self)
        if self.shell.is_drained:
            self.end()

    def close(self) -> None:
        for link in (self.shell._clients, self.shell._outputs, self.shell._slices):
            link.close()
        for shard in self.shell._shards:
            shard.close()

    def released(self) -> None:
        super().released()
        self.shell._decoding.close()
        self.shell._unsent.close()
        self.shell._inputs.close()


@dataclass
class Host:
    """What a host has while processes come and go: workers by id, and what an agent wrote down of them."""

    node: SimulatedNode
    agent: AgentProcess | None = None
    workers: dict[str, WorkerProcess] = field(default_factory=dict)
    records: dict[str, Orphan] = field(default_factory=dict)
    slower: float = 1.0
    raises_until_ms: float = 0.0
    """Until then models raise on some requests."""
    disk_fails_until_ms: float = 0.0
    lease: LeaseRecord = NO_LEASE


class AgentProcess(Process):
    """A node's agent: its core and sources; its children are virtual."""

    def __init__(self, world: World, host: Host) -> None:
        node_id = host.node.node_id
        super().__init__(world, f"node-{node_id}")
        self.host = host
        host.agent = self
        role_id = role_id_of_node(node_id)
        own = peer_id(role_id, self.incarnation)
        self.address = RunDir(world.run_dir).ipc_address(f"{role_id}.control")
        self.link = self.transport.bind_peers([self.address])
        self.schedulers = {
            PeerId(one): LocalScheduler(own, world.run_dir, self, role_id=one, transport=self.transport)
            for one in map(scheduler_id, range(world.shape.schedulers))
        }
        self._followed = next(iter(self.schedulers))
        self.exits: Posted[ProcessExited] = Posted(self)
        self._watched = set(host.records)
        self.stops: Posted[StopAsked] = Posted(self)
        self.later: Posted[LeaseKept | WorkerUntold] = Posted(self)
        outlives = world.outlives
        orphans = [host.records[worker_id] for worker_id in host.workers if worker_id in host.records]
        for worker_id in [one for one in host.workers if not outlives or one not in host.records]:
            host.workers[worker_id].kill()
        host.records = {orphan.worker_id: orphan for orphan in orphans if outlives}
        self.core = NodeAgentCore(
            AgentSelf(node_id, self.incarnation, role_id, 1, outlives, host.lease),
            FoundDevices(host.node.gpus, orphans=list(host.records.values())),
        )
        schedulers: list[Source[AgentEvent]] = [
            TranslatedSource(one, from_scheduler) for one in self.schedulers.values()
        ]
        role = Role[AgentEvent, AgentAction](
            self.core,
            [
                self.stops,
                LinkSource(self.link, from_worker, WorkerUntold),
                *schedulers,
                self.later,
                self.exits,
            ],
            self._perform,
        )
        self.run(role)

    def kill(self) -> None:
        if self.is_dead:
            return
        super().kill()
        for worker in list(self.host.workers.values()):
            if self.world.outlives:
                worker.agent_gone()
            else:
                worker.kill()

    def vanish(self, for_ms: float) -> None:
        """With all of its host."""
        super().vanish(for_ms)
        for worker in list(self.host.workers.values()):
            worker.vanish(for_ms)

    def _gone(self) -> None:
        super()._gone()
        self.host.agent = None

    def exited(self, worker_id: str, code: int) -> None:
        """Of those it has started or found it hears; a former agent's child that never said hello is nobody's."""
        if worker_id in self._watched:
            self.when_running(lambda: self.exits.post(ProcessExited(worker_id, code, "")))

    def close(self) -> None:
        self.link.close()
        self._leave_schedulers()

    def released(self) -> None:
        super().released()
        self._leave_schedulers()

    def _leave_schedulers(self) -> None:
        for scheduler in self.schedulers.values():
            scheduler.close()

    def turned(self) -> None:
        if self.core.is_stopped:
            self.end()

    def _perform(self, action: AgentAction) -> None:
        world = self.world
        match action:
            case Send(peer, message) if peer == SCHEDULER:
                self.schedulers[self._followed].send(message)
            case Send(peer, message) if peer in self.schedulers:
                self.schedulers[peer].send(message)
            case FollowScheduler(peer):
                self._followed = peer
            case KeepLease(record):
                is_written = world.now_ms >= self.host.disk_fails_until_ms
                if is_written:
                    world.monitor.granted(self.host, record)
                    self.host.lease = record
                self.later.post(LeaseKept(record, is_written))
            case Send(peer, message):
                is_out = self.link.send(peer, message)
                if not is_out and isinstance(message, HostMessage | EpochGranted):
                    self.later.post(WorkerUntold(peer))
            case Spawn(worker_id):
                self._watched.add(worker_id)
                world.at(world.now_ms + world.start_ms, lambda: self._start(worker_id))
            case Terminate(name):
                self._signal(name, WorkerProcess.stop)
            case Kill(name):
                self._signal(name, lambda worker: worker.ended(SIGKILL))
            case Remember(orphan):
                if world.outlives:
                    self.host.records[orphan.worker_id] = orphan
            case _:
                pass  # emulated GPUs have no sensors and no daemons

    def _start(self, worker_id: str) -> None:
        if not self.is_dead:
            WorkerProcess(self.world, self, worker_id)

    def _signal(self, worker_id: str, end: Callable[[WorkerProcess], object]) -> None:
        """Now, or when it has just been born."""
        world = self.world
        wait_ms = 0.0 if worker_id in self.host.workers else world.start_ms

        def reach() -> None:
            worker = self.host.workers.get(worker_id)
            if worker is not None:
                end(worker)

        world.at(world.now_ms + wait_ms, reach)


class _Watch(Posted[AgentGone]):
    """The end of the agent, for a worker that may outlive it."""

    def watch(self, pid: int) -> None:
        """Whoever it is: there is one agent on a host."""

    def close(self) -> None:
        """Nothing to give back."""


class WorkerProcess(Process):
    """A worker in its own shell, with emulated devices."""

    def __init__(self, world: World, agent: AgentProcess, worker_id: str) -> None:
        super().__init__(world, worker_id)
        self.host = agent.host
        self.worker_id = worker_id
        self.host.workers[worker_id] = self
        self._watch = _Watch(self)
        self.devices = VirtualDevices(self)
        options = WorkerOptions(
            clock=self,
            incarnation=self.incarnation,
            transport=self.transport,
            make_emulated=lambda: self.devices,
        )
        outlive_ms = OUTLIVE_MS if world.outlives else 0.0
        self._stops: Posted[StopAsked] = Posted(self)
        self.shell = WorkerShell(
            agent.address, worker_id, world.run_dir, options, self._stops, self._watch, outlive_ms
        )
        self.run(self.shell.role)

    def agent_gone(self) -> None:
        """The kernel says so."""
        self.when_running(lambda: self._watch.post(AgentGone()))

    def stop(self) -> None:
        """SIGTERM."""
        self.when_running(lambda: self._stops.post(StopAsked()))

    def turned(self) -> None:
        if self.shell.end is not None:
            self.ended(self.shell.end.exit_code)

    def ended(self, code: int) -> None:
        """Its process is over: in good order, or not."""
        if self.is_dead:
            return
        if code == SIGKILL:
            self.kill(code)
        else:
            self.close()
            self.kill(code)

    def kill(self, code: int = SIGKILL) -> None:
        if self.is_dead:
            return
        super().kill()
        agent = self.host.agent
        if agent is not None:
            agent.exited(self.worker_id, code)

    def _gone(self) -> None:
        super()._gone()
        del self.host.workers[self.worker_id]
        self.host.records.pop(self.worker_id, None)

    def close(self) -> None:
        self.shell._frontends.close()
        self.shell._scheduler.close()
        self.shell._agent.close()
        self.shell._pull.close()

    def released(self) -> None:
        super().released()
        self.shell._scheduler.close()
        self.shell._real.close()
        self.shell._untold.close()
