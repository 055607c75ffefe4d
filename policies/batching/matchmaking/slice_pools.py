"""Which slices there are, sorted into pools, and which pools serve a model in which speed class."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import attrgetter

from fabric.ids import ModelId, SliceId
from policies.batching.base import NEVER_MS, BatchSlice, HostedModel
from policies.batching.batch_moments import Table, exec_table
from policies.batching.matchmaking.model_state import Candidate
from policies.batching.matchmaking.pools import Pool, Slice
from policies.batching.matchmaking.speed_classes import STEP, SpeedClass, SpeedClasses

# A corrected slice stays in its pool while it is no slower than its classes and less than this much faster:
# corrections wander by a few percent, and every pool more costs each event of its models.
_STAYS = STEP**2

_Kind = tuple[tuple[SpeedClass, ...], dict[ModelId, Table]]


class SlicePools:
    """The slices by id, their pools, and the way from a model to its classes and pools."""

    def __init__(self, *, is_lowest: bool) -> None:
        self.slices: dict[SliceId, Slice] = {}
        self._is_lowest = is_lowest
        self._serial = 0
        self._pools: dict[tuple[SpeedClass, ...], Pool[Candidate]] = {}
        self._classes: dict[ModelId, SpeedClasses] = {}
        self._by_model: dict[ModelId, dict[SpeedClass, list[Pool[Candidate]]]] = {}
        # Thousands of slices usually share one tuple of models: it is classified once. The tuple is kept with
        # its kind, so that its id stays its own; forgotten with the last slice of it.
        self._kinds: dict[int, tuple[tuple[HostedModel, ...], _Kind]] = {}
        self._kind_of: dict[SliceId, int] = {}
        self._slices_of: Counter[int] = Counter()

    def pools_of(self, model_id: ModelId) -> dict[SpeedClass, list[Pool[Candidate]]]:
        """The pools that host a model, by its speed there."""
        return self._by_model.get(model_id, {})

    def put(self, given: BatchSlice) -> set[ModelId]:
        """Add a slice, or replace it; says which models have other pools than before.

        Of a slice that is there only models with other run times are looked at, and they alone have other pools where
        the slice is the only one of its pool: the pool becomes another one.
        """
        old = self.slices.get(given.slice_id)
        kind: _Kind | None = None
        if old is not None and old.order >> 32 == given.order:
            kind = self._corrected(old, given.hosted)
            pool = old.pool
            assert pool is not None
            if kind is not None and (
                kind[0] == pool.classes or (pool.size == 1 and kind[0] not in self._pools)
            ):
                old.hosted, old.tables = given.hosted, kind[1]
                if old.intervals:
                    old.intervals = _intervals(given.hosted)
                pool.free_from(old, given.free_at_ms)
                return set() if kind[0] == pool.classes else self._reclassify(pool, kind[0], given.slice_id)
        was_late = old is not None and old.is_late
        touched = self.drop(given.slice_id)
        classes, tables = kind or self._kind(given)
        pool = self._pools.get(classes)
        if pool is None:
            pool = self._open(classes)
            touched |= {class_.model_id for class_ in classes}
        self._serial += 1
        slice_ = Slice(given.slice_id, (given.order << 32) + self._serial, tables, given.free_at_ms)
        slice_.hosted = given.hosted
        slice_.intervals = _intervals(given.hosted)
        slice_.at_once = _at_once(given.hosted)
        if old is not None and given.free_at_ms == NEVER_MS:
            slice_.due_at_ms, slice_.is_late = old.due_at_ms, was_late
        self.slices[given.slice_id] = slice_
        pool.join(slice_)
        return touched

    def drop(self, slice_id: SliceId) -> set[ModelId]:
        """Forget a slice; says which models have lost a pool."""
        slice_ = self.slices.pop(slice_id, None)
        if slice_ is None or slice_.pool is None:
            return set()
        self._forget_kind(slice_id)
        pool = slice_.pool
        pool.leave(slice_)
        return set() if pool.size else self._close(pool)

    def _corrected(self, old: Slice, hosted: tuple[HostedModel, ...]) -> _Kind | None:
        """What becomes of a slice whose models have other run times; None: it hosts others, or these as another slice does."""
        pool = old.pool
        assert pool is not None
        if hosted is old.hosted:
            return pool.classes, old.tables
        if len(hosted) != len(old.hosted) or id(hosted) in self._kinds:
            return None
        classes, tables = list(pool.classes), dict(old.tables)
        for former, model in zip(old.hosted, hosted, strict=True):
            model_id = model.model_id
            if model_id != former.model_id:
                return None
            if model.exec_ms is former.exec_ms:
                continue
            place = bisect_left(classes, model_id, key=attrgetter("model_id"))
            class_ = classes[place]
            table = exec_table(model.exec_ms)
            if _may_stay(table, class_.table):
                tables[model_id] = class_.table if table == class_.table else table
                continue
            going = class_ if pool.size == 1 and class_.pools == 1 else None
            classes[place], tables[model_id] = self._classes[model_id].classify(model.exec_ms, going)
        return tuple(classes), tables

    def _kind(self, given: BatchSlice) -> _Kind:
        hosted = given.hosted
        self._kind_of[given.slice_id] = id(hosted)
        self._slices_of[id(hosted)] += 1
        known = self._kinds.get(id(hosted))
        if known is not None:
            return known[1]
        classes: list[SpeedClass] = []
        tables: dict[ModelId, Table] = {}
        for model in sorted(hosted, key=lambda model: model.model_id):
            registry = self._classes.setdefault(model.model_id, SpeedClasses(model.model_id))
            class_, tables[model.model_id] = registry.classify(model.exec_ms)
            classes.append(class_)
        kind = (tuple(classes), tables)
        self._kinds[id(hosted)] = (hosted, kind)
        return kind

    def _forget_kind(self, slice_id: SliceId) -> None:
        kind = self._kind_of.pop(slice_id, None)
        if kind is not None:
            self._slices_of[kind] -= 1
            if not self._slices_of[kind]:
                del self._slices_of[kind], self._kinds[kind]

    def _open(self, classes: tuple[SpeedClass, ...]) -> Pool[Candidate]:
        pool = self._pools[classes] = Pool(classes, is_lowest=self._is_lowest)
        for class_ in classes:
            self._host(pool, class_)
        return pool

    def _reclassify(
        self, pool: Pool[Candidate], classes: tuple[SpeedClass, ...], slice_id: SliceId
    ) -> set[ModelId]:
        """A pool's only slice has other classes now; says which models have."""
        self._forget_kind(slice_id)
        moved = [pair for pair in zip(classes, pool.classes, strict=True) if pair[0] is not pair[1]]
        del self._pools[pool.classes]
        pool.classes, self._pools[classes] = classes, pool
        for class_, former in moved:
            self._host(pool, class_)
            self._host_no_more(pool, former)
        return {class_.model_id for class_, _ in moved}

    def _close(self, pool: Pool[Candidate]) -> set[ModelId]:
        del self._pools[pool.classes]
        for class_ in pool.classes:
            self._host_no_more(pool, class_)
        return {class_.model_id for class_ in pool.classes}

    def _host(self, pool: Pool[Candidate], class_: SpeedClass) -> None:
        self._classes[class_.model_id].keep(class_)
        self._by_model.setdefault(class_.model_id, {}).setdefault(class_, []).append(pool)

    def _host_no_more(self, pool: Pool[Candidate], class_: SpeedClass) -> None:
        by_class = self._by_model[class_.model_id]
        by_class[class_].remove(pool)
        if self._classes[class_.model_id].release(class_):
            del by_class[class_]
        if not by_class:  # it is hosted nowhere, and may never come again
            del self._by_model[class_.model_id], self._classes[class_.model_id]


def _may_stay(table: Table, bound: Table) -> bool:
    return len(table) == len(bound) and all(
        run_ms <= bound_ms <= run_ms * _STAYS
        for run_ms, bound_ms in zip(table[1:-1], bound[1:-1], strict=True)
    )


def _intervals(hosted: Iterable[HostedModel]) -> dict[ModelId, Sequence[float]]:
    return {model.model_id: model.interval_ms for model in hosted if model.interval_ms}


def _at_once(hosted: Sequence[HostedModel]) -> float:
    """Batches that run on a slice at a time, by its models' single requests: as many as start while one runs."""
    found = [model.exec_ms[0] / model.interval_ms[0] if model.interval_ms else 1.0 for model in hosted]
    return sum(found) / len(found)
