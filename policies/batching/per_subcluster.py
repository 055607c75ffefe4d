"""One dispatcher per sub-cluster (Symphony section 4.4): they share no model and no slice, so they need not talk.

Sub-clusters are the connected components of models and slices, whatever placement made them. Each has a
discipline of its own, with smaller queues and heaps; a call goes to one of them. With one component there is nothing
to divide, and the plain discipline is used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace

from fabric.ids import FrontendId, ModelId, SliceId
from policies.batching.base import (
    NEVER_MS,
    QUIET,
    BatchDecision,
    BatchModel,
    BatchSlice,
    Discipline,
    Dispatch,
    Drop,
    RequestRun,
)
from policies.batching.rehearsing.question import Question, Rehearsed, Rehearses
from policies.connected_models import components

_GONE_MAX = 16  # models that were removed, beside as many as there are: where they were is remembered


def per_subcluster(make: Callable[[], Discipline], hosted: Iterable[Collection[ModelId]]) -> Discipline:
    """A discipline for slices that host these models: the plain one, or one for each component."""
    found = components(hosted)
    return make() if len(found) < 2 else PerSubcluster([make() for _ in found], found)


class PerSubcluster:
    """One inner discipline per component. A model of none of them belongs to the first.

    Should a slice come that hosts models of several, these become one: its models must have one queue each,
    and it must have one dispatcher. They are not divided again before the next start; that costs nothing but
    the smaller heaps.
    """

    def __init__(self, inner: Sequence[Discipline], found: Sequence[Collection[ModelId]]) -> None:
        assert len(inner) == len(found) > 0
        self._inner = list(inner)
        self._wakes: list[float] = [NEVER_MS] * len(inner)
        self._wake_at_ms = NEVER_MS
        self._rehearsing = [one if isinstance(one, Rehearses) else None for one in inner]
        self._asking: dict[int, None] = {}  # shards that have something to rehearse
        self._asked: int | None = None
        self._shard_of = {model_id: k for k, models in enumerate(found) for model_id in models}
        self._models: dict[ModelId, BatchModel] = {}
        self._slices: dict[SliceId, BatchSlice] = {}
        self._slice_shard: dict[SliceId, int] = {}
        self._free_at_ms: dict[
            SliceId, float
        ] = {}  # as the inner disciplines have them; for a shard that moves

    def add_model(self, model: BatchModel, now_ms: float) -> None:
        """See `Discipline`."""
        self._models[model.model_id] = model
        shard = self._shard_of.setdefault(model.model_id, 0)
        self._inner[shard].add_model(model, now_ms)
        self._done(shard, ())

    def remove_model(self, model_id: ModelId, now_ms: float) -> Sequence[BatchDecision]:
        """See `Discipline`. Added again soon, it goes where it was: slices that host it may still be there."""
        if len(self._shard_of) > 2 * len(self._models) + _GONE_MAX:
            hosted = {model.model_id for slice_ in self._slices.values() for model in slice_.hosted}
            there = self._models.keys() | hosted
            self._shard_of = {one: shard for one, shard in self._shard_of.items() if one in there}
        self._models.pop(model_id, None)
        shard = self._shard_of.get(model_id, 0)
        return self._done(shard, self._inner[shard].remove_model(model_id, now_ms))

    def add_slice(self, slice_: BatchSlice, now_ms: float) -> Sequence[BatchDecision]:
        """See `Discipline`. A slice that connects shards makes them one; a slice may also change its shard."""
        out: list[BatchDecision] = []
        shards = sorted({self._shard_of.setdefault(model.model_id, 0) for model in slice_.hosted}) or [0]
        for other in shards[1:]:
            out.extend(self._merge(other, shards[0], now_ms))
        slice_id, shard = slice_.slice_id, shards[0]
        if self._slice_shard.get(slice_id, shard) != shard:
            out.extend(self.remove_slices((slice_id,), now_ms))
        self._slices[slice_id], self._slice_shard[slice_id] = slice_, shard
        self._free_at_ms[slice_id] = slice_.free_at_ms
        out.extend(self._done(shard, self._inner[shard].add_slice(slice_, now_ms)))
        return out

    def remove_slices(self, slice_ids: Collection[SliceId], now_ms: float) -> Sequence[BatchDecision]:
        """See `Discipline`."""
        gone: dict[int, list[SliceId]] = {}
        for slice_id in slice_ids:
            shard = self._slice_shard.pop(slice_id, None)
            if shard is not None:
                del self._slices[slice_id], self._free_at_ms[slice_id]
                gone.setdefault(shard, []).append(slice_id)
        out: list[BatchDecision] = []
        for shard, its_slices in gone.items():
            out.extend(self._done(shard, self._inner[shard].remove_slices(its_slices, now_ms)))
        return out

    def arrive(self, model_id: ModelId, run: RequestRun, now_ms: float) -> Sequence[BatchDecision]:
        """See `Discipline`."""
        shard = self._shard_of[model_id]
        decisions = self._inner[shard].arrive(model_id, run, now_ms)
        return decisions if decisions is QUIET else self._done(shard, decisions)

    def arrive_again(
        self, model_id: ModelId, runs: Sequence[RequestRun], now_ms: float
    ) -> Sequence[BatchDecision]:
        """See `Discipline`."""
        shard = self._shard_of[model_id]
        return self._done(shard, self._inner[shard].arrive_again(model_id, runs, now_ms))

    def withdraw(
        self, model_id: ModelId, frontend_id: FrontendId, spans: Sequence[tuple[int, int]], now_ms: float
    ) -> None:
        """See `Discipline`."""
        shard = self._shard_of.get(model_id, 0)
        self._inner[shard].withdraw(model_id, frontend_id, spans, now_ms)
        self._done(shard, ())

    def forget_frontend(self, frontend_id: FrontendId, now_ms: float) -> Mapping[ModelId, int]:
        """See `Discipline`."""
        forgotten: dict[ModelId, int] = {}
        for shard, inner in enumerate(self._inner):
            forgotten.update(inner.forget_frontend(frontend_id, now_ms))
            self._done(shard, ())
        return forgotten

    def slice_free(self, slice_id: SliceId, free_at_ms: float, now_ms: float) -> Sequence[BatchDecision]:
        """See `Discipline`."""
        shard = self._slice_shard.get(slice_id)
        if shard is None:
            return ()
        self._free_at_ms[slice_id] = free_at_ms
        return self._done(shard, self._inner[shard].slice_free(slice_id, free_at_ms, now_ms))

    def set_guard_ms(self, guard_ms: float) -> None:
        """See `Discipline`."""
        for shard, inner in enumerate(self._inner):
            inner.set_guard_ms(guard_ms)
            self._done(shard, ())

    def tick(self, now_ms: float) -> Sequence[BatchDecision]:
        """See `Discipline`. Only those that asked for it are called."""
        out: list[BatchDecision] = []
        for shard, wake_at_ms in enumerate(self._wakes):
            if wake_at_ms <= now_ms:
                out.extend(self._done(shard, self._inner[shard].tick(now_ms)))
                one = self._rehearsing[shard]
                if one is not None and one.rehearsal_at_ms <= now_ms:
                    self._asking[shard] = None
        return out

    @property
    def rehearsal_at_ms(self) -> float:
        """See `Rehearses`. One shard asks at a time."""
        return -NEVER_MS if self._asking and self._asked is None else NEVER_MS

    def rehearsal(self, now_ms: float) -> Question | None:
        """See `Rehearses`."""
        while self._asking and self._asked is None:
            shard = next(iter(self._asking))
            del self._asking[shard]
            one = self._rehearsing[shard]
            assert one is not None, "it asked"
            if (question := one.rehearsal(now_ms)) is not None:
                self._asked = shard
                return question
        return None

    def rehearsed(self, answer: Rehearsed, now_ms: float) -> None:
        """See `Rehearses`."""
        if self._asked is not None:
            one = self._rehearsing[self._asked]
            assert one is not None, "it asked"
            one.rehearsed(answer, now_ms)
            self._asked = None

    @property
    def wake_at_ms(self) -> float | None:
        """See `Discipline`. Kept up to date by each call, not asked of every shard."""
        return None if self._wake_at_ms == NEVER_MS else self._wake_at_ms

    def queued(self, model_id: ModelId) -> int:
        """See `Discipline`."""
        return self._inner[self._shard_of.get(model_id, 0)].queued(model_id)

    def _done(self, shard: int, decisions: Sequence[BatchDecision]) -> Sequence[BatchDecision]:
        """After each call to an inner discipline: its next moment, and when it now expects its slices to be free."""
        for decision in decisions:
            if type(decision) is Dispatch:
                self._free_at_ms[decision.slice_id] = decision.start_at_ms + decision.occupied_ms
        old_at_ms, wake_at_ms = self._wakes[shard], self._inner[shard].wake_at_ms
        if wake_at_ms is None:
            wake_at_ms = NEVER_MS
        if wake_at_ms != old_at_ms:
            self._wakes[shard] = wake_at_ms
            if wake_at_ms <= self._wake_at_ms:
                self._wake_at_ms = wake_at_ms
            elif old_at_ms == self._wake_at_ms:
                self._wake_at_ms = min(self._wakes)
        return decisions

    def _merge(self, source: int, target: int, now_ms: float) -> list[BatchDecision]:
        """Hand everything of one shard to another, through the interface itself: models, slices, then queues."""
        out: list[BatchDecision] = []
        moved = [model_id for model_id, shard in self._shard_of.items() if shard == source]
        slices = [slice_id for slice_id, shard in self._slice_shard.items() if shard == source]
        out.extend(self._done(source, self._inner[source].remove_slices(slices, now_ms)))
        queued: list[tuple[ModelId, RequestRun]] = []
        for model_id in moved:
            for decision in self._done(source, self._inner[source].remove_model(model_id, now_ms)):
                if isinstance(decision, Drop) and decision.model_id == model_id:
                    queued.extend((model_id, run) for run in decision.runs)
                else:
                    out.append(decision)
            self._shard_of[model_id] = target
            if model_id in self._models:
                self._inner[target].add_model(self._models[model_id], now_ms)
        for slice_id in slices:
            self._slice_shard[slice_id] = target
            slice_ = replace(self._slices[slice_id], free_at_ms=self._free_at_ms[slice_id])
            out.extend(self._done(target, self._inner[target].add_slice(slice_, now_ms)))
        for model_id, run in queued:
            out.extend(self._done(target, self._inner[target].arrive(model_id, run, now_ms)))
        self._done(target, ())
        return out
