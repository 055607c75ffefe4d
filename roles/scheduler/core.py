"""The scheduler's decisions: metadata in, grants and batches out. It never sees a payload.

It translates between messages and a batching discipline (`policies/batching`), which owns the queues and says
what runs where and when. Here is who comes and goes: requests, frontends, nodes and slices. What is in flight is
kept in `batches`, what is known of the cluster in `fleet`, what measured times teach in `estimates`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, get_args

from msgspec.structs import replace

from fabric.ids import FrontendId, PeerId, SliceId
from fabric.messages import (
    Arrivals,
    Done,
    Dropped,
    EpochGranted,
    FrontendHello,
    Left,
    ModelSpec,
    NodeHello,
    Ping,
    PlanChange,
    PlanMade,
    Pong,
    RecordsAsked,
    RehearsalMade,
    ReplicaHint,
    SectionAsked,
    SeqRun,
    SliceChanged,
    SliceReady,
    SliceState,
    SliceStatus,
    StatusAsked,
    StatusListed,
    Telemetry,
    Withdraw,
)
from policies.batching.base import NEVER_MS, QUIET, Discipline, RequestRun
from policies.batching.rehearsing.question import Rehearses
from roles.runtime.core import REHEARSER, Heard, Lost, Send, Tick
from roles.runtime.metrics.snapshot import Measured
from roles.runtime.peer_checks import CUT_OFF_REASON, Offences, Verdict
from roles.scheduler.counters import Counters
from roles.scheduler.directory_updates import DirectoryUpdates
from roles.scheduler.dispatch.batches import Batches
from roles.scheduler.dispatch.estimates import Estimates
from roles.scheduler.dispatch.lateness_guard import LatenessGuard
from roles.scheduler.dispatch.run_time_watch import RunTimeWatch
from roles.scheduler.fleet import Fleet, SliceRecord
from roles.scheduler.measured_rates import MeasuredRates
from roles.scheduler.metrics import measured_batches
from roles.scheduler.model_warnings import model_warnings
from roles.scheduler.peer_checks import SchedulerPeerChecks
from roles.scheduler.planning.actuator import Actuator
from roles.scheduler.planning.controller import Controller
from roles.scheduler.planning.desired_state import ControllerSettings
from roles.scheduler.planning.slice_names import SliceNames
from roles.scheduler.rehearsing.make_rehearsal import asked_of, rehearsed_of
from roles.scheduler.settings import BATCH_SIZE_UNPROFILED, SchedulerSettings

Event = Heard | Lost | Tick
_NOTHING: Sequence[Send] = ()


class SchedulerCore:
    """One active scheduler. Events: `Heard` (messages of frontends, agents, workers), `Lost`, `Tick`.

    With `planning` the placement follows what happens (`controller`); without, it is what it was at the start.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        discipline: Discipline,
        planning: ControllerSettings | None = None,
    ) -> None:
        self.wake_at_ms: float | None = None
        """The discipline's next moment, the next directory, a `Done` that should have come, or the controller's."""
        self._settings = settings
        self._discipline = discipline
        self._arrive = discipline.arrive
        self._rehearsing = discipline if isinstance(discipline, Rehearses) else None
        nodes = None if planning is None else {gpu.node_id for gpu in planning.desired.gpus}
        slos_ms = {model.model_id: model.slo_ms for model in settings.models}
        names = None if planning is None else SliceNames(planning.desired.gpus, settings.slices)
        terms = {model.model_id: model.term for model in settings.models}
        heads = {model.model_id: model.heads for model in settings.models if model.heads}
        self._fleet = Fleet(_records(settings, planning, names), slos_ms, nodes or (), terms, heads)
        self._replicas = self._fleet.replicas
        self._listed = self._fleet.frontend_ids
        self._estimates = Estimates(settings)
        self._updates = DirectoryUpdates(self._fleet)
        run_time_watch = None if planning is None else RunTimeWatch()
        self._batches = Batches(
            discipline, self._fleet, self._estimates, self._updates, run_time_watch, settings.first_batch_id
        )
        self._withdrawals = self._batches.withdrawals
        self._counters = self._batches.counters
        self._checks = SchedulerPeerChecks(self._fleet, self._batches, nodes)
        self.offences: Offences = self._checks.offences
        """Of its peers."""
        self._guard = LatenessGuard(settings.guard_ms)
        self._counters.guard_ms = settings.guard_ms
        discipline.set_guard_ms(settings.guard_ms)
        for model_id in self._replicas:
            discipline.add_model(self._estimates.model(model_id), 0.0)
        self._on: dict[type, Callable[[PeerId, Any, float, float], Sequence[Send]]] = {
            Done: self._batches.done,
            Withdraw: self._on_withdraw,
            Left: self._on_left,
            FrontendHello: self._on_frontend_hello,
            NodeHello: self._on_node_hello,
            SliceReady: self._on_slice_ready,
            SliceChanged: self._on_slice_changed,
            Telemetry: self._on_telemetry,
            Ping: self._on_ping,
            Pong: self._on_pong,
            StatusAsked: self._on_status_asked,
            RecordsAsked: self._on_records_asked,
            RehearsalMade: self._on_rehearsal_made,
            EpochGranted: self._on_epoch_granted,
        }
        self.controller: Controller | None = None
        if planning is not None and names is not None and run_time_watch is not None:
            self._actuator = Actuator(
                self._fleet, self._batches, self._estimates, self._updates, discipline, run_time_watch
            )
            loads = MeasuredRates(self._batches.tallies)
            self.controller = Controller(
                planning,
                self._fleet,
                self._estimates,
                self._actuator,
                loads,
                run_time_watch,
                names,
                self.settings,
            )
            self._on |= dict.fromkeys(get_args(PlanChange), self._on_change)
            self._on[PlanMade] = self._on_plan_made
            self._on[SectionAsked] = self._on_section_asked
        self._look_ahead()

    @property
    def counters(self) -> Counters:
        """What has happened so far."""
        return self._counters

    def measured(self) -> Iterator[Measured]:
        """Its figures, for a page of metrics."""
        plan = None if self.controller is None else self.controller.report()
        return measured_batches(self._fleet, self._batches, plan)

    @property
    def batches_ended(self) -> int:
        """The number of the newest batch that it remembers."""
        return self._batches.recorder.number

    def settings(self) -> SchedulerSettings:
        """What a scheduler would start with that goes on from here."""
        fleet, started = self._fleet, self._settings
        return replace(
            started,
            models=tuple(
                ModelSpec(
                    model_id,
                    fleet.slo_ms(model_id),
                    BATCH_SIZE_UNPROFILED,
                    term=fleet.terms.get(model_id, 0),
                    heads=fleet.heads(model_id),
                )
                for model_id in self._replicas
            ),
            slices=tuple((record.node_id, record.spec) for record in fleet.slices.values()),
            priorities=dict(self._estimates.priorities),
            hints={
                (slice_id, model_id): target
                for slice_id, record in fleet.slices.items()
                for model_id, target in record.targets.items()
            },
            unplaced={},
        )

    def handle(self, event: Event, now_ms: float) -> Sequence[Send]:
        """Take one event; see `roles.runtime.core.Core`."""
        if type(event) is Heard:
            message, peer = event.message, event.peer
            # Nearly all there is, so it is written out here. One who is listed may send it, always.
            if type(message) is Arrivals and peer in self._listed:
                model_id = message.model_id
                count = message.count
                self._counters.requests_announced += count
                if not self._replicas.get(model_id):
                    return self._unserved(peer, message, event.late_ms, now_ms)
                sent_at_ms = now_ms - event.late_ms
                ready_in_ms = message.ready_in_ms
                run = RequestRun(
                    peer,  # type: ignore[arg-type]  # calling `FrontendId` costs 1 % of a request
                    message.first_seq,
                    count,
                    sent_at_ms + message.budget_ms,
                    now_ms,
                    message.span_ms,
                    sent_at_ms + ready_in_ms if ready_in_ms else 0.0,
                    message.slack_ms,
                    message.priority,
                )
                decisions = self._arrive(model_id, run, now_ms)
                if decisions is QUIET:
                    return _NOTHING
                actions: Sequence[Send] = (
                    self._batches.carry_out(decisions, now_ms) if decisions else _NOTHING
                )
            else:
                self._fleet.now_ms = now_ms
                verdict = self._checks.check(peer, message, now_ms)
                if verdict is None:
                    actions = self._on[type(message)](peer, message, event.late_ms, now_ms)
                else:
                    actions = self._not_heard(peer, verdict, now_ms)
        elif type(event) is Tick:
            self._fleet.now_ms = now_ms
            actions = self._on_tick(now_ms)
        else:
            assert isinstance(event, Lost)
            self._fleet.now_ms = now_ms
            actions = self._on_lost(event.peer, event.reason, now_ms)
        self._look_ahead()
        return actions

    def _look_ahead(self) -> None:
        at_ms = self._batches.overdue_at_ms
        wake_at_ms = self._discipline.wake_at_ms
        if wake_at_ms is not None and wake_at_ms < at_ms:
            at_ms = wake_at_ms
        if self._updates.due_at_ms < at_ms:
            at_ms = self._updates.due_at_ms
        if self._batches.unserved.due_at_ms < at_ms:
            at_ms = self._batches.unserved.due_at_ms
        if self._batches.untried.due_at_ms < at_ms:
            at_ms = self._batches.untried.due_at_ms
        if self._withdrawals.due_at_ms < at_ms:
            at_ms = self._withdrawals.due_at_ms
        if self.controller is not None and self.controller.due_at_ms < at_ms:
            at_ms = self.controller.due_at_ms
        self.wake_at_ms = None if at_ms == NEVER_MS else at_ms

    def _not_heard(self, peer: PeerId, verdict: Verdict, now_ms: float) -> Sequence[Send]:
        match verdict:
            case Verdict.CUT_OFF:
                return self._on_lost(peer, CUT_OFF_REASON, now_ms)
            case Verdict.UNLISTED:
                return [Send(peer, self._fleet.directory())]
            case _:
                return _NOTHING

    # ------------------------------------------------------------ requests

    def _unserved(self, peer: PeerId, message: Arrivals, late_ms: float, now_ms: float) -> Sequence[Send]:
        model_id = message.model_id
        if model_id not in self._replicas:
            runs = (SeqRun(message.first_seq, message.count),)
            return [Send(peer, Dropped(model_id, runs, "ModelNotFound", f"no model named {model_id}"))]
        deadline_at_ms = now_ms - late_ms + message.budget_ms
        run = RequestRun(
            FrontendId(peer),
            message.first_seq,
            message.count,
            deadline_at_ms,
            now_ms,
            message.span_ms,
            now_ms - late_ms + message.ready_in_ms,
            message.slack_ms,
            message.priority,
        )
        actions = self._batches.arrive_unserved(model_id, run, now_ms)
        self._look_ahead()
        return actions

    def _on_withdraw(self, peer: PeerId, message: Withdraw, late_ms: float, now_ms: float) -> Sequence[Send]:
        del late_ms
        if message.model_id in self._replicas:
            self._withdrawals.take(peer, message, now_ms)
        return _NOTHING

    def _on_left(self, peer: PeerId, message: Left, late_ms: float, now_ms: float) -> Sequence[Send]:
        del late_ms
        self._fleet.frontend_left(peer, message)
        if self.controller is not None:
            self.controller.frontend_left(now_ms)
            return self._actuator.take(now_ms)
        return _NOTHING

    def _on_tick(self, now_ms: float) -> Sequence[Send]:
        actions: list[Send] = []
        if self._withdrawals.due_at_ms <= now_ms:
            self._withdrawals.look(now_ms)
        wake_at_ms = self._discipline.wake_at_ms
        if wake_at_ms is not None and wake_at_ms <= now_ms:
            if self._guard.observe(now_ms - wake_at_ms):
                self._counters.guard_ms = self._guard.guard_ms
                self._discipline.set_guard_ms(self._guard.guard_ms)
            actions = self._batches.carry_out(self._discipline.tick(now_ms), now_ms)
            if self._rehearsing is not None and self._rehearsing.rehearsal_at_ms <= now_ms:
                question = self._rehearsing.rehearsal(now_ms)
                if question is not None:
                    actions.append(Send(REHEARSER, asked_of(question)))
        if self._updates.due_at_ms <= now_ms:
            actions.extend(self._updates.publish())
        if self._batches.unserved.due_at_ms <= now_ms:
            actions.extend(self._batches.give_up_in_vain(now_ms))
        if self._batches.untried.due_at_ms <= now_ms:
            actions.extend(self._batches.forget_untried(now_ms))
        if self._batches.overdue_at_ms <= now_ms:
            actions.extend(self._batches.look_at_overdue(now_ms))
        if self.controller is not None and self.controller.due_at_ms <= now_ms:
            self.controller.tick(now_ms)
            actions.extend(self._actuator.take(now_ms))
        return actions

    def _on_rehearsal_made(
        self, peer: PeerId, message: RehearsalMade, late_ms: float, now_ms: float
    ) -> Sequence[Send]:
        del peer, late_ms
        assert self._rehearsing is not None, "it asked"
        self._counters.rehearsals += 1
        self._counters.rehearsals_failed += bool(message.reason)
        self._rehearsing.rehearsed(rehearsed_of(message), now_ms)
        return _NOTHING

    # ------------------------------------------------------------ the plan

    def _on_change(self, peer: PeerId, message: PlanChange, late_ms: float, now_ms: float) -> Sequence[Send]:
        del late_ms
        assert self.controller is not None, "listed with it"
        self.controller.asked(peer, message, now_ms)
        return self._actuator.take(now_ms)

    def _on_section_asked(
        self, peer: PeerId, message: SectionAsked, late_ms: float, now_ms: float
    ) -> Sequence[Send]:
        del late_ms, now_ms
        assert self.controller is not None, "listed with it"
        return [Send(peer, self.controller.section(message))]

    def _on_plan_made(self, peer: PeerId, message: PlanMade, late_ms: float, now_ms: float) -> Sequence[Send]:
        del peer, late_ms
        assert self.controller is not None, "listed with it"
        self.controller.planned(message, now_ms)
        return self._actuator.take(now_ms)

    def _slices_changed(self, now_ms: float) -> None:
        """A move may go on."""
        if self.controller is not None:
            self.controller.nudge(now_ms)

    # ------------------------------------------------------------ the fleet

    def _on_frontend_hello(
        self, peer: PeerId, message: FrontendHello, late_ms: float, now_ms: float
    ) -> Sequence[Send]:
        del late_ms
        actions: list[Send] = []
        if message.is_linked and peer not in self._listed:
            # It has not noticed that it was given up, with all that it has queued: listed again it never would.
            actions.append(Send(peer, self._fleet.directory()))
        former = self._fleet.frontend_joined(peer, message)
        if former is not None:
            self._batches.forget_frontend(former, now_ms)
        return [*actions, *self._updates.greet(peer, now_ms)]

    def _on_node_hello(
        self, peer: PeerId, message: NodeHello, late_ms: float, now_ms: float
    ) -> Sequence[Send]:
        del late_ms
        self._fleet.node_joined(peer, message)
        alive = {status.slice_id: status for status in message.slices}
        for there in message.slices:
            known = self._fleet.slices.get(there.slice_id)
            if known is None or known.node_id != message.node_id or known.is_ready:
                continue
            self._fleet.slice_will_leave(known, there)
            if there.state == SliceState.READY:
                self._fleet.slice_is_there(known)
                self._updates.note_change(now_ms)
        gone, actions = [], list[Send]()
        for record in self._fleet.slices_on(message.node_id):
            status = alive.get(record.spec.slice_id)
            if status is None or status.incarnation != record.incarnation:
                gone.append(record)
            else:
                actions.extend(self._slice_leaves_or_stays(record, status, now_ms))
        # The hello may be older than what a worker said meanwhile by its own link: that is told, and says it again.
        hosts = dict.fromkeys(record.worker for record in gone if record.worker is not None)
        actions.extend(self._slices_down(gone, SliceState.LOST, "its node agent does not know it", now_ms))
        self._slices_changed(now_ms)
        actions.extend(Send(host, self._fleet.directory()) for host in hosts)
        actions += (Send(peer, desired) for desired in self._fleet.desired_on([message.node_id]).values())
        return actions

    def _on_epoch_granted(
        self, peer: PeerId, message: EpochGranted, late_ms: float, now_ms: float
    ) -> Sequence[Send]:
        """Workers refuse what we send them now, until their agents have granted the epoch too: they say so when that is."""
        del peer, message, late_ms
        ready = [record for record in self._fleet.slices.values() if record.is_ready]
        for record in ready:
            self._fleet.fence(record)
        if not ready:
            return _NOTHING
        self._updates.note_change(now_ms)
        actions = self._batches.withdraw(ready, now_ms)
        hosted = (replica.model_id for record in ready for replica in record.replicas)
        return [*actions, *self._batches.give_up_unserved(hosted, now_ms)]

    def _on_slice_ready(
        self, peer: PeerId, message: SliceReady, late_ms: float, now_ms: float
    ) -> Sequence[Send]:
        del late_ms
        old = self._fleet.slices.get(message.slice_id)
        actions: list[Send] = []
        if old is not None and old.is_ready and old.incarnation != message.incarnation:
            actions.extend(
                self._slices_down([old], SliceState.LOST, "replaced by its next incarnation", now_ms)
            )
        hosted_before = () if old is None else old.replicas
        if old is not None and old.is_ready and old.incarnation == message.incarnation:
            was_late, old.is_late, old.heard_at_ms = old.is_late, False, now_ms
            if was_late and old.takes_batches:
                actions.extend(self._batches.offer(old, now_ms))
        record = self._fleet.slice_ready(peer, message)
        if record is None:
            return [*actions, Send(peer, self._fleet.directory())]
        self._updates.note_change(now_ms)
        actions.extend(self._takes_batches(record, now_ms))
        lost = (replica.model_id for replica in hosted_before)
        actions.extend(self._batches.give_up_unserved(lost, now_ms))
        self._slices_changed(now_ms)
        return actions

    def _on_slice_changed(
        self, peer: PeerId, message: SliceChanged, late_ms: float, now_ms: float
    ) -> Sequence[Send]:
        del peer, late_ms
        record = self._fleet.slices.get(message.status.slice_id)
        status = message.status
        if record is None:
            return _NOTHING
        if record.is_ready and status.incarnation != record.incarnation:
            return _NOTHING  # old news of a former incarnation
        if status.state in (SliceState.FAILED, SliceState.LOST, SliceState.STOPPED):
            self._slices_changed(now_ms)
            actions = self._slices_down([record], SliceState(status.state), status.reason, now_ms)
            if (
                status.state == SliceState.FAILED
                and self.controller is not None
                and self.controller.is_moving
            ):
                # At once: who waits for it waits from now on for what starts again in its place.
                self.controller.tick(now_ms)
                actions.extend(self._actuator.take(now_ms))
            return actions
        if record.is_ready:
            return self._slice_leaves_or_stays(record, status, now_ms)
        self._fleet.slice_will_leave(record, status)
        if status.state == SliceState.STARTING and not status.incarnation:
            self._fleet.slice_starts(record)
            self._updates.note_change(now_ms)
        return _NOTHING  # ready comes from the worker itself

    def _slice_leaves_or_stays(
        self, record: SliceRecord, status: SliceStatus, now_ms: float
    ) -> Sequence[Send]:
        """An agent that stops says that a slice drains; the next one, which has adopted its worker, that it is ready."""
        if status.state == SliceState.DRAINING and not record.is_leaving:
            return self._slice_leaves(record, status.reason, now_ms)
        if status.state == SliceState.READY and record.is_leaving:
            self._fleet.slice_stays(record)
            self._updates.note_change(now_ms)
            return self._takes_batches(record, now_ms)
        return _NOTHING

    def _takes_batches(self, record: SliceRecord, now_ms: float) -> Sequence[Send]:
        if not record.takes_batches:
            return _NOTHING
        return [*self._batches.offer(record, now_ms), *self._batches.served(record, now_ms)]

    def _slice_leaves(self, record: SliceRecord, reason: str, now_ms: float) -> Sequence[Send]:
        """What was granted there still runs, so the directory keeps listing it."""
        self._fleet.slice_leaves(record, reason)
        actions = [*self._updates.publish(), *self._batches.withdraw((record,), now_ms)]
        hosted = (replica.model_id for replica in record.replicas)
        return [*actions, *self._batches.give_up_unserved(hosted, now_ms)]

    def _slices_down(
        self, records: Sequence[SliceRecord], state: SliceState, reason: str, now_ms: float
    ) -> list[Send]:
        """Forget what was in flight there: frontends see in the directory that the slices are gone."""
        gone = [record for record in records if self._fleet.slice_down(record, state, reason)]
        if not gone:
            if self._updates.is_behind:
                self._updates.note_change(now_ms)  # of a start that came to nothing
            return []
        actions = self._updates.publish()
        for record in gone:
            self._batches.lose(record)
        actions.extend(self._batches.withdraw(gone, now_ms))
        lost = (replica.model_id for record in gone for replica in record.replicas)
        actions.extend(self._batches.give_up_unserved(lost, now_ms))
        return actions

    def _on_lost(self, peer: PeerId, reason: str, now_ms: float) -> Sequence[Send]:
        self._checks.forget(peer)
        if self._fleet.frontend_lost(peer) is not None:
            self._batches.forget_frontend(peer, now_ms)
            self._updates.note_change(now_ms)
            return _NOTHING
        gone = self._fleet.slices_of(peer)
        nodes = [node_id for node_id, known in self._fleet.nodes.items() if known == peer]
        agents = [peer] if nodes else []
        for node_id in nodes:
            gone.extend(self._fleet.node_lost(node_id))
        hosts = dict.fromkeys(record.worker for record in gone if record.worker is not None)
        self._slices_changed(now_ms)
        who = "node agent" if nodes else "worker"
        actions = self._slices_down(gone, SliceState.LOST, f"its {who} is gone: {reason}", now_ms)
        # Who was only stopped, or cut off, sees that we gave it up: a worker that its slices are not listed, an
        # agent that it hears of a directory at all. Both introduce themselves again.
        actions.extend(Send(host, self._fleet.directory()) for host in (*hosts, *agents))
        return actions

    def _on_telemetry(
        self, peer: PeerId, message: Telemetry, late_ms: float, now_ms: float
    ) -> Sequence[Send]:
        record = self._fleet.devices.get(message.node_id)
        if record is not None and self._fleet.nodes.get(message.node_id) == peer:
            record.sharing = {one.gpu: one for one in message.sharing}
            record.samples = {sample.gpu: sample for sample in message.samples}
            record.sampled_at_ms = now_ms - late_ms if message.samples else record.sampled_at_ms
        return _NOTHING

    # ------------------------------------------------------------ questions

    def _on_ping(self, peer: PeerId, message: Ping, late_ms: float, now_ms: float) -> Sequence[Send]:
        del late_ms, now_ms
        return [Send(peer, Pong(message.number))]

    def _on_pong(self, peer: PeerId, message: Pong, late_ms: float, now_ms: float) -> Sequence[Send]:
        del peer, message, late_ms, now_ms
        return _NOTHING  # of somebody who is known

    def _on_status_asked(
        self, peer: PeerId, message: StatusAsked, late_ms: float, now_ms: float
    ) -> Sequence[Send]:
        del message, late_ms
        settings = self._settings
        listed = StatusListed(
            settings.role_id,
            settings.pid,
            tuple(self._fleet.reports()),
            self._fleet.models(),
            asdict(self._counters)
            | {"frontends": float(len(self._fleet.frontends))}
            | self.offences.counters,
            self._fleet.gpu_reports(now_ms),
            None if self.controller is None else self.controller.report(),
            warnings=model_warnings(self._fleet.slices.values(), self._fleet.slos_ms),
            queued={str(one): float(self._batches.queued(one)) for one in self._fleet.slos_ms},
        )
        return [Send(peer, listed)]

    def _on_records_asked(
        self, peer: PeerId, message: RecordsAsked, late_ms: float, now_ms: float
    ) -> Sequence[Send]:
        del late_ms
        recorder = self._batches.recorder
        remembered = recorder.remembered(message, now_ms)
        if message.before > recorder.number and not message.after:
            remembered = replace(remembered, absences=self._fleet.absences.listed(now_ms))
        return [Send(peer, remembered)]


def _records(
    settings: SchedulerSettings, planning: ControllerSettings | None, names: SliceNames | None
) -> Iterator[SliceRecord]:
    """The planned slices, with what the plan says of their models."""
    hints: dict[SliceId, list[ReplicaHint]] = {}
    if planning is None:
        for (slice_id, model_id), (batch, weight) in settings.hints.items():
            hints.setdefault(slice_id, []).append(ReplicaHint(model_id, batch, weight))
    else:
        hints = {kept.slice_id: list(kept.hints) for kept in planning.hints}
    for place, (node_id, spec) in enumerate(settings.slices):
        order = place if names is None else names.order_of(node_id, spec)
        yield SliceRecord(spec, node_id, order, tuple(hints.get(spec.slice_id, ())))
