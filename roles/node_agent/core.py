"""The node agent's decisions: which worker processes should run on this host, and what the scheduler hears.

The scheduler says which slices should exist (`DesiredSlices`); the agent makes it so and reports every change. A slice
of a real device gets a process of its own, so that a fault stays there; emulated slices cost a timer each and
share processes, up to 64 in one (`wanted.py`).

- A slice whose specification changes in its models only serves on: its worker is told, and loads and lets go.
- Any other change of a specification under the same slice id is an end and a start; the new process waits for the
  end of the old one, whose memory it may need. Moves without a gap use two ids (a differ's business).
- An emulated slice that is no longer wanted while its process still serves others is reported as stopped at
  once and dropped by its worker, which is told what is left to host. New slices, and one that is wanted
  again, always get a new process: the neighbours never notice, and there is one way to start.
- A process that ends, whose device breaks, whose model hangs or that does not answer is started again with back-off. What a model
  did to its process counts for the model (`workers/suspect_models.py`), which is left out in the end.
- A slice that failed time after time, or whose loader failed, is given up, and tried again after a rest that doubles
  (`slice_reports.py`); at once when its specification changes, or when it was unwanted for a while.
- Every start has a fresh worker id, so words of a dead process are never taken for those of its successor.
- The scheduler is greeted until it answers with a `DesiredSlices`: what is sent without a connection is lost.
- Of several schedulers the one that holds this agent's lease (`lease.py`) is listened to; the others are greeted once,
  and hear when the lease is free. Where one hands over to the next, the workers obey the former until the latter commands.
- Workers of a former agent of this host (`workers/orphans.py`) are adopted when they say hello with what they host, under the
  pid and incarnation that the former agent wrote down; who does not within a time limit is killed. Until that is
  settled the scheduler is not greeted: it would take the slices for lost and have them started twice. One that would serve on
  without its share is sent away: its daemon has failed meanwhile, or it is no client where a daemon answers, by then or later on.
- Where a GPU is shared through MPS, its daemon comes first: no worker starts there before it answers, and every
  worker there ends with it (`mps/daemons.py`).

Here wanted and running are compared; `workers/processes.py` brings processes through their lives, `mps/daemons.py` those of MPS,
`telemetry.py` has the GPUs sampled, `slice_reports.py` keeps what the scheduler was told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, field

from fabric.heartbeats import HeartbeatTiming, Liveness
from fabric.ids import Incarnation, NodeId, PeerId, SliceId
from fabric.messages import (
    AnyMessage,
    DesiredSlices,
    Directory,
    GpuInfo,
    LeaseAsked,
    Loading,
    NodeHello,
    Pong,
    SliceFailed,
    SliceReady,
    SliceSpec,
    SliceState,
    SliceStatus,
    StatusAsked,
    StatusListed,
    Stop,
    WorkerHello,
)
from roles.node_agent.events import (
    AgentAction,
    AgentEvent,
    AgentLimits,
    DaemonChecked,
    FollowScheduler,
    GpusSampled,
    Orphan,
    SharingPlan,
    StrangerGreeted,
    WorkerUntold,
)
from roles.node_agent.lease import NO_LEASE, KeepLease, LeaseGrants, LeaseKept, LeaseRecord
from roles.node_agent.mps.daemons import Daemons
from roles.node_agent.peer_checks import AgentPeerChecks
from roles.node_agent.slice_reports import SliceReports
from roles.node_agent.status_requests import StatusRequests
from roles.node_agent.telemetry import GpuWatch
from roles.node_agent.wanted import by_process, problem_of, shares_percent
from roles.node_agent.workers.lifecycle import Worker, WorkerState
from roles.node_agent.workers.orphans import Orphans
from roles.node_agent.workers.processes import Workers
from roles.runtime.core import SCHEDULER, Heard, Lost, Send, Tick
from roles.runtime.loop.sources import CLOSED
from roles.runtime.peer_checks import Offences
from roles.runtime.process_events import ProcessExited, SchedulerFound, StopAsked, Warn

HELLO_EVERY_MS = 250.0
STOPS = "its node agent stops"
_COUNTED = (
    "askers_refused",
    "daemons_exited",
    "epochs_granted",
    "epochs_refused",
    "leases_not_kept",
    "workers_adopted",
    "workers_exited",
    "workers_sent_away",
    "workers_silent",
)


class AgentSelf(Struct, frozen=True):
    """Who this agent is. `outlives`: its workers may outlive it."""

    node_id: NodeId
    incarnation: Incarnation
    role_id: str = ""
    pid: int = 0
    outlives: bool = False
    lease: LeaseRecord = NO_LEASE
    """What a former agent of this host granted."""


class FoundDevices(Struct, frozen=True):
    """What the agent finds at its start: devices, how each is shared, and what a former agent left."""

    gpus: Sequence[GpuInfo]
    sharing: Mapping[int, SharingPlan] = field(default_factory=dict)
    orphans: Sequence[Orphan] = ()
    daemons: Sequence[int] = ()
    """GPUs whose MPS daemon still runs, under a guard that has been taken over."""


class NodeAgentCore:
    """Reconciles wanted slices with running workers. Sans-IO: see `roles/runtime/core.py`."""

    def __init__(self, own: AgentSelf, found: FoundDevices, limits: AgentLimits | None = None) -> None:
        limits = limits or AgentLimits()
        self.counters = Counter(dict.fromkeys(_COUNTED, 0))
        self._own = own
        self._node_id = own.node_id
        self._gpus = tuple(found.gpus)
        self._limits = limits
        self._actions: list[AgentAction] = []
        self._reports = SliceReports(own.node_id, self._actions)
        self._daemons = Daemons(own.node_id, found.sharing, limits, self._actions, found.daemons)
        self._watch = GpuWatch(own.node_id, self._gpus, self._daemons, limits.sample_ms, self._actions)
        self._workers = Workers(own.node_id, limits, self._reports, self._daemons, self._actions, own.pid)
        self._inquiries = StatusRequests()
        self._liveness = Liveness(
            HeartbeatTiming(limits.silence_ms / 10, limits.silence_ms, limits.silence_ms)
        )
        """Of workers that serve."""
        self._orphans = Orphans(found.orphans, limits, self._actions)
        self._workers.count_from(self._orphans.number_max)
        self._lease = LeaseGrants(own.node_id, own.lease)
        self._schedulers: dict[PeerId, tuple[str, ...]] = {}
        """Addresses of those that were found."""
        self._followed: PeerId | None = None
        """Who `SCHEDULER` is: the lease's holder, or who was found first."""
        self._successor: PeerId | None = None
        """The lease's holder, while it has commanded nothing yet and the one before it, which gave it the lease, may serve on."""
        self._told_successor: Sequence[SliceStatus] | None = None
        """Of the slices; None: it has heard nothing of them."""
        self._workers.epoch = self._lease.epoch
        self._checks = AgentPeerChecks(self._workers, self._orphans.waited_for, self._schedulers, self._lease)
        self._wanted: dict[SliceId, SliceSpec] = {}
        self._is_told = False  # what to run, since its start
        self._hello_at_ms: float | None = None
        self._is_stopping = False
        self._unready_until_ms: float | None = None
        """While what was granted before the scheduler heard of the stop is still on its way."""

    @property
    def offences(self) -> Offences:
        """Of its peers."""
        return self._checks.offences

    def handle(self, event: AgentEvent, now_ms: float) -> Sequence[AgentAction]:
        """Take one event; answer what to do, in order."""
        self._orphans.begin(now_ms)
        self._lease.begin(now_ms)
        self._daemons.begin(now_ms)
        match event:
            case Tick():
                self._on_tick(now_ms)
            case DaemonChecked():
                self._on_daemon_checked(event, now_ms)
            case GpusSampled(samples):
                self._watch.sampled(samples, now_ms)
            case Heard(peer, message):
                if self._checks.check(peer, message, now_ms) is not None:
                    pass
                elif peer == SCHEDULER or peer in self._schedulers:
                    self._on_scheduler(peer, message, event.epoch, now_ms)
                else:
                    self._on_worker(peer, message, now_ms)
            case Lost(peer, reason):
                self._on_scheduler_lost(peer, reason, now_ms)
            case LeaseKept():
                self._on_lease_kept(event, now_ms)
            case StrangerGreeted(peer):
                if self._workers.at(peer) is None:  # else one of ours that lies about its name
                    self._send_away(peer)
            case WorkerUntold(peer):
                self._workers.untold(peer, now_ms)
            case ProcessExited(worker_id, code, last_words):
                self._on_exit(worker_id, code, last_words, now_ms)
            case SchedulerFound(addresses, peer):
                self._on_scheduler_found(peer, addresses, now_ms)
            case StopAsked():
                self._on_stop(now_ms)
        if self._is_stopping and self._workers.are_gone and self._orphans.are_gone:
            self._daemons.stop(now_ms)  # after the last of their clients
        for asker, counters in self._inquiries.settled(now_ms):
            self._actions.append(Send(asker, self._listed(counters, now_ms)))
        actions = self._actions.copy()
        self._actions.clear()  # the same list stays: the parts of this core add to it
        return actions

    @property
    def wake_at_ms(self) -> float | None:
        """The next time limit, restart, sample, answer or hello."""
        moments = (
            self._workers.wake_at_ms,
            self._reports.wake_at_ms,
            self._daemons.wake_at_ms,
            self._watch.wake_at_ms,
            self._inquiries.wake_at_ms,
            self._liveness.wake_at_ms,
            self._orphans.wake_at_ms,
            self._hello_at_ms,
            self._unready_until_ms,
            self._lease.wake_at_ms,
        )
        return min((moment for moment in moments if moment is not None), default=None)

    @property
    def is_stopped(self) -> bool:
        """Asked to stop, and nothing is left to wait for."""
        parts = (self._workers, self._daemons, self._orphans)
        return self._is_stopping and all(part.are_gone for part in parts)

    # ------------------------------------------------------------ the scheduler's side

    def _on_scheduler_found(self, peer: PeerId, addresses: tuple[str, ...], now_ms: float) -> None:
        self._schedulers[peer] = addresses
        record = self._lease.record
        is_first = not record.epoch and self._followed in (None, peer)
        if is_first or peer == record.holder_id:
            self._follow(peer)
            self._hello(now_ms)
        elif not self._orphans:
            self._actions.append(Send(peer, self._introduction(now_ms)))

    def _follow(self, peer: PeerId) -> None:
        """Its words count, those of the epoch granted; workers hear where it is."""
        workers, addresses = self._workers, self._schedulers[peer]
        is_new = (workers.scheduler_addresses, workers.epoch) != (addresses, self._lease.epoch)
        workers.scheduler_addresses, workers.epoch = addresses, self._lease.epoch
        self._successor = None
        if peer != self._followed:
            self._followed = peer
            if peer != SCHEDULER:
                self._actions.append(FollowScheduler(peer))
        if is_new:
            for worker in workers:
                workers.tell_the_epoch(worker)

    def _on_scheduler(self, peer: PeerId, message: AnyMessage, epoch: int, now_ms: float) -> None:
        if self._successor is not None and epoch == self._lease.epoch:
            self._follow(self._successor)
            if self._told_successor == self._reports.alive():
                self._hello_at_ms = now_ms + HELLO_EVERY_MS  # should that have been lost
                self._tell_of_gpus()
            else:
                self._hello(now_ms)
        if isinstance(message, LeaseAsked):
            self._on_lease_asked(peer, message, now_ms)
            return
        if epoch != self._lease.epoch:  # of one that is the active scheduler no more, or not yet
            self.counters["epochs_refused"] += 1
            return
        match message:
            case DesiredSlices():
                self._hello_at_ms = None
                self._on_want(message, now_ms)
            case Directory() if not self._is_stopping:  # it had given us up
                self._hello(now_ms)
            case _:
                assert isinstance(message, Directory), "checked before"

    def _on_scheduler_lost(self, peer: PeerId, reason: str, now_ms: float) -> None:
        if reason == CLOSED and self._lease.closed(peer):
            self._tell_schedulers(now_ms)
        if peer in (self._followed, SCHEDULER):
            self._hello_at_ms = now_ms
        elif not self._orphans:
            self._actions.append(Send(peer, self._introduction(now_ms)))

    def _hello(self, now_ms: float) -> None:
        if self._orphans:
            self._hello_at_ms = self._orphans.adopt_until_ms
            return
        self._actions.append(Send(SCHEDULER, self._introduction(now_ms)))
        self._hello_at_ms = now_ms + HELLO_EVERY_MS
        self._tell_of_gpus()

    def _tell_of_gpus(self) -> None:
        if self._daemons.listed():
            self._watch.tell()

    def _greet_all(self, now_ms: float) -> None:
        if self._followed is not None:
            self._hello(now_ms)
        others = (peer for peer in self._schedulers if peer != self._followed)
        self._actions.extend(Send(peer, self._introduction(now_ms)) for peer in others)

    def _introduction(self, now_ms: float) -> NodeHello:
        own, lease = self._own, self._lease.report(now_ms)
        return NodeHello(
            own.node_id,
            own.incarnation,
            self._gpus,
            self._reports.alive(),
            own.outlives,
            lease.epoch,
            lease.holder_id,
            lease.incarnation,
            lease.is_free,
        )

    # ------------------------------------------------------------ the lease

    def _on_lease_asked(self, peer: PeerId, asked: LeaseAsked, now_ms: float) -> None:
        done = self._lease.asked(asked, now_ms)
        if done is not None:
            self._actions.append(done if isinstance(done, KeepLease) else Send(peer, done))

    def _on_lease_kept(self, kept: LeaseKept, now_ms: float) -> None:
        report = self._lease.kept(kept, now_ms)
        if not kept.is_written:
            self.counters["leases_not_kept"] += 1
            if report is not None:
                self._actions.append(Send(PeerId(report.holder_id), report))
            return
        assert report is not None, "it was asked for"
        holder = PeerId(report.holder_id)
        self.counters["epochs_granted"] += 1
        # To the scheduler first: it hears of its epoch before the workers do whom it will command.
        self._actions.append(Send(holder, report))
        self._tell_schedulers(now_ms, but=holder)  # who takes it for free would ask for it soon
        if holder in self._schedulers and self._lease.is_handed_over:
            self._successor, self._told_successor = holder, None
            if not self._orphans:
                hello = self._introduction(now_ms)
                self._told_successor = hello.slices
                self._actions.append(Send(holder, hello))
        elif holder in self._schedulers:
            self._follow(holder)
            self._hello(now_ms)

    def _tell_schedulers(self, now_ms: float, but: PeerId | None = None) -> None:
        report = self._lease.report(now_ms)
        self._actions.extend(Send(peer, report) for peer in self._schedulers if peer != but)

    def _on_status_asked(self, asker: PeerId, now_ms: float) -> None:
        """The workers are asked in their turn; `handle` answers when they have."""
        told = {worker.worker_id: worker.peer for worker in self._workers if not worker.is_ending}
        reachable = {worker_id: peer for worker_id, peer in told.items() if peer is not None}
        if not self._inquiries.ask(asker, reachable, now_ms):
            self.counters["askers_refused"] += 1
            return
        self._actions.extend(Send(peer, StatusAsked()) for peer in reachable.values())

    def _listed(self, of_workers: Mapping[str, float], now_ms: float) -> StatusListed:
        counted = {**self.counters, **self.offences.counters}
        counters = {name: float(count) for name, count in counted.items()} | dict(of_workers)
        counters["is_ready"] = float(self._is_told)
        slices = self._reports.listed(self._wanted)
        return StatusListed(
            self._own.role_id, self._own.pid, slices, (), counters, self._watch.listed(now_ms)
        )

    # ------------------------------------------------------------ wanted and running

    def _on_want(self, message: DesiredSlices, now_ms: float) -> None:
        if self._is_stopping:
            return
        self._is_told = True
        self._wanted = {spec.slice_id: spec for spec in message.slices}
        self._reports.compare(self._wanted)
        self._workers.want(self._wanted)
        self._sum_shares()
        for worker in self._workers:
            self._drop_unwanted(worker, now_ms)
        self._start_missing(now_ms)

    def _drop_unwanted(self, worker: Worker, now_ms: float) -> None:
        changed = [slice_id for slice_id, spec in worker.slices.items() if self._wanted.get(slice_id) != spec]
        for slice_id in changed:
            former, wanted = worker.slices.pop(slice_id), self._wanted.get(slice_id)
            kept = [] if wanted is None else [one.model_id for one in wanted.models if one in former.models]
            if worker.loading.get(slice_id) not in kept:
                worker.loading.pop(slice_id, None)  # it is called off
            if wanted is None:
                continue
            if former.is_same_but_models(wanted):
                worker.slices[slice_id] = wanted
            else:
                self._reports.report(slice_id, SliceState.STOPPED, "its specification changed")
        if changed and worker.slices:
            self._workers.tell_what_to_host(worker)
            self._settle(worker, now_ms)
        self._workers.end_if_unwanted(worker, now_ms)

    def _settle(self, worker: Worker, now_ms: float) -> None:
        """Once everything is loaded that it should still host, it has time for ever, and is asked for signs of life."""
        self._workers.settle(worker, now_ms)
        if worker.state is WorkerState.SERVING:
            assert worker.peer is not None, "it has said hello"
            self._liveness.watch(worker.peer, now_ms)

    def _start_missing(self, now_ms: float) -> None:
        """Start what is wanted and neither running, nor given up, nor waiting for its old process to end."""
        taken = self._workers.taken | self._reports.given_up
        missing = []
        for slice_id, spec in self._wanted.items():
            if slice_id in taken:
                continue
            problem = problem_of(spec, self._node_id, self._gpus)
            if problem:
                self._reports.refuse(spec, problem)
            elif self._daemons.is_held(spec.gpu):
                self._reports.report(
                    slice_id, SliceState.STARTING, f"waits for the MPS daemon of gpu {spec.gpu}"
                )
            else:
                missing.append(spec)
        for group in by_process(missing):
            self._workers.start(group, now_ms)

    def _sum_shares(self) -> None:
        """More than a whole GPU is allowed, as neighbours are seldom busy at once; but it is said."""
        for gpu, percent in shares_percent(self._wanted.values(), self._gpus).items():
            # A hundredth for shares such as a third, thrice.
            text = f"the shares of its slices add up to {percent:g} %" if percent > 100.01 else ""
            if self._daemons.remark(gpu, text) and text:
                self._actions.append(Warn(f"shares_over_100 gpu={gpu} sum_percent={percent:g}"))

    # ------------------------------------------------------------ MPS

    def _on_daemon_checked(self, checked: DaemonChecked, now_ms: float) -> None:
        if self._daemons.checked(checked, now_ms):
            self._on_daemons_changed([checked.gpu], now_ms)

    def _on_daemons_changed(self, gpus: Iterable[int], now_ms: float) -> None:
        for gpu in gpus:
            is_mps = self._daemons.is_mps(gpu)
            reason = "its GPU is shared through MPS now" if is_mps else self._daemons.why_not(gpu)
            self._workers.uproot(gpu, reason, now_ms, are_clients=not is_mps)
        self._start_missing(now_ms)
        self._watch.tell()

    # ------------------------------------------------------------ the workers' side

    def _on_worker(self, peer: PeerId, message: AnyMessage, now_ms: float) -> None:
        self._liveness.heard(peer, now_ms)
        match message:
            case Pong():
                pass
            case WorkerHello():
                self._on_greeting(peer, message, now_ms)
            case StatusAsked():
                self._on_status_asked(peer, now_ms)
            case StatusListed(pid=pid, counters=counters):
                self._inquiries.heard(self._worker_at(peer).worker_id, {**counters, "pid": float(pid)})
            case SliceReady() | SliceFailed():
                worker = self._worker_at(peer)
                if worker.is_ending:
                    return
                if message.slice_id in worker.slices:  # else it is no longer wanted
                    self._on_news(worker, message, now_ms)
                self._settle(worker, now_ms)
            case Loading(slice_id, model_id):
                self._workers.loads(self._worker_at(peer), slice_id, model_id, now_ms)
            case _:
                raise AssertionError("checked before")

    def _worker_at(self, peer: PeerId) -> Worker:
        worker = self._workers.at(peer)
        assert worker is not None, "checked before"
        return worker

    def _on_greeting(self, peer: PeerId, hello: WorkerHello, now_ms: float) -> None:
        orphan = self._orphans.waited_for.get(hello.worker_id)
        worker = self._workers.named(hello.worker_id)
        if orphan is not None:
            self._on_orphan(peer, orphan, hello, now_ms)
        elif worker is not None:
            self._workers.greet(worker, peer, hello.incarnation, hello.pid, now_ms)
        else:
            self._send_away(peer)

    def _send_away(self, peer: PeerId) -> None:
        """Nobody's child: of no use to anyone."""
        self.counters["workers_sent_away"] += 1
        self._actions.append(Send(peer, Stop(0.0)))

    def _on_orphan(self, peer: PeerId, orphan: Orphan, hello: WorkerHello, now_ms: float) -> None:
        taken = self._workers.taken
        slices = [spec for spec in hello.slices if spec.slice_id not in taken]
        if not slices or not all(
            spec.following or self._daemons.may_stay(spec.gpu, is_mps=orphan.is_mps) for spec in slices
        ):
            self._orphans.send_away(orphan.worker_id, now_ms)
        else:
            self._orphans.adopted(orphan.worker_id)
            self.counters["workers_adopted"] += 1
            self._workers.adopt(orphan, slices, peer, now_ms)
        self._settle_orphans(now_ms)

    def _settle_orphans(self, now_ms: float) -> None:
        if self._orphans.settle() and not self._is_stopping:
            self._greet_all(now_ms)

    def _on_news(self, worker: Worker, message: SliceReady | SliceFailed, now_ms: float) -> None:
        slice_id, incarnation = message.slice_id, message.incarnation
        match message:
            case SliceReady() if worker.state is WorkerState.WAITING or self._is_stopping:
                pass  # the news of its end was quicker; or ours, and the slice drains
            case SliceReady():
                worker.loading.pop(slice_id, None)
                self._reports.report(slice_id, SliceState.READY, incarnation=incarnation)
                if worker.is_mps:
                    self._daemons.joined(worker.slices[slice_id].gpu, now_ms)
            case SliceFailed(is_unloadable=False):
                self._workers.broke(worker, message, now_ms)
            case SliceFailed(reason=reason):
                worker.loading.pop(slice_id, None)
                spec = worker.slices.pop(slice_id)
                if self._is_stopping:
                    self._reports.refuse(spec, reason, incarnation)
                else:
                    self._reports.give_up(spec, reason, now_ms, incarnation)
                if worker.slices:  # else a new process and this one would both host it
                    self._workers.tell_what_to_host(worker)
                self._workers.end_if_unwanted(worker, now_ms)

    def _on_exit(self, name: str, code: int, last_words: str, now_ms: float) -> None:
        gpu = self._daemons.gpu_of(name)
        if gpu is not None:
            self.counters["daemons_exited"] += 1
            said = " | ".join(last_words.strip().splitlines()[-2:])
            self._daemons.exited(gpu, code, said, now_ms)
            self._on_daemons_changed([gpu], now_ms)
            return
        if self._orphans.exited(name):
            self._settle_orphans(now_ms)
            return
        worker = self._workers.named(name)
        assert worker is not None, "only our own processes are watched"
        self.counters["workers_exited"] += 1
        if self._is_stopping:
            worker.slices.clear()
            for slice_id in worker.holding:
                self._reports.report(slice_id, SliceState.STOPPED, STOPS)
        self._workers.exited(worker, code, last_words, now_ms)
        self._start_missing(
            now_ms
        )  # what waited for its end: a process may have held more than is left to it

    # ------------------------------------------------------------ time, and the end

    def _on_tick(self, now_ms: float) -> None:
        down = self._daemons.tick(now_ms)
        if down:
            self._on_daemons_changed(down, now_ms)
        self._watch.tick(now_ms)
        self._workers.tick(now_ms)
        if self._reports.try_again(now_ms):
            self._start_missing(now_ms)
        self._look_for_silence(now_ms)
        if self._unready_until_ms is not None and self._unready_until_ms <= now_ms:
            self._unready_until_ms = None
            for worker in self._workers:
                self._end_worker(worker, now_ms)
        if self._lease.tick(now_ms):
            self._tell_schedulers(now_ms)
        self._orphans.tick(now_ms)
        self._settle_orphans(now_ms)
        if self._hello_at_ms is not None and self._hello_at_ms <= now_ms:
            self._hello(now_ms)

    def _look_for_silence(self, now_ms: float) -> None:
        if self._liveness.wake_at_ms is None or self._liveness.wake_at_ms > now_ms:
            return
        for peer, ping in self._liveness.due(now_ms):
            worker = self._workers.at(peer)
            if worker is None or worker.state is not WorkerState.SERVING:
                self._liveness.forget(peer)
            else:
                self._actions.append(Send(peer, ping))
        for peer in self._liveness.lost(now_ms):
            worker = self._workers.at(peer)
            if worker is not None and worker.state is WorkerState.SERVING:
                self.counters["workers_silent"] += 1
                self._workers.silent(worker, self._limits.silence_ms, now_ms)

    def _on_stop(self, now_ms: float) -> None:
        self._is_stopping = True
        self._orphans.send_all_away(now_ms)
        self._orphans.settle()
        self._wanted.clear()
        serving = self._reports.drain(STOPS)
        for worker in self._workers:
            if not serving.intersection(worker.slices):
                self._end_worker(worker, now_ms)
        if serving:
            self._unready_until_ms = now_ms + self._limits.unready_ms

    def _end_worker(self, worker: Worker, now_ms: float) -> None:
        worker.slices.clear()
        self._workers.end_if_unwanted(worker, now_ms)
