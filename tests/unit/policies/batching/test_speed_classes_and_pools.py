"""Speed classes, pools, and which of them serve a model."""

from __future__ import annotations

import random
from collections import defaultdict

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


def test_the_correction_of_one_model_leaves_the_others_where_they_are() -> None:
    fleet = SlicePools(is_lowest=True)
    table = linear(1, 5, 8)
    others = [hosted(f"m{number}", table) for number in range(50)]
    fleet.put(batch_slice("s0", hosted("a", table), *others))
    pool = fleet.slices[SliceId("s0")].pool
    before = [dict(fleet.pools_of(one.model_id)) for one in others]
    slower = linear(2, 10, 8)
    assert fleet.put(batch_slice("s0", hosted("a", slower), *others)) == {"a"}
    assert [fleet.pools_of(one.model_id) for one in others] == before
    ((class_, pools),) = fleet.pools_of(ModelId("a")).items()
    assert (tuple(class_.table[1:-1]), pools) == (slower, [pool])


def test_a_corrected_slice_joins_the_pool_of_those_that_are_like_it() -> None:
    fleet = SlicePools(is_lowest=True)
    a, slow, b = hosted("a", linear(1, 5, 8)), hosted("a", linear(2, 10, 8)), hosted("b", linear(1, 5, 8))
    fleet.put(batch_slice("s0", a, b))
    fleet.put(batch_slice("s1", slow, b))
    assert fleet.put(batch_slice("s0", slow, b)) == {"a", "b"}
    pools = {slice_.pool for slice_ in fleet.slices.values()}
    assert [pool.size for pool in pools if pool is not None] == [2]


def test_what_a_slice_hosted_before_it_was_corrected_is_classified_anew() -> None:
    fleet = SlicePools(is_lowest=True)
    given = (hosted("a", linear(1, 5, 8)), hosted("b", linear(1, 5, 8)))
    fleet.put(BatchSlice(SliceId("s0"), 0, given))
    fleet.put(batch_slice("s0", hosted("a", linear(2, 10, 8)), given[1]))
    fleet.put(batch_slice("s1", *given))
    fleet.put(BatchSlice(SliceId("s2"), 0, given))
    assert fleet.slices[SliceId("s1")].pool is fleet.slices[SliceId("s2")].pool


@pytest.mark.parametrize("seed", range(20))
def test_however_slices_come_go_and_are_corrected_pools_are_those_that_they_are_in(seed: int) -> None:
    rng = random.Random(seed)
    fleet, given = SlicePools(is_lowest=True), dict[str, list[HostedModel]]()
    tables = {scale: linear(scale, 5 * scale, 4) for scale in (1.0, 1.02, 1.06, 1.3, 2.0)}
    for _ in range(300):
        name, what = f"s{rng.randrange(4)}", rng.random()
        if what < 0.1:
            fleet.drop(SliceId(name))
            given.pop(name, None)
            continue
        if name not in given or what < 0.2:
            given[name] = [hosted(one, tables[1.0]) for one in rng.sample("abc", rng.randint(1, 3))]
        elif what < 0.9:
            place = rng.randrange(len(given[name]))
            given[name][place] = hosted(given[name][place].model_id, rng.choice(list(tables.values())))
        fleet.put(batch_slice(name, *given[name]))
        pools = {id(slice_.pool): slice_.pool for slice_ in fleet.slices.values()}
        expected = defaultdict[ModelId, dict[object, list[int]]](lambda: defaultdict(list))
        for pool in pools.values():
            assert pool is not None
            for class_ in pool.classes:
                expected[class_.model_id][class_].append(id(pool))
        assert len({pool.classes for pool in pools.values() if pool is not None}) == len(pools)
        for model in "abc":
            by_class = fleet.pools_of(ModelId(model))
            found = {class_: sorted(map(id, its_pools)) for class_, its_pools in by_class.items()}
            assert found == {class_: sorted(ids) for class_, ids in expected[ModelId(model)].items()}
            assert all(class_.pools == len(its_pools) for class_, its_pools in by_class.items())
        for slice_name, models in given.items():
            slice_ = fleet.slices[SliceId(slice_name)]
            assert slice_.pool is not None
            bounds = {class_.model_id: class_.table for class_ in slice_.pool.classes}
            assert bounds.keys() == {one.model_id for one in models}
            for one in models:
                own_ms, bound_ms = slice_.tables[one.model_id][1:-1], bounds[one.model_id][1:-1]
                assert own_ms == list(one.exec_ms)
                assert all(own <= bound <= 1.103 * own for own, bound in zip(own_ms, bound_ms, strict=True))


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
