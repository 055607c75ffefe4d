"""Messages that somebody has to answer: what is announced to a scheduler, granted to a worker, or told a frontend.

They are followed on the connections, whatever the roles count themselves. An answer is due as long as the connection is whole by
which its question came, and who was asked has not forgotten the other one for a reason of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from fabric.ids import BatchId, Epoch, FrontendId, ModelId, role_id_of
from fabric.messages import (
    AnyMessage,
    Arrivals,
    Directory,
    Done,
    Dropped,
    FrontendHello,
    Grant,
    NodeHello,
    Part,
    PreemptBatch,
    Returned,
    RunBatch,
    SeqRun,
    SliceChanged,
    SliceReady,
    Withdraw,
)
from roles.frontend.requests import Pending, Request, RequestState
from roles.scheduler.core import SchedulerCore
from tests.chaos.virtual.processes.roles import FrontendProcess, SchedulerProcess, WorkerProcess
from tests.chaos.virtual.scheduler_tables import SchedulerTables
from tests.chaos.virtual.violated import Violated

if TYPE_CHECKING:
    from tests.chaos.virtual.processes.network import Owner, Wire
    from tests.chaos.virtual.world import World

Seq = tuple[ModelId, int]
"""As a frontend has announced a request."""
LATE_MS: Final = 60.0
"""After the loosest deadline of what was announced a scheduler has said what becomes of it."""
LOST_MS: Final = 500.0
"""After its grant a request that no worker has is not granted any more."""
_ABOUT_SLICES: Final = frozenset({Done, NodeHello, SliceChanged, SliceReady})
_READ: Final = _ABOUT_SLICES | {Arrivals, Withdraw, FrontendHello, RunBatch, Dropped, Returned}
_SAID: Final = frozenset({Directory, Grant, Dropped, Returned, RunBatch, PreemptBatch, Done})
BATCHES_MAX: Final = 2
"""That a slice has: one runs, and one waits."""


class AnswersDue:
    """Of one history."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._tables = SchedulerTables(world)
        self._announced: defaultdict[Wire, dict[Seq, float]] = defaultdict(dict)
        """With the moment, on the world's clock, by which a scheduler has to speak of it."""
        self._withdrawn: defaultdict[Wire, set[Seq]] = defaultdict(set)
        """While they were queued. What has been granted already is left out by its frontend, also where it is queued and granted again."""
        self._withdrawals: list[tuple[Wire, Seq]] = []
        """In this turn: who reads much at once grants some before it looks at the rest."""
        self._granted_now: set[tuple[Wire, Seq]] = set()
        """In this turn, too."""
        self._grants: defaultdict[BatchId, list[tuple[Wire, Grant, dict[Seq, float]]]] = defaultdict(list)
        """With what was due of each request before."""
        self._newest: dict[tuple[Wire, Seq], BatchId] = {}
        """Of each request the batch that it was granted a place in last."""
        self._commands: defaultdict[Wire, set[BatchId]] = defaultdict(set)
        """Batches of which a worker has not told the end."""
        self._to_return: list[tuple[Wire, SchedulerCore, Done, Part]] = []
        """What did not run, as the scheduler has read whose turn it is: it says so in this turn."""
        self._to_end: list[tuple[Request, int]] = []
        """Requests, and their seqs, that will not run, as the frontend has read whose turn it is: it keeps none of them as they were."""

    # ------------------------------------------------------------ what is heard and said

    def read(self, wire: Wire, reader: Owner, epoch: Epoch, message: AnyMessage) -> None:
        """A process reads a message."""
        if type(message) not in _READ:
            return
        if (
            type(message) in _ABOUT_SLICES
            and isinstance(reader, SchedulerProcess)
            and reader.core is not None
        ):
            self._tables.read(reader.core, message)
        match reader, message:
            case SchedulerProcess(core=SchedulerCore() as core), Done():
                if message.batch_id in core._batches.flights:
                    self._to_return.extend((wire, core, message, part) for part in message.missing)
            case SchedulerProcess(core=SchedulerCore() as core), _ if wire.name in core._listed:
                self._from_frontend(wire, reader, core, message)
            case WorkerProcess(incarnation=incarnation), RunBatch(batch_id=batch_id, incarnation=asked):
                if asked == incarnation:
                    self._commands[wire].add(batch_id)
            case FrontendProcess(), Dropped() | Returned():
                self._to_frontend(reader, epoch, message)

    def said(self, speaker: Owner, wire: Wire, messages: Sequence[AnyMessage]) -> None:
        """A process says something, whether or not the queue takes it."""
        for message in messages:
            if type(message) not in _SAID:
                continue
            match speaker, message:
                case SchedulerProcess(), Grant():
                    self._granted(wire, message)
                case SchedulerProcess(), Dropped(model_id, runs):
                    for seq in _seqs(runs):
                        self._announced[wire].pop((model_id, seq), None)
                        self._newest.pop((wire, (model_id, seq)), None)
                case SchedulerProcess(), Returned(batch_id, _, runs):
                    told = batch_id, Part(FrontendId(role_id_of(wire.name)), runs)
                    self._to_return = [one for one in self._to_return if (one[2].batch_id, one[3]) != told]
                case SchedulerProcess(core=SchedulerCore() as core), Directory():
                    self._tables.told(core, wire.name, message)
                case SchedulerProcess(core=SchedulerCore() as core), RunBatch(slice_id=slice_id):
                    flights = core._fleet.slices[slice_id].flights
                    if len(flights) > BATCHES_MAX:
                        raise Violated(f"{slice_id} has {len(flights)} batches in flight")
                    self._world.monitor.commanded(wire.near.owner, speaker.replica.epoch)
                    self._tables.sent(core, message)
                case SchedulerProcess(core=SchedulerCore() as core), PreemptBatch(batch_id=batch_id):
                    self._tables.stopped(core, batch_id)
                    for other, _, due in self._grants.pop(batch_id, ()):
                        # Unless they are granted or refused already: who speaks to several says it to one after the other.
                        newest = self._newest
                        again = {seq: due[seq] for seq in due if newest.get((other, seq)) == batch_id}
                        self._await(other, speaker, core, again)
                case WorkerProcess(), Done(batch_id=batch_id):
                    self._commands[wire].discard(batch_id)

    def turned(self, process: Owner) -> None:
        """A process has ended its turn."""
        if isinstance(process, SchedulerProcess):
            self._tables.turned(process)
        for wire, seq in self._withdrawals:
            if (wire, seq) not in self._granted_now:
                self._withdrawn[wire].add(seq)
        self._withdrawals.clear()
        self._granted_now.clear()
        to_return, self._to_return = self._to_return, []
        for worker, core, done, part in to_return:
            is_active = isinstance(process, SchedulerProcess) and process.core is core
            if not is_active or core._fleet.slices[done.slice_id].worker != worker.name:
                continue  # its lease has lapsed, or the worker was lost, in the same turn
            for wire, _, _ in self._grants[done.batch_id]:
                is_listed = core._listed.get(wire.name) == part.frontend_id
                if is_listed and not wire.is_broken:
                    raise Violated(f"{process.place} has not told {wire.name} that {part.runs} did not run")
        to_end, self._to_end = self._to_end, []
        for request, number in to_end:
            if request.seq == number and request.stage in {RequestState.ANNOUNCED, RequestState.GRANTED}:
                raise Violated(f"{process.place} keeps request {request.number}, which will not run")
        if isinstance(process, FrontendProcess):
            core_ = process.shell._core
            gone = core_._pending._by_slice.keys() - core_._shards.links[0].known._slices.keys()
            if gone:
                raise Violated(f"{process.place} waits for slices {sorted(gone)}, which are gone")
            self._look_for_lost(process, core_._pending)

    def _look_for_lost(self, frontend: FrontendProcess, pending: Pending) -> None:
        """Whoever granted it, and however that one ended: nothing waits long for a batch that its worker does not have."""
        world = self._world
        if not pending._by_slice:
            return
        back_until_ms = pending.inputs_back_until_ms
        if back_until_ms is not None and frontend.now_ms() - back_until_ms > LOST_MS:
            raise Violated(f"{frontend.place} keeps requests whose inputs are back, and nobody says anything")
        disturbed_until_ms = max(path.disturbed_until_ms for path in world.network.paths)
        for worker in world.workers_alive():
            since_ms = max(disturbed_until_ms, frontend.resumed_at_ms, worker.resumed_at_ms)
            if worker.is_stopped or since_ms + LOST_MS > world.now_ms:
                continue
            for slice_id, slice_ in worker.shell._core._slices.items():
                for request in pending.on_slice(slice_id):
                    place = request.place
                    assert place is not None, "it is on a slice"
                    granted_ago_ms = frontend.now_ms() - place.granted_at_ms
                    was_disturbed = world.now_ms - granted_ago_ms < since_ms  # a full queue drops outputs
                    # One whose inputs are back waits for a moment, or for a scheduler that has it queued.
                    if granted_ago_ms < LOST_MS or was_disturbed or request.are_inputs_back:
                        continue
                    if slice_.queue.find(place.batch_id) is None:
                        what = f"request {request.number}, granted {granted_ago_ms:.0f} ms ago"
                        raise Violated(f"{frontend.place} keeps {what}, and {slice_id} has not its batch")

    def unsettled(self) -> Iterator[str]:
        """What nobody has answered though all is well."""
        for wire, batches in self._commands.items():
            if batches and not wire.is_broken:
                yield f"{wire.near.owner.place} has not told the end of {sorted(batches)}"

    # ------------------------------------------------------------ frontends

    def _to_frontend(self, frontend: FrontendProcess, epoch: Epoch, message: Dropped | Returned) -> None:
        core = frontend.shell._core
        if epoch != core._shards.links[0].registration.epoch:
            return
        for request in core._pending.at(message.model_id, message.runs):
            place = request.place
            if isinstance(message, Dropped) or (place is not None and place.batch_id == message.batch_id):
                self._to_end.append((request, request.seq))

    # ------------------------------------------------------------ schedulers

    def _from_frontend(
        self, wire: Wire, scheduler: SchedulerProcess, core: SchedulerCore, message: AnyMessage
    ) -> None:
        match message:
            case Arrivals(model_id, first_seq, count):
                budget_ms = message.budget_ms + message.span_ms + message.slack_ms
                due_at_ms = self._world.now_ms + budget_ms + LATE_MS
                due = dict.fromkeys(
                    ((model_id, seq) for seq in range(first_seq, first_seq + count)), due_at_ms
                )
                self._await(wire, scheduler, core, due)
            case Withdraw(model_id, runs):
                for seq in _seqs(runs):
                    if self._announced[wire].pop((model_id, seq), None) is not None:
                        self._withdrawals.append((wire, (model_id, seq)))
            case FrontendHello():
                self._announced[wire].clear()
            case _:
                pass

    def _await(
        self, wire: Wire, scheduler: SchedulerProcess, core: SchedulerCore, due: dict[Seq, float]
    ) -> None:
        self._announced[wire] |= due
        look = partial(self._look, wire, scheduler, core, due, scheduler.slept_ms)
        self._world.at(max(due.values(), default=0.0), look)

    def _look(
        self,
        wire: Wire,
        scheduler: SchedulerProcess,
        core: SchedulerCore,
        due: dict[Seq, float],
        slept_ms: float,
    ) -> None:
        left = [seq for seq in due if seq in self._announced[wire]]
        is_over = scheduler.is_dead or scheduler.core is not core or wire.name not in core._listed
        if not left or wire.is_broken or is_over:
            return
        if scheduler.is_stopped:
            scheduler.when_running(partial(self._look, wire, scheduler, core, due, slept_ms))
            return
        due_at_ms = max(max(due.values()) + scheduler.slept_ms - slept_ms, scheduler.resumed_at_ms + LATE_MS)
        if self._world.now_ms < due_at_ms:
            self._world.at(due_at_ms, partial(self._look, wire, scheduler, core, due, slept_ms))
            return
        raise Violated(f"{scheduler.place} has not said what becomes of {left} of {wire.name}")

    def _granted(self, wire: Wire, grant: Grant) -> None:
        due = {}
        for seq in _seqs(grant.runs):
            key = grant.model_id, seq
            if key in self._withdrawn[wire]:
                raise Violated(f"{wire.name} has withdrawn {key}, and is granted it")
            due_at_ms = self._announced[wire].pop(key, None)
            self._newest[wire, key] = grant.batch_id
            self._granted_now.add((wire, key))
            if due_at_ms is not None:
                due[key] = due_at_ms
        self._grants[grant.batch_id].append((wire, grant, due))


def _seqs(runs: Sequence[SeqRun]) -> Iterator[int]:
    for run in runs:
        yield from range(run.first_seq, run.first_seq + run.count)
