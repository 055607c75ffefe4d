"""The real cores of agents and workers, each with a shell for virtual time: emulated devices, no process."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Final

from msgspec.structs import replace

from fabric.ids import (
    BatchId,
    FrontendId,
    Incarnation,
    ModelId,
    PeerId,
    SliceId,
    peer_id,
    role_id_of_node,
)
from fabric.link import Received
from fabric.messages import (
    DesiredSlices,
    FrontendInfo,
    SliceSpec,
)
from roles.gpu_worker.core import WorkerCore
from roles.gpu_worker.events import (
    Abort,
    BatchRan,
    End,
    Execute,
    InputsCame,
    JoinScheduler,
    KnowFrontends,
    LoadModel,
    LoadSlice,
    PushOutputs,
    Recall,
    SchedulerAnswers,
    UnloadModel,
    UnloadSlice,
    WorkerAction,
    WorkerEvent,
)
from roles.gpu_worker.executors.base import DeviceBroken, ExecutorEvent, Job, JobPart, JobRan
from roles.gpu_worker.executors.emulated import EmulatedExecutor
from roles.gpu_worker.peer_checks import AGENT
from roles.gpu_worker.registration import WorkerIdentity
from roles.gpu_worker.slices import EMULATED
from roles.node_agent.core import AgentSelf, FoundDevices, NodeAgentCore
from roles.node_agent.events import AgentAction, AgentEvent, Kill, Spawn, Terminate
from roles.runtime.core import SCHEDULER, Handle, Heard, Send, Tick
from roles.runtime.process_events import ProcessExited, SchedulerFound
from roles.simulator.fast_world import FIRST
from roles.simulator.hardware import SimulatedNode, scheduler_peer
from roles.simulator.surroundings import Surroundings, unheard
from roles.simulator.virtual_links import VirtualLinks

SOMEWHERE: Final = ("loopback",)
_TICK: Final = Tick()


class VirtualWorker:
    """A worker process, whose devices are emulated."""

    def __init__(self, world: Surroundings, agent: VirtualAgent, worker_id: str, number: int) -> None:
        self._world = world
        self._agent = agent
        self.worker_id = worker_id
        incarnation = Incarnation(f"{number:08x}")
        own, inputs = peer_id(worker_id, incarnation), PeerId(f"{worker_id}/inputs")
        self._core = WorkerCore(WorkerIdentity(worker_id, incarnation, number, (inputs,)))
        self.wake_at_ms = self._core.wake_at_ms
        """The core's timer."""
        self._frontends: dict[FrontendId, PeerId] = {}
        self._handles = count(1)
        self._links = [
            world.connect(world.work, own, lambda one: self._hear(SCHEDULER, one)),
            world.connect(agent.links, own, lambda one: self._hear(AGENT, one)),
            world.connect(world.inputs, inputs, self._heard_frontend, is_anonymous=True),
            world.connect(world.outputs, own, unheard),
            world.connect(world.reports, own, unheard),
        ]
        _, self._to_agent, _, self._outputs, self._scheduler = self._links

    def tick(self) -> None:
        """Its moment has come."""
        self._take(_TICK)

    def hear_device(self, event: ExecutorEvent) -> None:
        """One of its slices has something to say."""
        if isinstance(event, JobRan):
            size = len(event.outputs[0].array)
            self._agent.ran(event.slice_id, event.batch_id, size, event.began_at_ms, event.spans)
            handle, times_ms = Handle(next(self._handles)), (event.exec_ms, event.began_at_ms)
            self._take(BatchRan(event.slice_id, event.batch_id, handle, (), *times_ms))
        else:
            self._take(event)

    def close(self) -> None:
        """Its process is gone."""
        for link in self._links:
            link.close()

    def _hear(self, peer: PeerId, one: Received) -> None:
        self._take(Heard(peer, one.message, one.late_ms))

    def _heard_frontend(self, one: Received) -> None:
        self._take(InputsCame(one.message, Handle(next(self._handles)), 0))  # type: ignore[arg-type]  # only inputs come this way

    def _take(self, event: WorkerEvent) -> None:
        for action in self._core.handle(event, self._world.clock.now_ms()):
            self._perform(action)
        self.wake_at_ms = self._core.wake_at_ms

    def _perform(self, action: WorkerAction) -> None:
        now_ms = self._world.clock.now_ms()
        match action:
            case Send(peer, message):
                if peer == AGENT:
                    self._to_agent.send(peer, message)
                else:
                    self._scheduler.send(self._agent.scheduler, message)
            case JoinScheduler():
                self._take(SchedulerAnswers())
            case KnowFrontends(frontends):
                self._know(frontends)
            case PushOutputs(frontend_id, message):
                self._outputs.send(self._frontends[frontend_id], message)
            case Execute(run, parts, expires_at_ms):
                job_parts = [JobPart(len(part.live_seqs), ()) for part in parts]
                job = Job(run.slice_id, run.batch_id, run.model_id, job_parts, expires_at_ms)
                self._agent.devices.run(job, now_ms)
            case Recall(slice_id, batch_id):
                self._agent.devices.recall(slice_id, batch_id, now_ms)
            case Abort(slice_id, batch_id):
                devices = self._agent.devices
                began_at_ms = devices.began_at_ms(slice_id, batch_id)
                devices.abort(slice_id, batch_id, now_ms)
                # Else it ends at this moment, or goes through a pipeline.
                if began_at_ms is not None and devices.began_at_ms(slice_id, batch_id) is None:
                    self._agent.ran(slice_id, batch_id, 0, began_at_ms)
            case LoadSlice(spec):
                self._agent.load(self, spec)
            case UnloadSlice(slice_id):
                self._agent.unload(slice_id)
            case LoadModel(spec, number):
                self._agent.load_model(spec, number)
            case UnloadModel(slice_id, model_id):
                self._agent.unload_model(slice_id, model_id)
            case End(exit_code):
                self._agent.ended(self, exit_code)
            case _:
                pass  # there is no payload to release or to stage, and no process to watch

    def _know(self, frontends: tuple[FrontendInfo, ...]) -> None:
        self._frontends = {info.frontend_id: PeerId(info.addresses[0]) for info in frontends}


class VirtualAgent:
    """A node's agent, and the processes it starts: each is there at once, or `start_ms` later when time has begun."""

    def __init__(self, world: Surroundings, node: SimulatedNode) -> None:
        self._world = world
        self._node = node
        self.devices = EmulatedExecutor()
        """All of the node's, so that slices of one GPU slow each other down whichever worker has them."""
        self._hosts: dict[SliceId, tuple[VirtualWorker, SliceSpec]] = {}
        self._loading: dict[tuple[SliceId, ModelId], int] = {}
        self.links = VirtualLinks(world.clock, lambda _from, _to, sent_at_ms: sent_at_ms)
        """Between it and them."""
        own = peer_id(role_id_of_node(node.node_id), FIRST)
        self._core = NodeAgentCore(AgentSelf(node.node_id, FIRST), FoundDevices(node.gpus))
        self.wake_at_ms = self._core.wake_at_ms
        """The core's timer."""
        self.scheduler = scheduler_peer(node.shard)
        """Of the node's shard, which is its workers' too."""
        self._to_scheduler = world.connect(world.control, own, self._hear_scheduler)
        self._to_workers = world.connect(self.links, AGENT, lambda one: self._hear(one.peer, one))
        self.workers: dict[str, VirtualWorker] = {}
        """Its processes, in the order of their starts."""
        self._numbers = count(1)

    def begin(self) -> None:
        """It finds the scheduler."""
        self._take(SchedulerFound(SOMEWHERE))

    def tick(self) -> None:
        """Its moment has come."""
        self._take(_TICK)

    @property
    def devices_have_news(self) -> bool:
        """Whether one has loaded, or stopped what it was told to stop."""
        return self.devices.has_more

    @property
    def devices_at_ms(self) -> float | None:
        """When one has something to say."""
        return self._world.clock.now_ms() if self.devices.has_more else self.devices.wake_at_ms

    def hear_device(self) -> None:
        """One thing that a device has to say; nobody hears of what a worker had that is gone."""
        for event in self.devices.take(1, self._world.clock.now_ms()):
            if not isinstance(event, DeviceBroken) and event.slice_id in self._hosts:
                self._hosts[event.slice_id][0].hear_device(event)

    def load(self, worker: VirtualWorker, spec: SliceSpec) -> None:
        """A worker hosts a slice."""
        self._hosts[spec.slice_id] = worker, spec
        self.devices.load(spec)

    def unload(self, slice_id: SliceId) -> None:
        """No more."""
        del self._hosts[slice_id]
        self._loading = {key: number for key, number in self._loading.items() if key[0] != slice_id}
        self.devices.unload(slice_id)

    def load_model(self, spec: SliceSpec, number: int) -> None:
        """A slice hosts one model more; that takes as long as a new slice does."""
        (model,) = spec.models
        key = spec.slice_id, model.model_id
        self._loading[key] = number

        def load() -> None:
            if self._loading.get(key) == number:
                del self._loading[key]
                self.devices.load_model(spec, number)

        self._world.after(self._world.hardware.start_ms, load)

    def unload_model(self, slice_id: SliceId, model_id: ModelId) -> None:
        """One model less, or a load that is given up."""
        self._loading.pop((slice_id, model_id), None)
        self.devices.unload_model(slice_id, model_id)

    def ran(
        self,
        slice_id: SliceId,
        batch_id: BatchId,
        size: int,
        began_at_ms: float,
        spans: Sequence[tuple[float, float]] = (),
    ) -> None:
        """A batch of a worker ended; `spans` as `JobRan` has them."""
        self._world.times_of_batch[batch_id].started_at_ms = began_at_ms
        self._world.ran(self._node, self._hosts[slice_id][1], batch_id, size, spans)

    def ended(self, worker: VirtualWorker, exit_code: int) -> None:
        """A worker's process is gone."""
        if self.workers.pop(worker.worker_id, None) is None:
            return
        for slice_id in [one for one, (host, _) in self._hosts.items() if host is worker]:
            self.unload(slice_id)
        worker.close()
        exited = ProcessExited(worker.worker_id, exit_code, "")
        self._world.after(0.0, lambda: self._take(exited))

    def _hear_scheduler(self, one: Received) -> None:
        message = one.message
        if isinstance(message, DesiredSlices):  # every device is emulated here, whatever it is in reality
            slices = tuple(replace(spec, device=EMULATED) for spec in message.slices)
            message = replace(message, slices=slices)
        self._take(Heard(SCHEDULER, message, one.late_ms))

    def _hear(self, peer: PeerId, one: Received) -> None:
        self._take(Heard(peer, one.message, one.late_ms))

    def _take(self, event: AgentEvent) -> None:
        for action in self._core.handle(event, self._world.clock.now_ms()):
            self._perform(action)
        self.wake_at_ms = self._core.wake_at_ms

    def _perform(self, action: AgentAction) -> None:
        match action:
            case Send(peer, message):
                if peer == SCHEDULER:
                    self._to_scheduler.send(self.scheduler, message)
                else:
                    self._to_workers.send(peer, message)
            case Spawn(worker_id):
                wait_ms = self._world.hardware.start_ms if self._world.clock.now_ms() > 0.0 else 0.0
                self._world.after(wait_ms, lambda: self._start(worker_id))
            case Terminate(worker_id) | Kill(worker_id):
                if worker_id in self.workers:
                    self.ended(self.workers[worker_id], -9)
            case _:
                pass  # nothing is written down, and emulated GPUs have neither sensors nor daemons

    def _start(self, worker_id: str) -> None:
        self.workers[worker_id] = VirtualWorker(self._world, self, worker_id, next(self._numbers))
