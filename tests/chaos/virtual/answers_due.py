"""Messages that somebody has to answer: what is announced to a scheduler, granted to a worker, or told a frontend.

They are followed on the connections, whatever the roles count themselves. An answer is due as long as the connection is whole by
which its question came, and who was asked has not forgotten the other one for a reason of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from fabric.ids import BatchId, Epoch, ModelId
from fabric.messages import (
    AnyMessage,
    Arrivals,
    Done,
    Dropped,
    FrontendHello,
    Grant,
    PreemptBatch,
    Returned,
    RunBatch,
    SeqRun,
    Withdraw,
)
from roles.frontend.requests import Request, RequestState
from tests.chaos.virtual.processes.roles import FrontendProcess, SchedulerProcess, WorkerProcess
from tests.chaos.virtual.violated import Violated

if TYPE_CHECKING:
    from roles.scheduler.core import SchedulerCore
    from tests.chaos.virtual.processes.network import Owner, Wire
    from tests.chaos.virtual.world import World

Seq = tuple[ModelId, int]
"""As a frontend has announced a request."""
LATE_MS: Final = 60.0
"""After the loosest deadline of what was announced a scheduler has said what becomes of it."""
BATCHES_MAX: Final = 2
"""That a slice has: one runs, and one waits."""


class AnswersDue:
    """Of one history."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._announced: defaultdict[Wire, dict[Seq, float]] = defaultdict(dict)
        """With the moment, on the world's clock, by which a scheduler has to speak of it."""
        self._withdrawn: defaultdict[Wire, set[Seq]] = defaultdict(set)
        self._grants: defaultdict[BatchId, list[tuple[Wire, Grant, dict[Seq, float]]]] = defaultdict(list)
        """With what was due of each request before."""
        self._commands: defaultdict[Wire, set[BatchId]] = defaultdict(set)
        """Batches of which a worker has not told the end."""
        self._this_turn: list[Callable[[], str]] = []
        """What is wrong if who has read something does not answer it in the same turn; empty: nothing."""

    # ------------------------------------------------------------ what is heard and said

    def read(self, wire: Wire, reader: Owner, epoch: Epoch, message: AnyMessage) -> None:
        """A process reads a message."""
        if isinstance(reader, SchedulerProcess):
            core = reader.core
            if core is not None and wire.name in core._listed:
                self._from_frontend(wire, reader, core, message)
            elif core is not None and isinstance(message, Done) and message.batch_id in core._batches.flights:
                for part in message.missing:
                    self._this_turn.append(partial(self._not_returned, core, message.batch_id, part.runs))
        elif isinstance(reader, WorkerProcess) and isinstance(message, RunBatch):
            if message.incarnation == reader.incarnation:
                self._commands[wire].add(message.batch_id)
        elif isinstance(reader, FrontendProcess) and isinstance(message, Dropped | Returned):
            core_ = reader.shell._core
            if epoch == core_._shards.links[0].registration.epoch:
                for request in core_._pending.at(message.model_id, message.runs):
                    is_of_it = request.place is not None and request.place.batch_id == getattr(
                        message, "batch_id", request.place.batch_id
                    )
                    if isinstance(message, Dropped) or is_of_it:
                        self._this_turn.append(partial(_kept, reader, request, request.seq))

    def said(self, speaker: Owner, wire: Wire, messages: Sequence[AnyMessage]) -> None:
        """A process says something; whether a queue takes it, its business."""
        for message in messages:
            match message:
                case Grant():
                    self._granted(wire, message)
                case Dropped(model_id=model_id, runs=runs):
                    for seq in _seqs(runs):
                        self._announced[wire].pop((model_id, seq), None)
                case Returned(batch_id=batch_id, runs=runs):
                    self._this_turn = [
                        one for one in self._this_turn if getattr(one, "args", ())[1:] != (batch_id, runs)
                    ]
                case RunBatch(slice_id=slice_id) if isinstance(speaker, SchedulerProcess) and speaker.core:
                    flights = speaker.core._fleet.slices[slice_id].flights
                    if len(flights) > BATCHES_MAX:
                        raise Violated(f"{slice_id} has {len(flights)} batches in flight")
                case PreemptBatch(batch_id=batch_id) if (
                    isinstance(speaker, SchedulerProcess) and speaker.core
                ):
                    for other, grant, due in self._grants.pop(batch_id, ()):
                        self._await(other, speaker, speaker.core, dict(due))
                        del grant
                case Done(batch_id=batch_id):
                    self._commands[wire].discard(batch_id)
                case _:
                    pass

    def turned(self, process: Owner) -> None:
        """A process has ended its turn."""
        this_turn, self._this_turn = self._this_turn, []
        for problem in this_turn:
            what = problem()
            if what:
                raise Violated(f"{process.place} {what}")
        if isinstance(process, FrontendProcess):
            core = process.shell._core
            gone = core._pending._by_slice.keys() - core._shards.links[0].known._slices.keys()
            if gone:
                raise Violated(f"{process.place} waits for slices {sorted(gone)}, which are gone")

    def unsettled(self) -> Iterator[str]:
        """What nobody has answered though all is well."""
        for wire, batches in self._commands.items():
            if batches and not wire.is_broken:
                yield f"{wire.near.owner.place} has not told the end of {sorted(batches)}"

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
                    self._announced[wire].pop((model_id, seq), None)
                    self._withdrawn[wire].add((model_id, seq))
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
            if due_at_ms is not None:
                due[key] = due_at_ms
        self._grants[grant.batch_id].append((wire, grant, due))

    def _not_returned(self, core: SchedulerCore, batch_id: BatchId, runs: tuple[SeqRun, ...]) -> str:
        for wire, grant, _ in self._grants[batch_id]:
            if set(_seqs(runs)) & set(_seqs(grant.runs)) and not wire.is_broken and wire.name in core._listed:
                return f"has not told {wire.name} that {runs} of batch {batch_id} did not run"
        return ""


def _kept(frontend: FrontendProcess, request: Request, seq: int) -> str:
    del frontend
    waits = request.stage in {RequestState.ANNOUNCED, RequestState.GRANTED}
    return f"keeps request {request.number}, which will not run" if waits and request.seq == seq else ""


def _seqs(runs: Sequence[SeqRun]) -> Iterator[int]:
    for run in runs:
        yield from range(run.first_seq, run.first_seq + run.count)
