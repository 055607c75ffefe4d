"""The frontend's decisions: each request it accepts gets exactly one final answer, in time or as a refusal.

Three things are owned here and nowhere else: the payload (by handle), the remaining budget, the one answer.
Everything another process says about a request is advice. The deadline timer answers even if all of them are
gone; a result that comes later is counted and dropped.

What is gathered in one turn of the shell's loop is announced when the turn ends: while `has_gathered`, the
shell feeds `TurnEnded` after it has handed over what it heard. That adds no wait, for the turn of a lone
request ends with it.

A cluster has one or more shards, each with a scheduler (`shards.py`). A request is announced to the shard that has its
model, and only that shard decides about it, until it gives it back or the request is announced again. A scheduler that
lists this frontend after a time in which none of its shard did (`registration.py`) is told again of whatever was never
granted: a restarted one has forgotten it. What bears a lower epoch than the highest one of the shard is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from fabric.errors import (
    REQUEST_ERRORS,
    Cancelled,
    DeadlineExceeded,
    Internal,
    ModelNotFound,
    NoReplica,
    Overloaded,
    WorkerLost,
)
from fabric.ids import ModelId, PeerId
from fabric.messages import (
    Answer,
    AnyMessage,
    Arrivals,
    BatchFailed,
    CancelRequest,
    Directory,
    Dropped,
    FiguresAsked,
    FrontendHello,
    Grant,
    Inputs,
    InputsReturned,
    Left,
    ModelInfo,
    ModelsAsked,
    ModelsListed,
    Ping,
    RecordsAsked,
    Returned,
    SeqRun,
    StatusAsked,
    Withdraw,
    split_runs,
)
from roles.applications.tally import StageTally
from roles.frontend.admission import (
    admit,
    budget_left_ms,
    is_here_already,
    way_kept_ms,
)
from roles.frontend.announced_runs import coded
from roles.frontend.directory import lists
from roles.frontend.drain import Drain
from roles.frontend.estimates import Estimates
from roles.frontend.events import (
    Asked,
    ClientSaid,
    Computed,
    DropSlice,
    FrontendAction,
    FrontendEvent,
    FrontendSettings,
    InputsMade,
    InputsNotMade,
    KeepRow,
    OpenSlice,
    Preprocessed,
    PreprocessFailed,
    PushInputs,
    Release,
    Reply,
    Report,
    SchedulerLost,
    SchedulerSaid,
    Tell,
    TurnEnded,
    Unannounced,
    Unpushed,
    UseScheduler,
    WorkerSaid,
)
from roles.frontend.grants import part_of
from roles.frontend.graphs.applications import Applications
from roles.frontend.graphs.steps import AnswerRequest, AskTask, CancelTask, RefuseRequest
from roles.frontend.ledger import settle
from roles.frontend.peer_checks import FrontendPeerChecks
from roles.frontend.recorder import ABANDONED, RequestRecorder
from roles.frontend.request_lifecycle import RequestLifecycle, refusal
from roles.frontend.requests import NO_HEAD, BatchSlot, Pending, Request, RequestState, RequestTransition
from roles.frontend.return_margin import ReturnMargin, ReturnPath
from roles.frontend.shards import Rerouted, ShardLink, Shards
from roles.runtime.core import Lost, Tick
from roles.runtime.peer_checks import Offences, Verdict
from roles.runtime.process_events import StopAsked

SHARDS_WAIT_MS: Final = 1_000.0  # of a start: a shard that does not answer by then is down
_INPUTS_BACK: Final = "its worker gave its inputs back"
ID_DIGITS = (
    6  # of an incarnation in a request's name: two frontends are told apart, and people can still type it
)
_COUNTED: Final = (
    "abandoned",
    "accepted",
    "announced_again",
    "answers",
    "epochs_refused",
    "grants",
    "inputs_returned",
    "late_cancels",
    "missed_grants",
    "pushes_refused",
    "refusals",
    "refused_at_door",
    "requests_announced",
    "requests_moved",
    "returns",
    "runs_announced",
    "scheduler_lost",
    "schedulers_changed",
    "tasks",
    "tasks_answered",
    "tasks_cancelled",
    "tasks_refused",
    "withdraws",
    *(f"refused_{code}" for code in REQUEST_ERRORS),
)
"""In the status from the start, so that whoever watches one sees its first step too."""


class FrontendCore:
    """One frontend, without its sockets, from `now_ms` on.

    `make_margin`: how it learns what to keep back of a model's budgets; a simulation without jitter knows.
    """

    def __init__(
        self,
        settings: FrontendSettings,
        now_ms: float = 0.0,
        make_margin: Callable[[], ReturnMargin] = ReturnPath,
    ) -> None:
        self._settings = settings
        self._shards = Shards(settings, now_ms)
        self._pending = Pending()
        self._checks = FrontendPeerChecks(self._pending)
        self.offences: Offences = self._checks.offences
        """Of its peers."""
        self.recorder = RequestRecorder()
        self._id_prefix = f"{settings.incarnation[:ID_DIGITS]}-"
        self._estimates = Estimates(make_margin)
        began_at_ms = now_ms if settings.fan_outs_from_ms is None else settings.fan_outs_from_ms
        self._applications = Applications(settings.applications, began_at_ms)
        self._ready_from_ms = now_ms + SHARDS_WAIT_MS
        """From then on it takes requests though not all shards are linked."""
        self._drain = Drain(settings.incarnation, settings.memory)
        self._counts = Counter(dict.fromkeys(_COUNTED, 0))
        self._requests = RequestLifecycle(
            self._shards, self._pending, self._applications, self._estimates, self.recorder, self._counts
        )
        self._now_ms = now_ms
        self._out = self._requests.begin(now_ms)

    @property
    def wake_at_ms(self) -> float | None:
        """The earliest deadline, the next hello, or when a scheduler has said nothing for too long of inputs that are back."""
        deadline_at_ms, back_at_ms = self._pending.next_deadline_at_ms, self._pending.inputs_back_until_ms
        if back_at_ms is None and self._shards.are_linked and not self._drain.has_begun:
            return deadline_at_ms
        drained_at_ms = self._drain.wake_at_ms(self._now_ms)
        moments = (deadline_at_ms, back_at_ms, self._shards.wake_at_ms, drained_at_ms)
        return min((moment for moment in moments if moment is not None), default=None)

    def is_drained(self, now_ms: float) -> bool:
        """Whether it was asked to stop, and may."""
        return self._drain.is_over(len(self._pending), now_ms)

    @property
    def has_gathered(self) -> bool:
        """Whether `TurnEnded` would announce something."""
        return bool(self._requests.gatherer.gathered)

    @property
    def models(self) -> tuple[ModelInfo, ...]:
        """The models, and applications, that clients may ask for."""
        return (*self._shards.told(self._now_ms), *self._applications.listed(self._shards, self._now_ms))

    @property
    def counters(self) -> Mapping[str, float]:
        """What happened since the start: accepted = answers + refusals + abandoned + pending.

        The same holds for requests of stages: tasks = tasks_answered + tasks_refused + tasks_cancelled + tasks_pending.
        """
        ended = ("tasks_answered", "tasks_refused", "tasks_cancelled")
        tasks = self._counts["tasks"] - sum(self._counts[name] for name in ended)
        gauges = {
            "is_ready": float(self._is_ready),
            "shards_linked": float(sum(link.is_linked for link in self._shards.links)),
            "pending": len(self._pending) - tasks,
            "pending_bytes": self._pending.size_bytes + self._applications.kept_bytes,
            "reserve_ms_max": self._estimates.reserve_ms_max,
        }
        if self._settings.applications:
            gauges["tasks_pending"] = tasks
        return {**self._counts, **self.offences.counters, **gauges}

    @property
    def stage_tallies(self) -> Mapping[ModelId, Mapping[str, StageTally]]:
        """What became of the requests of stages, by application."""
        return self._applications.tallies

    @property
    def margins_ms(self) -> Mapping[ModelId, float]:
        """What is kept back of each model's budgets for the way back."""
        return self._estimates.reserves_ms

    @property
    def _is_ready(self) -> bool:
        """Whether clients should come: a shard that is down for long keeps the models of the others from nobody."""
        shards = self._shards
        return shards.are_linked or (
            self._now_ms >= self._ready_from_ms and any(link.is_linked for link in shards.links)
        )

    def handle(self, event: FrontendEvent, now_ms: float) -> Sequence[FrontendAction]:
        """Take one event; deadlines that have come by `now_ms` are answered before it is looked at."""
        self._now_ms = now_ms
        out = self._out = self._requests.begin(now_ms)
        if isinstance(event, PreprocessFailed):  # the better answer where its deadline has come too
            self._requests.preprocess_failed(event.payload, event.code, event.reason)
        while (late := self._pending.expired(now_ms)) is not None:
            if late.is_application and self._applications.time_up(late):
                self._go_on()
                continue
            self._doubt_scheduler(late)
            self._note_expired(late)
            self._requests.refuse(late, DeadlineExceeded, _why_late(late))
        back_at_ms = self._pending.inputs_back_until_ms
        if back_at_ms is not None and back_at_ms <= now_ms:
            for request in self._pending.unsaid(now_ms):
                self._requests.returned(request, _INPUTS_BACK)
        match event:
            case Asked(peer, message):
                if self._is_clients(peer, message):
                    self._on_asked(event)
                else:
                    out.append(Release(event.payload))
            case TurnEnded():
                self._requests.announce()
            case SchedulerSaid(message, epoch, scheduler, shard):
                link = self._shards.links[shard]
                is_of_the_active_one = epoch == link.registration.epoch or self._adopts(
                    link, epoch, scheduler
                )
                if is_of_the_active_one and self._checks.scheduler(message, now_ms) is None:
                    self._on_scheduler(message, link)
            case Computed():
                self._on_computed(event)
            case Tick():
                for link in self._shards.links:
                    self._say(link.registration.hello_if_unlinked(now_ms), link)
            case ClientSaid(peer, message):
                if self._is_clients(peer, message):
                    self._on_client(peer, message)
            case Preprocessed(payload):
                self._requests.preprocessed(payload)
            case InputsMade(job, made):
                out.extend(self._applications.made(job, made, self._shards, self._no_room_for_tasks))
            case InputsNotMade(job, code, reason):
                self._applications.not_made(job, code, reason)
            case WorkerSaid(message):
                if self._checks.worker(message, now_ms) is None:
                    self._on_worker(message)
            case Unannounced(message, shard):
                self._on_unannounced(message, self._shards.links[shard])
            case Unpushed():
                self._on_unpushed(event)
            case SchedulerLost(scheduler, shard):
                link = self._shards.links[shard]
                if scheduler == link.registration.scheduler:
                    self._unlink(link)
            case StopAsked():
                out.extend(Reply(peer, unready) for peer, unready in self._drain.begin(now_ms))
            case Lost(peer):
                self._abandon(peer)
        if self._applications.events:
            self._go_on()
        return out

    # ------------------------------------------------------------ clients

    def _is_clients(self, peer: PeerId, message: AnyMessage) -> bool:
        """Whether that client may say it."""
        self._drain.heard(peer)
        verdict = self._checks.client(peer, message, self._now_ms)
        if verdict is Verdict.CUT_OFF:
            self._abandon(peer)
        return verdict is None

    def _abandon(self, client: PeerId) -> None:
        self.offences.forget(client)
        self._drain.gone(client)
        for request in self._pending.of_client(client):
            self._counts["abandoned"] += 1
            self.recorder.refused(request, ABANDONED, "its client went away", self._now_ms)
            self._requests.finish(request)

    def _on_asked(self, asked: Asked) -> None:
        if is_here_already(asked, self._pending):
            self._out.append(Release(asked.payload))  # the answer that it will have is this one's too
            return
        name = asked.message.model_id
        is_application = name in self._applications
        application = self._applications.asked(asked, self._shards, self._now_ms) if is_application else None
        admitted = admit(asked, self._shards, self._pending, self._settings, self._now_ms, application)
        if not isinstance(admitted, ModelInfo):
            self._counts["refused_at_door"] += 1
            whose = self._shards.heads.get(name)
            self.recorder.turned_away(
                name if whose is None else whose.head_of, admitted.error.code, self._now_ms
            )
            self._out.append(Release(asked.payload))
            number, why = asked.message.request_no, admitted.reason
            self._out.append(Reply(asked.peer, refusal(number, admitted.error, why, admitted.retry_after_ms)))
            return
        self._counts["accepted"] += 1
        info = admitted
        model_id = info.head_of or info.model_id
        self.recorder.asked(model_id, self._now_ms)
        deadline_at_ms = self._now_ms + budget_left_ms(asked, info)
        request = Request(
            client=asked.peer,
            number=asked.message.request_no,
            model_id=model_id,
            payload=asked.payload,
            tensors=len(asked.specs),
            size_bytes=asked.size_bytes,
            asked_at_ms=self._now_ms,
            due_at_ms=deadline_at_ms - way_kept_ms(asked, info),
            deadline_at_ms=deadline_at_ms,
            is_ready=True,
            priority=asked.message.priority,
            request_id=f"{self._id_prefix}{self._counts['accepted']:x}",
            is_application=is_application,
            head=info.model_id if info.head_of else NO_HEAD,
        )
        if is_application:
            self._applications.enter(request)
            self._pending.add(request)
        else:
            self._requests.take_on(request, info, asked.specs)

    def _on_client(self, peer: PeerId, message: AnyMessage) -> None:
        match message:
            case CancelRequest(request_no):
                request = self._pending.numbered(peer, request_no)
                if request is None:
                    self._counts["late_cancels"] += 1
                else:
                    self._requests.refuse(request, Cancelled, "cancelled by its client")
            case ModelsAsked():
                self._out.append(Reply(peer, ModelsListed(self.models)))
            case StatusAsked():
                self._out.append(Report(peer))
            case RecordsAsked():
                self._out.append(Reply(peer, self.recorder.remembered(message, self._now_ms)))
            case FiguresAsked(after):
                self._out.append(Reply(peer, self.recorder.figures(after, self._now_ms)))
            case Ping(number):
                self._out.append(Reply(peer, self._drain.pong(number, is_linked=self._is_ready)))

    # ------------------------------------------------------------ the scheduler

    def _on_scheduler(self, message: AnyMessage, link: ShardLink) -> None:
        match message:
            case Grant():
                self._on_grant(message, link)
            case Dropped(model_id, runs, code, reason, retry_after_ms):
                dropped = self._requests.queued(model_id, runs, link)
                if code == ModelNotFound.code:
                    self._on_forgotten(dropped, model_id, link)
                    return
                if retry_after_ms is None and code != NoReplica.code:  # else no margin is to blame
                    self._estimates.note_dropped(model_id, len(dropped))
                for request in dropped:
                    self._requests.dropped(request, code, reason, retry_after_ms)
            case Returned(batch_id, model_id, runs, reason):
                self._counts["returns"] += 1
                for request in self._requests.granted(batch_id, model_id, runs, link):
                    self._requests.returned(request, reason)
            case Directory():
                self._on_directory(message, link)

    def _adopts(self, link: ShardLink, epoch: int, scheduler: int) -> bool:
        """Whether that is a higher epoch than the one known: whoever has it is the active scheduler."""
        if epoch < link.registration.epoch:
            self._counts["epochs_refused"] += 1
            return False
        self._unlink(link)  # whoever begins an epoch may know nothing of what was announced before
        link.has_heard = False
        if link.registration.follow(scheduler, epoch, self._now_ms):
            self._counts["schedulers_changed"] += 1
            self._out.append(UseScheduler(scheduler, link.number))
        return True

    def _on_grant(self, grant: Grant, link: ShardLink) -> None:
        self._counts["grants"] += 1
        queued = self._requests.queued(grant.model_id, grant.runs, link)
        if not link.known.has(grant.slice_id, grant.incarnation):
            for request in queued:
                self._requests.give_back(
                    request, WorkerLost, f"slice {grant.slice_id} was lost before its inputs were sent"
                )
            return
        part = part_of(queued)
        for request in part.missed:
            self._counts["missed_grants"] += 1
            self._requests.leave_queue(request)
            request.step(RequestTransition.MISS)
        for request, error, reason in part.unfit:
            self._requests.give_back(request, error, reason)
        for request in part.live:
            self._requests.leave_queue(request)
            request.step(RequestTransition.GRANT)
            place = BatchSlot(
                grant.batch_id,
                grant.slice_id,
                self._now_ms,
                grant.waited_ms,
                grant.reason,
                link.registration.generation,
            )
            self._pending.enter_slice(request, place)
        inputs = Inputs(
            grant.batch_id,
            grant.slice_id,
            grant.incarnation,
            grant.model_id,
            self._settings.frontend_id,
            grant.part,
            live_seqs=tuple(request.seq for request in part.live),
            heads=tuple(request.head for request in part.live if request.head),
        )
        info = link.known.models.get(grant.model_id)
        names = tuple(tensor.name for tensor in info.inputs) if info is not None else ()
        self._out.append(PushInputs(inputs, tuple(request.payload for request in part.live), names))

    def _on_unpushed(self, event: Unpushed) -> None:
        self._counts["pushes_refused"] += 1
        inputs = event.message
        runs = tuple(SeqRun(seq, 1) for seq in inputs.live_seqs)
        for request in self._requests.granted(inputs.batch_id, inputs.model_id, runs):
            if event.code:
                self._requests.give_back(request, REQUEST_ERRORS.get(event.code, Internal), event.reason)
            else:
                reason = f"slice {inputs.slice_id} does not take inputs as fast as they come"
                self._requests.give_back(request, Overloaded, reason)

    def _on_unannounced(self, message: Arrivals | Left, link: ShardLink) -> None:
        """A control queue is only full when its reader is stuck or not there: to us that is the same."""
        taken: Sequence[Request] = ()
        if isinstance(message, Arrivals):
            runs = (SeqRun(message.first_seq, message.count),)
            taken = self._requests.take_back(self._requests.announced(message.model_id, runs, link))
        self._unlink(link)
        for request in taken:  # where it was unlinked before, its models have gone to other shards already
            self._requests.gather(request)

    def _on_directory(self, directory: Directory, link: ShardLink) -> None:
        was_linked = link.is_linked
        is_listed = lists(directory, self._settings.frontend_id, self._settings.incarnation)
        change, rerouted = self._shards.heard(link, directory, is_listed=is_listed, now_ms=self._now_ms)
        applications = self._applications.listed(self._shards, self._now_ms)
        self.recorder.know((*self._shards.models.values(), *applications))
        for slice_ in change.gone:
            self._out.append(DropSlice(slice_.slice_id, slice_.incarnation))
        for slice_ in change.come:
            self._out.append(OpenSlice(slice_.slice_id, slice_.incarnation, slice_.addresses))
        if not is_listed:
            self._unlink(link)
        elif not was_linked:
            self._announce_all_again(link)
        self._follow(rerouted)
        for slice_ in change.gone:
            for request in self._pending.on_slice(slice_.slice_id):
                reason = f"slice {slice_.slice_id} was lost"
                may_have_run = not request.are_inputs_back
                self._requests.give_back(request, WorkerLost, reason, may_have_run=may_have_run)
        if change.removed:
            removed = set(change.removed)
            announced = (one for one in self._pending if one.shard == link.number and one.model_id in removed)
            self._move(one for one in announced if self._shards.of(one.model_id) is not None)
        if rerouted.removed:
            self._refuse_removed(set(rerouted.removed))

    def _follow(self, rerouted: Rerouted) -> None:
        """Models that go to another shard now: what has not been announced goes there, what has been stays where it is."""
        if rerouted.moved:
            moved = set(rerouted.moved)
            for request in self._pending:
                if request.model_id in moved and request.stage is RequestState.GATHERED:
                    self._requests.gather(request)
        for link, left in self._shards.untold():
            self._out.append(Tell(left, link.number))

    def _move(self, requests: Iterable[Request]) -> None:
        """Announced to a shard that has forgotten their model, while another one has it: announce them there."""
        for request in self._requests.take_back(requests):
            self._counts["requests_moved"] += 1
            self._requests.gather(request)

    def _on_forgotten(self, requests: Iterable[Request], model_id: ModelId, link: ShardLink) -> None:
        """Their shard has their model no more; it may be another one's."""
        if self._shards.of(model_id) not in (None, link):
            self._move(requests)
            return
        for request in requests:
            self._requests.leave_queue(request)
            self._requests.refuse_forgotten(request)

    def _refuse_removed(self, removed: set[ModelId]) -> None:
        for model_id in removed:
            self._estimates.forget(model_id)
        # What a worker already has it may finish.
        for request in [
            one for one in self._pending if one.model_id in removed and one.stage is not RequestState.GRANTED
        ]:
            self._requests.refuse_forgotten(request)

    def _announce_all_again(self, link: ShardLink) -> None:
        """All that is queued there, or was. A scheduler that was only silent still has it: take that back."""
        stale: dict[ModelId, list[int]] = {}
        for request in tuple(self._pending):  # one that was granted too often is refused
            is_queued = request.stage is RequestState.ANNOUNCED or request.are_inputs_back
            if is_queued and request.shard == link.number:
                stale.setdefault(request.model_id, []).append(request.seq)
                if request.are_inputs_back:
                    self._requests.returned(request, _INPUTS_BACK)
                    continue
                self._requests.take_back((request,))
                self._requests.gather(request)
            elif request.stage is RequestState.GATHERED and self._shards.of(request.model_id) is link:
                self._requests.gather(request)
        for model_id, seqs in stale.items():
            self._out.extend(Tell(Withdraw(model_id, runs), link.number) for runs in split_runs(coded(seqs)))

    def _unlink(self, link: ShardLink) -> None:
        if link.registration.unlink(self._now_ms):
            self._counts["scheduler_lost"] += 1
            self._requests.forget_gathered(one for one in link.known.models if self._shards.of(one) is link)
            self._follow(self._shards.reroute(link.known.models))

    @property
    def hello(self) -> FrontendHello:
        """Who it is."""
        return self._shards.links[0].registration.hello

    def _say(self, hello: FrontendHello | None, link: ShardLink) -> None:
        if hello is not None:
            link.has_heard = False  # with a hello a scheduler begins anew with us
            self._out.append(Tell(hello, link.number))

    def _doubt_scheduler(self, late: Request) -> None:
        """A request expired in its queue, though its budget there is tighter than ours.

        So the scheduler may have restarted before we took it for lost, or lost us while we heard it well.
        """
        if late.stage is RequestState.ANNOUNCED:
            link = self._shards.links[late.shard]
            self._say(link.registration.hello_if_doubted(self._now_ms), link)

    def _note_expired(self, late: Request) -> None:
        """Its outputs, if a worker is at it, may still tell how late they are."""
        if late.stage is RequestState.GRANTED and not late.are_inputs_back:
            self._estimates.note_expired(late)

    # ------------------------------------------------------------ workers

    def _on_computed(self, event: Computed) -> None:
        outputs = event.message
        self._estimates.note_outputs(outputs, self._now_ms)
        wrong = next((spec for spec in event.specs if spec.shape[:1] != (len(outputs.seqs),)), None)
        is_first = True
        for row, request in self._checks.granted(outputs, self._now_ms):
            request.unread -= 1
            if wrong is not None:
                shape = list(wrong.shape)
                self._requests.refuse(
                    request, Internal, f"output {wrong.name!r} of {len(outputs.seqs)} requests is {shape}"
                )
            else:
                ledger = settle(request, outputs, self._now_ms)
                self.recorder.answered(request, ledger, self._now_ms)
                if is_first and outputs.seqs[row] == request.seq:
                    self._estimates.note_batch(request.model_id, ledger.return_ms)
                    is_first = False
                self._estimates.note_end(request, self._now_ms)
                self._requests.finish(request)
                if request.task is not None:
                    self._counts["tasks_answered"] += 1
                    kept = self._applications.keep(request.task, event.specs, ledger)
                    if kept:
                        self._out.append(KeepRow(event.payload, row, kept))
                    continue
                self._counts["answers"] += 1
                answer = Answer(request.number, ledger, may_be_read=request.may_be_read)
                self._out.append(Reply(request.client, answer, event.payload, row))
        self._out.append(Release(event.payload))

    def _on_worker(self, message: AnyMessage) -> None:
        if isinstance(message, InputsReturned):
            for request in self._pending.granted_to(message):
                self._counts["inputs_returned"] += 1
                if self._is_granter_there(request):
                    self._pending.note_inputs_back(request, self._now_ms, is_stopped=message.is_stopped)
                else:
                    self._requests.returned(request, message.reason)
            return
        assert isinstance(message, BatchFailed), "outputs come as what was computed"
        for row, request in self._checks.granted(message, self._now_ms):
            if request.stage is RequestState.GRANTED and request.seq == message.seqs[row]:
                self._requests.refuse(request, REQUEST_ERRORS.get(message.code, Internal), message.reason)

    def _is_granter_there(self, granted: Request) -> bool:
        """Whether its scheduler may still say what becomes of it."""
        generation = self._shards.links[granted.shard].registration.generation
        return granted.place is not None and granted.place.generation == generation

    # ------------------------------------------------------------ applications

    @property
    def _no_room_for_tasks(self) -> str:
        """Why no more requests of stages can be taken on. For what was begun there is as much room again as for what is new."""
        pending, settings = self._pending, self._settings
        size_bytes = pending.size_bytes + self._applications.kept_bytes
        if len(pending) < 2 * settings.pending_max and size_bytes < 2 * settings.pending_bytes_max:
            return ""
        return f"{len(pending)} requests, of {size_bytes} bytes, are pending here"

    def _go_on(self) -> None:
        """Do what follows for applications from all that happened."""
        for step in self._applications.steps(self._shards.models, self._now_ms):
            match step:
                case AskTask(request, info, specs):
                    self._counts["tasks"] += 1
                    self.recorder.asked(request.model_id, self._now_ms, is_of_stage=True)
                    self._requests.take_on(request, info, specs)
                case CancelTask(request):
                    if self._now_ms >= request.due_at_ms:
                        self._note_expired(request)
                    self._counts["tasks_cancelled"] += 1
                    self._requests.finish(request)
                case AnswerRequest(request, ledger, reply):
                    self._requests.finish(request)
                    self.recorder.answered(request, ledger, self._now_ms)
                    self._counts["answers"] += 1
                    self._out.append(reply)
                case RefuseRequest(request, error, reason, retry_after_ms):
                    self._requests.refuse(request, error, reason, retry_after_ms)
                case action:
                    self._out.append(action)


def _why_late(request: Request) -> str:
    if not request.is_ready:
        return request.drop_reason or "its picture was still being decoded when its budget ended"
    return f"no result of model {request.asked_name!r} within the budget"
