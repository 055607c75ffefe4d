"""The node agent's process: real children, real sockets, the real clock around its core."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from fabric.clock import Clock, MonotonicClock
from fabric.errors import ConfigError
from fabric.ids import PeerId, new_incarnation, peer_id, role_id_of_node, scheduler_id
from fabric.keys import Keyring, principal_of_node
from fabric.link import Received
from fabric.messages import EpochGranted, Host, LeaseAsked, StatusAsked, StatusListed, WorkerHello
from fabric.sockets import RouterLink
from roles.config.cluster import ClusterConfig, NodeConfig
from roles.node_agent.blocking_calls import BlockingCalls
from roles.node_agent.core import AgentSelf, FoundDevices, NodeAgentCore
from roles.node_agent.events import (
    AgentAction,
    AgentEvent,
    AgentLimits,
    CheckDaemon,
    DaemonChecked,
    EndLeftovers,
    FollowScheduler,
    GpusSampled,
    Kill,
    Orphan,
    Remember,
    SampleGpus,
    Spawn,
    StartDaemon,
    StrangerGreeted,
    Terminate,
    WorkerUntold,
)
from roles.node_agent.gpus import discover, open_nvml
from roles.node_agent.lease import KeepLease, LeaseKept
from roles.node_agent.lease_file import LeaseFile
from roles.node_agent.metrics import METRICS, measured_agent
from roles.node_agent.mps.environment import without_mps
from roles.node_agent.mps.sharing import (
    OUTLIVE_MS,
    Answer,
    ClientEnded,
    LeftoversEnded,
    Sharing,
    SharingOptions,
)
from roles.node_agent.workers.adoption import WorkerRecords
from roles.node_agent.workers.cpu_affinity import CorePins, cores_of, pin
from roles.node_agent.workers.sockets import WorkerSockets
from roles.runtime.children import Processes
from roles.runtime.core import SCHEDULER, Heard, Send
from roles.runtime.defects import DefectReport
from roles.runtime.environment import RunDir
from roles.runtime.identities import identity_of
from roles.runtime.loop.driver import Driver, Role
from roles.runtime.loop.local_scheduler import LocalScheduler
from roles.runtime.loop.mailbox import Mailbox
from roles.runtime.loop.remote_scheduler import RemoteScheduler
from roles.runtime.loop.scheduler_source import SchedulerEvent, SchedulerSource
from roles.runtime.loop.sources import LinkSource, Source, TranslatedSource
from roles.runtime.metrics.common import page_server
from roles.runtime.metrics.snapshot import SnapshotAsked
from roles.runtime.process import (
    OUTLIVE_VARIABLE,
    RunFile,
    StopSignal,
    log_offences,
    module_command,
    remove_run_file,
    write_run_file,
)
from roles.runtime.process_events import ProcessExited, Warn

log = logging.getLogger("tenuto")


def worker_command(address: str, worker_id: str, run_dir: Path) -> Sequence[str]:
    """How a worker is started."""
    return module_command("roles.gpu_worker", address, worker_id, str(run_dir))


class AgentOptions(Struct, frozen=True):
    """`command`: (agent address, worker id, run directory) -> the worker's command line.

    `address`: this host's, at which its workers take payload. `scheduler_addresses`: of schedulers on other hosts, by
    role id; the others are found in the run directory. `metrics`: HOST:PORT of its page of metrics; None: it has none.
    """

    limits: AgentLimits = field(default_factory=AgentLimits)
    command: Callable[[str, str, Path], Sequence[str]] = worker_command
    clock: Clock = field(default_factory=MonotonicClock)
    sharing: SharingOptions = field(default_factory=SharingOptions)
    outlive_ms: float = OUTLIVE_MS
    address: str = "127.0.0.1"
    scheduler_addresses: Mapping[str, Sequence[str]] = field(default_factory=dict)
    metrics: str | None = None


def run_node_agent(
    config: ClusterConfig, host: str, run_dir: Path, stop: StopSignal, options: AgentOptions | None = None
) -> None:
    """Serve as the agent of `host` until told to stop, then end the workers. Call from the main thread.

    Raises ConfigError for a host that the configuration does not have, or whose GPUs are not here.
    """
    keys = config.security.keys
    # Its workers need it too: better said now than by each of them.
    keyring = None if keys is None else Keyring.of_folder(keys, principal_of_node(host))
    options = options or AgentOptions()
    options = replace(options, limits=replace(options.limits, heartbeats=config.heartbeats))
    agent = _Agent(config, _node(config, host), run_dir, options, stop, keyring)
    try:
        agent.run()
    finally:
        agent.close()


class _Agent:
    def __init__(
        self,
        config: ClusterConfig,
        node: NodeConfig,
        run_dir: Path,
        options: AgentOptions,
        stop: StopSignal,
        keyring: Keyring | None,
    ) -> None:
        incarnation = new_incarnation()
        role_id = role_id_of_node(node.host)
        own = identity_of(os.getpid())
        assert own is not None, "we are alive"
        self._own = own
        self._stop = stop
        self._nvml = open_nvml(node)
        gpus = discover(node, self._nvml)
        self._gpus = [gpu.gpu for gpu in gpus]
        self._run_dir = run_dir
        self._command = options.command
        self._of_workers: tuple[str, ...] = (options.address,)
        if keyring is not None and keyring.path is not None:
            self._of_workers += (str(keyring.path.parent.absolute()), keyring.own.principal)
        self._outlive_ms = options.outlive_ms if node.workers_outlive_agent else 0.0
        self._link = RouterLink.bind([RunDir(run_dir).ipc_address(f"{role_id}.control")])
        beats = options.limits.heartbeats
        own_peer, elsewhere = peer_id(role_id, incarnation), options.scheduler_addresses
        self._schedulers: dict[PeerId, SchedulerSource] = {
            PeerId(known): RemoteScheduler(own_peer, elsewhere[known], options.clock, keyring, known, beats)
            if known in elsewhere
            else LocalScheduler(own_peer, run_dir, options.clock, keyring, known, beats)
            for known in map(scheduler_id, config.places.schedulers_of(node.shard))
        }
        self._followed = next(iter(self._schedulers))
        self._lease_file = LeaseFile(run_dir, node.host)
        self._later: Mailbox[LeaseKept | WorkerUntold] = Mailbox()
        self._processes = Processes()
        self._blocking: BlockingCalls[Answer] = BlockingCalls()
        self._pins = CorePins(node.pin_cores)
        self._sharing = Sharing(node, gpus, run_dir, options.sharing, self._outlive_ms)
        self._records = WorkerRecords(run_dir, node.host)
        self._sockets = WorkerSockets(run_dir)
        self._core = NodeAgentCore(
            AgentSelf(
                node.node_id,
                incarnation,
                role_id,
                os.getpid(),
                node.workers_outlive_agent,
                self._lease_file.read(),
            ),
            FoundDevices(gpus, self._sharing.plans, *self._take_over()),
            options.limits,
        )
        schedulers: list[Source[AgentEvent]] = [
            TranslatedSource(scheduler, from_scheduler) for scheduler in self._schedulers.values()
        ]
        self._metrics = page_server(options.metrics, role_id, options.clock)
        # Its page also has what its workers say of themselves: it asks them as when somebody wants its status.
        asked = [] if self._metrics is None else [TranslatedSource(self._metrics.asked, _status_for_page)]
        role = Role[AgentEvent, AgentAction](
            self._core,
            # Words before ends: what a worker said last is heard before it counts as gone.
            [
                stop,
                LinkSource(self._link, self._from_worker, WorkerUntold),
                *schedulers,
                self._later,
                TranslatedSource(self._blocking, self._from_blocking),
                TranslatedSource(self._processes, self._from_process),
                *asked,
            ],
            self._perform,
            lambda: log_offences(self._core.offences),
        )
        self._driver = Driver([role], options.clock, on_defect=DefectReport(role_id, run_dir).end)
        addresses = {"control": list(self._link.addresses)}
        if self._metrics is not None:
            addresses["metrics"] = [self._metrics.address]
        self._run_file = RunFile(role_id, os.getpid(), incarnation, addresses)

    def run(self) -> None:
        write_run_file(self._run_dir, self._run_file)
        log.info("agent_serves role=%s pid=%d", self._run_file.role_id, self._run_file.pid)
        try:
            self._driver.run(lambda: self._core.is_stopped)
        finally:
            remove_run_file(self._run_dir, self._run_file)
        self._sharing.remove()
        self._records.remove()

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
        if self._outlive_ms and not self._stop.is_set:  # it ends out of order: the next one adopts what lives
            self._processes.release_all()
        self._sharing.release(self._processes)
        self._processes.close()
        self._driver.close()
        self._blocking.close()
        for scheduler in self._schedulers.values():
            scheduler.close()
        self._later.close()
        self._link.close()

    def _take_over(self) -> tuple[Sequence[Orphan], Sequence[int]]:
        """What a former agent of this host left: adopted where that is wanted, else ended."""
        is_adopting = self._outlive_ms > 0
        daemons = self._sharing.take_over(self._processes, self._own) if is_adopting else []
        records = self._records.take_over(self._processes, daemons, is_adopting=is_adopting)
        for record in records:
            self._pins.note(record.orphan.worker_id, cores_of(record.identity.pid))
            if record.gpu is not None:
                self._sharing.joined(record.orphan.worker_id, record.gpu)
        return [record.orphan for record in records], daemons

    def _perform(self, action: AgentAction) -> None:
        match action:
            case Send(peer, message) if peer == SCHEDULER:
                self._schedulers[self._followed].send(message)
            case Send(peer, message) if peer in self._schedulers:
                self._schedulers[peer].send(message)
            case FollowScheduler(peer):
                self._followed = peer
            case KeepLease(record):
                self._later.post(LeaseKept(record, self._lease_file.write(record)))
            case Send(peer, StatusListed() as status) if peer == METRICS:
                assert self._metrics is not None, "it asked"
                self._metrics.publish(measured_agent(status, self._driver.stats))
            case Send(peer, StatusListed() as status):
                self._link.send(peer, self._driver.stats.told_in(status))
            case Send(peer, message):
                is_out = self._link.send(
                    peer, message
                )  # refused, it is ending, or its time limit will end it
                if not is_out and isinstance(message, Host | EpochGranted):
                    self._later.post(WorkerUntold(peer))
            case Spawn():
                self._spawn(action)
            case Terminate(worker_id):
                self._end(worker_id, signal.SIGTERM)
            case Kill(name, at_once=True):
                self._processes.kill(name)
            case Kill(worker_id):
                self._end(worker_id, signal.SIGKILL)
            case Remember(worker):
                if self._outlive_ms:
                    self._records.write(worker, self._sharing.gpu_of(worker.worker_id))
            case StartDaemon(gpu):
                self._sharing.start(gpu, self._processes, self._own)
            case CheckDaemon(gpu, start):
                self._sharing.check(gpu, start, self._blocking)
            case EndLeftovers(gpu):
                self._sharing.end_leftovers(gpu, self._blocking)
            case SampleGpus():
                self._blocking.run(self._sample)
            case Warn(text):
                log.warning(text)

    def _spawn(self, spawn: Spawn) -> None:
        worker_id, slices, is_mps = spawn.worker_id, spawn.slices, spawn.is_mps
        command = [*self._command(self._link.addresses[0], worker_id, self._run_dir), *self._of_workers]
        environment = self._sharing.environment(slices[0], spawn.beside, is_mps=is_mps)
        if self._outlive_ms:
            environment[OUTLIVE_VARIABLE] = f"{self._outlive_ms:.0f}"
        self._processes.spawn(worker_id, command, environment, without_mps(os.environ))
        pid = self._processes.pid(worker_id)
        if pid is None:
            return  # could not be started, which is on its way to the core
        if is_mps:
            self._sharing.joined(worker_id, slices[0].gpu)
        cores = self._pins.take(worker_id)
        if cores is not None:
            pin(pid, cores)
            log.info("worker_pinned worker=%s cores=%s", worker_id, ",".join(map(str, sorted(cores))))
            if self._pins.are_shared:
                log.warning("cores_shared worker=%s: more workers than cores to pin them to", worker_id)

    def _end(self, name: str, number: signal.Signals) -> None:
        """A client of MPS leaves its GPU first: a process killed in the middle of a kernel takes others along."""
        if not self._sharing.end_client(name, self._processes.pid(name), number, self._blocking):
            self._signal(name, number)

    def _signal(self, name: str, number: signal.Signals) -> None:
        if number == signal.SIGKILL:
            self._processes.kill(name)
        else:
            self._processes.terminate(name)

    def _from_blocking(self, answer: Answer) -> AgentEvent | None:
        match answer:
            case ClientEnded(worker_id, number, problem):
                if problem:
                    log.warning("client_not_terminated worker=%s reason=%r", worker_id, problem)
                self._signal(worker_id, number)
                return None
            case LeftoversEnded(gpu, problem):
                if problem:
                    log.warning("mps_stuck gpu=%d reason=%r", gpu, problem)
                return None
            case DaemonChecked() | GpusSampled():
                return answer

    def _from_worker(self, received: Received) -> AgentEvent:
        """Names come again where a former agent's worker was not written down: its pid tells it from our own child."""
        match received.message:
            case WorkerHello(worker_id=name, pid=pid) if self._processes.pid(name) not in (None, pid):
                self._sockets.share(name)
                return StrangerGreeted(received.peer)
        return from_worker(received)

    def _from_process(self, exited: ProcessExited) -> ProcessExited:
        self._pins.give_back(exited.name)
        self._sharing.left(exited.name)
        self._records.forget(exited.name)
        self._sockets.remove(exited.name)
        return exited

    def _sample(self) -> GpusSampled:
        assert self._nvml is not None, "only NVIDIA GPUs are sampled"
        return GpusSampled(tuple(map(self._nvml.sample, self._gpus)))


def _status_for_page(asked: SnapshotAsked) -> Heard:
    del asked
    return Heard(METRICS, StatusAsked())


def from_worker(received: Received) -> Heard:
    """The end of a worker is seen at its process, its silence by the core. None can have the scheduler's name."""
    return Heard(received.peer, received.message, received.late_ms)


def from_scheduler(event: SchedulerEvent) -> AgentEvent:
    """Only about leases the core has to know which one it is: by all else it goes as the epoch says."""
    if isinstance(event, Heard) and not isinstance(event.message, LeaseAsked):
        return Heard(SCHEDULER, event.message, event.late_ms, epoch=event.epoch)
    return event


def _node(config: ClusterConfig, host: str) -> NodeConfig:
    for node in config.nodes:
        if node.host == host:
            return node
    known = ", ".join(node.host for node in config.nodes)
    raise ConfigError(f"the configuration has no node {host!r}; it has {known}")
