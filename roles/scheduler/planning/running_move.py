"""A move, carried out: start new, wait until it is warm, switch, drain old (gpulet's reorganisation).

New and old are slices, and replicas on slices that serve on (`changes`).

 starting --all firsts ready--> stopping first --all others ready--> draining --all ends gone--> done
     |                                |
     +-------- a start failed --------+--> rolling back --all starts gone--> failed

Ready is what the worker says when every batch bucket is warm. The new slices get batches from that moment; the
old ones get none from the moment at which all new ones are ready, and end when their last batch has. Where there is no
memory for both (`after`), old slices end first, once those starts that need not wait are ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from fabric.ids import ModelId, SliceId
from fabric.messages import LeftOut, MoveInfo, NewSlice, ReplicaHint, SliceState
from roles.scheduler.fleet import Fleet, SliceRecord
from roles.scheduler.planning.actuator import Actuator, OrderOf
from roles.scheduler.planning.usable_gpus import GpuPresence

# For each model of a slice, one after the other: 30 s for the process to start, 120 s for the model, and once again.
START_LIMIT_MS = 300_000.0
DRAIN_LIMIT_MS = 10_000.0  # a batch whose `Done` was lost is given up sooner
LINGER_MS = 100.0  # after its last `Done`: that batch's outputs go another way to the frontends

Named = Callable[[NewSlice], NewSlice]


class MoveState(Enum):
    """Where a move is."""

    STARTING = "starting"
    DRAINING = "draining"
    ROLLING_BACK = "rolling back"
    DONE = "done"
    FAILED = "failed"


@dataclass(slots=True)
class _Changed:
    """A slice that serves on: what is loaded there, and what is to be let go."""

    added: frozenset[ModelId]
    removed: frozenset[ModelId]
    hints_before: tuple[ReplicaHint, ...]


@dataclass(slots=True)
class _Draining:
    """A slice, or these of its `models`."""

    record: SliceRecord
    since_ms: float
    models: frozenset[ModelId] | None = None
    idle_since_ms: float | None = None

    @property
    def is_busy(self) -> bool:
        if not self.record.is_ready:
            return False
        return any(self.models is None or one.model_id in self.models for one in self.record.flights)


class RunningMove:
    """One move. `starts` have their names; `reason` says why it failed."""

    def __init__(
        self,
        move: MoveInfo,
        starts: Sequence[NewSlice],
        order_of: OrderOf,
        rename: Named,
        presence: GpuPresence,
    ) -> None:
        self.move = move
        self.stage = MoveState.STARTING
        self.reason = ""
        self.starts = tuple(starts)
        self._order_of = order_of
        self._rename = rename
        self._presence = presence
        self._begun: dict[SliceId, NewSlice] = {}
        self._changed: dict[SliceId, _Changed] = {}
        self._draining: dict[SliceId, _Draining] = {}
        self._stopped: list[NewSlice] = []
        """Slices that ended before what comes in their place was there; for a roll-back, then under their next names."""
        self._loads_since_ms: float | None = None
        """When the last slice was begun; of a move that only changes slices, when it began."""

    @property
    def is_begun(self) -> bool:
        """Whether anything was done."""
        return self._loads_since_ms is not None

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do."""
        return self.stage in (MoveState.DONE, MoveState.FAILED)

    def advance(self, fleet: Fleet, actuator: Actuator, now_ms: float) -> None:
        """Do what can be done now; to be called whenever a slice may have changed."""
        if self._loads_since_ms is None:
            self._loads_since_ms = now_ms
        if self.stage is MoveState.STARTING:
            self._start(fleet, actuator, now_ms)
        self._end_drained(fleet, actuator, now_ms)
        if self.stage is MoveState.STARTING:  # room may have been made just now
            self._start(fleet, actuator, now_ms)
        if self.stage is MoveState.DRAINING and not self._draining:
            self.stage = MoveState.DONE
        if self.stage is MoveState.ROLLING_BACK and not self._draining:
            for old in self._stopped:
                actuator.start(old, self._order_of(old.node_id, old.spec))
            self.stage = MoveState.FAILED

    def give_up(self, reason: str, fleet: Fleet, actuator: Actuator, now_ms: float) -> None:
        """Undo it: what was started ends, what runs stays."""
        self.reason = reason
        self.stage = MoveState.ROLLING_BACK
        for start in self._not_begun():
            fleet.starts.cancel(start.spec.slice_id)
        self._stopped = [self._rename(old) for old in self._stopped]
        for old in self._stopped:
            _expect(old, fleet, now_ms)
        for slice_id in self._begun:
            record = fleet.slices.get(slice_id)
            if record is not None:
                self._drain(record, actuator, now_ms)
        for slice_id, changed in self._changed.items():
            record = fleet.slices.get(slice_id)
            if record is not None:
                actuator.hint(record, changed.hints_before, now_ms)
                self._drain(record, actuator, now_ms, changed.added)

    # ------------------------------------------------------------ starting

    def _not_begun(self) -> list[NewSlice]:
        return [start for start in self.starts if start.spec.slice_id not in self._begun]

    def _start(self, fleet: Fleet, actuator: Actuator, now_ms: float) -> None:
        self._change(fleet, actuator, now_ms)
        for start in self._not_begun():
            if not any(one in fleet.slices for one in start.after):
                self._begun[start.spec.slice_id] = start
                self._loads_since_ms = now_ms
                actuator.start(start, self._order_of(start.node_id, start.spec))
        problem = self._problem(fleet, now_ms)
        if problem:
            self.give_up(problem, fleet, actuator, now_ms)
            return
        ready = {slice_id for slice_id in self._begun if _is_ready(fleet, slice_id)}
        firsts = {start.spec.slice_id for start in self.starts if not start.after}
        are_changed = all(
            _hosts(fleet, slice_id, changed.added) for slice_id, changed in self._changed.items()
        )
        if firsts <= ready and are_changed:
            for start in self._not_begun():
                _expect(start, fleet, now_ms)
            for slice_id in dict.fromkeys(one for start in self.starts for one in start.after):
                record = fleet.slices.get(slice_id)
                if record is not None and not record.is_draining:
                    self._drain(record, actuator, now_ms)
                    was = NewSlice(record.node_id, record.spec, record.hints)
                    self._stopped.append(was)
        if len(ready) == len(self.starts) and are_changed:
            self.stage = MoveState.DRAINING
            for slice_id in self.move.ends:
                record = fleet.slices.get(slice_id)
                if record is not None:
                    self._drain(record, actuator, now_ms)
            for slice_id, changed in self._changed.items():
                record = fleet.slices.get(slice_id)
                if record is not None and changed.removed:
                    self._drain(record, actuator, now_ms, changed.removed)

    def _change(self, fleet: Fleet, actuator: Actuator, now_ms: float) -> None:
        """Load what is new on slices that serve on."""
        for change in self.move.changes:
            record = fleet.slices.get(change.slice_id)
            if record is None or change.slice_id in self._changed:
                continue
            there = {model.model_id for model in record.spec.models}
            wanted = {model.model_id for model in change.models}
            added, removed = frozenset(wanted - there), frozenset(there - wanted)
            self._changed[change.slice_id] = _Changed(added, removed, record.hints)
            actuator.widen(record, change, self._order_of, now_ms)

    def _problem(self, fleet: Fleet, now_ms: float) -> str:
        # A slice that only loses models may be in any state: that may be why they go elsewhere.
        loading = (slice_id for slice_id, changed in self._changed.items() if changed.added)
        for slice_id in (*self._begun, *loading):
            record = fleet.slices.get(slice_id)
            if record is None:
                return f"slice {slice_id} is gone"
            if record.state == SliceState.FAILED:
                return f"slice {slice_id} failed: {record.reason}"
            if not record.is_ready and self._presence.is_absent(record):
                return f"the GPU of slice {slice_id} has gone"
            for out in self._left_out_of(record):
                if not self._is_left_out_already(fleet, out.model_id):
                    return f"slice {slice_id} cannot host {out.model_id}: {out.reason}"
        assert self._loads_since_ms is not None, "only `advance` calls this"
        limit_ms = START_LIMIT_MS * self._loads_in_turn
        if now_ms - self._loads_since_ms > limit_ms:
            return f"not ready within {limit_ms / 1e3:g} s"
        return ""

    @property
    def _loads_in_turn(self) -> int:
        """How many models one slice must load, one after the other."""
        starts = (len(start.spec.models) for start in self._begun.values())
        changes = (len(changed.added) for changed in self._changed.values())
        return max((1, *starts, *changes))

    def _left_out_of(self, record: SliceRecord) -> Iterator[LeftOut]:
        """What it cannot host and should by this move."""
        changed = self._changed.get(record.spec.slice_id)
        return (out for out in record.left_out if changed is None or out.model_id in changed.added)

    def _is_left_out_already(self, fleet: Fleet, model_id: ModelId) -> bool:
        """Whether the move loses nothing by it: nobody serves the model, and where it should be it is left out."""
        if fleet.replicas.get(model_id):
            return False
        for slice_id, record in fleet.slices.items():
            changed = self._changed.get(slice_id)
            is_new = slice_id in self._begun or (changed is not None and model_id in changed.added)
            if not is_new and any(out.model_id == model_id for out in record.left_out):
                return True
        return False

    # ------------------------------------------------------------ draining

    def _drain(
        self,
        record: SliceRecord,
        actuator: Actuator,
        now_ms: float,
        models: frozenset[ModelId] | None = None,
    ) -> None:
        """All of it; or of these models only."""
        if models is None:
            actuator.drain(record, now_ms)
        else:
            actuator.leave(record, models, now_ms)
        self._draining.setdefault(record.spec.slice_id, _Draining(record, now_ms, models))

    def _end_drained(self, fleet: Fleet, actuator: Actuator, now_ms: float) -> None:
        for slice_id, draining in list(self._draining.items()):
            record = draining.record
            if fleet.slices.get(slice_id) is not record:
                del self._draining[slice_id]
                continue
            if draining.is_busy:
                draining.idle_since_ms = None
            elif draining.idle_since_ms is None:
                draining.idle_since_ms = now_ms
            is_quiet = draining.idle_since_ms is not None and (
                not record.is_ready or now_ms - draining.idle_since_ms >= LINGER_MS
            )
            if is_quiet or now_ms - draining.since_ms > DRAIN_LIMIT_MS:
                if draining.models is None:
                    actuator.end(record, now_ms)
                else:
                    actuator.narrow(record, draining.models, self._order_of, now_ms)
                del self._draining[slice_id]


def _expect(start: NewSlice, fleet: Fleet, now_ms: float) -> None:
    """It starts as soon as what is in its place has ended."""
    models = (model.model_id for model in start.spec.models)
    fleet.starts.expect(start.spec.slice_id, models, now_ms + LINGER_MS)


def _is_ready(fleet: Fleet, slice_id: SliceId) -> bool:
    record = fleet.slices.get(slice_id)
    return record is not None and record.is_ready


def _hosts(fleet: Fleet, slice_id: SliceId, models: frozenset[ModelId]) -> bool:
    """Whether these models serve there, or cannot."""
    record = fleet.slices.get(slice_id)
    if record is None or not record.is_ready:
        return not models  # a slice that only loses models need not be there
    there = {one.model_id for one in record.replicas} | {out.model_id for out in record.left_out}
    return models <= there
