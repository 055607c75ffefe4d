"""The processes of a virtual cluster: real shells, or real cores with the real sources around them, in the real driver's turns.

Frontends and workers run in their own shells. A scheduler's shell is its outbox; an agent's has processes of the operating system,
which are virtual here: `Host` keeps what a host keeps when a process ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from fabric.ids import FrontendId, ModelId, PeerId, frontend_id, peer_id, role_id_of_node
from fabric.link import Received
from fabric.messages import Answer, Infer, PlanAsked, Refusal, RunBatch, SliceSpec
from fabric.outbox import Outbox
from roles.frontend.shell import FrontendOptions, FrontendShell
from roles.gpu_worker.events import AgentGone
from roles.gpu_worker.executors.base import Job
from roles.gpu_worker.executors.sleep import SleepExecutor
from roles.gpu_worker.shell import WorkerOptions, WorkerShell
from roles.node_agent.core import AgentSelf, FoundDevices, NodeAgentCore
from roles.node_agent.events import AgentAction, AgentEvent, Kill, Orphan, Remember, Spawn, Terminate
from roles.runtime.core import PLANNER, SCHEDULER, SCHEDULER_ID, Heard, Lost, Send
from roles.runtime.environment import RunDir
from roles.runtime.loop.drive import Driver, Role
from roles.runtime.loop.local_scheduler import LocalScheduler
from roles.runtime.loop.sources import LinkSource, WatchedLinkSource
from roles.runtime.process import RunFile, remove_run_file, write_run_file
from roles.runtime.process_events import ProcessExited, StopAsked
from roles.scheduler.core import SchedulerCore
from roles.scheduler.planning.make_plan import make_plan
from roles.simulator.hardware import SimulatedNode
from tests.chaos.virtual.network import VirtualServer, VirtualTransport, _End

if TYPE_CHECKING:
    from tests.chaos.virtual.world import World

SIGKILL: Final = -9
OUTLIVE_MS: Final = 30_000.0
PLAN_MS: Final = 40.0
LEAST_WAIT_MS: Final = 1e-3
"""A turn takes time: a moment that is there but for a rounding is there at the next one."""

EventT = TypeVar("EventT")


class Posted(Generic[EventT]):
    """A source of what the world leaves for a process."""

    def __init__(self, owner: Process) -> None:
        self._owner = owner
        self._events: deque[EventT] = deque()

    def post(self, event: EventT) -> None:
        """Leave it, and wake the process."""
        self._events.append(event)
        self._owner.wake(self._owner.world.now_ms)

    def fileno(self) -> int:
        """None."""
        return -1

    @property
    def has_more(self) -> bool:
        """Whether something is left."""
        return bool(self._events)

    @property
    def wake_at_ms(self) -> float | None:
        """Never by itself."""
        return None

    def take(self, limit: int, now_ms: float) -> Sequence[EventT]:
        """At most `limit`."""
        del now_ms
        return [self._events.popleft() for _ in range(min(limit, len(self._events)))]


class VirtualDriver(Driver):
    """The real turns; the world sleeps."""

    def hear(self, now_ms: float) -> None:
        """One turn, over what is ready."""
        self._ready = {
            source
            for source in self._sources
            if source.has_more or ((at_ms := source.wake_at_ms) is not None and at_ms <= now_ms)
        }
        self.turn()

    def next_at_ms(self, now_ms: float) -> float | None:
        """When the next turn is worth it, by the process's clock."""
        if any(source.has_more for source in self._sources):
            return now_ms + LEAST_WAIT_MS
        moments = [source.wake_at_ms for source in self._sources]
        moments += [role.wake_at_ms for role in self._roles]
        next_at_ms = min((at_ms for at_ms in moments if at_ms is not None), default=None)
        return None if next_at_ms is None else max(next_at_ms, now_ms + LEAST_WAIT_MS)

    def _sleep(self, now_ms: float) -> set[Any]:
        del now_ms
        return set()


class Process:
    """One start of a role. `place` is where it runs; `clock_offset_ms` what its clock is ahead of the world's."""

    role: Role[Any, Any]

    def __init__(self, world: World, place: str) -> None:
        self.world = world
        self.place = place
        self.incarnation = world.next_incarnation()
        self.clock_offset_ms = world.clock_offset_ms(place)
        self.ends: list[_End] = []
        self.is_dead = False
        self.is_stopped = False
        self.resumed_at_ms = 0.0
        """When it went on last."""
        self.slept_ms = 0.0
        """For how long its clock stood, altogether."""
        self.transport = VirtualTransport(world.network, self)
        self._driver: VirtualDriver | None = None
        self._due_at_ms: float | None = None
        self._later: list[Callable[[], None]] = []
        world.processes.append(self)

    # As a Clock, and as an Owner of links.

    def now_ms(self) -> float:
        """By its own clock."""
        return self.world.now_ms + self.clock_offset_ms

    def wake(self, at_ms: float) -> None:
        """A turn at that moment of the world, if none comes before."""
        if self.is_dead or (self._due_at_ms is not None and self._due_at_ms <= at_ms):
            return
        self._due_at_ms = at_ms
        self.world.at(at_ms, lambda: self._turn_at(at_ms))

    def when_running(self, callback: Callable[[], None]) -> None:
        """Now, or when it goes on."""
        if self.is_dead:
            return
        if self.is_stopped:
            self._later.append(callback)
        else:
            callback()
            self.wake(self.world.now_ms)

    def run(self, role: Role[Any, Any]) -> None:
        """It is set up: turns begin."""
        self.role = role
        self._driver = VirtualDriver([role], self, on_defect=self._defect)
        self.wake(self.world.now_ms)

    def stop_for(self, for_ms: float, *, does_clock_stop: bool) -> None:
        """SIGSTOP, and SIGCONT so much later; or its host sleeps, and its clock with it."""
        if self.is_dead or self.is_stopped:
            return
        self.is_stopped = True
        self.world.at(self.world.now_ms + for_ms, lambda: self._go_on(for_ms if does_clock_stop else 0.0))

    def kill(self) -> None:
        """It is gone, with its links."""
        if self.is_dead:
            return
        self.is_dead = True
        self.world.network.kill(self)
        self.world.processes.remove(self)
        self.released()

    def end(self) -> None:
        """In good order: what it sent arrives."""
        self.close()
        self.kill()

    def close(self) -> None:
        """Close the links."""

    def released(self) -> None:
        """Give descriptors of this very process back."""
        if self._driver is not None:
            self._driver.close()

    def turned(self) -> None:
        """After each turn."""

    def _go_on(self, slept_ms: float) -> None:
        if self.is_dead:
            return
        self.is_stopped = False
        self.resumed_at_ms = self.world.now_ms
        self.slept_ms += slept_ms
        self.clock_offset_ms -= slept_ms
        later, self._later = self._later, []
        for callback in later:
            callback()
        self._due_at_ms = None
        self.wake(self.world.now_ms)

    def _turn_at(self, at_ms: float) -> None:
        if self.is_dead or self.is_stopped or self._due_at_ms != at_ms:
            return
        self._due_at_ms = None
        self.turn()

    def turn(self) -> None:
        """One turn of its loop."""
        assert self._driver is not None
        self._driver.hear(self.now_ms())
        self.turned()
        if self.is_dead:
            return
        next_at_ms = self._driver.next_at_ms(self.now_ms())
        for end in self.ends:
            if end.inbox:
                self.wake(end.inbox[0].arrives_at_ms)
        if next_at_ms is not None:
            self.wake(self.world.now_ms + next_at_ms - self.now_ms())

    def _defect(self, error: Exception, roles: object) -> None:
        del roles
        raise error


class SchedulerProcess(Process):
    """A scheduler: its core, its watched link, its outbox, its planner."""

    def __init__(self, world: World) -> None:
        super().__init__(world, "scheduler")
        self.core: SchedulerCore = world.make_scheduler()
        self.link = self.transport.bind_peers([world.control_address])
        self._outbox = Outbox(self.link, lambda peer, message: None)
        self._planned: Posted[Heard] = Posted(self)
        self.source = WatchedLinkSource(self.link, self)
        role = Role[Heard | Lost, Send](
            self.core, [self.source, self._planned], self._perform, self._outbox.flush
        )
        self._run_file = RunFile(SCHEDULER_ID, 1, self.incarnation, {"control": [world.control_address]})
        write_run_file(world.run_dir, self._run_file)
        self.run(role)

    def close(self) -> None:
        remove_run_file(self.world.run_dir, self._run_file)
        self.link.close()

    def _perform(self, action: Send) -> None:
        message = action.message
        if isinstance(message, PlanAsked):
            assert action.peer == PLANNER
            plan = Heard(PLANNER, make_plan(message))
            self.world.at(
                self.world.now_ms + PLAN_MS, lambda: self.when_running(lambda: self._planned.post(plan))
            )
            return
        if isinstance(message, RunBatch):
            self.world.monitor.commanded(self, action.peer)
        self._outbox.put(action.peer, message)


class FrontendProcess(Process):
    """A frontend in its own shell."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world, f"frontend-{number}")
        options = FrontendOptions(
            FrontendId(frontend_id(number)),
            world.run_dir,
            [world.control_address],
            client_addresses=(),
            incarnation=self.incarnation,
            clock=self,
            transport=self.transport,
        )
        self.shell = FrontendShell(options)
        self.run(self.shell.role)

    def close(self) -> None:
        for link in (self.shell._clients, self.shell._scheduler, self.shell._outputs, self.shell._slices):
            link.close()

    def released(self) -> None:
        super().released()
        self.shell._decoding.close()
        self.shell._unsent.close()


@dataclass
class Host:
    """What a host has while processes come and go: workers by id, and what an agent wrote down of them."""

    node: SimulatedNode
    agent: AgentProcess | None = None
    workers: dict[str, WorkerProcess] = field(default_factory=dict)
    records: dict[str, Orphan] = field(default_factory=dict)
    slower: float = 1.0


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
        self.scheduler = LocalScheduler(own, world.run_dir, self, self.transport)
        self.exits: Posted[ProcessExited] = Posted(self)
        self.stops: Posted[StopAsked] = Posted(self)
        outlives = world.outlives
        orphans = [host.records[worker_id] for worker_id in host.workers if worker_id in host.records]
        for worker_id in [one for one in host.workers if not outlives or one not in host.records]:
            host.workers[worker_id].kill()
        host.records = {orphan.worker_id: orphan for orphan in orphans if outlives}
        self.core = NodeAgentCore(
            AgentSelf(node_id, self.incarnation, role_id, 1, outlives),
            FoundDevices(host.node.gpus, orphans=list(host.records.values())),
        )
        role = Role[AgentEvent, AgentAction](
            self.core,
            [self.stops, LinkSource(self.link, _from_worker), self.scheduler, self.exits],
            self._perform,
        )
        self.run(role)

    def kill(self) -> None:
        if self.is_dead:
            return
        super().kill()
        self.host.agent = None
        for worker in list(self.host.workers.values()):
            if self.world.outlives:
                worker.agent_gone()
            else:
                worker.kill()

    def close(self) -> None:
        self.link.close()
        self.scheduler.close()

    def released(self) -> None:
        super().released()
        self.scheduler.close()

    def turned(self) -> None:
        if self.core.is_stopped:
            self.end()

    def _perform(self, action: AgentAction) -> None:
        world = self.world
        match action:
            case Send(peer, message) if peer == SCHEDULER:
                self.scheduler.send(message)
            case Send(peer, message):
                self.link.send(peer, message)
            case Spawn(worker_id):
                world.at(world.now_ms + world.start_ms, lambda: self._start(worker_id))
            case Terminate(name):
                self._signal(name, lambda worker: worker.when_running(lambda: worker.ended(0)))
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


class VirtualDevices(SleepExecutor):
    """Emulated devices that a script slows down."""

    def __init__(self, process: WorkerProcess) -> None:
        super().__init__()
        self._process = process
        self.specs: dict[str, SliceSpec] = {}
        self.busy: dict[str, int] = {}

    def load(self, spec: SliceSpec) -> None:
        super().load(spec)
        self.specs[spec.slice_id] = spec
        self._process.world.monitor.loaded(self._process)

    def unload(self, slice_id: Any) -> None:
        super().unload(slice_id)
        self.specs.pop(slice_id, None)

    def run(self, job: Job, now_ms: float) -> None:
        self._process.world.monitor.runs(self._process, job)
        super().run(job, now_ms)

    def slowdown(self, job: Job, batch_size: int, now_ms: float) -> float:
        return super().slowdown(job, batch_size, now_ms) * self._process.host.slower


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
        self.shell = WorkerShell(agent.address, worker_id, world.run_dir, options, self._watch, outlive_ms)
        self.run(self.shell.role)

    def agent_gone(self) -> None:
        """The kernel says so."""
        self.when_running(lambda: self._watch.post(AgentGone()))

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
        del self.host.workers[self.worker_id]
        self.host.records.pop(self.worker_id, None)
        agent = self.host.agent
        if agent is not None:
            agent.when_running(lambda: agent.exits.post(ProcessExited(self.worker_id, code, "")))

    def close(self) -> None:
        self.shell._frontends.close()
        self.shell._scheduler.close()
        self.shell._agent.close()
        self.shell._pull.close()

    def released(self) -> None:
        super().released()
        self.shell._scheduler.close()
        self.shell._thread.close()


class ClientProcess(Process):
    """A client with a connection to each frontend. The monitor hears what becomes of what it asks."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world, f"client-{number}")
        self.pending: dict[tuple[int, int], int] = {}
        """By frontend and the connection's own number: the request."""
        self._given_up: set[tuple[int, int]] = set()
        """Whose connection broke: an answer may still come by the next one, once."""
        self._links: list[VirtualServer] = []
        self._numbers = [0] * world.frontends
        own = peer_id(f"client-{number}", self.incarnation)
        for place in range(world.frontends):
            address = RunDir(world.run_dir).ipc_address(f"{frontend_id(place)}.client")
            link = self.transport.connect(own, PeerId(frontend_id(place)), [address])
            link.on_hang_up = partial(self._cut_off, place)
            self._links.append(link)

    def ask(self, request: int, place: int, model_id: ModelId, budget_ms: float) -> bool:
        """False: there is no connection to that frontend."""
        self._numbers[place] += 1
        number = self._numbers[place]
        link = self._links[place]
        is_sent = link.send(PeerId(frontend_id(place)), Infer(number, model_id, budget_ms))
        if is_sent:
            self.pending[place, number] = request
        return is_sent

    def turn(self) -> None:
        for place, link in enumerate(self._links):
            for received in link.receive(1 << 20):
                self._heard(place, received)
        for link in self._links:
            if link.inbox:
                self.wake(link.inbox[0].arrives_at_ms)

    def close(self) -> None:
        for link in self._links:
            link.close()

    def kill(self) -> None:
        if not self.is_dead:
            super().kill()
            for request in self.pending.values():
                self.world.monitor.client_gone(request)

    def _heard(self, place: int, received: Received) -> None:
        message = received.message
        if isinstance(message, Answer | Refusal):
            key = place, message.request_no
            if key in self._given_up:
                self._given_up.remove(key)
                return
            code = message.code if isinstance(message, Refusal) else ""
            self.world.monitor.answered(self.pending.pop(key, None), key, code)

    def _cut_off(self, place: int) -> None:
        """Its connection broke: it knows nothing of what it asked there."""
        for key in [key for key in self.pending if key[0] == place]:
            self.world.monitor.cut_off(self.pending.pop(key))
            self._given_up.add(key)


def _from_worker(received: Received) -> Heard:
    return Heard(received.peer, received.message, received.late_ms)
