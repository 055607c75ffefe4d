"""The scheduler's decisions: metadata in, grants and batches out. It never sees a payload.

It translates between messages and a batching discipline (`policies/batching`), which owns the queues and says
what runs where and when. Around it the core keeps what the wire needs: who is there (`fleet`), which batches
are in flight, and what measured times teach (`corrections`).

A slice holds at most two batches, one that runs and one that waits: predictions alone free a slice for the
second (so no round trip is lost between batches, Symphony section 3.2), but only a `Done` frees it for a
third, so a worker that hangs costs two batches and not a queue of them. A `Done` that never comes from a worker
that is alive is given up `OVERDUE_AFTER_MS` after its time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from fabric.ids import BatchId, FrontendId, ModelId, PeerId, SliceId
from fabric.messages import (
    Arrivals,
    Done,
    Dropped,
    FrontendHello,
    Grant,
    NodeHello,
    Part,
    Ping,
    Pong,
    ReplicaInfo,
    Returned,
    RunBatch,
    SeqRun,
    SliceChanged,
    SliceReady,
    StatusAsked,
    StatusListed,
    Want,
    Withdraw,
)
from fabric.messages import Preempt as PreemptBatch
from policies.batching.base import (
    NEVER_MS,
    BatchModel,
    BatchSlice,
    Decision,
    Delay,
    Discipline,
    Dispatch,
    Drop,
    HostedModel,
    RequestRun,
)
from roles.core import Heard, Lost, Send, Tick
from roles.scheduler.corrections import LatenessGuard, SpeedCorrection, TransferCorrection
from roles.scheduler.fleet import FAILED, LOST, READY, STOPPED, Fleet, SliceRecord
from roles.scheduler.settings import SchedulerSettings

BATCHES_PER_SLICE = 2
OVERDUE_AFTER_MS = 2_000.0  # after its predicted end, nobody speaks of a batch any more: its `Done` was lost
DIRECTORY_PAUSE_MS = 1.0  # gathers the news of a node whose slices come up together into one directory

Event = Heard | Lost | Tick
_NOTHING: Sequence[Send] = ()


@dataclass(slots=True)
class Flight:
    """A batch between its dispatch and its `Done`."""

    slice_id: SliceId
    model_id: ModelId
    exec_ms: float


class SchedulerCore:
    """One active scheduler. Events: `Heard` (messages of frontends, agents, workers), `Lost`, `Tick`."""

    def __init__(self, settings: SchedulerSettings, discipline: Discipline) -> None:
        self.counters: dict[str, float] = dict.fromkeys(
            (
                "requests_announced",
                "requests_granted",
                "requests_dropped",
                "requests_expired",
                "requests_returned",
                "batches_sent",
                "batches_lost",
                "messages_unexpected",
                "guard_ms",
            ),
            0.0,
        )
        self._settings = settings
        self._discipline = discipline
        self._models = {model.model_id: model for model in settings.models}
        self._fleet = Fleet(settings.slices, {model.model_id: model.slo_ms for model in settings.models})
        self._flights: dict[BatchId, Flight] = {}
        self._on_slice: dict[SliceId, list[BatchId]] = {}
        self._next_batch = 1
        self._speed: dict[SliceId, dict[ModelId, SpeedCorrection]] = {}  # of those that left their table
        self._hinted = {slice_id for slice_id, _ in settings.hints}
        self._hosted: dict[int, tuple[HostedModel, ...]] = {}
        self._transfer: dict[ModelId, TransferCorrection] = {}
        self._guard = LatenessGuard(settings.guard_ms)
        discipline.set_guard_ms(settings.guard_ms)
        self._told_version = 0
        self._tell_at_ms: float | None = None
        self._overdue: list[
            tuple[float, BatchId]
        ] = []  # a heap; those that have ended stay until their moment
        self._chore_at_ms: float | None = None  # the earlier of the two above
        for model_id in self._models:
            self._transfer[model_id] = TransferCorrection(
                settings.delay.data_ms_per_item, settings.transfer_ms
            )
            discipline.add_model(self._batch_model(model_id), 0.0)
        self._on: dict[type, Callable[[PeerId, Any, float, float], Sequence[Send]]] = {
            Done: self._on_done,
            Withdraw: self._on_withdraw,
            FrontendHello: self._on_frontend_hello,
            NodeHello: self._on_node_hello,
            SliceReady: self._on_slice_ready,
            SliceChanged: self._on_slice_changed,
            Ping: self._on_ping,
            StatusAsked: self._on_status_asked,
        }

    @property
    def wake_at_ms(self) -> float | None:
        """The discipline's next moment, the next directory, or a `Done` that should have come."""
        wake_at_ms = self._discipline.wake_at_ms
        chore_at_ms = self._chore_at_ms
        if chore_at_ms is None:
            return wake_at_ms
        return chore_at_ms if wake_at_ms is None else min(wake_at_ms, chore_at_ms)

    def handle(self, event: Event, now_ms: float) -> Sequence[Send]:
        """Take one event; see `roles.core.Core`."""
        if type(event) is Heard:
            message = event.message
            if type(message) is Arrivals:  # nearly all there is
                return self._on_arrivals(event.peer, message, event.late_ms, now_ms)
            handler = self._on.get(type(message))
            if handler is None:
                self.counters["messages_unexpected"] += 1
                return _NOTHING
            return handler(event.peer, message, event.late_ms, now_ms)
        if type(event) is Tick:
            return self._on_tick(now_ms)
        assert isinstance(event, Lost)
        return self._on_lost(event.peer, event.reason, now_ms)

    # ------------------------------------------------------------ requests

    def _on_arrivals(self, peer: PeerId, message: Arrivals, late_ms: float, now_ms: float) -> Sequence[Send]:
        model_id = message.model_id
        self.counters["requests_announced"] += message.count
        if not self._fleet.replicas.get(model_id):
            if model_id not in self._models:
                return [_refused(peer, message, "ModelNotFound", f"no model named {model_id}")]
            return [_refused(peer, message, "NoReplica", f"no ready slice hosts {model_id}")]
        sent_at_ms = now_ms - late_ms
        run = RequestRun(
            FrontendId(peer),
            message.first_seq,
            message.count,
            sent_at_ms + message.budget_ms,
            now_ms,
            message.span_ms,
            sent_at_ms + message.ready_in_ms if message.ready_in_ms else 0.0,
        )
        decisions = self._discipline.arrive(model_id, run, now_ms)
        return self._carry_out(decisions, now_ms) if decisions else _NOTHING

    def _on_withdraw(self, peer: PeerId, message: Withdraw, late_ms: float, now_ms: float) -> Sequence[Send]:
        del late_ms
        if message.model_id in self._models:
            for run in message.runs:
                self._discipline.withdraw(
                    message.model_id, FrontendId(peer), run.first_seq, run.count, now_ms
                )
        return _NOTHING

    def _on_tick(self, now_ms: float) -> Sequence[Send]:
        actions: list[Send] = []
        wake_at_ms = self._discipline.wake_at_ms
        if wake_at_ms is not None and wake_at_ms <= now_ms:
            if self._guard.observe(now_ms - wake_at_ms):
                self.counters["guard_ms"] = self._guard.guard_ms
                self._discipline.set_guard_ms(self._guard.guard_ms)
            actions.extend(self._carry_out(self._discipline.tick(now_ms), now_ms))
        if self._chore_at_ms is not None and self._chore_at_ms <= now_ms:
            actions.extend(self._do_chores(now_ms))
        return actions

    def _do_chores(self, now_ms: float) -> list[Send]:
        actions: list[Send] = []
        if self._tell_at_ms is not None and self._tell_at_ms <= now_ms:
            actions.extend(self._tell())
        while self._overdue and self._overdue[0][0] <= now_ms:
            actions.extend(self._give_up(heappop(self._overdue)[1], now_ms))
        self._plan_chores()
        return actions

    def _plan_chores(self) -> None:
        moments = [] if self._tell_at_ms is None else [self._tell_at_ms]
        self._chore_at_ms = min(moments + [at_ms for at_ms, _ in self._overdue[:1]], default=None)

    def _give_up(self, batch_id: BatchId, now_ms: float) -> list[Send]:
        flight = self._flights.pop(batch_id, None)
        if flight is None:
            return []
        self.counters["batches_lost"] += 1
        self._on_slice[flight.slice_id].remove(batch_id)
        return self._carry_out(self._discipline.slice_free(flight.slice_id, now_ms, now_ms), now_ms)

    def _carry_out(self, decisions: Sequence[Decision], now_ms: float) -> list[Send]:
        actions: list[Send] = []
        for decision in decisions:
            if isinstance(decision, Dispatch):
                actions.extend(self._dispatch(decision, now_ms))
            elif isinstance(decision, Drop):
                actions.extend(self._drop(decision))
            else:
                actions.extend(self._preempt(decision.slice_id))
        return actions

    def _dispatch(self, dispatch: Dispatch, now_ms: float) -> list[Send]:
        record = self._fleet.slices[dispatch.slice_id]
        assert record.worker is not None, "the discipline knows ready slices only"
        known = self._fleet.frontend_ids
        runs_of = _by_frontend(dispatch.runs)
        if not runs_of.keys() <= known.keys():
            # A run names its frontend's incarnation: one that is gone takes its requests with it.
            runs_of = {name: runs for name, runs in runs_of.items() if PeerId(name) in known}
        if not runs_of:
            return self._carry_out(self._discipline.slice_free(dispatch.slice_id, now_ms, now_ms), now_ms)
        batch_id = BatchId(self._next_batch)
        self._next_batch += 1
        parts = tuple([Part(known[PeerId(name)], runs) for name, runs in runs_of.items()])
        self._flights[batch_id] = Flight(dispatch.slice_id, dispatch.model_id, dispatch.exec_ms)
        waiting = self._on_slice.setdefault(dispatch.slice_id, [])
        waiting.append(batch_id)
        record.batches += 1
        record.requests += dispatch.batch_size
        self.counters["batches_sent"] += 1
        self.counters["requests_granted"] += dispatch.batch_size
        start_in_ms = max(0.0, dispatch.start_at_ms - now_ms)
        latest_in_ms = max(start_in_ms, dispatch.latest_at_ms - now_ms)
        last = dispatch.runs[-1]  # runs come in order of their tightest deadlines, and a span is at most 1 ms
        loosest_at_ms = last.deadline_at_ms + last.span_ms
        actions = self._tell() if self._told_version != self._fleet.version else []
        actions.append(
            Send(
                record.worker,
                RunBatch(
                    batch_id,
                    dispatch.slice_id,
                    record.incarnation,
                    dispatch.model_id,
                    parts,
                    start_in_ms,
                    latest_in_ms,
                    max(latest_in_ms, loosest_at_ms - dispatch.exec_ms - now_ms),
                ),
            )
        )
        for number, (name, runs) in enumerate(runs_of.items()):
            grant = Grant(
                batch_id,
                dispatch.slice_id,
                record.incarnation,
                dispatch.model_id,
                number,
                runs,
                dispatch.batch_size,
                start_in_ms,
                dispatch.waited_ms,
                dispatch.reason,
            )
            actions.append(Send(PeerId(name), grant))
        if len(waiting) >= BATCHES_PER_SLICE:
            end_in_ms = start_in_ms + sum(self._flights[batch].exec_ms for batch in waiting)
            heappush(self._overdue, (now_ms + end_in_ms + OVERDUE_AFTER_MS, waiting[0]))
            self._plan_chores()
            actions.extend(
                self._carry_out(self._discipline.slice_free(dispatch.slice_id, NEVER_MS, now_ms), now_ms)
            )
        return actions

    def _drop(self, drop: Drop) -> list[Send]:
        count = sum(run.count for run in drop.runs)
        self.counters["requests_expired" if drop.is_expired else "requests_dropped"] += count
        code, reason = (
            ("DeadlineExceeded", "could no longer finish within its budget")
            if drop.is_expired
            else ("Overloaded", "given up so that the batch behind it keeps its size")
        )
        return [
            Send(PeerId(name), Dropped(drop.model_id, runs, code, reason))
            for name, runs in _by_frontend(drop.runs).items()
        ]

    def _preempt(self, slice_id: SliceId) -> list[Send]:
        """Stop what runs there. The discipline has queued its requests again, so its flight ends here."""
        record = self._fleet.slices[slice_id]
        batches = self._on_slice.pop(slice_id, [])
        for batch_id in batches:
            del self._flights[batch_id]
        assert record.worker is not None, "the discipline knows ready slices only"
        return [Send(record.worker, PreemptBatch(batch_id, slice_id)) for batch_id in batches]

    def _on_done(self, peer: PeerId, message: Done, late_ms: float, now_ms: float) -> Sequence[Send]:
        flight = self._flights.pop(message.batch_id, None)
        if flight is None:
            return _NOTHING  # of a lost slice, or preempted: its requests have gone their way
        del peer
        waiting = self._on_slice[flight.slice_id]
        waiting.remove(message.batch_id)
        actions = self._give_back(message, flight)
        # What still waits there started when this one ended.
        free_at_ms = now_ms - late_ms + sum(self._flights[batch_id].exec_ms for batch_id in waiting)
        free_at_ms = max(now_ms, free_at_ms)
        if self._learn(message, flight, now_ms):
            slice_ = self._batch_slice(self._fleet.slices[flight.slice_id], free_at_ms)
            actions.extend(self._carry_out(self._discipline.add_slice(slice_, now_ms), now_ms))
        else:
            decisions = self._discipline.slice_free(flight.slice_id, free_at_ms, now_ms)
            actions.extend(self._carry_out(decisions, now_ms))
        return actions

    def _give_back(self, message: Done, flight: Flight) -> list[Send]:
        actions: list[Send] = []
        for part in message.missing:
            found = self._fleet.frontends.get(part.frontend_id)
            if found is None:
                continue
            self.counters["requests_returned"] += sum(run.count for run in part.runs)
            reason = (
                "its slice was late" if message.status == "expired" else "its inputs did not come in time"
            )
            actions.append(Send(found[0], Returned(message.batch_id, flight.model_id, part.runs, reason)))
        return actions

    def _learn(self, message: Done, flight: Flight, now_ms: float) -> bool:
        """Take the measured times; True when l(b) of that slice has to be replaced."""
        if message.status != "ok" or message.ran == 0:
            return False
        model_id, slice_id = flight.model_id, flight.slice_id
        if self._transfer[model_id].observe(message.transfer_ms, message.ran):
            self._discipline.add_model(self._batch_model(model_id), now_ms)
        table_ms = self._fleet.slices[slice_id].exec_ms[model_id][message.ran - 1]
        speeds = self._speed.get(slice_id)
        if speeds is None:
            if message.exec_ms == table_ms:
                return False
            speeds = self._speed[slice_id] = {}
        speed = speeds.get(model_id)
        if speed is None:
            speed = speeds[model_id] = SpeedCorrection()
        return speed.observe(message.exec_ms, table_ms)

    # ------------------------------------------------------------ the fleet

    def _on_frontend_hello(
        self, peer: PeerId, message: FrontendHello, late_ms: float, now_ms: float
    ) -> Sequence[Send]:
        del late_ms, now_ms
        self._fleet.frontend_joined(peer, message)
        return self._tell()

    def _on_node_hello(
        self, peer: PeerId, message: NodeHello, late_ms: float, now_ms: float
    ) -> Sequence[Send]:
        del late_ms
        self._fleet.nodes[message.node_id] = peer
        alive = {status.slice_id: status for status in message.slices}
        gone = []
        for record in self._fleet.slices_on(message.node_id):
            status = alive.get(record.spec.slice_id)
            if status is None or status.incarnation != record.incarnation:
                gone.append(record)
        actions = self._slices_down(gone, LOST, "its node agent started anew", now_ms)
        actions.append(Send(peer, Want(self._fleet.version, self._fleet.specs_of(message.node_id))))
        return actions

    def _on_slice_ready(
        self, peer: PeerId, message: SliceReady, late_ms: float, now_ms: float
    ) -> Sequence[Send]:
        del late_ms
        old = self._fleet.slices.get(message.slice_id)
        actions: list[Send] = []
        if old is not None and old.state == READY and old.incarnation != message.incarnation:
            actions.extend(self._slices_down([old], LOST, "replaced by its next incarnation", now_ms))
        record = self._fleet.slice_ready(peer, message)
        if record is None:
            return [*actions, Send(peer, self._fleet.directory())]
        self._speed.pop(message.slice_id, None)
        self._news(now_ms)
        decisions = self._discipline.add_slice(self._batch_slice(record, now_ms), now_ms)
        actions.extend(self._carry_out(decisions, now_ms))
        return actions

    def _batch_slice(self, record: SliceRecord, free_at_ms: float) -> BatchSlice:
        slice_id = record.spec.slice_id
        speeds = self._speed.get(slice_id)
        if speeds is not None or slice_id in self._hinted:
            hosted = tuple(self._hosted_model(slice_id, one, speeds or {}) for one in record.replicas)
        else:
            key = id(record.replicas)  # one object for all that are equal, and the fleet keeps it
            hosted = self._hosted.get(key, ())
            if not hosted:
                hosted = tuple(HostedModel(one.model_id, one.exec_ms) for one in record.replicas)
                self._hosted[key] = hosted
        return BatchSlice(slice_id, record.order, hosted, free_at_ms)

    def _hosted_model(
        self, slice_id: SliceId, replica: ReplicaInfo, speeds: Mapping[ModelId, SpeedCorrection]
    ) -> HostedModel:
        speed = speeds.get(replica.model_id)
        factor = 1.0 if speed is None else speed.factor
        exec_ms = replica.exec_ms if factor == 1.0 else tuple(ms * factor for ms in replica.exec_ms)
        target, weight = self._settings.hints.get((slice_id, replica.model_id), (None, 1.0))
        return HostedModel(replica.model_id, exec_ms, target, weight)

    def _batch_model(self, model_id: ModelId) -> BatchModel:
        transfer = self._transfer[model_id]
        delay = Delay(self._settings.delay.control_ms + transfer.fixed_ms, transfer.ms_per_item)
        priority = self._settings.priorities.get(model_id, 0)
        return BatchModel(model_id, self._models[model_id].slo_ms, delay, priority)

    def _on_slice_changed(
        self, peer: PeerId, message: SliceChanged, late_ms: float, now_ms: float
    ) -> Sequence[Send]:
        del peer, late_ms
        record = self._fleet.slices.get(message.status.slice_id)
        status = message.status
        if record is None:
            return _NOTHING
        if record.state == READY and status.incarnation != record.incarnation:
            return _NOTHING  # old news of a former incarnation
        if status.state in (FAILED, LOST, STOPPED):
            return self._slices_down([record], status.state, status.reason, now_ms)
        return _NOTHING  # starting is what we believe already; ready comes from the worker itself

    def _slices_down(
        self, records: Sequence[SliceRecord], state: str, reason: str, now_ms: float
    ) -> list[Send]:
        """Forget what was in flight there: frontends see in the directory that the slices are gone."""
        gone = [record for record in records if self._fleet.slice_down(record, state, reason)]
        if not gone:
            return []
        actions = self._tell()
        for record in gone:
            for batch_id in self._on_slice.pop(record.spec.slice_id, ()):
                del self._flights[batch_id]
                self.counters["batches_lost"] += 1
            decisions = self._discipline.remove_slice(record.spec.slice_id, now_ms)
            actions.extend(self._carry_out(decisions, now_ms))
        for record in gone:
            actions.extend(self._give_up_unserved(record, now_ms))
        return actions

    def _give_up_unserved(self, record: SliceRecord, now_ms: float) -> list[Send]:
        """What waits for a model that nothing hosts any more gets its answer now, not at its deadline."""
        actions: list[Send] = []
        for replica in record.replicas:
            model_id = replica.model_id
            if self._fleet.is_served(model_id) or not self._discipline.queued(model_id):
                continue
            for decision in self._discipline.remove_model(model_id, now_ms):
                assert isinstance(decision, Drop)
                actions.extend(
                    Send(
                        PeerId(name), Dropped(model_id, runs, "NoReplica", f"no ready slice hosts {model_id}")
                    )
                    for name, runs in _by_frontend(decision.runs).items()
                )
            self._discipline.add_model(self._batch_model(model_id), now_ms)
        return actions

    def _on_lost(self, peer: PeerId, reason: str, now_ms: float) -> Sequence[Send]:
        if self._fleet.frontend_lost(peer) is not None:
            self._news(now_ms)
            return _NOTHING
        gone = self._fleet.slices_of(peer)
        for node_id in [node_id for node_id, known in self._fleet.nodes.items() if known == peer]:
            del self._fleet.nodes[node_id]
            gone.extend(self._fleet.slices_on(node_id))  # workers die with their agent
        return self._slices_down(gone, LOST, reason, now_ms)

    def _news(self, now_ms: float) -> None:
        if self._tell_at_ms is None:
            self._tell_at_ms = now_ms + DIRECTORY_PAUSE_MS
            self._plan_chores()

    def _tell(self) -> list[Send]:
        """The directory to everyone, now: a grant must never name a slice its frontend has not heard of."""
        self._tell_at_ms = None
        self._plan_chores()
        self._told_version = self._fleet.version
        directory = self._fleet.directory()
        return [Send(peer, directory) for peer in self._fleet.peers_to_tell()]

    # ------------------------------------------------------------ questions

    def _on_ping(self, peer: PeerId, message: Ping, late_ms: float, now_ms: float) -> Sequence[Send]:
        del late_ms, now_ms
        return [Send(peer, Pong(message.number))]

    def _on_status_asked(
        self, peer: PeerId, message: StatusAsked, late_ms: float, now_ms: float
    ) -> Sequence[Send]:
        del message, late_ms, now_ms
        settings = self._settings
        listed = StatusListed(
            settings.role_id,
            settings.pid,
            tuple(self._fleet.reports()),
            self._fleet.models(),
            dict(self.counters),
        )
        return [Send(peer, listed)]


def _by_frontend(runs: Sequence[RequestRun]) -> dict[FrontendId, tuple[SeqRun, ...]]:
    """The seqs of each frontend, neighbours joined: first, end, first, end, … while they are gathered."""
    gathered: dict[FrontendId, list[int]] = {}
    name = runs[0].frontend_id
    first_seq = end_seq = runs[0].first_seq
    for run in runs:
        if run.first_seq == end_seq and run.frontend_id == name:
            end_seq += run.count
            continue
        _join(gathered.setdefault(name, []), first_seq, end_seq)
        name, first_seq = run.frontend_id, run.first_seq
        end_seq = first_seq + run.count
    _join(gathered.setdefault(name, []), first_seq, end_seq)
    return {
        name: tuple([SeqRun(seqs[k], seqs[k + 1] - seqs[k]) for k in range(0, len(seqs), 2)])
        for name, seqs in gathered.items()
    }


def _join(seqs: list[int], first_seq: int, end_seq: int) -> None:
    if seqs and seqs[-1] == first_seq:
        seqs[-1] = end_seq
    else:
        seqs += (first_seq, end_seq)


def _refused(peer: PeerId, message: Arrivals, code: str, reason: str) -> Send:
    return Send(peer, Dropped(message.model_id, (SeqRun(message.first_seq, message.count),), code, reason))
