"""The worker's process: its sockets, its devices and the real clock around its core."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct, field

from fabric.clock import Clock, MonotonicClock
from fabric.curve import guarded
from fabric.errors import LocalProtocolError
from fabric.ids import Incarnation, ModelId, PeerId, SliceId, new_incarnation, peer_id
from fabric.keys import FRONTEND, Keyring
from fabric.link import NamedTensor, Received
from fabric.messages import (
    AnyMessage,
    FrontendInfo,
    Inputs,
    Loading,
    RunBatch,
    SliceFailed,
    SliceReady,
    StatusListed,
)
from fabric.sockets import LinkOptions
from fabric.transport import ZMQ, Transport
from roles.gpu_worker.agent_watch import AgentWatch, WatchesAgent
from roles.gpu_worker.answers import answer_unsendable, check_rows, rows_of
from roles.gpu_worker.batches import PartInputs
from roles.gpu_worker.core import WorkerCore
from roles.gpu_worker.events import (
    Abort,
    AgentUntold,
    BatchRan,
    End,
    Execute,
    InputsCame,
    JoinScheduler,
    KnowFrontends,
    LoadModel,
    LoadSlice,
    NoRoom,
    PushOutputs,
    Recall,
    Release,
    UnloadModel,
    UnloadSlice,
    WatchAgent,
    WorkerAction,
    WorkerEvent,
)
from roles.gpu_worker.executors.base import (
    Executor,
    ExecutorEvent,
    Job,
    JobPart,
    JobRan,
    Loaded,
    ModelLoaded,
    Part,
)
from roles.gpu_worker.executors.emulated import EmulatedExecutor
from roles.gpu_worker.executors.gang import Gang
from roles.gpu_worker.executors.thread import BlockingDevice, ThreadExecutor
from roles.gpu_worker.peer_checks import A_FRONTEND, AGENT
from roles.gpu_worker.registration import WorkerIdentity
from roles.gpu_worker.scheduler_connection import SchedulerConnection
from roles.gpu_worker.slices import EMULATED
from roles.gpu_worker.stages.executor import PipelineExecutor
from roles.gpu_worker.stages.later_stages import meeting_of
from roles.gpu_worker.stages.processes import StageProcesses
from roles.runtime.core import NO_PAYLOAD, Heard, Send
from roles.runtime.defects import DefectReport
from roles.runtime.loop.driver import Driver, Role
from roles.runtime.loop.mailbox import Mailbox
from roles.runtime.loop.sources import LinkSource, SendingSource, Source, TranslatedSource
from roles.runtime.payloads import Payloads
from roles.runtime.process import (
    StopSignal,
    die_with_parent,
    log_offences,
    outlive_parent,
    set_up_descriptors,
    set_up_logging,
)
from roles.runtime.process_events import StopAsked

RUN_ON_S = 0.04  # for the batch on the device, when this process ends with a defect

log = logging.getLogger("tenuto")


class WorkerOptions(Struct, frozen=True):
    """`host`: the interface of the payload socket's TCP address. `threads`: torch's, on a CPU.

    `incarnation`, `clock`, `transport`, `make_emulated`: a process has its own; tests may know better.
    """

    host: str = "127.0.0.1"
    inputs_bytes_max: int = 1 << 30
    threads: int = 1
    log_level: str = "INFO"
    clock: Clock = field(default_factory=MonotonicClock)
    keyring: Keyring | None = None
    incarnation: Incarnation = field(default_factory=new_incarnation)
    transport: Transport = ZMQ
    make_emulated: Callable[[], EmulatedExecutor] = EmulatedExecutor


def run_worker(
    agent_address: str, worker_id: str, run_dir: Path, options: WorkerOptions | None = None
) -> int:
    """Serve until the agent says stop, or a signal does, and what runs has ended; the process's exit code. Call from the main thread.

    Raises ConfigError for an address that cannot be bound or connected to.
    """
    outlived = outlive_parent()
    is_child = outlived is not None or die_with_parent()
    agent_pid, outlive_ms = outlived or (0, 0.0)
    options = options or WorkerOptions()
    set_up_descriptors()
    set_up_logging(worker_id, options.log_level)
    with StopSignal(is_child=is_child) as stop:
        watch = AgentWatch(outlive_ms)
        watch.watch(agent_pid)
        if outlived is not None and os.getppid() != agent_pid:
            return 1  # it was gone before we watched it, and we host nothing
        worker = WorkerShell(agent_address, worker_id, run_dir, options, stop, watch, outlive_ms)
        # A client of MPS that ends in the middle of a kernel takes others along: what runs may end first.
        report = DefectReport(worker_id, run_dir, before_end=worker.let_run_end)
        driver = Driver([worker.role], options.clock, on_defect=report.end)
        try:
            log.info("worker_starts pid=%d", os.getpid())
            driver.run(lambda: worker.end is not None)
            end = worker.end
            assert end is not None, "that is what ended the loop"
            log.info("worker_ends exit_code=%d reason=%r", end.exit_code, end.reason)
            return end.exit_code
        finally:
            driver.close()
            worker.close()


class WorkerShell:
    """Does what the core decides, with the links and devices of one worker. `end`: it is over, and how."""

    def __init__(
        self,
        agent_address: str,
        worker_id: str,
        run_dir: Path,
        options: WorkerOptions,
        stop: Source[StopAsked],
        watch: WatchesAgent,
        outlive_ms: float,
    ) -> None:
        incarnation, transport = options.incarnation, options.transport
        own = peer_id(worker_id, incarnation)
        self.end: End | None = None
        self._options = options
        self._clock = options.clock
        self._watch = watch
        self._pull = transport.bind_payload(
            [f"ipc://{run_dir / worker_id}.sock", f"tcp://{options.host}:0"],
            LinkOptions(is_sharing=True),
            guarded(options.keyring, {FRONTEND}, names=False),
        )
        self._agent = transport.connect(own, AGENT, [agent_address])
        self._scheduler = SchedulerConnection(own, options.clock, options.keyring, transport)
        self._frontends = transport.push(guard=guarded(options.keyring))
        self._untold: Mailbox[AgentUntold] = Mailbox()
        self._known: set[PeerId] = set()
        self._payloads = Payloads(sys.maxsize)
        self._sleep = options.make_emulated()
        self._parts: dict[tuple[SliceId, ModelId], Part] = {}
        self._gang = Gang(options.clock.now_ms)
        self._meeting = meeting_of(worker_id, run_dir)
        self._thread = ThreadExecutor(self._make_torch_device, options.clock.now_ms)
        later = StageProcesses(worker_id, run_dir, options.threads, transport)
        self._real = PipelineExecutor(self._thread, later, self._parts, options.clock.now_ms, self._gang)
        self._executors: dict[SliceId, Executor] = {}
        self._core = WorkerCore(
            WorkerIdentity(worker_id, incarnation, os.getpid(), tuple(self._pull.addresses)), outlive_ms
        )
        self.role = Role[WorkerEvent, WorkerAction](
            self._core,
            [
                stop,
                watch,
                TranslatedSource(self._sleep, self._from_device),
                TranslatedSource(self._real, self._from_thread),
                LinkSource(self._agent, _from_agent, lambda _: AgentUntold()),
                self._scheduler,
                self._untold,
                LinkSource(self._pull, self._from_frontend),
                SendingSource(self._frontends),
            ],
            self._perform,
            lambda: log_offences(self._core.offences),
        )

    def let_run_end(self) -> None:
        """Give what runs on a real device a moment."""
        self._thread.close(RUN_ON_S)

    def close(self) -> None:
        """Flush for at most 100 ms, end the device's threads."""
        self._frontends.close()
        self._scheduler.close()
        self._watch.close()
        self._agent.close()
        self._pull.close()
        self._untold.close()
        self._sleep.close()
        self._real.close()

    def _from_device(self, event: ExecutorEvent) -> WorkerEvent:
        """Outputs are exchanged for a handle."""
        if isinstance(event, JobRan):
            handle = self._payloads.put(event.outputs)
            assert handle is not None, "outputs are bounded by one batch a slice, not in bytes"
            return BatchRan(
                event.slice_id, event.batch_id, handle, event.rejected, event.exec_ms, event.began_at_ms
            )
        return event

    def _from_thread(self, event: ExecutorEvent) -> WorkerEvent:
        if isinstance(event, ModelLoaded) and event.replica is not None:
            gc.freeze()  # its device has looked for garbage; of a load that failed all is
        if isinstance(event, Loaded):
            # Loading leaves a large heap that lives as long as we do: no later collection should walk it.
            gc.collect()
            gc.freeze()
        return self._from_device(event)

    def _from_frontend(self, received: Received) -> InputsCame | NoRoom | Heard:
        """What there is no room for is dropped and counted."""
        if not isinstance(received.message, Inputs):
            return Heard(A_FRONTEND, received.message)
        size_bytes = sum(tensor.array.nbytes for tensor in received.tensors)
        if self._payloads.bytes_kept + size_bytes > self._options.inputs_bytes_max:
            self._core.counters["inputs_over_memory"] += 1
            return NoRoom(received.message)
        handle = self._payloads.put(received.tensors)
        assert handle is not None, "the bound is ours, above"
        return InputsCame(received.message, handle, size_bytes)

    def _perform(self, action: WorkerAction) -> None:
        match action:
            case Send(peer, message):
                self._send(peer, message)
            case PushOutputs():
                self._push(action)
            case Execute(run, parts, expires_at_ms):
                job = self._job(run, parts, expires_at_ms)
                self._executors[run.slice_id].run(job, self._clock.now_ms())
            case Recall(slice_id, batch_id):
                self._executors[slice_id].recall(slice_id, batch_id, self._clock.now_ms())
            case Abort(slice_id, batch_id):
                self._executors[slice_id].abort(slice_id, batch_id, self._clock.now_ms())
            case Release(payloads):
                for handle in payloads:
                    self._payloads.release(handle)
            case WatchAgent(pid):
                self._watch.watch(pid)
            case KnowFrontends(frontends):
                self._know(frontends)
            case JoinScheduler(addresses, heartbeats):
                self._scheduler.open(addresses, heartbeats, self._clock.now_ms())
            case LoadSlice(spec):
                executor: Executor = self._sleep if spec.device == EMULATED else self._real
                self._executors[spec.slice_id] = executor
                executor.load(spec)
            case UnloadSlice(slice_id):
                self._executors.pop(slice_id).unload(slice_id)
            case LoadModel(spec, number):
                self._executors[spec.slice_id].load_model(spec, number)
            case UnloadModel(slice_id, model_id):
                self._executors[slice_id].unload_model(slice_id, model_id)
            case End():
                self.end = action

    def _send(self, peer: PeerId, message: AnyMessage) -> None:
        """Refused, nothing is kept: hellos are repeated, the agent hears of the slices again, the scheduler is introduced to anew."""
        if peer == AGENT:
            if isinstance(message, StatusListed):
                message = self.role.stats.told_in(message)
            is_out = self._agent.send(AGENT, message)
            if not is_out and isinstance(message, SliceReady | SliceFailed | Loading):
                self._untold.post(AgentUntold())
            _log(message)
        else:
            is_out = self._scheduler.send(message, self._clock.now_ms())
        if not is_out:
            self._core.counters["messages_refused"] += 1

    def _push(self, push: PushOutputs) -> None:
        """Refused, it is counted: the frontend answers by its own deadline timer. What cannot be sent is answered."""
        kept = self._payloads.get(push.outputs) if push.outputs != NO_PAYLOAD else ()
        peer, message = PeerId(push.frontend_id), push.message
        try:
            tensors = [NamedTensor(tensor.name, rows_of(tensor, push)) for tensor in kept]
            check_rows(tensors)
            is_out = self._frontends.send(peer, message, tensors)
        except LocalProtocolError as error:
            self._core.counters["outputs_unsendable"] += 1
            is_out = self._frontends.send(peer, answer_unsendable(message, error))
        if not is_out:
            self._core.counters["outputs_refused"] += 1

    def _job(self, run: RunBatch, inputs: Sequence[PartInputs], expires_at_ms: float) -> Job:
        parts = [JobPart(len(part.live_seqs), self._tensors(part), part.heads) for part in inputs]
        return Job(run.slice_id, run.batch_id, run.model_id, parts, expires_at_ms)

    def _tensors(self, part: PartInputs) -> Sequence[NamedTensor]:
        kept = self._payloads.get(part.payload)
        if part.cut is None:  # the very object that was staged
            return kept
        first, requests = part.cut
        each = len(kept) // requests
        return kept[each * first : each * (first + len(part.live_seqs))]

    def _know(self, frontends: Sequence[FrontendInfo]) -> None:
        known = {PeerId(info.frontend_id) for info in frontends}
        for gone in self._known - known:
            self._frontends.drop(gone)
        self._known = known
        for info in frontends:
            self._frontends.know(PeerId(info.frontend_id), info.incarnation, info.addresses)

    def _make_torch_device(self) -> BlockingDevice:
        # Here, on the device's thread: torch takes seconds to import, and emulated slices never need it.
        from roles.gpu_worker.executors.torch import TorchDevice  # noqa: PLC0415  see above

        gc.freeze()  # torch's own objects: walking them would stop the loop for half a second
        return TorchDevice(self._clock, self._options.threads, self._parts, self._meeting, self._gang)


def _from_agent(received: Received) -> Heard:
    """It is not watched: the kernel ends a worker whose agent is gone."""
    return Heard(AGENT, received.message, received.late_ms)


def _log(message: AnyMessage) -> None:
    """What people want to know of a worker."""
    match message:
        case SliceReady(slice_id=slice_id, replicas=replicas):
            for replica in replicas:
                log.info(
                    "slice_ready slice=%s model=%s exec_ms_1=%.3f exec_ms_max=%.3f batch_size_max=%d",
                    slice_id,
                    replica.model_id,
                    replica.exec_ms[0],
                    replica.exec_ms[-1],
                    replica.batch_size_max,
                )
        case SliceFailed(slice_id=slice_id, reason=reason):
            log.error("slice_failed slice=%s reason=%r", slice_id, reason)
        case _:
            pass
