"""Batches in flight: a discipline's decisions become messages, and each `Done` becomes news for the discipline.

A slice holds at most two batches, one that runs and one that waits: predictions alone free a slice for the
second (so no round trip is lost between batches, Symphony section 3.2), but only a `Done` frees it for a
third, so a worker that hangs costs two batches and not a queue of them; one that is `LATE_AFTER_MS` behind gets none. A pipeline over several GPUs runs one more on each of the
others. A discipline may decide more at one moment, as
a batch whose inputs take longer fits behind one that will have ended by then: what has no place is queued again. A `Done`
that never comes from a worker that is alive is given up `OVERDUE_AFTER_MS` after its time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush

from fabric.errors import nothing_ready
from fabric.ids import BatchId, FrontendId, ModelId, PeerId
from fabric.limits import DURATION_MAX_MS
from fabric.messages import Done, Dropped, Grant, Part, PreemptBatch, Returned, RunBatch, SeqRun, split_runs
from policies.batching.base import NEVER_MS, BatchDecision, Discipline, Dispatch, Drop, RequestRun
from roles.runtime.core import Send
from roles.scheduler.counters import Counters
from roles.scheduler.directory_updates import DirectoryUpdates
from roles.scheduler.dispatch.estimates import Estimates
from roles.scheduler.dispatch.recorder import EXPIRED, FOR_BATCH, OVER_SHARE, BatchRecorder
from roles.scheduler.dispatch.run_time_watch import RunTimeWatch
from roles.scheduler.dispatch.unserved import Unserved
from roles.scheduler.dispatch.untried import Untried
from roles.scheduler.dispatch.withdrawals import Withdrawals
from roles.scheduler.fleet import Fleet, Flight, SliceRecord
from roles.scheduler.measured_rates import new_tallies

LATE_AFTER_MS = 100.0  # after a batch's predicted end its slice is not taken for free: it may hang
LATE_MAX = 64  # slices that are left alone at a time
OVERDUE_AFTER_MS = 2_000.0  # after its predicted end, nobody speaks of a batch any more: its `Done` was lost

_NOTHING: Sequence[Send] = ()
_NO_DECISIONS: Sequence[BatchDecision] = ()


class Batches:
    """Who runs what now. Every list it answers is the caller's."""

    def __init__(
        self,
        discipline: Discipline,
        fleet: Fleet,
        estimates: Estimates,
        updates: DirectoryUpdates,
        run_time_watch: RunTimeWatch | None,
        first_batch_id: BatchId,
    ) -> None:
        """`run_time_watch` hears of every run, if there is one."""
        self.counters = Counters()
        self.recorder = BatchRecorder()
        self.overdue_at_ms = NEVER_MS
        """When a batch is late, or its `Done` has been waited for long enough; inf: none is waited for."""
        self.tallies = new_tallies()
        self.unserved = Unserved(self.tallies, fleet.starts.coming_at_ms)
        """What waits for a slice that is on its way."""
        self.withdrawals = Withdrawals(discipline, self.unserved, self.tallies)
        self._run_time_watch = run_time_watch
        self._discipline = discipline
        self._fleet = fleet
        self._estimates = estimates
        self._updates = updates
        self.flights: dict[BatchId, Flight] = {}
        """Those that have not ended; whoever looks must not change them."""
        self._next_batch = first_batch_id
        self.untried = Untried()
        """Models whose requests are dropped."""
        # A heap: when to look at which batch, and whether for the last time. The first has not ended, others may have.
        self._overdue: list[tuple[float, BatchId, bool]] = []
        self._late: list[SliceRecord] = []  # and some that were
        self._again: list[tuple[ModelId, list[RequestRun]]] = []  # to be queued after the decisions

    def queued(self, model_id: ModelId) -> int:
        """Requests of a model that wait: for a batch, or for a slice that is on its way."""
        return self._discipline.queued(model_id) + self.unserved.count(model_id)

    # ------------------------------------------------------------ decisions -> messages

    def carry_out(self, decisions: Sequence[BatchDecision], now_ms: float) -> list[Send]:
        """What the decisions mean for workers and frontends, and those that follow from what became of them."""
        actions: list[Send] = []
        while decisions:
            following: Sequence[BatchDecision] = _NO_DECISIONS
            for decision in decisions:
                if type(decision) is Dispatch:
                    if more := self._dispatch(decision, now_ms, actions):
                        following = [*following, *more]
                elif type(decision) is Drop:
                    self._drop(decision, now_ms, actions)
                else:
                    assert not isinstance(decision, Dispatch | Drop)
                    self._preempt(decision.dispatch, actions)
            decisions = following or (self._arrive_again(now_ms) if self._again else _NO_DECISIONS)
        return actions

    def offer(
        self,
        record: SliceRecord,
        now_ms: float,
        free_at_ms: float | None = None,
        corrected: ModelId | None = None,
    ) -> list[Send]:
        """The discipline's picture of a ready slice anew; one that hosts nothing it knows is not in it.

        `corrected`: the one model whose l(b) there has changed; None: anything may have.
        """
        if free_at_ms is None:
            free_at_ms = free_from_ms(record, now_ms)
        slice_ = self._estimates.slice_(record, free_at_ms, corrected)
        if slice_.hosted:
            return self.carry_out(self._discipline.add_slice(slice_, now_ms), now_ms)
        return self.carry_out(self._discipline.remove_slices((slice_.slice_id,), now_ms), now_ms)

    def withdraw(self, records: Sequence[SliceRecord], now_ms: float) -> list[Send]:
        """Slices get no more batches. All of them leave before the discipline decides anything."""
        slice_ids = [record.spec.slice_id for record in records]
        return self.carry_out(self._discipline.remove_slices(slice_ids, now_ms), now_ms)

    def give_up_unserved(self, model_ids: Iterable[ModelId], now_ms: float) -> list[Send]:
        """What waits for a model that nothing hosts any more waits for the slice that is coming, or is refused now."""
        actions: list[Send] = []
        for model_id in dict.fromkeys(model_ids):
            is_asked_for = model_id in self._fleet.replicas and self._discipline.queued(model_id)
            if is_asked_for and not self._fleet.is_served(model_id):
                queued, decisions = self._take_queue(model_id, now_ms)
                refused = [run for run in queued if not self.unserved.take(model_id, run, now_ms)]
                actions += self._refuse_unserved(model_id, refused, nothing_ready(model_id), now_ms)
                actions += self.carry_out(decisions, now_ms)
                self._discipline.add_model(self._estimates.model(model_id), now_ms)
        return actions

    def retire(self, model_id: ModelId, code: str, reason: str, now_ms: float) -> list[Send]:
        """The discipline forgets a model; what of it waits is refused so."""
        queued, decisions = self._take_queue(model_id, now_ms)
        queued += [run for _, run in self.unserved.served((model_id,))]
        actions = [*self.refuse(model_id, queued, code, reason), *self.carry_out(decisions, now_ms)]
        self.recorder.keep_models(self._fleet.replicas.keys() - {model_id})
        return actions

    def arrive_unserved(self, model_id: ModelId, run: RequestRun, now_ms: float) -> list[Send]:
        """No ready slice hosts the model: the run waits for the one that is coming, or is refused."""
        if self.unserved.take(model_id, run, now_ms):
            return []
        return self._refuse_unserved(model_id, [run], nothing_ready(model_id), now_ms)

    def served(self, record: SliceRecord, now_ms: float) -> list[Send]:
        """A slice takes batches: what waited for it goes to the discipline."""
        actions: list[Send] = []
        models = (replica.model_id for replica in record.replicas)
        for model_id, run in list(self.unserved.served(models)):
            actions += self.carry_out(self._discipline.arrive(model_id, run, now_ms), now_ms)
        return actions

    def give_up_in_vain(self, now_ms: float) -> list[Send]:
        """What waits for a slice that will not be ready in time waits no more."""
        actions: list[Send] = []
        for model_id, run in list(self.unserved.in_vain(now_ms)):
            late = f"no slice that hosts {model_id} came in time"
            actions += self._refuse_unserved(model_id, [run], late, now_ms)
        return actions

    def _refuse_unserved(
        self, model_id: ModelId, runs: Sequence[RequestRun], reason: str, now_ms: float
    ) -> list[Send]:
        """No slice hosts their model: their authors hear when one will, where that is known."""
        coming_in_ms = self._fleet.starts.coming_in_ms(model_id, now_ms)
        return self.refuse(model_id, runs, "NoReplica", reason, coming_in_ms or None)

    def refuse(
        self,
        model_id: ModelId,
        runs: Sequence[RequestRun],
        code: str,
        reason: str,
        retry_after_ms: float | None = None,
    ) -> list[Send]:
        """These will not run."""
        if not runs:
            return []
        count = sum(run.count for run in runs)
        self.tallies[model_id].refused += count
        self.recorder.dropped(model_id, "no_replica" if code == "NoReplica" else "removed", count)
        return [
            send
            for peer, told in by_frontend(runs).items()
            for send in dropped(peer, model_id, told, code, reason, retry_after_ms)
        ]

    def _take_queue(self, model_id: ModelId, now_ms: float) -> tuple[list[RequestRun], list[BatchDecision]]:
        """The discipline forgets a model: what of it was queued, and what else it decides."""
        queued: list[RequestRun] = []
        decisions: list[BatchDecision] = []
        self.withdrawals.forget_model(model_id)
        for decision in self._discipline.remove_model(model_id, now_ms):
            if isinstance(decision, Drop) and decision.model_id == model_id:
                queued += decision.runs
            else:
                decisions.append(decision)
        return queued, decisions

    def forget_frontend(self, peer: PeerId, now_ms: float) -> None:
        """Nothing of it is worth a batch any more."""
        self.unserved.forget_frontend(FrontendId(peer))
        self.withdrawals.forget(FrontendId(peer))
        for model_id, count in self._discipline.forget_frontend(FrontendId(peer), now_ms).items():
            self.tallies[model_id].withdrawn += count

    def _dispatch(self, dispatch: Dispatch, now_ms: float, actions: list[Send]) -> Sequence[BatchDecision]:
        slice_id, model_id, exec_ms = dispatch.slice_id, dispatch.model_id, dispatch.exec_ms
        frontend_ids = self._fleet.frontend_ids
        record = self._fleet.slices[slice_id]
        flights = record.flights
        if len(flights) >= record.batches_max:  # decided together with the one that took the last place
            self._again.append((model_id, dispatch.runs))
            return _NO_DECISIONS
        worker, incarnation = record.worker, record.incarnation
        assert worker is not None, "the discipline knows ready slices only"
        batch_id = self._next_batch
        batch_size = dispatch.batch_size
        start_in_ms = min(max(dispatch.start_at_ms - now_ms, 0.0), DURATION_MAX_MS)
        parts: list[Part] = []
        grants: list[Send] = []
        for peer, runs in by_frontend(dispatch.runs).items():
            grant = Grant(
                batch_id,
                slice_id,
                incarnation,
                model_id,
                len(parts),
                runs,
                batch_size,
                start_in_ms,
                dispatch.waited_ms,
                dispatch.reason,
            )
            grants.append(Send(peer, grant))
            # Only who is listed has requests queued, and whoever is lost takes them along at that moment.
            parts.append(Part(frontend_ids[peer], runs))
        self._next_batch = BatchId(batch_id + 1)
        granted = tuple(parts)
        flight = self.flights[batch_id] = Flight(
            batch_id,
            record,
            model_id,
            granted,
            batch_size,
            exec_ms,
            now_ms,
            dispatch.runs,
            dispatch.waited_ms,
            dispatch.reason,
            dispatch.start_at_ms,
            dispatch.occupied_ms,
        )
        flights.append(flight)
        record.batches += 1
        record.requests += batch_size
        counters = self.counters
        counters.batches_sent += 1
        counters.requests_granted += batch_size
        self.tallies[model_id].granted += batch_size
        self.recorder.dispatched(dispatch)
        latest_in_ms = min(dispatch.latest_at_ms - now_ms, DURATION_MAX_MS)
        if latest_in_ms < start_in_ms:
            latest_in_ms = start_in_ms
        # Runs come in order of their tightest deadlines, but those with long budgets have much more slack than others.
        lost_at_ms = max([run.deadline_at_ms + run.span_ms + run.slack_ms for run in dispatch.runs])
        expires_in_ms = min(
            lost_at_ms - exec_ms - now_ms, DURATION_MAX_MS
        )  # a budget and a slack may be so long each
        if expires_in_ms < latest_in_ms:
            expires_in_ms = latest_in_ms
        if self._updates.is_behind:
            actions += self._updates.publish()
        run_batch = RunBatch(
            batch_id, slice_id, incarnation, model_id, granted, start_in_ms, latest_in_ms, expires_in_ms
        )
        actions.append(Send(worker, run_batch))
        actions += grants
        end_at_ms = now_ms + (start_in_ms + sum([one.exec_ms for one in flights]))
        heappush(self._overdue, (end_at_ms + LATE_AFTER_MS, batch_id, False))
        self.overdue_at_ms = self._overdue[0][0]
        if len(flights) < record.batches_max:
            return _NO_DECISIONS
        return self._discipline.slice_free(slice_id, NEVER_MS, now_ms)

    def _drop(self, drop: Drop, now_ms: float, actions: list[Send]) -> None:
        count = sum(run.count for run in drop.runs)
        self.tallies[drop.model_id].dropped += count
        self.untried.dropped(drop.model_id, now_ms)
        if drop.is_expired:
            self.counters.requests_expired += count
            why = EXPIRED
            code, reason = "DeadlineExceeded", "could no longer finish within its budget"
        elif drop.retry_after_ms is not None:
            self.counters.requests_dropped += count
            why = OVER_SHARE
            code, reason = (
                "Overloaded",
                f"more is asked of {drop.model_id} than its share of the slices can do",
            )
        else:
            self.counters.requests_dropped += count
            why = FOR_BATCH
            code, reason = "Overloaded", "given up so that the batch behind it keeps its size"
        self.recorder.dropped(drop.model_id, why, count)
        for peer, runs in by_frontend(drop.runs).items():
            actions += dropped(peer, drop.model_id, runs, code, reason, drop.retry_after_ms)

    def _preempt(self, dispatch: Dispatch, actions: list[Send]) -> None:
        """Stop that batch, if it is still under way. What is before it on its slice will end soon."""
        record = self._fleet.slices[dispatch.slice_id]
        flight = next((one for one in record.flights if one.runs is dispatch.runs), None)
        if flight is None:
            return
        record.flights.remove(flight)
        del self.flights[flight.batch_id]
        worker = record.worker
        assert worker is not None, "the discipline knows ready slices only"
        actions.append(Send(worker, PreemptBatch(flight.batch_id, record.spec.slice_id)))
        model_id = flight.model_id
        runs = [run for run in flight.runs if PeerId(run.frontend_id) in self._fleet.frontend_ids]
        if model_id in self._fleet.replicas:
            self.tallies[model_id].returned += sum(run.count for run in runs)
        self._again.append((model_id, runs))

    def _arrive_again(self, now_ms: float) -> list[BatchDecision]:
        """What was preempted or had no place waits again, unless nobody wants it or serves it any more."""
        decisions: list[BatchDecision] = []
        again, self._again = self._again, []
        for model_id, runs in again:
            if model_id in self._fleet.replicas:
                decisions += self._discipline.arrive_again(model_id, runs, now_ms)
            elif runs:
                decisions.append(Drop(model_id, runs, is_expired=False))
        return decisions

    # ------------------------------------------------------------ the ends of batches

    def done(self, peer: PeerId, message: Done, late_ms: float, now_ms: float) -> Sequence[Send]:
        """A worker says how a batch ended."""
        del peer
        flight = self.flights.pop(message.batch_id, None)
        if flight is None:
            return _NOTHING  # of a lost slice, or preempted: its requests have gone their way
        record = flight.record
        flights = record.flights
        flights.remove(flight)
        # What never ran may have waited behind a batch that hangs: of the device its end says nothing.
        is_behind = not message.ran and bool(flights) and flights[0].batch_id < flight.batch_id
        if not is_behind:
            record.heard_at_ms, record.is_late = now_ms, False
        self._wait_for_first()
        self._note_run(message, flight)
        self.recorder.ended(message, flight, now_ms - late_ms)
        actions = self._give_back(message, flight) if message.missing else None
        if not record.takes_batches:
            return actions or _NOTHING
        # What still waits there started when this one ended.
        free_at_ms = now_ms - late_ms
        # All that was neither the run nor the wait for it: of the grant, the inputs, and the end's telling.
        way_ms = max(0.0, free_at_ms - flight.sent_at_ms - message.queue_ms - message.exec_ms)
        for other in flights:
            free_at_ms += other.occupied_ms
        if is_behind:
            free_at_ms = self._free_behind_ms(record, now_ms)
        elif flights and record.spec.is_pipeline:
            free_at_ms = _pipeline_free_at_ms(flights[-1], free_at_ms)
        if free_at_ms < now_ms:
            free_at_ms = now_ms
        if message.status == "ok" and message.ran and self._learn(message, flight, way_ms, now_ms):
            following = self.offer(record, now_ms, free_at_ms, flight.model_id)
        else:
            if message.status == "expired" and message.transfer_ms:
                self._learn_late(message, flight.model_id, way_ms, now_ms)
            decisions = self._discipline.slice_free(record.spec.slice_id, free_at_ms, now_ms)
            if not decisions:
                return actions or _NOTHING
            following = self.carry_out(decisions, now_ms)
        return following if actions is None else actions + following

    def _free_behind_ms(self, record: SliceRecord, now_ms: float) -> float:
        """When what was sent before leaves room, as was thought when it was sent; never, if it should have ended and others serve."""
        first, last = record.flights[0], record.flights[-1]
        is_overdue = first.start_at_ms + first.exec_ms < now_ms
        if record.is_late or (is_overdue and self._have_others(record)):
            return NEVER_MS
        return last.start_at_ms + last.occupied_ms

    def lose(self, record: SliceRecord) -> None:
        """The slice is gone, and with it what was in flight there: its frontends see that in the directory."""
        for flight in record.flights:
            del self.flights[flight.batch_id]
            self.counters.batches_lost += 1
        record.flights.clear()
        record.is_late = False

    def look_at_overdue(self, now_ms: float) -> list[Send]:
        """A slice whose batch is late gets no other one, where others can serve; what is overdue is waited for no longer.

        Of one that was heard of after that batch's time only the word of its end was lost.
        """
        actions: list[Send] = []
        overdue = self._overdue
        while overdue and overdue[0][0] <= now_ms:
            at_ms, batch_id, is_last = heappop(overdue)
            flight = self.flights.get(batch_id)
            if flight is None:
                continue
            record = flight.record
            if is_last:
                self.counters.batches_lost += 1
                del self.flights[batch_id]
                record.flights.remove(flight)
                record.is_late = False
            else:
                end_at_ms = at_ms - LATE_AFTER_MS
                heappush(overdue, (end_at_ms + OVERDUE_AFTER_MS, batch_id, True))
                if record.is_late or record.heard_at_ms >= end_at_ms or not self._have_others(record):
                    continue
                record.is_late = True
                self._late.append(record)
            if record.takes_batches:
                free_at_ms = free_from_ms(record, now_ms)
                decisions = self._discipline.slice_free(record.spec.slice_id, free_at_ms, now_ms)
                actions += self.carry_out(decisions, now_ms)
        self._wait_for_first()
        return actions

    def _have_others(self, record: SliceRecord) -> bool:
        """Whether each of its models has another slice that is not late. Where very many are late it is not they that hang."""
        self._late = [one for one in self._late if one.is_late and one.takes_batches]
        if len(self._late) >= LATE_MAX:
            return False
        late = Counter(replica.model_id for one in [record, *self._late] for replica in one.replicas)
        return all(self._fleet.replicas.get(model_id, 0) > count for model_id, count in late.items())

    def _wait_for_first(self) -> None:
        """What has ended is not waited for: each moment would be a wake-up for nothing."""
        overdue, flights = self._overdue, self.flights
        while overdue and overdue[0][1] not in flights:
            heappop(overdue)
        self.overdue_at_ms = overdue[0][0] if overdue else NEVER_MS

    def forget_untried(self, now_ms: float) -> list[Send]:
        """Of models whose requests were dropped believe less of what no batch has confirmed lately."""
        actions: list[Send] = []
        models = self.untried.take() & self._fleet.replicas.keys()
        for model_id in sorted(models):
            if self._estimates.forget_way(model_id):
                self._discipline.add_model(self._estimates.model(model_id), now_ms)
        for record in list(self._fleet.slices.values()):
            slow = record.speeds and record.takes_batches and models.intersection(record.speeds)
            if slow and sum(self._estimates.forget_speed(record, model_id) for model_id in slow):
                actions += self.offer(record, now_ms)
        return actions

    def _note_run(self, message: Done, flight: Flight) -> None:
        spec = flight.record.spec
        busy_ms = (
            message.exec_ms if spec.share_percent is None else message.exec_ms * spec.share_percent / 100
        )
        if spec.is_gang:  # a rank on each of its GPUs ran for so long
            busy_ms *= len(spec.gpus)
        self.tallies[flight.model_id].busy_gpu_ms += busy_ms
        if self._run_time_watch is not None and message.ran and message.status == "ok":
            self._run_time_watch.note(flight.record, flight.model_id, message.ran, message.exec_ms)

    def _give_back(self, message: Done, flight: Flight) -> list[Send]:
        actions: list[Send] = []
        granted = {PeerId(run.frontend_id) for run in flight.runs}
        for part in message.missing:
            found = self._fleet.frontends.get(part.frontend_id)
            if found is None or found[0] not in granted:
                continue  # it is gone, or another incarnation, which has other requests under these seqs
            count = sum(run.count for run in part.runs)
            self.counters.requests_returned += count
            self.tallies[flight.model_id].returned += count
            reason = (
                "its slice was late" if message.status == "expired" else "its inputs did not come in time"
            )
            actions.append(Send(found[0], Returned(message.batch_id, flight.model_id, part.runs, reason)))
        return actions

    def _learn_late(self, message: Done, model_id: ModelId, waited_ms: float, now_ms: float) -> None:
        """No inputs came in time: else nothing would be learned where all are sent too late, and all go on so."""
        size = sum(run.count for part in message.missing for run in part.runs)
        if (
            size
            and model_id in self._fleet.replicas
            and self._estimates.learn_late(model_id, waited_ms, size)
        ):
            self._discipline.add_model(self._estimates.model(model_id), now_ms)

    def _learn(self, message: Done, flight: Flight, way_ms: float, now_ms: float) -> bool:
        """Take the measured times; True when l(b) of that slice has to be replaced."""
        model_id = flight.model_id
        is_served = model_id in self._fleet.replicas
        if is_served and self._estimates.learn_way(model_id, way_ms, message.ran):
            self._discipline.add_model(self._estimates.model(model_id), now_ms)
        return self._estimates.learn_speed(flight.record, model_id, message)


def free_from_ms(record: SliceRecord, now_ms: float) -> float:
    """When a slice may be given another batch, as far as that is known now."""
    flights = record.flights
    if record.is_late or len(flights) >= record.batches_max:
        return NEVER_MS
    if flights and record.spec.is_pipeline:
        return max(now_ms, flights[-1].start_at_ms + flights[-1].occupied_ms)
    return now_ms + sum(flight.exec_ms for flight in flights)


def _pipeline_free_at_ms(last: Flight, ends_at_ms: float) -> float:
    """When a pipeline can start another batch, if its last one ends then: that one has left its first stage long before."""
    return max(ends_at_ms - last.exec_ms, last.start_at_ms) + last.occupied_ms


def dropped(
    peer: PeerId,
    model_id: ModelId,
    runs: tuple[SeqRun, ...],
    code: str,
    reason: str,
    retry_after_ms: float | None = None,
) -> Iterator[Send]:
    """What a frontend is told of requests that will not run."""
    for told in split_runs(runs):
        yield Send(peer, Dropped(model_id, told, code, reason, retry_after_ms))


def by_frontend(runs: Sequence[RequestRun]) -> dict[PeerId, tuple[SeqRun, ...]]:
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
    if not gathered:
        return {PeerId(name): (SeqRun(first_seq, end_seq - first_seq),)}
    _join(gathered.setdefault(name, []), first_seq, end_seq)
    return {
        PeerId(name): tuple([SeqRun(seqs[k], seqs[k + 1] - seqs[k]) for k in range(0, len(seqs), 2)])
        for name, seqs in gathered.items()
    }


def _join(seqs: list[int], first_seq: int, end_seq: int) -> None:
    if seqs and seqs[-1] == first_seq:
        seqs[-1] = end_seq
    else:
        seqs += (first_seq, end_seq)
