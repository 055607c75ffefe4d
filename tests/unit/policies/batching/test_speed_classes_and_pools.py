"""Speed classes, pools, and which of them serve a model."""

from __future__ import annotations

import pytest

from fabric.ids import ModelId, SliceId
from policies.batching.base import NEVER_MS, BatchSlice, HostedModel
from policies.batching.matchmaking.pools import Pool, Slice
from policies.batching.matchmaking.slice_pools import SlicePools
from policies.batching.matchmaking.speed_classes import SpeedClasses
from tests.batching_stage import hosted, linear

M = ModelId("m")


def classes() -> SpeedClasses:
    made = SpeedClasses(M)
    first, _ = made.classify((10.0, 12.0, 14.0))
    made.keep(first)
    return made


def test_equal_tables_are_one_class_whose_table_is_theirs() -> None:
    known = classes()
    class_, table = known.classify((10.0, 12.0, 14.0))
    assert class_.table is table
    assert class_.step == 0


@pytest.mark.parametrize(("factor", "step"), [(1.01, 1), (1.05, 1), (1.06, 2), (0.99, 0), (0.94, -1)])
def test_tables_a_little_slower_or_faster_are_rounded_up_in_steps_of_5_percent(
    factor: float, step: int
) -> None:
    class_, table = classes().classify([factor * ms for ms in (10.0, 12.0, 14.0)])
    assert class_.step == step
    assert all(own <= bound for own, bound in zip(table[1:-1], class_.table[1:-1], strict=True))
    assert class_.table[1] <= table[1] * 1.051


def test_a_table_of_another_speed_or_shape_is_a_reference_of_its_own() -> None:
    known = classes()
    for exec_ms in ((20.0, 24.0, 28.0), (10.0, 14.0, 18.0), (10.0, 12.0)):
        class_, table = known.classify(exec_ms)
        assert class_.table is table


def test_a_class_is_forgotten_with_its_last_pool() -> None:
    known = classes()
    class_, _ = known.classify((10.0, 12.0, 14.0))
    known.keep(class_)
    assert not known.release(class_)
    assert known.release(class_)
    again, _ = known.classify((10.0, 12.0, 14.0))
    assert again is not class_


def slices_of(pool: Pool[object], *free_at_ms: float) -> list[Slice]:  # type: ignore[type-var]
    made = [Slice(SliceId(f"s{order}"), order, {}, free) for order, free in enumerate(free_at_ms)]
    for slice_ in made:
        pool.join(slice_)
    return made


def test_a_pool_finds_the_lowest_order_that_is_free_by_then() -> None:
    pool: Pool[object] = Pool((), is_lowest=True)  # type: ignore[type-var]
    first, second, third = slices_of(pool, 30.0, 10.0, 0.0)
    assert pool.find(5.0) is third
    assert pool.find(10.0) is second
    assert pool.find(30.0) is first
    # Looked at with a longer horizon before, not free by the shorter one now.
    assert pool.find(5.0) is third
    pool.free_from(third, 50.0)
    assert pool.find(5.0) is None
    assert pool.next_free_at_ms() == 10.0


def test_a_pool_finds_the_longest_idle_if_told_so() -> None:
    pool: Pool[object] = Pool((), is_lowest=False)  # type: ignore[type-var]
    first, second, third = slices_of(pool, 30.0, 10.0, 20.0)
    assert pool.find(40.0) is second
    pool.leave(second)
    assert pool.find(40.0) is third
    pool.free_from(third, 60.0)
    assert pool.find(40.0) is first
    assert pool.find(25.0) is None


def batch_slice(name: str, *models: HostedModel, order: int = 0) -> BatchSlice:
    return BatchSlice(SliceId(name), order, models)


def test_slices_with_equal_models_and_speeds_share_a_pool() -> None:
    fleet = SlicePools(is_lowest=True)
    a, b = hosted("a", linear(1, 5, 8)), hosted("b", linear(2, 9, 8))
    assert fleet.put(batch_slice("s0", a, b)) == {"a", "b"}
    assert fleet.put(batch_slice("s1", b, a)) == set()
    assert fleet.put(batch_slice("s2", a)) == {"a"}
    assert fleet.slices[SliceId("s0")].pool is fleet.slices[SliceId("s1")].pool
    assert [len(pools) for pools in fleet.pools_of(ModelId("a")).values()] == [2]
    assert [len(pools) for pools in fleet.pools_of(ModelId("b")).values()] == [1]


def test_a_pool_goes_with_its_last_slice() -> None:
    fleet = SlicePools(is_lowest=True)
    fleet.put(batch_slice("s0", hosted("a", linear(1, 5, 8))))
    fleet.put(batch_slice("s1", hosted("a", linear(1, 5, 8))))
    assert fleet.drop(SliceId("s0")) == set()
    assert fleet.drop(SliceId("s1")) == {"a"}
    assert fleet.drop(SliceId("s1")) == set()
    assert fleet.pools_of(ModelId("a")) == {}


def test_a_correction_of_a_few_percent_leaves_the_slice_in_its_pool() -> None:
    fleet = SlicePools(is_lowest=True)
    table = linear(1, 5, 8)
    fleet.put(batch_slice("s0", hosted("a", table)))
    fleet.put(batch_slice("s1", hosted("a", table)))
    faster = [0.95 * ms for ms in table]
    assert fleet.put(batch_slice("s1", hosted("a", faster))) == set()
    assert fleet.slices[SliceId("s1")].tables[ModelId("a")][1:-1] == faster
    slower = [1.02 * ms for ms in table]
    assert fleet.put(batch_slice("s1", hosted("a", slower))) == {"a"}
    assert len(fleet.pools_of(ModelId("a"))) == 2


def test_a_pool_keeps_nothing_of_slices_that_were_busy_until_further_notice() -> None:
    pool: Pool[object] = Pool((), is_lowest=True)  # type: ignore[type-var]
    slice_ = Slice(SliceId("a"), 0, {}, 0.0)
    pool.join(slice_)
    for now_ms in range(100):
        assert pool.find(float(now_ms)) is slice_
        pool.free_from(slice_, NEVER_MS)
        assert pool.find(float(now_ms)) is None
        assert pool.next_free_at_ms() == NEVER_MS
        pool.free_from(slice_, now_ms + 1.0)
        assert pool.next_free_at_ms() == now_ms + 1.0
    assert len(pool._busy) <= 2
