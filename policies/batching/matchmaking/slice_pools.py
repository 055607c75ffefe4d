"""Which slices there are, sorted into pools, and which pools serve a model in which speed class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from fabric.ids import ModelId, SliceId
from policies.batching.base import BatchSlice, HostedModel
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
        """Add a slice, or replace it; says which models have other pools than before."""
        old = self.slices.get(given.slice_id)
        free_at_ms = given.free_at_ms
        if old is not None and old.order >> 32 == given.order:
            tables = _tables_if_it_may_stay(old, given)
            if tables is not None:
                assert old.pool is not None
                old.tables = tables
                if old.intervals:
                    old.intervals = _intervals(given.hosted)
                old.pool.free_from(old, free_at_ms)
                return set()
        touched = self.drop(given.slice_id)
        classes, tables = self._kind(given.hosted)
        pool = self._pools.get(classes)
        if pool is None:
            pool = self._open(classes)
            touched |= {class_.model_id for class_ in classes}
        self._serial += 1
        slice_ = Slice(given.slice_id, (given.order << 32) + self._serial, tables, free_at_ms)
        slice_.intervals = _intervals(given.hosted)
        slice_.at_once = _at_once(given.hosted)
        self.slices[given.slice_id] = slice_
        self._kind_of[given.slice_id] = id(given.hosted)
        self._slices_of[id(given.hosted)] += 1
        pool.join(slice_)
        return touched

    def drop(self, slice_id: SliceId) -> set[ModelId]:
        """Forget a slice; says which models have lost a pool."""
        slice_ = self.slices.pop(slice_id, None)
        if slice_ is None or slice_.pool is None:
            return set()
        kind = self._kind_of.pop(slice_id)
        self._slices_of[kind] -= 1
        if not self._slices_of[kind]:
            del self._slices_of[kind], self._kinds[kind]
        pool = slice_.pool
        pool.leave(slice_)
        return set() if pool.size else self._close(pool)

    def _kind(self, hosted: tuple[HostedModel, ...]) -> _Kind:
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

    def _open(self, classes: tuple[SpeedClass, ...]) -> Pool[Candidate]:
        pool = self._pools[classes] = Pool(classes, is_lowest=self._is_lowest)
        for class_ in classes:
            self._classes[class_.model_id].keep(class_)
            self._by_model.setdefault(class_.model_id, {}).setdefault(class_, []).append(pool)
        return pool

    def _close(self, pool: Pool[Candidate]) -> set[ModelId]:
        del self._pools[pool.classes]
        for class_ in pool.classes:
            by_class = self._by_model[class_.model_id]
            by_class[class_].remove(pool)
            if self._classes[class_.model_id].release(class_):
                del by_class[class_]
            if not by_class:  # it is hosted nowhere, and may never come again
                del self._by_model[class_.model_id], self._classes[class_.model_id]
        return {class_.model_id for class_ in pool.classes}


def _tables_if_it_may_stay(old: Slice, given: BatchSlice) -> dict[ModelId, Table] | None:
    assert old.pool is not None
    classes = {class_.model_id: class_ for class_ in old.pool.classes}
    if classes.keys() != _model_ids(given.hosted):
        return None
    tables: dict[ModelId, Table] = {}
    for model in given.hosted:
        bound = classes[model.model_id].table
        table = exec_table(model.exec_ms)
        if len(table) != len(bound):
            return None
        for run_ms, bound_ms in zip(table[1:-1], bound[1:-1], strict=True):
            if not bound_ms <= run_ms * _STAYS or run_ms > bound_ms:
                return None
        tables[model.model_id] = bound if table == bound else table
    return tables


def _intervals(hosted: Iterable[HostedModel]) -> dict[ModelId, Sequence[float]]:
    return {model.model_id: model.interval_ms for model in hosted if model.interval_ms}


def _at_once(hosted: Sequence[HostedModel]) -> float:
    """Batches that run on a slice at a time, by its models' single requests: as many as start while one runs."""
    found = [model.exec_ms[0] / model.interval_ms[0] if model.interval_ms else 1.0 for model in hosted]
    return sum(found) / len(found)


def _model_ids(hosted: Iterable[HostedModel]) -> set[ModelId]:
    return {model.model_id for model in hosted}
