"""The scheduler as a process: one ROUTER, one core, one thread."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from fabric.curve import CONTROL_KINDS, guarded
from fabric.errors import LocalProtocolError
from fabric.ids import PeerId, peer_id, scheduler_id
from fabric.inproc import HubLink
from fabric.keys import SCHEDULER as KEY_OF_SCHEDULERS
from fabric.keys import Keyring
from fabric.link import NO_EPOCH
from fabric.messages import (
    AnyMessage,
    BatchesRemembered,
    Changed,
    DesiredSlices,
    Directory,
    PlanAsked,
    PlanCopy,
    RehearsalAsked,
    SchedulerHello,
    StatusListed,
    TakeOver,
)
from fabric.outbox import Outbox
from roles.runtime.core import PLANNER, REHEARSER, SCHEDULER, Send
from roles.runtime.defects import DefectReport
from roles.runtime.environment import RunDir
from roles.runtime.journal import Journal, MessageCore, Recorded, kept_aside, require_journal
from roles.runtime.loop.driver import Role, run_roles
from roles.runtime.loop.local_scheduler import LocalScheduler
from roles.runtime.loop.remote_scheduler import RemoteScheduler
from roles.runtime.loop.sources import Source, TranslatedSource, WatchedLinkSource
from roles.runtime.metrics.common import about_process, about_role, other_events, page_server
from roles.runtime.metrics.snapshot import SnapshotAsked
from roles.runtime.process import RunFile, StopSignal, log, log_offences, remove_run_file, write_run_file
from roles.runtime.process_events import StopAsked
from roles.scheduler.availability.election import Electorate, EpochTaken, LeaseLapsed
from roles.scheduler.availability.replica import (
    CopyPlan,
    KeepPlan,
    PrepareCore,
    ReplicaAction,
    ReplicaEvent,
    ReplicaSettings,
    SchedulerReplica,
    turned_away,
)
from roles.scheduler.build import Prepared, begun_anew, scheduler_core
from roles.scheduler.core import SchedulerCore
from roles.scheduler.metrics import measured_standing
from roles.scheduler.planning.desired_state import ControllerSettings
from roles.scheduler.planning.plan_launcher import plan_limit_s
from roles.scheduler.planning.saved_plan import SavedPlan
from roles.scheduler.planning.start_config import Written
from roles.scheduler.replay_start import about_scheduler
from roles.scheduler.settings import SchedulerSettings
from roles.scheduler.surroundings import (
    HERE_ALONE,
    Recording,
    SchedulerAddresses,
    SchedulerSurroundings,
    configured_addresses,
)


class SchedulerShell:
    """Does what the core decides, with the links of one scheduler; `number`: which of the cluster's.

    It serves at the run directory's ipc address, at `listen.control` and at `addresses.control`, until it has left as `stop` told it to.
    Raises ConfigError for a plan that cannot be, an address in use, or a journal that may not be written.
    """

    def __init__(
        self,
        written: Written,
        run_dir: Path,
        recording: Recording | None = None,
        addresses: SchedulerAddresses = HERE_ALONE,
        number: int = 0,
        surroundings: SchedulerSurroundings | None = None,
        stop: Source[StopAsked] | None = None,
    ) -> None:
        if recording is not None:
            require_journal(recording.path)
        self._surroundings = own = surroundings or SchedulerSurroundings()
        places = written.config.places
        shard = places.schedulers[number].shard
        peers = places.schedulers_of(shard)
        role_ids = tuple(map(scheduler_id, peers))
        rank = peers.index(number)
        self._run_dir = run_dir
        shards = written.config.shards
        whole, written = written, written.of_shard(shard)
        self._written = written
        self._config = config = written.config
        self._recording = recording
        self._role_id = role_id = scheduler_id(number)
        self._clock = clock = own.clock
        electorate = Electorate(frozenset(node.node_id for node in config.nodes), len(peers), role_ids)
        # Roles that hosts keep alive one by one: what serves goes on when the file changes. Else all begin together.
        is_placed = bool(addresses.control)
        self._kept = SavedPlan(
            run_dir,
            role_id,
            written.document,
            partial(written.carried_over, whole) if is_placed else None,
            role_ids,
            own.write_file,
        )
        # One that stands by waits for a copy of the plan: it may take long to make, and not every policy makes it twice.
        self._first = self._kept.read() or (None if rank else written.first_plan())
        self._first_epoch = self._kept.epoch_read
        self._settled: PlanCopy | None = None
        """The plan that the core settled last; at first, that it began with. Its epoch is the present one only in `_copy`."""
        self._core: SchedulerCore | None = None
        """The active scheduler's."""
        self._made: SchedulerCore | None = None
        """The core that was made last."""
        self._prepared: Prepared | None = None
        """Of the plan that was kept last."""
        self._answers: list[tuple[PeerId, Changed]] = []
        """Of this turn, to operators."""
        self._journal: Journal | None = None
        keys = config.security.keys
        keyring = None if keys is None else Keyring.of_folder(keys, KEY_OF_SCHEDULERS)
        router = own.transport.bind_peers(
            [
                RunDir(run_dir).ipc_address(f"{role_id}.control"),
                *addresses.control,
                *configured_addresses(config, number),
            ],
            guard=guarded(keyring, CONTROL_KINDS),
        )
        self.link = HubLink(router, SCHEDULER, clock)
        own_peer = peer_id(role_id, own.incarnation)
        elsewhere, beats = addresses.elsewhere, config.heartbeats
        self._others: dict[PeerId, LocalScheduler | RemoteScheduler] = {
            PeerId(other): RemoteScheduler(
                own_peer, elsewhere[other], clock, keyring, other, beats, own.transport
            )
            if other in elsewhere
            else LocalScheduler(own_peer, run_dir, clock, keyring, other, beats, own.transport)
            for other in role_ids
            if other != role_id
        }
        self._outbox = Outbox(self.link, self._refused)
        self._planner = own.make_planner(plan_limit_s(config.placement))
        self._rehearser = own.make_rehearser()
        # Recorded only once the address is ours: another scheduler that has it may be writing that very file.
        self._replica = SchedulerReplica(
            ReplicaSettings(own.incarnation, electorate, rank, os.getpid(), shard, shards, self._first_epoch),
            self._make_core,
        )
        self._core = self._made  # without a standby one is there from the start
        page = addresses.metrics
        self._metrics = page_server(page, role_id, clock)
        asked: list[Source[ReplicaEvent]] = (
            [] if self._metrics is None else [TranslatedSource(self._metrics.asked, self._show)]
        )
        self._heard = WatchedLinkSource(self.link, clock, config.heartbeats)
        self.role = Role[ReplicaEvent, ReplicaAction](
            self._replica,
            [
                self._heard,
                self._planner,
                self._rehearser,
                *self._others.values(),
                *asked,
                *(() if stop is None else (stop,)),
            ],
            self._perform,
            self._end_turn,
        )
        journal = None if recording is None else kept_aside(recording.path)
        self.on_defect = DefectReport(role_id, run_dir, journal, self._keep_journal)
        found = {"control": list(self.link.addresses)}
        if self._metrics is not None:
            found["metrics"] = [self._metrics.address]
        self._run_file = RunFile(role_id, os.getpid(), own.incarnation, found)

    def announce(self) -> None:
        """Say where it is, and what has no place."""
        write_run_file(self._run_dir, self._run_file)
        log.info("scheduler_serving address=%s stands_by=%s", self.link.addresses[0], self._core is None)

    @property
    def has_left(self) -> bool:
        """Whether it was asked to stop, and may."""
        return self._replica.has_left

    def close(self) -> None:
        """Give everything back."""
        remove_run_file(self._run_dir, self._run_file)
        if self._metrics is not None:
            self._metrics.close()
        self._planner.close()
        self._rehearser.close()
        self._close_journal()
        for other in self._others.values():
            other.close()
        self.link.close()

    def _prepare(self) -> Prepared:
        """A core of the newest plan that is known here. Where none is, one is made, once: that may take longer than a lease lasts."""
        kept = self._kept.state  # before it is read: what is written meanwhile is newer
        if (read := self._kept.read()) is not None:
            self._first, self._first_epoch = read, self._kept.epoch_read
        settings, planning = self._first = self._first or self._written.first_plan()
        settled = self._copy_of(settings, planning, 0)
        settings = begun_anew(settings, self._role_id, self._surroundings.first_batch_id())
        core = scheduler_core(settings, self._config.batching, planning)
        return Prepared(core, settings, planning, settled, kept)

    def _make_core(self) -> MessageCore:
        """A fresh one, of the newest plan."""
        prepared = self._prepared
        if prepared is None or prepared.kept != self._kept.state:
            prepared = self._prepare()
        core, settings, planning, self._settled, _ = prepared
        self._made, self._prepared = core, None
        log.info("plan_begins models=%d slices=%d", len(settings.models), len(settings.slices))
        for model_id, reason in settings.unplaced.items():
            log.warning("model_unplaced model=%s reason=%r", model_id, reason)
        if self._recording is None:
            return core
        about = about_scheduler(settings, self._config.batching, planning)
        self._journal = Journal(self._recording.path, about, self._recording.bytes_max)
        return Recorded(core, self._journal)

    def _perform(self, action: ReplicaAction) -> None:
        match action:
            case Send(peer, message):
                self._send(peer, message)
            case CopyPlan(peers):
                self._send_copy(peers, self._copy())
            case KeepPlan(copy):
                self._prepared = None
                self._kept.keep(copy)
            case PrepareCore():
                self._flush_settled()  # what follows may take long
                try:
                    self._prepared = self._prepare()
                    self._replica.prepared(self._first_epoch)
                # Whatever it is, it is no reason to stand by no more: a take-over tries again.
                except Exception as error:  # noqa: BLE001
                    log.error("plan_not_prepared error=%r", error)
            case EpochTaken(epoch):
                self._flush_settled()  # what was decided before has the epoch of then
                self.link.epoch = epoch
                self._core = self._made
                log.info("scheduler_active epoch=%d", epoch)
            case LeaseLapsed(is_handed_over):
                self._flush_settled(is_active=False)  # it is on its way before anything else here takes long
                if is_handed_over:
                    log.info("scheduler_handed_over epoch=%d", self.link.epoch)
                else:
                    log.warning("scheduler_stands_by epoch=%d: its lease has lapsed", self.link.epoch)
                self._core = self._made = None
                self._planner.abandon()
                self._rehearser.abandon()
                self._close_journal()

    def _send(self, peer: PeerId, message: AnyMessage) -> None:
        if peer == PLANNER:
            assert isinstance(message, PlanAsked), "nothing else goes there"
            self._planner.start(message)
            return
        if peer == REHEARSER:
            assert isinstance(message, RehearsalAsked), "nothing else goes there"
            self._rehearser.start(message)
            return
        if peer in self._others:
            self._others[peer].send(message)
            return
        if isinstance(message, Changed):
            self._answers.append((peer, message))
            return
        if isinstance(message, StatusListed):
            message = replace(message, counters={**message.counters, **self.link.counters, **self._lost()})
            message = self.role.stats.told_in(message)
        if isinstance(message, BatchesRemembered):
            message = self._with_plan(message)
        self._outbox.put(peer, message)

    def _show(self, asked: SnapshotAsked) -> None:
        """Somebody wants its page of metrics."""
        del asked
        assert self._metrics is not None, "it asked"
        core = self._core
        measured = () if core is None else core.measured()
        offences = self._replica.offences.counters
        counted = offences if core is None else offences + core.offences.counters
        self._metrics.publish(
            [
                about_role("scheduler"),
                *about_process(self.role.stats),
                *measured_standing(self._replica.standing()),
                *measured,
                *other_events({**counted, **self.link.counters, **self._lost()}),
            ]
        )

    def _with_plan(self, remembered: BatchesRemembered) -> BatchesRemembered:
        """With the newest batches goes the present plan, for whoever wants to play it in a simulator."""
        core = self._core
        assert core is not None, "it answered"
        assert core.controller is not None, "it was made with one"
        is_older = remembered.batches and remembered.batches[0].number != core.batches_ended
        if remembered.after or is_older:
            return remembered
        about = about_scheduler(core.settings(), self._config.batching, core.controller.settings_played())
        return (
            remembered if self._kept.log_if_too_large(about) else replace(remembered, document=about.decode())
        )

    def _copy(self) -> PlanCopy:
        """The plan that was settled last: while it is changed, the one before."""
        assert self._settled is not None, "it is active"
        return replace(self._settled, epoch=self._replica.epoch)

    def _copy_of(self, settings: SchedulerSettings, planning: ControllerSettings, number: int) -> PlanCopy:
        about = about_scheduler(settings, self._config.batching, planning)
        return PlanCopy(NO_EPOCH, number, self._kept.digest, about.decode())

    def _send_copy(self, peers: Sequence[PeerId], copy: PlanCopy) -> None:
        if self._kept.log_if_too_large(copy.document):
            self._replica.not_copied(peers)
            return
        for peer in peers:
            self._send(peer, copy)

    def _close_journal(self) -> None:
        if self._journal is not None:
            self._journal.close()

    def _keep_journal(self) -> None:
        """Whoever starts next with the same options begins a journal of that name."""
        self._close_journal()
        if self._journal is not None:
            self._journal.set_aside()

    def _lost(self) -> dict[str, float]:
        """What a full disk cost."""
        lost = {"plan_writes_failed": float(self._kept.failures)}
        if self._journal is not None:
            lost["journal_events_lost"] = float(self._journal.events_lost)
        return lost

    def _refused(self, peer: PeerId, message: AnyMessage) -> None:
        """The peer is gone (the link will say so) or has not read for a long time.

        A frontend's requests end by their own deadline timers then, a worker's batch by `latest`. What the cluster is, and which
        slices an agent should have, nobody tells them again.
        """
        if isinstance(message, Directory | DesiredSlices):
            self._heard.give_up(peer)
        elif isinstance(message, PlanCopy | SchedulerHello | TakeOver):
            self._replica.refused(peer, message, self._clock.now_ms())

    def _end_turn(self) -> None:
        log_offences(self._replica.offences)
        self._flush_settled()
        core = self._core
        if core is not None:
            log_offences(core.offences)
            assert core.controller is not None, "it was made with one"
            while core.controller.unlogged:
                log.info("placement %s", core.controller.unlogged.popleft())
            self._keep_plan()  # what it began with, or with a higher epoch: nobody waits for that, and agents wait for their epoch
            self._outbox.flush()

    def _flush_settled(self, *, is_active: bool = True) -> None:
        """Send what was decided. A plan is kept and copied before anybody hears that it is settled.

        Where the lease has lapsed meanwhile the next one may be active already, with a plan in which no change of this turn is.
        """
        controller = None if self._core is None else self._core.controller
        if controller is not None and (self._settled is None or controller.settled != self._settled.number):
            plan = controller.settled_plan()
            self._settled = self._copy_of(plan.settings, plan.planning, plan.number)
            self._keep_plan()
        answers, self._answers = self._answers, []
        for peer, answer in answers:
            is_in_doubt = answer.status in ("ok", "partial") and not (
                is_active and self._clock.now_ms() < self._replica.lapses_at_ms
            )
            told = turned_away(self._role_id, answer.request_no) if is_in_doubt else answer
            try:
                self._outbox.put(peer, told)
            except LocalProtocolError as error:  # such as more models without a place than a header holds
                self.role.note_unsendable(str(error))
        self._outbox.flush()

    def _keep_plan(self) -> None:
        assert self._settled is not None, "it is active"
        epoch = self._replica.epoch  # until one is granted another plan would count for more
        if epoch != NO_EPOCH and self._kept.is_due(epoch, self._settled.number, self._clock):
            copy = self._copy()  # not before: this is asked in every turn
            self._kept.write(copy, self._clock.now_ms())
            self._send_copy(self._replica.plan_changed(), copy)


def run_scheduler(
    written: Written,
    run_dir: Path,
    stop: StopSignal,
    recording: Recording | None = None,
    addresses: SchedulerAddresses = HERE_ALONE,
    number: int = 0,
) -> None:
    """Serve until told to stop, and another one goes on if one stands by; see `SchedulerShell`."""
    shell = SchedulerShell(written, run_dir, recording, addresses, number, stop=stop)
    try:
        shell.announce()
        run_roles([shell.role], lambda: shell.has_left, shell.on_defect.end)
    finally:
        shell.close()
