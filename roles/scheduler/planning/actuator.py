"""What a controller can do to the cluster that is served: slices and models come and go.

Each step leaves the scheduler consistent; messages are gathered until `take`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from collections.abc import Set as AbstractSet

from fabric.ids import ModelId, NodeId, PeerId
from fabric.messages import (
    AnyMessage,
    ChangedSlice,
    HeadSpec,
    ModelSpec,
    NewSlice,
    ReplicaHint,
    SliceSpec,
    SliceState,
)
from policies.batching.base import Discipline
from roles.runtime.core import Send
from roles.scheduler.directory_updates import DirectoryUpdates
from roles.scheduler.dispatch.batches import Batches
from roles.scheduler.dispatch.estimates import Estimates
from roles.scheduler.dispatch.run_time_watch import RunTimeWatch
from roles.scheduler.fleet import Fleet, SliceRecord

OrderOf = Callable[[NodeId, SliceSpec], int]
"""A slice's rank."""


class Actuator:
    """Changes fleet, batches and discipline together."""

    def __init__(
        self,
        fleet: Fleet,
        batches: Batches,
        estimates: Estimates,
        updates: DirectoryUpdates,
        discipline: Discipline,
        run_time_watch: RunTimeWatch,
    ) -> None:
        self._fleet = fleet
        self._batches = batches
        self._estimates = estimates
        self._updates = updates
        self._discipline = discipline
        self._run_time_watch = run_time_watch
        self._actions: list[Send] = []
        self._touched: set[NodeId] = set()
        self._no_longer_served: dict[ModelId, None] = {}
        """By some slice. Who waits for these models is looked at when all is done: another slice for them may have begun to start."""

    def take(self, now_ms: float) -> list[Send]:
        """What all of it means for others, in order: first the directory, then what nodes should host."""
        models, self._no_longer_served = self._no_longer_served, {}
        self._actions.extend(self._batches.give_up_unserved(models, now_ms))
        actions, self._actions = self._actions, []
        if self._touched:
            if self._updates.is_behind:
                actions.extend(self._updates.publish())
            # A node that is away hears when it says hello.
            there = sorted(self._touched & self._fleet.nodes.keys())
            for node_id, desired in self._fleet.desired_on(there).items():
                actions.append(Send(self._fleet.nodes[node_id], desired))
            self._touched.clear()
        return actions

    def send(self, peer: PeerId, message: AnyMessage) -> None:
        """Send a message."""
        self._actions.append(Send(peer, message))

    def queued(self, model_id: ModelId) -> int:
        """How many requests of the model wait."""
        return self._batches.queued(model_id)

    # ------------------------------------------------------------ slices

    def start(self, slice_: NewSlice, order: int) -> None:
        """A slice should exist. It is scheduled on when its worker says that it is ready."""
        self._fleet.add_slice(SliceRecord(slice_.spec, slice_.node_id, order, slice_.hints))
        self._touched.add(slice_.node_id)

    def hint(self, record: SliceRecord, hints: tuple[ReplicaHint, ...], now_ms: float) -> None:
        """What the plan says of a slice; it serves on."""
        former = record.targets
        record.hints = hints
        if record.targets != former and record.takes_batches:
            self._put(record, now_ms)

    def widen(self, record: SliceRecord, change: ChangedSlice, order_of: OrderOf, now_ms: float) -> None:
        """Its worker loads what is new in `change`, beside all that it hosts. What it hosts already stays as it is."""
        there = {model.model_id for model in record.spec.models}
        wanted = {model.model_id for model in change.models}
        self._fleet.respecify(
            record, (*record.spec.models, *(one for one in change.models if one.model_id not in there))
        )
        record.order = order_of(record.node_id, record.spec)
        if record.state == SliceState.FAILED:  # as it was; its agent tries it as it is now
            record.state, record.reason = SliceState.STARTING, ""
        former = tuple(hint for hint in record.hints if hint.model_id not in wanted)
        self.hint(record, (*change.hints, *former), now_ms)
        self._touched.add(record.node_id)

    def leave(self, record: SliceRecord, models: frozenset[ModelId], now_ms: float) -> None:
        """It gets no more batches of these models; those it has come to their end."""
        self._note_no_longer_served(record)
        self._fleet.models_leave(record, models)
        self._updates.note_change(now_ms)
        if record.takes_batches:
            self._put(record, now_ms)

    def narrow(
        self, record: SliceRecord, models: frozenset[ModelId], order_of: OrderOf, now_ms: float
    ) -> None:
        """Its worker forgets these models."""
        self._note_no_longer_served(record)
        self._fleet.respecify(record, tuple(one for one in record.spec.models if one.model_id not in models))
        record.hints = tuple(hint for hint in record.hints if hint.model_id not in models)
        record.order = order_of(record.node_id, record.spec)
        for model_id in models:
            record.speeds.pop(model_id, None)
        if record.takes_batches:
            self._put(record, now_ms)
        self._touched.add(record.node_id)

    def drain(self, record: SliceRecord, now_ms: float) -> None:
        """No more batches for it; those it has come to their end."""
        if record.is_draining:
            return
        self._note_no_longer_served(record)
        self._fleet.slice_drains(record)
        self._updates.note_change(now_ms)
        self._actions.extend(self._batches.withdraw((record,), now_ms))

    def end(self, record: SliceRecord, now_ms: float) -> None:
        """It should not exist any more."""
        self.drain(record, now_ms)
        self._note_no_longer_served(record)
        self._batches.lose(record)
        self._fleet.forget_slice(record)
        self._run_time_watch.forget(record.spec.slice_id)
        self._touched.add(record.node_id)

    def _note_no_longer_served(self, record: SliceRecord) -> None:
        self._no_longer_served |= dict.fromkeys(replica.model_id for replica in record.replicas)

    # ------------------------------------------------------------ models

    def put_models(self, models: Iterable[tuple[ModelSpec, int]], now_ms: float) -> None:
        """Serve models with their priorities, or serve them under what is new of them; without heads with those they have."""
        fresh: set[ModelId] = set()
        for spec, priority in models:
            if spec.model_id not in self._fleet.replicas:
                fresh.add(spec.model_id)
            self._put_model(spec.model_id, spec.slo_ms, priority, spec.heads, now_ms)
            self.put_term(spec.model_id, spec.term, now_ms)
        self._put_hosts(fresh, now_ms)  # slices that hosted them before they were removed may still be there

    def put_slo(self, model_id: ModelId, slo_ms: float, now_ms: float) -> None:
        """Serve a model that is served, under another SLO."""
        self._put_model(model_id, slo_ms, None, (), now_ms)

    def put_term(self, model_id: ModelId, term: int, now_ms: float) -> None:
        """How often it was moved between shards."""
        if self._fleet.put_term(model_id, term):
            self._updates.note_change(now_ms)

    def remove_models(self, model_ids: Collection[ModelId], now_ms: float) -> None:
        """Serve them no more. What waits is refused now, what runs is answered. Others hear once, of all of them."""
        for model_id in model_ids:
            reason = f"model {model_id!r} was removed"
            self._actions.extend(self._batches.retire(model_id, "ModelNotFound", reason, now_ms))
        for model_id in model_ids:
            self._estimates.forget_model(model_id)
            self._fleet.forget_model(model_id)
        self._put_hosts(frozenset(model_ids), now_ms)
        if self._updates.is_behind:
            self._actions.extend(self._updates.publish())

    def _put_model(
        self,
        model_id: ModelId,
        slo_ms: float,
        priority: int | None,
        heads: tuple[HeadSpec, ...],
        now_ms: float,
    ) -> None:
        if self._estimates.put_model(model_id, slo_ms, priority):
            self._fleet.put_model(model_id, slo_ms, heads)
            self._updates.note_change(now_ms)
            self._discipline.add_model(self._estimates.model(model_id), now_ms)

    def _put_hosts(self, model_ids: AbstractSet[ModelId], now_ms: float) -> None:
        """Each slice that hosts any of these."""
        for record in self._fleet.slices.values():
            if record.takes_batches and not record.hosting.exec_ms.keys().isdisjoint(model_ids):
                self._put(record, now_ms)

    def _put(self, record: SliceRecord, now_ms: float) -> None:
        """The discipline's picture of a slice anew."""
        self._actions.extend(self._batches.offer(record, now_ms))
