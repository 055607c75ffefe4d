"""What a scheduler's tables say after each of its turns: they agree with each other, and nothing in them is of who is gone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from fabric.ids import BatchId, Incarnation, PeerId, SliceId
from fabric.messages import (
    AnyMessage,
    Directory,
    Done,
    NodeHello,
    RunBatch,
    SliceChanged,
    SliceReady,
    SliceState,
)
from policies.batching.base import NEVER_MS
from roles.scheduler.core import SchedulerCore
from roles.scheduler.dispatch.batches import OVERDUE_AFTER_MS
from tests.chaos.virtual.violated import Violated

if TYPE_CHECKING:
    from tests.chaos.virtual.processes.roles import SchedulerProcess
    from tests.chaos.virtual.world import World

OVER = frozenset({SliceState.FAILED, SliceState.LOST, SliceState.STOPPED})
SOON_MS = 500.0
Hosted = tuple[SliceId, Incarnation]


@dataclass
class _Known:
    """What one core was told, and has said."""

    version: int = -1
    """Of its fleet, when its tables were looked at last."""
    gone: set[Hosted] = field(default_factory=set)
    """Slices of which an agent has said that they are there no more, and no worker the contrary since."""
    told: dict[PeerId, Directory] = field(default_factory=dict)
    """What it has told each peer last."""
    told_version: int = -1
    """Of its fleet, when all had heard of it."""
    untold_since_ms: dict[PeerId, float] = field(default_factory=dict)
    """Who has not, since when."""
    sent: dict[BatchId, tuple[Hosted, float]] = field(default_factory=dict)
    """Batches of which it has heard no end, and since when."""

    def is_untold(self, core: SchedulerCore) -> bool:
        """Whether it has news, and all should have heard of it."""
        return self.told_version != core._fleet.version and core._updates.due_at_ms == NEVER_MS


class SchedulerTables:
    """Of all schedulers of one history."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._known: defaultdict[SchedulerCore, _Known] = defaultdict(_Known)

    def read(self, core: SchedulerCore, message: AnyMessage) -> None:
        """It reads that."""
        known = self._known[core]
        match message:
            case Done(batch_id=batch_id):
                known.sent.pop(batch_id, None)
            case SliceReady(slice_id=slice_id, incarnation=incarnation):
                known.gone.discard((slice_id, incarnation))
                self._forget(known, slice_id)
            case SliceChanged(status=status) if status.state in OVER and status.incarnation:
                known.gone.add((status.slice_id, status.incarnation))
            case NodeHello(node_id=node_id, slices=slices):
                there = {(status.slice_id, status.incarnation) for status in slices}
                records = core._fleet.slices_on(node_id)
                known.gone.update({(one.spec.slice_id, one.incarnation) for one in records} - there)
            case _:
                pass

    def told(self, core: SchedulerCore, peer: PeerId, directory: Directory) -> None:
        """It tells that peer what it knows."""
        self._known[core].told[peer] = directory

    def sent(self, core: SchedulerCore, run: RunBatch) -> None:
        """It sends that batch."""
        known, hosted = self._known[core], (run.slice_id, run.incarnation)
        if hosted in known.gone:
            raise Violated(f"a batch is sent to {hosted}, which its agent has called gone")
        known.sent[run.batch_id] = hosted, self._world.now_ms

    def stopped(self, core: SchedulerCore, batch_id: BatchId) -> None:
        """It tells a worker to stop that batch."""
        self._known[core].sent.pop(batch_id, None)

    def turned(self, scheduler: SchedulerProcess) -> None:
        """It has ended a turn."""
        core = scheduler.core
        if core is None:
            return
        known = self._known[core]
        problem = next(self._of_queues(core), "") or next(self._of_batches(core, known), "")
        if not problem and known.version != core._fleet.version:
            known.version = core._fleet.version
            problem = next(self._of_fleet(core), "")
        if not problem and known.is_untold(core) and not scheduler.replica._is_fresh:
            problem = next(self._of_peers(core, known), "")
        if problem:
            raise Violated(f"{scheduler.place}: {problem}")

    def _forget(self, known: _Known, slice_id: SliceId) -> None:
        """It may have lost that slice in this very turn."""
        for batch_id in [one for one, (hosted, _) in known.sent.items() if hosted[0] == slice_id]:
            del known.sent[batch_id]

    def _of_queues(self, core: SchedulerCore) -> Iterator[str]:
        """What no slice serves waits for the one that comes, and for nothing else."""
        unserved, listed = core._batches.unserved, core._listed
        for model_id, replicas in core._replicas.items():
            if not replicas and (count := core._discipline.queued(model_id)):
                yield f"{count} requests of {model_id} are queued, which no slice serves"
            if replicas and (count := unserved.count(model_id)):
                yield f"{count} requests of {model_id} wait for a slice, of which there are {replicas}"
        for queue in unserved._waiting.values():
            if gone := {run.frontend_id for run in queue.runs} - set(map(str, listed)):
                yield f"requests of {sorted(gone)} wait, who are not listed"

    def _of_batches(self, core: SchedulerCore, known: _Known) -> Iterator[str]:
        """It remembers what it has sent, until it hears the end or gives it up."""
        flights, slices = core._batches.flights, core._fleet.slices
        for batch_id, (hosted, sent_at_ms) in list(known.sent.items()):
            if batch_id in flights:
                continue
            del known.sent[batch_id]
            record = slices.get(hosted[0])
            is_there = record is not None and record.is_ready and record.incarnation == hosted[1]
            if is_there and self._world.now_ms < sent_at_ms + OVERDUE_AFTER_MS:
                yield f"batch {batch_id} on {hosted} is forgotten, which runs on"

    def _of_fleet(self, core: SchedulerCore) -> Iterator[str]:
        fleet = core._fleet
        serving: Counter[str] = Counter()
        for record in fleet.slices.values():
            if record.is_ready and not (record.is_leaving or record.is_draining or record.is_fenced):
                serving.update({one.model_id for one in record.replicas} - record.leaving)
            if record.flights and not record.is_ready:
                yield f"{record.spec.slice_id} has batches in flight, and is {record.state}"
        for model_id, replicas in fleet.replicas.items():
            if serving[model_id] != replicas:
                yield f"{model_id} has {replicas} replicas, of which {serving[model_id]} are served"

    def _of_peers(self, core: SchedulerCore, known: _Known) -> Iterator[str]:
        """All of them have heard what it knows, or hear it soon: who cannot be reached any more is still listed for a moment."""
        news = _news(core._fleet.directory())
        told = {peer: known.told.get(peer) for peer in core._fleet.peers_to_tell()}
        untold = [peer for peer, one in told.items() if one is None or _news(one) != news]
        now_ms = self._world.now_ms
        known.untold_since_ms = {peer: known.untold_since_ms.get(peer, now_ms) for peer in untold}
        for peer, since_ms in known.untold_since_ms.items():
            if now_ms >= since_ms + SOON_MS:
                yield f"{peer} does not hear that it knows {news}"
        if not untold:
            known.told_version = core._fleet.version


def _news(directory: Directory) -> tuple[object, ...]:
    """Without what is another at every moment: of slices on their way only whether there is one."""
    models = tuple(
        model if model.coming_in_ms is None else replace(model, coming_in_ms=0.0)
        for model in directory.models
    )
    return models, directory.slices, directory.frontends
